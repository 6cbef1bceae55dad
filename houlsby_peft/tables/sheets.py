"""The cells of a spreadsheet, read by calamine after a look at its size."""

from __future__ import annotations

import io
import re
import zipfile
from typing import Any

from ..errors import AdapterError
from .table import Cells, Table


_MOST_CELLS = 50_000_000  # of a sheet, whose empty ones take memory as well
_CELL = re.compile(rb'<c r="([A-Z]{1,3})(\d{1,7})"')
_HIDDEN_ROW = re.compile(rb'<row [^>]*hidden="(?:1|true)"')


def read_sheet(table: Table, content: bytes) -> Cells:
    """Return the cells of the first sheet with a table as texts, the empty rows included."""
    from python_calamine import CalamineError, CalamineWorkbook

    _check_size(table, content)
    cells: Cells = []
    try:
        book = CalamineWorkbook.from_filelike(io.BytesIO(content))
        for name in book.sheet_names:
            sheet = book.get_sheet_by_name(name)
            cells = []
            for row in sheet.to_python(skip_empty_area=False):
                cells.append([_as_text(value) for value in row])
            if sum(map(any, cells)) > 1:
                break
    except CalamineError as error:
        raise AdapterError(f"{table.path} is no spreadsheet that can be read: {error}.") from error
    if len(book.sheet_names) > 1:
        table.notes.append(f"the sheet {name!r} is read, and no other")
    filled = 0
    for (top, left), (bottom, _) in sheet.merged_cell_ranges or ():
        for row_number in range(top + 1, min(bottom + 1, len(cells))):
            cells[row_number][left] = cells[top][left]
            filled += 1
    if filled:
        table.notes.append(f"{filled:,} cells below the first of merged ones have its value")
    widths = [len(list(filter(None, row))) for row in cells]
    for position, width in enumerate(widths):
        if 2 * width > max(widths):
            if any(widths[:position]):
                table.notes.append(f"the table begins in row {position + 1}, below a title")
            cells[:position] = [[]] * position
            break
    return cells


def _check_size(table: Table, content: bytes) -> None:
    """Refuse a workbook that would fill the memory, before it is read; note hidden rows."""
    if not zipfile.is_zipfile(io.BytesIO(content)):
        return
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if sum(member.file_size for member in archive.infolist()) > 2**30:
            raise AdapterError(f"{table.path} unpacks to more than 1 GB. Save it as .csv.")
        hidden = 0
        for name in archive.namelist():
            if not name.startswith("xl/worksheets/"):
                continue
            sheet = archive.read(name)
            hidden += len(_HIDDEN_ROW.findall(sheet))
            rows, columns = 1, 1
            for letters, number in _CELL.findall(sheet):
                rows = max(rows, int(number))
                column = 0
                for letter in letters:
                    column = 26 * column + letter - ord("A") + 1
                columns = max(columns, column)
            if rows * columns > _MOST_CELLS:
                raise AdapterError(
                    f"{table.path}: a sheet has {rows:,} rows and {columns:,} columns. Delete the "
                    "cells beyond the table, or save it as .csv."
                )
    if hidden:
        table.notes.append(f"{hidden:,} rows are hidden, as by a filter, and are read as well")


def _as_text(value: Any) -> str:
    """Return a cell as a .csv file would have it; whole numbers without a decimal point."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
