"""What a task predicts: the kind of its labels, the names of the classes, and their numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
from datasets import Dataset, List, Value

from data.data import keep_rows, locate
from data.label_column import Label, are_numbers, classes_of, read_number
from run.edge import RecipeError


FOR_TRAINER = {"label", "labels", "label_ids"}  # columns that the Trainer takes for labels
REGRESSION = "regression"
SINGLE = "single_label_classification"
MULTI = "multi_label_classification"
SHOWN = 20  # classes in a message


class _Numbers(dict[Label, int]):
    """Numbers of classes that are numbers themselves, found by the value of their names."""

    def __missing__(self, label: Label) -> int:
        for name, number in self.items():
            if read_number(name) == read_number(label):
                return number
        raise KeyError(label)


@dataclass(frozen=True)
class Labels:
    """What a task predicts.

    Attributes:
        columns: The column of the labels, or one 0/1 column for each class.
        problem_type: REGRESSION, SINGLE or MULTI.
        names: The names of the classes, or of the score.
    """

    columns: tuple[str, ...]
    problem_type: str
    names: tuple[str, ...]

    def encode(self, data: Dataset, labels: Sequence[Label], name: str) -> Dataset:
        """Replace the labels of the split `name`, as they are written, by the column `label`.

        It holds class numbers, scores, or a list with 0 or 1 for each class. Rows with a class that
        no training example has, or with a score that is no number, are left out, unless they are
        the most.
        """
        rows, values, unknown = [], [], {}
        for row, label in enumerate(labels):
            try:
                values.append(self._encode_label(label))
                rows.append(row)
            except KeyError as error:
                unknown[row] = error.args[0]
        if len(unknown) > len(rows):
            row, label = next(iter(unknown.items()))
            raise RecipeError(
                f"{name}: a label must be {self._describe()}; {locate(data, row)} has {label!r}. "
                "Correct it, leave the row out, or give another --problem_type."
            )
        reason = "with a class that no training example has"
        if self.problem_type == REGRESSION:
            reason = "with a label that is no number"
        found = ", ".join(map(repr, dict.fromkeys(unknown.values())))
        data = keep_rows(data, rows, name, f"{reason} ({found})")
        types = {
            SINGLE: Value("int64"),
            REGRESSION: Value("float32"),
            MULTI: List(Value("float32")),
        }
        encoded = data.add_column("(label)", values, feature=types[self.problem_type])
        replaced = {*self.columns, *FOR_TRAINER}.intersection(data.column_names)
        return encoded.remove_columns(sorted(replaced)).rename_column("(label)", "label")

    def decode(self, values: Iterable[Any]) -> list[Any]:
        """Return what class numbers, scores, or a 0 or 1 for each class mean."""
        if self.problem_type == REGRESSION:
            return list(map(float, values))
        if self.problem_type == SINGLE:
            return [self.names[number] for number in values]
        return ["; ".join(compress(self.names, flags)) for flags in values]

    def _encode_label(self, label: Label) -> Any:
        """Return the number, the score or the flags of a label; without one, raise KeyError."""
        if self.problem_type == REGRESSION:
            score = read_number(label)
            if not math.isfinite(score):
                raise KeyError(label)
            return score
        if self.problem_type == SINGLE:
            return self._numbers[label]
        flags = [0.0] * len(self.names)
        for class_name in classes_of(label):
            flags[self._numbers[class_name]] = 1.0
        return flags

    @cached_property
    def _numbers(self) -> Mapping[Label, int]:
        """The number of each class; of classes that are numbers, 1.0 is the same as 1."""
        numbers: dict[Label, int] = {name: number for number, name in enumerate(self.names)}
        return _Numbers(numbers) if are_numbers(self.names) else numbers

    def _describe(self) -> str:
        """Return what a label must be."""
        if self.problem_type == REGRESSION:
            return "a finite number"
        classes = (
            f"one of the {len(self.names)} classes of the training examples: "
            f"{', '.join(self.names[:SHOWN])}"
        )
        if self.problem_type == MULTI:
            return f"a list of labels, each {classes}"
        return classes


def find_labels(
    labels: Sequence[Label],
    columns: tuple[str, ...],
    declared: tuple[str, ...] = (),
    problem_type: str | None = None,
) -> Labels:
    """Return what the labels of the training examples are.

    Args:
        labels: The labels as they are written.
        columns: Their columns.
        declared: The names of classes that the data set declares.
        problem_type: The kind that the user gives.
    """
    problem_type = problem_type or _guess_problem_type(labels)
    if problem_type == REGRESSION:
        if len(columns) > 1:
            raise RecipeError(
                f"A regression needs one column, got --label_columns {' '.join(columns)}. Name one."
            )
        return Labels(columns, REGRESSION, columns)
    classes = classes_in(labels)
    names = columns if len(columns) > 1 else declared or classes
    if len(names) < 2 or (problem_type == SINGLE and len(classes) < 2):
        raise RecipeError(
            f"A classification needs training examples of two classes; the column {columns[0]!r} "
            f"has only {', '.join(classes)}. Add examples of another class."
        )
    return Labels(columns, problem_type, names)


def _guess_problem_type(labels: Sequence[Label]) -> str:
    """Return the kind of the problem: tuples are several classes, others a score or a class.

    Numbers that are not all whole are scores. If all are the same number, as of the versions 1.1
    and 1.10, they are classes.
    """
    numbers = []
    for label in labels:
        if isinstance(label, tuple):
            return MULTI
        numbers.append(read_number(label))
    are_scores = np.isfinite(numbers).all() and np.not_equal(numbers, np.round(numbers)).any()
    return REGRESSION if are_scores and np.ptp(numbers) > 0 else SINGLE


def classes_in(labels: Sequence[Label]) -> tuple[str, ...]:
    """Return the classes that occur, in the order of their names, or as numbers if all are."""
    names: set[str] = set()
    for label in labels:
        names.update(classes_of(label))
    # First by name, as sets have no order.
    in_order = sorted(names)
    if are_numbers(names):
        in_order.sort(key=read_number)
    return tuple(in_order)
