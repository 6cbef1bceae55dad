"""`read_table`: a table in a file of any usual format, read by pandas, calamine and pyarrow.

Values of separated files and of spreadsheets are text, so that "NA" is not a missing value, and
"007" keeps its zeros.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import AdapterError, shortened
from .content import decode, read_content, suffix_of
from .header import name_columns
from .json_rows import rows_of_json
from .separated import read_separated
from .sheets import read_sheet
from .table import READ, SEPARATED, SHEETS, Table


OTHER_NAMES = {".ndjson": ".jsonl", ".jsonlines": ".jsonl", ".tab": ".tsv", ".pq": ".parquet"}
_SIGNATURES = {b"PAR1": ".parquet", b"\xd0\xcf\x11\xe0": ".xls"}
_SAMPLED = 200_000  # bytes by which a text is told


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
        name_columns(table, read_sheet(table, content), has_header)
    else:
        text, table.encoding = decode(path, content, encoding)
        tabs = {line.count("\t") for line in text.splitlines() if line}
        if table.format == ".txt" and len(tabs) == 1 and tabs != {0}:
            table.format = ".tsv"
        if table.format == ".txt":
            lines = text.removesuffix("\n").split("\n")
            table.rows = [{"text": line.rstrip("\r")} for line in lines]
            table.numbers = list(range(1, len(table.rows) + 1))
        elif table.format in SEPARATED:
            name_columns(table, read_separated(table, text), has_header)
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
