"""Reads and writes tables in files row by row, and knows the usual names of text columns.

A table may have more rows than fit into memory. It is read twice: once to check it and to count its
rows, which takes seconds for a million, and once for its content. The recipes read their data with
it as well.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from .errors import AdapterError, shortened


Row = dict[str, Any]

# Usual names of text columns, in lower case. The first entry of which a table has all columns is
# used.
_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "context"),
    ("question", "sentence"),
)
_SINGLE_TEXTS = (
    *("message", "body", "sentence", "content", "review", "comment", "description", "tweet"),
    *("utterance", "document", "abstract", "headline", "title", "subject", "nachricht"),
    *("mitteilung", "beschreibung", "betreff", "texto", "mensaje", "comentario", "texte"),
    *("commentaire", "testo", "messaggio", "commento", "mensagem", "tekst", "bericht"),
)
TEXT_COLUMNS: tuple[tuple[str, ...], ...] = (
    ("text",),
    *_PAIRS,
    *((name,) for name in _SINGLE_TEXTS),
)
WRITTEN = (".csv", ".tsv", ".jsonl")
FORMATS = (*WRITTEN, ".parquet")
# What a spreadsheet would run. As a label from an adapter's author, it gets an apostrophe.
_FORMULA = re.compile(r"[=+@-].*[(|!]", re.DOTALL)
_QUOTED = re.compile(r'(^|\t)"[^\t]*""[^\t]*"(\t|$)')


def match_column(columns: Sequence[str], name: str) -> str | None:
    """Return the column of that name, or else the first whose name differs only in case and outer
    blanks, or None.
    """
    if name in columns:
        return name
    for column in columns:
        if column.strip().lower() == name.strip().lower():
            return column
    return None


def find_text_columns(
    columns: Sequence[str],
    named: Sequence[str] | None = None,
    count: int | None = None,
    recorded: Sequence[str] | None = None,
) -> list[str]:
    """Return the columns of a table that hold the texts, one or two for pairs, or `count`.

    They are those that the user has named or, if the table has all of them, those recorded of an
    adapter's training; otherwise they are found by their usual names.
    """
    if named:
        candidates: Sequence[Sequence[str]] = [named]
    elif recorded:
        candidates = [recorded, *TEXT_COLUMNS]
    else:
        candidates = TEXT_COLUMNS
    for names in candidates:
        matches = [match_column(columns, name) for name in names]
        has_right_number = named or count in (None, len(names))
        if has_right_number and None not in matches:
            return matches  # type: ignore[return-value]
    rule = "of a usual name, such as text or message"
    if named:
        rule = " and ".join(named)
    raise AdapterError(
        f"The text needs a column {rule}; the file has {', '.join(columns)}. Name it: "
        "--text-column."
    )


def check_number_of_texts(
    columns: Sequence[str], recorded: Sequence[str] | None, flag: str, adapter: str
) -> None:
    """Refuse to read single texts with an adapter that was trained on pairs, and the reverse;
    `flag` names columns.
    """
    if recorded is not None and len(columns) != len(recorded):
        kind = "pairs of texts" if len(recorded) == 2 else "single texts"
        names = " and ".join(shortened(repr(name)) for name in recorded)
        raise AdapterError(
            f"{adapter} must read {kind}, as it was trained on {names}; got {', '.join(columns)}. "
            f"See {flag}."
        )


def find_format(path: Path, formats: Sequence[str] = FORMATS) -> str:
    """Return the format of a file, one of those given, by its extension."""
    suffix = path.suffix.lower()
    if suffix not in formats:
        raise AdapterError(
            f"A table must be a file that ends in {', '.join(formats)}; got {path.name}."
        )
    return suffix


class TableReader:
    """A table in a file, checked from the first row to the last.

    Values of .csv and .tsv files are text, so that "NA" is not a missing value, and "007" keeps its
    zeros.

    Args:
        path: The file. Its extension gives the format: .csv, .tsv, .jsonl or .parquet.
        encoding: Its encoding. Default: as `find_encoding` returns it.

    Attributes:
        columns: The names of the columns. Of .csv and .tsv files, several columns without a name
            are left out.
        count: The number of rows.
        separator: Of .csv and .tsv: the one of , ; tab | that divides most lines into as many
            fields as the header.

    Raises:
        AdapterError: The table has no rows, or one that cannot be read; the message names its line.
    """

    def __init__(self, path: Path, encoding: str | None = None) -> None:
        self.path, self.format = path, find_format(path)
        self.encoding, self.separator = encoding or "utf-8", ","
        if self.format != ".parquet":
            self.encoding = encoding or find_encoding(path)
        if self.format in (".csv", ".tsv"):
            self._dialect = self._find_dialect()
            self.separator = self._dialect["delimiter"]
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
            raise AdapterError(f"{path} cannot be read as {self.format[1:]}: it has no rows.")

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
        """Yield each row with the number of the line on which it begins; of Parquet, with its own,
        from 0 on.
        """
        if self.format == ".parquet":
            yield from self._read_parquet()
            return
        # What is read, so that an error can name its line.
        self._line = 1
        read = self._read_json_lines if self.format == ".jsonl" else self._read_fields
        try:
            yield from read()
        except (csv.Error, ValueError) as error:
            raise AdapterError(
                f"{self.path}, line {self._line}: {shortened(str(error))}."
            ) from error

    def _read_parquet(self) -> Iterator[tuple[int, Row]]:
        from pyarrow.parquet import ParquetFile

        number = 0
        for batch in ParquetFile(self.path).iter_batches():
            for row in batch.to_pylist():
                yield number, row
                number += 1

    def _read_json_lines(self) -> Iterator[tuple[int, Row]]:
        with self.path.open(encoding=self.encoding, newline="\n") as file:
            for self._line, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                row = json.loads(text)
                if not isinstance(row, dict):
                    raise ValueError(f"must be a JSON object, got {row}")
                yield self._line, row

    def _read_fields(self) -> Iterator[tuple[int, Row]]:
        csv.field_size_limit(2**31 - 1)
        header: list[str] = []
        with self.path.open(encoding=self.encoding, newline="") as file:
            reader = csv.reader(file, strict=True, **self._dialect)
            for fields in reader:
                if not header:
                    header = [name.strip() for name in fields]
                    _check_header(header)
                elif fields:  # an empty line has none
                    yield self._line, self._make_row(header, fields)
                self._line = reader.line_num + 1

    def _make_row(self, header: Sequence[str], fields: Sequence[str]) -> Row:
        if len(fields) != len(header):
            raise ValueError(
                f"must have {len(header)} fields like the header, got {len(fields)}; put quotation "
                f"marks around a text that holds {self.separator!r}"
            )
        row = dict(zip(header, fields, strict=True))
        if header.count("") > 1:
            del row[""]
        return row

    def _find_dialect(self) -> dict[str, Any]:
        usual = "\t" if self.format == ".tsv" else ","
        with self.path.open(encoding=self.encoding, newline="") as file:
            lines = list(islice(file, 1000))
        # The usual separator comes first, because the first of equals is taken.
        separators = (usual, ",", ";", "\t", "|")
        separator = max(separators, key=lambda separator: _share_like_header(lines, separator))
        header: list[str] = []
        for fields in csv.reader(lines, delimiter=separator):
            if fields:
                header = fields
                break
        quoting = csv.QUOTE_MINIMAL
        if separator == usual == "\t" and not _has_quotes(lines, len(header)):
            quoting = csv.QUOTE_NONE
        # As in "id, text, label".
        begin_with_blanks = all(name.startswith(" ") for name in header[1:])
        return {
            "delimiter": separator,
            "quoting": quoting,
            "skipinitialspace": len(header) > 1 and begin_with_blanks,
        }


def _check_header(names: Sequence[str]) -> None:
    for name in names:
        if name and names.count(name) > 1:
            raise ValueError(f"names two columns {name!r}")


def _share_like_header(lines: Sequence[str], separator: str) -> float:
    """Return the share of lines that a separator divides into as many fields as the header."""
    counts = [len(fields) for fields in csv.reader(lines, delimiter=separator) if fields]
    if not counts or counts[0] == 1:
        return 0.0
    return counts.count(counts[0]) / len(counts)


def _has_quotes(lines: Sequence[str], columns: int) -> bool:
    """Return whether quotation marks quote fields of a table that is separated by tabs.

    In many such tables, as in GLUE's own, a quotation mark is part of the text.
    """
    if lines and lines[0].startswith('"'):
        return True
    for line in lines:
        if not line.strip("\r\n"):
            continue
        if line.count("\t") != columns - 1 or _QUOTED.search(line.rstrip()):
            return True
    return False


def find_encoding(path: Path) -> str:
    """Return the encoding of a text file: "utf-8", with a byte order mark "utf-8-sig" or "utf-16",
    or else "cp1252", that of Western Windows. A file that is UTF-8 for the most part, but not all
    of it, is refused.
    """
    lines_of_utf8 = 0
    lines_of_others = []
    with path.open("rb") as file:
        start = file.peek(3)[:3]
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        for number, line in enumerate(file, start=1):
            try:
                is_ascii = len(line.decode()) == len(line)
            except UnicodeDecodeError:
                lines_of_others.append(number)
            else:
                lines_of_utf8 += not is_ascii
    if 0 < len(lines_of_others) <= lines_of_utf8:
        raise AdapterError(
            f"{path}: line {lines_of_others[0]} is not UTF-8 like the rest. Correct this line."
        )
    if lines_of_others:
        return "cp1252"
    if start == codecs.BOM_UTF8:
        return "utf-8-sig"
    return "utf-8"


class TableWriter:
    """Writes a table in parts, as a context. Until all is written, the file has the further
    extension .part.

    The columns of the table `like` come first, and the separator of .csv files is kept. Lists and
    objects become JSON text in the formats that have none.
    """

    def __init__(self, path: Path, like: TableReader, added: Iterable[str]) -> None:
        self.path, self.format = path, find_format(path, WRITTEN)
        self._added = list(added)
        self._part = path.with_name(f"{path.name}.part")
        encoding, separator = "utf-8", ","
        if self.format == like.format == ".csv":
            separator = like.separator
            if like.encoding == "utf-8-sig":  # by whose byte order mark Excel recognizes UTF-8
                encoding = like.encoding
        elif self.format == ".tsv":
            separator = "\t"
        self._file = self._part.open("w", encoding=encoding, newline="")
        if self.format != ".jsonl":
            columns = [*like.columns, *self._added]
            self._writer = csv.DictWriter(
                self._file, columns, delimiter=separator, lineterminator="\n"
            )
            self._writer.writeheader()

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows, which have the columns of both tables."""
        for row in rows:
            if self.format == ".jsonl":
                self._file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            else:
                cells = {name: self._cell(name, value) for name, value in row.items()}
                self._writer.writerow(cells)

    def _cell(self, name: str, value: Any) -> Any:
        if isinstance(value, (bool, list, dict)):
            return json.dumps(value, ensure_ascii=False, default=str)
        if name in self._added and _FORMULA.match(str(value)):
            return f"'{value}"
        return value

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the file its name, if it is complete."""
        self._file.close()
        if kind is None:
            self._part.replace(self.path)
