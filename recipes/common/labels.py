"""The labels of a data set: their kind, their names, and their numbers."""

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, List, Value

from common.data import LABEL_NAMES, columns_of, keep_rows, locate
from common.edge import RecipeError
from houlsby_peft.tables import match_column


LABEL_COLUMNS = (
    *(
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
    ),
    *(
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
    ),
    *(
        "etiqueta",
        "categoria",
        "categoría",
        "clase",
        "tema",
        "sentimiento",
        "étiquette",
        "catégorie",
        "classe",
    ),
    *("sujet", "etichetta", "rótulo", "categorie"),
)
REGRESSION, SINGLE, MULTI = (
    "regression",
    "single_label_classification",
    "multi_label_classification",
)
SHOWN = 20


@dataclass(frozen=True)
class Labels:
    """What a task predicts: the label columns, the kind of the problem, and the names of the
    classes or the score.
    """

    columns: tuple[str, ...]
    problem_type: str
    names: tuple[str, ...]

    def encode(self, data: Dataset, name: str) -> Dataset:
        """Replace the labels of the split `name` by the column `label`: class numbers, scores, or a
        0 or 1 for each class.
        """
        numbers = {label: number for number, label in enumerate(self.names)}
        several, is_score = self.problem_type == MULTI, self.problem_type == REGRESSION
        values: list[Any] = []
        for row, label in enumerate(label_texts(data, self.columns, name)):
            of_row = label if isinstance(label, tuple) else (label,)
            wrong = [
                one
                for one in of_row
                if not (np.isfinite(_number(one)) if is_score else one in numbers)
            ]
            if wrong or isinstance(label, tuple) != several:
                wanted = "a finite number, with a decimal point" if is_score else (
                    f"one of the {len(self.names)} classes of the training examples: {', '.join(self.names[:SHOWN])}"
                )  # fmt: skip
                raise RecipeError(
                    f"{name}: a label must be {'a list of labels, each ' * several}{wanted}; {locate(data, row)} has "
                    f"{[*wrong, label][0]!r}. Correct it, leave the row out, or give another --problem_type."
                )
            if several:
                values.append([float(one in of_row) for one in self.names])
            else:
                values.append(_number(label) if is_score else numbers[str(label)])
        kind = {SINGLE: Value("int64"), REGRESSION: Value("float32"), MULTI: List(Value("float32"))}
        # The Trainer would also take columns with these names for labels.
        replaced = sorted({*self.columns, *LABEL_NAMES} & set(data.column_names))
        encoded = data.add_column("(label)", values, feature=kind[self.problem_type])
        return encoded.remove_columns(replaced).rename_column("(label)", "label")

    def decode(self, values: Iterable[Any]) -> list[Any]:
        """Return what class numbers, scores, or a 0 or 1 for each class mean: the reverse of
        `encode`.
        """
        if self.problem_type == REGRESSION:
            return [float(value) for value in values]
        if self.problem_type == SINGLE:
            return [self.names[value] for value in values]
        return [
            "; ".join(name for name, one in zip(self.names, row, strict=True) if one)
            for row in values
        ]


def find_label_columns(
    train: Dataset, named: Sequence[str] | None, text_columns: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the column of the label, or several 0/1 columns: those named on the command line,
    else, of the columns without texts, the first of LABEL_COLUMNS, the only one, or the only one
    with few values.
    """
    own = [name for name in columns_of(train) if named or name not in text_columns]
    names = named or [name for name in LABEL_COLUMNS if match_column(own, name)][:1]
    columns = [column for name in names if (column := match_column(own, name))]
    if columns and len(columns) == len(names):
        return tuple(columns)
    counts = {name: len(set(map(str, train[name]))) for name in own}
    few = [name for name, count in counts.items() if 1 < count <= min(SHOWN, len(train) / 2)]
    if not named and 1 in (len(few), len(own)):
        return tuple(few or own)
    missing = repr(next(name for name in named if not match_column(own, name))) if named else None
    hint = (
        f"; it may be {' or '.join(f'{name} ({counts[name]} values)' for name in few)}"
        if few
        else ""
    )
    raise RecipeError(
        f"There is no column {missing or 'with a usual name for labels, such as label'}, only "
        f"{', '.join(columns_of(train))}. Name the label with --label_columns{hint}."
    )


def find_labels(
    train: Dataset, named: Sequence[str] | None, problem_type: str | None = None
) -> Labels:
    columns = find_label_columns(train, named)
    texts = label_texts(train, columns)
    problem_type = problem_type or _guess(texts)
    if problem_type == REGRESSION:
        if len(columns) > 1:
            raise RecipeError(
                f"A regression needs one column, got --label_columns {' '.join(columns)}. Name one."
            )
        return Labels(columns, REGRESSION, columns)
    found = {
        one for text in texts for one in (text if isinstance(text, tuple) else (text,)) if one != ""
    }
    are_numbers = all(np.isfinite(_number(name)) for name in found)
    by_name = sorted(
        sorted(found), key=_number if are_numbers else str
    )  # first by text, as sets have no order
    names = columns if len(columns) > 1 else _declared(train, columns[0]) or by_name
    if len(names) < 2 or (problem_type == SINGLE and len(found) < 2):
        raise RecipeError(
            f"A classification needs training examples of two classes; the column {columns[0]!r} has only "
            f"{', '.join(sorted(found))}. Add examples of another class."
        )
    return Labels(columns, problem_type, tuple(names))


def check_repeated(labels: Labels, texts: Sequence[Hashable]) -> None:
    """Raise RecipeError if most examples have a label of their own: such texts, numbers or names
    are not classes.
    """
    once = sum(count == 1 for count in Counter(texts).values())
    if labels.problem_type == SINGLE and len(texts) > 2 and once > len(texts) / 2:
        raise RecipeError(
            f"A classification needs several examples of a class; {once:,} of the {len(texts):,} rows have a label "
            f"in {labels.columns[0]!r} that no other row has. Name another column with --label_columns; for numbers, "
            "give --problem_type regression."
        )


def split_labels(data: Dataset, column: str, separator: str) -> Dataset:
    """Return a split whose labels, several in one text, are lists of labels; an empty text has
    none.
    """
    values = [
        [part for one in str(value or "").split(separator) if (part := one.strip())]
        for value in data[column]
    ]
    return data.remove_columns(column).add_column(column, values, feature=List(Value("string")))


def label_texts(data: Dataset, columns: Sequence[str], name: str = "train") -> list[Hashable]:
    """Return the label of each row as text, or a tuple of texts for several labels."""
    texts = _read_labels(data, columns)
    for row, text in enumerate(texts):
        if _is_missing(text):
            wanted = ", which is 0 or 1 in each of them" if len(columns) > 1 else ""
            raise RecipeError(
                f"{name}: each row must have a label in {', '.join(columns)}{wanted}; {locate(data, row)} has "
                f"{[data[row][column] for column in columns]}. Correct it, or leave it out."
            )
    return texts


def rows_with_label(data: Dataset, columns: Sequence[str], name: str) -> Dataset:
    """Return the rows that have a label, and report how many have none."""
    if len(columns) > 1:
        of_rows = zip(*(data[column] for column in columns), strict=True)
        rows = [
            row
            for row, values in enumerate(of_rows)
            if any(value not in (None, "") for value in values)
        ]
    else:
        rows = [
            row for row, text in enumerate(_read_labels(data, columns)) if not _is_missing(text)
        ]
    if not rows:
        raise RecipeError(
            f"{name} must have labels; {', '.join(columns)!r} is empty in all its {len(data):,} rows."
        )
    return keep_rows(data, rows, f"{name}: {{}} without a label in {', '.join(columns)!r}")


def has_labels(data: Dataset, columns: Sequence[str]) -> bool:
    here = [column for column in columns if column in data.column_names]
    return any(value not in (None, "", -1) for column in here for value in data[column])


def _is_missing(text: Hashable) -> bool:
    return "" in (text if isinstance(text, tuple) else (text,))


def _read_labels(data: Dataset, columns: Sequence[str]) -> list[Hashable]:
    """Return the label of each row as text or a tuple of texts; "" stands for none, and for what is
    neither 0 nor 1 in one of several columns.
    """
    if len(columns) > 1:
        of_rows = zip(*(map(_number, data[column]) for column in columns), strict=True)
        return [
            ("",)
            if set(row) - {0.0, 1.0}
            else tuple(c for c, one in zip(columns, row, strict=True) if one)
            for row in of_rows
        ]
    declared = _declared(data, columns[0])

    def text(value: Any) -> str:
        if isinstance(value, (dict, list)):
            raise RecipeError(
                f"The labels in {columns[0]!r} must be texts or numbers, got {value}."
            )
        if declared:
            return (
                ""
                if value is None or value < 0
                else declared[value]
                if value < len(declared)
                else str(value)
            )
        if isinstance(value, float) and value.is_integer():
            return str(int(value))
        # "ö" may be one character or two, which look the same.
        return (
            ""
            if value is None or value != value
            else unicodedata.normalize("NFC", str(value).strip())
        )

    return [
        tuple(map(text, value)) if isinstance(value, list) else text(value)
        for value in data[columns[0]]
    ]


def rarest_labels(labels: Labels, texts: Sequence[Hashable]) -> list[Hashable] | None:
    """Return for each row its label, of several the rarest, by which to split the rows evenly; None
    for scores.
    """
    if labels.problem_type != MULTI:
        return None if labels.problem_type == REGRESSION else list(texts)
    counts = Counter(one for text in texts for one in text)
    return [min(text, key=lambda one: counts[one], default="") for text in texts]


def balanced_weights(labels: Labels, encoded: Sequence[Any]) -> tuple[float, ...]:
    """Return weights with which each class counts alike in the loss; 1 for a class without
    examples.

    With several labels per row, it is the weight of the presence of a class: the rows without it
        for each one with it.
    """
    if labels.problem_type == MULTI:
        present = np.asarray(encoded).sum(0)
        weights = (len(encoded) - present) / np.maximum(present, 1)
    else:  # scikit-learn's "balanced"
        present = np.bincount(encoded, minlength=len(labels.names))
        weights = len(encoded) / (np.count_nonzero(present) * np.maximum(present, 1))
    return tuple(np.where(present > 0, weights, 1.0).tolist())


def describe_balance(labels: Labels, encoded: Sequence[Any]) -> str:
    """Return how often each class occurs in the training examples, whose labels `encode` has made,
    for the log.
    """
    if labels.problem_type == REGRESSION:
        return (
            f"{labels.names[0]}: scores from {min(encoded):g} to {max(encoded):g}, mean {np.mean(encoded):.4g}, "
            f"standard deviation {np.std(encoded):.4g}, by which they are standardized for the training"
        )
    several = labels.problem_type == MULTI
    counts = Counter(
        number for row in encoded for number in (np.flatnonzero(row) if several else (row,))
    )
    listed = [
        f"{labels.names[key]} {count:,} ({count / len(encoded):.1%})"
        for key, count in counts.most_common()
    ]
    are_numbers = len(labels.columns) == 1 and all(
        np.isfinite(_number(name)) for name in labels.names
    )
    notes = {
        f", and {len(listed) - SHOWN} more": len(listed) > SHOWN,
        "\nnote: numbers as classes; for a score, give --problem_type regression": not several
        and are_numbers,
        "\nnote: several labels in one text? Give --label_separator '|'": (
            not several and sum("|" in name for name in labels.names) > 1
        ),
    }
    shown = "".join(note for note, applies in notes.items() if applies)
    return f"{len(labels.names)} classes: {', '.join(listed[:SHOWN])}{shown}"


def _declared(data: Dataset, column: str) -> list[str]:
    """Return the class names that the data set declares, if any."""
    feature = data.features[column]
    feature = getattr(feature, "feature", feature)  # of a list
    return list(feature.names) if isinstance(feature, ClassLabel) else []


def _guess(texts: Sequence[Hashable]) -> str:
    if any(isinstance(text, tuple) for text in texts):
        return MULTI
    numbers = np.array([_number(text) for text in texts])
    is_score = np.isfinite(numbers).all() and (numbers != np.round(numbers)).any()
    return REGRESSION if is_score else SINGLE


def _number(value: Any) -> float:
    """Read a number, also with a decimal comma: 3,5, but not 1,234, which may be 1234."""
    try:
        return float(re.sub(r",(?!\d{3}\s*$)", ".", value) if isinstance(value, str) else value)
    except (TypeError, ValueError):
        return float("nan")
