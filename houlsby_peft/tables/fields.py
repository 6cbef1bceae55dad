"""The names of columns, for tables whose records are lists of fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import AdapterError
from .columns import LABEL_COLUMNS, TEXT_COLUMNS
from .separated import SeparatedFile
from .sheets import SheetFile


_SAMPLED = 1000  # records by which a missing header is recognized
_FEW_VALUES = 20  # of a column of classes
_OTHER_NAMES = ("id", "idx", "index", "date", "datum", "name", "answer", "text_a", "text_b")
_USUAL_NAMES = {*sum(TEXT_COLUMNS, ()), *LABEL_COLUMNS, *_OTHER_NAMES}


class NamedFields:
    """The rows of separated values or of a sheet, whose first record may be a header.

    Without a header, the columns are called column_1, column_2 and so on. A header that stands in
    the table again is left out. Of columns with one name, the later ones get a number.

    Args:
        file: What has the records.
        has_header: Whether the first record is a header. Default: unless it has no usual name of a
            column, and one of its fields is a value of that column again, such as a class, or a
            number over numbers.

    Attributes:
        columns: The names of the columns; "" for a column that is left out.
        notes: What the user should know of the header.
    """

    def __init__(
        self, file: SeparatedFile | SheetFile, path: Path, unit: str, has_header: bool | None
    ) -> None:
        self._file, self._path, self._unit = file, path, unit
        self.notes = list(file.notes)
        first_records = [fields for _, fields in islice(file.records(), _SAMPLED)]
        self._header = first_records[0] if first_records else []
        if has_header is None and _lacks_header(first_records):
            has_header = False
            self.notes.append(
                f"no header: the first row is {', '.join(map(repr, self._header))[:100]}. If these "
                "are the names of the columns, give --no_header false"
            )
        self._has_header = has_header is not False
        if self._has_header:
            self.columns = self._name_columns()
        else:
            self.columns = [f"column_{number + 1}" for number in range(len(self._header))]
        self._note_repeated_header()

    def _name_columns(self) -> list[str]:
        names = [name.strip() for name in self._header]
        columns: list[str] = []
        for name in names:
            number = 1
            column = name
            while name and column in columns:
                number += 1
                column = f"{name}_{number}"
            if column != name:
                self.notes.append(f"a second column {name!r} is called {column!r}")
            columns.append(column)
        return columns

    def _note_repeated_header(self) -> None:
        if not self._has_header:
            return
        numbers = [number for number, fields in self._file.records() if fields == self._header]
        for number in numbers[1:]:
            self.notes.append(f"{self._unit} {number} repeats the header and is left out")

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each row by the names of the columns, with the number of its line or row."""
        for number, fields in self._file.records():
            if self._has_header and fields == self._header:
                continue
            yield number, self._make_row(number, fields)

    def _make_row(self, number: int, fields: Sequence[str]) -> dict[str, Any]:
        if len(fields) != len(self.columns):
            separator = getattr(self._file, "separator", ",")
            raise AdapterError(
                f"{self._path}, {self._unit} {number}: must have {len(self.columns)} fields like "
                f"the header, got {len(fields)}; put quotation marks around a text that holds "
                f"{separator!r}."
            )
        row = dict(zip(self.columns, fields, strict=True))
        if self.columns.count("") > 1:
            del row[""]
        return row


def _lacks_header(records: Sequence[Sequence[str]]) -> bool:
    """Return whether the first record is data like the others."""
    if len(records) < 4:
        return False
    header, *rows = records
    if any(name.strip().lower() in _USUAL_NAMES for name in header):
        return False
    for name, *values in zip(header, *rows, strict=False):
        if not name.strip():
            continue
        is_class = name in values and len(set(values)) <= min(_FEW_VALUES, len(values) / 2)
        if is_class or (_is_number(name) and all(map(_is_number, values))):
            return True
    return False


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "."))
    except ValueError:
        return False
    return True
