"""Writes a table, with columns that were added to it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import AdapterError, printable
from .content import suffix_of
from .table import Cell, Row, Table


WRITTEN = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".xlsx")
# What a spreadsheet would run. As a label from an adapter's author, it gets an apostrophe.
_FORMULA = re.compile(r"[=+@-].*[(|!]", re.DOTALL)
_DECIMAL = re.compile(r"-?\d+([.,])\d+")


def check_written(path: Path) -> str:
    """Return the format of a file to write; refuse one that is not in WRITTEN."""
    if suffix_of(path) not in WRITTEN or suffix_of(path) != path.suffix.lower():
        raise AdapterError(f"A table is written as {', '.join(WRITTEN)}; got {path.name}.")
    return suffix_of(path)


def defused(value: Any) -> Any:
    """Return a cell that a spreadsheet does not run: one that could be a command gets an
    apostrophe before it; a class such as -1 or +1 stays.
    """
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def write_table(path: Path, rows: Sequence[Row], like: Table, added: Sequence[str]) -> None:
    """Write rows with the columns of a table, and those that were added to them.

    Until all is written, the file has the further extension .part. The separator of .csv files is
    kept, with the decimal comma that may go with it. A text is written in UTF-8: with the byte
    order mark by which Excel recognizes it, unless the table was read without. Lists and objects
    become JSON text in the formats that have none. In a spreadsheet, no text is a formula, and what
    was read from a cell with a number, a date or a truth value is one again.
    """
    format_ = check_written(path)
    part = path.with_name(f"{path.name}.part")
    columns = list(dict.fromkeys([*like.columns, *added]))
    if format_ in (".jsonl", ".json"):
        lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows]
        begin, between, end = ("[", ",\n", "]\n") if format_ == ".json" else ("", "\n", "\n")
        part.write_text(f"{begin}{between.join(lines)}{end}", encoding="utf-8")
    elif format_ == ".parquet":
        import pyarrow as pa
        from pyarrow.parquet import write_table as write_parquet

        arrays = {name: pa.array([row.get(name) for row in rows]) for name in columns}
        write_parquet(pa.table(arrays), part)
    elif format_ == ".xlsx":
        _write_sheet(part, rows, columns)
    else:
        _write_separated(part, rows, columns, like, "\t" if format_ == ".tsv" else ",")
    part.replace(path)


def _write_separated(
    path: Path, rows: Sequence[Row], columns: Sequence[str], like: Table, separator: str
) -> None:
    """Write rows of separated values: a .csv file as the table's, if this is one."""
    import pandas as pd

    # A text in another encoding, such as cp1252, was Excel's as well.
    encoding = "utf-8" if like.encoding == "utf-8" else "utf-8-sig"
    if separator == "," and like.format == ".csv":
        separator = like.separator
    has_commas = separator == like.separator != "," and _has_decimal_commas(like)
    cells = []
    for row in rows:
        line = [_as_text(row.get(name)) for name in columns]
        for number in range(len(like.columns), len(line)):
            value = defused(line[number])
            is_decimal = has_commas and isinstance(value, float)
            line[number] = str(value).replace(".", ",") if is_decimal else value
        cells.append(line)
    frame = pd.DataFrame(cells, columns=columns, dtype=object)
    frame.to_csv(path, sep=separator, index=False, encoding=encoding, lineterminator="\n")


def _has_decimal_commas(table: Table) -> bool:
    """Return whether the numbers with decimals in a table all have a comma, and there are some."""
    points = set()
    for row in table.rows:
        for cell in row.values():
            if isinstance(cell, str) and (decimal := _DECIMAL.fullmatch(cell)):
                points.add(decimal[1])
    return points == {","}


def _write_sheet(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Write rows as .xlsx, in which a text that begins like a formula is a text."""
    from openpyxl import Workbook

    book = Workbook()
    sheet = book.active
    sheet.append(list(map(_as_cell, columns)))
    for row in rows:
        sheet.append([_as_cell(row.get(name)) for name in columns])
    for line in sheet.iter_rows():
        for cell in line:
            if cell.data_type == "f":
                cell.data_type = "s"
    book.save(path)


def _as_cell(value: Any) -> Any:
    """Return what a spreadsheet has of a value; nothing of an empty text."""
    if isinstance(value, Cell):
        return value.value
    if isinstance(value, bool):
        return value
    if getattr(value, "tzinfo", None) is not None:  # a time zone, which a spreadsheet has not
        value = str(value)
    value = _as_text(value)
    return (printable(value) or None) if isinstance(value, str) else value


def _as_text(value: Any) -> Any:
    """Return lists and objects as JSON."""
    if isinstance(value, (bool, list, dict)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return value
