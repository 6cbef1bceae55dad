"""Data sets from files and from the Hub, as splits: train, validation and test.

The column WHERE of each split says where a row is in the user's file, such as "row 12".
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import (
    Dataset,
    concatenate_datasets,
    disable_progress_bars,
    load_dataset,
    load_from_disk,
)
from datasets.data_files import SPLIT_KEYWORDS
from pyarrow.parquet import read_table as read_parquet
from transformers import TrainingArguments

from data.conll import read_conll
from data.exports import read_export
from houlsby_peft.tables import (
    OTHER_NAMES,
    READ,
    Table,
    match_column,
    read_content,
    read_table,
    read_text,
    suffix_of,
)
from run.arguments import DataArguments, ReadOptions
from run.edge import RecipeError, log, looks_like_a_path
from run.run import WHERE


Files = dict[str, list[Path]]  # of each split

_LISTED = 5  # files in a message
_SAMPLED = 1000  # lines by which a format is told
_DETECTED = ReadOptions()
# As `datasets` has them, and one of the biomedical corpora.
_SPLIT_NAMES = {**SPLIT_KEYWORDS, "validation": [*SPLIT_KEYWORDS["validation"], "devel"]}
_FASTTEXT = re.compile(r"((?:__label__\S+\s+)+)(\S.*)")
# The extensions of files with a word per line.
_WORDS = (".conll", ".conllu", ".conll2003", ".bio", ".iob", ".iob2", ".bilou")
# The extensions of the files that are read, in the order in which they are preferred.
READERS = (*READ, *OTHER_NAMES, *_WORDS)

if not sys.stderr.isatty():
    disable_progress_bars()


def load_data(arguments: DataArguments, training: TrainingArguments) -> dict[str, Dataset]:
    """Load train and, if present, validation and test, from files or from the Hub."""
    path = Path(arguments.data).expanduser()
    with training.main_process_first():
        files = files_of(arguments)
        splits: dict[str, Dataset] = {}
        if _is_saved(path):
            splits = _name_splits(load_from_disk(path), arguments.data)
        elif "train" not in files and not looks_like_a_path(arguments.data):
            on_hub = load_dataset(arguments.data, arguments.data_config)
            splits = _name_splits(on_hub, arguments.data)
        for split, paths in files.items():
            if not _is_saved(paths[0]):
                splits[split] = read_files(paths, arguments.read_options)
    if "train" not in splits:
        raise _no_split(path, "train")
    if [*splits] == ["train"]:
        splits = _divide_by_column(splits["train"], arguments.data)
    for split, data in splits.items():
        names = [file.name for file in files.get(split, files.get("train", ()))]
        title = arguments.title_of(split)
        log(f"{title}: {len(data):,} rows of {_list(names or [arguments.data])}")
    unused = {*_readable(path, "*")} - {*chain.from_iterable(files.values())}
    if unused and not _is_saved(path):
        log(f"note: not used in {path}: {_list(sorted(file.name for file in unused))}")
    return splits


def split_of(name: str) -> str | None:
    """Return the split that a part of a name stands for."""
    parts = set(re.split(r"[-._ 0-9]+", name.lower()))
    for split, keywords in _SPLIT_NAMES.items():
        if parts & {*keywords}:
            return str(split)
    return None


def files_of(arguments: DataArguments) -> Files:
    """Return the files of a data set, by their splits; those on the Hub have none."""
    path = Path(arguments.data).expanduser()
    files: Files = {}
    if path.is_file() or _is_saved(path):
        files["train"] = [path]
    elif path.is_dir():
        files = find_splits(path)
    if arguments.more_data:
        files["train"] = [*files.get("train", ()), *map(Path, arguments.more_data)]
    for split, name in (("validation", arguments.validation_file), ("test", arguments.test_file)):
        if name is not None:
            files[split] = [Path(name).expanduser()]
    return files


def _is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` of the library datasets has written a folder."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def find_splits(folder: Path) -> Files:
    """Return the files of the splits in a folder or its subfolder `data`, by their names.

    Without files, its folders have these names, or those of classes. What has no split's name is to
    train on, unless a file has.
    """
    named = {path: path.name for path in _readable(folder, "*") or _readable(folder, "data/*")}
    if not named:
        paths = [*_readable(folder, "*/*"), *_readable(folder, "*/*/*.txt")]
        named = {path: path.relative_to(folder).parts[0] for path in paths}
    files: Files = {}
    unnamed = []
    for path, name in named.items():
        split = split_of(name)
        if split is None:
            unnamed.append(path)
        else:
            files.setdefault(split, []).append(path)
    if "train" not in files and unnamed:
        # Beside tables, a text is a note on them.
        tables = [path for path in unnamed if suffix_of(path) != ".txt"]
        files["train"] = tables or unnamed
    for split, paths in files.items():
        _check_parts(paths, split)
    return {split: files[split] for split in ("train", "validation", "test") if split in files}


def _readable(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a pattern that can be read, without hidden ones."""
    paths = []
    for path in sorted(folder.glob(pattern)):
        if path.is_file() and suffix_of(path) in READERS and not path.name.startswith((".", "~")):
            paths.append(path)
    return paths


def _check_parts(paths: Sequence[Path], split: str) -> None:
    """Refuse to read files as one whose names differ by a word, unless each is a text."""
    names = {re.sub(r"\d+", "0", path.name.lower()) for path in paths}
    if len(names) > 1 and not _are_texts_of_classes(paths):
        raise RecipeError(
            f"{_list([path.name for path in paths])} have different names: are they parts of "
            f"{split}? Then name each: houlsby-peft train {paths[0]} {paths[1]}. Otherwise, call "
            "the files of a folder train, validation and test."
        )


def _are_texts_of_classes(paths: Sequence[Path]) -> bool:
    """Return whether files are texts in a folder for each class: `billing/1.txt`."""
    return len({path.parent for path in paths}) > 1 and {suffix_of(path) for path in paths} == {
        ".txt"
    }


def find_split(folder: Path, split: str) -> Path | None:
    """Return the file of a split in a folder, such as train.csv, or None."""
    files = _readable(folder, f"{split}.*")
    return min(files, key=lambda path: READERS.index(suffix_of(path)), default=None)


def read_split(folder: Path, split: str) -> Dataset:
    """Read the file that find_split finds."""
    path = find_split(folder, split)
    if path is None:
        raise _no_split(folder, split)
    return read_file(path)


def _no_split(folder: Path, split: str) -> RecipeError:
    names = sorted(file.name for file in folder.glob("*"))
    return RecipeError(
        f"{folder} has no split {split!r}: expected {split}{{{','.join(READERS)}}}, "
        f"found {_list(names) or 'nothing'}."
    )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + f" and {len(names) - _LISTED} more" * (len(names) > _LISTED)


def _name_splits(data: Any, name: str) -> dict[str, Dataset]:
    """Return the splits of a data set of the library datasets by our names."""
    if isinstance(data, Dataset):
        data = {"train": data}
    splits: dict[str, Dataset] = {}
    for split in data:
        # MNLI has two validation splits; the first is the matched one.
        splits.setdefault(split_of(split) or split, _number_rows(data[split]))
    if "train" not in splits:
        raise RecipeError(f"{name} must have a split 'train', it has {', '.join(data)}.")
    return {split: splits[split] for split in ("train", "validation", "test") if split in splits}


def _divide_by_column(data: Dataset, name: str) -> dict[str, Dataset]:
    """Return the splits that a column `split` names; without one, all rows are to train on."""
    column = match_column(data.column_names, "split")
    values = [str(value) for value in data[column]] if column else []
    rows: dict[str | None, list[int]] = {}
    for row, value in enumerate(values):
        rows.setdefault(split_of(value), []).append(row)
    if "train" not in rows or len(rows) == 1:
        return {"train": data}
    if None in rows:
        raise RecipeError(
            f"{name}: the column {column!r} must name train, validation or test in each row; "
            f"{data[rows[None][0]][WHERE]} has {values[rows[None][0]]!r}. Correct it, leave the "
            "row out, or rename the column."
        )
    log(f"the column {column!r} names the splits")
    order = ("train", "validation", "test")
    return {split: data.select(rows[split]) for split in order if split in rows}


def read_files(paths: Sequence[Path], options: ReadOptions = _DETECTED) -> Dataset:
    """Read files as one, or the texts of classes, which have a folder each."""
    if len(paths) == 1:
        return read_file(paths[0], options)
    if _are_texts_of_classes(paths):
        rows = []
        for path in paths:
            text = read_text(path, options.encoding)
            rows.append({"text": text, "label": path.parent.name, WHERE: f"file {path}"})
        return Dataset.from_list(rows)
    parts = []
    for path in paths:
        part = read_file(path, options)
        places = [f"{path.name} {place}" for place in part[WHERE]]
        parts.append(part.remove_columns(WHERE).add_column(WHERE, places))
    shared = [name for name in parts[0].features if all(name in part.features for part in parts)]
    if shared == [WHERE]:
        raise RecipeError(f"{_list([path.name for path in paths])} have no column in common.")
    parts = [part.select_columns(shared) for part in parts]
    if all(part.features == parts[0].features for part in parts):
        return concatenate_datasets(parts)
    return _make_data(list(chain.from_iterable(part.to_list() for part in parts)))


def read_file(path: Path, options: ReadOptions = _DETECTED) -> Dataset:
    """Read a file by its content or its extension, one of READERS."""
    suffix = suffix_of(path)
    if suffix not in READERS:
        raise RecipeError(f"{path} must end in one of {', '.join(READERS)}. Convert it.")
    may_be_words = options.has_words and suffix in (".txt", ".tsv", ".csv")
    if suffix in _WORDS or (may_be_words and _has_empty_lines(path, options)):
        return read_conll(path, options.encoding, options.word_column, options.tag_column)
    if read_content(path).startswith(b"PAR1"):
        # The file may declare the names of classes, which Dataset reads.
        try:
            return _number_rows(Dataset(read_parquet(pa.BufferReader(read_content(path)))))
        except pa.ArrowException as error:
            raise RecipeError(f"{path} is damaged: {error}.") from error
    table = read_table(path, options.encoding, options.has_header)
    _log_format(table, is_guessed=options.encoding is None)
    rows = []
    for number, row in zip(table.numbers, table.rows, strict=True):
        row.pop("", None)
        rows.append({**row, WHERE: f"row {number}"})
    if table.format == ".txt":
        rows = _read_lines(rows)
    export = read_export(rows)
    if export is not None:
        tool, rows = export
        log(f"{path}: an export of {tool}, with {len(rows):,} examples")
    if not rows:
        raise RecipeError(f"{path} has no rows. Give a file with some.")
    return _make_data(rows)


def _has_empty_lines(path: Path, options: ReadOptions) -> bool:
    """Return whether there are empty lines, as after the sentences of a file with a word per
    line.
    """
    lines = read_text(path, options.encoding).strip().splitlines()
    return "" in map(str.strip, lines[:_SAMPLED])


def _read_lines(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines with text; those of fastText, `__label__a text`, with their labels."""
    lines, labeled = [], []
    for row in rows:
        if text := row["text"].strip():
            lines.append({**row, WHERE: row[WHERE].replace("row", "line")})
            if match := _FASTTEXT.fullmatch(text):
                labels = match[1].replace("__label__", "").split()
                label = labels[0] if len(labels) == 1 else labels
                labeled.append({**lines[-1], "text": match[2], "label": label})
    return labeled if len(labeled) == len(lines) else lines


def _number_rows(data: Dataset) -> Dataset:
    return data.add_column(WHERE, [f"row {row}" for row in range(len(data))])


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


def _log_format(table: Table, is_guessed: bool) -> None:
    """Log how a table was read, so that a wrong guess is seen."""
    message = f"{table.path}: {len(table.rows):,} rows"
    if table.format in (".csv", ".tsv"):
        message += f", separator {table.separator!r}"
    if table.format in (".csv", ".tsv", ".jsonl", ".json", ".txt"):
        encoding = table.encoding.removesuffix("-sig").replace("utf", "UTF")
        message += f", encoding {encoding}"
        if is_guessed and not encoding.startswith("UTF"):
            message += " (if letters look wrong, name another with --encoding)"
    log("\nnote: ".join([message, *table.notes]))
