"""Tags of words: from a data set to word pieces, and from a model's outputs to scores."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from houlsby_peft.serving.tagging import find_entities, mark_entities
from tasks.labels import MULTI, find_labels, label_texts
from training.data import CHARACTERS_PER_TOKEN, find_column, token_limit
from training.errors import RecipeError
from training.scores import ClassScores
from training.tables import columns_of, locate
from training.trainer import check_finite


WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("tags", "ner_tags", "pos_tags", "upos", "labels")
NO_ENTITY = "no entity"
IGNORED = -100  # transformers' label for tokens that are neither trained nor scored


@dataclass(frozen=True)
class Tags:
    """The columns of words and tags, and the names of the tags by number."""

    word_column: str
    tag_column: str
    names: tuple[str, ...]

    @property
    def are_entities(self) -> bool:
        """Whether the tags mark entities, such as B-PER, I-PER and O; otherwise each word's tag stands alone."""
        return mark_entities(self.names)

    @property
    def scores(self) -> tuple[str, ...]:
        """The scores of an evaluation; the first chooses the best epoch."""
        return ("f1", "precision", "recall", "accuracy", "loss") if self.are_entities else ("accuracy", "loss")

    def read(self, data: Dataset, name: str) -> Dataset:
        """Return the `words` of each sentence and the numbers of their `tags`.

        Raises:
            RecipeError: If a row has no lists of equal length, a word is not a text, or a tag is not among the names.
        """
        missing = [column for column in (self.word_column, self.tag_column) if column not in data.column_names]
        if missing:
            raise RecipeError(f"{name} lacks the column {missing[0]!r}; it has {', '.join(columns_of(data))}.")
        number = {tag: index for index, tag in enumerate(self.names)}
        numbers = []
        for row, (words, tags) in enumerate(
            zip(data[self.word_column], label_texts(data, [self.tag_column], name), strict=True)
        ):
            if not isinstance(words, list) or not isinstance(tags, tuple) or len(words) != len(tags):
                found = " and ".join(
                    f"{len(x)} of them" if isinstance(x, (list, tuple)) else repr(x) for x in (words, tags)
                )
                raise RecipeError(
                    f"{name}: {locate(data, row)} must have a list of words and one of as many tags, got "
                    f"{found}. Correct it, or leave the row out."
                )
            other = next((word for word in words if not isinstance(word, str)), None)
            if other is not None or None in words:
                raise RecipeError(
                    f"{name}: {locate(data, row)} must have texts as words, got {other!r}. Write it as a text, "
                    "or leave the row out."
                )
            unknown = [tag for tag in tags if tag not in number]
            if unknown:
                raise RecipeError(
                    f"{name}: {locate(data, row)} has the tag {unknown[0]!r}, which no training "
                    f"example has: they have {', '.join(self.names)}. Correct it, or leave the row out."
                )
            numbers.append([number[tag] for tag in tags])
        return Dataset.from_dict({"words": data[self.word_column], "tags": numbers})

    def score(self, outputs: NDArray[np.float32], labels: NDArray[np.int64]) -> dict[str, float]:
        """Return the accuracy of the tags and, for entities, precision, recall and F1.

        Args:
            outputs: (rows, tokens, tags).
            labels: (rows, tokens), with IGNORED where no word begins.
        """
        check_finite(outputs[labels != IGNORED])
        expected, predicted = self._of_sentences(outputs, labels)
        right = sum(a == b for pair in zip(expected, predicted, strict=True) for a, b in zip(*pair, strict=True))
        scores = {"accuracy": right / max(1, sum(map(len, expected)))}
        return {**scores, **entity_scores(expected, predicted)} if self.are_entities else scores

    def score_classes(self, outputs: NDArray[np.float32], labels: NDArray[np.int64]) -> ClassScores:
        """Return what a model has predicted: the kinds of entities or, if the tags mark none, the tags of words.

        An entity that is only expected, or only predicted, is counted beside one of no kind.

        Args:
            outputs, labels: As for `score`.
        """
        if not self.are_entities:
            chosen = labels != IGNORED
            return ClassScores(labels[chosen], outputs.argmax(-1)[chosen], self.names, len(self.names))
        spans: list[dict[tuple[int, int, int], str]] = [
            {(row, begin, end): kind for row, tags in enumerate(sentences) for kind, begin, end in find_entities(tags)}
            for sentences in self._of_sentences(outputs, labels)
        ]
        kinds = sorted({name[2:] for name in self.names if name != "O"})
        numbers = {kind: number for number, kind in enumerate([*kinds, NO_ENTITY])}
        found = sorted(spans[0].keys() | spans[1].keys())
        expected, predicted = (np.array([numbers[of.get(span, NO_ENTITY)] for span in found], int) for of in spans)
        return ClassScores(expected, predicted, (*kinds, NO_ENTITY), len(kinds))

    def _of_sentences(
        self, outputs: NDArray[np.float32], labels: NDArray[np.int64]
    ) -> tuple[list[list[str]], list[list[str]]]:
        """Return the expected and the predicted tags of the words of each sentence."""
        rows = list(zip(outputs.argmax(-1), labels, strict=True))
        expected = [[self.names[tag] for tag in of_row[of_row != IGNORED]] for _, of_row in rows]
        predicted = [[self.names[tag] for tag in found[of_row != IGNORED]] for found, of_row in rows]
        return expected, predicted


def find_tags(train: Dataset, word_column: str | None, tag_column: str | None) -> Tags:
    """Find the columns, as named or by their usual names, and the tags that the data set declares or contains."""
    words, tags = find_columns(train, word_column, tag_column)
    return Tags(words, tags, find_labels(train, [tags], MULTI).names)


def find_columns(train: Dataset, word_column: str | None, tag_column: str | None) -> tuple[str, str]:
    """Return the columns of words and tags, as named or by their usual names."""
    words = find_column(train, word_column, WORD_COLUMNS, "--word_column")
    return words, find_column(train, tag_column, TAG_COLUMNS, "--tag_column")


def tokenize_words(
    sentences: Iterable[tuple[list[str], list[int]]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Dataset:
    """Return word pieces, with each word's tag on its first piece, and their number as `length`.

    The words are joined by blanks, so that byte-level tokenizers give the tokens with which a text is predicted. A
    sentence longer than max_length becomes several rows, so that no word is lost. Words without a piece, such as a
    blank, and sentences without words are left out.

    Raises:
        RecipeError: If no sentence has words.
    """
    max_length = token_limit(tokenizer, max_length)
    rows = []
    for words, tags in sentences:
        if not words:
            continue
        cut = [word[: max_length * CHARACTERS_PER_TOKEN] for word in words]
        text = " ".join(cut)
        tokens = tokenizer(
            text,
            truncation=True,
            max_length=max_length,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        ends = [*accumulate(len(word) + 1 for word in cut)]  # each with the blank after the word
        previous = None
        for row in range(len(tokens["input_ids"])):
            labels = []
            for begin, end in tokens["offset_mapping"][row]:
                # The last character, as a piece may begin with the blank before its word.
                word = bisect_right(ends, end - 1) if text[begin:end].strip() else None
                labels.append(IGNORED if word is None or word == previous else tags[word])
                previous = previous if word is None else word
            inputs = {name: tokens[name][row] for name in tokenizer.model_input_names if name in tokens}
            rows.append({**inputs, "labels": labels, "length": len(labels)})
    if not rows:
        raise RecipeError("There must be a sentence with words; all sentences of a split are empty.")
    return Dataset.from_list(rows)


def entity_scores(expected: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return F1, precision and recall over all entities, which match in kind and both ends; 0 instead of 0/0."""
    pairs = [(set(find_entities(a)), set(find_entities(b))) for a, b in zip(expected, predicted, strict=True)]
    right = sum(len(a & b) for a, b in pairs)
    wanted, given = sum(len(a) for a, _ in pairs), sum(len(b) for _, b in pairs)
    return {
        "f1": 2 * right / max(1, wanted + given),
        "precision": right / max(1, given),
        "recall": right / max(1, wanted),
    }
