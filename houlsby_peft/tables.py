"""Tables in files: CSV, TSV, JSON lines and Parquet, read and written in parts, and the usual names of text columns.

A table may have more rows than fit into memory. It is read twice: once to check it and to count its rows, which takes
seconds for a million, and once for its content. The recipes read their data with it as well.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Literal

from .errors import AdapterError, shortened


Row = dict[str, Any]

# Usual names of text columns, in lower case; the first entry of which a table has all columns is used.
TEXT_COLUMNS: tuple[tuple[str, ...], ...] = (
    ("text",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "context"),
    ("question", "sentence"),
    *((name,) for name in ("message", "body", "sentence", "content", "review", "comment", "description")),
    *((name,) for name in ("tweet", "utterance", "document", "abstract", "headline", "title", "subject")),
)
FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
_SEPARATORS = (",", ";", "\t", "|")
_LOOKED_AT = 1000  # lines, to find the separator
_PART_BYTES = 1 << 16
_PART_ROWS = 2048
_NOT_IN_CP1252 = b"\x81\x8d\x8f\x90\x9d"


def match_column(columns: Sequence[str], name: str) -> str | None:
    """Return the column of that name, or else the first whose name differs only in case and outer blanks, or None."""
    alike = (column for column in columns if column.strip().lower() == name.strip().lower())
    return name if name in columns else next(alike, None)


def find_text_columns(
    columns: Sequence[str],
    named: Sequence[str] | None = None,
    count: int | None = None,
    recorded: Sequence[str] | None = None,
) -> list[str]:
    """Return the columns of a table that hold the texts.

    Args:
        columns: The names of the table's columns.
        named: One or two names that the user has given, without regard to case. None: those recorded, if the table has
            all of them, or else the usual names.
        count: How many columns are needed. None: one, or two for pairs.
        recorded: The names of the columns that an adapter was trained on, if it records them.

    Raises:
        AdapterError: More than two columns are named, one of them does not exist, or no column has a usual name.
    """
    if named and len(named) > 2:
        raise AdapterError(f"The texts must be in one or two columns; got {', '.join(named)}. Name at most two.")
    matched = [(name, match_column(columns, name)) for name in named or ()]
    for name, column in matched:
        if column is None:
            raise AdapterError(f"The column {name!r} must be in the file; it has {', '.join(columns)}.")
    if named:
        return [column for _, column in matched if column is not None]
    for usual in (*([recorded] if recorded else []), *TEXT_COLUMNS):
        found = [column for name in usual if (column := match_column(columns, name)) is not None]
        if count in (None, len(usual)) and len(found) == len(usual):
            return found
    raise AdapterError(
        "A column must have one of the usual names for text, such as text or message, or be named with --text-column; "
        f"the file has {', '.join(columns)}."
    )


def check_number_of_texts(columns: Sequence[str], recorded: Sequence[str] | None, flag: str) -> None:
    """Check that an adapter reads as many texts at once as it was trained on.

    Args:
        columns: The columns of the texts that it is to read.
        recorded: The names of the columns that it was trained on. None: they are not recorded, and nothing is checked.
        flag: The flag that names columns.

    Raises:
        AdapterError: It was trained on pairs and would read single texts, or the reverse.
    """
    if recorded is not None and len(columns) != len(recorded):
        kind, remedy = ("pairs of texts", "two columns") if len(recorded) == 2 else ("single texts", "one column")
        names = " and ".join(shortened(repr(name)) for name in recorded)
        raise AdapterError(
            f"This adapter must read {kind}, as it was trained on {names}; got {', '.join(columns)}. Name {remedy} "
            f"with {flag}."
        )


class TableReader:
    """A table in a file, checked from the first row to the last.

    Values of .csv and .tsv files are text, so that "NA" is not a missing value, and "007" keeps its zeros.

    Args:
        path: The file. Its extension gives the format: .csv, .tsv, .jsonl or .parquet.

    Attributes:
        columns: The names of the columns, without outer blanks. Several columns without a name are left out.
        kinds: The type of each column's values: text, numbers or truth values; object for others.
        count: The number of rows.
        separator: Of separated values: the one of , ; tab | that divides most lines into as many fields as the header.
        encoding: As `find_encoding` returns it.

    Raises:
        AdapterError: The file does not exist, is of another format, has no rows, or a row cannot be read; the message
            names its line. In Parquet files, rows are counted from 0.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.format = find_format(path)
        if not path.is_file():
            raise AdapterError(f"{path} must be a file with a table; there is none.")
        self.separator, self.encoding = ",", "utf-8"
        self._quoting: Literal[0, 3] = csv.QUOTE_MINIMAL
        self._skips_blanks = False
        self.columns: list[str] = []
        self.kinds: dict[str, type] = {}
        self.count = 0
        # Why a column holds no texts, for the first line where it does not.
        self._not_text: dict[str, str] = {}
        if self.format == ".parquet":
            self._parquet = _open_parquet(path)
            self.columns = list(self._parquet.schema_arrow.names)
            self._check_batches()
        else:
            self.encoding = find_encoding(path)
            (self._check_lines if self.format == ".jsonl" else self._check_separated)()
        if not self.count:
            raise _refusal(path, "it has no rows; give a file with some")

    def check_texts(self, columns: Sequence[str]) -> None:
        """Check that columns hold texts, or numbers and the like, which can be read as texts.

        Args:
            columns: Their names.

        Raises:
            AdapterError: A column holds lists, objects or bytes; the message names the first line with one.
        """
        for column in columns:
            if column in self._not_text:
                raise AdapterError(
                    f"The column {column!r} of {self.path} must hold text; got {self._not_text[column]}. Name another "
                    "one, or write texts into it."
                )

    def parts(self, size: int) -> Iterator[tuple[list[Row], Any]]:
        """Yield the rows, so many at a time, each part with the Arrow batch that it was read from, if it was."""
        if self.format == ".parquet":
            for batch in self._parquet.iter_batches(size):
                yield batch.to_pylist(), batch
            return
        rows = (row for _, row in self.rows())
        while part := list(islice(rows, size)):
            yield part, None

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Yield the line on which each row begins, and the row. Parquet files have no lines; see `parts`."""
        return self._lines() if self.format == ".jsonl" else self._separated()

    def _open(self, newline: str) -> IO[str]:
        return self.path.open(encoding=self.encoding, newline=newline)

    def _check_separated(self) -> None:
        csv.field_size_limit(2**31 - 1)
        usual = "\t" if self.format == ".tsv" else ","
        with self._open("") as file:
            lines = list(islice(file, _LOOKED_AT))

        def share(separator: str) -> float:
            counts = [len(fields) for fields in csv.reader(lines, delimiter=separator) if fields]
            return counts.count(counts[0]) / len(counts) if counts and counts[0] > 1 else 0.0

        self.separator = max((usual, *_SEPARATORS), key=share)
        header: list[str] = next(filter(None, csv.reader(lines, delimiter=self.separator)), [])
        # As in "id, text, label".
        self._skips_blanks = len(header) > 1 and all(name.startswith(" ") for name in header[1:])
        quotings: list[Literal[0, 3]] = [csv.QUOTE_MINIMAL]
        if self.separator == usual == "\t":
            # In many tab-separated files, like GLUE's own, a quotation mark is part of the text.
            with self._open("") as file:
                is_quoted = "".join(lines[:1]).startswith('"') or any('""' in line for line in file)
            quotings.insert(int(is_quoted), csv.QUOTE_NONE)
        errors: dict[int, AdapterError] = {}
        for quoting in quotings:
            self._quoting = quoting
            try:
                self.count = sum(1 for _ in self._separated())
                break
            except AdapterError as error:
                errors[quoting] = error
        else:
            raise errors[max(errors)]  # that without quoting, if there is one
        self.kinds = dict.fromkeys(self.columns, str)

    def _separated(self) -> Iterator[tuple[int, Row]]:
        names: list[str] = []
        line = 1
        with self._open("") as file:
            reader = csv.reader(
                file,
                delimiter=self.separator,
                quoting=self._quoting,
                strict=True,
                skipinitialspace=self._skips_blanks,
            )
            try:
                for fields in reader:
                    if fields and not names:
                        names = [name.strip() for name in fields]
                        self._name_columns(names)
                    elif fields:  # an empty line has none
                        if len(fields) != len(names):
                            quotes = f"; put quotation marks around a text that holds {self.separator!r}"
                            raise _refusal(
                                self.path,
                                f"line {line} must have {len(names)} fields like the header, got {len(fields)}"
                                f"{'' if self._quoting else quotes}",
                            )
                        row = dict(zip(names, fields, strict=True))
                        if len(row) < len(names):
                            del row[""]
                        yield line, row
                    line = reader.line_num + 1
            except csv.Error as error:
                remedy = "close each quotation mark, and double those in a text"
                raise _refusal(self.path, f"line {line}: {error}; {remedy}") from error

    def _name_columns(self, names: Sequence[str]) -> None:
        repeated = next((name for name in names if name and names.count(name) > 1), None)
        if repeated is not None:
            raise _refusal(self.path, f"each column needs its own name; {repeated!r} is there twice: rename one")
        self.columns = [name for name in names if name or names.count(name) == 1]

    def _check_lines(self) -> None:
        for line, row in self._lines():
            self.count += 1
            for name, value in row.items():
                if isinstance(value, (list, dict)) and name not in self._not_text:
                    self._not_text[name] = f"{shortened(repr(value))} in line {line}"
                is_simple = isinstance(value, (bool, float, str)) or (isinstance(value, int) and abs(value) < 2**63)
                kind = type(value) if is_simple else object
                if value is not None and (known := self.kinds.setdefault(name, kind)) is not kind:
                    self.kinds[name] = float if {known, kind} == {int, float} else object
                elif value is None and name not in self.columns:
                    self.kinds.setdefault(name, str)
            self.columns += [name for name in row if name not in self.columns]

    def _check_batches(self) -> None:
        types = _import_pyarrow("pyarrow.types")
        is_of_bytes = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
        for field in self._parquet.schema_arrow:
            if types.is_nested(field.type) or any(check(field.type) for check in is_of_bytes):
                self._not_text[field.name] = f"values of the type {field.type}"
        try:
            for batch in self._parquet.iter_batches(_PART_ROWS):
                batch.validate(full=True)
                self.count += len(batch)
        except (OSError, ValueError) as error:
            reason = f"one of the {_PART_ROWS:,} rows from row {self.count:,} on: {shortened(str(error))}; correct it"
            raise _refusal(self.path, reason) from error

    def _lines(self) -> Iterator[tuple[int, Row]]:
        with self._open("\n") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line, object_pairs_hook=_as_object)
                    if re.search(r"\\u[dD]", line):  # JSON can escape half of a surrogate pair, which is no character
                        json.dumps(row, ensure_ascii=False).encode()
                except UnicodeEncodeError as error:
                    half = ascii(error.object[error.start])
                    reason = f"line {number} must hold characters, got {half}, half of a surrogate pair; correct it"
                    raise _refusal(self.path, reason) from error
                except (ValueError, RecursionError) as error:
                    raise _refusal(self.path, f"line {number} must be a JSON object: {error}") from error
                if not isinstance(row, dict):
                    raise _refusal(self.path, f"line {number} must be a JSON object, got {shortened(line.strip())}")
                yield number, row


class TableWriter:
    """Writes a table in parts, as a context. Until all is written, the file has the further extension .part.

    Args:
        path: The file. Its extension gives the format.
        like: The table whose columns come first; their types, and the separator of .csv files, are kept.
        added: The names and types of the further columns; `list` is for lists and objects, which become JSON text in
            the formats that have none.
    """

    def __init__(self, path: Path, like: TableReader, added: Mapping[str, type]) -> None:
        self.path, self.format, self._added = path, find_format(path), added
        self._part = path.with_name(f"{path.name}.part")
        self._names = [*like.columns, *added]
        self._file: Any = None
        self._parquet: Any = None
        if self.format == ".parquet":
            self._open_parquet(like)
            return
        is_alike = self.format == like.format == ".csv"
        # Excel recognizes UTF-8 by the byte order mark.
        encoding = "utf-8-sig" if is_alike and like.encoding == "utf-8-sig" else "utf-8"
        self._file = self._part.open("w", encoding=encoding, newline="")
        if self.format != ".jsonl":
            separator = "\t" if self.format == ".tsv" else like.separator if is_alike else ","
            # With a line end of two characters, fields that hold either of them are quoted.
            lines = SimpleNamespace(write=lambda line: self._file.write(line.removesuffix("\r\n") + "\n"))
            self._rows = csv.writer(lines, delimiter=separator, lineterminator="\r\n")
            self._rows.writerow(self._names)

    def _open_parquet(self, like: TableReader) -> None:
        self._arrow = _import_pyarrow("pyarrow")
        types = {str: self._arrow.string(), int: self._arrow.int64(), float: self._arrow.float64()}
        types[bool] = self._arrow.bool_()
        own = like._parquet.schema_arrow if like.format == ".parquet" else None
        fields = list(own) if own else [(name, types.get(like.kinds[name], types[str])) for name in like.columns]
        self._schema = self._arrow.schema(
            [*fields, *((name, types.get(kind, types[str])) for name, kind in self._added.items())]
        )
        self._parquet = _import_pyarrow("pyarrow.parquet").ParquetWriter(self._part, self._schema)

    def write(self, rows: Sequence[Row], batch: Any, added: Sequence[Row]) -> None:
        """Append rows.

        Args:
            rows: The rows of the table that was read.
            batch: The Arrow batch that they were read from, or None.
            added: The further columns of each row.
        """
        if self._parquet is not None:
            number = len(self._schema) - len(self._added)
            columns = list(batch.columns) if batch is not None else []
            for field in list(self._schema)[len(columns) :]:
                source: Sequence[Row] = rows if len(columns) < number else added
                values = [row.get(field.name) for row in source]
                is_text = field.type == self._arrow.string()
                columns.append(self._arrow.array([_as_text(v) if is_text else v for v in values], field.type))
            self._parquet.write_batch(self._arrow.record_batch(columns, schema=self._schema))
            return
        for row, more in zip(rows, added, strict=True):
            if self.format == ".jsonl":
                self._file.write(json.dumps(row | more, ensure_ascii=False, default=str) + "\n")
            else:
                whole = row | more
                self._rows.writerow([_as_text(whole.get(name)) or "" for name in self._names])
        self._file.flush()

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the file its name, if it is complete."""
        (self._parquet or self._file).close()
        if kind is None:
            self._part.replace(self.path)


def find_format(path: Path) -> str:
    """Return the format of a file by its extension.

    Raises:
        AdapterError: It is not one of FORMATS.
    """
    suffix = {".ndjson": ".jsonl", ".jsonlines": ".jsonl"}.get(path.suffix.lower(), path.suffix.lower())
    if suffix not in FORMATS:
        raise AdapterError(f"A table must be a file that ends in {', '.join(FORMATS)}; got {path.name}.")
    return suffix


def check_output(path: Path | None, source: Path, overwrite: bool) -> None:
    """Check that a table can be written, before any work.

    Raises:
        AdapterError: It is in no known format, exists already, is the table that is read, or has no folder.
    """
    if path is None:
        return
    find_format(path)
    if path.exists() and path.samefile(source):
        raise AdapterError(f"The output must be another file than the input; both are {path}.")
    if path.exists() and not overwrite:
        raise AdapterError(f"{path} exists already. Give another output, or --overwrite to replace it.")
    if not path.resolve().parent.is_dir():
        raise AdapterError(f"{path} must be in a folder that exists; {path.resolve().parent} does not.")


def find_encoding(path: Path) -> str:
    """Return the encoding of a text file: "utf-8", "utf-8-sig" or "utf-16" with a byte order mark, or else "cp1252",
    that of Western Windows, or "latin-1" if cp1252 lacks one of its bytes.

    Raises:
        AdapterError: It holds NUL, as binary files do, or most of it is UTF-8 or UTF-16, but not all.
    """
    with path.open("rb") as file:
        start = file.peek(3)
        is_wide = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        # Bytes that are not UTF-8 become lone surrogates.
        kind, errors = ("utf-16", "strict") if is_wide else ("utf-8", "surrogateescape")
        decoder = codecs.getincrementaldecoder(kind)(errors)
        line, letters, broken, broken_line, is_cp1252, part = 1, 0, 0, 0, True, b"-"
        while part:
            part = file.read(_PART_BYTES)
            try:
                text = decoder.decode(part, final=not part)
            except UnicodeDecodeError as error:
                raise AdapterError(
                    f"{path} must be UTF-8 text: {error}. Convert it, e.g. with iconv -t UTF-8."
                ) from error
            if "\0" in text:
                line += text.count("\n", 0, text.index("\0"))
                remedy = "remove it, or convert the file to UTF-8 text"
                raise _refusal(path, f"line {line} holds the character NUL; {remedy}")
            if not text.isascii():
                found = [match.start() for match in re.finditer("[\udc80-\udcff]", text)]
                letters += len(re.findall("[^\0-\x7f]", text)) - len(found)
                if found and not broken:
                    broken_line = line + text.count("\n", 0, found[0])
                broken += len(found)
                is_cp1252 = is_cp1252 and not any(byte in part for byte in _NOT_IN_CP1252)
            line += text.count("\n")
    if 0 < broken < letters:
        raise _refusal(path, f"line {broken_line} is not UTF-8 like the rest of it; correct the line")
    if broken:
        return "cp1252" if is_cp1252 else "latin-1"
    return "utf-8-sig" if start.startswith(codecs.BOM_UTF8) else kind


def _open_parquet(path: Path) -> Any:
    parquet = _import_pyarrow("pyarrow.parquet")
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise _refusal(path, shortened(str(error))) from error


def _import_pyarrow(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise AdapterError("Parquet files need a package that is not installed: pip install pyarrow.") from error


def _refusal(path: Path, reason: str) -> AdapterError:
    return AdapterError(f"{path} cannot be read as {path.suffix[1:].lower()}: {reason}.")


def _as_object(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"each key must be there once, got {', '.join(name for name, _ in pairs)}")
    return found


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (bool, list, dict)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
