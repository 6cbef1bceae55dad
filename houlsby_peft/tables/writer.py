"""`TableWriter`: writes a table with predictions in parts."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import printable
from .content import WRITTEN, find_format
from .reader import Row, TableReader


# What a spreadsheet would run. As a label from an adapter's author, it gets an apostrophe.
_FORMULA = re.compile(r"[=+@-].*[(|!]", re.DOTALL)


class TableWriter:
    """Writes a table in parts, as a context. Until all is written, the file has the further
    extension .part.

    The columns of the table `like` come first, and the separator of .csv files is kept. Lists and
    objects become JSON text in the formats that have none. A spreadsheet, .xlsx, opens in Excel
    with all letters; so does a .csv file that has a byte order mark, as the table `like` may have.
    """

    def __init__(self, path: Path, like: TableReader, added: Iterable[str]) -> None:
        self.path, self.format = path, find_format(path, WRITTEN)
        self._added = list(added)
        self._columns = [*like.columns, *self._added]
        self._part = path.with_name(f"{path.name}.part")
        if self.format == ".xlsx":
            self._start_sheet()
            return
        encoding, separator = "utf-8", ","
        if self.format == like.format == ".csv":
            separator = like.separator
            if like.encoding == "utf-8-sig":  # by whose byte order mark Excel recognizes UTF-8
                encoding = like.encoding
        elif self.format == ".tsv":
            separator = "\t"
        self._file = self._part.open("w", encoding=encoding, newline="")
        if self.format != ".jsonl":
            self._writer = csv.writer(self._file, delimiter=separator, lineterminator="\n")
            self._writer.writerow(self._columns)

    def _start_sheet(self) -> None:
        from openpyxl import Workbook

        self._book = Workbook(write_only=True)
        self._sheet = self._book.create_sheet()
        self._sheet.append(self._columns)

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows, which have the columns of both tables."""
        for row in rows:
            if self.format == ".jsonl":
                self._file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
                continue
            if self.format == ".xlsx":
                self._sheet.append([self._sheet_cell(row.get(name)) for name in self._columns])
            else:
                self._writer.writerow([self._cell(name, row.get(name)) for name in self._columns])

    def _cell(self, name: str, value: Any) -> Any:
        value = _as_text(value)
        if name in self._added and _FORMULA.match(str(value)):
            return f"'{value}"
        return value

    def _sheet_cell(self, value: Any) -> Any:
        from openpyxl.cell import WriteOnlyCell

        value = _as_text(value)
        if not isinstance(value, str):
            return value
        cell = WriteOnlyCell(self._sheet, printable(value))
        cell.data_type = "s"  # a text, also if it begins like a formula
        return cell

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the file its name, if it is complete."""
        if self.format != ".xlsx":
            self._file.close()
        elif kind is None:
            self._book.save(self._part)
        if kind is None:
            self._part.replace(self.path)


def _as_text(value: Any) -> Any:
    """Return lists and objects as JSON."""
    if isinstance(value, (bool, list, dict)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return value
