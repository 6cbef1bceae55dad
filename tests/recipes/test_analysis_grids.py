"""The analyses of grids of runs: what they make of the runs' results, and the gradient norms of a run."""

from __future__ import annotations

import itertools
import json
import math
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import Trainer, TrainingArguments

from houlsby_peft import HoulsbyConfig
from recipe_runs import run
from tiny_models import tiny_bert


pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra 'recipes', which is not installed")
import extensions
import init_scale
import learning_curves
import stability
import time_to_score
import tradeoff
from analysis.gradients import FILE, GradientNorms, layer_of
from analysis.grid import GridParser, finished, make_grids, run_missing
from study.papers import GLUE_TASKS, proper_name
from study.presets import parse_arguments
from study.results import arrange
from sweeping.runs import CHOSEN
from training.arguments import AdapterArguments, RecipeParser, RecipeTrainingArguments, TextArguments
from training.errors import RecipeError
from training.methods import MethodArguments


ARGUMENTS = {"init_std": 0.01, "r": 64, "share_layers": 0, "top_k": None, "init_adapter": None, "learning_rate": 1e-3}


@pytest.fixture
def finished_run(tmp_path):
    """Writes the results of a run that there might have been."""
    numbers = itertools.count()

    def write(
        task: str,
        method: str,
        seed: int,
        score: float,
        trained: int = 100,
        scores: dict | None = None,
        epochs: list | None = None,
        **arguments,
    ) -> Path:
        """Its main score is the first of `scores`, by default the task's."""
        scores = scores or {GLUE_TASKS[task][0]: score, "accuracy": score}
        folder = tmp_path / f"{next(numbers):03}"
        folder.mkdir()
        (folder / "results.json").write_text(
            json.dumps(
                {
                    "task": task, "method": method, "model": "tiny", "seed": seed, "best_score": score,
                    "best_scores": scores, "chosen_by": next(iter(scores)), "trainable_parameters": trained,
                    "epochs": epochs or [{"epoch": 1.0, "step": 10, **scores}],
                    "total_parameters": 1000, "arguments": {**ARGUMENTS, "output_dir": str(folder), **arguments},
                }
            )
        )  # fmt: skip
        return folder

    return write


def planned(folder: Path, **given) -> Namespace:
    """The flags of stability.py, with one seed and one run at a time."""
    flags = {
        "output_dir": folder, "task": ["rte"], "seed": ["0"], "jobs": 1, "data_dir": None, "model_name": None,
        "learning_rate": ["1e-3"], "full_learning_rate": ["1e-4"], "num_train_epochs": None, "pretraining_steps": [],
        "pretraining_learning_rate": None, "full_pretraining_learning_rate": None, "pretraining_seed": None,
        "pretraining_precision": "float32",
    }  # fmt: skip
    return Namespace(**flags | given)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_drawn(path: Path) -> None:
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in path.with_suffix(".svg").read_text()


class TestTradeoff:
    def test_one_task(self, finished_run, tmp_path):
        for seed, (full, small, large) in enumerate([(0.8, 0.7, 0.79), (0.9, 0.8, 0.83)]):
            finished_run("cola", "full", seed, full, 1000)
            finished_run("cola", "houlsby", seed, small, 20, r=1)
            finished_run("cola", "houlsby", seed, large, 50, r=8)
        run(tradeoff, "--draw_only", "--output_dir", tmp_path, "--task", "cola")
        small, large, full = lines(tmp_path / "tradeoff.jsonl")
        assert [point["series"] for point in (small, large, full)] == ["adapters", "adapters", "full fine-tuning"]
        assert [point["trained_parameters"] for point in (small, large)] == [20, 50]
        assert small["scores"] == {"CoLA": pytest.approx([70, 80])}
        assert [point["size"] for point in (small, large, full)] == ["r=1", "r=8", None]
        # 85 is full fine-tuning's mean, and 5 the standard error of 70 and 80.
        assert [small[key] for key in ("low", "middle", "high")] == pytest.approx([-15, -10, -5])
        assert [large[key] for key in ("low", "middle", "high")] == pytest.approx([-6, -4, -2])
        assert full["middle"] == pytest.approx(0)
        assert_drawn(tmp_path / "tradeoff")

    def test_each_method_shows_its_own_size(self, finished_run, tmp_path):
        sizes = {"r": 64, "lora_r": 8, "top_k": 3}  # every recipe records all of them
        for trained, method in enumerate(("houlsby", "lora", "top_k", "layer_norm")):
            finished_run("cola", method, 0, 0.5, 20 + trained, **sizes)
        run(tradeoff, "--draw_only", "--output_dir", tmp_path)
        assert [point["size"] for point in lines(tmp_path / "tradeoff.jsonl")] == ["r=64", "r=8", "k=3", None]

    def test_percentiles_over_tasks(self, finished_run, tmp_path):
        tasks = ["cola", "sst2", "mrpc", "rte", "qnli", "wnli"]
        for task, lost in zip(tasks, range(6), strict=True):
            finished_run(task, "full", 0, 0.9)
            finished_run(task, "houlsby", 0, 0.9 - lost / 100)
        run(tradeoff, "--draw_only", "--output_dir", tmp_path)
        point = next(point for point in lines(tmp_path / "tradeoff.jsonl") if point["series"] == "adapters")
        # Of 0, -1, ... -5 points.
        assert [point[key] for key in ("low", "middle", "high")] == pytest.approx([-4, -2.5, -1])

    def test_a_size_without_runs_on_all_tasks_is_left_out(self, finished_run, tmp_path, capsys):
        """Full fine-tuning is no exception; without it, scores are absolute."""
        finished_run("cola", "full", 0, 0.9)
        for task in ("cola", "rte"):
            finished_run(task, "houlsby", 0, 0.7)
        run(tradeoff, "--draw_only", "--output_dir", tmp_path)
        points = lines(tmp_path / "tradeoff.jsonl")
        assert {point["series"]: point["middle"] for point in points} == {"adapters": pytest.approx(70)}
        assert not any(point["relative"] for point in points)
        assert "full: left out, as it has no run on RTE\n" in capsys.readouterr().out

    def test_no_size_has_runs_on_all_tasks(self, finished_run, tmp_path):
        finished_run("cola", "full", 0, 0.9)
        finished_run("rte", "houlsby", 0, 0.7)
        with pytest.raises(RecipeError, match="No size has runs on all of CoLA, RTE"):
            run(tradeoff, "--draw_only", "--output_dir", tmp_path)

    def test_mnli_counts_as_two_tasks(self, finished_run, tmp_path):
        mnli = {"matched_accuracy": 0.84, "mismatched_accuracy": 0.83}
        finished_run("mnli", "houlsby", 0, 0.84, scores=mnli)
        run(tradeoff, "--draw_only", "--output_dir", tmp_path)
        (point,) = lines(tmp_path / "tradeoff.jsonl")
        assert point["scores"] == {"MNLI-m": [pytest.approx(84)], "MNLI-mm": [pytest.approx(83)]}
        assert point["middle"] == pytest.approx(83.5)

    def test_validation_chooses_the_learning_rate_of_each_task(self, finished_run, tmp_path):
        for task, rates in {"cola": (0.6, 0.5), "rte": (0.5, 0.7)}.items():
            for rate, score in zip((1e-3, 1e-4), rates, strict=True):
                finished_run(task, "houlsby", 0, score, learning_rate=rate)
        run(tradeoff, "--draw_only", "--output_dir", tmp_path)
        (point,) = lines(tmp_path / "tradeoff.jsonl")
        assert point["scores"] == {"CoLA": pytest.approx([60]), "RTE": pytest.approx([70])}
        assert point["relative"] is False  # there is no full fine-tuning to subtract

    def test_shared_bottlenecks_are_a_line_of_their_own(self, finished_run, tmp_path):
        for share in (0, 3):
            finished_run("cola", "houlsby", 0, 0.5, share_layers=share)
        run(tradeoff, "--draw_only", "--output_dir", tmp_path)
        series = {point["series"] for point in lines(tmp_path / "tradeoff.jsonl")}
        assert series == {"adapters", "adapters, shared by 3 layers"}

    def test_grids(self):
        arguments = Namespace(
            method=["houlsby", "top_k", "layer_norm", "full"], r=["1", "8"], top_k=["1", "2"], seed=["0"],
            learning_rate=["1e-3"], full_learning_rate=["1e-5"],
        )  # fmt: skip
        runs = make_grids(Path("out"), ["cola", "rte"], tradeoff.grids(arguments), ["--data_dir", "glue"])
        assert len(runs) == 2 * (2 + 2 + 1 + 1)
        assert {run.point["learning_rate"] for run in runs if run.point["method"] in ("top_k", "full")} == {"1e-5"}
        assert all(run.flags == ("--data_dir", "glue") for run in runs)

    def test_a_recipe_for_one_task(self):
        arguments = Namespace(
            method=["houlsby", "top_k", "full"], r=["1", "8"], top_k=["2"], seed=["0"], learning_rate=["1e-3"],
            full_learning_rate=["3e-5"],
        )  # fmt: skip
        runs = make_grids(Path("out"), ["squad"], tradeoff.grids(arguments), [], Path("recipes/squad.py"))
        assert [run.point for run in runs] == [
            *({"method": "houlsby", "r": r, "learning_rate": "1e-3", "seed": "0"} for r in ("1", "8")),
            {"method": "top_k", "top_k": "2", "learning_rate": "3e-5", "seed": "0"},
            {"method": "full", "learning_rate": "3e-5", "seed": "0"},
        ]

    def test_nothing_to_draw(self, tmp_path):
        with pytest.raises(RecipeError, match="no run with a validation score"):
            run(tradeoff, "--draw_only", "--output_dir", tmp_path)


class TestInitScale:
    def test_means_and_deviations(self, finished_run, tmp_path):
        for seed, score in enumerate([0.6, 0.8]):
            for task in ("cola", "rte"):
                finished_run(task, "houlsby", seed, score, init_std=0.1)
                finished_run(task, "houlsby", seed, score + 0.1)
                finished_run(task, "houlsby", seed, score - 0.1, r=8)
        run(init_scale, "--draw_only", "--output_dir", tmp_path)
        points = {(p["task"], p["r"], p["init_std"]): p for p in lines(tmp_path / "init_scale.jsonl")}
        assert len(points) == 6
        assert points["RTE", 64, 0.1]["mean"] == pytest.approx(70)
        assert points["RTE", 64, 0.1]["error"] == pytest.approx(10)  # of 60 and 80
        assert points["CoLA", 8, 0.01]["scores"] == {"0": pytest.approx(50), "1": pytest.approx(70)}
        assert_drawn(tmp_path / "init_scale")

    def test_accuracy_is_shown_and_the_main_score_chooses(self, finished_run, tmp_path):
        for rate, correlation, accuracy in ((1e-3, 0.5, 0.8), (3e-4, 0.6, 0.7)):
            scores = {"matthews_correlation": correlation, "loss": 0.1, "accuracy": accuracy}
            finished_run("cola", "houlsby", 0, correlation, scores=scores, learning_rate=rate)
        shown = {}
        for score in ("accuracy", "main"):
            run(init_scale, "--draw_only", "--output_dir", tmp_path, "--score", score)
            (shown[score],) = lines(tmp_path / "init_scale.jsonl")
        assert (shown["accuracy"]["mean"], shown["main"]["mean"]) == (pytest.approx(70), pytest.approx(60))
        assert shown["accuracy"]["learning_rate"] == shown["main"]["learning_rate"] == 3e-4

    def test_the_mean_over_the_papers_eight_has_both_of_mnlis_accuracies(self, finished_run, tmp_path):
        tasks = {"cola": 0.81, "sst2": 0.92, "mrpc": 0.85, "qqp": 0.9, "qnli": 0.91, "rte": 0.66}
        for task, score in tasks.items():
            finished_run(task, "houlsby", 0, score)
        mnli = {"matched_accuracy": 0.84, "mismatched_accuracy": 0.83, "matched_loss": 0.5, "mismatched_loss": 0.5}
        finished_run("mnli", "houlsby", 0, 0.84, scores=mnli)
        run(init_scale, "--draw_only", "--output_dir", tmp_path)
        points = lines(tmp_path / "init_scale.jsonl")
        assert {point["task"] for point in points} == {*map(proper_name, tasks), "MNLI matched", "MNLI mismatched"}
        lines_drawn = init_scale.draw(points).axes[1].get_lines()
        assert len(lines_drawn) == 8 + 1, "a task is left out"
        assert lines_drawn[-1].get_ydata() == pytest.approx([100 * (sum(tasks.values()) + 0.84 + 0.83) / 8])

    @pytest.mark.parametrize("std", [0.01, 1e-4])
    def test_a_size_without_runs_on_all_tasks_has_no_mean(self, finished_run, tmp_path, std):
        for task, score in (("cola", 0.8), ("rte", 0.6)):
            finished_run(task, "houlsby", 0, score)
        finished_run("cola", "houlsby", 0, 0.8, r=8, init_std=std)
        run(init_scale, "--draw_only", "--output_dir", tmp_path)
        means = init_scale.draw(lines(tmp_path / "init_scale.jsonl")).axes[1].get_lines()[-1]
        assert (means.get_label(), [*means.get_xdata()]) == ("mean over tasks", [64])
        assert means.get_ydata() == pytest.approx([70])

    def test_a_regression_has_no_accuracy(self, finished_run, tmp_path):
        finished_run("stsb", "houlsby", 0, 0.8, scores={"spearmanr": 0.8, "pearson": 0.7})
        with pytest.raises(RecipeError, match="stsb has no accuracy, only spearmanr, pearson: give --score main"):
            run(init_scale, "--draw_only", "--output_dir", tmp_path)
        run(init_scale, "--draw_only", "--output_dir", tmp_path, "--score", "main")
        assert lines(tmp_path / "init_scale.jsonl")[0]["mean"] == pytest.approx(80)

    def test_a_run_for_each_learning_rate_and_number_of_epochs(self, tmp_path):
        rates = ("--learning_rate", "3e-4", "1e-3", "--num_train_epochs", 3, 20)
        grid = ("--task", "cola", "--seed", 0, "--r", 8, "--init_std", "1e-4", "--output_dir", tmp_path)
        with patch.object(init_scale, "run_missing") as run_missing, pytest.raises(RecipeError, match="no run with a"):
            run(init_scale, *grid, *rates, "--data_dir", "glue")
        ((runs, _),) = (call.args for call in run_missing.call_args_list)
        points = [(run.point["learning_rate"], run.point["num_train_epochs"]) for run in runs]
        assert points == [("3e-4", "3"), ("3e-4", "20"), ("1e-3", "3"), ("1e-3", "20")] * 2
        assert all(run.flags == ("--data_dir", "glue") for run in runs)


class TestLearningCurves:
    def test_means_and_errors_by_epoch(self, finished_run, tmp_path):
        for seed, scores in enumerate([(0.6, 0.7, 0.9), (0.8, 0.7)]):
            epochs = [
                {"epoch": n + 1.0, "step": 10 * (n + 1), "seconds": 30.0 * (n + 1) + 2 * seed, "accuracy": one}
                for n, one in enumerate(scores)
            ]
            finished_run("rte", "houlsby", seed, 0.8, epochs=epochs)
        (row,) = arrange(finished(tmp_path), CHOSEN)
        # 60 and 80 have a standard error of 10; the third epoch has one seed only.
        for x, (first, second) in {"epoch": (1, 2), "step": (10, 20), "seconds": (31, 61)}.items():
            points = learning_curves.curve(row.cells["rte"].seeds, x, None)
            assert points == {
                first: (pytest.approx(70), pytest.approx(10)), second: (pytest.approx(70), pytest.approx(0))
            }  # fmt: skip
        run(learning_curves, tmp_path)
        assert_drawn(tmp_path / "learning_curves")

    def test_a_score_that_no_run_has(self, finished_run, tmp_path):
        finished_run("rte", "houlsby", 0, 0.8)
        with pytest.raises(RecipeError, match="a run on rte has accuracy"):
            run(learning_curves, tmp_path, "--score", "f1")


class TestTimeToScore:
    def test_by_hand(self, finished_run, tmp_path, capsys):
        """Fine-tuning's mean scores are 65, 85 and 80 percent, and 99% of 85 are 84.15."""
        runs = {
            ("full", 0, None): [(0.5, 10.0), (0.9, 20.0), (0.7, 30.0)],
            ("full", 1, None): [(0.8, 12.0), (0.8, 40.0), (0.9, 60.0), (0.99, 80.0)],  # seed 0 has no fourth
            ("houlsby", 0, "bfloat16"): [(0.9, 4.0), (0.842, 8.0)],
            ("houlsby", 1, "bfloat16"): [(0.7, 7.0), (0.85, 14.0)],
            ("houlsby", 0, "float32"): [(0.9, 9.0)],
            ("houlsby", 1, "float32"): [(0.78, 9.0)],
        }
        for (method, seed, dtype), scores in runs.items():
            epochs = [
                {"epoch": n, "step": n, "seconds": seconds, "accuracy": score}
                for n, (score, seconds) in enumerate(scores)
            ]
            finished_run("rte", method, seed, max(scores)[0], epochs=epochs, base_dtype=dtype)
        run(time_to_score, tmp_path)
        table = capsys.readouterr().out
        assert "| method | RTE, 84.2 accuracy |" in table
        assert "| full | 30 s (20 to 40), 1.00 |" in table
        assert "base_dtype bfloat16, r 64, share_layers 0 | 11 s (8 to 14), 0.37 |" in table
        assert "base_dtype float32, r 64, share_layers 0 | not reached |" in table
        assert (tmp_path / "time_to_score.md").read_text() == table

    def test_what_cannot_be_compared(self, finished_run, tmp_path):
        finished_run("rte", "houlsby", 0, 0.8)
        with pytest.raises(RecipeError, match=r"--baseline must be one of: houlsby.*; got 'full'\."):
            run(time_to_score, tmp_path)
        finished_run("rte", "full", 0, 0.8, epochs=[{"epoch": 1.0, "step": 1, "accuracy": 0.8}])
        with pytest.raises(RecipeError, match="A run on rte has no times"):
            run(time_to_score, tmp_path)
        for seed in (0, 1):
            epoch = {"epoch": 1.0, "step": 5 + seed, "seconds": 1.0, "accuracy": 0.8}
            finished_run("rte", "full", seed, 0.8, epochs=[epoch])
        with pytest.raises(RecipeError, match="The runs on rte must share evaluations"):
            run(time_to_score, tmp_path)
        with pytest.raises(RecipeError, match=r"--share must be greater than 0 and at most 1, got 99\.0"):
            run(time_to_score, tmp_path, "--share", 99)

    @pytest.mark.parametrize(("score", "shown"), [(-0.1, r"-10\.00"), (0.0, r"0\.00")])
    def test_a_score_that_is_not_positive_has_no_share(self, finished_run, tmp_path, score, shown):
        finished_run("rte", "full", 0, score, epochs=[{"epoch": 1.0, "step": 1, "accuracy": score, "seconds": 1.0}])
        with pytest.raises(RecipeError, match=rf"The baseline's best score must be positive, got {shown} on rte"):
            run(time_to_score, tmp_path)


class TestStability:
    def test_starts_and_norms(self, finished_run, tmp_path):
        for seed in range(3):
            for method, start in (("full", None), ("houlsby", None), ("houlsby", "x/checkpoint-20")):
                folder = finished_run("rte", method, seed, 0.5 + seed / 10, init_adapter=start)
                norms = {"bert.encoder.layer.0": 2.0 + seed, "classifier": 1.0}
                (folder / FILE).write_text("".join(json.dumps({"step": s, "norms": norms}) + "\n" for s in (1, 2)))
        run(stability, "--draw_only", "--output_dir", tmp_path)
        rows = lines(tmp_path / "stability.jsonl")
        assert [row["start"] for row in rows] == ["full fine-tuning", "adapters", "adapters, 20 steps first"]
        assert rows[0]["scores"] == {str(seed): pytest.approx(50 + 10 * seed) for seed in range(3)}
        assert_drawn(tmp_path / "stability")
        assert_drawn(tmp_path / "gradient_norms_rte")
        read = stability.read_norms({"arguments": {"output_dir": path.parent}} for path in tmp_path.glob(f"*/{FILE}"))
        assert read["bert.encoder.layer.0"] == {1: 3.0, 2: 3.0}  # the median of 2, 3 and 4

    def test_validation_chooses_the_learning_rate(self, finished_run, tmp_path):
        """By the mean over the seeds: the best run alone is at the other rate."""
        for rate, scores in {3e-4: (0.7, 0.8), 1e-3: (0.5, 0.9)}.items():
            for seed, score in enumerate(scores):
                finished_run("rte", "houlsby", seed, score, learning_rate=rate)
        run(stability, "--draw_only", "--output_dir", tmp_path)
        (row,) = lines(tmp_path / "stability.jsonl")
        assert row["scores"] == {"0": pytest.approx(70), "1": pytest.approx(80)}
        assert row["learning_rate"] == 3e-4

    def test_the_last_epoch_shows_a_collapse(self, finished_run, tmp_path):
        epochs = [{"epoch": 1.0, "step": 10, "accuracy": 0.7}, {"epoch": 2.0, "step": 20, "accuracy": 0.5}]
        finished_run("rte", "houlsby", 0, 0.7, epochs=epochs)
        run(stability, "--draw_only", "--output_dir", tmp_path)
        (row,) = lines(tmp_path / "stability.jsonl")
        assert (row["scores"], row["last"]) == ({"0": pytest.approx(70)}, {"0": pytest.approx(50)})

    def test_runs_of_a_sweep_have_no_norms_to_draw(self, finished_run, tmp_path):
        finished_run("rte", "houlsby", 0, 0.5)
        run(stability, "--draw_only", "--output_dir", tmp_path)
        assert_drawn(tmp_path / "stability")
        assert not list(tmp_path.glob("gradient_norms*"))

    def test_pretraining_comes_first_and_its_checkpoints_are_the_starts(self, tmp_path):
        arguments = planned(
            tmp_path, task=["minimal_pairs"], seed=["0", "1"], model_name="tiny", pretraining_steps=[20, 30],
            pretraining_learning_rate="2e-4", pretraining_seed="7", pretraining_precision="bf16",
        )  # fmt: skip
        with patch.object(stability, "run_missing") as done:
            runs = list(stability.make_all(arguments, ["--use_cpu"]))
        ((pretrainings, _), _) = done.call_args
        for pretraining, rate in zip(pretrainings, ("2e-4", "5e-5"), strict=True):
            flags = pretraining.arguments
            expected = {"save_steps": "10", "max_steps": "30", "seed": "7", "bf16": "true", "base_dtype": "float32"}
            assert {name: flags[flags.index(f"--{name}") + 1] for name in expected} == expected
            assert flags[flags.index("--learning_rate") + 1] == rate
            assert "--use_cpu" in flags
            text = Path(flags[flags.index("--data") + 1]).read_text().split("\n")
            assert len(text) == 4400
        adapters, full = pretrainings
        assert (adapters.point, full.point) == ({}, {"method": "full"})
        assert all(run.at(run.point) == run for run in pretrainings), "a sweep finds another folder"
        starts = [run.flags[-2] for run in runs if "--init_adapter" in run.flags]
        assert starts == [str(adapters.folder / f"checkpoint-{steps}") for steps in (20, 20, 30, 30)]
        starts = [run.flags[run.flags.index("--model_name") + 1] for run in runs if run.point["method"] == "full"]
        assert starts == ["tiny"] * 2 + [str(full.folder / f"checkpoint-{steps}") for steps in (20, 20, 30, 30)]
        assert len(runs) == 2 + 2 + 4 + 4
        assert len({run.folder for run in runs}) == len(runs)

    def test_lengths_of_pretraining_and_of_fine_tuning(self, finished_run, tmp_path):
        """With one run per start, whose epochs are drawn, and with a run for each number of epochs."""
        for method, model, start in (("houlsby", "tiny", "x/checkpoint-{}"), ("full", "x/checkpoint-{}", None)):
            for steps in (0, 20, 30):
                epochs = [{"epoch": n, "step": n, "accuracy": (50 + steps + n) / 100} for n in (1.0, 2.0)]
                begun = steps and start and start.format(steps)
                folder = finished_run(
                    "rte", method, 0, epochs[-1]["accuracy"], epochs=epochs, init_adapter=begun or None
                )
                results = json.loads((folder / "results.json").read_text())
                results["model"] = model.format(steps) if steps else "tiny"
                (folder / "results.json").write_text(json.dumps(results))
        run(stability, "--draw_only", "--output_dir", tmp_path)
        rows = {(row["method"], row["pretraining_steps"]): row for row in lines(tmp_path / "stability.jsonl")}
        assert [*rows] == [(method, steps) for steps in (0, 20, 30) for method in ("full", "houlsby")]
        assert rows["full", 30]["by_epochs"] == {"1.0": pytest.approx(81), "2.0": pytest.approx(82)}
        assert rows["houlsby", 0]["by_epochs"] == {"1.0": pytest.approx(51), "2.0": pytest.approx(52)}
        for name in ("pretraining", "epochs", "learning_curves"):
            assert_drawn(tmp_path / f"{name}_rte")
        boxes = stability.draw_lengths([*rows.values()]).axes[0].get_lines()
        points = [[*line.get_ydata()] for line in boxes if line.get_marker() == "."]
        assert points == [[pytest.approx(72), pytest.approx(82)]] * 2, "a point for each length, after the last epoch"

        runs = []
        for length in (1, 3):
            epochs = [{"epoch": float(n), "accuracy": (10 * length + n) / 100} for n in range(1, length + 1)]
            runs.append({"task": "rte", "chosen_by": "accuracy", "epochs": epochs,
                         "arguments": {"num_train_epochs": length}})  # fmt: skip
        assert stability.by_epochs(runs) == {1.0: pytest.approx(11), 3.0: pytest.approx(33)}

    def test_a_run_for_each_number_of_epochs(self, tmp_path):
        runs = list(stability.make_all(planned(tmp_path, num_train_epochs=["1", "2"]), []))
        assert [run.point["num_train_epochs"] for run in runs] == ["1", "2"] * 2

    @pytest.mark.parametrize(
        ("given", "flags", "rates"),
        [
            (None, [], {"houlsby": ["1e-3"], "full": ["1e-4"]}),
            (None, ["--preset", "han2021"], {"houlsby": [None], "full": [None]}),  # which has a rate for each
            (["5e-4", "1e-3"], ["--preset", "han2021"], {"houlsby": ["5e-4", "1e-3"], "full": [None]}),
        ],
    )
    def test_rates_that_nobody_gave_are_the_presets(self, tmp_path, given, flags, rates):
        arguments = planned(tmp_path, learning_rate=given, full_learning_rate=None)
        found = {"houlsby": [], "full": []}
        for one in stability.make_all(arguments, flags):
            found[one.point["method"]].append(one.point.get("learning_rate"))
        assert found == rates

    @pytest.mark.parametrize(
        ("model_name", "flags", "trained"),
        [
            (None, [], True),
            ("minilm", [], True),
            ("minilm", ["--train_pooler", "false"], False),
            ("google-bert/bert-base-uncased", [], False),
            (None, ["--preset", "han2021"], False),
        ],
    )
    def test_the_pooler_is_trained_where_it_has_had_no_pretraining(self, tmp_path, model_name, flags, trained):
        """With all methods, of which fine-tuning always does it."""
        (tmp_path / "rte").mkdir()
        arguments = planned(tmp_path, data_dir=str(tmp_path), model_name=model_name)
        for one in stability.make_all(arguments, flags):
            with patch.object(sys, "argv", one.arguments):
                assert parse_arguments()[2].train_pooler is trained

    @pytest.mark.parametrize(
        ("model_name", "flags", "model"),
        [
            (None, [], "minilm"),
            (None, ["--preset", "han2021"], "google-bert/bert-base-uncased"),
            ("tiny", ["--preset", "han2021", "--lr_scheduler_type", "cosine", "--r", "8"], "tiny"),
            ("tiny", ["--layers", "2", "3", "--share_layers", "2", "--use_cpu", "--max_length", "64"], "tiny"),
        ],
    )
    def test_the_pretrained_adapter_is_the_one_that_the_runs_train(self, tmp_path, model_name, flags, model):
        """Each recipe reads its flags as from the command line."""
        for folder in ("rte", "pretraining/rte/mlm/run/checkpoint-20"):
            (tmp_path / folder).mkdir(parents=True)
        arguments = planned(tmp_path, data_dir=str(tmp_path), model_name=model_name, pretraining_steps=[20])
        with patch.object(stability, "run_missing") as done:
            *_, last, full = stability.make_all(arguments, flags)
        ((pretraining, whole), _), _ = done.call_args
        groups = (TextArguments, MethodArguments, AdapterArguments, RecipeTrainingArguments)
        with patch.object(sys, "argv", whole.arguments):
            (text, *_) = RecipeParser(groups).parse()
        asked = parse_arguments([*full.flags, "--task", "rte", "--model_name", model, "--method", "full"])[0]
        assert (text.model_name, text.max_length) == (model, asked.max_length), "the encoder without adapters"
        with patch.object(sys, "argv", last.arguments):
            task, _, adapter, _ = parse_arguments()
        with patch.object(sys, "argv", pretraining.arguments):
            text, _, pretrained, _ = RecipeParser(groups).parse()
        assert (text.model_name, text.max_length) == (task.model_name, task.max_length)
        assert text.model_name == model
        trained = vars(replace(adapter, init_adapter=None))
        # No pooler takes part in predicting words.
        assert {name: value for name, value in trained.items() if name != "train_pooler"} == vars(pretrained)


class TestGradientNorms:
    @pytest.mark.parametrize(
        ("parameter", "layer"),
        [
            ("bert.encoder.layer.3.output.LayerNorm.weight", "bert.encoder.layer.3"),
            ("base_model.model.bert.encoder.layer.11.output.dropout.houlsby_adapter.default.up_proj.weight",
             "bert.encoder.layer.11"),
            ("module.base_model.model.decoder.block.0.layer.2.dropout.houlsby_adapter.a.up_proj.bias",
             "decoder.block.0"),
            ("base_model.model.classifier.modules_to_save.default.weight", "classifier"),
            ("bert.pooler.dense.bias", "bert.pooler"),
            ("bert.embeddings.LayerNorm.houlsby_norm.default.weight", "bert.embeddings"),
            ("pre_classifier.weight", "pre_classifier"),
            ("shared.weight", "shared"),
        ],
    )  # fmt: skip
    def test_layers(self, parameter, layer):
        assert layer_of(parameter) == layer

    @pytest.mark.parametrize("clip", [1e-3, 0.0])
    @pytest.mark.parametrize("accumulated", [1, 2])
    def test_the_norms_of_a_run_by_hand(self, tmp_path, clip, accumulated):
        """The first step's gradients, of one batch or of two accumulated ones, computed without a Trainer."""
        model = get_peft_model(tiny_bert(hidden_dropout_prob=0, attention_probs_dropout_prob=0), HoulsbyConfig(r=4))
        rows = [{"input_ids": list(range(i, i + 5)), "labels": i % 3} for i in range(4)]
        batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
        expected = {}
        model.train()
        model(**batch).loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                square = parameter.grad.norm().item() ** 2
                expected[layer_of(name)] = expected.get(layer_of(name), 0.0) + square
        model.zero_grad()
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, logging_steps=1, max_grad_norm=clip, report_to="none", use_cpu=True,
            per_device_train_batch_size=4 // accumulated, gradient_accumulation_steps=accumulated,
            train_sampling_strategy="sequential", learning_rate=0.0, save_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Dataset.from_list(rows), callbacks=[GradientNorms()])
        trainer.model_accepts_loss_kwargs = False
        trainer.train()
        first, second = lines(tmp_path / FILE)
        assert (first["step"], second["step"]) == (1, 2)
        assert (
            first["norms"].keys() == expected.keys() == {*(f"bert.encoder.layer.{i}" for i in range(4)), "classifier"}
        )
        for layer, square in expected.items():
            assert first["norms"][layer] == pytest.approx(math.sqrt(square), rel=1e-3)


class TestGrid:
    def test_flags_of_the_recipe_go_through_and_the_demo_is_short(self):
        def parse(*flags: str) -> tuple[list[str], list[str]]:
            with patch.object(sys, "argv", ["x.py", *flags]):
                arguments, rest = GridParser("runs/x", "Text.", {"seed": [7]}).parse()
            return arguments.seed, rest

        assert parse() == (["7"], ["--num_train_epochs", "1"])
        assert parse("--max_steps", "9", "--seed", "1") == (["1"], ["--max_steps", "9"])
        assert parse("--task", "cola", "--data_dir", "glue") == (["0", "1", "2"], ["--data_dir", "glue"])

    def test_all_tasks_are_those_of_glue(self):
        with patch.object(sys, "argv", ["x.py", "--task", "all"]):
            arguments, _ = GridParser("runs/x", "Text.", {}).parse()
        assert arguments.task == ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]

    def test_a_failed_run_says_where_its_log_is(self, tmp_path, capsys):
        recipe = tmp_path / "broken.py"
        recipe.write_text("raise SystemExit('error: no such thing')")
        runs = make_grids(tmp_path, ["cola"], [{"seed": ["0"]}], [], recipe)
        with pytest.raises(RecipeError, match="1 of 1 runs have failed"):
            run_missing(runs, Namespace(output_dir=tmp_path, jobs=1, dry_run=False))
        printed = capsys.readouterr().err
        assert "no such thing" in printed
        assert str(runs[0].folder / "log.txt") in printed

    @pytest.mark.parametrize("analysis", [extensions, init_scale, stability, tradeoff])
    def test_the_commands_of_an_analysis(self, tmp_path, capsys, analysis):
        """On a machine without the data."""
        flags = ["--pretraining_steps", 20] if analysis is stability else []
        data = ["--task", "rte", "--data_dir", "/nowhere/glue"]
        run(analysis, "--dry_run", "--output_dir", tmp_path, *data, "--seed", 0, *flags)
        commands = capsys.readouterr().out.splitlines()
        assert len(commands) > 2
        assert all("/nowhere/glue" in command for command in commands)
        assert all("accelerate.commands.launch" in command for command in commands)
        assert ("mlm.py" in commands[0]) == bool(flags), "the pretraining comes first"
        assert not list(tmp_path.rglob("*")), "something is written"
