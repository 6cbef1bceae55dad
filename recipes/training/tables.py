"""Files of examples: read with the line of each example, for messages."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset
from pyarrow.parquet import read_table

from houlsby_peft import AdapterError
from houlsby_peft.tables import TableReader, find_encoding  # as `houlsby-peft predict` reads files
from training.errors import RecipeError


# A column that every file gets: where each example is, for messages, such as "line 12".
WHERE = "(where)"
_JSON_KINDS = {str: "text", float: "a number", bool: "true or false", list: "a list", dict: "an object"}


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


def _read_parquet(path: Path) -> Dataset:
    return number_rows(Dataset(read_table(path)))  # with the names of the classes, if there are any


def _read_rows(path: Path) -> Dataset:
    """Read separated values or a JSON object per line. Columns without a name, such as the index of a data frame, are
    left out.

    Raises:
        ValueError: If a column holds values of different kinds.
    """
    table = TableReader(path)
    columns: dict[str, list[Any]] = {name: [] for name in table.columns if name}
    where, kinds = [], {}
    for line, row in table.rows():
        where.append(f"line {line}")
        for name, values in columns.items():
            value = row.get(name)
            values.append(value)
            kind = float if type(value) is int else type(value)
            if value is not None and kinds.setdefault(name, kind) is not kind:
                raise ValueError(
                    f"line {line} has {value!r} as {name!r}, which other lines have as {_JSON_KINDS[kinds[name]]}; "
                    "write all values of a column alike"
                )
    separator = "" if table.format == ".jsonl" else f", separator {table.separator!r}"
    encoding = table.encoding.removesuffix("-sig").replace("utf", "UTF")
    doubt = "" if encoding.startswith("UTF") else " (if letters look wrong, convert it to UTF-8)"
    log(f"{path}: {table.count:,} rows{separator}, encoding {encoding}{doubt}")
    return Dataset(pa.table({**columns, WHERE: where}))


def _read_text(path: Path) -> str:
    """Read a UTF-8 file, with any kind of line ends.

    Raises:
        ValueError: If it has another encoding, or holds NUL.
    """
    encoding = find_encoding(path)
    if not encoding.startswith("utf-8"):
        raise ValueError(f"it must be UTF-8 text, and looks like {encoding}; convert it, e.g. with iconv -t UTF-8")
    with path.open(encoding=encoding, newline="") as file:
        return file.read()


def _read_lines(path: Path) -> Dataset:
    """Read one text per line, without empty lines, as the column `text`."""
    lines = enumerate(_read_text(path).replace("\r\n", "\n").split("\n"), start=1)
    rows = [{"text": line, WHERE: f"line {number}"} for number, line in lines if line.strip()]
    return Dataset.from_list(rows)


def _read_conll(path: Path) -> Dataset:
    """Read sentences from a CoNLL file: words from its first column, tags from its last, without document marks.

    A line before a sentence that begins with "# " and has an equals sign is a comment, as in CoNLL-U.

    Raises:
        ValueError: If a line has a word without a tag.
    """
    sentences: list[dict[str, Any]] = [{"tokens": [], "tags": [], WHERE: "line 1"}]
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        columns = line.split()
        is_comment = line.startswith("# ") and "=" in line and not sentences[-1]["tokens"]
        if not columns or columns[0] == "-DOCSTART-" or is_comment:
            sentences.append({"tokens": [], "tags": [], WHERE: f"line {number + 1}"})
        elif len(columns) == 1:
            raise ValueError(f"line {number} must have a word and a tag, got {line[:50]!r}")
        else:
            sentences[-1]["tokens"].append(columns[0])
            sentences[-1]["tags"].append(columns[-1])
    return Dataset.from_list([sentence for sentence in sentences if sentence["tokens"]])


READERS: dict[str, Callable[[Path], Dataset]] = {
    ".parquet": _read_parquet,
    ".csv": _read_rows,
    ".tsv": _read_rows,
    ".jsonl": _read_rows,
    ".txt": _read_lines,
    ".conll": _read_conll,
}


def find_split(folder: Path, split: str) -> Path | None:
    """Return the file `split` in a folder, with the first extension of READERS that exists, or None."""
    return next((path for extension in READERS if (path := folder / f"{split}{extension}").is_file()), None)


def read_split(folder: Path, split: str) -> Dataset:
    """Read the file `split` in a folder, as find_split finds it.

    Raises:
        RecipeError: If the folder or the file is missing, cannot be read or has no rows.
    """
    if not folder.is_dir():
        raise RecipeError(f"There is no folder {folder}. It should hold one file per split, such as train.parquet.")
    path = find_split(folder, split)
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
        data = reader(path)
        if not len(data):
            raise ValueError("it has no rows; give a file with some")
        return data
    except AdapterError as error:
        raise RecipeError(str(error)) from error
    # PyArrow's errors are of all kinds.
    except (ValueError, TypeError, OSError, NotImplementedError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{path} cannot be read as {path.suffix[1:]}: {reason}.") from error
