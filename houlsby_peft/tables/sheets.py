"""The cells of a spreadsheet, read by calamine after a look at its size."""

from __future__ import annotations

import io
import re
import zipfile
from typing import Any

from ..errors import AdapterError
from .table import Cell, Cells, Table


_MOST_CELLS = 50_000_000  # of a sheet, whose empty ones take memory as well
_MOST_UNPACKED = 2**30
# Of .xlsx, a cell with its place; of .ods, a row and a cell that is not empty or is repeated.
_XLSX_CELL = re.compile(rb'<c r="([A-Z]{1,3})(\d{1,7})"')
_ODS_PART = re.compile(rb"<table:table-(row|cell)\b([^>]*)>")
_ODS_REPEATED = re.compile(rb'number-(?:rows|columns)-repeated="(\d{1,9})"')
_HIDDEN_ROW = re.compile(rb'<row [^>]*hidden="(?:1|true)"')


def read_sheet(table: Table, content: bytes) -> Cells:
    """Return the cells of the first sheet with a table as texts, the empty rows included."""
    from python_calamine import CalamineError, CalamineWorkbook

    try:
        _check_size(table, content)
        book = CalamineWorkbook.from_filelike(io.BytesIO(content))
        for name in book.sheet_names:
            sheet = book.get_sheet_by_name(name)
            cells: Cells = []
            for row in sheet.to_python(skip_empty_area=False):
                cells.append(list(map(_as_text, row)))
            if sum(map(any, cells)) > 1:
                break
    except (CalamineError, zipfile.BadZipFile) as error:
        raise AdapterError(f"{table.path} is no spreadsheet that can be read: {error}.") from error
    if len(book.sheet_names) > 1:
        table.notes.append(f"the sheet {name!r} is read, and no other")
    for (top, left), (bottom, _) in sheet.merged_cell_ranges or ():
        for row_number in range(top + 1, min(bottom + 1, len(cells))):
            cells[row_number][left] = cells[top][left]
    if sheet.merged_cell_ranges:
        table.notes.append("merged cells have their value in each row")
    widths = [sum(map(bool, row)) for row in cells]
    widest = max(widths, default=0)
    first = [2 * width > widest for width in widths].index(True) if widest else 0
    if any(widths[:first]):
        table.notes.append(f"the table begins in row {first + 1}, below a title")
    return [[]] * first + cells[first:]


def _check_size(table: Table, content: bytes) -> None:
    """Refuse a workbook that would fill the memory, before it is read; note hidden rows."""
    if table.format == ".xls":  # which has at most 65,536 rows and 256 columns
        return
    hidden = 0
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if sum(member.file_size for member in archive.infolist()) > _MOST_UNPACKED:
            raise AdapterError(f"{table.path} unpacks to more than 1 GB. Save it as .csv.")
        for name in archive.namelist():
            if name.startswith("xl/worksheets/"):
                sheet = archive.read(name)
                hidden += len(_HIDDEN_ROW.findall(sheet))
                rows, columns = _size_of_xlsx(sheet)
            elif name == "content.xml":
                rows, columns = _size_of_ods(archive.read(name))
            else:
                continue
            if rows * columns > _MOST_CELLS:
                raise AdapterError(
                    f"{table.path}: a sheet has {rows:,} rows and {columns:,} columns. Delete the "
                    "cells beyond the table, or save it as .csv."
                )
    if hidden:
        table.notes.append(f"{hidden:,} rows are hidden, as by a filter, and are read as well")


def _size_of_xlsx(sheet: bytes) -> tuple[int, int]:
    """Return the row and the column of the last cells in a sheet, from 1 on."""
    rows, columns = 1, 1
    for letters, number in _XLSX_CELL.findall(sheet):
        column = 0
        for letter in letters:
            column = 26 * column + letter - ord("A") + 1
        rows, columns = max(rows, int(number)), max(columns, column)
    return rows, columns


def _size_of_ods(sheets: bytes) -> tuple[int, int]:
    """Return the row and the column of the last cells with content in any sheet, from 1 on."""
    rows, columns, row, column = 1, 1, 0, 0
    for kind, attributes in _ODS_PART.findall(sheets):
        repeated = _ODS_REPEATED.search(attributes)
        count = int(repeated[1]) if repeated else 1
        if kind == b"row":
            row, column = row + count, 0
        else:
            column += count
            if not attributes.endswith(b"/"):  # it has content
                rows, columns = max(rows, row), max(columns, column)
    return rows, columns


def _as_text(value: Any) -> str:
    """Return a cell as a .csv file would have it."""
    return value if isinstance(value, str) else Cell(value)
