"""Text data sets from files and from the Hub: their splits, their columns, their tokens."""

import csv
import io
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from datasets import Dataset, load_dataset
from pyarrow.parquet import read_table
from transformers import PreTrainedTokenizerBase

from training.errors import RecipeError
from training.rules import looks_like_a_path


SPLITS = ("train", "validation", "test")
VALIDATION_SHARE = 0.1
# Columns that the Trainer takes for labels.
LABEL_NAMES = ("label", "labels", "label_ids")
# Far more than a token has on average, so that text cut before tokenizing would also be cut after it.
CHARACTERS_PER_TOKEN = 100
# Usual names of text columns; the first entry of which a data set has all columns is used.
TEXT_COLUMNS = (
    ("text",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "context"),
    ("question", "sentence"),
    ("sentence",),
    ("content",),
    ("review",),
)


def _read_text(path: Path) -> str:
    """Read a UTF-8 file, with any kind of line ends.

    Raises:
        ValueError: If the file holds NUL, as binary files and UTF-16 do.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        text = file.read()
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise ValueError(f"line {line} holds the character NUL; remove it, or convert the file to UTF-8 text")
    return text


def _read_table(path: Path, separator: str, **options: Any) -> pd.DataFrame:
    """Read separated values, all as text: words such as "None" and "NA" are no missing values, and "007" keeps its
    zeros.

    Raises:
        ValueError: If a line has not as many fields as the header, or two columns have one name.
    """
    csv.field_size_limit(2**31 - 1)
    # Without empty lines, which have no fields.
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), delimiter=separator, strict=True, **options)
    header: list[str] = []
    rows = []
    try:
        for fields in reader:
            if not fields:
                continue
            if not header:
                _check_header(fields, separator)
                header = fields
                continue
            if len(fields) != len(header):
                remedy = "" if options else "; put quotation marks around a text that holds a comma"
                raise ValueError(
                    f"line {reader.line_num} must have {len(header)} fields like the header, got {len(fields)}{remedy}"
                )
            rows.append(fields)
    except csv.Error as error:
        remedy = "close each quotation mark, and double those in a text"
        raise ValueError(f"line {reader.line_num}: {error}; {remedy}") from error
    return pd.DataFrame(rows, columns=header, dtype=object)


def _check_header(names: Sequence[str], separator: str) -> None:
    other = next((sign for sign in ";\t|," if len(names) == 1 and sign in names[0]), None)
    if other is not None:
        raise ValueError(
            f"the fields of a {'.csv' if separator == ',' else '.tsv'} file must be separated by {separator!r}, and "
            f"the header has {other!r}; save it with {separator!r}, or rename it if it is .csv or .tsv"
        )
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"each column needs its own name, and {repeated!r} is there more than once; rename one")


def _read_json_lines(path: Path) -> pd.DataFrame:
    """Read a JSON object per line.

    Raises:
        ValueError: If a line is not an object, or a column holds values of different kinds.
    """
    rows = []
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
    return pd.DataFrame({name: pd.Series([row.get(name) for row in rows], dtype=object) for name in kinds})


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"each key must be there once, got {', '.join(name for name, _ in pairs)}")
    return found


_JSON_KINDS = {str: "text", float: "a number", bool: "true or false", list: "a list", dict: "an object"}


def _read_lines(path: Path) -> pd.DataFrame:
    """Read one text per line, without empty lines, as the column `text`."""
    lines = _read_text(path).replace("\r\n", "\n").split("\n")
    return pd.DataFrame({"text": [line for line in lines if line.strip()]})


def _read_conll(path: Path) -> pd.DataFrame:
    """Read sentences from a CoNLL file: words from its first column, tags from its last, without document marks.

    Raises:
        ValueError: If a line has a word without a tag.
    """
    sentences: list[tuple[list[str], list[str]]] = [([], [])]
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        columns = line.split()
        if not columns or columns[0] == "-DOCSTART-":
            sentences.append(([], []))
        elif len(columns) == 1:
            raise ValueError(f"line {number} must have a word and a tag, got {line[:50]!r}")
        else:
            sentences[-1][0].append(columns[0])
            sentences[-1][1].append(columns[-1])
    return pd.DataFrame([sentence for sentence in sentences if sentence[0]], columns=["tokens", "tags"])


READERS: dict[str, Callable[[Path], pd.DataFrame | pa.Table]] = {
    ".parquet": read_table,  # pandas would drop the class names
    ".csv": partial(_read_table, separator=","),
    # Tab-separated files have no quoting, like GLUE's own: a quotation mark is part of the text.
    ".tsv": partial(_read_table, separator="\t", quoting=csv.QUOTE_NONE),
    ".jsonl": _read_json_lines,
    ".txt": _read_lines,
    ".conll": _read_conll,
}


def load_splits(data: str, config: str | None = None) -> dict[str, Dataset]:
    """Load train and, if present, validation and test.

    Args:
        data: A folder with a file per split, as in read_split; one file, which becomes train; or a name on the Hub.
        config: The configuration of a data set on the Hub.

    Raises:
        RecipeError: If train is missing, a file cannot be read, or the Hub has no such data set.
    """
    path = Path(data).expanduser()
    if path.is_file():
        return {"train": read_file(path)}
    if looks_like_a_path(data):
        present = {file.stem for file in path.glob("*") if file.suffix in READERS}
        return {split: read_split(path, split) for split in SPLITS if split in present or split == "train"}
    try:
        splits = load_dataset(data, config)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"Cannot load the data set {data!r} from the Hub: {error}. Without a network, give a folder or a file."
        ) from error
    if "train" not in splits:
        raise RecipeError(f"The data set {data!r} must have a split 'train', got only {', '.join(splits)}.")
    return {split: splits[split] for split in SPLITS if split in splits}


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
    """Read a file by its extension, one of READERS.

    Raises:
        RecipeError: If it has another extension, cannot be read or has no rows.
    """
    if path.suffix not in READERS:
        raise RecipeError(f"{path} must end in one of {', '.join(READERS)}. Convert it, or rename it.")
    try:
        table = READERS[path.suffix](path)
        if not len(table):
            raise ValueError("it has no rows; give a file with examples")
        return Dataset(table) if isinstance(table, pa.Table) else Dataset.from_pandas(table, preserve_index=False)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} must be UTF-8 text: {error}. Convert it, e.g. with iconv -t UTF-8.") from error
    # PyArrow's errors are of all kinds.
    except (ValueError, TypeError, OSError, NotImplementedError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{path} cannot be read as {path.suffix[1:]}: {reason}.") from error


def describe_data(
    name: str, source: str | None, config: str | None, splits: Mapping[str, Dataset], split: str = "validation"
) -> dict[str, Any]:
    """Return what results.json says of the data: the name, the address on the Hub if they are there, the split that
    the scores are of, and the rows of all splits."""
    on_hub = source is not None and not looks_like_a_path(source)
    address = {"id": source, "config": config} if on_hub else {}
    return {"name": name, **address, "split": split, "rows": {key: len(data) for key, data in splits.items()}}


def find_text_columns(data: Dataset, named: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns of a text or a pair of texts: those named on the command line, else by TEXT_COLUMNS.

    Raises:
        RecipeError: If more than two are named, or none is named and none found.
    """
    if named is not None:
        if not 1 <= len(named) <= 2:
            raise RecipeError(f"--text_columns must name a text or a pair of texts, got {', '.join(named)}.")
        taken = [name for name in named if name in LABEL_NAMES]
        if taken:
            raise RecipeError(
                f"--text_columns must not name {taken[0]!r}, which is a label's name. Rename the column."
            )
        return tuple(named)
    found = next((columns for columns in TEXT_COLUMNS if set(columns) <= set(data.column_names)), None)
    if found is None:
        raise RecipeError(
            f"No column has one of the usual names for text: there are {', '.join(data.column_names)}. Name one, or "
            "two for pairs, with --text_columns."
        )
    return found


def find_column(data: Dataset, named: str | None, usual: Sequence[str], flag: str) -> str:
    """Return the column that the flag names, else the first of the usual names that exists.

    Raises:
        RecipeError: If there is none.
    """
    found = next((column for column in ([named] if named else usual) if column in data.column_names), None)
    if found is None:
        wanted = repr(named) if named else f"named {' or '.join(usual)}"
        raise RecipeError(f"There is no column {wanted}, only {', '.join(data.column_names)}. Name it with {flag}.")
    return found


def check_columns(
    data: Dataset, name: str, text_columns: Sequence[str], label_columns: Sequence[str] = ("label",)
) -> None:
    """Raise RecipeError unless the split `name` has the text columns, all of strings, and the label columns."""
    needed = (*text_columns, *label_columns)
    missing = [column for column in needed if column not in data.column_names]
    if missing:
        raise RecipeError(
            f"{name} lacks the column {missing[0]!r}: it needs {', '.join(needed)} "
            f"and has {', '.join(data.column_names)}. Rename the columns of the file."
        )
    for column in text_columns:
        row = next((row for row, text in enumerate(data[column]) if not isinstance(text, str)), None)
        if row is not None:
            raise RecipeError(
                f"{name}: column {column!r} must hold text, row {row} has {data[row][column]!r}. "
                "Give it a text, or leave the row out."
            )


def rows_with_text(data: Dataset, name: str, text_columns: Sequence[str]) -> list[int]:
    """Return the numbers of the rows with text in any of the columns, and report how many have none; blanks are no
    text.

    Raises:
        RecipeError: If no row has text.
    """
    columns = [data[column] for column in text_columns]
    rows = [row for row, texts in enumerate(zip(*columns, strict=True)) if any(map(str.strip, texts))]
    if not rows:
        raise RecipeError(f"{name} must hold text; all its {len(data):,} rows are empty. Give examples with text.")
    if len(rows) < len(data):
        print(f"{name}: {len(data) - len(rows):,} rows without text are left out")
    return rows


def with_validation(splits: dict[str, Dataset], labels: Sequence[Hashable] | None = None) -> dict[str, Dataset]:
    """Return the splits; if there is no validation split, move a random tenth of train into one.

    The rows do not depend on the seed of the run, so that runs with several seeds are scored on the same rows.

    Args:
        splits: The splits, with at least two rows in "train" if there is no "validation".
        labels: The label of each row of train. One row of each stays in train, so that every label is learned.

    Raises:
        RecipeError: If that leaves no row for validation.
    """
    if "validation" in splits:
        return splits
    train = splits["train"]
    order = np.random.default_rng(0).permutation(len(train))
    wanted = max(1, round(VALIDATION_SHARE * len(train)))
    seen: set[Hashable] = set()
    free = []
    for row in order:
        label = None if labels is None else labels[row]
        if label in seen:
            free.append(row)
        seen.add(label)
    chosen = free[:wanted]
    if not chosen:
        raise RecipeError(
            f"No validation split can be made of {len(train):,} training examples, as one of each label must stay in "
            "training. Give one, as validation.csv."
        )
    print(f"no validation split: {len(chosen):,} of the {len(train):,} training examples are used instead")
    kept = np.setdiff1d(np.arange(len(train)), chosen)
    return {**splits, "train": train.select(kept), "validation": train.select(sorted(chosen))}


def sample(data: Dataset, size: int | None) -> Dataset:
    """Return `size` random rows in their order; all rows if `size` is None or larger.

    The rows do not depend on the seed of the run, so that runs with several seeds differ in nothing else.
    """
    if size is None or size >= len(data):
        return data
    return data.select(sorted(np.random.default_rng(0).permutation(len(data))[:size]))


def tokenize(
    data: Dataset, tokenizer: PreTrainedTokenizerBase, text_columns: Sequence[str], max_length: int
) -> Dataset:
    """Add the tokens of the texts, truncated to max_length and unpadded, and their number as `length`.

    Texts are cut to 100 characters per token before they are tokenized, so that a huge text costs little.
    """
    max_length = token_limit(tokenizer, max_length, len(text_columns))
    characters = max_length * CHARACTERS_PER_TOKEN

    def tokenize_batch(rows: dict[str, list[str]]) -> dict[str, list[list[int]] | list[int]]:
        texts = [[text[:characters] for text in rows[column]] for column in text_columns]
        tokens = tokenizer(*texts, truncation=True, max_length=max_length)
        return {**tokens, "length": [len(ids) for ids in tokens["input_ids"]]}

    return data.map(tokenize_batch, batched=True, desc="Tokenizing")


def token_limit(tokenizer: PreTrainedTokenizerBase, max_length: int, texts: int = 1) -> int:
    """Return the number of tokens to which examples are truncated: --max_length, or the encoder's if that is less.

    Args:
        tokenizer: The encoder's tokenizer.
        max_length: The value of --max_length.
        texts: The number of texts of an example, 1 or 2.

    Raises:
        RecipeError: If that leaves no room for a token of each text.
    """
    least = tokenizer.num_special_tokens_to_add(pair=texts > 1) + texts
    if max_length < least:
        raise RecipeError(
            f"--max_length must be at least {least}, for the special tokens and one token of each text, got "
            f"{max_length}. Raise it."
        )
    return min(max_length, tokenizer.model_max_length)
