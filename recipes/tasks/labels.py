"""The labels of a data set: their kind, their names, and their numbers."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, List, Value

from houlsby_peft.tables import match_column
from training.data import LABEL_NAMES, keep_rows
from training.errors import RecipeError
from training.tables import columns_of, locate, log


LABEL_COLUMNS = (
    *("label", "labels", "class", "category", "categories", "target", "tag", "tags", "topic", "sentiment", "intent"),
    *("emotion", "score", "rating", "stars"),
)
REGRESSION, SINGLE, MULTI = "regression", "single_label_classification", "multi_label_classification"
PROBLEM_TYPES = (SINGLE, MULTI, REGRESSION)
SHOWN = 20


@dataclass(frozen=True)
class Labels:
    """What a task predicts: the label columns, one of PROBLEM_TYPES, and the names of the classes or of the score."""

    columns: tuple[str, ...]
    problem_type: str
    names: tuple[str, ...]

    def encode(self, data: Dataset, name: str) -> Dataset:
        """Replace the labels by the column `label`: class numbers, scores, or a 0 or 1 for each class.

        Args:
            data: The split.
            name: Its name, for messages.

        Raises:
            RecipeError: If a row has no label, or one that is not among the classes.
        """
        texts = label_texts(data, self.columns, name)
        values = [self._encode(text, name, data, row) for row, text in enumerate(texts)]
        kind = {SINGLE: Value("int64"), REGRESSION: Value("float32"), MULTI: List(Value("float32"))}
        # The Trainer would also take columns with these names for labels.
        taken = {*self.columns, *LABEL_NAMES} & set(data.column_names)
        new = f"{max(data.column_names, key=len)}_"  # no column has a name of that length
        encoded = data.add_column(new, values, feature=kind[self.problem_type])
        return encoded.remove_columns(sorted(taken)).rename_column(new, "label")

    def _encode(self, label: Any, name: str, data: Dataset, row: int) -> int | float | list[float]:
        if self.problem_type == REGRESSION:
            score = _number(label)
            if not np.isfinite(score):
                raise RecipeError(
                    f"{name}: {self.columns[0]} must be a finite number, {locate(data, row)} has {label!r}. "
                    "Correct it, or leave the row out."
                )
            return score
        several = isinstance(label, tuple)
        if several != (self.problem_type == MULTI):
            wanted = "a list of labels" if self.problem_type == MULTI else "one label"
            raise RecipeError(
                f"{name}: each row must have {wanted}, {locate(data, row)} has {label!r}. Correct it, or give "
                "another --problem_type."
            )
        of_row = label if several else (label,)
        wrong = [one for one in of_row if one not in self.names]
        if wrong:
            raise RecipeError(
                f"{name}: {locate(data, row)} has the label {wrong[0]!r}, which is not one of the "
                f"{len(self.names)} classes of the training examples: {', '.join(map(str, self.names[:SHOWN]))}. "
                "Correct it, or leave the row out."
            )
        if self.problem_type == SINGLE:
            return self.names.index(label)
        return [float(one in of_row) for one in self.names]

    def decode(self, values: Iterable[Any]) -> list[Any]:
        """Return what class numbers, scores, or a 0 or 1 for each class mean: the reverse of `encode`."""
        if self.problem_type == REGRESSION:
            return [float(value) for value in values]
        if self.problem_type == SINGLE:
            return [self.names[value] for value in values]
        return ["; ".join(name for name, one in zip(self.names, row, strict=True) if one) for row in values]


def find_label_columns(train: Dataset, named: Sequence[str] | None) -> tuple[str, ...]:
    """Return the column of the label, or several 0/1 columns, as named on the command line, or else the first of
    LABEL_COLUMNS that exists.

    Raises:
        RecipeError: If a column does not exist, or none is named and none found.
    """
    own = columns_of(train)
    names = named or [name for name in LABEL_COLUMNS if match_column(own, name)][:1]
    columns = {name: match_column(own, name) for name in names}
    missing = [name for name, column in columns.items() if column is None]
    if missing or not columns:
        wanted = repr(missing[0]) if missing else f"with one of the names {', '.join(LABEL_COLUMNS)}"
        counts = {name: len(set(map(str, train[name]))) for name in own}
        few = [f"{name} ({count} values)" for name, count in counts.items() if 1 < count <= min(SHOWN, len(train) / 2)]
        hint = f"; it may be {' or '.join(few)}" if few else ""
        raise RecipeError(
            f"There is no column {wanted}, only {', '.join(counts)}. Name the label with --label_columns{hint}."
        )
    return tuple(columns.values())


def find_labels(train: Dataset, named: Sequence[str] | None, problem_type: str | None) -> Labels:
    """Find the labels of the training examples.

    Args:
        train: The training examples.
        named: As for find_label_columns.
        problem_type: One of PROBLEM_TYPES. None: several labels per row if there are several columns or lists, a
            regression if all labels are numbers and not all whole, else classes.

    Raises:
        RecipeError: If the column does not exist, a row has no label, or there are fewer than two classes.
    """
    columns = find_label_columns(train, named)
    texts = label_texts(train, columns)
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
        other = seen.setdefault(_number(name) if np.isfinite(_number(name)) else name.lower(), name)
        if other != name and np.isfinite(_number(name)):
            raise RecipeError(
                f"The classes {other!r} and {name!r} of the column {column!r} must differ in more than the way to "
                "write a number. Write them alike."
            )
        if other != name:
            log(f"note: the classes {other!r} and {name!r} differ only in case")


def check_repeated(labels: Labels, texts: Sequence[Hashable]) -> None:
    """Raise RecipeError if most examples have a label of their own: such texts, numbers or names are not classes."""
    once = sum(count == 1 for count in Counter(texts).values())
    if labels.problem_type == SINGLE and len(texts) > 2 and once > len(texts) / 2:
        raise RecipeError(
            f"A classification needs several examples of a class; {once:,} of the {len(texts):,} rows have a label "
            f"in {labels.columns[0]!r} that no other row has. Name another column with --label_columns; for numbers, "
            "give --problem_type regression."
        )


def label_texts(data: Dataset, columns: Sequence[str], name: str = "train") -> list[Hashable]:
    """Return the label of each row as text, or a tuple of texts for several labels.

    Args:
        data: The split.
        columns: The label column, or several 0/1 columns, one per class.
        name: The name of the split, for messages.

    Raises:
        RecipeError: If a row has no label, or one of several columns holds anything but 0 and 1.
    """
    texts = _of_columns(data, columns, name) if len(columns) > 1 else _of_column(data, columns[0])
    missing = [row for row, text in enumerate(texts) if _is_missing(text)]
    if missing:
        raise RecipeError(
            f"{name}: each row must have a label, {len(missing):,} of {len(data):,} have none in "
            f"{', '.join(columns)!r}, the first of them {locate(data, missing[0])}. Label them, or leave them out."
        )
    return texts


def rows_with_label(data: Dataset, columns: Sequence[str], name: str) -> Dataset:
    """Return the rows that have a label, and report how many have none.

    Raises:
        RecipeError: If no row has one.
    """
    if len(columns) > 1:
        texts = [("",) if all(value in (None, "") for value in of_row) else () for of_row in _rows(data, columns)]
    else:
        texts = _of_column(data, columns[0])
    rows = [row for row, text in enumerate(texts) if not _is_missing(text)]
    if not rows:
        raise RecipeError(f"{name} must have labels; {', '.join(columns)!r} is empty in all its {len(data):,} rows.")
    return keep_rows(data, rows, f"{name}: {{}} without a label in {', '.join(columns)!r}")


def has_labels(data: Dataset, columns: Sequence[str]) -> bool:
    """Return whether any row of a split has a label."""
    here = [column for column in columns if column in data.column_names]
    return any(value not in (None, "", -1) for column in here for value in data[column])


def _is_missing(text: Hashable) -> bool:
    return "" in (text if isinstance(text, tuple) else (text,))


def _rows(data: Dataset, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(zip(*(data[column] for column in columns), strict=True))


def _of_columns(data: Dataset, columns: Sequence[str], name: str) -> list[tuple[str, ...]]:
    values = _rows(data, columns)
    for row, of_row in enumerate(values):
        wrong = [(c, value) for c, value in zip(columns, of_row, strict=True) if _number(value) not in (0, 1)]
        if wrong:
            column, value = wrong[0]
            raise RecipeError(
                f"{name}: with several --label_columns each must hold 0 or 1, {locate(data, row)} has "
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
        return "" if value is None or value != value else str(value).strip()

    return [tuple(map(text, value)) if isinstance(value, list) else text(value) for value in data[column]]


def rarest_labels(labels: Labels, texts: Sequence[Hashable]) -> list[Hashable] | None:
    """Return for each row its label, of several the rarest, by which to split the rows evenly; None for scores."""
    if labels.problem_type != MULTI:
        return None if labels.problem_type == REGRESSION else list(texts)
    counts = Counter(one for text in texts for one in text)
    return [min(text, key=lambda one: counts[one], default="") for text in texts]


def balanced_weights(labels: Labels, encoded: Sequence[Any]) -> tuple[float, ...]:
    """Return weights with which each class counts alike in the loss; 1 for a class without examples.

    With one class per row they are the "balanced" ones of scikit-learn, rows / (classes * rows of the class). With
    several, the weight of the presence of a class is the number of rows without it for each row that has it.
    """
    if labels.problem_type == MULTI:
        present = np.asarray(encoded).sum(0)
        weights = (len(encoded) - present) / np.maximum(present, 1)
    else:
        present = np.bincount(encoded, minlength=len(labels.names))
        weights = len(encoded) / (np.count_nonzero(present) * np.maximum(present, 1))
    return tuple(np.where(present > 0, weights, 1.0).tolist())


def describe_balance(labels: Labels, encoded: Sequence[Any]) -> str:
    """Return how often each class occurs in the training examples, whose labels `encode` has made, for the log."""
    if labels.problem_type == REGRESSION:
        return f"{labels.names[0]}: scores from {min(encoded):g} to {max(encoded):g}"
    several = labels.problem_type == MULTI
    numbers = [number for row in encoded for number in (np.flatnonzero(row) if several else (row,))]
    counts = Counter(labels.names[number] for number in numbers)
    listed = [f"{name} {count:,} ({count / len(encoded):.1%})" for name, count in counts.most_common()]
    rest = f", and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    once = sum(count == 1 for count in counts.values())
    absent = len(labels.names) - len(counts)
    notes = [f"; {once} seen once" if once else "", f"; {absent} never seen" if absent else ""]
    if not several and len(labels.columns) == 1 and all(np.isfinite(_number(name)) for name in labels.names):
        notes.append(" (numbers as classes; for a score, give --problem_type regression)")
    return f"{len(labels.names)} classes: {', '.join(listed[:SHOWN])}{rest}{''.join(notes)}"


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
