"""Tags of words: from a data set to word pieces, and from a model's outputs to scores."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedTokenizerBase,
)

from common.data import check_columns, locate
from common.edge import RecipeError
from common.labels import read_labels
from common.scores import ClassScores, check_finite
from common.task import Task
from houlsby_peft.serving.tagging import find_entities, mark_entities


WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("tags", "ner_tags", "pos_tags", "upos", "labels")
NO_ENTITY = "no entity"
IGNORED = -100  # transformers' label for tokens that are neither trained nor scored


@dataclass(kw_only=True)
class TaggingTask(Task):
    """Tagging of words. Its splits have the `words` of each sentence and the numbers of their
    `tags`.
    """

    auto_class = AutoModelForTokenClassification
    task_type = "TOKEN_CLS"
    collator = DataCollatorForTokenClassification

    @property
    def are_entities(self) -> bool:
        """Whether the tags mark entities, such as B-PER, I-PER and O; otherwise each word's tag
        stands alone.
        """
        return mark_entities(self.labels)

    @property
    def scores(self) -> tuple[str, ...]:
        return (
            ("f1", "precision", "recall", "accuracy", "loss")
            if self.are_entities
            else ("accuracy", "loss")
        )

    @property
    def head(self) -> dict[str, Any]:
        return {"id2label": dict(enumerate(self.labels))}

    def example_of(self, row: Mapping[str, Any]) -> str:
        return " ".join(row["words"])

    def encode(
        self, split: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> Dataset:
        return tokenize_words(
            zip(split["words"], split["tags"], strict=True), tokenizer, max_length
        )

    def score(self, evaluation: EvalPrediction) -> dict[str, float]:
        """Return the accuracy of the tags and, for entities, precision, recall and F1.

        The outputs are (rows, tokens, tags), the labels (rows, tokens), with IGNORED where no word
        begins.
        """
        outputs, labels = evaluation.predictions, evaluation.label_ids
        check_finite(outputs[labels != IGNORED])
        expected, predicted = self._of_sentences(outputs, labels)
        right = sum(
            a == b
            for pair in zip(expected, predicted, strict=True)
            for a, b in zip(*pair, strict=True)
        )
        scores = {"accuracy": right / max(1, sum(map(len, expected)))}
        return {**scores, **entity_scores(expected, predicted)} if self.are_entities else scores

    def describe(self, outputs: NDArray[np.float32], labels: NDArray[np.int64]) -> ClassScores:
        """Return what a model has predicted: the kinds of entities or, if the tags mark none, the
            tags of words.

        An entity that is only expected, or only predicted, is counted beside one of no kind.
        """
        if not self.are_entities:
            chosen = labels != IGNORED
            return ClassScores(
                labels[chosen], outputs.argmax(-1)[chosen], self.labels, len(self.labels)
            )
        spans: list[dict[tuple[int, int, int], str]] = [
            {
                (row, begin, end): kind
                for row, tags in enumerate(sentences)
                for kind, begin, end in find_entities(tags)
            }
            for sentences in self._of_sentences(outputs, labels)
        ]
        kinds = sorted({name[2:] for name in self.labels if name != "O"})
        numbers = {kind: number for number, kind in enumerate([*kinds, NO_ENTITY])}
        found = sorted(spans[0].keys() | spans[1].keys())
        expected, predicted = (
            np.array([numbers[of.get(span, NO_ENTITY)] for span in found], int) for of in spans
        )
        return ClassScores(expected, predicted, (*kinds, NO_ENTITY), len(kinds))

    def _of_sentences(
        self, outputs: NDArray[np.float32], labels: NDArray[np.int64]
    ) -> tuple[list[list[str]], list[list[str]]]:
        """Return the expected and the predicted tags of the words of each sentence."""
        rows = list(zip(outputs.argmax(-1), labels, strict=True))
        expected = [[self.labels[tag] for tag in of_row[of_row != IGNORED]] for _, of_row in rows]
        predicted = [
            [self.labels[tag] for tag in found[of_row != IGNORED]] for found, of_row in rows
        ]
        return expected, predicted


def read_tags(data: Dataset, name: str, columns: tuple[str, str], tags: Sequence[str]) -> Dataset:
    """Return the `words` of each sentence of the split `name`, and the numbers of their `tags`."""
    check_columns(data, name, (), columns)
    number = {tag: index for index, tag in enumerate(tags)}
    found, texts = [], read_labels(data, [columns[1]], name)
    for row, (words, of_row) in enumerate(zip(data[columns[0]], texts, strict=True)):
        are_lists = (
            isinstance(words, list) and isinstance(of_row, tuple) and len(words) == len(of_row)
        )
        if not are_lists or not all(isinstance(word, str) for word in words):
            raise RecipeError(
                f"{name}: each row must have a list of words and one of as many tags; {locate(data, row)} has "
                f"{str(words)[:100]} and {str(of_row)[:100]}. Correct it, or leave the row out."
            )
        if unknown := [tag for tag in of_row if tag not in number]:
            raise RecipeError(
                f"{name}: {locate(data, row)} has the tag {unknown[0]!r}, which no training example has: they have "
                f"{', '.join(tags)}. Correct it, or leave the row out."
            )
        found.append([number[tag] for tag in of_row])
    return Dataset.from_dict({"words": data[columns[0]], "tags": found})


def tokenize_words(
    sentences: Iterable[tuple[list[str], list[int]]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> Dataset:
    """Return word pieces, with each word's tag on its first piece, and their number as `length`.

    The words are joined by blanks, so that byte-level tokenizers give the tokens with which a text
    is predicted. A sentence longer than max_length becomes several rows, so that no word is lost.
    Words without a piece, such as a blank, and sentences without words are left out.
    """
    max_length = min(max_length, tokenizer.model_max_length)
    rows = []
    for words, tags in sentences:
        if not words:
            continue
        text = " ".join(words)
        tokens = tokenizer(
            text,
            truncation=True,
            max_length=max_length,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        ends = [*accumulate(len(word) + 1 for word in words)]  # each with the blank after the word
        previous = None
        for row in range(len(tokens["input_ids"])):
            labels = []
            for begin, end in tokens["offset_mapping"][row]:
                # The last character, as a piece may begin with the blank before its word.
                word = bisect_right(ends, end - 1) if text[begin:end].strip() else None
                labels.append(IGNORED if word is None or word == previous else tags[word])
                previous = previous if word is None else word
            inputs = {
                name: tokens[name][row] for name in tokenizer.model_input_names if name in tokens
            }
            rows.append({**inputs, "labels": labels, "length": len(labels)})
    if not rows:
        raise RecipeError(
            "There must be a sentence with words; all sentences of a split are empty."
        )
    return Dataset.from_list(rows)


def entity_scores(
    expected: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return F1, precision and recall over all entities, which match in kind and both ends; 0
    instead of 0/0.
    """
    pairs = [
        (set(find_entities(a)), set(find_entities(b)))
        for a, b in zip(expected, predicted, strict=True)
    ]
    right = sum(len(a & b) for a, b in pairs)
    wanted, given = sum(len(a) for a, _ in pairs), sum(len(b) for _, b in pairs)
    return {
        "f1": 2 * right / max(1, wanted + given),
        "precision": right / max(1, given),
        "recall": right / max(1, wanted),
    }
