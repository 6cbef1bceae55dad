"""Tables in files, read and written row by row, and the usual names of text columns.

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

# Usual names of text columns, in lower case; the first entry of which a table has all columns is
# used.
TEXT_COLUMNS: tuple[tuple[str, ...], ...] = (
    ("text",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "context"),
    ("question", "sentence"),
    *(
        (name,)
        for name in ("message", "body", "sentence", "content", "review", "comment", "description")
    ),
    *(
        (name,)
        for name in ("tweet", "utterance", "document", "abstract", "headline", "title", "subject")
    ),
    *(
        (name,)
        for name in (
            "nachricht",
            "mitteilung",
            "beschreibung",
            "betreff",
            "texto",
            "mensaje",
            "comentario",
        )
    ),
    *(
        (name,)
        for name in (
            "texte",
            "commentaire",
            "testo",
            "messaggio",
            "commento",
            "mensagem",
            "tekst",
            "bericht",
        )
    ),
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
    alike = (column for column in columns if column.strip().lower() == name.strip().lower())
    return name if name in columns else next(alike, None)


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
    for usual in [named] if named else [*([recorded] if recorded else []), *TEXT_COLUMNS]:
        found = [column for name in usual if (column := match_column(columns, name)) is not None]
        if len(found) == len(usual) and (named or count in (None, len(usual))):
            return found
    wanted = " and ".join(named) if named else "of a usual name, such as text or message"
    raise AdapterError(
        f"The text needs a column {wanted}; the file has {', '.join(columns)}. Name it: --text-column."
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
            f"{adapter} must read {kind}, as it was trained on {names}; got {', '.join(columns)}. See {flag}."
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
        separator: Of .csv and .tsv: the one of , ; tab | that divides most lines into as many fields as the header.

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
        is_text: dict[str, bool] = {}
        for _, row in self.rows():
            self.count += 1
            for name, value in row.items():
                is_text[name] = is_text.get(name, True) and not isinstance(
                    value, (list, dict, bytes)
                )
        self.columns, self._is_text = list(is_text), is_text
        if not self.count:
            raise AdapterError(f"{path} cannot be read as {self.format[1:]}: it has no rows.")

    def check_texts(self, columns: Sequence[str]) -> None:
        """Refuse columns that hold neither texts nor numbers and the like, which can be read as
        texts.
        """
        for column in columns:
            if not self._is_text[column]:
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
            from pyarrow.parquet import ParquetFile

            batches = ParquetFile(self.path).iter_batches()
            yield from enumerate(row for batch in batches for row in batch.to_pylist())
            return
        line = 1
        is_json = self.format == ".jsonl"
        try:
            with self.path.open(encoding=self.encoding, newline="\n" if is_json else "") as file:
                if is_json:
                    for line, text in enumerate(file, start=1):
                        if text.strip():
                            if not isinstance(row := json.loads(text), dict):
                                raise ValueError(f"must be a JSON object, got {row}")
                            yield line, row
                    return
                csv.field_size_limit(2**31 - 1)
                reader = csv.reader(file, strict=True, **self._dialect)
                names: list[str] = []
                for fields in reader:
                    if fields and not names:
                        names = [name.strip() for name in fields]
                        if repeated := [name for name in names if name and names.count(name) > 1]:
                            raise ValueError(f"names two columns {repeated[0]!r}")
                    elif fields:  # an empty line has none
                        if len(fields) != len(names):
                            raise ValueError(
                                f"must have {len(names)} fields like the header, got {len(fields)}; put quotation "
                                f"marks around a text that holds {self.separator!r}"
                            )
                        pairs = zip(names, fields, strict=True)
                        yield (
                            line,
                            {name: field for name, field in pairs if name or names.count("") == 1},
                        )
                    line = reader.line_num + 1
        except (csv.Error, ValueError) as error:
            raise AdapterError(f"{self.path}, line {line}: {shortened(str(error))}.") from error

    def _find_dialect(self) -> dict[str, Any]:
        usual = "\t" if self.format == ".tsv" else ","
        with self.path.open(encoding=self.encoding, newline="") as file:
            lines = list(islice(file, 1000))

        def share(separator: str) -> float:
            counts = [len(fields) for fields in csv.reader(lines, delimiter=separator) if fields]
            return counts.count(counts[0]) / len(counts) if counts and counts[0] > 1 else 0.0

        separator = max((usual, ",", ";", "\t", "|"), key=share)
        header: list[str] = next(filter(None, csv.reader(lines, delimiter=separator)), [])
        is_quoted = True
        if separator == usual == "\t" and not "".join(lines[:1]).startswith('"'):
            # In many tab-separated files, such as GLUE's own, a quotation mark is part of the text.
            whole = [line for line in lines if line.strip("\r\n")]
            is_quoted = any(
                line.count("\t") != len(header) - 1 or _QUOTED.search(line.rstrip())
                for line in whole
            )
        return {
            "delimiter": separator,
            "quoting": csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE,
            # As in "id, text, label".
            "skipinitialspace": len(header) > 1
            and all(name.startswith(" ") for name in header[1:]),
        }


def find_encoding(path: Path) -> str:
    """Return the encoding of a text file: "utf-8", with a byte order mark "utf-8-sig" or "utf-16",
    or else "cp1252", that of Western Windows. A file that is UTF-8 for the most part, but not all
    of it, is refused.
    """
    utf8, other = 0, []
    with path.open("rb") as file:
        start = file.peek(3)[:3]
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        for number, line in enumerate(file, start=1):
            try:
                utf8 += len(line.decode()) < len(line)
            except UnicodeDecodeError:
                other.append(number)
    if 0 < len(other) <= utf8:
        raise AdapterError(
            f"{path}: line {other[0]} is not UTF-8 like the rest. Correct this line."
        )
    return "cp1252" if other else "utf-8-sig" if start == codecs.BOM_UTF8 else "utf-8"


class TableWriter:
    """Writes a table in parts, as a context. Until all is written, the file has the further
    extension .part.

    The columns of the table `like` come first, and the separator of .csv files is kept. Lists and
    objects become JSON text in the formats that have none.
    """

    def __init__(self, path: Path, like: TableReader, added: Iterable[str]) -> None:
        self.path, self.format, self._added = path, find_format(path, WRITTEN), list(added)
        self._part = path.with_name(f"{path.name}.part")
        is_alike = self.format == like.format == ".csv"
        # Excel recognizes UTF-8 by the byte order mark.
        encoding = "utf-8-sig" if is_alike and like.encoding == "utf-8-sig" else "utf-8"
        self._file = self._part.open("w", encoding=encoding, newline="")
        if self.format != ".jsonl":
            separator = "\t" if self.format == ".tsv" else like.separator if is_alike else ","
            names = [*like.columns, *self._added]
            self._rows = csv.DictWriter(self._file, names, delimiter=separator, lineterminator="\n")
            self._rows.writeheader()

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows, which have the columns of both tables."""
        for row in rows:
            if self.format == ".jsonl":
                self._file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            else:
                cells = dict(row)
                for name, value in row.items():
                    if isinstance(value, (bool, list, dict)):
                        cells[name] = json.dumps(value, ensure_ascii=False, default=str)
                    elif name in self._added and _FORMULA.match(str(value)):
                        cells[name] = f"'{value}"
                self._rows.writerow(cells)

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the file its name, if it is complete."""
        self._file.close()
        if kind is None:
            self._part.replace(self.path)
