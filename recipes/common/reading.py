"""Data sets from files and from the Hub, as splits: train, validation and test.

The column WHERE of each split says where a row is in the user's file, such as "line 12".
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, disable_progress_bars, load_dataset
from pyarrow.parquet import read_table
from transformers import TrainingArguments

from common.arguments import DataArguments
from common.edge import RecipeError, log, looks_like_a_path
from common.run import WHERE
from houlsby_peft.tables import TableReader, find_encoding


# The splits, and the names of their files.
SPLITS = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
_LISTED = 5  # files in a message

if not sys.stderr.isatty():
    disable_progress_bars()


def load_data(arguments: DataArguments, training: TrainingArguments) -> dict[str, Dataset]:
    """Load train and, if present, validation and test, from files or from the Hub."""
    with training.main_process_first():
        splits = {}
        files = files_of(arguments)
        for split, path in files.items():
            splits[split] = read_file(path, arguments.encoding)
        _report_unused(Path(arguments.data).expanduser(), files)
        if "train" in splits:
            return splits
        if looks_like_a_path(arguments.data):
            raise _no_split(Path(arguments.data).expanduser(), "train")
        return {**_load_from_hub(arguments.data, arguments.data_config), **splits}


def _report_unused(folder: Path, files: Mapping[str, Path]) -> None:
    """Log which files in a folder of data are not read, as no split has their names."""
    if not folder.is_dir():
        return
    unused = []
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() in READERS and file not in files.values():
            unused.append(file.name)
    if unused:
        more = ", ..." * (len(unused) > _LISTED)
        log(f"note: not used in {folder}: {', '.join(unused[:_LISTED])}{more}")


def files_of(arguments: DataArguments) -> dict[str, Path]:
    """Return the files of a data set, by their splits; those on the Hub have none."""
    path = Path(arguments.data).expanduser()
    files = {"train": path} if path.is_file() else find_splits(path)
    for split, name in (("validation", arguments.validation_file), ("test", arguments.test_file)):
        if name is not None:
            files[split] = Path(name).expanduser()
    return files


def find_splits(folder: Path) -> dict[str, Path]:
    """Return the files of the splits that a folder has."""
    files = {}
    for split in SPLITS:
        file = find_split(folder, split)
        if file is not None:
            files[split] = file
    return files


def find_split(folder: Path, split: str) -> Path | None:
    """Return the file of a split in a folder, such as train.csv or Train.CSV, or None.

    Of several files, the one whose extension comes first in READERS is used.
    """
    if not folder.is_dir():
        return None
    files = {file.name.lower(): file for file in sorted(folder.iterdir())}
    for name in SPLITS.get(split, (split,)):
        for extension in READERS:
            if f"{name}{extension}" in files:
                return files[f"{name}{extension}"]
    return None


def read_split(folder: Path, split: str, encoding: str | None = None) -> Dataset:
    """Read the file that find_split finds."""
    path = find_split(folder, split)
    if path is None:
        raise _no_split(folder, split)
    return read_file(path, encoding)


def read_file(path: Path, encoding: str | None = None) -> Dataset:
    """Read a file by its extension, one of READERS."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise RecipeError(
            f"{path} must end in one of {', '.join(READERS)}. Convert it, a spreadsheet to .csv."
        )
    try:
        data = reader(path, encoding)
    except pa.ArrowException as error:
        raise RecipeError(f"{path}: {error}. Write all values of a column alike.") from error
    if not len(data):
        raise RecipeError(f"{path} has no rows. Give a file with some.")
    return data


def _no_split(folder: Path, split: str) -> RecipeError:
    names = ", ".join(sorted(file.name for file in folder.glob("*")))
    return RecipeError(
        f"{folder} has no split {split!r}: expected {split}{{{','.join(READERS)}}}, "
        f"found {names or 'nothing'}."
    )


def _load_from_hub(name: str, config: str | None) -> dict[str, Dataset]:
    on_hub = load_dataset(name, config)
    if "train" not in on_hub:
        raise RecipeError(f"{name} must have a split 'train', it has {', '.join(on_hub)}.")
    return {split: _number_rows(on_hub[split]) for split in SPLITS if split in on_hub}


def _number_rows(data: Dataset) -> Dataset:
    return data.add_column(WHERE, [f"row {row}" for row in range(len(data))])


def _read_parquet(path: Path, encoding: str | None) -> Dataset:
    # The file may declare the names of classes, which Dataset reads.
    return _number_rows(Dataset(read_table(path)))


def _read_table(path: Path, encoding: str | None) -> Dataset:
    """Read separated values, or a JSON object per line, without columns that have no name."""
    table = TableReader(path, encoding)
    columns: dict[str, list[Any]] = defaultdict(list)
    for line, row in table.rows():
        for name in table.columns:
            if name:
                columns[name].append(row.get(name))
        columns[WHERE].append(f"line {line}")
    _log_format(table, is_guessed=encoding is None)
    return Dataset(pa.table(columns))


def _log_format(table: TableReader, is_guessed: bool) -> None:
    """Log how a table was read, so that a wrong guess is seen."""
    encoding = table.encoding.removesuffix("-sig").replace("utf", "UTF")
    message = f"{table.path}: {table.count:,} rows"
    if table.format != ".jsonl":
        message += f", separator {table.separator!r}"
    message += f", encoding {encoding}"
    if is_guessed and not encoding.startswith("UTF"):
        message += " (if letters look wrong, name another with --encoding)"
    log(message)


def _read_texts(path: Path, encoding: str | None) -> Dataset:
    """Read one text per line as the column `text`, without empty lines."""
    rows = []
    for number, line in _lines_of(path, encoding):
        if line.strip():
            rows.append({"text": line, WHERE: f"line {number}"})
    return Dataset.from_list(rows)


def _read_conll(path: Path, encoding: str | None) -> Dataset:
    """Read sentences from a CoNLL file: words from its first column, tags from its last.

    A line before a sentence that begins with "# " and has an equals sign is a comment, as in
    CoNLL-U. Marks between documents are left out.
    """
    sentences: list[dict[str, Any]] = []
    is_within_sentence = False
    for number, line in _lines_of(path, encoding):
        fields = line.split()
        is_comment = line.startswith("# ") and "=" in line and not is_within_sentence
        if not fields or fields[0] == "-DOCSTART-" or is_comment:
            is_within_sentence = False
            continue
        if len(fields) == 1:
            raise RecipeError(
                f"{path}: line {number} must have a word and a tag, got {line[:50]!r}."
            )
        if not is_within_sentence:
            sentences.append({"tokens": [], "tags": [], WHERE: f"line {number}"})
            is_within_sentence = True
        sentences[-1]["tokens"].append(fields[0])
        sentences[-1]["tags"].append(fields[-1])
    return Dataset.from_list(sentences)


def _lines_of(path: Path, encoding: str | None) -> Iterator[tuple[int, str]]:
    """Return the lines of a text file with their numbers, from 1 on."""
    text = path.read_text(encoding or find_encoding(path))
    return enumerate(text.split("\n"), start=1)


READERS: dict[str, Callable[[Path, str | None], Dataset]] = {
    ".parquet": _read_parquet,
    ".csv": _read_table,
    ".tsv": _read_table,
    ".jsonl": _read_table,
    ".txt": _read_texts,
    ".conll": _read_conll,
}
