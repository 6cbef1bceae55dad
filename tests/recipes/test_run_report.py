"""What a run prints and leaves behind: its log, the scores of classes, figures, and the commands to type next."""

from __future__ import annotations

import io
import json
import logging
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml
from sklearn.metrics import f1_score
from transformers import (
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import text_classification
from hub_models import BASE, make_base
from recipe_runs import run, save_tiny_encoder
from tasks.tagging import IGNORED, Tags


pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra 'recipes', which is not installed")
from matplotlib import pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from training import progress, report
from training.arguments import RecipeTrainingArguments
from training.figures import BLUE, draw_confusion, draw_learning_curves, save_png
from training.model import load_model, load_saved
from training.quiet import _MESSAGES, leave_out_noise
from training.scores import MAX_LISTED, ClassScores, score_classes


ROOT = Path(__file__).parents[2]
TEXTS = {"pay 'now' for $5 \"only\"; `ls`": "billing", "my password & account": "login", "-- the\tdog": "other"}
# Runs a recipe, then the commands that it has printed, in a process of its own.
PASTE = """
import contextlib, io, pathlib, re, runpy, shlex, shutil, sys
from houlsby_peft.cli import main
sys.argv.pop(0)
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
with contextlib.redirect_stdout(io.StringIO()) as log:
    runpy.run_path(sys.argv[0], run_name="__main__")
print(log.getvalue(), end="")
for command in re.findall("^(?:Predict|Share): +(.*)$", log.getvalue(), re.MULTILINE):
    tool, *words = shlex.split(command)
    assert shutil.which(tool), tool
    main(words)
"""
SCORE = r"[01]\.\d{3}"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    words = ["pay", "now", "only", "my", "password", "account", "dog"]
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder"), words=words)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three classes that a few words tell apart, and an epoch of three steps."""
    folder = tmp_path_factory.mktemp("data")
    for split, rows in (("train", 24), ("validation", 9)):
        frame = pd.DataFrame([*TEXTS.items()] * (rows // 3), columns=["text", "label"])
        frame.to_csv(folder / f"{split}.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def flags(encoder, data):
    return ["--data", data, "--model_name", encoder, "--use_cpu", "--num_train_epochs", 2, "--learning_rate", 1e-2,
            "--per_device_train_batch_size", 8]  # fmt: skip


@pytest.fixture
def logged():
    """The records that DeepSpeed's and transformers' loggers show."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    names = ("DeepSpeed", "transformers", *(name for name in _MESSAGES if name.startswith("transformers.")))
    loggers = [logging.getLogger(name) for name in names]
    before = [list(logger.filters) for logger in loggers]
    for logger in loggers:
        logger.filters.clear()  # those of recipes that other tests have run in this process
    for logger in loggers[:2]:
        logger.addHandler(handler)
    yield lambda: [record.getMessage() for record in records]
    for logger, filters in zip(loggers, before, strict=True):
        logger.removeHandler(handler)
        logger.filters[:] = filters


class TestMessagesOfLibraries:
    def test_only_those_that_are_named_are_left_out(self, logged):
        with warnings.catch_warnings():
            leave_out_noise()
            warnings.warn("`is_gradient_checkpointing` is deprecated and will be removed", FutureWarning, stacklevel=1)
            warnings.warn("`broadcast_buffers` is deprecated. Use another one.", FutureWarning, stacklevel=1)
        for message in ("`is_gradient_checkpointing` is wrong", "another: `broadcast_buffers` is deprecated"):
            with pytest.warns(FutureWarning, match=re.escape(message)):
                warnings.warn(message, FutureWarning, stacklevel=1)
        with pytest.warns(UserWarning, match="deprecated"):
            warnings.warn("`broadcast_buffers` is deprecated", UserWarning, stacklevel=1)
        for name in ("DeepSpeed", "transformers", "transformers.trainer_utils"):
            for message in ("Setting accelerator to CPU. If", "mtime may not be reliable on this", "the disk is slow"):
                logging.getLogger(name).warning(message)
        assert logged() == [
            *("mtime may not be reliable on this", "the disk is slow"),
            *("Setting accelerator to CPU. If", "mtime may not be reliable on this", "the disk is slow"),
            *("Setting accelerator to CPU. If", "the disk is slow"),
        ]

    def test_early_stopping_looks_at_one_of_several_splits(self, logged):
        leave_out_noise()
        arguments = SimpleNamespace(metric_for_best_model="matched_accuracy")
        metrics = {"eval_mismatched_accuracy": 0.5}
        EarlyStoppingCallback(1).on_evaluate(arguments, TrainerState(), TrainerControl(), metrics)
        assert logged() == []

    @pytest.mark.parametrize("how", ["flag", "launcher"])
    def test_deepspeed_speaks_where_it_is_used(self, logged, monkeypatch, how):
        if how == "flag":
            monkeypatch.setattr(sys, "argv", ["glue.py", "--deepspeed=zero2.json"])
        else:
            monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        leave_out_noise()
        logging.getLogger("DeepSpeed").warning("Setting accelerator to CPU.")
        assert logged() == ["Setting accelerator to CPU."]

    def test_a_new_head_is_not_reported_and_a_lost_layer_is(self, encoder, tmp_path, logged):
        load_model(AutoModelForSequenceClassification, str(encoder), num_labels=3)
        other = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=7)
        other.save_pretrained(tmp_path / "seven")
        shutil.copy(encoder / "vocab.txt", tmp_path / "seven")
        load_model(AutoModelForSequenceClassification, str(tmp_path / "seven"), num_labels=3)
        assert sum("LOAD REPORT" in message for message in logged()) == 1, "that of the direct load"

        del other.bert.encoder.layer[-1]
        other.save_pretrained(tmp_path / "short")
        shutil.copy(encoder / "vocab.txt", tmp_path / "short")
        load_model(AutoModelForSequenceClassification, str(tmp_path / "short"), num_labels=3)
        assert f"bert.encoder.layer.{len(other.bert.encoder.layer)}." in logged()[-1]

    def test_a_saved_model_without_its_head_is_reported(self, encoder, logged):
        load_saved(str(encoder), ("LABEL_0", "LABEL_1", "LABEL_2"))
        assert "classifier.weight" in logged()[-1]


class Terminal(io.StringIO):
    def isatty(self):
        return True


class TestLog:
    def test_lines(self, flags, tmp_path, capsys):
        """Everything but the part of the data, which another test is about."""
        run(text_classification, *flags, "--output_dir", tmp_path / "run")
        output, errors = capsys.readouterr()
        assert errors == ""
        lines = output[output.index("trainable parameters") :].splitlines()
        folder = re.escape(str(tmp_path / "run"))
        scores = rf"loss {SCORE}, accuracy {SCORE}, macro_f1 {SCORE}"
        expected = [
            r"trainable parameters: [\d,]+ of [\d,]+ \(\d\d\.\d\d%\)",
            *(rf"epoch {epoch} of 2: loss {SCORE}, validation {scores}" for epoch in (1, 2)),
            "",
            rf"Best epoch: [12] of 2, with accuracy {SCORE}, macro_f1 {SCORE}, loss {SCORE} on validation",
            "",
            r"By class, on the validation split:",
            r" +precision +recall +f1-score +support",
            *(rf" +{name}( +{SCORE}){{3}} +3" for name in ("billing", "login", "other")),
            "",
            rf" +accuracy +{SCORE} +9",
            *(rf" *{average} avg( +{SCORE}){{3}} +9" for average in ("macro", "weighted")),
            "",
            rf"Adapter: +{folder}/adapter \([\d.]+ [kM]B\), trained in (\d+ min )?\d+ s",
            rf"Results: +{folder}/results.json",
            rf"Confusion matrix: +{folder}/confusion_matrix.png",
            rf"Learning curves: +{folder}/learning_curves.png",
            rf"Predict: +\S*houlsby-peft predict {folder}/adapter .+",
            r"Share: +its base model must be on the Hub, see docs/hub.md",
        ]
        assert [bool(re.fullmatch(*pair)) for pair in zip(expected, lines, strict=True)] == [True] * len(expected)
        for name in ("confusion_matrix.png", "learning_curves.png"):
            assert (tmp_path / "run" / name).read_bytes().startswith(b"\x89PNG")

        results = json.loads((tmp_path / "run" / "results.json").read_text())
        per_class = results["per_class"]
        assert per_class["split"] == "validation"
        f1 = [scores["f1"] for scores in per_class["scores"].values()]
        assert np.mean(f1) == pytest.approx(results["best_scores"]["macro_f1"])
        assert [scores["support"] for scores in per_class["scores"].values()] == [3, 3, 3]

        interrupt(tmp_path / "run")
        (tmp_path / "run" / "confusion_matrix.png").write_text("of another run")
        run(text_classification, *flags, "--output_dir", tmp_path / "run")
        assert json.loads((tmp_path / "run" / "results.json").read_text())["per_class"] == per_class
        assert (tmp_path / "run" / "confusion_matrix.png").read_bytes().startswith(b"\x89PNG")

    def test_one_bar_on_a_terminal(self, flags, tmp_path, monkeypatch):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        run(text_classification, *flags, "--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end",
            False, "--max_steps", 2, "--output_dir", tmp_path / "run")  # fmt: skip
        shown = re.split(r"[\r\n]+", terminal.getvalue())
        assert {line.partition(":")[0] for line in shown if "training" in line} == {"training"}
        assert re.search(rf"training: 100%.* loss {SCORE}\]", terminal.getvalue())

    def test_a_line_a_minute_where_there_is_no_bar(self, flags, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(progress, "_SECONDS", -1)
        run(text_classification, *flags, "--max_steps", 2, "--logging_steps", 1, "--output_dir", tmp_path / "run")
        assert re.search(rf"^step 1 of 2: loss {SCORE}$", capsys.readouterr().out, re.MULTILINE)


def interrupt(folder):
    """Make a finished run one that was interrupted right before its end, with the best epoch behind it."""
    (folder / "results.json").unlink()
    shutil.rmtree(folder / "adapter")


class TestScoresOfClasses:
    def test_one_label_per_example(self):
        rng = np.random.default_rng(0)
        outputs, labels = rng.normal(size=(50, 6)), rng.integers(0, 4, 50)
        outputs[:, 5] = -9  # neither a label nor a prediction
        names = [f"{'very ' * number * 3}long{number}" for number in range(6)]
        scores = score_classes(outputs, labels, names)
        found = scores.by_class()
        assert [*found] == names[:5]
        for number, name in enumerate(names[:5]):
            of_class = f1_score(labels == number, outputs.argmax(-1) == number, zero_division=0.0)
            assert found[name] == pytest.approx({**found[name], "f1": of_class, "support": sum(labels == number)})
        matrix, shown = scores.confusion()
        assert shown == names[:5]
        assert matrix.tolist() == [
            [int(((labels == a) & (outputs.argmax(-1) == b)).sum()) for b in range(5)] for a in range(5)
        ]
        assert max(map(len, scores.table().splitlines())) < 80

    def test_several_labels_per_example(self):
        labels = np.array([[1, 0, 0], [1, 1, 0]], np.float32)
        scores = score_classes(np.array([[3.0, -1, -1], [1, -1, -2]]), labels, ["a", "b", "c"])
        assert scores.by_class() == {
            "a": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 2},
            "b": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1},
        }
        assert scores.confusion() is None

    def test_a_table_of_many_classes_has_those_with_the_lowest_scores(self):
        numbers = np.repeat(np.arange(MAX_LISTED + 2), 2)
        predicted = numbers.copy()
        predicted[[0, -1]] = 7
        table = ClassScores(numbers, predicted, tuple(f"class{n:02}" for n in range(MAX_LISTED + 2)), 99).table()
        assert len(re.findall(r"class\d\d", table)) == MAX_LISTED
        assert all(f"class{number:02} " in table for number in (0, 7, MAX_LISTED + 1))
        assert "and 2 classes with a higher F1" in table

    def test_entities(self):
        """Micro averages are those of all entities, which `score` computes in another way."""
        names = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")
        rng = np.random.default_rng(0)
        labels = rng.integers(0, 5, (30, 12))
        labels[:, -2:] = IGNORED
        outputs = rng.normal(size=(30, 12, 5)) + 2 * np.eye(5)[np.maximum(labels, 0)]
        tags = Tags("words", "tags", names)
        scores, whole = tags.score_classes(outputs, labels), tags.score(outputs, labels)
        found = scores.by_class()
        assert [*found] == ["LOC", "PER"]
        micro = next(line for line in scores.table().splitlines() if "micro avg" in line).split()[2:]
        assert [float(value) for value in micro[:3]] == pytest.approx(
            [whole["precision"], whole["recall"], whole["f1"]], abs=5e-4
        )
        assert sum(scores["support"] for scores in found.values()) == int(micro[3])
        matrix, shown = scores.confusion()
        assert shown == ["LOC", "PER", "no entity"]
        assert matrix[2, 2] == 0
        assert matrix[:2].sum() == int(micro[3])

    def test_tags_of_words(self):
        labels = np.array([[0, 1, IGNORED], [1, 1, 0]])
        scores = Tags("words", "tags", ("NOUN", "VERB")).score_classes(np.eye(2)[np.maximum(labels, 0)], labels)
        assert {name: one["support"] for name, one in scores.by_class().items()} == {"NOUN": 2, "VERB": 3}


class TestFigures:
    @pytest.mark.parametrize("classes", [2, 30])
    def test_every_class_can_be_read(self, classes, tmp_path):
        matrix = np.full((classes, classes), 1) + 99 * np.eye(classes, dtype=int)
        figure = draw_confusion(matrix, [f"$5 to $10, class {number}" for number in range(classes)], "a, test")
        save_png(figure, tmp_path / "figure.png")
        [axes] = figure.axes
        renderer = FigureCanvasAgg(figure).get_renderer()
        labels = [label.get_window_extent(renderer) for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
        for group in (labels[:classes], labels[classes:]):
            assert not any(a.overlaps(b) for a, b in pairwise(group))
        assert len(axes.get_yticklabels()) == classes
        assert axes.get_yticklabels()[1].get_text() == rf"\$5 to \$10, class 1 ({99 + classes})"
        cells = {text.get_position(): text.get_text() for text in axes.texts}
        share = 100 / (99 + classes)
        assert cells[1, 1] == (f"{share:.0%}\n100" if classes == 2 else f"{100 * share:.0f}")
        width = axes.transData.transform([(0, 0), (1, 0)])[:, 0]
        assert max(text.get_window_extent(renderer).width for text in axes.texts) < width[1] - width[0]

    def test_letters_that_the_font_lacks(self, tmp_path):
        save_png(draw_confusion(np.eye(2, dtype=int), ["账单", "登录"], "a"), tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size

    def test_too_many_classes_are_not_drawn(self, encoder, tmp_path, capsys):
        number = report.MAX_CLASSES + 1
        rows = pd.DataFrame({"text": ["pay"] * 2 * number, "label": [f"kind {n}" for n in range(number)] * 2})
        for split in ("train", "validation"):
            rows.to_csv(tmp_path / f"{split}.csv", index=False)
        run(text_classification, "--data", tmp_path, "--model_name", encoder, "--use_cpu", "--max_steps", 1,
            "--output_dir", tmp_path / "run")  # fmt: skip
        assert f"not drawn for {number} classes (at most {number - 1})" in capsys.readouterr().out
        assert not list((tmp_path / "run").glob("*.png")), "a single evaluation has no curve"
        assert len(json.loads((tmp_path / "run" / "results.json").read_text())["per_class"]["scores"]) == number

    def test_learning_curves(self):
        log = [{"epoch": 0.5, "loss": 0.7}, {"epoch": 1.0, "eval_loss": 0.6}, {"epoch": 1.5, "loss": 0.5}]
        epochs = [{"epoch": n, "step": 9 * n, "loss": 0.6, "accuracy": 0.5, "f1": 0.1 * n} for n in (1.0, 2.0)]
        left, right = draw_learning_curves(log, epochs, "f1", 2.0).axes
        lines = {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in left.lines}
        assert lines["training"] == [(0.5, 0.7), (1.5, 0.5)]
        assert lines["validation"] == [(1.0, 0.6), (2.0, 0.6)]
        assert [line.get_label() for line in right.lines] == ["f1", "accuracy", "kept"]
        assert right.lines[0].get_data()[1].tolist() == [0.1, 0.2]
        assert to_hex(left.lines[0].get_color()).upper() == BLUE
        assert len(draw_learning_curves([], [{"epoch": 1.0, "step": 1, "loss": 1.0}] * 2, "loss", None).axes) == 1
        plt.close("all")


class TestCommands:
    @pytest.mark.parametrize(
        ("example", "texts"),
        [
            ('it\'s $HOME; "yes" `ls`', ['it\'s $HOME; "yes" `ls`']),
            ("--flag\n- and\ta\x07 tab", ["flag - and a tab"]),
            ("-", ["text"]),
            ("word " * 99, [("word " * 16).strip()]),
            (("a?", "é" * 200), ["a?", "é" * 80]),
        ],
    )
    def test_predict(self, example, texts, monkeypatch):
        monkeypatch.setattr(report, "_tool", lambda: ["houlsby-peft"])
        words = shlex.split(report.predict_command(Path("my runs/adapter"), example))
        pairs = ["--pairs"] if len(texts) == 2 else []
        assert words == ["houlsby-peft", "predict", "my runs/adapter", *texts, *pairs]

    @pytest.mark.parametrize(
        ("name", "repo"),
        [("mrpc", "mrpc"), ("user/mrpc", "user/mrpc"), ("r 8, $1--x.git", "r-8-1-x-git"), ("…", "adapter")],
    )
    def test_push(self, name, repo, tmp_path, monkeypatch):
        monkeypatch.setattr(report, "_tool", lambda: ["houlsby-peft"])
        (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
        words = shlex.split(report.push_command(tmp_path, name, tmp_path / "none.json", "org/base", private=False))
        assert words == ["houlsby-peft", "push", str(tmp_path), repo]
        (tmp_path / "results.json").write_text("{}")
        words = shlex.split(report.push_command(tmp_path, name, tmp_path / "results.json", "org/other", private=True))
        assert words[4:] == ["--base-model", "org/other", "--results", str(tmp_path / "results.json"), "--private"]
        assert report.push_command(tmp_path, name, tmp_path / "none.json", str(tmp_path), private=False) is None

    def test_the_tool_is_that_of_this_environment(self, tmp_path, monkeypatch):
        tool = tmp_path / "bin" / "houlsby-peft"
        tool.parent.mkdir()
        tool.touch(mode=0o755)
        monkeypatch.setattr(report.sysconfig, "get_path", lambda _: str(tool.parent))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PATH", str(tool.parent))
        assert report._tool() == ["houlsby-peft"]
        (tmp_path / "other").mkdir()
        shutil.copy(tool, tmp_path / "other")
        monkeypatch.setenv("PATH", f"{tmp_path / 'other'}")
        assert report._tool() == ["bin/houlsby-peft"]
        monkeypatch.setattr(report.sysconfig, "get_path", lambda _: "nowhere")
        assert report._tool()[1:] == ["-m", "houlsby_peft.cli"]

    def test_pasted(self, hub, data, tmp_path):
        """A process is quiet, and the commands that its run ends with work."""
        make_base(tmp_path / "base", max_position_embeddings=128)
        hub.add(BASE, tmp_path / "base")
        command = [sys.executable, "-c", PASTE, str(ROOT / "recipes" / "text_classification.py"), "--data", str(data)]
        command += ["--model_name", BASE, "--use_cpu", "--max_steps", "2", "--output_dir", "my runs/o'clock"]
        examples = ["what's due?", "-- a dog"]
        command += [f"--example={text}" for text in examples]
        environment = {**hub.environment(tmp_path), "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
        # What torchao, of the extra "quantized", logs while it is imported.
        assert [line for line in process.stderr.splitlines() if not re.search("torchao|_pytree", line)] == []
        *log, prediction, address = process.stdout.splitlines()
        assert len(log) < 30
        assert json.loads(prediction)["label"] in TEXTS.values()
        assert address.startswith(f"{hub.url}/user/o-clock/commit/")
        files = hub.store.repos["user/o-clock"].head.files
        assert files["adapter_model.safetensors"]
        cards = (tmp_path / "my runs" / "o'clock" / "adapter" / "README.md").read_text(), files["README.md"].decode()
        for card in cards:
            widget = yaml.safe_load(card.split("---\n")[1])["widget"]
            assert [one["text"] for one in widget] == examples
            assert all(one["output"][0]["label"] in TEXTS.values() for one in widget)


def test_one_gpu_per_process(monkeypatch, tmp_path):
    """The Trainer would copy the model to all GPUs of a process."""
    original = TrainingArguments.__post_init__

    def with_four_gpus(self):
        original(self)
        self._n_gpu = 4

    monkeypatch.setattr(TrainingArguments, "__post_init__", with_four_gpus)
    training = RecipeTrainingArguments(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=8)
    assert training.n_gpu == 1
    assert training.train_batch_size == 8
