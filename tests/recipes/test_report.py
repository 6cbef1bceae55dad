"""What a run prints and leaves behind: its log, the scores of classes, figures, and the commands to
type next.
"""

from __future__ import annotations

import re
import shlex
import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from sklearn.metrics import confusion_matrix, f1_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EvalPrediction,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import text_classification
from data.labels import SINGLE
from houlsby_peft import HoulsbyConfig
from recipe_runs import results_of, run, save_tiny_encoder, write
from run import figures, trainer
from run.figures import draw_confusion, draw_learning_curves, save_png
from run.model import load_model
from tasks.classification import classification_scores
from tasks.scores import MAX_LISTED, find_intervals, score_classes
from tasks.tagging import IGNORED, TaggingTask


TEXTS = {
    "pay 'now' for $5 \"only\"; `ls`": "billing",
    "my password & account": "login",
    "-- the\tdog": "other",
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Three classes that a few words tell apart, and an epoch of three steps."""
    folder = tmp_path_factory.mktemp("data")
    encoder = save_tiny_encoder(
        folder / "encoder", words=["pay", "now", "only", "my", "password", "account", "dog"]
    )
    for split, times in (("train", 8), ("validation", 3)):
        table = folder / "data" / f"{split}.csv"
        write(table, text=[*TEXTS] * times, label=[*TEXTS.values()] * times)
    return {"data": folder / "data", "model_name": encoder, "num_train_epochs": 2,
            "learning_rate": 1e-2, "per_device_train_batch_size": 8}  # fmt: skip


class TestLog:
    def test_a_run_leaves_its_scores_by_class_and_figures_also_after_an_interruption(
        self, flags, tmp_path, capsys
    ):
        for _ in range(2):
            run(text_classification, **flags, output_dir=tmp_path)
            assert capsys.readouterr().err == ""
            scores = results_of(tmp_path)["per_class"]
            assert (scores["split"], scores["scores"]["billing"]["support"]) == ("validation", 3)
            for name in ("confusion_matrix.png", "learning_curves.png"):
                assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
            (tmp_path / "results.json").unlink()
            shutil.rmtree(tmp_path / "adapter")
            (tmp_path / "confusion_matrix.png").write_text("of another run")

    def test_the_loss_of_an_epoch_is_that_of_all_its_steps(self, capsys):
        progress, state = trainer.Lines(), TrainerState(max_steps=9, num_train_epochs=3)
        arguments = TrainingArguments(use_cpu=True)
        progress.on_train_begin(arguments, state, TrainerControl())
        state.log_history = [{"step": 2, "loss": 1.0}, {"step": 3, "loss": 4.0}]
        state.global_step, state.epoch = 3, 1.0
        progress.on_evaluate(arguments, state, TrainerControl(), metrics={"eval_f1": 0.5})
        assert "epoch 1 of 3: loss 2.000, f1 0.500" in capsys.readouterr().out

    def test_a_new_head_is_not_reported_and_a_lost_layer_is(
        self, encoder, tmp_path, capsys, caplog
    ):
        load_model(AutoModelForSequenceClassification, str(encoder), num_labels=3)
        assert "warning" not in capsys.readouterr().out
        other = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=7)
        caplog.clear()
        del other.bert.encoder.layer[-1]
        other.save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(encoder).save_pretrained(tmp_path)
        load_model(AutoModelForSequenceClassification, str(tmp_path), num_labels=3)
        layer = f"bert.encoder.layer.{len(other.bert.encoder.layer)}."
        output = capsys.readouterr().out
        assert f"weights of the encoder, which are random: {layer}" in output
        assert not caplog.records


class TestScoresOfClasses:
    def test_one_label_per_example(self):
        rng = np.random.default_rng(0)
        outputs, labels = rng.normal(size=(50, 6)), rng.integers(0, 4, 50)
        outputs[:, 5] = -9  # neither a label nor a prediction
        names = [f"{'very ' * number * 3}long{number}" for number in range(6)]
        scores, predicted = score_classes(outputs, labels, names), outputs.argmax(-1)
        by_class = scores.by_class()
        assert [*by_class] == names[:5]
        for number, name in enumerate(names[:5]):
            f1 = f1_score(labels == number, predicted == number, zero_division=0.0)
            assert by_class[name]["f1"] == pytest.approx(f1)
            assert by_class[name]["support"] == sum(labels == number)
        matrix, of_matrix = scores.confusion()
        assert of_matrix == names[:5]
        assert matrix.tolist() == confusion_matrix(labels, predicted, labels=range(5)).tolist()
        assert max(map(len, scores.table().splitlines())) < 80

    def test_intervals(self, monkeypatch):
        """Wilson's interval of 28 of 30 by its formula, and one that holds the score."""
        monkeypatch.setattr("tasks.scores._RESAMPLES", 200)
        labels, outputs = np.arange(30) % 2, np.eye(2)[np.arange(30) % 2]
        outputs[:2] = outputs[:2, ::-1]
        intervals = find_intervals(
            partial(classification_scores, problem_type=SINGLE), outputs, labels
        )
        share, z = 28 / 30, 1.959964
        middle = (share + z**2 / 60) / (1 + z**2 / 30)
        width = z * np.sqrt(share * (1 - share) / 30 + (z / 60) ** 2) / (1 + z**2 / 30)
        low, high = pytest.approx(middle - width), pytest.approx(middle + width)
        assert intervals["accuracy"] == {"right": 28, "rows": 30, "low": low, "high": high}
        assert intervals["macro_f1"]["low"] < share < intervals["macro_f1"]["high"]
        # Each draw has the rare class, which is never predicted.
        rare, of_one = np.array([0] * 11 + [1]), np.eye(2)[np.zeros(12, int)]
        found = find_intervals(partial(classification_scores, problem_type=SINGLE), of_one, rare)
        assert found["macro_f1"] == {"low": pytest.approx(11 / 23), "high": pytest.approx(11 / 23)}

    def test_one_answer_for_all(self):
        labels = np.array([0, 1, 1])
        assert score_classes(np.ones((3, 2)), labels, ["a", "b"]).constant == "a"
        assert score_classes(np.eye(2)[labels], labels, ["a", "b"]).constant is None
        assert score_classes(np.ones((3, 2)), labels * 0, ["a", "b"]).constant is None

    def test_several_labels_per_example(self):
        labels = np.array([[1, 0, 0], [1, 1, 0]], np.float32)
        scores = score_classes(np.array([[3.0, -1, -1], [1, -1, -2]]), labels, ["a", "b", "c"])
        assert scores.by_class() == {
            "a": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 2},
            "b": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1},
        }
        assert scores.confusion() is None
        assert scores.constant == "a"
        assert score_classes(-np.ones((2, 3)), labels, ["a", "b", "c"]).constant == "(no class)"
        assert score_classes(labels - 0.5, labels, ["a", "b", "c"]).constant is None

    def test_a_table_of_many_classes_has_those_with_the_lowest_scores(self):
        names = [f"class{number:02}" for number in range(MAX_LISTED + 2)]
        labels = np.repeat(np.arange(len(names)), 2)
        outputs = np.eye(len(names))[np.where(labels == 0, 7, labels)]
        listed = re.findall(r"class\d\d", score_classes(outputs, labels, names).table())
        assert len(listed) == MAX_LISTED
        assert {"class00", "class07"} <= set(listed)

    def test_entities(self):
        """Micro averages are those of all entities, which `score` computes in another way."""
        rng = np.random.default_rng(0)
        labels = rng.integers(0, 5, (30, 12))
        labels[:, -2:] = IGNORED
        outputs = rng.normal(size=(30, 12, 5)) + 2 * np.eye(5)[np.maximum(labels, 0)]
        task = TaggingTask(name="t", labels=("B-LOC", "B-PER", "I-LOC", "I-PER", "O"))
        scores, whole = task.describe(outputs, labels), task.score(EvalPrediction(outputs, labels))
        assert [*scores.by_class()] == ["LOC", "PER"]
        (line,) = [line for line in scores.table().splitlines() if "micro avg" in line]
        micro = line.split()[2:]
        expected = [whole["precision"], whole["recall"], whole["f1"]]
        assert [float(value) for value in micro[:3]] == pytest.approx(expected, abs=5e-4)
        matrix, of_matrix = scores.confusion()
        assert of_matrix == ["LOC", "PER", "no entity"]
        assert matrix[:2].sum() == int(micro[3])


def labels_of(axes) -> list[str]:
    return [line.get_label() for line in axes.lines]


class TestFigures:
    @pytest.mark.parametrize("classes", [2, 30])
    def test_every_class_can_be_read(self, classes, tmp_path):
        matrix = np.full((classes, classes), 1) + 99 * np.eye(classes, dtype=int)
        names = [f"$5 to $10, class {number}" for number in range(classes)]
        figure = draw_confusion(matrix, names, "账单, test")
        save_png(figure, tmp_path / "figure.png")
        [axes] = figure.axes
        renderer = FigureCanvasAgg(figure).get_renderer()
        for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
            boxes = [label.get_window_extent(renderer) for label in labels]
            assert not any(box.overlaps(following) for box, following in pairwise(boxes))
        assert [text.get_text() for text in axes.texts[:2]] == ["100", "1"]

    def test_learning_curves(self):
        log = [{"epoch": 0.5, "loss": 0.7}, {"epoch": 1.0, "eval_loss": 0.6}]
        log.append({"epoch": 1.5, "loss": 0.5})
        epochs = []
        for number in (1.0, 2.0):
            scores = {"loss": 0.6, "accuracy": 0.5, "f1": 0.1 * number}
            epochs.append({"epoch": number, "step": 9 * number, "seconds": number, **scores})
        left, right = draw_learning_curves(log, epochs, "f1", 2.0).axes
        lines = {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in left.lines}
        assert lines["training"] == [(0.5, 0.7), (1.5, 0.5)]
        assert lines["validation"] == [(1.0, 0.6), (2.0, 0.6)]
        assert labels_of(right) == ["f1", "accuracy", "kept"]
        for epoch in epochs:  # as of SQuAD
            del epoch["loss"], epoch["accuracy"]
        left, right = draw_learning_curves(log, epochs, "f1", None).axes
        assert (labels_of(left), labels_of(right)) == (["training"], ["f1"])


class TestCommands:
    @pytest.mark.parametrize(
        ("example", "texts"),
        [
            ('it\'s $HOME; "yes" `ls`', ['it\'s $HOME; "yes" `ls`']),
            (("--flag\n- and\ta\x07 tab", "é" * 200), ["flag - and a tab", "é" * 80]),
        ],
    )
    def test_predict(self, example, texts, monkeypatch):
        monkeypatch.setattr(figures, "_tool", lambda: ["houlsby-peft"])
        words = shlex.split(figures.predict_command(Path("my runs/adapter"), example))
        pairs = ["--pairs"] if len(texts) == 2 else []
        assert words == ["houlsby-peft", "predict", "my runs/adapter", *texts, *pairs]

    def test_push(self, tmp_path, monkeypatch):
        monkeypatch.setattr(figures, "_tool", lambda: ["houlsby-peft"])
        adapter = tmp_path / "mrpc" / "adapter"
        HoulsbyConfig(base_model_name_or_path="org/base").save_pretrained(adapter)
        words = ["houlsby-peft", "push", str(adapter), "mrpc"]
        assert shlex.split(figures.push_command(adapter)) == words
        HoulsbyConfig(base_model_name_or_path=str(tmp_path)).save_pretrained(adapter)
        assert "must be on the Hub" in figures.push_command(adapter)
