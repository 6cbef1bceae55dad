"""The labels of a data set: their columns, their kind, the names of the classes, and their numbers.

A label is a text: the name of a class, or a number. With several classes per row, it is a tuple of
texts.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, List, Value

from common.data import columns_of, keep_rows, locate, rows_of
from common.edge import RecipeError
from houlsby_peft.tables import match_column


Label = str | tuple[str, ...]

LABEL_COLUMNS = [
    "label",
    "labels",
    "class",
    "category",
    "categories",
    "target",
    "tag",
    "tags",
    "topic",
    "sentiment",
    "intent",
    "emotion",
    "score",
    "rating",
    "stars",
    "kategorie",
    "klasse",
    "thema",
    "abteilung",
    "stimmung",
    "bewertung",
    "etiqueta",
    "categoria",
    "categoría",
    "clase",
    "tema",
    "sentimiento",
    "étiquette",
    "catégorie",
    "classe",
    "sujet",
    "etichetta",
    "rótulo",
    "categorie",
]
FOR_TRAINER = {"label", "labels", "label_ids"}  # columns that the Trainer takes for labels
REGRESSION = "regression"
SINGLE = "single_label_classification"
MULTI = "multi_label_classification"
SHOWN = 20  # classes in a message


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

    def encode(self, data: Dataset, name: str) -> Dataset:
        """Replace the labels of the split `name` by the column `label`.

        It holds class numbers, scores, or a list with 0 or 1 for each class.
        """
        numbers: dict[Label, int] = {
            class_name: number for number, class_name in enumerate(self.names)
        }
        values = []
        for row, label in enumerate(read_labels(data, self.columns, name)):
            try:
                values.append(self._encode_label(label, numbers))
            except KeyError as error:
                raise RecipeError(
                    f"{name}: a label must be {self._describe()}; {locate(data, row)} has "
                    f"{error.args[0]!r}. Correct it, leave the row out, or give another "
                    "--problem_type."
                ) from error
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

    def _encode_label(self, label: Label, numbers: Mapping[Label, int]) -> Any:
        """Return the number, the score or the flags of a label; without one, raise KeyError."""
        if self.problem_type == REGRESSION:
            score = read_number(label)
            if not math.isfinite(score):
                raise KeyError(label)
            return score
        if self.problem_type == SINGLE:
            return numbers[label]
        if isinstance(label, str):
            raise KeyError(label)
        flags = [0.0] * len(self.names)
        for class_name in label:
            flags[numbers[class_name]] = 1.0
        return flags

    def _describe(self) -> str:
        """Return what a label must be."""
        if self.problem_type == REGRESSION:
            return "a finite number, with a decimal point"
        classes = (
            f"one of the {len(self.names)} classes of the training examples: "
            f"{', '.join(self.names[:SHOWN])}"
        )
        if self.problem_type == MULTI:
            return f"a list of labels, each {classes}"
        return classes


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
        if 1 < count <= min(SHOWN, len(train) / 2):
            counts[name] = count
    return counts


def find_labels(
    train: Dataset, named: Sequence[str] | None, problem_type: str | None = None
) -> Labels:
    """Return what the labels of the training examples are; `problem_type` is that of a flag."""
    columns = find_label_columns(train, named)
    labels = read_labels(train, columns)
    problem_type = problem_type or _guess_problem_type(labels)
    if problem_type == REGRESSION:
        if len(columns) > 1:
            raise RecipeError(
                f"A regression needs one column, got --label_columns {' '.join(columns)}. Name one."
            )
        return Labels(columns, REGRESSION, columns)
    classes = _find_classes(labels)
    names = columns
    if len(columns) == 1:
        names = declared_classes(train, columns[0]) or classes
    if len(names) < 2 or (problem_type == SINGLE and len(classes) < 2):
        raise RecipeError(
            f"A classification needs training examples of two classes; the column {columns[0]!r} "
            f"has only {', '.join(classes)}. Add examples of another class."
        )
    return Labels(columns, problem_type, names)


def _guess_problem_type(labels: Sequence[Label]) -> str:
    """Tuples are several classes, numbers that are not all whole are scores, others are classes.

    Texts that are all one number, such as 1.1 and 1.10, are classes as well.
    """
    numbers = []
    for label in labels:
        if isinstance(label, tuple):
            return MULTI
        numbers.append(read_number(label))
    are_scores = np.isfinite(numbers).all() and np.not_equal(numbers, np.round(numbers)).any()
    return REGRESSION if are_scores and np.ptp(numbers) > 0 else SINGLE


def _find_classes(labels: Sequence[Label]) -> tuple[str, ...]:
    """Return the classes that occur, in the order of their names, or as numbers if all are."""
    names: set[str] = set()
    for label in labels:
        names.update(classes_of(label))
    # First by name, as sets have no order.
    in_order = sorted(names)
    if are_numbers(names):
        in_order.sort(key=read_number)
    return tuple(in_order)


def declared_classes(data: Dataset, column: str) -> tuple[str, ...]:
    """Return the class names that the data set declares, if any."""
    type_ = _type_of_labels(data, column)
    return tuple(type_.names) if isinstance(type_, ClassLabel) else ()


def _type_of_labels(data: Dataset, column: str) -> Any:
    """Return the type of the values of a column, or of what its lists hold."""
    type_ = data.features[column]
    return getattr(type_, "feature", type_)


def read_labels(data: Dataset, columns: Sequence[str], name: str = "train") -> list[Label]:
    """Return the label of each row; raise RecipeError if a row of the split `name` has none."""
    labels = []
    for row, label in enumerate(_read_labels(data, columns)):
        if label is None:
            condition = ", which is 0 or 1 in each of them" if len(columns) > 1 else ""
            values = list(rows_of(data, columns)[row])
            raise RecipeError(
                f"{name}: each row must have a label in {', '.join(columns)}{condition}; "
                f"{locate(data, row)} has {values}. Correct it, or leave it out."
            )
        labels.append(label)
    return labels


def rows_with_label(data: Dataset, columns: Sequence[str], name: str) -> Dataset:
    """Return the rows that have a label, and report how many have none."""
    rows = []
    labels = _read_labels(data, columns)
    for row, (label, values) in enumerate(zip(labels, rows_of(data, columns), strict=True)):
        # Of several columns, what is neither 0 nor 1 is a mistake, which read_labels reports.
        is_mistake = len(columns) > 1 and any(value not in (None, "") for value in values)
        if label is not None or is_mistake:
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


def split_labels(data: Dataset, column: str, separator: str) -> Dataset:
    """Replace texts with several labels by lists of labels; an empty text has none."""
    lists = []
    for value in data[column]:
        parts = map(str.strip, str(value or "").split(separator))
        lists.append(list(filter(None, parts)))
    return data.remove_columns(column).add_column(column, lists, feature=List(Value("string")))


def _read_labels(data: Dataset, columns: Sequence[str]) -> list[Label | None]:
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
        return declared[value]
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    # "ö" may be one character or two, which look the same.
    return unicodedata.normalize("NFC", str(value).strip()) or None


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
