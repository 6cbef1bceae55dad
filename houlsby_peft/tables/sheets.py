"""Spreadsheets: the rows of the first sheet with content, as texts."""

from __future__ import annotations

from collections.abc import Iterator
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
        self._rows: list[list[Any]] = []
        try:
            with open_content(path) as file:
                book = CalamineWorkbook.from_filelike(file)
                for name in book.sheet_names:
                    rows = book.get_sheet_by_name(name).to_python(skip_empty_area=False)
                    if rows:
                        self._rows = rows
                        if len(book.sheet_names) > 1:
                            self.notes.append(f"the sheet {name!r} is read, and no other")
                        break
        except CalamineError as error:
            raise AdapterError(f"{path} is no spreadsheet that can be read: {error}.") from error

    def records(self) -> Iterator[Record]:
        """Yield the cells of each row that is not empty, with the number of the row."""
        for number, row in enumerate(self._rows, start=1):
            cells = [_text_of(value) for value in row]
            if any(cells):
                yield number, cells


def _text_of(value: Any) -> str:
    """Return a cell as a .csv file would have it; whole numbers without a decimal point."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
