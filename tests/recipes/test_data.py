"""Files, columns, labels and splits: what is detected, what is said, and what is refused."""

from __future__ import annotations

import json
import random

import numpy as np
import pandas as pd
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from sklearn.utils.class_weight import compute_class_weight
from transformers import AutoTokenizer

from data import reading
from data.balance import balanced_weights, describe_balance
from data.data import commit_of, find_text_columns, rows_with_text, sample, tokenize
from data.label_column import declared_classes, find_label_column, find_label_columns
from data.labels import MULTI, REGRESSION, SINGLE, Labels, find_labels
from data.reading import files_of, load_data, read_file
from data.splits import report_repeated, with_validation, without_training_texts
from houlsby_peft import AdapterError
from recipe_runs import write
from run.arguments import DataArguments, ReadOptions
from run.edge import RecipeError
from run.run import WHERE
from run.training_arguments import RecipeTrainingArguments
from tasks.classification import ClassificationArguments, load_task


def load(path, **options):
    return load_task(
        ClassificationArguments(data=str(path), **options), RecipeTrainingArguments(use_cpu=True)
    )


def labels_of(data, named=None, problem_type=None):
    """What the labels of a data set are, and how they are written."""
    column = find_label_column(data, find_label_columns(data, named))
    declared = declared_classes(data, column.columns[0])
    labels = [label for label in column.read(data, "train") if label is not None]
    return find_labels(labels, column.columns, declared, problem_type), column


def encode(kind, column, data, name="train"):
    return kind.encode(data, column.read(data, name), name)


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "encoding", "separator", "end"),
        [
            ("a.CSV", "cp1252", ";", "\r\n"),
            ("a.tsv", "utf-8", "\t", "\n"),
        ],
    )
    def test_separators_and_encodings(self, tmp_path, name, encoding, separator, end, capsys):
        texts = ["Größe; one, two | three", "plain", 'two\nlines, "quoted"', "z"]
        frame = pd.DataFrame({"id": range(4), "Text": texts, "Label": ["x", "", "y", "x"]})
        path = tmp_path / name
        frame.to_csv(path, index=False, encoding=encoding, sep=separator, lineterminator=end)
        found = read_file(path)
        assert found["Text"][:] == texts
        assert found["Label"][:] == ["x", "", "y", "x"]
        assert found[WHERE][:] == ["row 2", "row 3", "row 4", "row 5"]
        assert f"4 rows, separator {separator!r}, encoding" in capsys.readouterr().out

    @pytest.mark.parametrize(("encoding", "text"), [("shift_jis", "請求書"), ("cp1251", "счёт")])
    @pytest.mark.parametrize("name", ["a.csv", "a.txt"])
    def test_an_encoding_that_is_named(self, tmp_path, encoding, text, name):
        (tmp_path / name).write_bytes(f"text\n{text}\n".encode(encoding))
        assert read_file(tmp_path / name, ReadOptions(encoding))["text"][-1] == text

    def test_a_conll_file(self, tmp_path):
        content = "# id = 3 domain=en\nAda _ B-PER\n# a=b O\n\n# _ O\n1 _ O\n"
        (tmp_path / "a.conll").write_text(content)
        rows = read_file(tmp_path / "a.conll")
        assert rows["tokens"][:] == [["Ada", "#"], ["#", "1"]]
        assert rows["tags"][:] == [["B-PER", "O"], ["O", "O"]]

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.csv", 'text,label\na,1\n"b,2\nc,1\n', "EOF inside string"),
            ("a.csv", "text,label\n", "no rows"),
            ("a.json", "1", "must be a JSON object, got 1"),
            ("a.conll", "Ada B-PER\nvisits\n", "line 2 must have 2 columns, .*, got 'visits'"),
            ("a.xlsx", "PK", "no rows"),
            ("a.docx", "PK", r"must end in one of \.parquet"),
        ],
    )
    def test_broken_files(self, tmp_path, name, content, message):
        (tmp_path / name).write_text(content)
        with pytest.raises((RecipeError, AdapterError), match=message):
            read_file(tmp_path / name)

    def test_a_folder(self, tmp_path, capsys):
        def load(folder):
            return load_data(DataArguments(data=str(folder)), RecipeTrainingArguments(use_cpu=True))

        write(tmp_path / "train.csv", text=["a"]).rename(tmp_path / "train.CSV")
        write(tmp_path / "test.parquet", text=["b"])
        assert {name: rows["text"][0] for name, rows in load(tmp_path).items()} == {
            "train": "a",
            "test": "b",
        }
        write(tmp_path / "dev.csv", text=["d"])
        other = write(tmp_path / "other.csv", text=["c"])
        capsys.readouterr()
        assert load(tmp_path)["validation"]["text"][0] == "d"
        assert f"note: not used in {tmp_path}: other.csv\n" in capsys.readouterr().out
        assert files_of(DataArguments(data=str(other), validation_file=str(other))) == {
            "train": [other],
            "validation": [other],
        }
        write(tmp_path / "b" / "dev.csv", text=["c"])
        with pytest.raises(RecipeError, match=r"has no split 'train': .*found dev\.csv"):
            load(tmp_path / "b")

    def test_data_on_the_hub_without_a_split_to_train_on(self, monkeypatch):
        splits = {"dev": Dataset.from_dict({"text": ["a"]})}
        monkeypatch.setattr(reading, "load_dataset", lambda name, config: splits)
        arguments = DataArguments(data="user/data")
        with pytest.raises(RecipeError, match="must have a split 'train', it has dev"):
            load_data(arguments, RecipeTrainingArguments(use_cpu=True))

    def test_the_commit_of_data_on_the_hub_is_known_of_what_is_left_of_them(
        self, tmp_path, monkeypatch
    ):
        rows = Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
        assert commit_of(rows) is None
        commit = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"
        folder = tmp_path / "user___data" / "default" / "0.0.0" / commit
        rows.save_to_disk(folder)
        splits = {"train": Dataset.load_from_disk(folder)}
        monkeypatch.setattr(reading, "load_dataset", lambda name, config: splits)
        splits = load_data(DataArguments(data="user/data"), RecipeTrainingArguments(use_cpu=True))
        assert commit_of(splits["train"].select([1]).remove_columns("label")) == commit

    def test_a_file_that_is_not_there_is_no_name_on_the_hub(self):
        with pytest.raises(RecipeError, match=r"--data must be .*'none\.csv'"):
            ClassificationArguments(data="none.csv")


class TestNames:
    def test_versions_are_different_tasks(self, tmp_path):
        names = set()
        for version in ("v1.5", "v1.6"):
            (tmp_path / version).mkdir()
            names.add(ClassificationArguments(data=str(tmp_path / version)).name)
        assert names == {"v1.5", "v1.6"}
        assert (
            ClassificationArguments(data=str(write(tmp_path / "mails.csv", text=["a"]))).name
            == "mails"
        )
        assert ClassificationArguments(data="user/v1.5", data_config="en").name == "v1.5_en"


class TestColumns:
    @pytest.mark.parametrize(
        ("columns", "text", "label"),
        [
            (("ID", "Title", "Body", "Class"), ("Body",), ("Class",)),
            (("Premise", "HYPOTHESIS", "Target"), ("Premise", "HYPOTHESIS"), ("Target",)),
            (("Nummer", "Nachricht", "Abteilung"), ("Nachricht",), ("Abteilung",)),
            (("Text", "Preis"), ("Text",), ("Preis",)),
            (("Bewertung", "Text", "Themen"), ("Text",), ("Bewertung",)),
        ],
    )
    def test_usual_names_without_regard_to_case(self, columns, text, label):
        data = Dataset.from_dict({name: ["a", "b"] for name in columns})
        assert find_text_columns(data, None) == text
        assert find_label_columns(data, None, text) == label

    def test_without_usual_names_the_longest_text_and_the_only_column_with_few_values(
        self, tmp_path
    ):
        texts = [f"{number} words that are long enough" for number in range(8)]
        assert load(
            write(tmp_path / "a.csv", key=range(8), wen=texts, lei=["high", "low"] * 4)
        ).kind.columns == ("lei",)
        path = write(tmp_path / "b.csv", wen=["short"] * 8, lei=["high", "low"] * 4)
        with pytest.raises(AdapterError, match="the file has wen, lei"):
            load(path)
        write(tmp_path / "b.csv", wen=texts, one=["x", "y"] * 4, two=["high", "low"] * 4)
        with pytest.raises(
            RecipeError, match=r"--label_columns; it may be one \(2 values\) or two"
        ):
            load(path)

    def test_a_split_that_lacks_a_column(self, tmp_path):
        write(tmp_path / "train.csv", text=["a", "b"] * 3, label=["x", "y"] * 3)
        write(tmp_path / "validation.csv", text=["c"])
        with pytest.raises(RecipeError, match="validation lacks the columns label"):
            load(tmp_path)

    def test_a_label_is_no_text(self, tmp_path):
        path = write(tmp_path / "a.csv", text=["a", "b"] * 3, label=["x", "y"] * 3)
        with pytest.raises(
            RecipeError, match=r"only text, label\. Name the label with --label_columns"
        ):
            load(path, text_columns=["text", "label"])
        with pytest.raises(RecipeError, match="must differ, got 'text' in both"):
            load(path, label_columns=["text"])


class TestLabels:
    @pytest.mark.parametrize(
        ("values", "problem_type", "names"),
        [
            ([10, 9, 2], SINGLE, ("2", "9", "10")),
            ([1.0, 0.0], SINGLE, ("0", "1")),
            (["0.5", "1"], REGRESSION, ("label",)),
            (["7", "007"], SINGLE, ("007", "7")),
            (["1.10", "1.1"], SINGLE, ("1.1", "1.10")),
            (["1.10", "1.2"], REGRESSION, ("label",)),
            ([[3], [1, 3], []], MULTI, ("1", "3")),
        ],
    )
    def test_kinds(self, values, problem_type, names):
        kind, _ = labels_of(Dataset.from_dict({"label": values}))
        assert kind == Labels(("label",), problem_type, names)

    def test_a_column_for_each_class(self):
        data = Dataset.from_dict({"a": [1, 0], "b": ["1", "0"], "text": ["x", "y"]})
        labels, column = labels_of(data, ["a", "b"])
        assert encode(labels, column, data)["label"][:] == [[1.0, 1.0], [0.0, 0.0]]
        with pytest.raises(RecipeError, match="0 or 1 in each of them; row 1"):
            column.read(Dataset.from_dict({"a": [1, 2], "b": [0, 1]}), "train")

    def test_names_that_the_data_set_declares(self):
        """A class of which training has no example is known all the same."""
        names = ["neg", "neutral", "pos"]
        data = Dataset.from_dict(
            {"label": [0, 2]}, features=Features({"label": ClassLabel(names=names)})
        )
        labels, column = labels_of(data)
        assert labels.names == tuple(names)
        assert encode(labels, column, data)["label"][:] == [0, 2]
        assert describe_balance(labels, [0, 2]) == "3 classes: neg 1 (50.0%), pos 1 (50.0%)"
        lists = Dataset.from_dict(
            {"label": [[0, 1]]}, features=Features({"label": List(ClassLabel(names=names))})
        )
        assert labels_of(lists)[0] == Labels(("label",), MULTI, tuple(names))

    def test_whole_scores_are_a_regression_when_asked_for(self):
        data = Dataset.from_dict({"stars": ["100", "500"]})
        labels, column = labels_of(data, ["stars"], REGRESSION)
        encoded = encode(labels, column, data)
        assert encoded["label"][:] == [100.0, 500.0]
        assert encoded.features["label"] == Value("float32")
        assert "scores from 100 to 500, mean" in describe_balance(labels, encoded["label"])
        with pytest.raises(
            RecipeError, match="must be a finite number, with a decimal point; row 1 has '1,234'"
        ):
            # Perhaps 1234.
            encode(labels, column, Dataset.from_dict({"stars": ["1,5", "1,234"]}), "validation")
        kind, _ = labels_of(Dataset.from_dict({"stars": ["1", "3,5"]}))
        assert kind.problem_type == REGRESSION

    def test_an_unknown_label_names_its_line(self, tmp_path):
        write(
            tmp_path / "train.csv",
            text=["", "two\nlines", "c", "d", "e"],
            label=["a", "a", "", "b", "b"],
        )
        write(tmp_path / "validation.csv", text=["x\ny", "", "z"], label=["d", "", "c"])
        with pytest.raises(
            RecipeError, match=r"validation: a label must be one of the 2 classes.*row 2 has 'd'"
        ):
            load(tmp_path)

    def test_rows_that_are_left_out_are_counted(self, tmp_path, capsys):
        labels = ["" if row in (3, 7, 8) else f"{'ab'[row % 2]} " for row in range(30)]
        task = load(write(tmp_path / "a.csv", text=["  ", *["words"] * 29], label=labels))
        output = capsys.readouterr().out
        assert "train: 3 rows without a label in 'label' left out (row 5, row 9, row 10)" in output
        assert "train: 1 row without text left out (row 2)" in output
        assert task.labels == ("a", "b")
        assert sum(map(len, task.splits.values())) == 26

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            (["x"] * 4, "two classes; the column 'label' has only x"),
            ([""] * 4, "is empty in all its 4 rows"),
            (
                [f"id {row}" for row in range(4)],
                "4 of the 4 rows have a label in 'label' that no other row has",
            ),
        ],
    )
    def test_what_is_no_classification(self, tmp_path, labels, message):
        with pytest.raises(RecipeError, match=message):
            load(write(tmp_path / "a.csv", text=["words"] * 4, label=labels))

    @pytest.mark.parametrize(
        ("labels", "note"),
        [
            (["1", "2"], "numbers as classes; for a score, give --problem_type regression"),
            (["a|b", "b|c"], "several labels in one text? Give --label_separator '|'"),
            (
                ["Billing", "billing"],
                "'billing' are separate classes; if they are one, give --merge",
            ),
            (["my  plan", "My plan"], "note: 'My plan' and 'my  plan' are separate classes"),
        ],
    )
    def test_what_is_noted(self, tmp_path, labels, note, capsys):
        load(
            write(tmp_path / "a.csv", text=[f"text {row}" for row in range(20)], label=labels * 10)
        )
        assert note in capsys.readouterr().out

    def test_texts_that_repeat(self, capsys):
        splits = {
            "train": Dataset.from_dict({"text": ["a", "a", "b", "c"]}),
            "validation": Dataset.from_dict({"text": ["a", "d"]}),
            "test": Dataset.from_dict({"text": ["c", "e"]}),
        }
        report_repeated(splits["train"], ["text"], ["x", "y", "x", "x"])
        output = capsys.readouterr().out
        assert "1 training examples repeat the text of an earlier one" in output
        assert "2 have a text that has several labels (row 0, row 1)" in output
        assert without_training_texts(splits, ["text"])["validation"]["text"] == ["d"]
        assert "1 of the 2 texts of test are training examples as well" in capsys.readouterr().out

    def test_weights_of_classes(self):
        encoded = [0] * 6 + [1] * 3 + [3]
        weights = balanced_weights(Labels(("label",), SINGLE, ("a", "b", "never", "c")), encoded)
        expected = compute_class_weight(
            "balanced", classes=np.array([0, 1, 3]), y=np.array(encoded)
        )
        assert [weights[0], weights[1], weights[3]] == pytest.approx(expected.tolist())
        assert weights[2] == 1
        labels = Labels(("tags",), MULTI, ("a", "b", "never"))
        assert balanced_weights(
            labels, [[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]]
        ) == pytest.approx((1 / 3, 3, 1))


class TestSplit:
    def test_each_label_has_its_share(self):
        labels = ["a"] * 700 + ["b"] * 250 + ["c"] * 49 + ["d"]
        random.Random(0).shuffle(labels)
        splits = with_validation({"train": Dataset.from_dict({"label": labels})}, labels)
        counts = {name: splits["validation"]["label"][:].count(name) for name in "abcd"}
        assert sum(counts.values()) == 100
        assert counts["d"] == 0, "a label that is seen once stays in train"
        assert all(abs(counts[name] - labels.count(name) / 10) <= 1 for name in "abc"), counts

    def test_rare_labels_are_drawn_as_often_as_their_share(self):
        labels = ["common"] * 2000 + [f"rare {number // 3}" for number in range(300)]
        splits = with_validation({"train": Dataset.from_dict({"label": labels})}, labels)
        assert 15 <= sum(label != "common" for label in splits["validation"]["label"]) <= 45
        assert set(splits["train"]["label"]) == set(labels)

    def test_rows_with_one_text_stay_together_and_a_class_of_six_is_scored(self):
        texts = [f"text {number // 3}" for number in range(180)] + [
            f"rare {number}" for number in range(6)
        ]
        labels = ["common"] * 180 + ["rare"] * 6
        data = Dataset.from_dict({"text": texts, "label": labels})
        splits = with_validation({"train": data}, labels, ["text"])
        assert not {*splits["train"]["text"]} & {*splits["validation"]["text"]}
        assert len({*splits["validation"]["text"]}) == 13, "a fifth of the 66 texts"
        assert "rare" in splits["validation"]["label"]
        assert sum(map(len, splits.values())) == len(data)

    def test_the_same_rows_every_time(self):
        data = Dataset.from_dict({"text": [str(number) for number in range(50)]})
        splits = [with_validation({"train": data}) for _ in range(2)]
        assert splits[0]["validation"]["text"][:] == splits[1]["validation"]["text"][:]
        assert sorted([*splits[0]["train"]["text"], *splits[0]["validation"]["text"]]) == sorted(
            data["text"]
        )
        assert with_validation(splits[0]) is splits[0]
        rows = sample(data, 5)["text"][:]
        assert rows == sample(data, 5)["text"][:] != data["text"][:5]
        with pytest.raises(
            RecipeError, match="No validation split can be made of 2 training examples"
        ):
            with_validation({"train": data.select([0, 1])}, ["a", "b"])


class TestTexts:
    def test_texts_that_are_missing_or_numbers(self, tmp_path, capsys):
        """As in a CSV file: without text, a row is left out; a number is a text."""
        rows = [{"text": None, "label": "a"}]
        rows += [{"text": number, "label": "ab"[number % 2]} for number in range(12)]
        path = tmp_path / "a.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        task = load(path)
        assert "train: 1 row without text left out (row 1)" in capsys.readouterr().out
        texts = [text for split in task.splits.values() for text in split["text"]]
        assert sorted(texts) == sorted(map(str, range(12)))

    def test_pairs_without_any_text(self, capsys):
        data = Dataset.from_dict({"a": ["x", " ", "", "\n"], "b": ["", "y", "", "\t"]})
        assert rows_with_text(data, "train", ["a", "b"])["a"][:] == ["x", " "]
        assert "train: 2 rows without text left out (row 2, row 3)" in capsys.readouterr().out
        with pytest.raises(RecipeError, match="all its 2 rows are empty"):
            rows_with_text(data.select([2, 3]), "train", ["a", "b"])

    def test_tokens_are_cut_and_counted(self, encoder, capsys):
        tokenizer = AutoTokenizer.from_pretrained(encoder)
        data = Dataset.from_dict(
            {"a": ["the king is", "the king"], "b": ["the queen was the king", "the"]}
        )
        tokens = tokenize(data, tokenizer, ("a", "b"), 8, "train")
        assert (
            "1 of 2 training texts reach 8 tokens, where texts are truncated;"
            in capsys.readouterr().out
        )
        assert tokens["length"][:] == [8, 6]
        whole = tokenizer(
            "the king is", "the queen was the king", truncation=True, max_length=8
        ).input_ids
        assert tokens[0]["input_ids"] == whole
