"""The paper's classification tasks: the table beside our scores, and what it says of the data."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import pandas as pd
import pytest

import paper_tasks
from recipe_runs import run, save_tiny_encoder
from study.additional import PAPER, format_table
from study.table import print_study
from sweeping.runs import best_point, make_runs
from tasks.minimal_pairs import minimal_pairs
from training.errors import RecipeError


SENTENCES = minimal_pairs()["train"]["sentence"][:60]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def data(tmp_path):
    for name, labels in (("sms_spam", ["ham", "spam"] * 30), ("news_aggregator", ["a", "b", "c"] * 20)):
        (tmp_path / name).mkdir()
        for split in ("train", "validation", "test"):
            pd.DataFrame({"text": SENTENCES, "label": labels}).to_csv(tmp_path / name / f"{split}.csv", index=False)
    return tmp_path


def papers(data, encoder, output, *flags):
    run(paper_tasks, "--data", data, "--model_name", encoder, "--output_dir", output, "--use_cpu", "--max_steps", 1,
        *flags)  # fmt: skip


def test_the_papers_averages_come_out():
    """As both print them, up to rounding. Of seventeen tasks: complaints are in two folders."""
    tasks = [task for name, task in PAPER.items() if name != "customer_complaints_product"]
    assert len(tasks) == 17
    houlsby = [mean(column) for column in zip(*(task.houlsby for task in tasks), strict=True)]
    assert houlsby == pytest.approx([72.7, 73.7, 74.0, 73.3], abs=0.1)
    mohebbi = [mean(column) for column in zip(*(task.mohebbi for task in tasks if task.mohebbi[0]), strict=True)]
    assert mohebbi == pytest.approx([71.4, 74.9], abs=0.1)


def test_a_run_of_two_tasks(data, encoder, tmp_path):
    output = tmp_path / "run"
    papers(data, encoder, output, "--tasks", "sms_spam", "news_aggregator")
    *_, spam, news, means = (output / "table.md").read_text().splitlines()
    ours = [
        100 * json.loads((output / name / "results.json").read_text())["test"]["accuracy"]
        for name in ("sms_spam", "news_aggregator")
    ]
    assert spam == (
        f"| sms_spam | 98.5 | 99.3 | 99.3 | 95.1 |  |  | {ours[0]:.1f} | 180 rows, 2 classes; paper: 5,573, 2 |"
    )
    assert news.startswith(
        f"| news_aggregator | 95.2 | 96.3 | 96.5 | 96.2 | 96.3 | 92.2 | {ours[1]:.1f} | 180 rows, 3 "
    )
    assert means.endswith(f"|  |  | {sum(ours) / 2:.1f} |  |")
    assert [float(cell) for cell in means.split("|")[2:6]] == pytest.approx([96.85, 97.8, 97.9, 95.65], abs=0.051)
    run(paper_tasks, "--data", data, "--tasks", "sms_spam", "news_aggregator", "--evaluate", output / "{task}",
        "--output_dir", tmp_path / "again", "--use_cpu")  # fmt: skip
    again = (tmp_path / "again" / "evaluation_table.md").read_text()
    assert again.replace("120 rows", "180 rows") == (output / "table.md").read_text(), "without the training rows"


def test_the_table_of_a_sweep_over_two_tasks(data, encoder, tmp_path):
    """Of each task, the test accuracy at the learning rate that validation has chosen, as the mean over the seeds."""
    axes = {"task": ["sms_spam", "news_aggregator"], "learning_rate": ["1e-3", "1e-1"], "seed": ["0", "1"]}
    flags = ["--data", str(data), "--model_name", str(encoder), "--use_cpu", "--max_steps", "1"]
    runs = make_runs(tmp_path / "out", Path(paper_tasks.__file__), axes, flags)
    for one in runs:
        with patch.object(sys, "argv", one.arguments):
            paper_tasks.main()
    print_study(tmp_path / "out", ["learning_rate"])
    table = (tmp_path / "out" / "study.md").read_text()
    assert table.count("## Test accuracy") == 1, "the tasks are in different tables"
    for task in axes["task"]:
        best = best_point([one for one in runs if one.point["task"] == task])
        accuracies = [
            one.results["test"]["accuracy"]
            for one in runs
            if (one.point["task"], one.point["learning_rate"]) == (task, best["learning_rate"])
        ]
        (line,) = (line for line in table.splitlines() if line.startswith(f"| {task} ") and "paper:" in line)
        assert f"| {100 * mean(accuracies):.1f} | 180 rows" in line


def test_data_of_the_papers_size():
    assert PAPER["crowdflower_emotion"].difference(40_000, 13) == "as in the paper"
    assert "| as in the paper |" in format_table([("sms_spam", 99.0, PAPER["sms_spam"].difference(5_573, 2))])


def test_drawn_examples_are_not_the_papers_data(data, encoder, tmp_path, monkeypatch):
    monkeypatch.setitem(PAPER, "sms_spam", replace(PAPER["sms_spam"], rows=180))
    papers(data, encoder, tmp_path / "run", "--tasks", "sms_spam", "--max_train_samples", 20)
    assert "| 140 rows, 2 classes; paper: 180, 2 |" in (tmp_path / "run" / "table.md").read_text()


def test_two_ways_to_label_the_complaints_are_one_task_in_the_means():
    names = ("sms_spam", "customer_complaints_issue", "customer_complaints_product")
    table = format_table([(name, score, "") for name, score in zip(names, (90.0, 50.0, 70.0), strict=True)])
    cells = [cell.strip() for cell in table.splitlines()[-1].split("|")]
    assert [float(cell) for cell in cells[2:6]] == pytest.approx([76.5, 77.6, 77.85, 75.25], abs=0.051)
    assert cells[8] == "75.0"  # of 90 and of the mean of 50 and 70


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "spam"], "--tasks must be of 20_newsgroups, .*, got 'spam'"),
        (["--tasks", "sms_spam", "20_newsgroups"], r"has no folder 20_newsgroups\. Name the tasks"),
    ],
)
def test_likely_mistakes(data, encoder, tmp_path, flags, message):
    with pytest.raises(RecipeError, match=message):
        papers(data, encoder, tmp_path / "run", *flags)


def test_no_test_split(data, encoder, tmp_path):
    (data / "sms_spam" / "test.csv").unlink()
    with pytest.raises(RecipeError, match="must have a test split"):
        papers(data, encoder, tmp_path / "run", "--tasks", "sms_spam")
