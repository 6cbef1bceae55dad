"""From somebody's own file to a model: what is detected, what is left out, what is evaluated and with which flags."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from sklearn.utils.class_weight import compute_class_weight
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import houlsby_peft
import text_classification
from recipe_runs import run, save_tiny_encoder
from study.presets import parse_arguments
from tasks.classification import ClassificationArguments, ClassificationTrainer, load_task
from tasks.labels import MULTI, SINGLE, Labels, balanced_weights, find_label_columns, rarest_labels
from training.arguments import ClassifierArguments, RecipeParser, RecipeTrainingArguments
from training.data import find_text_columns, with_validation
from training.errors import RecipeError
from training.methods import ClassifierMethodArguments
from training.tables import WHERE, read_file


TEXTS = {
    "Billing": "the king pays",
    "Login": "the queen enters",
    "Größe": 'the "dog", it is large',
}
TICKETS = [
    (1000 + row, f"2024-01-{row % 28 + 1:02}", TEXTS[(*TEXTS,)[row % 3]], (*TEXTS,)[row % 3]) for row in range(60)
]
HEADER = ("ticket_id", "created", "message", "category")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder"))


def write(path: Path, rows=TICKETS, header=HEADER, encoding="utf-8", **options) -> Path:
    pd.DataFrame(rows, columns=header).to_csv(path, index=False, encoding=encoding, **options)
    return path


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "encoding", "separator", "end"),
        [
            ("a.csv", "utf-8", ",", "\n"),
            ("a.csv", "cp1252", ";", "\r\n"),
            ("a.CSV", "utf-8-sig", ";", "\n"),
            ("a.csv", "utf-16", "\t", "\r\n"),
            ("a.csv", "latin-1", "|", "\n"),
            ("a.tsv", "utf-8", "\t", "\n"),
            ("a.tsv", "utf-8", ",", "\n"),
        ],
    )
    def test_separators_and_encodings(self, tmp_path, name, encoding, separator, end, capsys):
        rows = [
            ["1", "Größe; one, two | three", "x"],
            ["2", "plain", ""],
            ["3", 'two\nlines, "quoted"', "y"],
            ["4", "z", "x"],
        ]
        if encoding == "latin-1":
            rows[1][1] = "\x81"  # not in cp1252
        path = write(tmp_path / name, rows, ("id", "Text", "Label"), encoding, sep=separator, lineterminator=end)
        found = read_file(path)
        assert found.to_dict() == {
            "id": ["1", "2", "3", "4"],
            "Text": [text for _, text, _ in rows],
            "Label": ["x", "", "y", "x"],
            WHERE: ["line 2", "line 3", "line 4", "line 6"],
        }
        assert f"4 rows, separator {separator!r}, encoding" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            ("id, text, label\n1, a, x\n", {"id": ["1"], "text": ["a"], "label": ["x"]}),
            (",text,label\n0,a,x\n", {"text": ["a"], "label": ["x"]}),
            ("text,label,,\na,x,,\n", {"text": ["a"], "label": ["x"]}),
            ('text;label\n"a;b";1,5\nc, d, e;2,5\n', {"text": ["a;b", "c, d, e"], "label": ["1,5", "2,5"]}),
            ('"text"\t"label"\n"a"\t"x"\n', {"text": ["a"], "label": ["x"]}),
            ('text\tlabel\n"a ""b"""\tx\n', {"text": ['a "b"'], "label": ["x"]}),
            ('text\tlabel\n"a"\tx\n"b" c\ty\n', {"text": ['"a"', '"b" c'], "label": ["x", "y"]}),
            ('text\tlabel\n"a ""b\tx\n', {"text": ['"a ""b'], "label": ["x"]}),
            ("text\nsome words\nmore, words\n", None),
        ],
    )
    def test_what_programs_write(self, tmp_path, content, expected):
        name = "a.tsv" if "\t" in content else "a.csv"
        (tmp_path / name).write_text(content)
        if expected is None:
            with pytest.raises(RecipeError, match="line 3 must have 1 fields like the header, got 2; put quotation"):
                read_file(tmp_path / "a.csv")
        else:
            assert read_file(tmp_path / name).remove_columns(WHERE).to_dict() == expected

    def test_an_unclosed_quotation_mark_is_named_where_it_opens(self, tmp_path):
        (tmp_path / "a.csv").write_text('text,label\na,1\n"b,2\nc,1\n')
        with pytest.raises(RecipeError, match=r"line 3: .*; close each quotation mark"):
            read_file(tmp_path / "a.csv")


class TestColumns:
    @pytest.mark.parametrize(
        ("columns", "text", "label"),
        [
            (("ticket_id", "created", "message", "category"), ("message",), ("category",)),
            (("ID", "Title", "Body", "Class"), ("Body",), ("Class",)),
            (("Premise", "HYPOTHESIS", "Target"), ("Premise", "HYPOTHESIS"), ("Target",)),
            (("text", "Text", "label", "Label"), ("text",), ("label",)),
            (("label_id", "score", "tweet", "Sentiment"), ("tweet",), ("Sentiment",)),
        ],
    )
    def test_names_without_regard_to_case(self, columns, text, label):
        data = Dataset.from_dict({name: ["a", "b"] for name in columns})
        assert find_text_columns(data, None) == text
        assert find_label_columns(data, None) == label

    def test_named_columns_without_regard_to_case(self):
        data = Dataset.from_dict({"Note": ["a"], "PRIORITY": ["b"]})
        assert find_text_columns(data, ["note"]) == ("Note",)
        assert find_label_columns(data, ["priority"]) == ("PRIORITY",)

    def test_unusual_names_get_a_hint(self):
        data = Dataset.from_dict({"id": range(8), "note": ["long words"] * 8, "priority": ["high", "low"] * 4})
        with pytest.raises(RecipeError, match=r"--text_columns note if that is the text"):
            find_text_columns(data, None)
        with pytest.raises(RecipeError, match=r"Name the label with --label_columns; it may be priority \(2 values\)"):
            find_label_columns(data, None)


def load(path: Path, **options) -> object:
    return load_task(ClassificationArguments(data=str(path), **options), RecipeTrainingArguments(use_cpu=True))


class TestLabels:
    def test_rows_without_a_label_are_left_out_and_counted(self, tmp_path, capsys):
        rows = [[*row[:3], "" if number in (3, 7, 8) else f"{row[3]} "] for number, row in enumerate(TICKETS)]
        task = load(write(tmp_path / "tickets.csv", rows))
        output = capsys.readouterr().out
        assert "train: 3 rows without a label in 'category' left out (line 5, line 9, line 10)" in output
        assert "texts: message; labels: category; to choose others, give --text_columns or --label_columns" in output
        assert """  line 4: 'the "dog", it is large' -> Größe\n""" in output
        assert task.labels.names == ("Billing", "Größe", "Login"), "with blanks"
        assert sum(map(len, task.splits.values())) == 57

    def test_rows_without_any_of_several_columns(self, tmp_path, capsys):
        rows = [("a", 0, 1), ("b", 1, 0), ("c", "", ""), ("d", 1, 1)] * 5
        task = load(write(tmp_path / "a.csv", rows, ("text", "sad", "glad")), label_columns=["sad", "glad"])
        assert "5 rows without a label in 'sad, glad' left out (line 4, line 8," in capsys.readouterr().out
        assert task.labels.problem_type == MULTI

    def test_messages_name_lines_after_rows_were_left_out(self, tmp_path):
        write(
            tmp_path / "train.csv",
            [("", "a"), ("two\nlines", "a"), ("c", ""), ("d", "b"), ("e", "b")],
            ("text", "label"),
        )
        write(tmp_path / "validation.csv", [("x\ny", "a"), ("", ""), ("z", "c")], ("text", "label"))
        with pytest.raises(RecipeError, match="validation: line 5 has the label 'c', which is not one of"):
            load(tmp_path)

    def test_most_labels_seen_once(self, tmp_path):
        path = write(tmp_path / "a.csv", [("text", f"id {max(row, 4)}") for row in range(12)], ("text", "label"))
        with pytest.raises(RecipeError, match="7 of the 12 rows have a label in 'label' that no other row has"):
            load(path)

    def test_classes_that_differ_in_case(self, tmp_path, capsys):
        task = load(write(tmp_path / "a.csv", [("a", "Yes"), ("b", "yes"), ("c", "no")] * 9, ("text", "label")))
        assert "the classes 'Yes' and 'yes' differ only in case" in capsys.readouterr().out
        assert task.labels.names == ("Yes", "no", "yes")

    def test_numbers_as_classes(self, tmp_path, capsys):
        assert load(write(tmp_path / "a.csv", [("a", 1), ("b", 2)] * 9, ("text", "label"))).labels.names == ("1", "2")
        assert "numbers as classes; for a score, give --problem_type regression" in capsys.readouterr().out


class TestSplit:
    def test_each_label_has_its_share(self):
        labels = ["a"] * 700 + ["b"] * 250 + ["c"] * 49 + ["d"]
        random.Random(0).shuffle(labels)
        splits = with_validation({"train": Dataset.from_dict({"label": labels})}, labels)
        counts = {name: splits["validation"]["label"].count(name) for name in "abcd"}
        assert sum(counts.values()) == 100
        assert counts["d"] == 0
        assert all(abs(counts[name] - labels.count(name) / 10) <= 1 for name in "abc"), counts

    def test_rare_labels_are_drawn_as_often_as_their_share(self):
        labels = ["common"] * 2000 + [f"rare {number // 3}" for number in range(300)]
        splits = with_validation({"train": Dataset.from_dict({"label": labels})}, labels)
        rare = [label for label in splits["validation"]["label"] if label != "common"]
        assert 15 <= len(rare) <= 45
        assert set(splits["train"]["label"]) == set(labels)

    def test_several_labels_by_the_rarest(self):
        labels = Labels(("tags",), MULTI, ("a", "b"))
        assert rarest_labels(labels, [("a", "b"), ("a",), ("a",), ()]) == ["b", "a", "a", ""]


class TestClassWeights:
    def test_one_class_per_row(self):
        encoded = [0] * 6 + [1] * 3 + [3]
        weights = balanced_weights(Labels(("label",), SINGLE, ("a", "b", "never", "c")), encoded)
        expected = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=np.array(encoded))
        assert [weights[0], weights[1], weights[3]] == pytest.approx(expected.tolist())
        assert weights[2] == 1

    def test_several_per_row(self):
        labels = Labels(("tags",), MULTI, ("a", "b", "never"))
        assert balanced_weights(labels, [[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]]) == pytest.approx((1 / 3, 3, 1))

    @pytest.mark.parametrize("several", [False, True])
    def test_the_loss(self, tmp_path, several):
        """By its formula: the mean over rows of each row's loss times the weight of its class."""
        logits, weights = torch.randn(4, 3, generator=torch.manual_seed(0)), torch.tensor([0.5, 1.0, 4.0])
        labels = (
            torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]]) if several else torch.tensor([0, 2, 1, 0])
        )
        trainer = object.__new__(ClassificationTrainer)
        trainer.weights, trainer.args = weights, RecipeTrainingArguments(str(tmp_path), use_cpu=True)
        model = lambda **inputs: type("Output", (), {"logits": inputs["x"]})  # noqa: E731
        loss = trainer.compute_loss(model, {"x": logits, "labels": labels})
        if several:
            per_class = binary_cross_entropy_with_logits(logits, labels, reduction="none")
            expected = (per_class * torch.where(labels == 1, weights, 1.0)).mean()
        else:
            expected = (cross_entropy(logits, labels, reduction="none") * weights[labels]).mean()
        assert torch.allclose(loss, expected)

    @pytest.mark.parametrize("method", ["houlsby", "full"])
    def test_a_run(self, encoder, tmp_path, capsys, method):
        rows = [(text, "common") for text in ("the king is", "the dog is", "the cat runs")] + [("a queen", "rare")]
        for split in ("train", "validation"):
            write(tmp_path / f"{split}.csv", [*rows[:3] * 16, *rows[3:] * 4], ("text", "label"))
        run(text_classification, "--data", tmp_path, "--model_name", encoder, "--output_dir", tmp_path / "run",
            "--use_cpu", "--max_steps", 2, "--class_weights", "balanced", "--method", method)  # fmt: skip
        assert "weights of the classes in the loss: common 0.54, rare 6.50" in capsys.readouterr().out
        assert json.loads((tmp_path / "run" / "results.json").read_text())["arguments"]["class_weights"] == "balanced"


@pytest.fixture(scope="module")
def tickets(encoder, tmp_path_factory):
    """The folder of somebody who has run the recipe with nothing but a file and an encoder."""
    folder = tmp_path_factory.mktemp("somebody")
    write(folder / "tickets.csv", encoding="cp1252", sep=";")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        run(text_classification, "--data", "tickets.csv", "--model_name", encoder, "--use_cpu", "--max_steps", 12,
            "--learning_rate", 1e-2)  # fmt: skip
    return folder


def evaluate(folder: Path, *flags: object) -> dict:
    run(text_classification, *flags, "--use_cpu", "--output_dir", folder)
    return json.loads((folder / "evaluation.json").read_text())


class TestFromAFileToPredictions:
    def test_the_adapter_knows_its_labels(self, tickets):
        results = json.loads((tickets / "runs" / "tickets" / "results.json").read_text())
        adapter = houlsby_peft.load(tickets / "runs" / "tickets" / "adapter")
        assert list(adapter.labels) == results["labels"] == ["Billing", "Größe", "Login"]
        assert results["problem_type"] == SINGLE
        assert results["best_score"] == 1.0, "three texts, each with its own label"
        answers = adapter.predict(list(TEXTS.values()))
        assert [answer["label"] for answer in answers] == list(TEXTS)

    def test_its_own_file_is_scored_on_the_validation_rows(self, tickets, tmp_path):
        results = json.loads((tickets / "runs" / "tickets" / "results.json").read_text())
        moved = shutil.copy(tickets / "tickets.csv", tmp_path / "moved.csv")
        for data in (tickets / "tickets.csv", moved):  # the run has recorded a path in another working directory
            found = evaluate(tmp_path, "--data", data, "--evaluate", tickets / "runs" / "tickets")
            assert found["dataset"]["rows"] == {"validation": 6}
            assert found["scores"] == pytest.approx(results["best_scores"], rel=1e-4)

    @pytest.mark.parametrize("data", ["tickets.csv", "folder"])
    @pytest.mark.parametrize("flags", [("--do_train",), ("--validation_file", "{file}")])
    def test_data_that_were_trained_on_as_a_whole_are_named(self, encoder, tmp_path, data, flags, capsys):
        data = tmp_path / data
        (tmp_path / "folder").mkdir()
        write(data if data.suffix else data / "train.csv")
        flags = [flag.format(file=write(tmp_path / "few.csv", TICKETS[:3])) for flag in flags]
        run(text_classification, "--data", data, "--model_name", encoder, "--use_cpu", "--max_steps", 1,
            "--output_dir", tmp_path, *flags)  # fmt: skip
        found = evaluate(tmp_path, "--data", data, "--evaluate", tmp_path)
        assert found["dataset"]["rows"] == {"validation": 60}
        printed = capsys.readouterr().out
        assert f"all examples of {data} were trained on" in printed
        assert "no validation split" not in printed

    def test_another_file_is_scored_whole_by_the_classes_of_the_adapter(self, tickets, tmp_path):
        rows = [(1, "", text, "Login") for text in TEXTS.values()]
        saved = tickets / "runs" / "tickets" / "adapter"
        found = evaluate(tmp_path, "--data", write(tmp_path / "new.csv", rows), "--evaluate", saved)
        assert found["scores"]["accuracy"] == pytest.approx(1 / 3)
        assert found["labels"] == ["Billing", "Größe", "Login"]
        with pytest.raises(RecipeError, match="line 2 has the label 'Other', which is not one of the 3 classes"):
            evaluate(tmp_path, "--data", write(tmp_path / "a.csv", [(1, "", "a", "Other")]), "--evaluate", saved)

    @pytest.mark.parametrize("labeled", [True, False])
    def test_predictions_of_a_test_file(self, tickets, tmp_path, labeled):
        header = HEADER if labeled else HEADER[:3]
        test = write(tmp_path / "test.csv", [row[: len(header)] for row in TICKETS[:6]], header)
        saved = tickets / "runs" / "tickets" / "adapter"
        found = evaluate(tmp_path, "--data", tickets / "tickets.csv", "--test_file", test, "--evaluate", saved)
        table = pd.read_csv(tmp_path / "evaluation_predictions.csv")
        assert table["predicted"].tolist() == list(TEXTS) * 2
        assert list(table.columns) == ["message", *(["label"] if labeled else []), "predicted", "probability"]
        assert (found["test"] is None) == (not labeled)
        if labeled:
            assert found["test"]["accuracy"] == 1.0

    def test_an_evaluation_leaves_the_predictions_of_a_run(self, encoder, tmp_path):
        """Also in the run's own folder, where its results.json stays as well."""
        for split in ("train", "test"):
            write(tmp_path / f"{split}.csv")
        folder = tmp_path / "run"
        run(text_classification, "--data", tmp_path, "--model_name", encoder, "--use_cpu", "--max_steps", 2,
            "--output_dir", folder)  # fmt: skip
        before = {name: (folder / name).read_bytes() for name in ("predictions.csv", "results.json")}
        write(tmp_path / "test.csv", TICKETS[:6])
        for flags in (("--evaluate", folder), ("--do_eval", "--do_predict")):
            evaluate(folder, "--data", tmp_path, *flags)
            assert len(pd.read_csv(folder / "evaluation_predictions.csv")) == 6
            (folder / "evaluation_predictions.csv").unlink()
            assert {name: (folder / name).read_bytes() for name in before} == before

    def test_nothing_of_the_run_before_is_taken_for_that_of_a_run_that_starts_over(self, encoder, tmp_path):
        for split in ("train", "test"):
            write(tmp_path / f"{split}.csv")
        folder = tmp_path / "run"
        flags = ("--data", tmp_path, "--model_name", encoder, "--use_cpu", "--max_steps", 2, "--output_dir", folder)
        run(text_classification, *flags)
        again = (*flags, "--method", "full", "--learning_rate", 1e-2)
        run(text_classification, *again, "--overwrite_output_dir", "--do_train", "--do_eval")
        assert not (folder / "predictions.csv").exists()
        run(text_classification, *again)
        results = json.loads((folder / "results.json").read_text())
        table = pd.read_csv(folder / "predictions.csv")
        assert results["test"]["accuracy"] == pytest.approx((table["predicted"] == table["label"]).mean())
        assert (folder / "adapter").is_dir(), "it may be what the new run started from"
        found = evaluate(tmp_path / "again", "--data", tmp_path, "--evaluate", folder)
        assert found["evaluated"] == str(folder / "model")
        assert found["scores"] == pytest.approx(results["best_scores"], rel=1e-4)

    @pytest.mark.parametrize("method", ["full", "lora"])
    def test_other_methods(self, encoder, tickets, tmp_path, method):
        data = tickets / "tickets.csv"
        run(text_classification, "--data", data, "--model_name", encoder, "--use_cpu", "--max_steps", 2, "--method",
            method, "--output_dir", tmp_path / "run", "--max_length", 5)  # fmt: skip
        found = evaluate(tmp_path / "run", "--data", data, "--do_eval")
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        assert found["scores"] == pytest.approx(results["best_scores"], rel=1e-4)


class TestFlagsOfTheExamples:
    GROUPS = (ClassificationArguments, ClassifierMethodArguments, ClassifierArguments, RecipeTrainingArguments)

    def parse(self, *args: str) -> dict[str, object]:
        groups = RecipeParser(self.GROUPS).parse(args)
        return {name: value for group in groups for name, value in vars(group).items()}

    def test_other_names(self, tmp_path):
        path = str(write(tmp_path / "a.csv"))
        found = self.parse(
            *(
                "--model_name_or_path",
                "bert",
                "--train_file",
                path,
                "--validation_file",
                path,
                "--max_seq_length",
                "64",
            ),
            *("--text_column_names", "message", "--label_column_name", "category", "--do_train", "--do_eval"),
        )
        expected = {"model_name": "bert", "data": path, "validation_file": path, "test_file": None, "max_length": 64,
                    "text_columns": ["message"], "label_columns": ["category"], "do_predict": False}  # fmt: skip
        assert expected.items() <= found.items()
        assert self.parse("--dataset_name", "user/data", "--dataset_config_name", "c")["data_config"] == "c"
        assert parse_arguments(["--task_name", "mrpc", "--do_predict", "--do_train", "--do_eval"])[0].predict

    @pytest.mark.parametrize(
        ("flags", "train", "evaluate", "predict"),
        [
            ([], True, True, True),
            (["--do_train"], True, False, False),
            (["--do_train", "--do_eval"], True, True, False),
            (["--do_eval"], False, True, False),
            (["--do_predict"], False, False, True),
        ],
    )
    def test_what_is_done(self, tmp_path, flags, train, evaluate, predict):
        found = self.parse("--data", str(write(tmp_path / "a.csv")), *flags)
        assert (found["do_train"], found["do_eval"], found["do_predict"]) == (train, evaluate, predict)
        assert (found["eval_strategy"] == "no") == (not evaluate)
        assert (found["model_name"] is None) == (not train), "what was trained knows its encoder"

    def test_only_training_uses_all_rows(self, encoder, tmp_path):
        for split in ("train", "test"):
            write(tmp_path / f"{split}.csv")
        command = (text_classification, "--data", tmp_path, "--model_name", encoder, "--output_dir", tmp_path / "run",
                   "--use_cpu", "--max_steps", 1, "--do_train")  # fmt: skip
        run(*command)
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        assert results["dataset"]["rows"] == {"train": 60, "test": 60}
        assert (results["test"], results["best_score"], results["epochs"]) == (None, None, [])
        assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
        assert not (tmp_path / "run" / "predictions.csv").exists()

        run(*command, "--do_predict")  # of the finished run
        assert len(pd.read_csv(tmp_path / "run" / "predictions.csv")) == 60
        after = json.loads((tmp_path / "run" / "results.json").read_text())
        assert {**after, "test": None} == results
        assert 0 <= after["test"]["accuracy"] <= 1

        write(tmp_path / "test.csv", TICKETS[:6])  # other texts, which are not trained on
        for _ in range(2):
            run(*command, "--do_predict")
            assert len(pd.read_csv(tmp_path / "run" / "predictions.csv")) == 6
            last = json.loads((tmp_path / "run" / "results.json").read_text())
            assert {**last, "test": after["test"], "test_file": after["test_file"]} == after
            assert last["test_file"] != after["test_file"]


class TestFilesOfArguments:
    VALUES = MappingProxyType({
        "data": "a.csv", "r": 16, "learning_rate": 0.002, "text_columns": ["message"], "bf16": False,
        "eval_strategy": "no", "load_best_model_at_end": False, "train_layer_norm": "all", "layers": [0, 1],
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.5}, "seed": None,
    })  # fmt: skip

    @pytest.mark.parametrize("kind", ["json", "yaml"])
    def test_a_file_and_flags_after_it(self, tmp_path, monkeypatch, kind):
        monkeypatch.chdir(tmp_path)
        write(tmp_path / "a.csv")
        (tmp_path / "a.json").write_text(json.dumps({**self.VALUES}))
        (tmp_path / "a.yaml").write_text(
            "data: a.csv\nr: 16\nlearning_rate: 2e-3\ntext_columns: [message]\nbf16: false\neval_strategy: no\n"
            "load_best_model_at_end: no\ntrain_layer_norm: all\nlayers:\n- 0\n- 1\n"
            "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 0.5}\nseed:\n"
        )
        found = TestFlagsOfTheExamples().parse(f"a.{kind}", "--r", "8")
        expected = {**self.VALUES, "r": 8, "seed": 42}
        assert {name: found[name] for name in expected} == expected

    @pytest.mark.parametrize("content", ["[1]", "{", "text", "a: [b"])
    def test_other_files(self, tmp_path, content):
        for name in ("a.json", "a.yaml"):
            (tmp_path / name).write_text(content)
            with pytest.raises(RecipeError, match=r"must (be a file|hold an object) with a value for each flag"):
                RecipeParser(TestFlagsOfTheExamples.GROUPS).parse([str(tmp_path / name)])


class TestThePackagedEncoder:
    @pytest.mark.parametrize(
        ("flags", "pooler", "rate"),
        [
            ("", True, 1e-3),
            ("--train_pooler false --learning_rate 3e-4", False, 3e-4),
            ("--learning_rate 5e-4", True, 5e-4),
            ("--method full --learning_rate 3e-5", False, 3e-5),
            ("--method lora", True, 3e-4),
            ("--preset houlsby2019", True, 3e-4),
        ],
    )
    def test_its_settings_are_the_defaults(self, flags, pooler, rate):
        _, _, adapter, training = parse_arguments(["--task", "cola", "--model_name", "minilm", *flags.split()])
        assert (adapter.train_pooler, training.learning_rate) == (pooler, rate)

    def test_other_encoders_keep_theirs(self):
        _, _, adapter, training = parse_arguments(["--task", "cola"])
        assert (adapter.train_pooler, training.learning_rate) == (False, 3e-4)

    def test_the_log_says_so(self, tmp_path, monkeypatch, capsys):
        data = write(tmp_path / "a.csv")
        monkeypatch.setattr(
            "sys.argv", ["x.py", "--data", str(data), "--model_name", "minilm", "--learning_rate", "1"]
        )
        RecipeParser(TestFlagsOfTheExamples.GROUPS).parse()
        assert "minilm is trained with --train_pooler true, as advised for it;" in capsys.readouterr().out
