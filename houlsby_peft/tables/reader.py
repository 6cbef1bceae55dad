"""`read_table`: a table in a file of any usual format, read by pandas, calamine and pyarrow.

Values of separated files and of spreadsheets are text, so that "NA" is not a missing value, and
"007" keeps its zeros.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import AdapterError, shortened
from .columns import USUAL_NAMES
from .content import decode, read_content, suffix_of
from .sheets import read_sheet
from .table import OTHER_NAMES, READ, SEPARATED, SHEETS, Cells, Row, Table


_SIGNATURES = {b"PAR1": ".parquet", b"\xd0\xcf\x11\xe0": ".xls", b"PK\x03\x04": ".xlsx"}
_SAMPLED = 1000  # lines by which the separator, the quotation and the header are told
_QUOTED = re.compile(r'(^|\t)"[^\t]*""[^\t]*"(\t|$)')
_NO_BLANK = re.compile(r"\S")
_FEW_VALUES = 20  # of a column of classes


def read_table(path: Path, encoding: str | None = None, has_header: bool | None = None) -> Table:
    """Read a table.

    Args:
        path: The file. Of a spreadsheet, the first sheet with content is read.
        encoding: The encoding of a text. Default: it is detected.
        has_header: Whether the first row has the names of the columns. Default: unless it has no
            usual name, and one of its fields is a class that stands further down as well.

    Raises:
        AdapterError: The file has no rows, or holds no table that can be read.
    """
    content = read_content(path)
    table = Table(path, _find_format(path, content))
    if table.format == ".parquet":
        _read_parquet(table, content)
    elif table.format in SHEETS:
        _name_columns(table, read_sheet(table, content), has_header)
    else:
        _read_text(table, content, encoding, has_header)
    if not table.rows:
        raise AdapterError(f"{path} has no rows that can be read as {table.format[1:]}.")
    if not table.columns:
        table.columns = list(dict.fromkeys(name for row in table.rows for name in row))
        table.numbers = table.numbers or list(range(1, len(table.rows) + 1))
    return table


def _find_format(path: Path, content: bytes) -> str:
    """Return the format of a file by its first bytes, as programs export spreadsheets under any
    name, or else by its extension.
    """
    suffix = suffix_of(path)
    suffix = OTHER_NAMES.get(suffix, suffix)
    if suffix not in READ:
        raise AdapterError(
            f"A table must be a file that ends in {', '.join(READ)}; got {path}. Of a file with a "
            "word per line, make a .txt with a text per line; houlsby-peft evaluate reads it as is."
        )
    for signature, format_ in _SIGNATURES.items():
        if content.startswith(signature):
            return format_
    if suffix in SHEETS and content.lstrip()[:1] == b"<":
        raise AdapterError(f"{path} is a page in HTML. Open it, and save it as .xlsx.")
    return ".csv" if suffix in SHEETS else suffix


def _read_parquet(table: Table, content: bytes) -> None:
    """Read the rows of a Parquet file, which are counted from 0 on."""
    from pyarrow import ArrowException, BufferReader
    from pyarrow.parquet import read_table as read_parquet

    try:
        table.rows = read_parquet(BufferReader(content)).to_pylist()
    except (ArrowException, OSError) as error:
        raise AdapterError(f"{table.path} is damaged: {shortened(str(error))}") from error
    table.numbers = list(range(len(table.rows)))


def _read_text(table: Table, content: bytes, encoding: str | None, has_header: bool | None) -> None:
    """Read a file of separated values, JSON, or a text per line."""
    text, table.encoding = decode(table.path, content, encoding)
    tabs = {line.count("\t") for line in text.splitlines() if line}
    if table.format == ".txt" and len(tabs) == 1 and tabs != {0}:
        table.format = ".tsv"
    if table.format in SEPARATED:
        _name_columns(table, _read_separated(table, text), has_header)
    elif table.format == ".txt":
        lines = text.removesuffix("\n").split("\n")
        table.rows = [{"text": line.rstrip("\r")} for line in lines]
    else:
        try:
            table.rows = _read_json(text, are_lines=table.format == ".jsonl")
        except (ValueError, TypeError, RecursionError) as error:
            raise AdapterError(f"{table.path}: {shortened(str(error))}.") from error


def _read_separated(table: Table, text: str) -> Cells:
    """Return the fields of each line, of empty ones as well."""
    import pandas as pd

    text = re.sub(r"^sep=.\r?\n", "", text, count=1)  # which tells Excel the separator
    lines = list(filter(None, re.split(r"\r\n?|\n", text, maxsplit=_SAMPLED)[:_SAMPLED]))
    table.separator = _find_separator(lines, SEPARATED[table.format])
    names = lines[0].split(table.separator)[1:] if lines else []
    options: dict[str, Any] = {
        "sep": table.separator,
        "header": None,
        "dtype": object,
        "na_filter": False,
        "skip_blank_lines": False,
        # As in "id, text, label".
        "skipinitialspace": bool(names) and all(name.startswith(" ") for name in names),
        "quoting": csv.QUOTE_MINIMAL if _has_quotes(lines, table.separator) else csv.QUOTE_NONE,
    }
    try:
        try:
            frame = pd.read_csv(io.StringIO(text), **options)
        except pd.errors.ParserError:
            if '\\"' not in text:
                raise
            frame = pd.read_csv(io.StringIO(text), **options, escapechar="\\", doublequote=False)
    except pd.errors.EmptyDataError:
        return []
    except pd.errors.ParserError as error:
        reason = str(error).strip().removeprefix("Error tokenizing data. C error: ")
        # pandas counts these rows from 0 on.
        reason = re.sub(r"(?<=at row )\d+", lambda row: str(int(row[0]) + 1), reason)
        raise AdapterError(
            f"{table.path}: {shortened(reason)}. Put a field that holds {table.separator!r} or "
            "quotation marks between quotation marks, and write those inside it twice."
        ) from error
    cells: Cells = frame.to_numpy().tolist()
    for number, fields in enumerate(cells, start=1):
        lines = table.separator.join(fields).split("\n")
        widths = {line.count(table.separator) + 1 for line in lines}
        if len(lines) > 1 and widths == {len(fields)} != {1}:  # as after a lone quotation mark
            table.notes.append(
                f"row {number} is {len(lines)} lines, as quotation marks enclose them. If they are "
                "several rows, write each quotation mark twice"
            )
    return cells


def _find_separator(lines: Sequence[str], usual: str) -> str:
    """Return what divides most lines into as many fields as the first; of equals, the usual one."""
    plain = re.sub(r'"(?:[^"]|"")*"', "", "\n".join(lines)).split("\n")
    shares: dict[str, float] = {}
    for separator in (usual, ",", ";", "\t", "|"):
        counts = [line.count(separator) for line in plain]
        if counts[0]:
            shares.setdefault(separator, counts.count(counts[0]) / len(counts))
    return max(shares, key=shares.__getitem__, default=usual)


def _has_quotes(lines: Sequence[str], separator: str) -> bool:
    """Return whether quotation marks quote fields.

    In many tables that are separated by tabs, as in GLUE's own, they are part of the text.
    """
    if separator != "\t" or lines[0].startswith('"'):
        return True
    tabs = lines[0].count("\t")
    return any(line.count("\t") != tabs or _QUOTED.search(line.rstrip()) for line in lines)


def _read_json(text: str, are_lines: bool) -> list[Row]:
    """Return the objects in a JSON text: one after the other, a list, an object with one such list
    (`{"data": [...]}`), or an object of columns, as pandas writes it.

    Several lists of objects are splits: their rows have the list's name in the column `split`. A
    pair of a text and a label is an object as well. An object of objects holds rows if these have
    usual names, and else columns.
    """
    # pandas writes NaN, which is no JSON, for a missing value.
    decoder = json.JSONDecoder(parse_constant=lambda name: None)
    values, position = [], 0
    while begin := _NO_BLANK.search(text, position):
        try:
            value, position = decoder.raw_decode(text, begin.start())
        except json.JSONDecodeError as error:
            raise ValueError(f"line {error.lineno}: {error.msg}") from error
        values.append(value)
    if len(values) == 1 and isinstance(values[0], list):
        [values] = values
    elif len(values) == 1 and isinstance(values[0], dict) and not are_lines:
        values = _rows_of_object(values[0])
    return list(map(_as_object, values))


def _rows_of_object(content: Row) -> list[Any]:
    """Return the rows in the lists of an object; if it has other values, it is a row itself."""
    if "columns" in content and "data" in content:
        return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
    lists = {name: rows for name, value in content.items() if (rows := _rows_in(value))}
    if len(lists) == 1:
        [rows] = lists.values()
        return rows
    if lists.keys() == content.keys():
        return [{**_as_object(row), "split": name} for name in lists for row in lists[name]]
    if all(isinstance(row, dict) and USUAL_NAMES & row.keys() for row in content.values()):
        return list(content.values())
    columns = []
    for value in content.values():
        if not isinstance(value, (list, dict)):
            return [content]
        columns.append(list(value.values()) if isinstance(value, dict) else value)
    return [dict(zip(content, row, strict=True)) for row in zip(*columns, strict=True)]


def _rows_in(value: Any) -> list[Any]:
    """Return the rows of a list of objects, or of pairs of a text and a label, without null; none
    of other values.
    """
    rows = [row for row in value if row is not None] if isinstance(value, list) else []
    return rows if all(isinstance(row, dict) or _is_pair(row) for row in rows) else []


def _is_pair(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 2 and isinstance(row[0], str)


def _as_object(row: Any) -> Row:
    """Return a pair as an object; spaCy's pairs have one with `entities` in place of a label."""
    if isinstance(row, dict):
        return row
    if not _is_pair(row):
        raise ValueError(f"must be a JSON object, got {row}")
    text, label = row
    return {"text": text, **label} if isinstance(label, dict) else {"text": text, "label": label}


def _name_columns(table: Table, cells: Cells, has_header: bool | None) -> None:
    """Give the fields the names of the header; without one, they are called column_1 and so on.

    Of columns with one name, the later ones get a number.
    """
    numbered = [(number, row) for number, row in enumerate(cells, start=1) if any(row)]
    if not numbered:
        return
    header = numbered[0][1]
    if has_header is None and _is_data(header, [row for _, row in numbered[1:_SAMPLED]]):
        has_header = False
        table.notes.append(
            f"no header: the first row is {', '.join(map(repr, header))[:100]}. If these are the "
            "names of the columns, give --no_header false"
        )
    if has_header is False:
        header = [f"column_{position}" for position in range(1, len(header) + 1)]
    else:
        numbered = _without_headers(table, numbered)
    names = _make_unique([cell.strip() for cell in header])
    # A spreadsheet adds empty columns; a single one without a name is a data frame's index.
    is_index = names.count("") == 1
    table.columns = [name for name in names if name or is_index]
    for number, row in numbered:
        by_name = dict(zip(names, row, strict=True))
        table.numbers.append(number)
        table.rows.append({name: by_name[name] for name in table.columns})


def _make_unique(names: Sequence[str]) -> list[str]:
    """Return names with a number behind those that stand earlier as well, if they are not empty."""
    counts: Counter[str] = Counter()
    unique = []
    for name in names:
        counts[name] += 1
        unique.append(f"{name}_{counts[name]}" if name and counts[name] > 1 else name)
    return unique


def _is_data(first: Sequence[str], rows: Cells) -> bool:
    """Return whether the first row has no usual name, and a class that stands below it as well."""
    if len(rows) < 3 or {cell.strip().lower() for cell in first} & USUAL_NAMES:
        return False
    for cell, *values in zip(first, *rows, strict=True):
        if cell.strip() and cell in values and len({*values}) <= min(_FEW_VALUES, len(values) / 2):
            return True
    return False


def _without_headers(
    table: Table, numbered: list[tuple[int, list[str]]]
) -> list[tuple[int, list[str]]]:
    """Return the rows below the header, without those in which it stands again, as in files that
    were joined, and without the two below it in which Qualtrics has the questions and their ids.
    """
    header = numbered[0][1]
    rows = [(number, row) for number, row in numbered if row != header]
    repeated = len(numbered) - len(rows) - 1
    if repeated:
        table.notes.append(f"rows that repeat the header are left out: {repeated:,}")
    if len(rows) > 1 and any(cell.startswith('{"ImportId"') for cell in rows[1][1]):
        table.notes.append("the rows below the header with questions and ids are left out")
        rows = rows[2:]
    return rows
