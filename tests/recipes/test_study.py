"""The table and the chart of a study, against numbers worked out by hand."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from math import sqrt
from pathlib import Path

import pytest

from common.glue_report import COLUMNS, GLUE_TASKS, mean_of_nine, server_average, write_all
from common.glue_tasks import TASKS
from papers.numbers import PAPER_ROWS
from papers.results import arrange, collect, columns, differences, mean_and_error
from papers.tables import print_study, study


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
    options = {"learning_rate": 1e-3, "num_train_epochs": 5.0, "r": 64, "share_layers": 0, "max_length": 128}
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
        "arguments": {**options, **arguments, "seed": seed, "task": task, "output_dir": f"{task}-{seed}"},
    }


def cola(score, seed=0, **arguments):
    return result("cola", {"matthews_correlation": score}, seed, **arguments)


def cells(text, label):
    """The cells of the first line that begins with the label."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def by_column(text, label):
    return dict(zip(cells(text, " " * 3), cells(text, label), strict=True))


class TestAverages:
    def test_by_hand(self):
        assert 100 * mean_of_nine(SCORES) == pytest.approx(MEAN_OF_NINE, abs=1e-12)
        assert 100 * server_average(SCORES) == pytest.approx(SERVER, abs=1e-12)

    @pytest.mark.parametrize("missing", GLUE_TASKS)
    def test_a_missing_task_is_never_averaged_over(self, missing):
        rest = {task: scores for task, scores in SCORES.items() if task != missing}
        assert server_average(rest) is None
        assert (mean_of_nine(rest) is None) == (missing != "wnli")

    def test_tasks_that_were_not_scored_have_none(self, tmp_path, capsys):
        write_all(f"{tmp_path}/{{task}}", {task: {} for task in GLUE_TASKS}, predicted=False)
        written = json.loads((tmp_path / "all.json").read_text())
        assert written["mean_of_nine_columns"] is written["server_average"] is None
        assert "average" not in capsys.readouterr().out

    def test_the_mean_and_its_standard_error(self):
        # Deviations of -1, 0, 1: a variance of 2 / 2, so an error of 1 / sqrt(3).
        assert mean_and_error([80, 81, 82]) == (81, pytest.approx(1 / sqrt(3)))
        assert mean_and_error([80]) == (80, None)


class TestPapers:
    @pytest.mark.parametrize(
        ("label", "mean"),
        [
            ("BERT-large: full", 82.0),
            ("BERT-large: r 8-256", 81.5),
            ("BERT-large: r 64", 81.1),
            ("BERT-base: not shared", 79.5),
            ("BERT-base: 3-shared", 79.4),
        ],
    )
    def test_the_plain_means_of_the_rows(self, label, mean):
        (row,) = [row for row in PAPER_ROWS if row.label.endswith(label) and row.split == "test" and row.printed_total]
        assert round(row.mean_of_nine, 1) == mean != row.printed_total or label.endswith("3-shared")

    def test_every_row_has_the_nine_columns(self):
        for row in PAPER_ROWS:
            assert set(row.by_column) >= set(COLUMNS) - ({"MNLI-m"} if row.split == "dev" else set())


class TestRows:
    def test_starts_from_each_tasks_own_text_are_one_row(self):
        def starts(*paths):
            runs = [result(task, SCORES[task], init_adapter=path) for task, path in paths]
            return [set(row.cells) for row in arrange(runs, CHOSEN)]

        own = [(task, f"/home/porter/runs/{task}-text_{task}/adapter") for task in SCORES]  # "rte" is in "porter"
        assert starts(*own) == [set(SCORES)]
        assert starts(("rte", "runs/mnli-text"), ("mnli", "runs/mnli-text")) == [{"rte"}, {"mnli"}]
        assert starts(("rte", "runs/mnli-text"), ("cola", "runs/mnli-text")) == [{"rte", "cola"}]

    def test_a_tasks_name_may_hold_signs_of_a_regular_expression(self):
        (row,) = arrange([result("notes (1", {"accuracy": 0.5}, data="notes (1.csv")], CHOSEN)
        assert set(row.cells) == {"notes (1"}

    def test_a_cell_is_the_best_points_seeds(self):
        runs = [cola(0.5, 0), cola(0.6, 1), cola(0.52, 0, learning_rate=3e-3), cola(0.7, 1, learning_rate=3e-3)]
        (row,) = arrange([*runs, cola(0.65, 0, learning_rate=1e-2)], CHOSEN)
        cell = row.cells["cola"]
        assert {seed: run["best_score"] for seed, run in cell.seeds.items()} == {0: 0.52, 1: 0.7}
        assert cell.mean("matthews_correlation") == (pytest.approx(61), pytest.approx(9))
        assert cell.best["best_score"] == 0.7

    def test_a_loss_is_best_when_lowest(self):
        runs = [cola(0.5), cola(0.4, learning_rate=3e-3)]
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

    def test_what_means_nothing_to_a_method_makes_no_row(self):
        runs = [cola(0.5, method="full"), cola(0.6, 1, method="full", r=8, share_layers=3)]
        assert [row.label for row in arrange(runs, CHOSEN)] == ["full"]

    def test_where_a_run_was_made_makes_no_row(self):
        runs = [
            cola(0.5, logging_dir="a", report_to=[]),
            cola(0.6, 1, logging_dir="b", report_to=["tensorboard"], predict=True),
        ]
        assert len(arrange(runs, CHOSEN)) == 1

    @pytest.mark.parametrize(
        ("first", "second", "rows"),
        [
            ({}, {"warmup_steps": 0}, 1),
            ({}, {"warmup_steps": 100}, 2),
            ({}, {"early_stopping_patience": None}, 1),
            ({"num_train_epochs": 10}, {"num_train_epochs": 10.0}, 1),
            ({"warmup_steps": 100}, {"warmup_steps": 0}, 2),
        ],
    )
    def test_an_argument_that_an_earlier_version_lacks_has_its_default(self, first, second, rows):
        runs = [cola(0.5, **first), {**cola(0.6, 1, **second), "defaults": {"warmup_steps": 0.0}}]
        labels = [row.label for row in arrange(runs, ["learning_rate"])]
        assert len(set(labels)) == len(labels) == rows

    def test_what_differs_between_tasks_alone_makes_no_rows(self):
        runs = [cola(0.5), cola(0.6, method="full"), result("sst2", {"accuracy": 0.9}, max_train_samples=10_000)]
        houlsby, full = arrange(runs, CHOSEN)
        assert (houlsby.label, full.label) == ("houlsby, r 64, share_layers 0", "full")
        assert differences(houlsby, CHOSEN) == {"cola": "max_train_samples None", "sst2": "max_train_samples 10000"}
        assert differences(full, CHOSEN) == {"cola": ""}
        settings = study([houlsby], CHOSEN).split("## Chosen")[1]
        assert by_column(settings, houlsby.label)["differs between the tasks"] == "max_train_samples None"

        whole = result("sst2", {"accuracy": 0.92})
        assert [set(row.cells) for row in arrange([*runs, whole], CHOSEN)] == [{"cola", "sst2"}, {"cola"}, {"sst2"}]
        assert (
            len(arrange([cola(0.5, model_name="minilm"), result("rte", SCORES["rte"], model_name="bert")], CHOSEN))
            == 2
        )

    def test_a_task_may_be_chosen_by_another_score_than_its_main_one(self):
        runs = [result(task, scores) for task, scores in SCORES.items()]
        for run in runs:
            run["chosen_by"] = "accuracy" if run["task"] in ("mrpc", "qqp") else TASKS[run["task"]].scores[0]
            run["arguments"]["metric_for_best_model"] = run["chosen_by"]
        (row,) = arrange(runs, CHOSEN)
        assert set(row.cells) == set(SCORES)

    def test_the_tasks_own_scores_are_in_one_row_and_another_one_is_not(self):
        runs = [result(task, scores) for task, scores in SCORES.items()]
        for run in runs:
            run["chosen_by"] = TASKS[run["task"]].scores[0]
            run["arguments"]["metric_for_best_model"] = run["chosen_by"]
        (row,) = arrange(runs, CHOSEN)
        assert set(row.cells) == set(SCORES)
        other = result("mrpc", SCORES["mrpc"], metric_for_best_model="accuracy")
        other["chosen_by"] = "accuracy"
        assert len(arrange([*runs, other], CHOSEN)) == 2

    def test_the_size_may_be_chosen_too(self):
        runs = [cola(0.5, r=8), cola(0.6, r=64), result("rte", {"accuracy": 0.7}, r=8)]
        (row,) = arrange(runs, ["r"])
        assert row.cells["cola"].seeds[0]["arguments"]["r"] == 64
        assert row.cells["rte"].seeds[0]["arguments"]["r"] == 8

    def test_runs_without_a_score_are_left_out(self):
        without = {**cola(0.5), "best_score": None}
        assert arrange([without], CHOSEN) == []

    @pytest.mark.parametrize(
        ("method", "trained", "share", "total"),
        [
            ("houlsby", 36_000, 0.036, 1.324),  # Houlsby et al. 2019, table 1: 3.6%, 1.3x
            ("houlsby", 21_000, 0.021, 1.189),  # 2.1%, 1.2x
            ("full", None, 1, 9),  # 100%, 9.0x
            ("top_k", 529_000, 0.529, 5.761),  # as in table 2: the encoder is kept as well
        ],
    )
    def test_sizes(self, method, trained, share, total):
        runs = [result(task, scores, method=method, trained=trained) for task, scores in SCORES.items()]
        (row,) = arrange(runs, CHOSEN)
        assert (row.share, row.total) == (pytest.approx(share), pytest.approx(total))

    def test_other_tasks_have_columns_of_their_own(self):
        squad = result("squad", {"f1": 88.0, "exact_match": 80.0})  # they are in percent from the first
        assert columns(arrange([squad], CHOSEN)) == {"squad": ("squad", "f1")}
        rows = arrange([squad, cola(0.5)], CHOSEN)
        assert list(columns(rows)) == ["CoLA", "squad"]
        assert by_column(study(rows, CHOSEN), "houlsby, r 64, share_layers 0: mean")["squad"] == "88.00"


def shifted(scores, by):
    return {name: score + by for name, score in scores.items()}


class TestTable:
    def test_all_tasks_and_three_seeds(self):
        runs = [
            result(task, shifted(scores, 0.01 * seed), seed) for task, scores in SCORES.items() for seed in range(3)
        ]
        text = study(arrange(runs, CHOSEN), CHOSEN)
        mean = by_column(text, "houlsby, r 64, share_layers 0: mean")
        # Every score rises by a point from seed to seed.
        assert mean["CoLA"] == "51.00 ± 0.58"
        assert mean["MNLI-mm"] == "83.00 ± 0.58"
        assert mean["mean of nine"] == f"{MEAN_OF_NINE + 1:.2f} ± 0.58"
        assert mean["server's average"] == f"{SERVER + 1:.2f} ± 0.58"
        assert (mean["trained"], mean["total"]) == ("20,000 (2.0%)", "1.18x for 9 tasks")
        best = by_column(text, "houlsby, r 64, share_layers 0: best")
        assert (best["STS-B"], best["WNLI"]) == ("88.00", "58.00")
        assert best["mean of nine"] == f"{MEAN_OF_NINE + 2:.2f}"
        paper = by_column(text, "Houlsby et al. 2019, BERT-large: r 64 (test)")
        assert (paper["CoLA"], paper["RTE"], paper["WNLI"]) == ("56.9", "68.8", "-")
        assert (paper["mean of nine"], paper["server's average"]) == ("81.1", "79.6 printed")
        settings = [line for line in text.splitlines() if "| mrpc " in line]
        assert [cell.strip() for cell in settings[0].strip("|").split("|")[2:]] == [
            *("0.001", "5", "-", "0 1 2"),
            "mrpc-2",
        ], "the best run is that of the last seed"

    def test_unlike_seeds_have_averages_without_an_error(self):
        runs = [result(task, scores) for task, scores in SCORES.items()] + [cola(0.6, 1)]
        mean = by_column(study(arrange(runs, CHOSEN), CHOSEN), "houlsby, r 64, share_layers 0: mean")
        assert mean["CoLA"] == "55.00 ± 5.00"
        assert mean["mean of nine"] == f"{MEAN_OF_NINE + 5 / 9:.2f}"
        assert mean["server's average"] == f"{SERVER + 5 / 9:.2f}"

    def test_a_study_of_two_tasks_has_their_columns_and_no_averages(self):
        text = study(arrange([cola(0.5), result("mnli", SCORES["mnli"])], CHOSEN), CHOSEN)
        mean = by_column(text, "houlsby, r 64, share_layers 0: mean")
        assert list(mean) == ["", "trained", "total", "CoLA", "MNLI-m", "MNLI-mm"]
        assert list(mean.values())[3:] == ["50.00", "80.00", "82.00"]
        paper = by_column(text, "Han et al. 2021, BERT-base: full (dev)")
        assert list(paper.values())[3:] == ["56.53", "-", "84.1"]

    def test_the_averages_of_nine_tasks_with_and_without_the_tenth_column(self):
        runs = [result(task, scores) for task, scores in SCORES.items() if task != "wnli"]
        mean = by_column(study(arrange(runs, CHOSEN), CHOSEN), "houlsby, r 64, share_layers 0: mean")
        assert list(mean)[3:] == [*COLUMNS, "mean of nine", "server's average"]
        assert (mean["mean of nine"], mean["server's average"]) == (f"{MEAN_OF_NINE:.2f}", "-")

    def test_only_papers_with_a_score_there(self):
        text = study(arrange([result("wnli", SCORES["wnli"])], CHOSEN), CHOSEN)
        assert "Han et al. 2021" in text
        assert "Houlsby et al. 2019, BERT-large" not in text

    def test_missing_tasks_of_a_row_are_shown(self):
        runs = [cola(0.5), result("rte", {"accuracy": 0.7}, method="full")]
        mean = by_column(study(arrange(runs, CHOSEN), CHOSEN), "houlsby, r 64, share_layers 0: mean")
        assert (mean["CoLA"], mean["RTE"]) == ("50.00", "-")

    def test_the_best_run_may_be_at_another_point_than_the_best_mean(self):
        runs = [cola(0.5, 0), cola(0.9, 1), cola(0.8, 0, learning_rate=3e-3), cola(0.8, 1, learning_rate=3e-3)]
        for number, run in enumerate(runs):
            run["arguments"]["output_dir"] = f"runs/study/cola/{number}"
        line = by_column(study(arrange(runs, CHOSEN), CHOSEN).split("## Chosen")[1], "houlsby, r 64, share_layers 0")
        assert (line["learning_rate"], line["best run"]) == ("0.003", "runs/study/cola/1")

    def test_the_difference_to_full_fine_tuning(self):
        runs = [cola(score, seed) for seed, score in enumerate((0.50, 0.54))]
        runs += [cola(score, seed, method="full") for seed, score in enumerate((0.54, 0.56))]
        runs += [result("mrpc", {"f1": score}, seed) for seed, score in enumerate((0.80, 0.82))]
        runs += [result("mrpc", {"f1": score}, seed, method="full") for seed, score in ((3, 0.84), (4, 0.86))]
        runs += [result("rte", {"accuracy": 0.7}), result("rte", {"accuracy": 0.68}, method="full")]
        runs += [result("sst2", {"accuracy": 0.9})]
        text = study(arrange(runs, CHOSEN), CHOSEN).split("## Difference to full")[1]
        line = by_column(text, "houlsby, r 64, share_layers 0")
        # By seed: -4 and -2. The seeds of MRPC differ, so that its two means, each with an error of one, do not pair.
        assert line["CoLA"] == "-3.00 ± 1.00"
        assert line["MRPC"] == f"-4.00 ± {sqrt(2):.2f}"
        assert (line["RTE"], line["SST-2"]) == ("+2.00", "-")
        assert line["mean of these columns"] == "-1.67 of 3"

    def test_the_difference_is_to_the_row_that_has_the_task(self):
        runs = [cola(0.5), result("rte", {"accuracy": 0.7}), cola(0.6, method="full", model_name="a")]
        runs += [result(task, SCORES[task], method="full", model_name="b") for task in ("rte", "sst2")]
        text = study(arrange(runs, CHOSEN), CHOSEN).split("## Difference to full, model_name b; full, model_name a")[1]
        line = by_column(text, "houlsby, r 64, share_layers 0")
        assert (line["CoLA"], line["RTE"]) == ("-10.00", "+5.00")
        assert text.split("## Chosen")[0].count("| full") == 0

    def test_each_line_has_the_size_of_its_runs(self):
        """Small adapters have the best mean, and a large one the best run."""
        runs = [cola(0.6, 0, trained=10_000, r=8), cola(0.6, 1, trained=10_000, r=8)]
        runs += [cola(0.3, 0, trained=50_000, r=64), cola(0.8, 1, trained=50_000, r=64)]
        text = study(arrange(runs, ["r"]), ["r"])
        mean, best = (by_column(text, f"houlsby, share_layers 0: {kind}") for kind in ("mean", "best"))
        assert (mean["trained"], mean["total"]) == ("10,000 (1.0%)", "1.01x for 1 task")
        assert (best["trained"], best["total"]) == ("50,000 (5.0%)", "1.05x for 1 task")

    def test_mnli_may_be_tuned_for_each_of_its_splits(self):
        def mnli(matched, mismatched, rate, chosen_by):
            scores = {"matched_accuracy": matched, "mismatched_accuracy": mismatched}
            run = result("mnli", scores, learning_rate=rate, metric_for_best_model=chosen_by)
            return {**run, "chosen_by": chosen_by, "best_score": scores[chosen_by]}

        matched = [mnli(0.80, 0.79, 1e-3, "matched_accuracy"), mnli(0.78, 0.84, 3e-4, "matched_accuracy")]
        (row,) = arrange(matched, CHOSEN)
        assert row.total == pytest.approx(1.02)
        mean = by_column(study([row], CHOSEN), "houlsby, r 64, share_layers 0: mean")
        assert (mean["MNLI-m"], mean["MNLI-mm"]) == ("80.00", "79.00")

        (row,) = arrange([*matched, mnli(0.70, 0.83, 1e-3, "mismatched_accuracy")], CHOSEN)
        assert row.total == pytest.approx(1.04), "two tasks, as in the papers"
        mean = by_column(study([row], CHOSEN), "houlsby, r 64, share_layers 0: mean")
        assert (mean["MNLI-m"], mean["MNLI-mm"]) == ("80.00", "83.00")

    def test_the_note_on_the_total_says_what_it_counts(self):
        """The papers' 9.0x leave out WNLI, which a submission needs."""
        mismatched = {**result("mnli", SCORES["mnli"], method="full"), "chosen_by": "mismatched_accuracy"}
        runs = [result(task, scores, method="full") for task, scores in SCORES.items()]
        text = study(arrange([*runs, mismatched], CHOSEN), CHOSEN)
        assert "10.00x for 10 tasks" in text
        assert "This table counts WNLI if it has runs" in text
        without = study(arrange([*(run for run in runs if run["task"] != "wnli"), mismatched], CHOSEN), CHOSEN)
        assert "9.00x for 9 tasks" in without, "as in the papers"

    def test_second_scores_beside_the_papers(self):
        runs = [result("mrpc", {"f1": 0.88, "accuracy": accuracy}, seed) for seed, accuracy in enumerate((0.84, 0.86))]
        runs.append(result("cola", {"matthews_correlation": 0.5, "accuracy": 0.8}))
        text = study(arrange(runs, CHOSEN), CHOSEN).split("## Second scores")[1].split("## Chosen")[0]
        ours = by_column(text, "houlsby, r 64, share_layers 0: mean")
        assert (ours["CoLA accuracy"], ours["MRPC accuracy"]) == ("80.00", "85.00 ± 1.00")
        assert ours["mean of CoLA and MRPC"] == "82.50"
        papers = {
            "Whritenour and Schoch 2019, BERT-base: full (dev)": ["82.74", "85.05", "83.90"],
            "Whritenour and Schoch 2019, BERT-base: adapters (dev)": ["81.78", "85.78", "83.78"],
            "Han et al. 2021, BERT-base: full (dev)": ["-", "84.07", "-"],
        }
        for label, scores in papers.items():
            assert cells(text, label)[1:] == scores
        assert "QQP" not in text

    def test_it_is_aligned(self):
        table = study(arrange([cola(0.5)], CHOSEN), CHOSEN).split("\n\n")[1].splitlines()
        assert len({len(line) for line in table}) == 1
        assert len(table) == 2 + 2 + len(PAPER_ROWS)


@pytest.fixture
def matplotlib():
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra 'recipes', which is not installed")


@pytest.mark.usefixtures("matplotlib")
class TestChart:
    def test_bars_and_errors_are_the_tables(self):
        from papers.chart import draw

        runs = [cola(0.5), cola(0.54, 1), cola(0.6, method="full"), result("rte", {"accuracy": 0.7})]
        (axes,) = draw(arrange(runs, CHOSEN)).axes
        assert [label.get_text() for label in axes.get_xticklabels()] == ["CoLA", "RTE"]
        assert axes.get_title() == "Mean and standard error of 2 seeds"
        bars = {bars.get_label(): bars for bars in axes.containers if hasattr(bars, "patches")}
        assert [bar.get_height() for bar in bars["houlsby, r 64, share_layers 0"]] == pytest.approx([52, 70])
        assert [text.get_text() for text in axes.texts] == ["52.0", "70.0, one seed", "60.0, one seed"]
        assert [bar.get_height() for bar in bars["full"]] == pytest.approx([60])
        (segments, _) = (bars[name].errorbar.lines[2][0].get_segments() for name in bars)
        assert [tuple(end[1] for end in segment) for segment in segments] == [pytest.approx((50, 54)), (70, 70)]

    def test_one_task_with_scores_of_two_kinds(self):
        from papers.chart import draw

        classes = result("tickets", {"accuracy": 0.9}, problem_type=None)
        rows = arrange([classes, result("tickets", {"spearmanr": 0.8}, problem_type="regression"), cola(0.5)], CHOSEN)
        assert list(columns(rows)) == ["CoLA", "tickets, accuracy", "tickets, Spearman correlation"]
        (axes,) = draw(rows).axes
        assert sorted(text.get_text() for text in axes.texts) == [f"{score}, one seed" for score in (50.0, 80.0, 90.0)]

    def test_a_row_without_a_score_of_any_column_has_no_bars(self):
        from papers.chart import draw

        rte = {**result("rte", {"loss": 0.4}, method="full"), "chosen_by": "loss"}
        (axes,) = draw(arrange([cola(0.5), rte], CHOSEN)).axes
        assert [text.get_text() for text in axes.texts] == ["50.0, one seed"]

    def test_labels_do_not_overlap(self):
        from papers.chart import COLORS, draw

        runs = [result(task, scores, r=r) for task, scores in SCORES.items() for r in (4, 8, 64, 256)]
        figure = draw(arrange(runs, CHOSEN))
        figure.draw_without_rendering()
        boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        assert len(set(COLORS)) == len(COLORS)


@pytest.fixture
def folder(tmp_path):
    runs = [
        result(task, shifted(scores, 0.01 * seed), seed, method, share_layers=share)
        for task, scores in SCORES.items()
        for method, share in (("full", 0), ("houlsby", 0), ("houlsby", 3))
        for seed in range(2)
    ]
    for number, run in enumerate(runs):
        (tmp_path / run["task"] / str(number)).mkdir(parents=True)
        (tmp_path / run["task"] / str(number) / "results.json").write_text(json.dumps(run))
    (tmp_path / "rte" / "killed" / "checkpoint-1").mkdir(parents=True)
    return tmp_path


@pytest.mark.usefixtures("matplotlib")
class TestFiles:
    def test_what_is_written(self, folder, capsys):
        print_study(folder, CHOSEN)
        assert capsys.readouterr().out.strip() == (folder / "study.md").read_text().strip()
        lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        assert len(lines) == 9 * 3 * 2
        assert lines == collect(folder)
        assert (folder / "study.png").read_bytes().startswith(b"\x89PNG")

    def test_without_matplotlib_there_is_a_table(self, folder, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        monkeypatch.delitem(sys.modules, "papers.chart", raising=False)
        print_study(folder, CHOSEN)
        assert "No chart: " in capsys.readouterr().out
        assert (folder / "study.md").exists()
        assert not (folder / "study.png").exists()

    def test_as_a_script(self, folder):
        run = subprocess.run(
            [sys.executable, ROOT / "recipes" / "study_table.py", folder, "--choose", "learning_rate"],
            check=True,
            capture_output=True,
            text=True,
        )
        assert "houlsby, r 64, share_layers 3: mean" in run.stdout
        assert "| learning_rate | differs between the tasks | seeds | best run" in run.stdout
