"""`TableReader`: a table in a file, read row by row.

A table may have more rows than fit into memory. It is read twice: once to check it and to count its
rows, which takes seconds for a million, and once for its content.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import AdapterError
from .content import SPREADSHEETS, find_encoding, find_format, open_content
from .fields import NamedFields
from .json_files import read_json, read_json_lines
from .separated import SeparatedFile
from .sheets import SheetFile


Row = dict[str, Any]

_SEPARATORS = {".csv": ",", ".tsv": "\t"}


class TableReader:
    """A table in a file, checked from the first row to the last.

    Values of .csv and .tsv files and of spreadsheets are text, so that "NA" is not a missing value,
    and "007" keeps its zeros. Of a spreadsheet, the first sheet with content is read. A compressed
    file is read as what is inside.

    Args:
        path: The file. Its content or else its extension gives the format, one of FORMATS.
        encoding: Its encoding. Default: as `find_encoding` returns it.
        has_header: Whether the first row of separated values or of a sheet has the names of the
            columns. Default: detected; see `NamedFields`.

    Attributes:
        columns: The names of the columns. Several columns without a name are left out.
        count: The number of rows.
        separator: Of separated values: the one of , ; tab | that divides most lines into as many
            fields as the first.
        unit: What the numbers of `rows` count: "line" or "row".
        notes: What the user should know of how the table was read.

    Raises:
        AdapterError: The table has no rows, or one that cannot be read; the message names its line.
    """

    def __init__(
        self, path: Path, encoding: str | None = None, has_header: bool | None = None
    ) -> None:
        self.path, self.format = path, find_format(path)
        self.encoding, self.separator, self.unit = "utf-8", ",", "row"
        self.notes: list[str] = []
        self._fields: NamedFields | None = None
        if self.format in (*_SEPARATORS, ".jsonl", ".json"):
            self.encoding = encoding or find_encoding(path)
        if self.format in (*_SEPARATORS, ".jsonl"):
            self.unit = "line"
        if self.format in _SEPARATORS:
            file = SeparatedFile(path, self.encoding, _SEPARATORS[self.format])
            self.separator = file.separator
            self._fields = NamedFields(file, path, self.unit, has_header)
        elif self.format in SPREADSHEETS:
            self._fields = NamedFields(SheetFile(path), path, self.unit, has_header)
        if self._fields is not None:
            self.notes = self._fields.notes
        self._count_rows()

    def _count_rows(self) -> None:
        """Read all rows, count them, and find their columns."""
        self.count = 0
        self._columns_without_text: set[str] = set()
        columns: dict[str, None] = {}
        for _, row in self.rows():
            self.count += 1
            columns |= dict.fromkeys(row)
            for name, value in row.items():
                if isinstance(value, (list, dict, bytes)):
                    self._columns_without_text.add(name)
        self.columns = list(columns)
        if not self.count:
            raise AdapterError(f"{self.path} cannot be read as {self.format[1:]}: it has no rows.")

    def check_texts(self, columns: Sequence[str]) -> None:
        """Refuse columns that hold neither texts nor numbers and the like, which can be read as
        texts.
        """
        for column in columns:
            if column in self._columns_without_text:
                raise AdapterError(
                    f"The column {column!r} of {self.path} must hold text in each row."
                )

    def parts(self, size: int) -> Iterator[list[Row]]:
        """Yield the rows, so many at a time."""
        rows = (row for _, row in self.rows())
        while part := list(islice(rows, size)):
            yield part

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Yield each row with the number of the line on which it begins.

        Rows of spreadsheets have the sheet's own numbers, those of .json files count from 1, and
        those of Parquet from 0.
        """
        if self._fields is not None:
            yield from self._fields.rows()
        elif self.format == ".jsonl":
            yield from read_json_lines(self.path, self.encoding)
        elif self.format == ".json":
            yield from read_json(self.path, self.encoding)
        else:
            yield from self._read_parquet()

    def _read_parquet(self) -> Iterator[tuple[int, Row]]:
        from pyarrow.parquet import ParquetFile

        number = 0
        with open_content(self.path) as file:
            for batch in ParquetFile(file).iter_batches():
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
