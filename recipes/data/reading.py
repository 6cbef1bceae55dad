"""Data sets from files and from the Hub, as splits: train, validation and test.

The column WHERE of each split says where a row is in the user's file, such as "line 12".
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, concatenate_datasets, disable_progress_bars, load_dataset
from pyarrow.parquet import read_table
from transformers import TrainingArguments

from data.conll import read_conll
from data.exports import read_export
from houlsby_peft.tables import (
    OTHER_NAMES,
    TableReader,
    find_format,
    open_content,
    read_text,
    without_compression,
)
from run.arguments import DataArguments, ReadOptions
from run.edge import RecipeError, log, looks_like_a_path
from run.run import WHERE


# The splits, and the names of their files.
SPLITS = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev", "validation_matched"),  # the last is MNLI's
    "test": ("test",),
}
_LISTED = 5  # files in a message
_SAMPLED = 1000  # lines by which a format is told
_DETECTED = ReadOptions()

if not sys.stderr.isatty():
    disable_progress_bars()


def load_data(arguments: DataArguments, training: TrainingArguments) -> dict[str, Dataset]:
    """Load train and, if present, validation and test, from files or from the Hub."""
    with training.main_process_first():
        splits = {}
        files = files_of(arguments)
        for split, path in files.items():
            splits[split] = read_file(path, arguments.read_options)
        _report_unused(Path(arguments.data).expanduser(), files)
        if "train" in splits:
            return splits
        if looks_like_a_path(arguments.data):
            raise _no_split(Path(arguments.data).expanduser(), "train")
        return {**_load_from_hub(arguments.data, arguments.data_config), **splits}


def _report_unused(folder: Path, files: Mapping[str, Path]) -> None:
    """Log which files in a folder of data are not read, as no split has their names."""
    if not folder.is_dir() or folder in files.values():
        return
    unused = []
    for file in sorted(folder.iterdir()):
        if _has_reader(file) and file not in files.values():
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
    if path.is_dir() and "train" not in files:
        files = {**_find_unnamed(path, files), **files}
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
    """Return the file or folder of a split in a folder, such as train.csv or Train.CSV, or None.

    Of several files, the one whose extension comes first in READERS is used. A folder comes last.
    """
    if not folder.is_dir():
        return None
    paths = sorted(folder.iterdir())
    files = {without_compression(path).name.lower(): path for path in paths}
    for name in SPLITS.get(split, (split,)):
        for extension in (*READERS, ""):
            path = files.get(f"{name}{extension}")
            if path is not None and path.is_dir() == (extension == ""):
                return path
    return None


def _find_unnamed(folder: Path, files: Mapping[str, Path]) -> dict[str, Path]:
    """Return what a folder without a file called train has to train on.

    It is the only file without the name of a split, or else the folder, if its files are all of one
    format, or if it has a folder of texts for each class.
    """
    unnamed = [path for path in _files_in(folder) if path not in files.values()]
    if len(unnamed) == 1:
        return {"train": unnamed[0]}
    formats = {without_compression(path).suffix.lower() for path in unnamed}
    if not files and (len(formats) == 1 or _texts_by_class(folder)):
        return {"train": folder}
    return {}


def _files_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_file() and _has_reader(path)]


def _has_reader(path: Path) -> bool:
    return without_compression(path).suffix.lower() in READERS


def _texts_by_class(folder: Path) -> list[Path]:
    """Return the texts in a folder that has a folder for each class: `billing/1.txt`."""
    return sorted(folder.glob("*/*.txt"))


def read_split(folder: Path, split: str) -> Dataset:
    """Read the file that find_split finds."""
    path = find_split(folder, split)
    if path is None:
        raise _no_split(folder, split)
    return read_file(path)


def read_file(path: Path, options: ReadOptions = _DETECTED) -> Dataset:
    """Read a file by its content or its extension, one of READERS, or all files of a folder."""
    if path.is_dir():
        return _read_folder(path, options)
    suffix = without_compression(path).suffix.lower()
    has_words = suffix in _WORDS or (options.has_words and _has_sentences(path, suffix, options))
    if has_words:
        data = read_conll(path, options.encoding, options.word_column, options.tag_column)
    elif suffix == ".txt":
        data = _read_texts(path, options.encoding)
    elif suffix in READERS:
        data = _read_table(path, options)
    else:
        raise RecipeError(f"{path} must end in one of {', '.join(READERS)}. Convert it.")
    if not len(data):
        raise RecipeError(f"{path} has no rows. Give a file with some.")
    return data


def _has_sentences(path: Path, suffix: str, options: ReadOptions) -> bool:
    """Return whether a .txt or .tsv file has a word per line, and empty lines after sentences."""
    if suffix not in (".txt", ".tsv", ".csv"):
        return False
    lines = read_text(path, options.encoding).strip().splitlines()
    return "" in map(str.strip, lines[:_SAMPLED])


def _read_folder(folder: Path, options: ReadOptions) -> Dataset:
    """Read the texts of classes, which have a folder each, or all files of a folder as one."""
    texts = _texts_by_class(folder)
    if texts:
        rows = []
        for path in texts:
            text = read_text(path, options.encoding)
            rows.append({"text": text, "label": path.parent.name, WHERE: f"file {path}"})
        classes = sorted({path.parent.name for path in texts})
        log(f"{folder}: {len(rows):,} texts in folders of classes: {', '.join(classes[:_LISTED])}")
        return Dataset.from_list(rows)
    parts = []
    for path in _files_in(folder):
        part = read_file(path, options)
        places = [f"{path.name} {place}" for place in part[WHERE]]
        parts.append(part.remove_columns(WHERE).add_column(WHERE, places))
    if not parts:
        raise _no_split(folder, "train")
    log(f"{folder}: {len(parts)} files are read as one")
    return concatenate_datasets(parts)


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
    splits = {}
    for split, names in SPLITS.items():
        for name in reversed(names):
            if name in on_hub:
                splits[split] = _number_rows(on_hub[name])
    return splits


def _number_rows(data: Dataset) -> Dataset:
    return data.add_column(WHERE, [f"row {row}" for row in range(len(data))])


def _read_table(path: Path, options: ReadOptions) -> Dataset:
    """Read a table, or the export of an annotation tool, without columns that have no name."""
    if find_format(path) == ".parquet":
        # The file may declare the names of classes, which Dataset reads.
        with open_content(path) as file:
            return _number_rows(Dataset(read_table(file)))
    table = TableReader(path, options.encoding, options.has_header)
    _log_format(table, is_guessed=options.encoding is None)
    rows = []
    for number, row in table.rows():
        row.pop("", None)
        rows.append({**row, WHERE: f"{table.unit} {number}"})
    export = read_export(rows)
    if export is not None:
        tool, rows = export
        log(f"{path}: an export of {tool}, with {len(rows):,} examples")
    return _make_data(rows)


def _make_data(rows: Sequence[Mapping[str, Any]]) -> Dataset:
    """Return rows as a data set, in which a row may lack a column."""
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        columns[name] = _as_array([row.get(name) for row in rows])
    return Dataset(pa.table(columns))


def _as_array(values: Sequence[Any]) -> pa.Array:
    """Return the values of a column; as texts if they are not alike, as JSON allows."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        texts = []
        for value in values:
            is_text = value is None or isinstance(value, str)
            texts.append(value if is_text else json.dumps(value, ensure_ascii=False))
        return pa.array(texts)


def _log_format(table: TableReader, is_guessed: bool) -> None:
    """Log how a table was read, so that a wrong guess is seen."""
    message = f"{table.path}: {table.count:,} rows"
    if table.format in (".csv", ".tsv"):
        message += f", separator {table.separator!r}"
    if table.format in (".csv", ".tsv", ".jsonl", ".json"):
        encoding = table.encoding.removesuffix("-sig").replace("utf", "UTF")
        message += f", encoding {encoding}"
        if is_guessed and not encoding.startswith("UTF"):
            message += " (if letters look wrong, name another with --encoding)"
    log("\nnote: ".join([message, *table.notes]))


def _read_texts(path: Path, encoding: str | None) -> Dataset:
    """Read one text per line as the column `text`, without empty lines."""
    rows = []
    for number, line in _lines_of(path, encoding):
        if line.strip():
            rows.append({"text": line, WHERE: f"line {number}"})
    return Dataset.from_list(rows)


def _lines_of(path: Path, encoding: str | None) -> Iterator[tuple[int, str]]:
    """Return the lines of a text file with their numbers, from 1 on."""
    return enumerate(read_text(path, encoding).split("\n"), start=1)


# The extensions of files with a word per line.
_WORDS = (".conll", ".conllu", ".conll2003", ".bio", ".iob", ".iob2", ".bilou")
# The extensions of the files that are read, in the order in which they are preferred.
READERS = (
    ".parquet", ".csv", ".tsv", ".jsonl", ".json", ".xlsx", ".xlsm", ".xls", ".ods",
    *OTHER_NAMES, ".txt", *_WORDS,
)  # fmt: skip
