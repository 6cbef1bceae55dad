"""The papers' figures: their numbers, from the runs in a folder, and that they are readable at full
size.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from matplotlib import pyplot as plt
from peft import PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

import figure
import glue
from demo import minimal_pairs
from edited_json import edited_json
from figures import compare, curves, init_scale, robustness, stability, tradeoff
from figures.drawing import show_counts
from figures.finished_run import load_run
from figures.gradients import FILE, GradientNorms, layer_of
from figures.pwws import pwws
from figures.wordnet import WordNet
from houlsby_peft import HoulsbyConfig
from recipe_runs import run, save_tiny_encoder, start, write
from results.additional import PAPER
from results.lines import arrange, find_columns
from results.read import finished
from run.edge import RecipeError
from sweeping.runs import CHOSEN
from tasks.scores import GLUE_TASKS, proper_name
from tiny_models import tiny_bert


ARGUMENTS = {
    "init_std": 0.01,
    "r": 64,
    "share_layers": 0,
    "top_k": None,
    "lora_r": 8,
    "init_adapter": None,
    "learning_rate": 1e-3,
}


@pytest.fixture
def finished_run(tmp_path):
    """Writes the results of a run that there might have been, whose main score is the first of
    `scores`.
    """
    numbers = itertools.count()

    def write(task, method, seed, score=None, trained=100, scores=None, epochs=None, test=None,
              model="tiny", **arguments) -> Path:  # fmt: skip
        scores = scores or {GLUE_TASKS.get(task, ("accuracy",))[0]: score, "accuracy": score}
        name = next(iter(scores))
        folder = tmp_path / f"{next(numbers):03}"
        folder.mkdir()
        results = {
            "task": task, "method": method, "model": model, "seed": seed,
            "best_score": scores[name], "best_scores": scores, "chosen_by": name,
            "trainable_parameters": trained, "total_parameters": 1000, "peak_memory": 2000,
            "epochs": epochs or [{"epoch": 1.0, "step": 10, "seconds": 9.0, **scores}],
            "test": None if test is None else {"accuracy": test},
            "arguments": {**ARGUMENTS, "output_dir": "moved", **arguments},
        }  # fmt: skip
        (folder / "results.json").write_text(json.dumps(results))
        return folder

    return write


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw(name: str, folder: Path, *flags: object) -> list[dict]:
    """Draw a figure; return its points, if it writes them in lines under its name."""
    start(figure, name, folder, *flags)
    points = folder / f"{name}.jsonl"
    return lines(points) if points.exists() else []


def band(point: dict) -> tuple[float, float, float]:
    return point["low"], point["middle"], point["high"]


def epochs_of(scores: Sequence[float], seconds: Sequence[float] | None = None) -> list[dict]:
    """The record of an epoch for each score."""
    epochs = []
    for index, score in enumerate(scores):
        epoch = {"epoch": index + 1.0, "step": 10 * (index + 1), "accuracy": score}
        epochs.append({**epoch, "seconds": seconds[index] if seconds else 9.0})
    return epochs


def assert_drawn(path: Path) -> None:
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in path.with_suffix(".svg").read_text()


MNLI = {"matched_accuracy": 0.84, "mismatched_accuracy": 0.83}


class TestTradeoff:
    def test_one_task_has_its_scores_and_full_fine_tuning_a_place(
        self, finished_run, tmp_path, capsys
    ):
        """Each method shows its own size; every recipe records all of them."""
        for seed, (full, small, large) in enumerate([(0.8, 0.7, 0.79), (0.9, 0.8, 0.83)]):
            finished_run("cola", "full", seed, full, 1000)
            finished_run("cola", "houlsby", seed, small, 20, r=1)
            finished_run("cola", "houlsby", seed, large, 50, r=8)
        finished_run("cola", "top_k", 0, 0.5, 60, top_k=3)
        finished_run("cola", "houlsby", 0, 0.5, 70, share_layers=3)
        points = draw("tradeoff", tmp_path)
        drawn = [(point["series"], point["trained_parameters"], point["size"]) for point in points]
        assert drawn == [
            ("adapters", 20, "r=1"),
            ("adapters", 50, "r=8"),
            ("fine-tuning of the top k layers", 60, "k=3"),
            ("adapters, shared by 3 layers", 70, "r=64"),
            ("full fine-tuning", 1000, ""),
        ]
        assert points[0]["scores"] == {"CoLA": pytest.approx([70, 80])}
        assert band(points[0]) == pytest.approx((70, 75, 80))
        assert band(points[-1]) == pytest.approx((80, 85, 90))
        assert "CoLA: norms alone 3.5 points less" in capsys.readouterr().out, "the paper's loss"
        assert_drawn(tmp_path / "tradeoff")

    def test_an_axis_of_sizes_has_numbers_without_a_power_of_ten(self):
        figure, axes = plt.subplots()
        axes.plot([51_202, 96_000], [0, 1])
        show_counts(axes)
        figure.draw_without_rendering()
        low, high = axes.get_xlim()
        assert len([tick for tick in axes.get_xticks() if low < tick < high]) > 1
        assert "60k" in [label.get_text() for label in axes.get_xticklabels()]

    def test_percentiles_over_tasks(self, finished_run, tmp_path):
        """Validation chooses the rate of each task."""
        for lost, task in enumerate(["cola", "sst2", "mrpc", "rte", "qnli", "qqp"]):
            finished_run(task, "full", 0, 0.9)
            finished_run(task, "houlsby", 0, 0.9 - lost / 100, learning_rate=(1e-3, 1e-4)[lost % 2])
            finished_run(task, "houlsby", 0, 0.4, learning_rate=(1e-4, 1e-3)[lost % 2])
        points = draw("tradeoff", tmp_path)
        [point] = [point for point in points if point["series"] == "adapters"]
        assert band(point) == pytest.approx((-4, -2.5, -1))  # of 0, -1, ... -5 points

    def test_scores_on_other_data_than_those_of_full_fine_tuning(
        self, finished_run, tmp_path, capsys
    ):
        """Here and in `compare`, adapters are compared on one task, and LoRA on both."""
        for method, score in (("full", 0.9), ("houlsby", 0.8), ("lora", 0.7)):
            for task in ("rte", "cola"):
                with edited_json(finished_run(task, method, 0, score) / "results.json") as results:
                    rows = 40 if (method, task) == ("houlsby", "cola") else 408
                    results["dataset"] = {"rows": {"validation": rows}}
        points = draw("tradeoff", tmp_path)
        assert {point["series"] for point in points} == {"LoRA", "full fine-tuning"}
        assert "left out, as full fine-tuning has other data of CoLA" in capsys.readouterr().out
        draw("compare", tmp_path)
        facts = pd.read_csv(tmp_path / "compare.csv", index_col=0)
        assert [*facts["difference"]] == pytest.approx([0, -10, -20])
        out = capsys.readouterr().out
        assert out.count("other data:") == 1
        of_times = out.partition("Time to")[2].splitlines()
        [row] = [line.split() for line in of_times if line.startswith("houlsby")]
        assert row[-3:] == ["not", "reached", "-"]

    def test_validation_chooses_the_best_seed(self, finished_run, tmp_path):
        for task in ("additional_a", "additional_b"):
            finished_run(task, "houlsby", 0, 0.9, test=0.6)
            finished_run(task, "houlsby", 1, 0.8, test=0.7)
        for seeds, expected in (("best", 60), ("mean", 65)):
            (point,) = draw("tradeoff", tmp_path, "--split", "test", "--seeds", seeds)
            assert point["middle"] == pytest.approx(expected)

    def test_accuracy_where_a_task_has_it_test_scores_and_panels(self, finished_run, tmp_path):
        """MNLI counts as two tasks, and the two ways to label complaints as one."""
        finished_run("mrpc", "houlsby", 0, scores={"f1": 0.8, "accuracy": 0.7})
        finished_run("stsb", "houlsby", 0, scores={"spearmanr": 0.6, "pearson": 0.5})
        finished_run("mnli", "houlsby", 0, scores=MNLI)
        for by in ("issue", "product"):
            finished_run(f"customer_complaints_{by}", "houlsby", 0, 0.5, test=0.4)
        (point,) = draw("tradeoff", tmp_path, "--score", "accuracy")
        expected = {"MRPC": 70, "STS-B": 60, "MNLI-m": 84, "MNLI-mm": 83}
        expected["customer_complaints_issue"] = 50
        assert point["scores"] == {name: pytest.approx([value]) for name, value in expected.items()}
        (point,) = draw("tradeoff", tmp_path, "--split", "test", "--each")
        assert point["panel"] == "customer_complaints_issue"
        assert point["middle"] == pytest.approx(40)

    def test_a_size_without_runs_on_all_tasks_is_left_out(self, finished_run, tmp_path):
        """Full fine-tuning is no exception; without it, scores are absolute."""
        finished_run("cola", "full", 0, 0.9)
        finished_run("rte", "houlsby", 0, 0.7)
        with pytest.raises(RecipeError, match="CoLA, RTE"):
            draw("tradeoff", tmp_path)
        finished_run("cola", "houlsby", 0, 0.7)
        [point] = draw("tradeoff", tmp_path)
        assert (point["series"], point["relative"]) == ("adapters", False)
        assert point["middle"] == pytest.approx(70)


class TestInitScale:
    def test_the_accuracy_is_shown_and_the_main_score_chooses(self, finished_run, tmp_path):
        for seed, score in enumerate([0.6, 0.8]):
            for task in ("cola", "rte"):
                finished_run(task, "houlsby", seed, score, init_std=0.1)
                finished_run(task, "houlsby", seed, score + 0.1)
                finished_run(task, "houlsby", seed, score - 0.1, r=8)
            scores = {"matthews_correlation": score + 0.2, "accuracy": 0.3}
            finished_run("cola", "houlsby", seed, scores=scores, init_std=0.1, learning_rate=3e-4)
        accuracy, main = self.points(tmp_path, "accuracy"), self.points(tmp_path, "main")
        assert len(accuracy) == len(main) == 6
        assert band(accuracy["RTE", 64, 0.1]) == pytest.approx((60, 70, 80))
        of_seeds = accuracy["CoLA", 8, 0.01]["scores"]
        assert of_seeds == {"0": pytest.approx(50), "1": pytest.approx(70)}
        assert accuracy["CoLA", 64, 0.1]["middle"] == pytest.approx(30)
        assert main["CoLA", 64, 0.1]["middle"] == pytest.approx(90)
        assert accuracy["CoLA", 64, 0.1]["learning_rate"] == 3e-4
        assert_drawn(tmp_path / "init_scale")

    def points(self, folder, score):
        points = {}
        for point in draw("init_scale", folder, "--score", score):
            points[point["task"], point["r"], point["init_std"]] = point
        return points

    def test_the_mean_over_the_papers_eight(self, finished_run, tmp_path, capsys):
        """With both of MNLI's accuracies, and without WNLI and STS-B, which the runs of table 1
        also have.
        """
        finished_run("stsb", "houlsby", 0, scores={"spearmanr": 0.8, "pearson": 0.7})
        finished_run("rte", "lora", 0, 0.7)
        with pytest.raises(RecipeError, match=r"No run of adapters .* --score main"):
            draw("init_scale", tmp_path)
        tasks = {"cola": 0.81, "sst2": 0.92, "mrpc": 0.85, "qqp": 0.9, "qnli": 0.91, "rte": 0.66}
        for task, score in {**tasks, "wnli": 0.5}.items():
            finished_run(task, "houlsby", 0, score)
        finished_run("mnli", "houlsby", 0, scores=MNLI)
        finished_run("cola", "full", 0, 0.9)
        finished_run("cola", "houlsby", 0, 0.8, r=8)
        points = draw("init_scale", tmp_path)
        names = {*map(proper_name, tasks), "MNLI-m", "MNLI-mm"}
        assert {point["task"] for point in points} == names
        average = 100 * (sum(tasks.values()) + 0.84 + 0.83) / 8
        # r=8 has no run on seven tasks.
        assert init_scale.means(points) == {64: pytest.approx(average)}
        assert f"r=64: mean of 8 tasks {average:.1f}" in capsys.readouterr().out


def test_learning_curves(finished_run, tmp_path):
    for seed, scores in enumerate([(0.6, 0.7, 0.9), (0.8, 0.7)]):
        seconds = [30 + 2 * seed, 60 + 2 * seed, 90]
        finished_run("rte", "houlsby", seed, 0.8, epochs=epochs_of(scores, seconds))
    draw("curves", tmp_path, "--x", "seconds")
    first, second = lines(tmp_path / "learning_curves.jsonl")  # the third epoch has one seed only
    assert (first["epoch"], first["step"], first["seconds"]) == (1, 10, 31)
    assert (second["epoch"], second["step"], second["seconds"]) == (2, 20, 61)
    assert band(first) == pytest.approx((60, 70, 80))
    assert band(second) == pytest.approx((70, 70, 70))
    assert_drawn(tmp_path / "learning_curves")
    with pytest.raises(RecipeError, match="accuracy"):
        draw("curves", tmp_path, "--score", "f1")


class TestCompare:
    def test_by_hand(self, finished_run, tmp_path):
        """Fine-tuning's mean scores are 65, 85 and 80 percent, and 99% of 85 are 84.15."""
        runs = {
            ("full", 0, None): [(0.5, 0.9, 0.7), (10, 20, 30)],
            # Seed 0 has no fourth epoch.
            ("full", 1, None): [(0.8, 0.8, 0.9, 0.99), (12, 40, 60, 80)],
            ("houlsby", 0, "bfloat16"): [(0.9, 0.842), (4, 8)],
            ("houlsby", 1, "bfloat16"): [(0.7, 0.85), (7, 14)],
            ("houlsby", 0, "float32"): [(0.9,), (9,)],
            ("houlsby", 1, "float32"): [(0.78,), (9,)],
        }
        for (method, seed, dtype), (scores, seconds) in runs.items():
            options = {"epochs": epochs_of(scores, seconds), "base_dtype": dtype}
            folder = finished_run("rte", method, seed, max(scores), **options)
            (folder / "adapter").mkdir()
            (folder / "adapter" / "adapter_model.safetensors").write_bytes(bytes(3_000_000))
        full, bfloat16, float32 = arrange(finished(tmp_path), CHOSEN)
        assert compare.times(full, full, 0.99) == {"rte, to 84.2": "30 s (20 to 40), 1.00"}
        assert compare.times(bfloat16, full, 0.99) == {"rte, to 84.2": "11 s (8 to 14), 0.37"}
        assert compare.times(float32, full, 0.99) == {"rte, to 84.2": "not reached"}
        draw("compare", tmp_path)
        facts = pd.read_csv(tmp_path / "compare.csv", index_col=0).loc[bfloat16.label]
        assert [*facts[["bytes", "seconds", "memory", "seeds"]]] == [3_000_000, 11, 2000, 2]
        # Of 0.90 - 0.90 and 0.85 - 0.99.
        assert [*facts[["difference", "difference_error"]]] == pytest.approx([-7, 7])
        assert "-7.00 ± 7.00" in (tmp_path / "compare.md").read_text()

    def test_activations(self, finished_run, tmp_path):
        for seed, (gelu, tanh) in enumerate([(0.7, 0.6), (0.8, 0.75)]):
            for name, score in (("gelu", gelu), ("tanh", tanh)):
                finished_run("rte", "houlsby", seed, score, activation=name)
        draw("compare", tmp_path, "--baseline", "activation gelu")
        facts = pd.read_csv(tmp_path / "compare.csv", index_col=0)
        gelu, tanh = facts.filter(like="gelu", axis=0), facts.filter(like="tanh", axis=0)
        assert [*gelu[["score", "score_error"]].iloc[0]] == pytest.approx([75, 5])
        # Of -10 and -5.
        assert [*tanh[["difference", "difference_error"]].iloc[0]] == pytest.approx([-7.5, 2.5])
        with pytest.raises(RecipeError, match="activation tanh"):
            draw("compare", tmp_path, "--baseline", "lora")

    def test_a_single_method_is_compared_with_itself(self, finished_run, tmp_path, capsys):
        for seed, score in enumerate((0.7, 0.8)):
            finished_run("rte", "houlsby", seed, score)
        draw("compare", tmp_path)
        facts = pd.read_csv(tmp_path / "compare.csv", index_col=0).iloc[0]
        assert (facts["score"], facts["difference"], facts["seconds"]) == pytest.approx((75, 0, 9))
        assert "Empty DataFrame" not in capsys.readouterr().out


class TestStability:
    @pytest.fixture
    def stable_runs(self, finished_run):
        """Runs of three seeds with gradients. The best run alone is at another rate, and the last
        epoch shows a collapse.
        """
        for rate, scores in {3e-4: (0.7, 0.8, 0.9), 1e-3: (0.5, 0.6, 0.95)}.items():
            for (seed, score), method in itertools.product(enumerate(scores), ("full", "houlsby")):
                options = {"epochs": epochs_of((score, 0.5)), "learning_rate": rate}
                folder = finished_run("rte", method, seed, score, **options)
                norms = {"bert.encoder.layer.0": 2.0 + seed, "classifier": 1.0}
                steps = [json.dumps({"step": step, "norms": norms}) for step in (1, 2)]
                (folder / FILE).write_text("\n".join(steps) + "\n")

    def test_seeds_and_the_chosen_rate(self, stable_runs, tmp_path, capsys):
        rows = draw("stability", tmp_path)
        assert [row["method"] for row in rows] == ["full", "houlsby"]
        for row in rows:
            assert (row["pretraining_steps"], row["learning_rate"]) == (0, 3e-4)
            assert [*row["scores"].values()] == pytest.approx([70, 80, 90])
            assert [*row["last"].values()] == pytest.approx([50, 50, 50])
        # Of 70, 80 and 90: deviations of 10, and quartiles halfway between the scores.
        printed = "mean 80.00, standard deviation 10.00, interquartile range 10.00"
        assert f"RTE, adapters, best epoch: {printed}" in capsys.readouterr().out
        for name in ("stability_rte", "gradient_norms_rte"):  # although the runs were moved
            assert_drawn(tmp_path / name)

    def test_the_norms_of_gradients_are_medians_of_the_seeds(self, stable_runs, tmp_path):
        folders = [{"folder": path.parent} for path in tmp_path.glob(f"*/{FILE}")]
        assert stability.read_norms(folders)["layer 0"] == {1: 3.0, 2: 3.0}  # of 2, 3 and 4

    def test_lengths_of_pretraining_and_of_fine_tuning(self, finished_run, tmp_path):
        """With one run per start, whose epochs are drawn."""
        for steps in (0, 20, 30):
            scores = ((51 + steps) / 100, (52 + steps) / 100)
            start = f"x/checkpoint-{steps}" if steps else None
            options = {"score": scores[-1], "epochs": epochs_of(scores)}
            finished_run("rte", "houlsby", 0, **options, init_adapter=start)
            finished_run("rte", "full", 0, **options, model=start or "tiny")
        rows = draw("stability", tmp_path)
        starts = [(row["pretraining_steps"], row["method"]) for row in rows]
        assert starts == list(itertools.product((0, 20, 30), ("full", "houlsby")))
        for row in rows:
            last = 52 + row["pretraining_steps"]
            assert [*row["by_epochs"].values()] == pytest.approx([last - 1, last])
        for name in ("pretraining", "epochs", "learning_curves"):
            assert_drawn(tmp_path / f"{name}_rte")
        drawn = stability.draw_lengths(rows).axes[0].get_lines()
        points = [[*line.get_xdata()] for line in drawn if line.get_marker() == "."]
        # A point for each length, after the last epoch.
        assert points == [[pytest.approx(72), pytest.approx(82)]] * 2

    def test_a_run_per_number_of_epochs(self):
        runs = []
        for length in (1, 3):
            scores = [(10 * length + number + 1) / 100 for number in range(length)]
            run = {"task": "rte", "chosen_by": "accuracy", "epochs": epochs_of(scores)}
            runs.append({**run, "arguments": {"num_train_epochs": length}})
        assert stability.by_epochs(runs) == {1.0: pytest.approx(11), 3.0: pytest.approx(33)}


class TestGradientNorms:
    def test_layers(self):
        parameters = {
            "bert.encoder.layer.3.output.LayerNorm.weight": "bert.encoder.layer.3",
            "module.base_model.model.decoder.block.0.layer.2.dropout.houlsby_adapter.a.bias": (
                "decoder.block.0"
            ),
            "base_model.model.classifier.modules_to_save.default.weight": "classifier",
            "bert.pooler.dense.bias": "bert.pooler",
            "bert.embeddings.LayerNorm.houlsby_norm.default.weight": "bert.embeddings",
            "pre_classifier.weight": "pre_classifier",
        }
        assert {name: layer_of(name) for name in parameters} == parameters

    @pytest.mark.parametrize(("clip", "accumulated"), [(1e-3, 1), (0.0, 2)])
    def test_the_norms_of_a_run_by_hand(self, tmp_path, clip, accumulated):
        """The first step's gradients, of one batch or of two accumulated ones, computed without a
        Trainer.
        """
        model = get_peft_model(
            tiny_bert(hidden_dropout_prob=0, attention_probs_dropout_prob=0), HoulsbyConfig(r=4)
        )
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
            str(tmp_path), max_steps=2, logging_steps=1, max_grad_norm=clip, report_to="none",
            use_cpu=True, per_device_train_batch_size=4 // accumulated,
            gradient_accumulation_steps=accumulated, train_sampling_strategy="sequential",
            learning_rate=0.0, save_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=Dataset.from_list(rows), callbacks=[GradientNorms()]
        )
        trainer.model_accepts_loss_kwargs = False
        trainer.train()
        first, second = lines(tmp_path / FILE)
        assert (first["step"], second["step"]) == (1, 2)
        layers = {f"bert.encoder.layer.{index}" for index in range(4)}
        assert first["norms"].keys() == expected.keys() == layers | {"classifier"}
        for layer, square in expected.items():
            assert first["norms"][layer] == pytest.approx(math.sqrt(square), rel=1e-3)


def cut_or_overprinted(figure) -> list[str]:
    """The labels of a figure's axes that reach beyond it, or overlap on the same axis."""
    figure.draw_without_rendering()
    labels = []
    for axes in figure.axes:
        labels += overprinted(axes.get_xticklabels()) + overprinted(axes.get_yticklabels())
        for label in (axes.xaxis.label, axes.yaxis.label, axes.title, *axes.get_yticklabels()):
            box = label.get_window_extent()
            is_cut = box.x0 < -1 or box.x1 > figure.bbox.x1 + 1 or box.y0 < -1
            if label.get_text() and is_cut:
                labels.append(label.get_text())
    return labels


def overprinted(names: list) -> list[str]:
    visible = [name for name in names if name.get_text() and name.get_visible()]
    labels = []
    for name, neighbor in itertools.pairwise(visible):
        if name.get_window_extent().overlaps(neighbor.get_window_extent()):
            labels.append(name.get_text())
    return labels


class TestFullSize:
    """With as many tasks and runs as the papers have: as wide as a page, and no name is cut off or
    overprinted.
    """

    def test_eighteen_tasks(self, finished_run, tmp_path):
        scores = [0.5 + number / 100 for number in range(20)]
        options = {"scores": {"accuracy": 0.7}, "epochs": epochs_of(scores, [*range(20)])}
        for task in PAPER.index:
            for method, trained in (("full", 110_000_000), ("houlsby", 900_000), ("lora", 300_000)):
                finished_run(task, method, 0, trained=trained, **options)
        rows = arrange(finished(tmp_path), CHOSEN)
        for drawn in (
            curves.draw(curves.summarize(rows)),
            tradeoff.draw(tradeoff.summarize(rows, find_columns(rows), each=True)),
        ):
            assert drawn.get_figwidth() < 7
            assert not cut_or_overprinted(drawn)

    def test_twenty_two_starts(self):
        rows = [
            {"task": "cola", "method": method, "pretraining_steps": 2000 * n,
             "score": "matthews_correlation", "scores": {0: 50 + n, 1: 52 + n},
             "last": {0: 49 + n, 1: 51}, "by_epochs": {1.0: 40, 2.0: 50 + n},
             "run": f"method={method},seed=0", "pretraining_epochs": n, "examples": 872,
             "success_rate": 0.5, "standard_error": 0.01}
            for n in range(11) for method in ("full", "houlsby")
        ]  # fmt: skip
        for function in (
            stability.draw_seeds,
            stability.draw_lengths,
            stability.draw_epochs,
            stability.draw_learning_curves,
            robustness.draw,
        ):
            figure = function(rows)
            assert figure.get_figwidth() < 7
            assert not cut_or_overprinted(figure), function


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of runs with adapters and without."""
    folder = tmp_path_factory.mktemp("trained")
    encoder = save_tiny_encoder(folder / "encoder")
    for split, rows in minimal_pairs().items():
        columns = {name: rows[name][:200] for name in ("sentence", "label")}
        write(folder / "sst2" / f"{split}.csv", **columns)
    for method in ("houlsby", "full"):
        run(glue, task="sst2", data_dir=folder, model_name=encoder, output_dir=folder / method,
            method=method, max_steps=4, r=8, report_to="none", save_strategy="no",
            load_best_model_at_end=False, eval_strategy="no")  # fmt: skip
    return folder


def accuracy_of(model: PeftModel, finished) -> float:
    """The accuracy of a model on the validation data of a run, without its Trainer."""
    hits = []
    for batch in finished.trainer.get_eval_dataloader():
        labels = batch.pop("labels")
        hits.append(model(**batch).logits.argmax(-1) == labels)
    return torch.cat(hits).double().mean().item()


@pytest.fixture(scope="module")
def ablated(trained, tmp_path_factory):
    """A run that has been ablated and pruned by a layer."""
    folder = tmp_path_factory.mktemp("ablated") / "run"
    shutil.copytree(trained / "houlsby", folder)
    draw("ablation", folder, "--prune", 1, "--norms", "remove")
    return folder


class TestAblation:
    def test_a_row_for_each_span_of_layers(self, ablated):
        first, *rows = lines(ablated / "ablation.jsonl")
        spans = [[i, j] for i in range(4) for j in range(i, 4)]
        assert sorted(row["span"] for row in rows) == spans
        for row in rows:
            change = row["scores"]["accuracy"] / first["scores"]["accuracy"] - 1
            assert row["relative_change"] == pytest.approx(change)
        assert_drawn(ablated / "ablation")

    def test_scores_are_the_runs_and_those_of_the_pruned_adapter(self, ablated):
        finished = load_run(ablated, None, 64)
        pruned = HoulsbyConfig.from_pretrained(ablated / "pruned")
        removed = {*range(4)} - {*pruned.layers_to_transform}
        first, *rows = lines(ablated / "ablation.jsonl")
        [row] = [row for row in rows if row["span"] == [min(removed), max(removed)]]
        model = finished.trainer.model
        assert accuracy_of(model, finished) == pytest.approx(first["scores"]["accuracy"])
        pruned = PeftModel.from_pretrained(model.unload(), ablated / "pruned").eval()
        assert accuracy_of(pruned, finished) == pytest.approx(row["scores"]["accuracy"])

    def test_what_is_printed(self, trained, tmp_path, capsys):
        folder = shutil.copytree(trained / "houlsby", tmp_path / "run")
        points = draw("ablation", folder)
        output = capsys.readouterr().out
        rows = {tuple(row["span"] or ()): row for row in points}
        labels = load_run(folder, None, 64).validation["label"]
        without_all = f"accuracy {100 * rows[0, 3]['scores']['accuracy']:.1f}"
        majority = 100 * max(Counter(labels).values()) / len(labels)
        assert f"{without_all}, the majority class {majority:.1f}" in output
        least = min(rows[layer, layer]["relative_change"] for layer in range(4))
        assert f"at most {-100 * least:.1f}% less" in output

    def test_what_has_no_adapters_or_is_no_run(self, trained, tmp_path):
        with pytest.raises(ValueError, match="here none"):
            draw("ablation", trained / "full")
        with pytest.raises(RecipeError, match="finished run"):
            draw("ablation", tmp_path)


DEBIAN = Path("/usr/share/wordnet")
SYNSETS = {
    "noun": [["film", "movie"], ["film", "thin_film", "coat"], ["light", "lamp"], ["well"]],
    "verb": [["light", "ignite"]],
    "adj": [["good(p)", "fine"], ["good", "Good", "honest"], ["light", "pale"], ["light", "airy"]],
    "adv": [["well", "good"]],
}
TAGGED = ["film%1:10:00:: 1 9", "good%3:00:01:: 1 20", "good%4:02:00:: 1 3", "well%4:02:00:: 1 8"]


def write_wordnet(folder: Path) -> Path:
    """A database of a few synsets in WordNet's format."""
    for part, synsets in SYNSETS.items():
        data, offsets = b"  1 A licence.\n", {}
        for words in synsets:
            for word in words:
                offsets.setdefault(word.partition("(")[0].lower(), []).append(len(data))
            listed = " ".join(f"{word} 0" for word in words)
            line = f"{len(data):08} 05 {part[0]} {len(words):02x} {listed}"
            data += f"{line} 001 @ 00000001 n 0000 | a gloss\n".encode()
        (folder / f"data.{part}").write_bytes(data)
        index = ""
        for word, at in offsets.items():
            senses = [f"{offset:08}" for offset in dict.fromkeys(at)]
            index += f"{word} {part[0]} {len(senses)} 1 @ {len(senses)} 0 {' '.join(senses)}  \n"
        (folder / f"index.{part}").write_text("  1 A licence.\n" + index)
    (folder / "cntlist.rev").write_text("\n".join(TAGGED) + "\n")
    return folder


@pytest.mark.parametrize(
    ("word", "part", "synonyms"),
    [
        ("film", "noun", ["movie", "coat"]),  # both senses, without the synonym of two words
        ("Film", "noun", ["movie", "coat"]),
        # Tagged more often as an adjective; "Good" is the word itself.
        ("good", "adj", ["fine", "honest"]),
        ("well", "adv", ["good"]),
        # Never tagged: the part of speech with the most senses.
        ("light", "adj", ["pale", "airy"]),
        ("films", None, []),
    ],
)
def test_synonyms(word, part, synonyms, tmp_path):
    wordnet = WordNet(write_wordnet(tmp_path))
    assert wordnet.part_of_speech(word) == part
    assert wordnet.synonyms(word) == synonyms


@pytest.mark.skipif(
    not DEBIAN.is_dir(), reason="needs Debian's wordnet-base, which is not installed"
)
def test_synonyms_of_the_real_database():
    wordnet = WordNet(DEBIAN)
    assert wordnet.synonyms("movie") == ["film", "picture", "pic", "flick"]
    assert wordnet.part_of_speech("good") == "adj"


class Toy:
    """A model whose probability of label 1 is a sum over the words, and which counts what it is
    asked.
    """

    def __init__(self, start: float, **weights: float) -> None:
        self.start, self.weights, self.queries = start, weights, 0

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        self.queries += len(texts)
        probabilities = []
        for text in texts:
            probability = self.start
            for word in text.split():
                probability += self.weights.get(word.lower(), 0)
            probabilities.append([1 - probability, probability])
        return np.array(probabilities)


SYNONYMS = {"great": ["superb", "fine"], "film": ["movie", "picture"], "plot": ["story"]}
WEIGHTS = {
    "great": 0.3,
    "film": 0.1,
    "superb": 0.35,
    "fine": 0.2,
    "movie": -0.05,
    "picture": 0.05,
    "story": -0.02,
}


def attack(text: str, label: int, model: Toy, synonyms: dict[str, list[str]] = SYNONYMS):
    return pwws(text, label, model, lambda word: synonyms.get(word.lower(), []), "[UNK]")


class TestPwws:
    """Of "great plot film", saliencies are 0.3, 0, 0.1, so their softmax 0.391, 0.289, 0.320; the
    best substitutes fine, story, movie lower the probability by 0.10, 0.02, 0.15, so the scores are
    0.039, 0.006, 0.048: film first, then great, then plot.
    """

    @pytest.mark.parametrize(
        ("start", "label", "movie", "text", "success", "replaced"),
        [
            (0.24, 1, -0.05, "great plot movie", True, 1),  # 0.64 - 0.15 is below a half
            (0.30, 1, -0.05, "fine plot movie", True, 2),  # 0.70 - 0.15 is not
            (0.36, 1, -0.05, "fine story movie", True, 3),  # 0.76 - 0.15 - 0.10 - 0.02 = 0.49
            (0.50, 1, -0.05, "fine story movie", False, 3),
            # The falls are 0.10 and 0.11, the scores 0.039 and 0.035.
            (0.19, 1, -0.01, "fine plot film", True, 1),
            # Of label 0, superb is the better substitute.
            (0.08, 0, -0.05, "superb plot film", True, 1),
        ],
    )
    def test_greedy_order(self, start, label, movie, text, success, replaced):
        model = Toy(start, **{**WEIGHTS, "movie": movie})
        outcome = attack("great plot film", label, model)
        assert (outcome.text, outcome.success) == (text, success)
        assert (outcome.replaced, outcome.words) == (replaced, 3)
        assert outcome.queries == 1 + 3 + 5 + replaced

    def test_the_rest_of_the_text_stays_to_the_letter(self):
        text = "  A Great plot -- and GREAT film's 's 2nd film?!"
        outcome = attack(text, 1, Toy(0.5, **WEIGHTS), {**SYNONYMS, "s": ["sulfur"]})
        assert outcome.text == "  A Fine story -- and FINE film's 's 2nd movie?!"
        assert outcome.words == 9  # a, great, plot, and, great, film's, s, nd, film

    def test_nothing_to_replace(self):
        model, text = Toy(0.5), "it is in a"
        synonyms = {"it": ["trade"], "in": ["inch"], "a": ["ampere"], "is": ["be"]}
        outcome = attack(text, 1, model, synonyms)
        assert (outcome.text, outcome.success, outcome.replaced) == (text, False, 0)
        assert outcome.queries == model.queries == 0


class TestRobustness:
    def test_two_runs(self, trained, tmp_path):
        folders = [trained / method for method in ("houlsby", "full")]
        draw("robustness", *folders, "--wordnet", write_wordnet(tmp_path), "--output_dir", tmp_path,
             "--max_eval_samples", 40)  # fmt: skip
        rows = lines(tmp_path / "robustness.jsonl")
        assert [row["run"] for row in rows] == ["houlsby", "full"]
        for row in rows:
            assert row["examples"] == 40
            assert row["attacked"] == len(row["attacks"]) == round(40 * row["accuracy"])
            assert row["successes"] == sum(attack["success"] for attack in row["attacks"])
            assert row["success_rate"] == row["successes"] / row["attacked"]
        assert_drawn(tmp_path / "robustness")

    def test_epochs_of_pretraining(self, tmp_path):
        """Of a checkpoint, of the chosen epoch, of the last one; without pretraining, and of a
        folder that is lost.
        """

        def epochs(start: str) -> float | None:
            results = {"model": str(tmp_path / start), "arguments": {"init_adapter": None}}
            return robustness.pretraining_epochs(results)

        for folder in ("checkpoint-20", "model"):
            (tmp_path / folder).mkdir()
        (tmp_path / "checkpoint-20" / "trainer_state.json").write_text('{"epoch": 0.5}')
        assert (epochs("checkpoint-20"), epochs("model"), epochs("moved")) == (0.5, 0, None)
        for best, expected in ((1.0, 1.0), (None, 2.0)):
            content = {"task": "mlm", "best_epoch": best, "epochs": epochs_of((0.5, 0.6))}
            (tmp_path / "results.json").write_text(json.dumps(content))
            assert epochs("model") == expected

    def test_batches_do_not_change_the_order(self, trained):
        finished = load_run(trained / "houlsby", None, 4)
        texts, predict = finished.validation["sentence"][:9], robustness.predictor(finished)
        alone = np.concatenate([predict([text]) for text in texts])
        np.testing.assert_allclose(predict(texts), alone, atol=1e-5)
