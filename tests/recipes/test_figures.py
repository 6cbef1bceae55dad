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
from peft import PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from demo import minimal_pairs
from houlsby_peft import HoulsbyConfig
from recipe_runs import run, save_tiny_encoder, write
from tiny_models import tiny_bert


pytest.importorskip(
    "matplotlib", reason="needs matplotlib, of the extra 'recipes', which is not installed"
)
import figure
import glue
from figures import compare, curves, init_scale, robustness, stability, tradeoff
from figures.finished_run import load_run
from figures.gradients import FILE, GradientNorms, layer_of
from figures.pwws import pwws
from figures.wordnet import WordNet
from results import chart
from results.additional import PAPER
from results.lines import arrange, find_columns
from results.read import finished
from run.edge import RecipeError
from sweeping.runs import CHOSEN
from tasks.scores import GLUE_TASKS, proper_name


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


def draw(name: str, *flags: object) -> None:
    run(figure, name, *flags)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def band(point: dict) -> list[float]:
    return [point[key] for key in ("low", "middle", "high")]


def assert_drawn(path: Path) -> None:
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in path.with_suffix(".svg").read_text()


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
        draw("tradeoff", tmp_path)
        points = lines(tmp_path / "tradeoff.jsonl")
        drawn = [(point["series"], point["trained_parameters"], point["size"]) for point in points]
        assert drawn == [
            ("adapters", 20, "r=1"),
            ("adapters", 50, "r=8"),
            ("fine-tuning of the top k layers", 60, "k=3"),
            ("adapters, shared by 3 layers", 70, "r=64"),
            ("full fine-tuning", 1000, ""),
        ]
        assert points[0]["scores"] == {"CoLA": pytest.approx([70, 80])}
        assert band(points[0]) == pytest.approx([70, 75, 80])
        assert band(points[-1]) == pytest.approx([80, 85, 90])
        assert "CoLA: norms alone 3.5 points less" in capsys.readouterr().out, "the paper's loss"
        assert_drawn(tmp_path / "tradeoff")

    def test_percentiles_over_tasks(self, finished_run, tmp_path):
        """Validation chooses the rate of each task."""
        tasks = ["cola", "sst2", "mrpc", "rte", "qnli", "qqp"]
        for task, lost in zip(tasks, range(6), strict=True):
            finished_run(task, "full", 0, 0.9)
            finished_run(task, "houlsby", 0, 0.9 - lost / 100, learning_rate=(1e-3, 1e-4)[lost % 2])
            finished_run(task, "houlsby", 0, 0.4, learning_rate=(1e-4, 1e-3)[lost % 2])
        draw("tradeoff", tmp_path)
        point = next(
            point for point in lines(tmp_path / "tradeoff.jsonl") if point["series"] == "adapters"
        )
        assert band(point) == pytest.approx([-4, -2.5, -1])  # of 0, -1, ... -5 points

    def test_accuracy_where_a_task_has_it_test_scores_and_panels(self, finished_run, tmp_path):
        """MNLI counts as two tasks, and the two ways to label complaints as one."""
        finished_run("mrpc", "houlsby", 0, scores={"f1": 0.8, "accuracy": 0.7})
        finished_run("stsb", "houlsby", 0, scores={"spearmanr": 0.6, "pearson": 0.5})
        finished_run(
            "mnli", "houlsby", 0, scores={"matched_accuracy": 0.84, "mismatched_accuracy": 0.83}
        )
        for by in ("issue", "product"):
            finished_run(f"customer_complaints_{by}", "houlsby", 0, 0.5, test=0.4)
        draw("tradeoff", tmp_path, "--score", "accuracy")
        (point,) = lines(tmp_path / "tradeoff.jsonl")
        expected = {
            "MRPC": 70,
            "STS-B": 60,
            "MNLI-m": 84,
            "MNLI-mm": 83,
            "customer_complaints_issue": 50,
        }
        assert point["scores"] == {name: pytest.approx([value]) for name, value in expected.items()}
        draw("tradeoff", tmp_path, "--split", "test", "--each")
        points = {point["panel"]: point["middle"] for point in lines(tmp_path / "tradeoff.jsonl")}
        assert points == {"customer_complaints_issue": pytest.approx(40)}

    def test_a_size_without_runs_on_all_tasks_is_left_out(self, finished_run, tmp_path):
        """Full fine-tuning is no exception; without it, scores are absolute."""
        finished_run("cola", "full", 0, 0.9)
        finished_run("rte", "houlsby", 0, 0.7)
        with pytest.raises(RecipeError, match="No size has runs on all of CoLA, RTE"):
            draw("tradeoff", tmp_path)
        finished_run("cola", "houlsby", 0, 0.7)
        draw("tradeoff", tmp_path)
        points = lines(tmp_path / "tradeoff.jsonl")
        assert {point["series"]: point["middle"] for point in points} == {
            "adapters": pytest.approx(70)
        }
        assert not any(point["relative"] for point in points)

    def test_full_fine_tuning_alone_has_no_difference(self, finished_run, tmp_path):
        for task in ("rte", "sst2"):
            finished_run(task, "full", 0, 0.9)
        draw("tradeoff", tmp_path)
        (point,) = lines(tmp_path / "tradeoff.jsonl")
        assert band(point) == [0, 0, 0]
        assert_drawn(tmp_path / "tradeoff")


class TestInitScale:
    def test_the_accuracy_is_shown_and_the_main_score_chooses(self, finished_run, tmp_path):
        for seed, score in enumerate([0.6, 0.8]):
            for task in ("cola", "rte"):
                finished_run(task, "houlsby", seed, score, init_std=0.1)
                finished_run(task, "houlsby", seed, score + 0.1)
                finished_run(task, "houlsby", seed, score - 0.1, r=8)
            scores = {"matthews_correlation": score + 0.2, "accuracy": 0.3}
            finished_run("cola", "houlsby", seed, scores=scores, init_std=0.1, learning_rate=3e-4)
        shown = {}
        for score in ("accuracy", "main"):
            draw("init_scale", tmp_path, "--score", score)
            points = lines(tmp_path / "init_scale.jsonl")
            shown[score] = {
                (point["task"], point["r"], point["init_std"]): point for point in points
            }
        accuracy, main = shown.values()
        assert len(accuracy) == len(main) == 6
        assert band(accuracy["RTE", 64, 0.1]) == pytest.approx([60, 70, 80])
        assert accuracy["CoLA", 8, 0.01]["scores"] == {
            "0": pytest.approx(50),
            "1": pytest.approx(70),
        }
        assert (
            accuracy["CoLA", 64, 0.1]["middle"],
            main["CoLA", 64, 0.1]["middle"],
        ) == pytest.approx((30, 90))
        assert accuracy["CoLA", 64, 0.1]["learning_rate"] == 3e-4
        assert_drawn(tmp_path / "init_scale")

    def test_the_mean_over_the_papers_eight(self, finished_run, tmp_path, capsys):
        """With both of MNLI's accuracies, and without WNLI and STS-B, which the runs of table 1
        also have.
        """
        finished_run("stsb", "houlsby", 0, scores={"spearmanr": 0.8, "pearson": 0.7})
        with pytest.raises(RecipeError, match="No task has an accuracy: give --score main"):
            draw("init_scale", tmp_path)
        tasks = {"cola": 0.81, "sst2": 0.92, "mrpc": 0.85, "qqp": 0.9, "qnli": 0.91, "rte": 0.66}
        for task, score in {**tasks, "wnli": 0.5}.items():
            finished_run(task, "houlsby", 0, score)
        finished_run(
            "mnli", "houlsby", 0, scores={"matched_accuracy": 0.84, "mismatched_accuracy": 0.83}
        )
        finished_run("cola", "full", 0, 0.9)
        finished_run("cola", "houlsby", 0, 0.8, r=8)
        draw("init_scale", tmp_path)
        points = lines(tmp_path / "init_scale.jsonl")
        assert {point["task"] for point in points} == {
            *map(proper_name, tasks),
            "MNLI-m",
            "MNLI-mm",
        }
        average = 100 * (sum(tasks.values()) + 0.84 + 0.83) / 8
        assert init_scale.means(points) == {64: pytest.approx(average)}, (
            "r=8 has no run on seven tasks"
        )
        assert (
            f"r=64: mean of 8 tasks {average:.1f}; Houlsby et al. 2019, BERT-large: 85.8"
            in capsys.readouterr().out
        )


def test_learning_curves(finished_run, tmp_path):
    for seed, scores in enumerate([(0.6, 0.7, 0.9), (0.8, 0.7)]):
        epochs = [
            {
                "epoch": n + 1.0,
                "step": 10 * (n + 1),
                "seconds": 30.0 * (n + 1) + 2 * seed,
                "accuracy": one,
            }
            for n, one in enumerate(scores)
        ]
        finished_run("rte", "houlsby", seed, 0.8, epochs=epochs)
    draw("curves", tmp_path, "--x", "seconds")
    first, second = lines(tmp_path / "learning_curves.jsonl")  # the third epoch has one seed only
    assert [(point["epoch"], point["step"], point["seconds"]) for point in (first, second)] == [
        (1, 10, 31),
        (2, 20, 61),
    ]
    assert band(first) == pytest.approx([60, 70, 80])
    assert band(second) == pytest.approx([70, 70, 70])
    assert_drawn(tmp_path / "learning_curves")
    with pytest.raises(RecipeError, match=r"a run on rte has .*accuracy"):
        draw("curves", tmp_path, "--score", "f1")


class TestCompare:
    def test_by_hand(self, finished_run, tmp_path):
        """Fine-tuning's mean scores are 65, 85 and 80 percent, and 99% of 85 are 84.15."""
        runs = {
            ("full", 0, None): [(0.5, 10.0), (0.9, 20.0), (0.7, 30.0)],
            ("full", 1, None): [
                (0.8, 12.0),
                (0.8, 40.0),
                (0.9, 60.0),
                (0.99, 80.0),
            ],  # seed 0 has no fourth
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
            folder = finished_run(
                "rte", method, seed, max(scores)[0], epochs=epochs, base_dtype=dtype
            )
            (folder / "adapter").mkdir()
            (folder / "adapter" / "adapter_model.safetensors").write_bytes(bytes(3_000_000))
        rows = arrange(finished(tmp_path), CHOSEN)
        full, bfloat16, float32 = rows
        assert compare.times(full, full, 0.99) == {"rte, to 84.2": "30 s (20 to 40), 1.00"}
        assert compare.times(bfloat16, full, 0.99) == {"rte, to 84.2": "11 s (8 to 14), 0.37"}
        assert compare.times(float32, full, 0.99) == {"rte, to 84.2": "not reached"}
        draw("compare", tmp_path)
        found = pd.read_csv(tmp_path / "compare.csv", index_col=0).loc[bfloat16.label]
        assert (found["bytes"], found["seconds"], found["memory"], found["seeds"]) == (
            3_000_000,
            11,
            2000,
            2,
        )
        # Of 0.90 - 0.90 and 0.85 - 0.99.
        assert (found["difference"], found["difference_error"]) == pytest.approx((-7, 7))
        assert "-7.00 ± 7.00" in (tmp_path / "compare.md").read_text()
        assert_drawn(tmp_path / "compare")

    def test_activations(self, finished_run, tmp_path):
        for seed, (gelu, tanh) in enumerate([(0.7, 0.6), (0.8, 0.75)]):
            for name, score in (("gelu", gelu), ("tanh", tanh)):
                finished_run("rte", "houlsby", seed, score, activation=name)
        draw("compare", tmp_path, "--baseline", "activation gelu")
        found = pd.read_csv(tmp_path / "compare.csv", index_col=0)
        gelu, tanh = (
            found.loc[next(label for label in found.index if name in label)]
            for name in ("gelu", "tanh")
        )
        assert (gelu["score"], gelu["score_error"]) == pytest.approx((75, 5))
        assert (tanh["difference"], tanh["difference_error"]) == pytest.approx(
            (-7.5, 2.5)
        )  # of -10 and -5

    def test_a_single_method_is_compared_with_itself(self, finished_run, tmp_path, capsys):
        for seed, score in enumerate((0.7, 0.8)):
            finished_run("rte", "houlsby", seed, score)
        draw("compare", tmp_path)
        facts = pd.read_csv(tmp_path / "compare.csv", index_col=0).iloc[0]
        assert (facts["score"], facts["difference"], facts["seconds"]) == pytest.approx((75, 0, 9))
        assert "Empty DataFrame" not in capsys.readouterr().out
        with pytest.raises(RecipeError, match="--baseline must be one of: houlsby, r 64"):
            draw("compare", tmp_path, "--baseline", "lora")


class TestStability:
    def test_seeds_the_chosen_rate_and_the_gradients(self, finished_run, tmp_path, capsys):
        """The best run alone is at another rate. The last epoch shows a collapse."""
        for rate, scores in {3e-4: (0.7, 0.8, 0.9), 1e-3: (0.5, 0.6, 0.95)}.items():
            for seed, score in enumerate(scores):
                for method in ("full", "houlsby"):
                    epochs = [
                        {"epoch": 1.0, "step": 10, "accuracy": score},
                        {"epoch": 2.0, "step": 20, "accuracy": 0.5},
                    ]
                    folder = finished_run(
                        "rte", method, seed, score, epochs=epochs, learning_rate=rate
                    )
                    norms = {"bert.encoder.layer.0": 2.0 + seed, "classifier": 1.0}
                    (folder / FILE).write_text(
                        "".join(json.dumps({"step": s, "norms": norms}) + "\n" for s in (1, 2))
                    )
        draw("stability", tmp_path)
        rows = lines(tmp_path / "stability.jsonl")
        drawn = [(row["method"], row["pretraining_steps"], row["learning_rate"]) for row in rows]
        assert drawn == [("full", 0, 3e-4), ("houlsby", 0, 3e-4)]
        for row in rows:
            assert row["scores"] == {str(seed): pytest.approx(70 + 10 * seed) for seed in range(3)}
            assert row["last"] == {str(seed): pytest.approx(50) for seed in range(3)}
        # Of 70, 80 and 90: deviations of 10, and quartiles halfway between the scores.
        printed = "best epoch: mean 80.00, standard deviation 10.00, interquartile range 10.00"
        assert f"RTE, adapters, {printed}, 3 seeds" in capsys.readouterr().out
        read = stability.read_norms({"folder": path.parent} for path in tmp_path.glob(f"*/{FILE}"))
        assert read["layer 0"] == {1: 3.0, 2: 3.0}  # the median of 2, 3 and 4
        for name in ("stability_rte", "gradient_norms_rte"):  # although the runs were moved
            assert_drawn(tmp_path / name)

    def test_lengths_of_pretraining_and_of_fine_tuning(self, finished_run, tmp_path):
        """With one run per start, whose epochs are drawn, and with a run per number of epochs."""
        for steps in (0, 20, 30):
            epochs = [
                {"epoch": n, "step": n, "accuracy": (50 + steps + n) / 100} for n in (1.0, 2.0)
            ]
            start = f"x/checkpoint-{steps}" if steps else None
            finished_run(
                "rte", "houlsby", 0, epochs[-1]["accuracy"], epochs=epochs, init_adapter=start
            )
            finished_run(
                "rte", "full", 0, epochs[-1]["accuracy"], epochs=epochs, model=start or "tiny"
            )
        draw("stability", tmp_path)
        rows = lines(tmp_path / "stability.jsonl")
        starts = [(row["method"], row["pretraining_steps"]) for row in rows]
        assert starts == [
            (method, steps) for steps in (0, 20, 30) for method in ("full", "houlsby")
        ]
        for row in rows:
            first = 51 + row["pretraining_steps"]
            assert row["by_epochs"] == {
                "1.0": pytest.approx(first),
                "2.0": pytest.approx(first + 1),
            }
        for name in ("pretraining", "epochs", "learning_curves"):
            assert_drawn(tmp_path / f"{name}_rte")
        boxes = stability.draw_lengths(rows).axes[0].get_lines()
        points = [[*line.get_xdata()] for line in boxes if line.get_marker() == "."]
        assert points == [[pytest.approx(72), pytest.approx(82)]] * 2, (
            "a point for each length, after the last epoch"
        )

        runs = []
        for length in (1, 3):
            epochs = [
                {"epoch": float(n), "accuracy": (10 * length + n) / 100}
                for n in range(1, length + 1)
            ]
            runs.append({"task": "rte", "chosen_by": "accuracy", "epochs": epochs,
                         "arguments": {"num_train_epochs": length}})  # fmt: skip
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
        assert (
            first["norms"].keys()
            == expected.keys()
            == {*(f"bert.encoder.layer.{i}" for i in range(4)), "classifier"}
        )
        for layer, square in expected.items():
            assert first["norms"][layer] == pytest.approx(math.sqrt(square), rel=1e-3)


def cut_or_overprinted(figure) -> list[str]:
    """The labels of a figure's axes that reach beyond it, or overlap on the same axis."""
    figure.draw_without_rendering()
    found = []
    for axes in figure.axes:
        for names in (axes.get_xticklabels(), axes.get_yticklabels()):
            shown = [name for name in names if name.get_text() and name.get_visible()]
            boxes = [name.get_window_extent() for name in shown]
            neighbours = itertools.pairwise(zip(shown, boxes, strict=True))
            found += [a.get_text() for (a, one), (_, other) in neighbours if one.overlaps(other)]
        for label in (axes.xaxis.label, axes.yaxis.label, axes.title, *axes.get_yticklabels()):
            box = label.get_window_extent()
            if label.get_text() and (box.x0 < -1 or box.x1 > figure.bbox.x1 + 1 or box.y0 < -1):
                found.append(label.get_text())
    return found


class TestFullSize:
    """With as many tasks and runs as the papers have: as wide as a page, and no name is cut off or
    overprinted.
    """

    def test_eighteen_tasks(self, finished_run, tmp_path):
        epochs = [
            {"epoch": float(n), "step": n, "seconds": 100.0 * n, "accuracy": 0.5 + n / 100}
            for n in range(1, 21)
        ]
        for task in PAPER.index:
            for method, trained in (("full", 110_000_000), ("houlsby", 900_000), ("lora", 300_000)):
                finished_run(
                    task, method, 0, trained=trained, scores={"accuracy": 0.7}, epochs=epochs
                )
        rows = arrange(finished(tmp_path), CHOSEN)
        facts = compare.summarize(rows, rows[0], find_columns(rows), "validation")
        for drawn in (
            chart.draw(rows),
            curves.draw(curves.summarize(rows)),
            compare.draw(facts, "test"),
            tradeoff.draw(tradeoff.summarize(rows, find_columns(rows), each=True)),
        ):
            assert drawn.get_figwidth() < 7
            assert not cut_or_overprinted(drawn)

    def test_twenty_two_starts(self):
        rows = [
            {"task": "cola", "method": method, "pretraining_steps": 2000 * n,
             "score": "matthews_correlation", "scores": {0: 50 + n, 1: 52 + n},
             "last": {0: 49 + n, 1: 51}, "by_epochs": {1.0: 40, 2.0: 50 + n},
             "run": f"pretrained_{n}", "pretraining_epochs": n, "examples": 872,
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
        write(
            folder / "sst2" / f"{split}.csv",
            sentence=rows["sentence"][:200],
            label=rows["label"][:200],
        )
    for method in ("houlsby", "full"):
        run(glue, "--task", "sst2", "--data_dir", folder, "--model_name", encoder,
            "--output_dir", folder / method, "--method", method, "--max_steps", 4,
            "--report_to", "none", "--save_strategy", "no", "--load_best_model_at_end", "false",
            "--eval_strategy", "no", "--r", 8)  # fmt: skip
    return folder


class TestAblation:
    def test_scores_are_the_runs_and_those_of_the_pruned_adapter(self, trained, tmp_path, capsys):
        folder = shutil.copytree(trained / "houlsby", tmp_path / "run")
        draw("ablation", folder, "--prune", 1, "--norms", "remove")
        first, *rows = lines(folder / "ablation.jsonl")
        assert sorted(row["span"] for row in rows) == [
            [i, j] for i in range(4) for j in range(i, 4)
        ]
        assert_drawn(folder / "ablation")
        output = capsys.readouterr().out
        assert "Pruned layers" in output
        everything = next(row for row in rows if row["span"] == [0, 3])
        single = [row["relative_change"] for row in rows if row["span"][0] == row["span"][1]]
        finished = load_run(folder, None, 64)
        majority = max(Counter(finished.validation["label"]).values()) / len(finished.validation)
        accuracies = f"accuracy {100 * everything['scores']['accuracy']:.1f}, the majority class"
        assert f"{accuracies} {100 * majority:.1f}" in output
        assert f"at most {-100 * min(single):.1f}% less" in output
        config = HoulsbyConfig.from_pretrained(folder / "pruned")
        removed = set(range(4)) - set(config.layers_to_transform)
        expected = next(row for row in rows if row["span"] == [min(removed), max(removed)])

        def accuracy(model: PeftModel) -> float:
            batches = [
                (batch.pop("labels"), batch) for batch in finished.trainer.get_eval_dataloader()
            ]
            hits = [model(**batch).logits.argmax(-1) == labels for labels, batch in batches]
            return torch.cat(hits).double().mean().item()

        model = finished.trainer.model
        assert accuracy(model) == pytest.approx(first["scores"]["accuracy"])
        pruned = PeftModel.from_pretrained(model.unload(), folder / "pruned").eval()
        assert accuracy(pruned) == pytest.approx(expected["scores"]["accuracy"])
        change = expected["scores"]["accuracy"] / first["scores"]["accuracy"] - 1
        assert expected["relative_change"] == pytest.approx(change)

    def test_the_depth_of_adapters_that_may_be_cut(self, trained, tmp_path):
        for name, changes in (("cut", {"adapter_drop": True}), ("upper", {"layers": [2, 3]})):
            folder = shutil.copytree(trained / "houlsby", tmp_path / name)
            results = json.loads((folder / "results.json").read_text())
            results["arguments"] |= changes
            results["best_scores"] = {results["chosen_by"]: 0.5}
            (folder / "results.json").write_text(json.dumps(results))
        draw("ablation", tmp_path / "cut", "--score", "main", "--norms", "remove")
        draw("depth", tmp_path)
        assert_drawn(tmp_path / "depth")
        rows = {(row["line"], row["layers"]): row for row in lines(tmp_path / "depth.jsonl")}
        spans = {
            tuple(row["span"] or ()): row["scores"]
            for row in lines(tmp_path / "cut" / "ablation.jsonl")
        }
        for layers, span in ((4, ()), (3, (0, 0)), (2, (0, 1)), (1, (0, 2))):
            expected = 100 * spans[span][results["chosen_by"]]
            assert rows["SST-2, AdapterDrop", layers]["middle"] == pytest.approx(expected)
        assert rows["SST-2", 2]["cost"] == (2 + 8 * 2) / (8 * 4)
        assert rows["SST-2", 2]["middle"] == 50

    def test_what_has_no_adapters_or_is_no_run(self, trained, tmp_path):
        with pytest.raises(ValueError, match="layers that have a Houlsby adapter, here none"):
            draw("ablation", trained / "full")
        with pytest.raises(RecipeError, match="must be the output folder of a finished run"):
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


def test_synonyms(tmp_path):
    wordnet = WordNet(write_wordnet(tmp_path))
    expected = {
        "film": ("noun", ["movie", "coat"]),  # both senses, without the synonym of two words
        "Film": ("noun", ["movie", "coat"]),
        "good": (
            "adj",
            ["fine", "honest"],
        ),  # tagged more often as an adjective; "Good" is the word itself
        "well": ("adv", ["good"]),
        "light": ("adj", ["pale", "airy"]),  # never tagged: the part of speech with the most senses
        "films": (None, []),
    }
    assert {
        word: (wordnet.part_of_speech(word), wordnet.synonyms(word)) for word in expected
    } == expected


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
        sums = [
            self.start + sum(self.weights.get(word.lower(), 0) for word in text.split())
            for text in texts
        ]
        return np.array([[1 - p, p] for p in sums])


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
            (
                0.19,
                1,
                -0.01,
                "fine plot film",
                True,
                1,
            ),  # the falls are 0.10 and 0.11, the scores 0.039 and 0.035
            (
                0.08,
                0,
                -0.05,
                "superb plot film",
                True,
                1,
            ),  # of label 0, superb is the better substitute
        ],
    )
    def test_greedy_order(self, start, label, movie, text, success, replaced):
        model = Toy(start, **{**WEIGHTS, "movie": movie})
        found = attack("great plot film", label, model)
        assert (found.text, found.success, found.replaced, found.words) == (
            text,
            success,
            replaced,
            3,
        )
        assert found.queries == 1 + 3 + 5 + replaced

    def test_the_rest_of_the_text_stays_to_the_letter(self):
        found = attack(
            "  A Great plot -- and GREAT film's 's 2nd film?!",
            1,
            Toy(0.5, **WEIGHTS),
            {**SYNONYMS, "s": ["sulfur"]},
        )
        assert found.text == "  A Fine story -- and FINE film's 's 2nd movie?!"
        assert found.words == 9  # a, great, plot, and, great, film's, s, nd, film

    def test_nothing_to_replace(self):
        model = Toy(0.5)
        found = attack(
            "it is in a", 1, model, {"it": ["trade"], "in": ["inch"], "a": ["ampere"], "is": ["be"]}
        )
        assert (found.text, found.success, found.replaced, found.queries) == (
            "it is in a",
            False,
            0,
            0,
        )
        assert model.queries == 0


class TestRobustness:
    def test_two_runs(self, trained, tmp_path):
        folders = [trained / method for method in ("houlsby", "full")]
        draw("robustness", *folders, "--wordnet", write_wordnet(tmp_path), "--output_dir", tmp_path,
             "--max_eval_samples", 40)  # fmt: skip
        rows = [
            json.loads(line) for line in (tmp_path / "robustness.jsonl").read_text().splitlines()
        ]
        assert [row["run"] for row in rows] == ["houlsby", "full"]
        for row in rows:
            assert row["examples"] == 40
            assert row["attacked"] == len(row["attacks"]) == round(40 * row["accuracy"])
            assert row["successes"] == sum(attack["success"] for attack in row["attacks"])
            assert row["success_rate"] == row["successes"] / row["attacked"]
        assert (tmp_path / "robustness.png").is_file()
        assert (tmp_path / "robustness.svg").is_file()

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
            content = {
                "task": "mlm",
                "best_epoch": best,
                "epochs": [{"epoch": 1.0}, {"epoch": 2.0}],
            }
            (tmp_path / "results.json").write_text(json.dumps(content))
            assert epochs("model") == expected

    def test_batches_do_not_change_the_order(self, trained):
        one = load_run(trained / "houlsby", None, 4)
        texts = one.validation["sentence"][:9]
        alone = np.concatenate([robustness.predictor(one)([text]) for text in texts])
        np.testing.assert_allclose(robustness.predictor(one)(texts), alone, atol=1e-5)
