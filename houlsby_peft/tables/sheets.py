"""Spreadsheets: the rows of the first sheet with a table, as texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import AdapterError
from .content import open_content
from .separated import Record


class SheetFile:
    """The rows of a spreadsheet.

    Attributes:
        notes: Which sheet is read, if there are several.
    """

    def __init__(self, path: Path) -> None:
        from python_calamine import CalamineError, CalamineWorkbook

        self.notes: list[str] = []
        self._records: list[Record] = []
        try:
            with open_content(path) as file:
                book = CalamineWorkbook.from_filelike(file)
                for name in book.sheet_names:
                    rows = book.get_sheet_by_name(name).to_python(skip_empty_area=False)
                    self._records = self._without_title(list(_records_of(rows)))
                    if len(self._records) > 1:
                        break
        except CalamineError as error:
            raise AdapterError(f"{path} is no spreadsheet that can be read: {error}.") from error
        if len(book.sheet_names) > 1:
            self.notes.append(f"the sheet {name!r} is read, and no other")

    def _without_title(self, records: list[Record]) -> list[Record]:
        """Return the rows from the first one on that has as many cells as half of the columns."""
        width = max((_count(cells) for _, cells in records), default=0)
        for position, (number, cells) in enumerate(records):
            if 2 * _count(cells) > width:
                if position:
                    self.notes.append(f"the table begins in row {number}, below a title")
                return records[position:]
        return records

    def records(self) -> Iterator[Record]:
        """Yield the cells of each row that is not empty, with the number of the row."""
        yield from self._records


def _records_of(rows: Iterable[Sequence[Any]]) -> Iterator[Record]:
    for number, row in enumerate(rows, start=1):
        cells = list(map(_text_of, row))
        if any(cells):
            yield number, cells


def _count(cells: Sequence[str]) -> int:
    """Return the number of cells that are not empty."""
    return len(list(filter(None, cells)))


def _text_of(value: Any) -> str:
    """Return a cell as a .csv file would have it; whole numbers without a decimal point."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
