"""Tagging: alignment of words and word pieces, entity scores, CoNLL files, and short runs."""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from peft import PeftConfig, PeftModel
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    CanineTokenizer,
    EvalPrediction,
)

import token_classification
from data.words import read_words
from recipe_runs import results_of, run, save_tiny_encoder
from run.edge import RecipeError
from tasks.tagging import (
    IGNORED,
    TaggingTask,
    entity_scores,
    number_tags,
    tokenize_words,
)


NAMES = ["Ada", "Grace", "Alan", "Mary Ann", "Kurt"]
PLACES = ["Paris", "New York", "Oslo"]


def sentences(size, seed=0):
    """Sentences of people who visit places: lists of words and of tags."""
    rng = random.Random(seed)
    for _ in range(size):
        words, tags = [], []
        name, place = rng.choice(NAMES), rng.choice(PLACES)
        for chunk, kind in ((name, "PER"), ("visits", ""), (place, "LOC"), (".", "")):
            for number, word in enumerate(chunk.split()):
                words.append(word)
                tags.append("O" if not kind else f"{'I' if number else 'B'}-{kind}")
        yield words, tags


def write_conll(path, size, seed=0):
    blocks = ["-DOCSTART- -X- O"]
    for words, tags in sentences(size, seed):
        blocks.append("\n".join(f"{word} _ {tag}" for word, tag in zip(words, tags, strict=True)))
    path.write_text("\n\n".join(blocks) + "\n\n")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Its vocabulary has no "visits", which takes two word pieces."""
    words = {word.lower() for name in NAMES + PLACES for word in name.split()}
    return save_tiny_encoder(
        tmp_path_factory.mktemp("encoder"), words=["visit", "##s", *sorted(words)]
    )


@pytest.fixture(scope="module")
def tokenizer(encoder):
    return AutoTokenizer.from_pretrained(encoder)


@pytest.fixture
def data(tmp_path):
    for number, split in enumerate(("train", "validation", "test")):
        write_conll(tmp_path / f"{split}.conll", 48, number)
    return tmp_path


def train(encoder, data, output, **flags):
    folders = {"data": data, "model_name": encoder, "output_dir": output}
    run(token_classification, **folders, **{"max_steps": 2, **flags})
    return results_of(output)


def evaluate(data, trained, output):
    run(token_classification, data=data, evaluate=trained, output_dir=output)
    return json.loads((output / "evaluation.json").read_text())


class TestRuns:
    def test_the_words_whose_tags_are_doubtful_are_listed(self, encoder, data, tmp_path):
        """After training as by the check alone."""
        train(encoder, data, tmp_path / "run")
        train(encoder, data, tmp_path / "again", check_labels="first")
        issues = pd.read_csv(tmp_path / "run" / "label_issues_list.csv")
        columns = ["row", "text", "position", "word", "label", "suggestion", "probability"]
        assert list(issues) == columns
        assert len(issues)
        assert issues["probability"].is_monotonic_decreasing
        assert issues.equals(pd.read_csv(tmp_path / "again" / "label_issues_list.csv"))
        with pytest.raises(RecipeError, match="Correct them in the data"):
            train(encoder, tmp_path / "run" / "label_issues_list.csv", tmp_path / "again")

    def test_entities(self, encoder, data, tmp_path, capsys):
        results = train(encoder, data, tmp_path / "run", learning_rate=1e-2)
        counts = Counter(tag for _, tags in sentences(48) for tag in tags)
        counted = ", ".join(f"{tag} {counts[tag]}" for tag in results["labels"])
        assert f"48 training sentences; 5 tags: {counted}" in "".join(capsys.readouterr())
        assert results["labels"] == ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
        assert results["chosen_by"] == "f1"
        adapter = tmp_path / "run" / "adapter"
        assert PeftConfig.from_pretrained(adapter).saved.record.max_length == 128
        model = AutoModelForTokenClassification.from_pretrained(encoder, num_labels=5)
        model = PeftModel.from_pretrained(model, adapter).eval()
        tokenizer = AutoTokenizer.from_pretrained(encoder)
        right = []
        for words, tags in sentences(48, seed=2):
            tokens = tokenizer(words, is_split_into_words=True, return_tensors="pt")
            with torch.no_grad():
                predicted = model(**tokens).logits[0].argmax(-1)
            for position, tag in enumerate(tags):
                token = tokens.word_ids().index(position)
                right.append(results["labels"][predicted[token]] == tag)
        assert results["test"]["accuracy"] == pytest.approx(np.mean(right))
        for files, name in ((data, "best_scores"), (data / "test.conll", "test")):
            scores = evaluate(files, tmp_path / "run", tmp_path / "again")["scores"]
            assert scores == pytest.approx({**scores, **results[name]}, rel=1e-4)

    @pytest.mark.parametrize("name", ["train.jsonl", "."])
    def test_parts_of_speech_from_lists_and_a_split_of_its_own(self, encoder, tmp_path, name):
        rows = []
        for words, tags in sentences(40):
            rows.append({"words": words, "upos": ["X" if tag == "O" else "NOUN" for tag in tags]})
        pd.DataFrame(rows).to_json(tmp_path / "train.jsonl", orient="records", lines=True)
        results = train(encoder, tmp_path / name, tmp_path / "run")
        assert results["labels"] == ["NOUN", "X"]
        assert results["chosen_by"] == "accuracy"
        assert "f1" not in results["epochs"][0]
        # Its own data are scored on the eight sentences that it was not trained on.
        evaluation = evaluate(tmp_path / name, tmp_path / "run", tmp_path / "again")
        assert evaluation["scores"] == pytest.approx(results["best_scores"], rel=1e-4)
        assert evaluation["dataset"]["rows"] == {"validation": 8}

    def test_a_tag_that_training_lacks(self, encoder, data, tmp_path):
        (data / "validation.conll").write_text("Ada O\n\nOslo B-GPE\n")
        with pytest.raises(RecipeError, match="line 3 has the tag 'B-GPE'"):
            train(encoder, data, tmp_path / "run")


class TestData:
    def test_declared_tags(self):
        features = Features(
            {"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=["O", "B-X"]))}
        )
        data = Dataset.from_dict({"tokens": [["a", "b"]], "ner_tags": [[1, 0]]}, features=features)
        splits, tags = read_words({"train": data})
        assert tags == ("O", "B-X")
        assert list(number_tags(splits["train"], "train", tags)) == [
            {"words": ["a", "b"], "tags": [1, 0]}
        ]

    @pytest.mark.parametrize(
        "row",
        [
            {"tokens": [["a"]], "tags": [["O", "O"]]},
            {"tokens": ["a b"], "tags": ["O"]},
            {"tokens": [["a"]], "tags": ["O O"]},
            {"tokens": [[None]], "tags": [["O"]]},
        ],
    )
    def test_words_without_tags(self, row):
        splits = {"train": Dataset.from_dict(row)}
        with pytest.raises(RecipeError, match=r"^train: .*row 0"):
            read_words(splits)
        with pytest.raises(RecipeError, match=r"^data: .*row 0"):  # as an evaluation calls it
            read_words(splits, title_of=lambda _: "data")


class TestAlignment:
    def test_a_words_tag_is_on_its_first_piece(self, tokenizer):
        row = tokenize_words([(["Ada", "visits", "Oslo"], [3, 1, 2])], tokenizer, 16)[0]
        tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
        assert " ".join(tokens) == "[CLS] ada visit ##s oslo [SEP]"
        assert row["labels"] == [IGNORED, 3, 1, IGNORED, 2, IGNORED]

    @pytest.mark.parametrize("max_length", [3, 4, 5, 7])
    def test_every_word_of_a_long_sentence_is_tagged_once(self, tokenizer, max_length):
        """Also where a window ends within a word."""
        words, tags = ["Ada", "visits", "Oslo", "visits", "visits"] * 4, list(range(20))
        rows = tokenize_words([(words, tags)], tokenizer, max_length)
        assert [tag for row in rows["labels"] for tag in row if tag != IGNORED] == tags
        assert all(len(row) <= max_length for row in rows["labels"])

    def test_a_tokenizer_that_does_not_tell_where_tokens_are(self):
        with pytest.raises(RecipeError, match="CanineTokenizer"):
            tokenize_words([(["Ada"], [0])], CanineTokenizer(), 16)

    def test_blank_words_and_empty_sentences(self, tokenizer):
        rows = tokenize_words([([], []), (["Ada", " ", "Oslo"], [0, 1, 2])], tokenizer, 16)
        assert [tag for tag in rows[0]["labels"] if tag != IGNORED] == [0, 2]
        with pytest.raises(RecipeError, match="are empty"):
            tokenize_words([([], [])], tokenizer, 16)


class TestScores:
    def test_scores_by_hand(self):
        expected = [["B-X", "I-X", "O"], ["B-Y", "O", "B-X"]]
        predicted = [["B-X", "O", "O"], ["B-Y", "O", "B-X"]]
        scores = {"f1": 4 / 6, "precision": 2 / 3, "recall": 2 / 3}
        assert entity_scores(expected, predicted) == pytest.approx(scores)
        assert entity_scores([["O"]], [["O"]]) == {"f1": 0, "precision": 0, "recall": 0}

    def test_no_entity_is_expected_or_predicted(self):
        """As in a split whose tags are withheld."""
        task = TaggingTask(name="t", labels=("B-X", "O"))
        classes = task.describe(np.array([[[0.0, 1.0]] * 3]), np.array([[1, 1, IGNORED]]))
        assert (classes.by_class(), classes.confusion()) == ({}, None)

    def test_scores_leave_out_what_is_no_word(self):
        outputs = np.full((1, 4, 2), -1.0)
        outputs[0, [1, 2], [0, 1]] = 1
        outputs[0, 3] = np.nan
        task = TaggingTask(name="t", labels=("B-X", "O"))
        scores = task.score(EvalPrediction(outputs, np.array([[IGNORED, 0, 0, IGNORED]])))
        expected = {"accuracy": 1 / 2, "f1": 2 / 3, "precision": 1, "recall": 1 / 2}
        assert scores == pytest.approx(expected)
