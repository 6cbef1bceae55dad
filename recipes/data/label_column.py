"""The labels of a data set as its files have them: in which columns, and how a cell is read.

A label is a text: the name of a class, or a number. With several classes per row, it is a tuple of
texts. How a column is read is found in the training examples, and is alike in all splits.
"""

import ast
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from typing import Any

from datasets import ClassLabel, Dataset

from data.data import columns_of, keep_rows, list_columns, locate, locate_first, rows_of
from data.exports import suggest_table
from houlsby_peft.tables import LABEL_COLUMNS, match_column
from run.edge import RecipeError, log


Label = str | tuple[str, ...]

FEW_VALUES = 20  # of a column that may be the label without a usual name
_OF_CHECKS = ("suggestion", "probability")  # the columns that the label check adds to a table
_SEPARATORS = ("|", ";", ",")
_MISSING = {"n/a", "na", "nan", "null", "none", "-", "--", "?"}
# Of the parts between separators, so many must be labels of their own in other rows.
_SHARE_ALONE = 2 / 3
_SHARE_NUMBERS = 0.8
_ITEM = r"""'[^']*'|"[^"]*"|-?\d+\.?\d*"""
# An array as NumPy prints it: "['a' 'b']".
_PRINTED_ARRAY = re.compile(rf"\[\s*(?:{_ITEM})(?:\s+(?:{_ITEM}))+\s*\]")
_TRUTH_VALUES = {"true": 1.0, "false": 0.0}
_PERCENTAGE = re.compile(r"\d+(?:[.,]\d+)?\s*%")


def find_label_columns(
    train: Dataset, named: Sequence[str] | None, text_columns: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the column of the label, or several 0/1 columns, as the command line names them.

    Otherwise it is, of the columns without texts, the first of LABEL_COLUMNS. Without those, it is
    the only column, or the only one with few values. Of numbers with names beside them, such as
    `label_text`, it is the column of the names.
    """
    columns = columns_of(train)
    if named:
        matches = [match_column(columns, name) for name in named]
        if None in matches:
            raise _no_label_column(train, repr(named[matches.index(None)]), columns)
        return tuple(filter(None, matches))
    candidates = [name for name in columns if name not in (*text_columns, *_OF_CHECKS)]
    if {"question", "context", "answers"} <= {*columns}:
        raise RecipeError("The rows are questions about a context: give --recipe squad.")
    if {"tokens", "tags"} <= {*columns} and "text" not in columns:
        raise RecipeError("The rows are tagged words: give --recipe token_classification.")
    matches = [match_column(candidates, name) for name in LABEL_COLUMNS]
    usual = list(dict.fromkeys(filter(None, matches)))
    if not usual and "spans" in columns:
        raise RecipeError("The texts have marked parts: give --recipe token_classification.")
    few = list(_count_few_values(train, candidates))
    for choice in (usual[:1], few, candidates):
        if len(choice) == 1:
            return (_with_names(train, choice[0]),)
    raise _no_label_column(train, "with a usual name for labels, such as label", candidates)


def _no_label_column(train: Dataset, description: str, candidates: Sequence[str]) -> RecipeError:
    counts = _count_few_values(train, candidates)
    guesses = " or ".join(f"{name} ({count} values)" for name, count in counts.items())
    return RecipeError(
        f"There is no column {description}, only {list_columns(train)}. Name the label "
        f"with --label_columns{'; it may be ' * bool(guesses)}{guesses}.{suggest_table(train)}"
    )


def _count_few_values(train: Dataset, columns: Sequence[str]) -> dict[str, int]:
    """Return the number of values of the columns that have few, as a column of classes has."""
    counts = {}
    values = train.select_columns([*columns])[:]  # at once, as each column takes time by itself
    for name in columns:
        count = len(set(map(str, values[name])) - {"", "None"})
        if 1 < count <= min(FEW_VALUES, len(train) / 2):
            counts[name] = count
    return counts


def _with_names(train: Dataset, column: str) -> str:
    """Return the column with one name for each of the numbers in a column, or the column itself."""
    numbers = train[column]
    if all(isinstance(value, int) for value in numbers):
        usual = {f"{column.lower()}_{end}" for end in ("text", "name", "str")}
        for name in columns_of(train):
            pairs = {*zip(numbers, map(str, train[name]), strict=True)}
            if name.lower() in usual and len(pairs) == len({*numbers}):
                return name
    return column


@dataclass(frozen=True)
class LabelColumn:
    """How the labels are written.

    Attributes:
        columns: The column of the labels, or one 0/1 column for each class.
        separator: What separates several labels in a cell. None: nothing does.
        are_lists: Whether some cells are lists, or lists written as text, such as `['a', 'b']`.
        flags: The classes for which each cell has a list of 0 and 1. Empty: it has none.
        missing: Texts that stand for no label.
        spellings: The spelling of a label, by what differs in case and blanks only.
    """

    columns: tuple[str, ...]
    separator: str | None = None
    are_lists: bool = False
    flags: tuple[str, ...] = ()
    missing: frozenset[str] = frozenset()
    spellings: Mapping[str, str] = field(default_factory=dict)

    def is_in(self, data: Dataset) -> bool:
        """Return whether any row of a test split has a label; -1 stands for none, as in GLUE."""
        for column in self.columns:
            if column in data.column_names and {*map(str, data[column])} - {"None", "", "-1"}:
                return True
        return False

    def read(self, data: Dataset, name: str) -> list[Label | None]:
        """Return the label of each row of the split `name`; None where there is none."""
        if len(self.columns) > 1:
            rows = enumerate(rows_of(data, self.columns))
            return [self._read_columns(data, name, row, values) for row, values in rows]
        (column,) = self.columns
        declared = declared_classes(data, column)
        labels: list[Label | None] = []
        for value in data[column]:
            items = self._items_of(value)
            if items is None:
                labels.append(self._read_class(value, declared))
            else:
                classes = [self._read_class(item, declared) for item in items]
                labels.append(None if None in classes else tuple(filter(None, classes)))
        return labels

    def _items_of(self, value: Any) -> list[Any] | None:
        """Return the labels in a cell; None if it has a single one."""
        items = read_list(value) if self.are_lists or isinstance(value, list) else None
        if items is not None:
            return list(compress(self.flags, items)) if self.flags else items
        text = "" if value is None else str(value)
        if self.are_lists:
            return [value] if text.strip() else []
        return None if self.separator is None else _parts(text, self.separator)

    def _read_class(self, value: Any, declared: Sequence[str]) -> str | None:
        """Return the name of a class, or a number as text; None if it is missing."""
        if value is None or value != value:  # NaN
            return None
        if declared and isinstance(value, int):
            if value < 0:
                return None
            if value < len(declared):
                return str(declared[value])
        if isinstance(value, float) and value.is_integer():
            return str(int(value))
        # "ö" may be one character or two, which look the same.
        text = unicodedata.normalize("NFC", str(value).strip())
        if not text or text in self.missing:
            return None
        return self.spellings.get(same_but_spelling(text), text)

    def _read_columns(
        self, data: Dataset, name: str, row: int, values: Sequence[Any]
    ) -> tuple[str, ...] | None:
        """Return the columns with a 1; -1 and no value stand for "not judged"."""
        if any(value in (None, "", "-1", -1) for value in values):
            return None
        numbers = list(map(_read_flag, values))
        if not {*numbers} <= {0, 1}:
            raise RecipeError(
                f"{name}: {', '.join(self.columns)} must be 0 or 1 in each of them; "
                f"{locate(data, row)} has {list(values)}. Correct it, or leave it out."
            )
        return tuple(compress(self.columns, numbers))

    def read_rows(self, data: Dataset, name: str) -> tuple[Dataset, list[Label]]:
        """Return the rows of the split `name` that have a label, and their labels; report the
        others.
        """
        labels = self.read(data, name)
        rows = [row for row, label in enumerate(labels) if label is not None]
        columns = ", ".join(self.columns)
        if not rows:
            raise RecipeError(
                f"{name} must have labels; {columns!r} is empty in all its {len(data):,} rows."
            )
        self._note_empty_cells(data, name, labels)
        reason = f"without a label in {columns!r}"
        if self.missing:
            reason += f" or with one that is no number ({', '.join(sorted(self.missing))})"
        kept = [label for label in labels if label is not None]
        return keep_rows(data, rows, name, reason), kept

    def _note_empty_cells(self, data: Dataset, name: str, labels: Sequence[Label | None]) -> None:
        """Say how many rows have no class, which may mean that nobody has labeled them."""
        if len(self.columns) > 1:
            return
        cells = data[self.columns[0]]
        empty = []
        for row, (cell, label) in enumerate(zip(cells, labels, strict=True)):
            if cell in (None, "") and label == ():
                empty.append(row)
        if empty:
            log(
                f"note: {len(empty):,} of the {len(data):,} rows of {name} have no label "
                f"({locate_first(data, empty)}) and count as texts of no class; if nobody has "
                "labeled them, leave them out"
            )

    def with_one_spelling(self, labels: Iterable[Label | None]) -> "LabelColumn":
        """Return a column in which labels have the most frequent spelling of those that differ in
        case and blanks only.
        """
        counts: dict[str, Counter[str]] = {}
        for label in labels:
            for name in classes_of(label or ()):
                counts.setdefault(same_but_spelling(name), Counter())[name] += 1
        spellings = {key: names.most_common(1)[0][0] for key, names in counts.items()}
        return replace(self, spellings=spellings)


def find_label_column(
    train: Dataset,
    columns: tuple[str, ...],
    separator: str | None = None,
    flag_names: Sequence[str] | None = None,
    problem_type: str | None = None,
    known_labels: Iterable[str] = (),
) -> LabelColumn:
    """Return how the labels of the training examples are written, and log what is not plain.

    Args:
        train: The training examples, or those to score.
        columns: The columns of the labels.
        separator: What separates labels, if the user says so.
        flag_names: The names of classes for lists of 0 and 1, if the user gives them.
        problem_type: The kind of the labels, if the user says so.
        known_labels: The labels of a trained adapter, which are split as far as they are known.
    """
    if len(columns) > 1 or separator:
        return LabelColumn(columns, separator)
    column = columns[0]
    values = [value for value in train[column] if value not in (None, "")]
    lists = list(map(read_list, values))
    are_lists = any(items is not None for items in lists)
    _refuse_other_forms(train, column, values, lists, problem_type)
    if _are_flags(lists):
        names = tuple(flag_names or (f"class_{number}" for number in range(len(lists[0] or ()))))
        log(f"labels: {column!r} has 0 or 1 for each of {', '.join(names)}; see --class_names")
        return LabelColumn(columns, are_lists=True, flags=names)
    if are_lists:
        if any(isinstance(value, str) for value in values):
            log(f"labels: {column!r} has lists of labels, such as {values[0]}")
        return LabelColumn(columns, are_lists=True)
    separator = _find_separator(values, set(known_labels))
    if separator is not None:
        log(
            f"labels: {column!r} has several labels in one cell, separated by {separator!r}; if "
            "these are single labels, replace this character"
        )
    return LabelColumn(columns, separator, missing=_find_marks_for_missing(values))


_REMEDIES = {
    "objects": "Take the labels out of them: df[{column!r}].str[{key!r}]",
    "a score for each class": "Take the highest: df[{column!r}].map(lambda c: max(c, key=c.get))",
    "probabilities": "Take the most probable: df[{column!r}].map(numpy.argmax)",
    "votes": "Take the most frequent: df[{column!r}].map(statistics.mode)",
    "percentages": "Write numbers: df[{column!r}].str.rstrip('%').astype(float)",
}


def _refuse_other_forms(
    train: Dataset,
    column: str,
    values: Sequence[Any],
    lists: Sequence[list[Any] | None],
    problem_type: str | None,
) -> None:
    """Refuse what would become classes that nobody means."""
    are_percentages = all(_PERCENTAGE.fullmatch(str(value).strip()) for value in values)
    for value, items in zip(values, lists, strict=True):
        form = _find_other_form(value, items)
        if are_percentages and problem_type is None:
            form = "percentages"
        if form is not None:
            where = locate(train, list(train[column]).index(value))
            key = next(iter(value)) if isinstance(value, dict) and value else "label"
            raise RecipeError(
                f"{column!r} must hold classes or numbers, {where} has {form}: {str(value)[:50]}. "
                f"{_REMEDIES[form].format(column=column, key=key)}."
            )


def _find_other_form(value: Any, items: list[Any] | None) -> str | None:
    """Return what a cell holds in place of labels; None if it holds some."""
    is_written = str(value).strip().startswith("{") and ":" in str(value)
    if items is None and isinstance(value, dict) and set(map(type, value.values())) == {float}:
        return "a score for each class"
    if items is None:
        return "objects" if is_written or isinstance(value, dict) else None
    if any(isinstance(item, (dict, list)) for item in items):
        return "objects"
    if {*items} <= {0, 1, "0", "1"}:
        return None
    if all(isinstance(item, float) and 0 <= item <= 1 for item in items):
        return "probabilities"
    return "votes" if len({*items}) < len(items) else None


def read_list(value: Any) -> list[Any] | None:
    """Return a list, or what is one as text in Python, NumPy or JSON; None for other values.

    Label Studio writes an object with one list: {"choices": ["a", "b"]}.
    """
    if isinstance(value, list):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if text[:1] + text[-1:] not in ("[]", "{}", "()"):
        return None
    if _PRINTED_ARRAY.fullmatch(text):
        text = f"[{', '.join(re.findall(_ITEM, text))}]"
    for parse in (json.loads, ast.literal_eval):
        try:
            items = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(items, dict) and len(items) == 1:
            (items,) = items.values()
        if isinstance(items, (list, tuple, set)):
            return list(items)
    return None


def _are_flags(lists: Sequence[list[Any] | None]) -> bool:
    """Return whether all are lists of 0 and 1 of one length, in which a number occurs again."""
    of_all = [items for items in lists if items is not None]
    if len(of_all) < len(lists) or len(set(map(len, of_all))) != 1:
        return False
    numbers = chain.from_iterable(of_all)
    are_bits = all(isinstance(item, (int, float)) and item in (0, 1) for item in numbers)
    return are_bits and any(len({*items}) < len(items) for items in of_all)


def _find_separator(values: Iterable[Any], labels: set[str]) -> str | None:
    """Return what separates several labels in some texts; None if nothing does.

    The parts must be labels by themselves: those given, or what is alone in other rows.
    """
    texts = {value.strip() for value in values if isinstance(value, str)}
    for separator in _SEPARATORS:
        alone = labels or {text for text in texts if separator not in text}
        parts: set[str] = set()
        for text in texts - labels:
            if separator in text:
                parts.update(_parts(text, separator))
        if len(parts) > 1 and len(parts & alone) >= _SHARE_ALONE * len(parts):
            return separator
    return None


def _parts(text: str, separator: str) -> list[str]:
    """Return the parts of a text that are not blank."""
    return [part for part in map(str.strip, text.split(separator)) if part]


def _find_marks_for_missing(values: Iterable[Any]) -> frozenset[str]:
    """Return the texts that stand for a missing number among labels that are numbers otherwise.

    These are marks such as "n/a". Among scores, which are not all whole, they are all other texts.
    """
    counts = Counter(str(value).strip() for value in values)
    texts = {text for text in counts if math.isnan(read_number(text))}
    numbers = [read_number(text) for text in counts.keys() - texts]
    are_marks = {text.casefold() for text in texts} <= _MISSING
    are_scores = not all(number.is_integer() for number in numbers)
    are_few = sum(counts[text] for text in texts) <= (1 - _SHARE_NUMBERS) * counts.total()
    if len(numbers) > 1 and (are_marks or (are_scores and are_few)):
        return frozenset(texts)
    return frozenset()


def same_but_spelling(label: str) -> str:
    """Return what labels have in common that differ in case and blanks only."""
    return " ".join(label.casefold().split())


def has_flags(data: Dataset, column: str) -> bool:
    """Return whether a column holds only 0, 1, -1 and nothing, as that of a class may."""
    if declared_classes(data, column):
        return False
    return all(value in (None, "") or _read_flag(value) in (0, 1, -1) for value in data[column])


def _read_flag(value: Any) -> float:
    """Return 0 or 1 for a truth value, and else the number."""
    return _TRUTH_VALUES.get(str(value).strip().lower(), read_number(value))


def declared_classes(data: Dataset, column: str) -> tuple[str, ...]:
    """Return the class names that the data set declares, if any."""
    type_ = data.features[column]
    type_ = getattr(type_, "feature", type_)  # of what a list holds
    return tuple(type_.names) if isinstance(type_, ClassLabel) else ()


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
