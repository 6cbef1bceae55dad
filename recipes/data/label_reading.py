"""The labels of a data set as its files have them: their columns, and what each row says.

A label is a text: the name of a class, or a number. With several classes per row, it is a tuple of
texts.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from datasets import ClassLabel, Dataset, Value

from data.data import columns_of, keep_rows, locate, rows_of
from houlsby_peft.tables import LABEL_COLUMNS, match_column
from run.edge import RecipeError


Label = str | tuple[str, ...]

FEW_VALUES = 20  # of a column that may be the label without a usual name


def find_label_columns(
    train: Dataset, named: Sequence[str] | None, text_columns: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the column of the label, or several 0/1 columns, as the command line names them.

    Otherwise it is, of the columns without texts, the first of LABEL_COLUMNS. Without those, it is
    the only column, or the only one with few values.
    """
    columns = columns_of(train)
    if named:
        return tuple(_match_named(train, name) for name in named)
    candidates = [name for name in columns if name not in text_columns]
    for name in LABEL_COLUMNS:
        column = match_column(candidates, name)
        if column is not None:
            return (column,)
    with_few_values = tuple(_count_few_values(train, candidates))
    if len(with_few_values) == 1:
        return with_few_values
    if len(candidates) == 1:
        return tuple(candidates)
    raise _no_label_column(train, "with a usual name for labels, such as label", candidates)


def _match_named(train: Dataset, name: str) -> str:
    columns = columns_of(train)
    column = match_column(columns, name)
    if column is None:
        raise _no_label_column(train, repr(name), columns)
    return column


def _no_label_column(train: Dataset, description: str, candidates: Sequence[str]) -> RecipeError:
    counts = _count_few_values(train, candidates)
    guesses = " or ".join(f"{name} ({count} values)" for name, count in counts.items())
    message = (
        f"There is no column {description}, only {', '.join(columns_of(train))}. Name the label "
        "with --label_columns"
    )
    if guesses:
        message += f"; it may be {guesses}"
    return RecipeError(f"{message}.")


def _count_few_values(train: Dataset, columns: Sequence[str]) -> dict[str, int]:
    """Return the number of values of the columns that have few, as a column of classes has."""
    counts = {}
    for name in columns:
        count = len(set(map(str, train[name])))
        if 1 < count <= min(FEW_VALUES, len(train) / 2):
            counts[name] = count
    return counts


def read_labels(data: Dataset, columns: Sequence[str], name: str = "train") -> list[Label]:
    """Return the label of each row; raise RecipeError if a row of the split `name` has none."""
    labels = []
    for row, label in enumerate(_read_optional_labels(data, columns)):
        if label is None:
            label_columns = ", ".join(columns)
            if len(columns) > 1:
                label_columns += ", which is 0 or 1 in each of them"
            values = list(rows_of(data, columns)[row])
            raise RecipeError(
                f"{name}: each row must have a label in {label_columns}; "
                f"{locate(data, row)} has {values}. Correct it, or leave it out."
            )
        labels.append(label)
    return labels


def rows_with_label(data: Dataset, columns: Sequence[str], name: str) -> Dataset:
    """Return the rows that have a label, and report how many have none."""
    rows = []
    labels = _read_optional_labels(data, columns)
    for row, (label, values) in enumerate(zip(labels, rows_of(data, columns), strict=True)):
        # Of several columns, -1 and no value stand for "not judged". What else is neither 0 nor 1
        # is a mistake, which read_labels reports.
        is_judged = not any(value in (None, "", "-1", -1) for value in values)
        if label is not None or (len(columns) > 1 and is_judged):
            rows.append(row)
    if not rows:
        raise RecipeError(
            f"{name} must have labels; {', '.join(columns)!r} is empty in all its {len(data):,} "
            "rows."
        )
    return keep_rows(data, rows, name, f"without a label in {', '.join(columns)!r}")


def has_labels(data: Dataset, columns: Sequence[str]) -> bool:
    """Return whether any row of a test split has a label; -1 stands for none, as in GLUE."""
    for column in columns:
        if column in data.column_names:
            for value in data[column]:
                if value not in (None, "", -1):
                    return True
    return False


def _read_optional_labels(data: Dataset, columns: Sequence[str]) -> list[Label | None]:
    """Return the label of each row; None where there is none, or a flag is neither 0 nor 1."""
    if len(columns) > 1:
        return [_read_flags(flags, columns) for flags in rows_of(data, columns)]
    declared = declared_classes(data, columns[0])
    if not isinstance(_type_of_labels(data, columns[0]), (Value, ClassLabel)):
        raise RecipeError(
            f"The labels in {columns[0]!r} must be texts or numbers, got {data[0][columns[0]]}."
        )
    labels: list[Label | None] = []
    for value in data[columns[0]]:
        if isinstance(value, list):
            labels.append(_read_classes(value, declared))
        else:
            labels.append(_read_class(value, declared))
    return labels


def _read_flags(flags: Iterable[Any], columns: Sequence[str]) -> tuple[str, ...] | None:
    """Return the columns with a 1, or None if a flag is neither 0 nor 1."""
    classes = []
    for column, flag in zip(columns, flags, strict=True):
        number = read_number(flag)
        if number not in (0, 1):
            return None
        if number == 1:
            classes.append(column)
    return tuple(classes)


def _read_classes(values: Sequence[Any], declared: Sequence[str]) -> tuple[str, ...] | None:
    """Return the classes of a list, or None if one of them is missing."""
    classes = []
    for value in values:
        class_name = _read_class(value, declared)
        if class_name is None:
            return None
        classes.append(class_name)
    return tuple(classes)


def _read_class(value: Any, declared: Sequence[str]) -> str | None:
    """Return the name of a class, or a number as text; None if it is missing."""
    if value is None or value != value:  # NaN
        return None
    if declared and value < 0:
        return None
    if declared and value < len(declared):
        return str(declared[value])
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    # "ö" may be one character or two, which look the same.
    return unicodedata.normalize("NFC", str(value).strip()) or None


def declared_classes(data: Dataset, column: str) -> tuple[str, ...]:
    """Return the class names that the data set declares, if any."""
    type_ = _type_of_labels(data, column)
    return tuple(type_.names) if isinstance(type_, ClassLabel) else ()


def _type_of_labels(data: Dataset, column: str) -> Any:
    """Return the type of the values of a column, or of what its lists hold."""
    type_ = data.features[column]
    return getattr(type_, "feature", type_)


def classes_of(label: Label) -> tuple[str, ...]:
    """Return the classes of a row, also if it has a single one."""
    return (label,) if isinstance(label, str) else label


def are_numbers(names: Iterable[str]) -> bool:
    return all(math.isfinite(read_number(name)) for name in names)


def read_number(value: Any) -> float:
    """Read a number, also with a decimal comma: 3,5, but not 1,234, which may be 1234."""
    if isinstance(value, str):
        value = re.sub(r",(?!\d{3}\s*$)", ".", value)
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
