"""The labels of a text as people write them: several in one cell, in several spellings, with marks
for missing ones.

A `LabelForm` is found in the training examples and read alike in all splits.
"""

import ast
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from datasets import Dataset, List, Value

from data.data import columns_of, keep_rows
from data.label_reading import read_number
from run.edge import log


_SEPARATORS = ("|", ";", ",")
_MISSING = {"n/a", "na", "nan", "null", "none", "-", "--", "?"}
# Of the parts between separators, so many must be labels of their own in other rows.
_SHARE_ALONE = 2 / 3
_SHARE_NUMBERS = 0.8


@dataclass(frozen=True)
class LabelForm:
    """How a cell holds the labels of a text.

    Attributes:
        column: The column of the labels.
        separator: What separates several labels. None: nothing does.
        are_lists: Whether some cells are lists written as text, such as `['a', 'b']`.
        flags: The classes for which each cell has a list of 0 and 1. Empty: it has none.
    """

    column: str
    separator: str | None = None
    are_lists: bool = False
    flags: tuple[str, ...] = ()

    def read(self, data: Dataset) -> Dataset:
        """Return the data with lists of labels in the column, unless a cell has one label only."""
        is_plain = not (self.separator or self.are_lists or self.flags)
        if is_plain or self.column not in data.column_names:
            return data
        lists = [self._read_cell(value) for value in data[self.column]]
        data = data.remove_columns(self.column)
        return data.add_column(self.column, lists, feature=List(Value("string")))

    def _read_cell(self, value: Any) -> list[str]:
        items = read_list(value)
        if items is None:
            return self._split("" if value is None else str(value))
        if not self.flags:
            return [str(item) for item in items]
        return list(compress(self.flags, items))

    def _split(self, text: str) -> list[str]:
        if self.separator is not None:
            return _parts(text, self.separator)
        label = text.strip()
        return [label] if label else []


def find_label_form(
    data: Dataset,
    column: str,
    separator: str | None,
    flag_names: Sequence[str] | None,
    known_labels: Iterable[str] = (),
) -> LabelForm:
    """Return how the cells of a column hold labels, and log what is not plain.

    Args:
        data: The training examples, or those to score.
        column: The column of the labels.
        separator: What separates labels, if the user says so.
        flag_names: The names of classes for lists of 0 and 1, if the user gives them.
        known_labels: The labels of a trained adapter.
    """
    if separator:
        return LabelForm(column, separator)
    values = [value for value in data[column] if value not in (None, "")]
    lists = list(map(read_list, values))
    if _are_flags(lists):
        names = tuple(flag_names or _number_classes(lists))
        log(f"labels: {column!r} has 0 or 1 for each of {', '.join(names)}; see --class_names")
        return LabelForm(column, are_lists=True, flags=names)
    for value, items in zip(values, lists, strict=True):
        if items is not None and isinstance(value, str):
            log(f"labels: {column!r} has lists of labels, such as {value}")
            return LabelForm(column, are_lists=True)
    separator = _find_separator(values, set(known_labels))
    if separator is not None:
        log(
            f"labels: {column!r} has several labels in one cell, separated by {separator!r}; if "
            "these are single labels, replace this character"
        )
    return LabelForm(column, separator)


def _number_classes(lists: Sequence[list[Any] | None]) -> list[str]:
    """Return names for the flags of a list."""
    return [f"class_{number}" for number in range(len(lists[0] or ()))]


def read_list(value: Any) -> list[Any] | None:
    """Return a list, or what is one as text in Python or JSON; None for other values.

    Label Studio writes an object with one list: {"choices": ["a", "b"]}.
    """
    if isinstance(value, list):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if text[:1] + text[-1:] not in ("[]", "{}", "()"):
        return None
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
    if not lists:
        return False
    lengths, repeats = set(), False
    for items in lists:
        if items is None or not set(items) <= {0, 1}:
            return False
        lengths.add(len(items))
        repeats |= len(set(items)) < len(items)
    return repeats and len(lengths) == 1


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
        are_several = len(parts) > 1
        if are_several and len(parts & alone) >= _SHARE_ALONE * len(parts):
            return separator
    return None


def _parts(text: str, separator: str) -> list[str]:
    """Return the parts of a text that are not blank."""
    stripped = map(str.strip, text.split(separator))
    return [part for part in stripped if part]


def find_marks_for_missing(values: Iterable[Any]) -> set[str]:
    """Return the texts that stand for a missing number among labels that are numbers otherwise.

    These are marks such as "n/a". Among scores, which are not all whole, they are all other texts.
    """
    counts = Counter(str(value).strip() for value in values if value not in (None, ""))
    numbers, texts = [], set()
    for text in counts:
        number = read_number(text)
        if math.isnan(number):
            texts.add(text)
        else:
            numbers.append(number)
    if len(numbers) < 2:
        return set()
    if {text.casefold() for text in texts} <= _MISSING:
        return texts
    are_classes = all(number.is_integer() for number in numbers)
    rows_with_text = sum(counts[text] for text in texts)
    if are_classes or rows_with_text > (1 - _SHARE_NUMBERS) * counts.total():
        return set()
    return texts


def without_labels(data: Dataset, column: str, labels: set[str], name: str) -> Dataset:
    """Leave out the rows of the split `name` that have one of these labels, and log them."""
    if not labels or column not in data.column_names:
        return data
    rows = []
    for row, value in enumerate(data[column]):
        if str(value).strip() not in labels:
            rows.append(row)
    return keep_rows(data, rows, name, f"with a label that is no number ({', '.join(labels)})")


def find_spellings(labels: Iterable[str]) -> dict[str, str]:
    """Return the most frequent spelling of each label, where some differ in case and blanks."""
    spellings: dict[str, Counter[str]] = {}
    for label in labels:
        spellings.setdefault(same_but_spelling(label), Counter())[label] += 1
    return {key: counts.most_common(1)[0][0] for key, counts in spellings.items()}


def same_but_spelling(label: str) -> str:
    """Return what labels have in common that differ in case and blanks only."""
    return " ".join(label.casefold().split())


def with_one_spelling(data: Dataset, column: str, spellings: dict[str, str]) -> Dataset:
    """Return the data with one spelling of each label in a column of texts or of lists of texts."""
    if column not in data.column_names or "string" not in str(data.features[column]):
        return data

    def spell(value: Any) -> Any:
        if isinstance(value, list):
            return [spell(item) for item in value]
        text = "" if value is None else str(value)
        return spellings.get(same_but_spelling(text), value)

    values = [spell(value) for value in data[column]]
    feature = data.features[column]
    return data.remove_columns(column).add_column(column, values, feature=feature)


def with_names(data: Dataset, column: str) -> str:
    """Return the column with the names of numbered labels, such as `label_text` beside `label`.

    Without one, return the column itself.
    """
    if not all(isinstance(value, int) for value in data[column]):
        return column
    usual = {f"{column.lower()}_{end}" for end in ("text", "name", "str")}
    for name in columns_of(data):
        if name.lower() in usual and _is_name_of(data[name], data[column]):
            return name
    return column


def _is_name_of(names: Sequence[Any], numbers: Sequence[int]) -> bool:
    """Return whether each number has a single name."""
    name_of: dict[int, str] = {}
    for number, name in zip(numbers, names, strict=True):
        if name_of.setdefault(number, str(name)) != str(name):
            return False
    return bool(name_of)
