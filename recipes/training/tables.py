"""Files of examples: read with the separator and the encoding that they have, and with the line of each example."""

import codecs
import csv
import io
import json
import os
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from datasets import Dataset
from pyarrow.parquet import read_table

from training.errors import RecipeError


# A column that every file gets: where each example is, for messages, such as "line 12".
WHERE = "(where)"
SEPARATORS = (",", ";", "\t", "|")
_LOOKED_AT = 1000  # lines, to find the separator


def log(message: str) -> None:
    """Print a message once, whatever the number of processes."""
    if os.environ.get("RANK", "0") == "0":
        print(message)


def locate(data: Dataset, row: int) -> str:
    """Return where a row is in the user's file, such as "line 12"; a row is counted from 0, without the header."""
    return data[row][WHERE] if WHERE in data.column_names else f"row {row}"


def columns_of(data: Dataset) -> list[str]:
    """Return the names of the user's columns."""
    return [name for name in data.column_names if name != WHERE]


def number_rows(data: Dataset) -> Dataset:
    """Add the column WHERE to a data set whose rows have no lines."""
    return data.add_column(WHERE, [f"row {row}" for row in range(len(data))])


def _decode(raw: bytes) -> tuple[str, str]:
    """Return a text and its encoding: UTF-16 with a byte order mark, UTF-8, or else that of Western Windows.

    Raises:
        ValueError: If most of the text is UTF-8, but not all of it.
    """
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return raw.decode("utf-16"), "UTF-16"
    try:
        return raw.decode("utf-8-sig"), "UTF-8"
    except UnicodeDecodeError as error:
        characters = raw.decode("utf-8", "surrogateescape")
        broken = sum("\udc80" <= character <= "\udcff" for character in characters)
        if broken < sum(character > "\x7f" for character in characters) - broken:
            line = raw[: error.start].count(b"\n") + 1
            raise ValueError(f"line {line} is not UTF-8 like the rest of it; correct the line") from error
    try:
        return raw.decode("cp1252"), "cp1252"
    except UnicodeDecodeError:
        return raw.decode("latin-1"), "latin-1"


def _without_nul(text: str) -> str:
    """Return the text.

    Raises:
        ValueError: If it holds NUL, as binary files do.
    """
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise ValueError(f"line {line} holds the character NUL; remove it, or convert the file to UTF-8 text")
    return text


def _read_text(path: Path) -> str:
    """Read a UTF-8 file, with any kind of line ends."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return _without_nul(file.read())


def _read_table(path: Path, usual: str) -> pd.DataFrame:
    """Read separated values, all as text: words such as "None" and "NA" are no missing values, and "007" keeps its
    zeros. Columns without a name, such as the index of a data frame, are left out.

    Args:
        path: The file.
        usual: The separator that the extension stands for.

    Raises:
        ValueError: If a line has not as many fields as the header, or two columns have one name.
    """
    csv.field_size_limit(2**31 - 1)
    text, encoding = _decode(path.read_bytes())
    separator = _find_separator(_without_nul(text), usual)
    quotings = [csv.QUOTE_MINIMAL]
    if separator == usual == "\t":
        # In many tab-separated files, like GLUE's own, a quotation mark is part of the text.
        is_quoted = text.startswith('"') or '""' in text
        quotings = [csv.QUOTE_MINIMAL, csv.QUOTE_NONE] if is_quoted else [csv.QUOTE_NONE, csv.QUOTE_MINIMAL]
    errors: dict[int, ValueError] = {}
    for quoting in quotings:
        try:
            table = _parse(text, separator, quoting)
            break
        except ValueError as error:
            errors[quoting] = error
    else:
        raise errors[max(errors)]  # that without quoting, if there is one
    doubt = "" if encoding.startswith("UTF") else " (if letters look wrong, convert it to UTF-8)"
    log(f"{path}: {len(table):,} rows, separator {separator!r}, encoding {encoding}{doubt}")
    return table


def _find_separator(text: str, usual: str) -> str:
    """Return the separator that divides most lines into as many fields as the header; `usual` if several do."""

    def share(separator: str) -> float:
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        counts = [len(fields) for fields in islice(lines, _LOOKED_AT) if fields]
        return counts.count(counts[0]) / len(counts) if counts and counts[0] > 1 else 0.0

    return max((usual, *SEPARATORS), key=share)


def _parse(text: str, separator: str, quoting: int) -> pd.DataFrame:
    """Return the rows under their header, and the line on which each begins."""
    header = next((fields for fields in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if fields), [])
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=separator,
        quoting=quoting,
        strict=True,
        # As in "id, text, label".
        skipinitialspace=len(header) > 1 and all(name.startswith(" ") for name in header[1:]),
    )
    names: list[str] = []
    rows = []
    line = 1
    try:
        for fields in reader:
            if fields and not names:
                names = [name.strip() for name in fields]
                repeated = next((name for name in names if name and names.count(name) > 1), None)
                if repeated is not None:
                    raise ValueError(f"each column needs its own name, and {repeated!r} is there twice; rename one")
            elif fields:  # an empty line has none
                if len(fields) != len(names):
                    quotes = "" if quoting else f"; put quotation marks around a text that holds {separator!r}"
                    raise ValueError(
                        f"line {line} must have {len(names)} fields like the header, got {len(fields)}{quotes}"
                    )
                rows.append([*fields, f"line {line}"])
            line = reader.line_num + 1
    except csv.Error as error:
        remedy = "close each quotation mark, and double those in a text"
        raise ValueError(f"line {line}: {error}; {remedy}") from error
    table = pd.DataFrame(rows, columns=[*names, WHERE], dtype=object)
    return table[[name for name in table.columns if name]]


def _read_json_lines(path: Path) -> pd.DataFrame:
    """Read a JSON object per line.

    Raises:
        ValueError: If a line is not an object, or a column holds values of different kinds.
    """
    rows, lines = [], []
    kinds: dict[str, type] = {}
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_as_object)
        except ValueError as error:
            raise ValueError(f"line {number} must be a JSON object: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} must be a JSON object, got {line.strip()[:50]}")
        for name, value in row.items():
            kind = float if type(value) is int else type(value)
            if value is not None and kinds.setdefault(name, kind) is not kind:
                raise ValueError(
                    f"line {number} has {value!r} as {name!r}, which other lines have as {_JSON_KINDS[kinds[name]]}; "
                    "write all values of a column alike"
                )
        rows.append(row)
        lines.append(f"line {number}")
    columns = {name: pd.Series([row.get(name) for row in rows], dtype=object) for name in kinds}
    return pd.DataFrame({**columns, WHERE: lines})


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"each key must be there once, got {', '.join(name for name, _ in pairs)}")
    return found


_JSON_KINDS = {str: "text", float: "a number", bool: "true or false", list: "a list", dict: "an object"}


def _read_lines(path: Path) -> pd.DataFrame:
    """Read one text per line, without empty lines, as the column `text`."""
    lines = enumerate(_read_text(path).replace("\r\n", "\n").split("\n"), start=1)
    return pd.DataFrame([(line, f"line {number}") for number, line in lines if line.strip()], columns=["text", WHERE])


def _read_conll(path: Path) -> pd.DataFrame:
    """Read sentences from a CoNLL file: words from its first column, tags from its last, without document marks.

    Raises:
        ValueError: If a line has a word without a tag.
    """
    sentences: list[tuple[list[str], list[str], str]] = [([], [], "line 1")]
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        columns = line.split()
        if not columns or columns[0] == "-DOCSTART-":
            sentences.append(([], [], f"line {number + 1}"))
        elif len(columns) == 1:
            raise ValueError(f"line {number} must have a word and a tag, got {line[:50]!r}")
        else:
            sentences[-1][0].append(columns[0])
            sentences[-1][1].append(columns[-1])
    return pd.DataFrame([sentence for sentence in sentences if sentence[0]], columns=["tokens", "tags", WHERE])


READERS: dict[str, Callable[[Path], pd.DataFrame | pa.Table]] = {
    ".parquet": read_table,  # pandas would drop the class names
    ".csv": partial(_read_table, usual=","),
    ".tsv": partial(_read_table, usual="\t"),
    ".jsonl": _read_json_lines,
    ".txt": _read_lines,
    ".conll": _read_conll,
}


def read_split(folder: Path, split: str) -> Dataset:
    """Read the file `split` in a folder, with the first extension of READERS that exists.

    Raises:
        RecipeError: If the folder or the file is missing, cannot be read or has no rows.
    """
    if not folder.is_dir():
        raise RecipeError(f"There is no folder {folder}. It should hold one file per split, such as train.parquet.")
    path = next((path for extension in READERS if (path := folder / f"{split}{extension}").is_file()), None)
    if path is None:
        found = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        raise RecipeError(f"{folder} has no split {split!r}: expected {split}{{{','.join(READERS)}}}, found {found}.")
    return read_file(path)


def read_file(path: Path) -> Dataset:
    """Read a file by its extension, one of READERS; the column WHERE says where each row is in it.

    Raises:
        RecipeError: If it has another extension, cannot be read or has no rows.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise RecipeError(f"{path} must end in one of {', '.join(READERS)}. Convert it, a spreadsheet to .csv.")
    try:
        table = reader(path)
        if not len(table):
            raise ValueError("it has no rows; give a file with examples")
        if isinstance(table, pa.Table):
            return number_rows(Dataset(table))
        return Dataset.from_pandas(table, preserve_index=False)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} must be UTF-8 text: {error}. Convert it, e.g. with iconv -t UTF-8.") from error
    # PyArrow's errors are of all kinds.
    except (ValueError, TypeError, OSError, NotImplementedError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{path} cannot be read as {path.suffix[1:]}: {reason}.") from error
