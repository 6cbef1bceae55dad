"""`read_table`: a table in a file of any usual format, read by pandas, calamine and pyarrow.

Values of separated files and of spreadsheets are text, so that "NA" is not a missing value, and
"007" keeps its zeros.
"""

from __future__ import annotations

import csv
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import AdapterError, shortened
from .columns import LABEL_COLUMNS, TEXT_COLUMNS
from .content import decode, read_content, suffix_of


Row = dict[str, Any]
Cells = list[list[str]]

SEPARATED, SHEETS = {".csv": ",", ".tsv": "\t"}, (".xlsx", ".xlsm", ".xls", ".ods")
# In the order in which one of several files of a name is preferred.
READ = (".parquet", *SEPARATED, ".jsonl", ".json", *SHEETS, ".txt")
OTHER_NAMES = {".ndjson": ".jsonl", ".jsonlines": ".jsonl", ".tab": ".tsv", ".pq": ".parquet"}
_SIGNATURES = {b"PAR1": ".parquet", b"\xd0\xcf\x11\xe0": ".xls"}
_MOST_CELLS = 50_000_000  # of a sheet, whose empty ones take memory as well
_CELL = re.compile(rb'<c r="([A-Z]{1,3})(\d{1,7})"')
_HIDDEN_ROW = re.compile(rb'<row [^>]*hidden="(?:1|true)"')
_QUOTED = re.compile(r'(^|\t)"[^\t]*""[^\t]*"(\t|$)')
_NO_BLANK = re.compile(r"\S")
_SAMPLED = 200_000  # characters by which the separator is found
_FEW_VALUES = 20  # of a column of classes
_OTHER_NAMES = ("id", "idx", "index", "date", "datum", "name", "answer", "split")
_USUAL_NAMES = {*sum(TEXT_COLUMNS, ()), *LABEL_COLUMNS, *_OTHER_NAMES}


@dataclass
class Table:
    """A table in a file.

    Attributes:
        path: The file.
        format: Its format as its usual extension, one of READ, by its content or else its name.
        columns: The names of the columns. Several columns without a name are left out.
        rows: The rows by the names of the columns.
        numbers: The number of each row: that of a spreadsheet, whose header is row 1, or, without
            a header, from 1 on.
        separator: What separates the values.
        encoding: The encoding of a text.
        notes: What the user should know of how the table was read.
    """

    path: Path
    format: str
    columns: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    separator: str = ","
    encoding: str = "utf-8"
    notes: list[str] = field(default_factory=list)

    def check_texts(self, columns: Sequence[str]) -> None:
        """Refuse columns of lists or objects, which cannot be read as texts."""
        for column in columns:
            if any(isinstance(row.get(column), (list, dict, bytes)) for row in self.rows):
                raise AdapterError(
                    f"The column {column!r} of {self.path} must hold text in each row."
                )


def read_table(path: Path, encoding: str | None = None, has_header: bool | None = None) -> Table:
    """Read a table.

    Args:
        path: The file. Of a spreadsheet, the first sheet with content is read.
        encoding: The encoding of a text. Default: as `find_encoding` returns it.
        has_header: Whether the first row has the names of the columns. Default: unless it has no
            usual name, and one of its fields is a value of that column again, such as a class, or a
            number over numbers.

    Raises:
        AdapterError: The file has no rows, or holds no table that can be read.
    """
    content = read_content(path)
    table = Table(path, _find_format(path, content))
    if table.format == ".parquet":
        from pyarrow import ArrowException, BufferReader
        from pyarrow.parquet import read_table as read_parquet

        try:
            table.rows = read_parquet(BufferReader(content)).to_pylist()
        except (ArrowException, OSError) as error:
            raise AdapterError(f"{path} is damaged: {shortened(str(error))}") from error
        table.numbers = list(range(len(table.rows)))
    elif table.format in SHEETS:
        _name_columns(table, _read_sheet(table, content), has_header)
    else:
        text, table.encoding = decode(path, content, encoding)
        if table.format == ".txt":
            table.rows = [{"text": line.rstrip("\r")} for line in text.split("\n")]
            table.numbers = list(range(1, len(table.rows) + 1))
        elif table.format in SEPARATED:
            _name_columns(table, _read_separated(table, text), has_header)
        else:
            try:
                table.rows = rows_of_json(text, are_lines=table.format == ".jsonl")
            except (ValueError, TypeError, RecursionError) as error:
                raise AdapterError(f"{path}: {shortened(str(error))}.") from error
            table.numbers = list(range(1, len(table.rows) + 1))
    if not table.rows:
        raise AdapterError(f"{path} cannot be read as {table.format[1:]}: it has no rows.")
    if not table.columns:
        table.columns = list(dict.fromkeys(name for row in table.rows for name in row))
    return table


def _find_format(path: Path, content: bytes) -> str:
    """Return the format of a file by its first bytes, as programs export spreadsheets under any
    name, or else by its extension.
    """
    suffix = suffix_of(path)
    suffix = OTHER_NAMES.get(suffix, suffix)
    for signature, format_ in _SIGNATURES.items():
        if content.startswith(signature):
            return format_
    if content.startswith(b"PK\x03\x04"):
        return suffix if suffix in SHEETS else ".xlsx"
    if suffix in SHEETS:
        if content.lstrip()[:1] == b"<":
            raise AdapterError(f"{path} is a page in HTML. Open it, and save it as .xlsx.")
        if not {*b",;\t|"} & {*content[:_SAMPLED]}:
            raise AdapterError(f"{path} is no spreadsheet that can be read.")
        return ".csv" if content.count(b"\t") < content.count(b"\n") else ".tsv"
    if suffix not in READ:
        raise AdapterError(f"A table must be a file that ends in {', '.join(READ)}; got {path}.")
    return suffix


def _read_separated(table: Table, text: str) -> Cells:
    """Return the fields of each line, of empty ones as well."""
    import pandas as pd

    lines = [line for line in text[:_SAMPLED].splitlines() if line]
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
    }
    if table.separator == "\t" and not _has_quotes(lines):
        options["quoting"] = csv.QUOTE_NONE
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
    _note_swallowed_rows(table, cells)
    return cells


def _find_separator(lines: Sequence[str], usual: str) -> str:
    """Return what divides most lines into as many fields as the first; of equals, the usual one."""
    plain = re.sub(r'"(?:[^"]|"")*"', "", "\n".join(lines)).splitlines()
    shares: dict[str, float] = {}
    for separator in (usual, ",", ";", "\t", "|"):
        counts = [line.count(separator) for line in plain]
        if counts and counts[0]:
            shares.setdefault(separator, counts.count(counts[0]) / len(counts))
    return max(shares, key=shares.__getitem__, default=usual)


def _has_quotes(lines: Sequence[str]) -> bool:
    """Return whether quotation marks quote fields of a table that is separated by tabs.

    In many such tables, as in GLUE's own, a quotation mark is part of the text.
    """
    if lines[:1] and lines[0].startswith('"'):
        return True
    return any(
        line.count("\t") != lines[0].count("\t") or _QUOTED.search(line.rstrip()) for line in lines
    )


def _note_swallowed_rows(table: Table, cells: Cells) -> None:
    """Note a field of several lines which look like rows, as after a lone quotation mark."""
    for number, fields in enumerate(cells, start=1):
        for position, value in enumerate(fields):
            separators = [line.count(table.separator) for line in value.split("\n")]
            separators[0] += position
            separators[-1] += len(fields) - 1 - position
            if len(separators) > 1 and len(fields) > 1 and {*separators} == {len(fields) - 1}:
                table.notes.append(
                    f"row {number} is {len(separators)} lines, as quotation marks enclose them. If "
                    "they are several rows, write each quotation mark twice"
                )


def _read_sheet(table: Table, content: bytes) -> Cells:
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


def _name_columns(table: Table, cells: Cells, has_header: bool | None) -> None:
    """Give the fields the names of the header, which may stand in the table again.

    Without a header, the columns are called column_1, column_2 and so on. Of columns with one name,
    the later ones get a number.
    """
    numbered = [(number, row) for number, row in enumerate(cells, start=1) if any(row)]
    if not numbered:
        return
    header = numbered[0][1]
    if has_header is None and _lacks_header([row for _, row in numbered[:1000]]):
        has_header = False
        table.notes.append(
            f"no header: the first row is {', '.join(map(repr, header))[:100]}. If these are the "
            "names of the columns, give --no_header false"
        )
    if has_header is False:
        columns = [f"column_{number + 1}" for number in range(len(header))]
    else:
        columns = _make_unique(table, [name.strip() for name in header])
        repeated = [number for number, row in numbered if row == header][1:]
        for number in repeated:
            table.notes.append(f"row {number} repeats the header and is left out")
        numbered = [(number, row) for number, row in numbered if row != header]
        # Qualtrics writes the questions and the identifiers of the columns below their names.
        if len(numbered) > 1 and any(cell.startswith('{"ImportId"') for cell in numbered[1][1]):
            table.notes.append("the rows below the header with questions and ids are left out")
            numbered = numbered[2:]
    for number, row in numbered:
        table.numbers.append(number)
        table.rows.append(dict(zip(columns, row, strict=True)))
        if columns.count("") > 1:
            del table.rows[-1][""]
    table.columns = list(table.rows[0]) if table.rows else columns


def _make_unique(table: Table, names: Sequence[str]) -> list[str]:
    counts: Counter[str] = Counter()
    columns, repeated = [], []
    for name in names:
        counts[name] += bool(name)
        column = name
        if counts[name] > 1:
            column = f"{name}_{counts[name]}"
            repeated.append(column)
        columns.append(column)
    if repeated:
        more = ", ..." * (len(repeated) > 5)
        table.notes.append(f"columns of one name are called {', '.join(repeated[:5])}{more}")
    return columns


def _lacks_header(records: Cells) -> bool:
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


def _read_values(text: str) -> list[Any]:
    """Return the JSON values in a text, one after the other, such as one per line."""
    decoder, values, position = json.JSONDecoder(), [], 0
    while begin := _NO_BLANK.search(text, position):
        position = begin.start()
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {error.lineno}: {error.msg}") from error
        values.append(value)
    return values


def rows_of_json(text: str, are_lines: bool) -> list[Row]:
    """Return the objects in a JSON text: one per line, a list, an object with one such list
    (`{"data": [...]}`), or an object of columns, as pandas writes it.

    Several lists of objects, or of pairs of a text and a label, are splits: their rows have the
    list's name in the column `split`.
    """
    content = _read_values(text)
    if len(content) == 1 and not are_lines:
        [content] = content
    if isinstance(content, dict) and content:
        names, values = list(content), list(content.values())
        lists = [name for name in names if _are_objects(content[name])]
        if len(lists) == 1 and "columns" not in names:
            content = content[lists[0]]
        elif len(lists) == len(names) and "columns" not in names:
            content = [{**_object(row), "split": name} for name in names for row in content[name]]
        elif {"columns", "data"} <= content.keys():
            content = [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
        elif all(isinstance(value, (list, dict)) for value in values):
            columns = [
                list(value.values()) if isinstance(value, dict) else value for value in values
            ]
            content = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        else:
            content = [content]
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], list):
        [content] = content  # a list on a line
    if not isinstance(content, list):
        raise ValueError("must hold a list of objects, such as [{...}, {...}]")
    return list(map(_object, content))


def _are_objects(value: Any) -> bool:
    """Return whether a value is a list of objects, or of pairs of a text and a label."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(row, dict) or _is_pair(row) for row in value)


def _is_pair(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 2 and isinstance(row[0], str)


def _object(row: Any) -> Row:
    """Return an object, or a pair of a text and its label as one; spaCy's pairs have an object with
    `entities`.
    """
    if isinstance(row, dict):
        return row
    if not _is_pair(row):
        raise ValueError(f"must be a JSON object, got {row}")
    text, label = row
    return {"text": text, **label} if isinstance(label, dict) else {"text": text, "label": label}
