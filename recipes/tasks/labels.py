"""The labels of a data set: their kind, their names, and their numbers."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, List, Value

from training.errors import RecipeError


LABEL_COLUMNS = ("label", "labels", "class", "category", "target", "score")
REGRESSION, SINGLE, MULTI = "regression", "single_label_classification", "multi_label_classification"
PROBLEM_TYPES = (SINGLE, MULTI, REGRESSION)
_SHOWN = 20


@dataclass(frozen=True)
class Labels:
    """What a task predicts: the label columns, one of PROBLEM_TYPES, and the names of the classes or of the score."""

    columns: tuple[str, ...]
    problem_type: str
    names: tuple[str, ...]

    def encode(self, data: Dataset, name: str) -> Dataset:
        """Replace the labels by the column `label`: class numbers, scores, or a 0 or 1 for each class.

        Raises:
            RecipeError: If a row has no label, or one that is not among the classes.
        """
        values = [self._encode(row, text, name) for row, text in enumerate(label_texts(data, self.columns))]
        kind = {SINGLE: Value("int64"), REGRESSION: Value("float32"), MULTI: List(Value("float32"))}
        # The Trainer would also take columns with these names for labels.
        taken = {*self.columns, "label", "labels", "label_ids"} & set(data.column_names)
        encoded = data.add_column("encoded", values, feature=kind[self.problem_type])
        return encoded.remove_columns(sorted(taken)).rename_column("encoded", "label")

    def _encode(self, row: int, label: Any, name: str) -> int | float | list[float]:
        if self.problem_type == REGRESSION:
            score = _number(label)
            if not np.isfinite(score):
                raise RecipeError(f"{name}: {self.columns[0]} must be a number, row {row} has {label!r}.")
            return score
        of_row = label if isinstance(label, tuple) else (label,)
        wrong = [one for one in of_row if one not in self.names]
        if wrong:
            raise RecipeError(
                f"{name}: row {row} has the label {wrong[0]!r}, which is not one of the {len(self.names)} classes of "
                f"the training examples: {', '.join(map(str, self.names[:_SHOWN]))}. Correct it, or leave the row out."
            )
        if self.problem_type == SINGLE:
            return self.names.index(label)
        return [float(one in of_row) for one in self.names]


def find_labels(train: Dataset, named: Sequence[str] | None, problem_type: str | None) -> Labels:
    """Find the labels of the training examples.

    Args:
        train: The training examples.
        named: Name of the label column, or of several 0/1 columns, one per class. None: the first of LABEL_COLUMNS
            that exists.
        problem_type: One of PROBLEM_TYPES. None: several labels per row if there are several columns or lists, a
            regression if all labels are numbers and not all whole, else classes.

    Raises:
        RecipeError: If the column does not exist, or there are fewer than two classes.
    """
    columns = tuple(named or [column for column in LABEL_COLUMNS if column in train.column_names][:1])
    missing = [column for column in columns if column not in train.column_names]
    if missing or not columns:
        wanted = f"{missing[0]!r}" if missing else f"with one of the names {', '.join(LABEL_COLUMNS)}"
        raise RecipeError(
            f"There is no column {wanted}, only {', '.join(train.column_names)}. Name the label with --label_columns."
        )
    texts = label_texts(train, columns)
    problem_type = problem_type or _guess(texts)
    if problem_type == REGRESSION:
        return Labels(columns, REGRESSION, columns)
    names = columns if len(columns) > 1 else _declared(train, columns[0]) or _sorted(_distinct(texts))
    if len(names) < 2:
        raise RecipeError(
            f"A classification needs two classes; the column {columns[0]!r} has only {', '.join(names)}."
        )
    return Labels(columns, problem_type, tuple(names))


def label_texts(data: Dataset, columns: Sequence[str]) -> list[Hashable]:
    """Return the label of each row as text, or a tuple of texts for several labels; "" if a row has none."""
    if len(columns) > 1:
        values = zip(*(data[column] for column in columns), strict=True)
        return [tuple(c for c, value in zip(columns, row, strict=True) if _number(value) == 1) for row in values]
    declared = _declared(data, columns[0])

    def text(value: Any) -> str:
        if declared:
            return declared[value] if value is not None and value >= 0 else ""
        if isinstance(value, float) and value.is_integer():
            return str(int(value))
        return "" if value is None else str(value)

    return [tuple(map(text, value)) if isinstance(value, list) else text(value) for value in data[columns[0]]]


def describe_balance(labels: Labels, train: Dataset) -> str:
    """Return how often each class occurs in the training examples, for the log."""
    if labels.problem_type == REGRESSION:
        scores = [_number(text) for text in label_texts(train, labels.columns)]
        return f"{labels.names[0]}: scores from {min(scores):g} to {max(scores):g}"
    texts = label_texts(train, labels.columns)
    counts = Counter(one for text in texts for one in (text if isinstance(text, tuple) else (text,)))
    listed = [f"{name} {count:,} ({count / len(train):.1%})" for name, count in counts.most_common()]
    rest = f", and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    once = sum(count == 1 for count in counts.values())
    absent = len(labels.names) - len(counts)
    notes = [f"; {once} seen once" if once else "", f"; {absent} never seen" if absent else ""]
    return f"{len(labels.names)} classes: {', '.join(listed[:_SHOWN])}{rest}{''.join(notes)}"


def _declared(data: Dataset, column: str) -> list[str]:
    """Return the class names that the data set declares, if any."""
    feature = data.features[column]
    feature = getattr(feature, "feature", feature)  # of a list
    return list(feature.names) if isinstance(feature, ClassLabel) else []


def _guess(texts: Sequence[Hashable]) -> str:
    if any(isinstance(text, tuple) for text in texts):
        return MULTI
    numbers = np.array([_number(text) for text in texts])
    return REGRESSION if np.isfinite(numbers).all() and (numbers != np.round(numbers)).any() else SINGLE


def _distinct(texts: Sequence[Hashable]) -> set[str]:
    return {one for text in texts for one in (text if isinstance(text, tuple) else (text,)) if one != ""}


def _sorted(names: set[str]) -> list[str]:
    return sorted(names, key=_number if all(np.isfinite(_number(name)) for name in names) else str)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
