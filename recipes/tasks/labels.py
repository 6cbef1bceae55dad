"""The labels of a data set: their kind, their names, and their numbers."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, List, Value

from training.data import LABEL_NAMES
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

    def encode(self, data: Dataset, name: str, rows: Sequence[int] | None = None) -> Dataset:
        """Replace the labels by the column `label`: class numbers, scores, or a 0 or 1 for each class.

        Args:
            data: The split.
            name: Its name, for messages.
            rows: Number of each row in the user's file; default: as in `data`.

        Raises:
            RecipeError: If a row has no label, or one that is not among the classes.
        """
        rows = range(len(data)) if rows is None else rows
        texts = label_texts(data, self.columns, name, rows)
        values = [self._encode(row, text, name) for row, text in zip(rows, texts, strict=True)]
        kind = {SINGLE: Value("int64"), REGRESSION: Value("float32"), MULTI: List(Value("float32"))}
        # The Trainer would also take columns with these names for labels.
        taken = {*self.columns, *LABEL_NAMES} & set(data.column_names)
        new = f"{max(data.column_names, key=len)}_"  # no column has a name of that length
        encoded = data.add_column(new, values, feature=kind[self.problem_type])
        return encoded.remove_columns(sorted(taken)).rename_column(new, "label")

    def _encode(self, row: int, label: Any, name: str) -> int | float | list[float]:
        if self.problem_type == REGRESSION:
            score = _number(label)
            if not np.isfinite(score):
                raise RecipeError(
                    f"{name}: {self.columns[0]} must be a finite number, row {row} has {label!r}. "
                    "Correct it, or leave the row out."
                )
            return score
        several = isinstance(label, tuple)
        if several != (self.problem_type == MULTI):
            wanted = "a list of labels" if self.problem_type == MULTI else "one label"
            raise RecipeError(
                f"{name}: each row must have {wanted}, row {row} has {label!r}. Correct it, or give "
                "another --problem_type."
            )
        of_row = label if several else (label,)
        wrong = [one for one in of_row if one not in self.names]
        if wrong:
            raise RecipeError(
                f"{name}: row {row} has the label {wrong[0]!r}, which is not one of the "
                f"{len(self.names)} classes of the training examples: {', '.join(map(str, self.names[:_SHOWN]))}. "
                "Correct it, or leave the row out."
            )
        if self.problem_type == SINGLE:
            return self.names.index(label)
        return [float(one in of_row) for one in self.names]


def find_labels(
    train: Dataset, named: Sequence[str] | None, problem_type: str | None, rows: Sequence[int] | None = None
) -> Labels:
    """Find the labels of the training examples.

    Args:
        train: The training examples.
        named: Name of the label column, or of several 0/1 columns, one per class. None: the first of LABEL_COLUMNS
            that exists.
        problem_type: One of PROBLEM_TYPES. None: several labels per row if there are several columns or lists, a
            regression if all labels are numbers and not all whole, else classes.
        rows: Number of each row in the user's file; default: as in `train`.

    Raises:
        RecipeError: If the column does not exist, a row has no label, or there are fewer than two classes.
    """
    columns = tuple(named or [column for column in LABEL_COLUMNS if column in train.column_names][:1])
    missing = [column for column in columns if column not in train.column_names]
    if missing or not columns:
        wanted = f"{missing[0]!r}" if missing else f"with one of the names {', '.join(LABEL_COLUMNS)}"
        raise RecipeError(
            f"There is no column {wanted}, only {', '.join(train.column_names)}. Name the label with --label_columns."
        )
    texts = label_texts(train, columns, "train", rows)
    problem_type = problem_type or _guess(texts)
    if problem_type == REGRESSION:
        if len(columns) > 1:
            raise RecipeError(f"A regression needs one column, got --label_columns {' '.join(columns)}. Name one.")
        return Labels(columns, REGRESSION, columns)
    found = _distinct(texts)
    names = columns if len(columns) > 1 else _declared(train, columns[0]) or _sorted(found)
    if len(names) < 2 or (problem_type == SINGLE and len(found) < 2):
        raise RecipeError(
            f"A classification needs training examples of two classes; the column {columns[0]!r} has only "
            f"{', '.join(sorted(found))}. Add examples of another class."
        )
    if len(columns) == 1:
        _check_names(names, columns[0])
    return Labels(columns, problem_type, tuple(names))


def _check_names(names: Sequence[str], column: str) -> None:
    """Raise RecipeError if some classes look like mistakes."""
    infinite = [name for name in names if not np.isfinite(_number(name))]
    if len(infinite) < len(names) and infinite and all(_is_number(name) for name in names):
        raise RecipeError(
            f"The column {column!r} must hold finite numbers, or words, got {infinite[0]!r} among numbers. Correct "
            "it, or leave its rows out."
        )
    seen: dict[float | str, str] = {}
    for name in names:
        other = seen.setdefault(_number(name) if np.isfinite(_number(name)) else name.strip(), name)
        if other != name:
            raise RecipeError(
                f"The classes {other!r} and {name!r} of the column {column!r} must differ in more than blanks or the "
                "way to write a number. Write them alike."
            )


def check_repeated(labels: Labels, texts: Sequence[Hashable]) -> None:
    """Raise RecipeError if no class has two examples: such texts, numbers or names are not classes."""
    if labels.problem_type == SINGLE and len(texts) > 2 and len(set(texts)) == len(texts):
        raise RecipeError(
            f"A classification needs several examples of a class; the column {labels.columns[0]!r} has another label "
            f"in each of its {len(texts):,} rows. Name another column with --label_columns; for numbers, give "
            "--problem_type regression."
        )


def label_texts(
    data: Dataset, columns: Sequence[str], name: str = "train", rows: Sequence[int] | None = None
) -> list[Hashable]:
    """Return the label of each row as text, or a tuple of texts for several labels.

    Args:
        data: The split.
        columns: The label column, or several 0/1 columns, one per class.
        name: The name of the split, for messages.
        rows: Number of each row in the user's file; default: as in `data`.

    Raises:
        RecipeError: If a row has no label, or one of several columns holds anything but 0 and 1.
    """
    rows = range(len(data)) if rows is None else rows
    several = len(columns) > 1
    texts = _of_columns(data, columns, name, rows) if several else _of_column(data, columns[0])
    missing = [
        row for row, text in zip(rows, texts, strict=True) if "" in (text if isinstance(text, tuple) else (text,))
    ]
    if missing:
        raise RecipeError(
            f"{name}: each row must have a label, {len(missing):,} of {len(data):,} have none in "
            f"{', '.join(columns)!r}, the first of them row {missing[0]}. Label them, or leave them "
            "out."
        )
    return texts


def has_labels(data: Dataset, columns: Sequence[str]) -> bool:
    """Return whether any row of a split has a label."""
    return any(value not in (None, "", -1) for column in columns for value in data[column])


def _of_columns(data: Dataset, columns: Sequence[str], name: str, rows: Sequence[int]) -> list[tuple[str, ...]]:
    values = list(zip(*(data[column] for column in columns), strict=True))
    for row, of_row in zip(rows, values, strict=True):
        wrong = [(c, value) for c, value in zip(columns, of_row, strict=True) if _number(value) not in (0, 1)]
        if wrong:
            column, value = wrong[0]
            raise RecipeError(
                f"{name}: with several --label_columns each must hold 0 or 1, row {row} has "
                f"{value!r} as {column!r}. Correct it, or name one column."
            )
    return [tuple(c for c, value in zip(columns, row, strict=True) if _number(value) == 1) for row in values]


def _of_column(data: Dataset, column: str) -> list[Hashable]:
    declared = _declared(data, column)

    def text(value: Any) -> str:
        if isinstance(value, (dict, list)):
            raise RecipeError(f"The labels in {column!r} must be texts or numbers, got {value}. Name another column.")
        if declared:
            if value is None or value < 0:
                return ""
            return declared[value] if value < len(declared) else str(value)
        if isinstance(value, float) and value.is_integer():
            return str(int(value))
        missing = value is None or value != value or not str(value).strip()
        return "" if missing else str(value)

    return [tuple(map(text, value)) if isinstance(value, list) else text(value) for value in data[column]]


def describe_balance(labels: Labels, encoded: Sequence[Any]) -> str:
    """Return how often each class occurs in the training examples, whose labels `encode` has made, for the log."""
    if labels.problem_type == REGRESSION:
        return f"{labels.names[0]}: scores from {min(encoded):g} to {max(encoded):g}"
    several = labels.problem_type == MULTI
    numbers = [number for row in encoded for number in (np.flatnonzero(row) if several else (row,))]
    counts = Counter(labels.names[number] for number in numbers)
    listed = [f"{name} {count:,} ({count / len(encoded):.1%})" for name, count in counts.most_common()]
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
    # First by text, as sets have no order.
    return sorted(sorted(names), key=_number if all(np.isfinite(_number(name)) for name in names) else str)


def _is_number(text: str) -> bool:
    return np.isfinite(_number(text)) or text.strip().lower().lstrip("+-") in ("inf", "infinity", "nan")


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
