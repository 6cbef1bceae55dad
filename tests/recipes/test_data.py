"""Columns, labels, splits and texts: what is detected, what is noted, and what is refused."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from sklearn.utils.class_weight import compute_class_weight
from transformers import AutoTokenizer

from data.balance import balanced_weights, describe_balance
from data.data import rows_with_text, sample, tokenize
from data.labels import MULTI, REGRESSION, SINGLE, Labels
from data.splits import with_validation
from houlsby_peft import AdapterError
from recipe_runs import labels_of, load_texts, write
from run.edge import RecipeError
from tasks.classification import ClassificationArguments


TEXTS = [f"Text number {number} about a parcel, or a bill." for number in range(20)]


def repeat(labels: list) -> list:
    """Labels for all texts, in turn."""
    return [labels[number % len(labels)] for number in range(len(TEXTS))]


def write_labels(folder, labels, **columns):
    """A file of JSON lines, in which labels have their types."""
    lines = []
    for text, label in zip(TEXTS, repeat(labels), strict=True):
        lines.append(json.dumps({"text": text, "label": label, **columns}))
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder / "a.jsonl"


def test_versions_are_different_tasks(tmp_path):
    names = set()
    for version in ("v1.5", "v1.6"):
        (tmp_path / version).mkdir()
        names.add(ClassificationArguments(data=str(tmp_path / version)).name)
    assert names == {"v1.5", "v1.6"}
    mails = write(tmp_path / "mails.csv", text=["a"])
    assert ClassificationArguments(data=str(mails)).name == "mails"
    assert ClassificationArguments(data="user/v1.5", data_config="en").name == "v1.5_en"


class TestColumns:
    @pytest.mark.parametrize(
        ("columns", "texts", "label"),
        [
            ("ID, Title, Body, Class", ("Body",), "Class"),
            ("Premise, HYPOTHESIS, Target", ("Premise", "HYPOTHESIS"), "Target"),
            ("Nummer, Nachricht, Abteilung", ("Nachricht",), "Abteilung"),
            ("Text, Preis", ("Text",), "Preis"),
            ("Bewertung, Text, Themen", ("Text",), "Bewertung"),
            ("text_a, text_b, label", ("text_a", "text_b"), "label"),
            ("text, text_pair, label", ("text", "text_pair"), "label"),
            ("question, answer, label", ("question", "answer"), "label"),
            ("sentence_A, sentence_B, label", ("sentence_A", "sentence_B"), "label"),
            ("Title, Review Text, label", ("Review Text",), "label"),
            ("Subject, id, label", ("Subject",), "label"),
            # Without usual names, the longest text and the only column with few values.
            ("key, wen, lei", ("wen",), "lei"),
        ],
    )
    def test_what_they_are_called(self, columns, texts, label, tmp_path):
        values = {}
        for name in columns.split(", "):
            values[name] = range(20) if name.lower() in ("id", "nummer", "key") else TEXTS
        values[label] = ["x", "y"] * 10
        values["Title"] = [f"A title of {number}" for number in range(20)]
        table = {name: values[name] for name in columns.split(", ")}
        task = load_texts(write(tmp_path / "a.csv", **table))
        assert task.text_columns == texts
        assert task.kind.columns == (label,)

    def test_names_beside_numbers(self, tmp_path):
        columns = {"label": [0, 1] * 10, "label_text": ["no", "yes"] * 10}
        task = load_texts(write(tmp_path / "a.jsonl", text=TEXTS, **columns))
        assert task.kind.names == ("no", "yes")

    @pytest.mark.parametrize(
        ("columns", "options", "word"),
        [
            ({"wen": ["short"] * 20, "lei": ["x", "y"] * 10}, {}, "wen, lei"),
            ({"wen": TEXTS, "one": ["x", "y", None, ""] * 5, "two": [*"pq"] * 10}, {},
             r"one \(2 values\) or two"),
            ({"text": TEXTS, "label": ["x", "y"] * 10}, {"label_columns": ["text"]}, "both"),
            ({"text": TEXTS, "label": ["x", "y"] * 10}, {"text_columns": ["text", "label"]},
             "--label_columns"),
            ({"text": TEXTS, "entities": [[[0, 4, "X"]]] * 20}, {}, "token_classification"),
            ({"question": TEXTS, "context": TEXTS, "answers": [[]] * 20}, {}, "--recipe squad"),
        ],
    )  # fmt: skip
    def test_what_is_asked_for(self, columns, options, word, tmp_path):
        path = write(tmp_path / "a.jsonl", **columns)
        with pytest.raises((AdapterError, RecipeError), match=word):
            load_texts(path, **options)

    def test_a_split_that_lacks_a_column(self, tmp_path):
        write(tmp_path / "train.csv", text=["a", "b"] * 3, label=["x", "y"] * 3)
        write(tmp_path / "validation.csv", text=["c"])
        with pytest.raises(RecipeError, match="lacks the columns label"):
            load_texts(tmp_path)


class TestLabels:
    @pytest.mark.parametrize(
        ("labels", "problem_type", "names"),
        [
            ([10, 9, 2], SINGLE, ("2", "9", "10")),
            ([1.0, 0.0], SINGLE, ("0", "1")),
            (["7", "007"], SINGLE, ("007", "7")),
            (["1.10", "1.1"], SINGLE, ("1.1", "1.10")),
            (["1", "1.0", "2", "2"], SINGLE, ("1", "1.0", "2")),
            (["1", "2", "n/a", "2"], SINGLE, ("1", "2")),
            (["0.5", "1"], REGRESSION, ("label",)),
            (["1.10", "1.2"], REGRESSION, ("label",)),
            (["1", "3,5"], REGRESSION, ("label",)),
            (["3.5", "4", "n/a", "2.5", "5"], REGRESSION, ("label",)),
            ([[3], [1, 3], []], MULTI, ("1", "3")),
            (["['billing', 'angry']", "['billing']"], MULTI, ("angry", "billing")),
            (['["a"]', '["b", "a"]'], MULTI, ("a", "b")),
            (["['a b' 'c']", "['c']"], MULTI, ("a b", "c")),
            (["[0 3]", "[1]"], MULTI, ("0", "1", "3")),
            (["[1. 0.]", "[1. 1.]"], MULTI, ("class_0", "class_1")),
            (['{"choices": ["a", "b"]}', "b", "a"], MULTI, ("a", "b")),
            (["billing, angry", "billing", "angry"], MULTI, ("angry", "billing")),
            (["a;b", "b", "a"], MULTI, ("a", "b")),
            (["a|b", "b", "a|c", "c", "a"], MULTI, ("a", "b", "c")),
            (["Health, Beauty", "Toys"], SINGLE, ("Health, Beauty", "Toys")),
            # A part is a class by itself, but too few are to split the others.
            (["a, b", "a", "other"], SINGLE, ("a", "a, b", "other")),
            (["[1, 1, 0]", "[0, 0, 1]"], MULTI, ("class_0", "class_1", "class_2")),
        ],
    )  # fmt: skip
    def test_kinds(self, labels, problem_type, names, tmp_path):
        kind = load_texts(write_labels(tmp_path, labels)).kind
        assert kind == Labels(("label",), problem_type, names)

    def test_which_classes_a_list_of_0_and_1_has(self, tmp_path):
        path = write_labels(tmp_path, [[1, 0], [1, 1], [0, 0]])
        task = load_texts(path, class_names=["x", "y"])
        assert sorted({*labels_of(task)}) == ["", "x", "x; y"]
        in_order = dict(zip(TEXTS, repeat(["x", "x; y", ""]), strict=True))
        assert labels_of(task) == [in_order[text] for text in sorted(TEXTS)]

    def test_a_column_for_each_class(self, tmp_path):
        """Rows that were not judged have no label."""
        texts = [f"{'abcd'[number % 4]} {text}" for number, text in enumerate(TEXTS)]
        columns = {"toxic": repeat([1, 0, -1, 0]), "spam": repeat(["0", "1", "0", ""])}
        path = write(tmp_path / "a.csv", text=texts, **columns)
        task = load_texts(path, label_columns=["toxic", "spam"])
        assert labels_of(task) == ["toxic"] * 5 + ["spam"] * 5
        truth_values = {"toxic": repeat([True, False]), "spam": repeat(["FALSE", "TRUE"])}
        path = write(tmp_path / "b.csv", text=TEXTS, **truth_values)
        kind = load_texts(path, label_columns=["toxic", "spam"]).kind
        assert kind == Labels(("toxic", "spam"), MULTI, ("toxic", "spam"))

    def test_spellings_are_merged_on_request(self, tmp_path):
        path = write_labels(tmp_path, ["billing", "Billing ", "billing", "other"])
        assert load_texts(path).kind.names == ("Billing", "billing", "other")
        assert load_texts(path, merge_labels=True).kind.names == ("billing", "other")

    def test_files_with_other_forms_of_a_number(self, tmp_path):
        """A row with a class that no training example has is left out."""
        write(tmp_path / "train.csv", text=TEXTS, label=["1", "2"] * 10)
        write(tmp_path / "validation.csv", text=["a", "b", "c"], label=["1.0", "2.0", "3.0"])
        assert load_texts(tmp_path).splits["validation"]["label"] == [0, 1]

    def test_names_that_the_data_set_declares(self, tmp_path):
        """A class of which training has no example is known all the same."""
        names = ["neg", "neutral", "pos"]
        features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
        rows = {"text": TEXTS, "label": [0, 2] * 10}
        Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
        task = load_texts(tmp_path / "a.parquet")
        assert task.kind.names == tuple(names)
        assert {*task.splits["train"]["label"]} == {0, 2}
        balance = describe_balance(task.kind, [0, 2])
        assert balance == "3 classes: neg 1 (50.0%), pos 1 (50.0%)"
        features["label"] = List(ClassLabel(names=names))
        lists = {"text": TEXTS, "label": [[0, 1]] * 20}
        Dataset.from_dict(lists, features=features).to_parquet(tmp_path / "b.parquet")
        assert load_texts(tmp_path / "b.parquet").kind == Labels(("label",), MULTI, tuple(names))

    def test_whole_scores_are_a_regression_when_asked_for(self, tmp_path):
        path = write_labels(tmp_path, ["100", "500"])
        rows = load_texts(path, problem_type=REGRESSION).splits["train"]
        assert {*rows["label"]} == {100.0, 500.0}

    def test_rows_that_are_left_out_are_counted(self, tmp_path, capsys):
        labels = [*"ab" * 10]
        labels[3] = labels[7] = ""
        path = write(tmp_path / "a.csv", text=["  ", *TEXTS[1:]], label=labels)
        task = load_texts(path)
        log = capsys.readouterr().out
        assert "2 rows without a label in 'label' left out (row 5, row 9)" in log
        assert "1 row without text left out (row 2)" in log
        assert sum(map(len, task.splits.values())) == 17

    @pytest.mark.parametrize(
        ("labels", "word"),
        [
            (["x"], "only x"),
            ([""], "empty"),
            ([f"id {row}" for row in range(20)], "no other row"),
            ([[0.9, 0.1]], "probabilities"),
            ([["pos", "pos", "neg"]], "votes"),
            (["85%"], "percentages"),
            ([{"name": "x"}], "objects"),
            ([{"x": 0.9, "y": 0.1}], "a score for each class"),
        ],
    )
    def test_what_is_refused(self, labels, word, tmp_path):
        """What would be trained on as if it were something else."""
        with pytest.raises(RecipeError, match=word):
            load_texts(write_labels(tmp_path, labels))

    @pytest.mark.parametrize(
        ("known", "label", "options"),
        [
            (["a", "b"], "d", {}),
            (["1", "2"], "1,234", {"problem_type": REGRESSION}),  # perhaps 1234
        ],
    )
    def test_a_label_that_cannot_be_read_names_its_row(self, known, label, options, tmp_path):
        write(tmp_path / "train.csv", text=TEXTS, label=repeat(known))
        write(tmp_path / "validation.csv", text=["two\nlines", "words"], label=["", label])
        with pytest.raises(RecipeError, match=f"row 3 has '{label}'"):
            load_texts(tmp_path, **options)

    def test_scores_that_are_no_numbers_are_left_out_of_validation_too(self, tmp_path, capsys):
        write(tmp_path / "train.csv", text=TEXTS, label=repeat(["1.5", "2"]))
        write(tmp_path / "validation.csv", text=["a", "b", "c"], label=["1", "1.234,5", "2.5"])
        task = load_texts(tmp_path)
        assert task.splits["validation"]["label"][:] == [1.0, 2.5]
        assert "validation: 1 row with a label that is no number" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("labels", "word"),
        [
            (["1", "2"], "--problem_type regression"),
            (["a|b", "b|c"], "--label_separator '|'"),
            (["billing, angry", "billing", "other"], "--label_separator ','"),
            (["Billing", "billing"], "--merge_labels"),
            (["my  plan", "My plan"], "--merge_labels"),
            ([[1, 1, 0], [0, 0, 1]], "--class_names"),
            ([*"xy" * 9, "z", "z"], "no validation example has the class z"),
        ],
    )
    def test_what_is_noted(self, labels, word, tmp_path, capsys):
        load_texts(write_labels(tmp_path, labels))
        assert word in capsys.readouterr().out

    def test_weights_of_classes(self):
        encoded = [0] * 6 + [1] * 3 + [3]
        weights = balanced_weights(Labels(("label",), SINGLE, ("a", "b", "never", "c")), encoded)
        classes = np.array([0, 1, 3])
        expected = compute_class_weight("balanced", classes=classes, y=np.array(encoded))
        assert [weights[0], weights[1], weights[3]] == pytest.approx(expected.tolist())
        assert weights[2] == 1
        rows = [[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]]
        weights = balanced_weights(Labels(("tags",), MULTI, ("a", "b", "never")), rows)
        assert weights == pytest.approx((1 / 3, 3, 1))


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
        texts = [f"text {number // 3}" for number in range(180)]
        texts += [f"rare {number}" for number in range(6)]
        labels = ["common"] * 180 + ["rare"] * 6
        rows = Dataset.from_dict({"text": texts, "label": labels})
        splits = with_validation({"train": rows}, labels, ["text"])
        assert not {*splits["train"]["text"]} & {*splits["validation"]["text"]}
        assert len({*splits["validation"]["text"]}) == 13, "a fifth of the 66 texts"
        assert "rare" in splits["validation"]["label"]
        assert sum(map(len, splits.values())) == len(rows)

    def test_the_same_rows_every_time(self):
        rows = Dataset.from_dict({"text": [str(number) for number in range(50)]})
        splits, again = with_validation({"train": rows}), with_validation({"train": rows})
        assert splits["validation"]["text"][:] == again["validation"]["text"][:]
        assert with_validation(splits) is splits
        drawn = sample(rows, 5)["text"][:]
        assert drawn == sample(rows, 5)["text"][:] != rows["text"][:5]

    def test_too_few_rows(self):
        rows = Dataset.from_dict({"text": ["a", "b"]})
        with pytest.raises(RecipeError, match="2 training examples"):
            with_validation({"train": rows}, ["a", "b"])

    def test_texts_that_repeat(self, tmp_path, capsys):
        """Validation examples that are training examples are left out, and those of test named."""
        write(tmp_path / "train.csv", text=[*"aabcdef"], label=[*"xyxyxyx"])
        write(tmp_path / "validation.csv", text=[*"agh"], label=[*"xyx"])
        write(tmp_path / "test.csv", text=["c", "i"], label=["x", "y"])
        assert load_texts(tmp_path).splits["validation"]["text"][:] == ["g", "h"]
        log = capsys.readouterr().out
        assert "several labels (row 2, row 3)" in log
        assert "1 of the 2 texts of test are training examples" in log
        whole = load_texts(tmp_path, keep_repeated=True).splits["validation"]
        assert whole["text"][:] == ["a", "g", "h"]


class TestTexts:
    def test_texts_that_are_missing_or_numbers(self, tmp_path):
        """As in a CSV file: without text, a row is left out; a number is a text."""
        rows = [{"text": None, "label": "a"}]
        rows += [{"text": number, "label": "ab"[number % 2]} for number in range(12)]
        (tmp_path / "a.json").write_text(json.dumps(rows))
        task = load_texts(tmp_path / "a.json")
        texts = [text for split in task.splits.values() for text in split["text"]]
        assert sorted(texts) == sorted(map(str, range(12)))

    def test_pairs_without_any_text(self):
        rows = Dataset.from_dict({"a": ["x", " ", "", "\n"], "b": ["", "y", "", "\t"]})
        assert rows_with_text(rows, "train", ["a", "b"])["a"][:] == ["x", " "]
        with pytest.raises(RecipeError, match="2 rows are empty"):
            rows_with_text(rows.select([2, 3]), "train", ["a", "b"])

    def test_tokens_are_cut_and_counted(self, encoder, capsys):
        tokenizer = AutoTokenizer.from_pretrained(encoder)
        pairs = {"a": ["the king is", "the king"], "b": ["the queen was the king", "the"]}
        tokens = tokenize(Dataset.from_dict(pairs), tokenizer, ("a", "b"), 8, "train")
        assert "1 of 2 training texts reach 8 tokens" in capsys.readouterr().out
        assert tokens["length"][:] == [8, 6]
        cut = tokenizer("the king is", "the queen was the king", truncation=True, max_length=8)
        assert tokens[0]["input_ids"] == cut.input_ids
