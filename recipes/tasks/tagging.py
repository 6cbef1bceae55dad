"""Tags of words: from a data set to word pieces, and from a model's outputs to scores."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset, List, Value
from numpy.typing import NDArray
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedTokenizerBase,
)

from data.data import check_fast, lines_of, locate
from houlsby_peft.predict.tagging import find_entities, mark_entities
from run.command import Command
from run.edge import RecipeError
from run.trainer import RecipeTrainer
from tasks.frozen_encoder import FrozenEncoder
from tasks.label_issues import Items, LabeledTask
from tasks.metrics import Examples
from tasks.scores import ClassScores, check_finite


NO_ENTITY = "no entity"
IGNORED = -100  # transformers' label for tokens that are neither trained nor scored

Span = tuple[int, int, int]  # a sentence, and the first and the last word of an entity


@dataclass(kw_only=True)
class TaggingTask(LabeledTask):
    """Tagging of words.

    Its splits have the `words` of each sentence and the numbers of their `tags`. Word pieces that
    begin no word have the label IGNORED.
    """

    auto_class = AutoModelForTokenClassification
    task_type = "TOKEN_CLS"
    collator = DataCollatorForTokenClassification

    @property
    def are_entities(self) -> bool:
        """Whether the tags mark entities, such as B-PER, I-PER and O.

        Otherwise, each word's tag stands alone.
        """
        return mark_entities(self.labels)

    @property
    def scores(self) -> tuple[str, ...]:
        if self.are_entities:
            return ("f1", "precision", "recall", "accuracy", "loss")
        return ("accuracy", "loss")

    @property
    def head(self) -> dict[str, Any]:
        return {"id2label": dict(enumerate(self.labels))}

    def example_of(self, row: Mapping[str, Any]) -> str:
        return " ".join(row["words"])

    def encode(
        self, split: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> Dataset:
        sentences = zip(split["words"], split["tags"], strict=True)
        return tokenize_words(sentences, tokenizer, max_length)

    def items_to_check(self, examples: Dataset, command: Command) -> Items:
        """Return the words with their tags."""
        encoder = FrozenEncoder.load(command)
        words, tokens = _number_words(examples, encoder.tokenizer, command.arguments.max_length)
        numbers, states = encoder.read_words(tokens)
        words = words.iloc[numbers]
        return Items(states, words.pop("tag").to_numpy(np.int64), words)

    def score(self, evaluation: EvalPrediction) -> dict[str, float]:
        """Return the accuracy of the tags and, for entities, precision, recall and F1.

        The outputs are (rows, tokens, tags), the labels (rows, tokens).
        """
        outputs, labels = np.asarray(evaluation.predictions), np.asarray(evaluation.label_ids)
        is_word = labels != IGNORED
        check_finite(outputs[is_word])
        predicted = outputs.argmax(-1)
        right = (predicted == labels)[is_word].sum()
        scores = {"accuracy": float(right / max(1, is_word.sum()))}
        if self.are_entities:
            scores |= entity_scores(
                self._name_tags(labels, is_word), self._name_tags(predicted, is_word)
            )
        return scores

    def describe(self, outputs: NDArray[np.float32], labels: NDArray[np.int64]) -> ClassScores:
        """Return the kinds of entities that a model has predicted, or else the tags of words.

        An entity that is only expected, or only predicted, is counted beside one of no kind. The
        outputs are (rows, tokens, tags), the labels (rows, tokens).
        """
        is_word = labels != IGNORED
        predicted = outputs.argmax(-1)
        if not self.are_entities:
            return ClassScores(labels[is_word], predicted[is_word], self.labels, len(self.labels))
        expected_kinds = _find_kinds(self._name_tags(labels, is_word))
        predicted_kinds = _find_kinds(self._name_tags(predicted, is_word))
        spans = sorted(expected_kinds.keys() | predicted_kinds.keys())
        names = sorted({tag[2:] for tag in self.labels if tag != "O"})
        return ClassScores(
            _number_kinds(expected_kinds, spans, names),
            _number_kinds(predicted_kinds, spans, names),
            (*names, NO_ENTITY),
            scored=len(names),
        )

    def examples(self, trainer: RecipeTrainer) -> Examples:
        """Return the tags of each sentence by name, as seqeval takes them."""
        _, _, output = trainer.predict_validation()
        outputs, labels = np.asarray(output.predictions), np.asarray(output.label_ids)
        is_word = labels != IGNORED
        predicted = self._name_tags(outputs.argmax(-1), is_word)
        return Examples(predicted, self._name_tags(labels, is_word))

    def _name_tags(self, numbers: NDArray[np.int64], is_word: NDArray[np.bool_]) -> list[list[str]]:
        """Return the tags of the words of each sentence; both arrays are (rows, tokens)."""
        names = np.array(self.labels, dtype=object)
        rows = zip(numbers, is_word, strict=True)
        return [names[row[words]].tolist() for row, words in rows]


def _number_words(
    examples: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[pd.DataFrame, Dataset]:
    """Return a table with a row per word, and word pieces that have its number in place of its
    tag.
    """
    sentences = pd.DataFrame({"row": lines_of(examples)})
    sentences["text"] = list(map(" ".join, examples["words"]))
    sentences["word"] = list(examples["words"])
    sentences["tag"] = list(examples["tags"])
    sentences = sentences[sentences["text"] != ""]
    words = sentences.explode(["word", "tag"])
    words.insert(2, "position", words.groupby(level=0).cumcount() + 1)
    numbers = pd.Series(range(len(words)), index=words.index).groupby(level=0).agg(list)
    numbered = zip(sentences["word"], numbers, strict=True)
    return words, tokenize_words(numbered, tokenizer, max_length)


def _find_kinds(sentences: Iterable[Sequence[str]]) -> dict[Span, str]:
    """Return the kinds of the entities that the tags of some sentences mark."""
    kinds = {}
    for row, tags in enumerate(sentences):
        for kind, first, last in find_entities(tags):
            kinds[row, first, last] = kind
    return kinds


def _number_kinds(
    kinds: Mapping[Span, str], spans: Iterable[Span], names: Sequence[str]
) -> NDArray[np.int64]:
    """Return the number of the kind at each span, and that of NO_ENTITY where there is none."""
    numbers = []
    for span in spans:
        numbers.append(names.index(kinds[span]) if span in kinds else len(names))
    return np.array(numbers, dtype=np.int64)


def number_tags(data: Dataset, name: str, tags: Sequence[str]) -> Dataset:
    """Return the words of the split `name` with the numbers of their tags among `tags`."""
    numbers = {tag: number for number, tag in enumerate(tags)}
    tag_numbers = []
    for row, tags_of_row in enumerate(data["tags"]):
        try:
            tag_numbers.append([numbers[tag] for tag in tags_of_row])
        except KeyError as error:
            raise RecipeError(
                f"{name}: {locate(data, row)} has the tag {error.args[0]!r}, which no training "
                f"example has: they have {', '.join(tags)}. Correct it, or leave the row out."
            ) from error
    return data.remove_columns("tags").add_column("tags", tag_numbers, feature=List(Value("int64")))


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
    check_fast(tokenizer)
    max_length = min(max_length, tokenizer.model_max_length)
    rows = []
    for words, tags in sentences:
        if not words:
            continue
        parts = tokenizer(
            " ".join(words),
            truncation=True,
            max_length=max_length,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        inputs = [name for name in tokenizer.model_input_names if name in parts]
        for number, labels in enumerate(_label_pieces(words, tags, parts["offset_mapping"])):
            row = {name: parts[name][number] for name in inputs}
            rows.append({**row, "labels": labels, "length": len(labels)})
    if not rows:
        raise RecipeError(
            "There must be a sentence with words; all sentences of a split are empty."
        )
    return Dataset.from_list(rows)


def _label_pieces(
    words: Sequence[str], tags: Sequence[int], parts: Iterable[Iterable[tuple[int, int]]]
) -> Iterator[list[int]]:
    """Yield the labels of the pieces of each part of a sentence.

    Each word's tag is on its first piece. `parts` have the characters of each piece in the joined
    words.
    """
    text = " ".join(words)
    word_ends = list(accumulate(len(word) + 1 for word in words))  # with the blank after each word
    last_word = None
    for spans in parts:
        labels = []
        for begin, end in spans:
            label = IGNORED
            if text[begin:end].strip():
                # By the last character, as a piece may begin with the blank before its word.
                word = bisect_right(word_ends, end - 1)
                if word != last_word:
                    label, last_word = tags[word], word
            labels.append(label)
        yield labels


def entity_scores(
    expected: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return F1, precision and recall over all entities, which match in kind and both ends.

    Each sentence is a list of tags. A score without a value, 0/0, is 0.
    """
    expected_spans = _find_kinds(expected).items()
    predicted_spans = _find_kinds(predicted).items()
    right = len(expected_spans & predicted_spans)
    return {
        "f1": 2 * right / max(1, len(expected_spans) + len(predicted_spans)),
        "precision": right / max(1, len(predicted_spans)),
        "recall": right / max(1, len(expected_spans)),
    }
