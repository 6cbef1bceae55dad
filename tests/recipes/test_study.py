"""The table of a study, against numbers worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from math import hypot, sqrt
from pathlib import Path

import pandas as pd
import pytest

import no_bert
from recipe_runs import start, write
from results.lines import arrange, differences, find_columns
from results.read import collect
from results.study import study
from run.edge import RecipeError
from tasks.glue_tasks import TASKS, write_all
from tasks.scores import GLUE_TASKS, mean_of_nine, server_average


ROOT = Path(__file__).parents[2]
CHOSEN = ("learning_rate", "num_train_epochs")
BASE = 1_000_000
SCORES = {  # of a run of each task; the averages below are worked out from them
    "cola": {"matthews_correlation": 0.50},
    "sst2": {"accuracy": 0.90},
    "mrpc": {"f1": 0.88, "accuracy": 0.84},
    "stsb": {"spearmanr": 0.86, "pearson": 0.88},
    "qqp": {"f1": 0.70, "accuracy": 0.90},
    "mnli": {"matched_accuracy": 0.80, "mismatched_accuracy": 0.82},
    "qnli": {"accuracy": 0.89},
    "rte": {"accuracy": 0.65},
    "wnli": {"accuracy": 0.56},
}
# 50 + 90 + 88 + 86 + 70 + 80 + 82 + 89 + 65 = 700
MEAN_OF_NINE = 700 / 9
# 50 + 90 + 86 + 87 + 80 + 81 + 89 + 65 + 56 = 684
SERVER = 684 / 9


def result(task, scores, seed=0, method="houlsby", trained=20_000, **arguments):
    """results.json of a run, with what the table reads of it."""
    options = {"learning_rate": 1e-3, "num_train_epochs": 5.0, "r": 64, "share_layers": 0}
    options["max_length"] = 128
    adds = method in ("houlsby", "lora")
    return {
        "task": task,
        "method": method,
        "seed": seed,
        "chosen_by": next(iter(scores)),
        "best_score": next(iter(scores.values())),
        "best_scores": scores,
        "trainable_parameters": BASE if method == "full" else trained,
        "total_parameters": BASE + trained if adds else BASE,
        "arguments": {**options, **arguments, "seed": seed, "task": task},
        "folder": f"{task}-{seed}",
    }


def cola(score, seed=0, **arguments):
    return result("cola", {"matthews_correlation": score}, seed, **arguments)


def all_tasks(**options):
    return [result(task, scores, **options) for task, scores in SCORES.items()]


def table(runs, name="Scores", chosen=CHOSEN):
    """A table of a study of these runs, with its index as text."""
    return study(arrange(runs, chosen))[name][0]


def test_averages_by_hand_never_over_a_missing_task():
    assert 100 * mean_of_nine(SCORES) == pytest.approx(MEAN_OF_NINE, abs=1e-12)
    assert 100 * server_average(SCORES) == pytest.approx(SERVER, abs=1e-12)
    for missing in ("mnli", "wnli"):
        eight = {task: scores for task, scores in SCORES.items() if task != missing}
        assert server_average(eight) is None
        assert (mean_of_nine(eight) is None) == (missing != "wnli")


def test_tasks_that_were_not_scored_have_no_average(tmp_path, capsys):
    write_all(f"{tmp_path}/", {task: {"best_scores": {}} for task in GLUE_TASKS}, ())
    written = json.loads((tmp_path / "all.json").read_text())
    assert written["mean_of_nine_columns"] is written["server_average"] is None
    assert "average" not in capsys.readouterr().out


def test_the_plain_means_of_the_papers_rows_and_their_printed_totals():
    lines = table(all_tasks())
    test = lines[lines.index.str.endswith("(test)")]
    assert [*test["mean of nine"]] == ["82.0", "81.5", "81.1", "79.7", "79.4", "79.5", "79.4"]
    totals = (80.4, 80.0, 79.6, 79.7, 79.4, 79.2, 79.3)
    assert [*test["server's average"]] == [f"{total} printed" for total in totals]


class TestRows:
    def test_starts_from_each_tasks_own_text_are_one_row(self):
        def starts(*paths):
            runs = [result(task, SCORES[task], init_adapter=path) for task, path in paths]
            return [set(row.cells) for row in arrange(runs, CHOSEN)]

        # "rte" is in "porter".
        paths = [(task, f"/home/porter/runs/{task}-text_{task}/adapter") for task in SCORES]
        assert starts(*paths) == [set(SCORES)]
        assert starts(("rte", "runs/mnli-text"), ("mnli", "runs/mnli-text")) == [{"rte"}, {"mnli"}]
        assert starts(("rte", "runs/mnli-text"), ("cola", "runs/mnli-text")) == [{"rte", "cola"}]

    def test_a_cell_is_the_best_points_seeds(self):
        runs = [cola(0.5, 0), cola(0.6, 1), cola(0.65, 0, learning_rate=1e-2)]
        runs += [cola(0.52, 0, learning_rate=3e-3), cola(0.7, 1, learning_rate=3e-3)]
        (row,) = arrange(runs, CHOSEN)
        cell = row.cells["cola"]
        assert {seed: run["best_score"] for seed, run in cell.seeds.items()} == {0: 0.52, 1: 0.7}
        assert cell.mean("matthews_correlation") == (pytest.approx(61), pytest.approx(9))
        assert cell.best["best_score"] == 0.7

    def test_a_loss_is_best_when_lowest_and_a_run_without_a_score_is_left_out(self):
        runs = [cola(0.5), cola(0.4, learning_rate=3e-3), cola(None, learning_rate=1e-2)]
        for run in runs:
            run["chosen_by"] = "loss"
        (row,) = arrange(runs, CHOSEN)
        assert row.cells["cola"].best["best_score"] == 0.4
        assert row.cells["cola"].seeds[0]["best_score"] == 0.4

    def test_other_arguments_make_other_rows(self):
        runs = [cola(0.5), cola(0.6, 1, max_length=64), cola(0.7, share_layers=3)]
        labels = [row.label for row in arrange(runs, CHOSEN)]
        assert labels == [
            "houlsby, max_length 128, r 64, share_layers 0",
            "houlsby, max_length 64, r 64, share_layers 0",
            "houlsby, max_length 128, r 64, share_layers 3",
        ]

    def test_what_changes_nothing_makes_no_row(self):
        """Another method's option, where a run was made, the type of a number, the parts of a
        step's rows.
        """
        where = {"logging_dir": "a", "report_to": [], "max_steps": 10}
        runs = [cola(0.5, method="full", gradient_accumulation_steps=4, **where)]
        runs += [cola(0.6, 1, method="full", r=8, share_layers=3, logging_dir="b", max_steps=10.0)]
        runs[1]["strategy"] = {"processes": 4}
        assert [row.label for row in arrange(runs, CHOSEN)] == ["full"]
        runs[1]["strategy"] = {"processes": 1}
        assert len(arrange(runs, CHOSEN)) == 2

    def test_what_differs_between_tasks_alone_makes_no_rows(self):
        runs = [cola(0.5), cola(0.6, method="full")]
        runs.append(result("sst2", {"accuracy": 0.9}, max_train_samples=10_000))
        houlsby, full = arrange(runs, CHOSEN)
        assert (houlsby.label, full.label) == ("houlsby, r 64, share_layers 0", "full")
        assert differences(houlsby) == {"cola": "", "sst2": "max_train_samples 10000"}
        assert differences(full) == {"cola": ""}
        settings = table(runs, "Chosen on validation")["differs between the tasks"]
        assert settings[f"{houlsby.label}: CoLA"] == "-"

    def test_what_differs_within_a_task_or_in_the_model_makes_rows(self):
        runs = [cola(0.5), result("sst2", {"accuracy": 0.92})]
        runs.append(result("sst2", {"accuracy": 0.9}, max_train_samples=10_000))
        assert len(arrange(runs, CHOSEN)) == 2
        runs = [cola(0.5, model_name="minilm"), result("rte", SCORES["rte"], model_name="bert")]
        assert len(arrange(runs, CHOSEN)) == 2

    def test_the_tasks_own_scores_are_in_one_row_and_another_one_is_not(self):
        runs = all_tasks()
        for run in runs:
            run["chosen_by"] = TASKS[run["task"]].scores[0]
            run["arguments"]["metric_for_best_model"] = run["chosen_by"]
        (row,) = arrange(runs, CHOSEN)
        assert set(row.cells) == set(SCORES)
        by_accuracy = result("mrpc", SCORES["mrpc"], metric_for_best_model="accuracy")
        by_accuracy["chosen_by"] = "accuracy"
        assert len(arrange([*runs, by_accuracy], CHOSEN)) == 2

    @pytest.mark.parametrize(
        ("method", "trained", "share", "total"),
        [
            ("houlsby", 36_000, 0.036, 1.324),  # Houlsby et al. 2019, table 1: 3.6%, 1.3x
            ("houlsby", 21_000, 0.021, 1.189),  # 2.1%, 1.2x
            ("full", None, 1, 9),  # 100%, 9.0x: MNLI is two tasks, and WNLI does not count
            ("top_k", 529_000, 0.529, 5.761),  # as in table 2: the encoder is kept as well
        ],
    )
    def test_sizes(self, method, trained, share, total):
        (row,) = arrange(all_tasks(method=method, trained=trained), CHOSEN)
        sizes = row.sizes()
        assert (sizes.share, sizes.total, sizes.tasks) == pytest.approx((share, total, 9))

    def test_other_tasks_have_columns_of_their_own(self):
        # In percent from the first.
        squad = result("squad", {"f1": 88.0, "exact_match": 80.0})
        assert find_columns(arrange([squad], CHOSEN)) == {"squad": ("squad", "f1")}
        rows = arrange([squad, cola(0.5)], CHOSEN)
        assert list(find_columns(rows)) == ["CoLA", "squad"]
        assert table([squad, cola(0.5)])["squad"]["houlsby, r 64, share_layers 0: mean"] == "88.00"


def shifted(scores, by):
    return {name: score + by for name, score in scores.items()}


OURS = "houlsby, r 64, share_layers 0"


@pytest.fixture(scope="module")
def three_seeds():
    """Runs of all tasks, whose scores rise by a point from seed to seed."""
    runs = []
    for seed in range(3):
        for task, scores in SCORES.items():
            runs.append(result(task, shifted(scores, 0.01 * seed), seed))
    return runs


class TestTable:
    def test_all_tasks_and_three_seeds(self, three_seeds):
        mean, best = (table(three_seeds).loc[f"{OURS}: {kind}"] for kind in ("mean", "best"))
        assert mean["CoLA"] == "51.00 ± 0.58"
        assert mean["MNLI-mm"] == "83.00 ± 0.58"
        assert mean["mean of nine"] == f"{MEAN_OF_NINE + 1:.2f} ± 0.58"
        assert mean["server's average"] == f"{SERVER + 1:.2f} ± 0.58"
        assert (mean["trained"], mean["total"]) == ("20,000 (2.0%)", "1.18x for 9 tasks")
        assert (best["STS-B"], best["WNLI"]) == ("88.00", "58.00")
        assert best["mean of nine"] == f"{MEAN_OF_NINE + 2:.2f}"
        settings = table(three_seeds, "Chosen on validation").loc[f"{OURS}: MRPC"]
        # The best run is that of the last seed.
        assert [*settings] == ["0.001", "5", "-", "0 1 2", "mrpc-2"]

    def test_the_papers_rows_beside_ours(self, three_seeds):
        paper = table(three_seeds).loc["Houlsby 2019, BERT-large: r 64 (test)"]
        assert (paper["CoLA"], paper["RTE"], paper["WNLI"]) == ("56.9", "68.8", "-")
        assert (paper["mean of nine"], paper["server's average"]) == ("81.1", "79.6 printed")

    def test_unlike_seeds_have_averages_without_an_error(self):
        mean = table([*all_tasks(), cola(0.6, 1)]).loc[f"{OURS}: mean"]
        assert mean["CoLA"] == "55.00 ± 5.00"
        assert mean["server's average"] == f"{SERVER + 5 / 9:.2f}"

    def test_a_study_of_some_tasks_has_their_columns_and_no_averages(self):
        text = table([cola(0.5), result("mnli", SCORES["mnli"])])
        assert [*text.columns] == ["trained", "total", "CoLA", "MNLI-m", "MNLI-mm"]
        assert [*text.loc[f"{OURS}: mean"]][2:] == ["50.00", "80.00", "82.00"]
        assert [*text.loc["Han 2021, BERT-base: full (dev)"]][2:] == ["56.53", "-", "84.1"]
        without_wnli = [run for run in all_tasks() if run["task"] != "wnli"]
        # There is no server's average without WNLI.
        assert table(without_wnli).columns[-1] == "mean of nine"

    def test_the_difference_to_full_fine_tuning(self):
        runs = [cola(0.50, 0), cola(0.54, 1)]
        runs += [cola(0.54, 0, method="full"), cola(0.56, 1, method="full")]
        for seed, score in enumerate((0.80, 0.82)):
            runs.append(result("mrpc", {"f1": score}, seed))
            runs.append(result("mrpc", {"f1": score + 0.04}, seed + 3, method="full"))
        line = table(runs, "Difference to full").loc[OURS]
        # By seed: -4 and -2. The seeds of MRPC differ, so that its two means, each with an error of
        # one, do not pair.
        assert line["CoLA"] == "-3.00 ± 1.00"
        assert line["MRPC"] == f"-4.00 ± {sqrt(2):.2f}"
        assert line["mean of these columns"] == f"-3.50 ± {hypot(1, sqrt(2)) / 2:.2f} of 2"
        runs += [result("rte", {"accuracy": 0.7}), result("rte", {"accuracy": 0.68}, method="full")]
        runs += [result("sst2", {"accuracy": 0.9})]
        line = table(runs, "Difference to full").loc[OURS]
        assert (line["RTE"], line["SST-2"]) == ("+2.00", "-")
        assert line["mean of these columns"] == "-1.67 of 3"

    def test_scores_on_other_examples_have_no_difference(self):
        """By what the runs record; without a validation file, it is a part of the training file."""

        def on(data, rows, run):
            files = {name: {"path": name, "sum": content} for name, content in data.items()}
            return run | {"content": files, "dataset": {"rows": {"train": 500, **rows}}}

        a, b, rows = {"validation": "a"}, {"validation": "b"}, {"validation": 40}
        # The files and the rows of our run, and of the one with full fine-tuning.
        data = {
            "cola": (a, {"validation": 408}, a, rows),
            "mnli": ({"validation_matched": "a"}, {}, {"validation_matched": "b"}, {}),
            "qnli": ({"train": "a"}, rows, {"train": "b"}, rows),
            "qqp": (a | {"train": "a"}, rows, a | {"train": "b"}, rows),
            "rte": (a, rows, b, rows),
            "sst2": ({}, {}, a, rows),
        }
        runs = []
        for number, method in enumerate(("houlsby", "full")):
            for task, of_task in data.items():
                files_and_rows = of_task[2 * number : 2 * number + 2]
                runs.append(on(*files_and_rows, result(task, SCORES[task], method=method)))
        page, note = study(arrange(runs, CHOSEN))["Difference to full"]
        line = page.loc[OURS].to_dict()
        assert line.pop("mean of these columns") == "+0.00 of 2"
        compared = {name for name, text in line.items() if text == "+0.00"}
        assert compared == {"QQP", "SST-2"}
        assert {line[name] for name in line.keys() - compared} == {"other data"}
        assert note.count("other data:") == 1
        page, note = study(arrange(runs[:1] + runs[6:7], CHOSEN))["Difference to full"]
        assert [*page.loc[OURS]] == ["other data", "-"]

    def test_the_difference_of_accuracies(self):
        """Other main scores, 10 points higher, would say the reverse."""
        runs = []
        for method, accuracy, score in (("houlsby", 0.838, 0.6), ("full", 0.848, 0.5)):
            for task, main in (("cola", "matthews_correlation"), ("mrpc", "f1")):
                runs.append(result(task, {main: score, "accuracy": accuracy}, method=method))
        lines = arrange(runs, CHOSEN)
        for score, difference in (("main", "+10.00 of 2"), ("accuracy", "-1.00 of 2")):
            page, _ = study(lines, score)["Difference to full"]
            assert page.loc[OURS, "mean of these columns"] == difference

    def test_what_metrics_have_computed(self):
        runs = [cola(0.5, seed) | {"metrics": {"mine": 0.2 * seed}} for seed in range(2)]
        page = table(runs, "Further metrics")
        assert page.loc[OURS].to_dict() == {"cola: mine": "0.1000 ± 0.1000"}
        assert "Further metrics" not in study(arrange([cola(0.5)], CHOSEN))

    def test_the_papers_numbers_of_trained_parameters(self):
        """Table 1 of Mohebbi and Rajaei 2020, and what Whritenour and Schoch 2019 print."""
        trained = table([cola(0.5) | {"best_scores": {"accuracy": 0.8}}])["trained"]
        for label, printed in {
            "Mohebbi 2020, BERT-base: shared in each layer (test)": "1,189,632",
            "Mohebbi 2020, BERT-base: not shared (test)": "3,006,720",
            "Mohebbi 2020, BERT-base: 3-shared (test)": "396,544",
            "Whritenour 2019, BERT-base: adapters (dev)": "2,379,264 (2.1%)",
        }.items():
            assert trained[label] == printed

    def test_the_difference_is_to_the_row_that_has_the_task(self):
        runs = [cola(0.5), result("rte", {"accuracy": 0.7})]
        runs.append(cola(0.6, method="full", model_name="a"))
        for task in ("rte", "sst2"):
            runs.append(result(task, SCORES[task], method="full", model_name="b"))
        lines = table(runs, "Difference to full")
        assert (lines["CoLA"][OURS], lines["RTE"][OURS]) == ("-10.00", "+5.00")
        assert [*lines.index] == [OURS]

    def test_the_best_run_may_be_at_another_point_than_the_best_mean(self):
        """Small adapters have the best mean, and a large one the best run; each line has their
        size.
        """
        runs = [cola(0.6, 0, trained=10_000, r=8), cola(0.6, 1, trained=10_000, r=8)]
        runs += [cola(0.3, 0, trained=50_000, r=64), cola(0.8, 1, trained=50_000, r=64)]
        runs[3]["folder"] = "runs/study/cola/best"
        settings = table(runs, "Chosen on validation", chosen=["r"]).iloc[0]
        assert (settings["r"], settings["best run"]) == ("8", "runs/study/cola/best")
        lines = table(runs, chosen=["r"])
        mean, best = (lines.loc[f"houlsby, share_layers 0: {kind}"] for kind in ("mean", "best"))
        assert (mean["trained"], mean["total"]) == ("10,000 (1.0%)", "1.01x for 1 task")
        assert (best["trained"], best["total"]) == ("50,000 (5.0%)", "1.05x for 1 task")

    def test_mnlis_splits_choose_among_the_same_runs(self):
        """Each column has its own point, as in the papers, without training twice."""

        def mnli(matched, mismatched, rate, trained):
            scores = {"matched_accuracy": matched, "mismatched_accuracy": mismatched}
            return result("mnli", scores, trained=trained, learning_rate=rate)

        (row,) = arrange([mnli(0.80, 0.79, 1e-3, 10_000), mnli(0.78, 0.84, 3e-4, 20_000)], CHOSEN)
        assert row.sizes().total == pytest.approx(1.03), "two tasks, as in the papers"
        lines = study([row])
        mean = lines["Scores"][0].loc[f"{OURS}: mean"]
        assert (mean["MNLI-m"], mean["MNLI-mm"]) == ("80.00", "84.00")
        assert [*lines["Chosen on validation"][0]["learning_rate"]] == ["0.001", "0.0003"]

    def test_second_scores_beside_the_papers(self):
        runs = [result("cola", {"matthews_correlation": 0.5, "accuracy": 0.8})]
        for seed, accuracy in enumerate((0.84, 0.86)):
            runs.append(result("mrpc", {"f1": 0.88, "accuracy": accuracy}, seed))
        lines = table(runs)[["CoLA accuracy", "MRPC accuracy", "mean accuracy of CoLA and MRPC"]]
        assert "QQP accuracy" not in table(runs)
        papers = {
            f"{OURS}: mean": ["80.00", "85.00 ± 1.00", "82.50"],
            "Whritenour 2019, BERT-base: full (dev)": ["82.742", "85.049", "83.90"],
            "Whritenour 2019, BERT-base: adapters (dev)": ["81.78", "85.78", "83.78"],
            "Han 2021, BERT-base: full (dev)": ["-", "84.07", "-"],
        }
        for label, scores in papers.items():
            assert [*lines.loc[label]] == scores


def of_the_17(task, accuracy, seed=0, method="houlsby", **arguments):
    """A run of one of the 17 further tasks, with a test accuracy."""
    run = result(task, {"accuracy": 0.5}, seed, method, **arguments)
    dataset = {"rows": {"train": 5_573}}
    return {**run, "test": {"accuracy": accuracy}, "labels": ["ham", "spam"], "dataset": dataset}


@pytest.fixture(scope="module")
def accuracy_lines():
    runs = [of_the_17("sms_spam", 0.98), of_the_17("sms_spam", 0.99, 1)]
    runs += [of_the_17("crowdflower_airline", 0.84), of_the_17("crowdflower_airline", 0.86, 1)]
    for task in ("sms_spam", "crowdflower_airline"):
        runs.append(of_the_17(task, 0.9, method="full"))
    runs.append(of_the_17("sms_spam", 0.95, method="no_bert", trained=0))
    return table(runs, "Test accuracy")


class TestAccuracies:
    def test_the_papers_columns_and_ours_with_errors(self, accuracy_lines):
        spam, airline = accuracy_lines.loc["sms spam"], accuracy_lines.loc["CF airline"]
        assert [*spam][:6] == ["98.5", "99.3 ± 0.2", "99.3 ± 0.2", "95.1 ± 2.2", "-", "-"]
        assert (spam[OURS], spam["no_bert"]) == ("98.50 ± 0.50", "95.00")
        assert airline[OURS] == "85.00 ± 1.00"
        assert spam["data"] == "as in the paper"
        assert airline["data"] == "5,573 rows, 2 classes; paper: 14,640, 3"

    def test_means_over_the_tasks_of_each_paper(self, accuracy_lines):
        of_two, of_2020 = accuracy_lines.loc["mean of 2"], accuracy_lines.loc["mean of 1 of 2020"]
        assert of_two[OURS] == f"91.75 ± {hypot(0.5, 1) / 2:.2f}"
        assert of_two["2019: full"] == f"{(83.6 + 99.3) / 2:.1f}"
        assert (of_two["2020: full"], of_two["no_bert"]) == ("-", "-")
        assert (of_2020["2020: full"], of_2020[OURS]) == ("83.6", "85.00 ± 1.00")
        printed = [*accuracy_lines.loc["as printed"]][:6]
        assert printed == ["72.7", "73.7", "74.0", "73.3", "71.4", "74.9"]

    def test_sizes(self, accuracy_lines):
        totals = accuracy_lines.loc["total parameters"]
        assert [*totals][1:4] == ["17x", "9.9x", "1.19x"]
        assert (totals[OURS], totals["full"]) == ("1.04x", "2x")
        assert accuracy_lines.loc["trained per task"][OURS] == "2.00%"

    def test_a_run_that_predicts_one_class_for_all_is_marked_in_every_table(self):
        runs = [of_the_17("sms_spam", 0.9), of_the_17("sms_spam", 0.8, method="full")]
        runs += [cola(0.5), cola(0.0, method="full")]
        for run in runs[:2]:
            run["constant"] = "ham" if run["method"] == "full" else None
        marked = {}
        for name in ("Scores", "Difference to full", "Test accuracy"):
            text = table(runs, name).astype(str)
            is_marked = text.map(lambda cell: "one class for all" in cell).stack()
            marked[name] = [*is_marked[is_marked].index]
        assert marked == {
            "Scores": [("full: mean", "sms_spam"), ("full: best", "sms_spam")],
            "Difference to full": [(OURS, "sms_spam")],
            "Test accuracy": [("sms spam", "full")],
        }

    def test_complaints_count_once(self):
        runs = []
        for by in ("issue", "product"):
            for method in ("houlsby", "full"):
                runs.append(of_the_17(f"customer_complaints_{by}", 0.5, method=method))
        assert "mean of 1" in table(runs, "Test accuracy").index
        assert table(runs, "Difference to full")["mean of these columns"][OURS] == "+0.00 of 1"
        assert arrange(runs, CHOSEN)[0].sizes().tasks == 1


def test_without_bert_on_texts_of_few_words(tmp_path):
    """Latent semantic analysis is asked for 50 or 100 components of about 15 words."""
    texts, labels = [], ["praise"] * 16 + ["complaint"] * 16
    for words in (["good", "fine", "nice", "superb"], ["bad", "poor", "awful", "dull"]):
        texts += [f"{first} film {last}" for first, last in product(words, words)]
    for split in ("train", "validation", "test"):
        write(tmp_path / "films" / f"{split}.csv", text=4 * texts, label=4 * labels)
    start(no_bert, "--data", tmp_path / "films", "--models", "gradient_boosting", "--n_points", 3,
        "--output_dir", tmp_path)  # fmt: skip
    results = json.loads((tmp_path / "films" / "no_bert" / "results.json").read_text())
    assert (results["best_score"], results["test"]) == (1, {"accuracy": 1})
    assert results["settings"]["svd__n_components"] in (50, 100)
    assert results["constant"] is None


@pytest.fixture
def folder(tmp_path):
    lines = (("full", 0), ("houlsby", 0), ("houlsby", 3))
    for task, seed, (method, share) in product(SCORES, range(2), lines):
        scores = shifted(SCORES[task], 0.01 * seed)
        run = result(task, scores, seed, method, share_layers=share)
        folder = tmp_path / task / f"{seed}-{method}-{share}"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(run))
    (tmp_path / "rte" / "killed" / "checkpoint-1").mkdir(parents=True)
    return tmp_path


def test_what_the_script_prints_and_writes(folder):
    script = ROOT / "recipes" / "studies" / "study_table.py"
    command = [sys.executable, script, folder, "--choose", "learning_rate"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert max(map(len, printed.splitlines())) <= 140
    assert "houlsby, r 64, share_layers 3: mean" in printed
    assert f"| {OURS}: mean " in (folder / "study.md").read_text()
    assert len(collect(folder)) == 9 * 3 * 2
    written = pd.read_csv(folder / "study_scores.csv", index_col=0)
    assert written["CoLA"][f"{OURS}: mean"] == "50.50 ± 0.50"
    settings = pd.read_csv(folder / "study_chosen_on_validation.csv", index_col=0)
    assert [*settings] == ["learning_rate", "differs between the tasks", "seeds", "best run"]

    damaged = folder / "rte" / "0-full-0" / "results.json"
    damaged.write_text(damaged.read_text()[:-9])
    with pytest.raises(RecipeError, match=f"{damaged} is damaged"):
        collect(folder)
