"""A table with several columns of labels: a task for each, in one folder of runs."""

from __future__ import annotations

import json
import sys
from functools import partial, wraps
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers.models.bert.modeling_bert import BertLayer

import houlsby_peft
import text_classification
from demo import minimal_pairs
from houlsby_peft import AdapterError
from houlsby_peft_cli import main
from recipe_runs import results_of, run, write
from run.edge import RecipeError
from tasks import columns


SENTENCES = minimal_pairs()["train"]["sentence"][:60]
LABELS = {
    "topic": ["food", "room", "staff"] * 20,
    "mood": [*["good", "bad"] * 25, *[None] * 10],
    "is it/late?": ["yes", "no", "no"] * 20,
}
TASKS = ("topic", "mood", "is_it_late")
LADDER = {"kind": "ladder", "r": 4, "max_steps": 30, "learning_rate": 3e-2}  # learns some labels


def train(encoder, data, output, **flags: object) -> None:
    run(text_classification, data=data, model_name=encoder, output_dir=output, baseline=False,
        **{"max_steps": 4, **flags})  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "stays.csv", text=SENTENCES, **LABELS)


@pytest.fixture(scope="module")
def ladders(encoder, table, tmp_path_factory):
    """A folder of three ladders, with how many texts the first layer of the encoder has read."""
    folder, texts = tmp_path_factory.mktemp("ladders"), 0
    forward = BertLayer.forward

    @wraps(forward)
    def count(layer, hidden, *args, **kwargs):
        nonlocal texts
        if layer.attention.self.layer_idx == 0:
            texts += len(hidden)
        return forward(layer, hidden, *args, **kwargs)

    with patch.object(BertLayer, "forward", count):
        train(encoder, table, folder, label_columns=[*LABELS], **LADDER)
    return folder, texts


def test_each_column_has_the_run_that_it_has_alone(encoder, table, tmp_path):
    train(encoder, table, tmp_path / "all", label_columns=[*LABELS])
    for column, task in zip(LABELS, TASKS, strict=True):
        train(encoder, table, tmp_path / task, label_columns=column)
        results, alone = results_of(tmp_path / "all" / task), results_of(tmp_path / task)
        assert results["best_scores"] == alone["best_scores"]
        assert results["dataset"]["rows"] == alone["dataset"]["rows"]
        assert results["task"] == column
        weights = load_file(tmp_path / "all" / task / "adapter" / "adapter_model.safetensors")
        expected = load_file(tmp_path / task / "adapter" / "adapter_model.safetensors")
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_the_encoder_reads_each_text_once_for_all_ladders(ladders):
    _, texts = ladders
    # The label check reads each once as well. The first batch of a task tells what a layer returns.
    assert texts <= 2 * 60 + 2 * 32


def test_the_table_of_scores_is_that_of_the_runs(ladders):
    folder, _ = ladders
    rows = pd.read_csv(folder / "scores.csv").set_index("task")
    assert tuple(rows.index) == TASKS
    for task in TASKS:
        results = results_of(folder / task)
        assert rows.validation[task] == results["best_scores"]["accuracy"]
        assert rows.examples[task] == results["dataset"]["rows"]["train"]
    # Rows whose mood is missing teach topics.
    assert rows.examples.to_dict() == {"topic": 48, "mood": 40, "is_it_late": 48}
    assert "10 rows without a label in 'mood' left out" in (folder / "mood" / "log.txt").read_text()


def test_the_doubtful_labels_of_all_columns_are_in_one_table(ladders, table):
    folder, _ = ladders
    issues, whole = pd.read_csv(folder / "label_issues.csv"), pd.read_csv(table)
    pd.testing.assert_frame_equal(issues[[*whole]], whole)
    for task in TASKS:
        suggestions = pd.read_csv(folder / task / "label_issues.csv").suggestion
        assert issues[f"{task}_suggestion"].equals(suggestions)


def test_the_folder_is_no_adapter(ladders):
    with pytest.raises(AdapterError, match=r"such as .*is_it_late.adapter\."):
        houlsby_peft.load(ladders[0])


def test_the_folder_is_evaluated_on_other_data(ladders, tmp_path, monkeypatch):
    folder, _ = ladders
    labels = {name: column[:40] for name, column in LABELS.items()}
    data = write(tmp_path / "new.csv", text=SENTENCES[:40], **labels)

    def become(_, command):
        monkeypatch.setattr(sys, "argv", [*command[1:], "--use_cpu"])
        text_classification.main()

    monkeypatch.setattr("os.execv", become)
    main(["evaluate", str(folder), str(data), "--label_columns", "topic", "is it/late?"])
    rows = pd.read_csv(folder / "evaluation.csv").set_index("task")
    assert [*rows.index] == ["is_it_late", "topic"]
    for task, column in (("topic", "topic"), ("is_it_late", "is it/late?")):
        predicted = houlsby_peft.load(folder / task).predict(list(SENTENCES[:40]))
        right = [answer["label"] for answer in predicted] == np.array(labels[column])
        assert rows.validation[task] == pytest.approx(np.mean(right))
        assert (folder / task / "evaluation.json").exists()


def test_the_same_command_goes_on_where_it_was_killed(
    encoder, table, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "run"
    command = partial(train, encoder, table, output, label_columns=[*LABELS])
    of_one = columns.run

    def fail(command, load):
        if command.arguments.label_columns == ["mood"]:
            raise KeyboardInterrupt
        return of_one(command, load)

    monkeypatch.setattr(columns, "run", fail)
    with pytest.raises(KeyboardInterrupt):
        command()
    finished = (output / "topic" / "results.json").stat().st_mtime_ns
    monkeypatch.undo()
    command()
    assert (output / "topic" / "results.json").stat().st_mtime_ns == finished
    assert len(pd.read_csv(output / "scores.csv")) == 3
    assert len(capsys.readouterr().out.splitlines()) < 40


FLAGS = {"spam": [0, 1] * 30, "late": ["1", "0", "-1"] * 20}


MIXTURE = {"topic": LABELS["topic"], **FLAGS}


@pytest.mark.parametrize(
    ("labels", "flags", "expected"),
    [
        (FLAGS, {}, ["one"]),
        (FLAGS, {"tasks_of_columns": True}, ["spam", "late"]),
        (MIXTURE, {"tasks_of_columns": True}, ["topic", "spam", "late"]),
        ({"topic": LABELS["topic"]}, {}, ["one"]),
    ],
    ids=["columns of 0 and 1", "tasks that are asked for", "a mixture", "a single column"],
)
def test_a_task_for_each_column_or_one_of_all(labels, flags, expected, tmp_path, monkeypatch):
    data = write(tmp_path / "a.csv", text=SENTENCES, **labels)
    trained = []
    monkeypatch.setattr(columns, "run", lambda *_: trained.append("one"))
    monkeypatch.setattr(columns, "_run_tasks", lambda *arguments: trained.extend(arguments[2]))
    run(text_classification, data=data, label_columns=[*labels], **flags)
    assert trained == expected


@pytest.mark.parametrize(
    ("labels", "word", "read"),
    [
        (MIXTURE, "others 0 and 1 only: spam, late", ""),
        ({"topic": LABELS["topic"], "mood": ["good"] * 60}, "'mood' has only good", "labels: mood"),
    ],
    ids=["a mixture", "a mistake in a later column"],
)
def test_what_is_refused_before_anything_is_trained(labels, word, read, encoder, tmp_path, capsys):
    data = write(tmp_path / "a.csv", text=SENTENCES, **labels)
    with pytest.raises(RecipeError, match=word):
        train(encoder, data, tmp_path / "run", label_columns=[*labels])
    assert read in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_folder_of_one_run_is_left_to_it(encoder, table, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({}))
    with pytest.raises(RecipeError, match="the run of one task"):
        train(encoder, table, tmp_path, label_columns=[*LABELS])


def test_corrected_labels_are_trained_on_as_the_columns_were_first_read(ladders, encoder, tmp_path):
    folder, _ = ladders
    train(encoder, folder / "label_issues.csv", tmp_path / "again", **LADDER)
    for task in TASKS:
        first, again = results_of(folder / task), results_of(tmp_path / "again" / task)
        assert (again["task"], again["labels"]) == (first["task"], first["labels"])
        assert again["best_scores"] == pytest.approx(first["best_scores"], abs=1e-3)


def test_labels_that_were_only_checked_are_trained_on_as_they_were_read(encoder, table, tmp_path):
    checked = tmp_path / "checked"
    train(encoder, table, checked, check_labels="only", label_columns="mood")
    train(encoder, checked / "label_issues.csv", tmp_path / "trained")
    assert results_of(tmp_path / "trained")["labels"] == ["bad", "good"]
