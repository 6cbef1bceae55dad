"""Text data sets from files and from the Hub: their splits, their columns, their tokens."""

import csv
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


SPLITS = ("train", "validation", "test")
VALIDATION_SHARE = 0.1
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


def looks_like_a_path(name: str) -> bool:
    """Return whether a name cannot be a name on the Hub, or a file or folder of that name exists."""
    path = Path(name)
    return path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists()


def _read_lines(path: Path) -> pd.DataFrame:
    """Read one text per line, without empty lines, as the column `text`."""
    return pd.DataFrame({"text": [line for line in path.read_text("utf-8").split("\n") if line.strip()]})


def _read_conll(path: Path) -> pd.DataFrame:
    """Read sentences from a CoNLL file: words from its first column, tags from its last, without document marks.

    Raises:
        ValueError: If a line has a word without a tag.
    """
    sentences: list[tuple[list[str], list[str]]] = [([], [])]
    for number, line in enumerate(path.read_text("utf-8").split("\n"), start=1):
        columns = line.split()
        if not columns or columns[0] == "-DOCSTART-":
            sentences.append(([], []))
        elif len(columns) == 1:
            raise ValueError(f"line {number} must have a word and a tag, got {line[:50]!r}")
        else:
            sentences[-1][0].append(columns[0])
            sentences[-1][1].append(columns[-1])
    return pd.DataFrame([sentence for sentence in sentences if sentence[0]], columns=["tokens", "tags"])


# Words such as "None" and "NA" are text, not missing values, and "007" keeps its zeros.
_as_text = {"dtype": str, "keep_default_na": False}
READERS: dict[str, Callable[[Path], pd.DataFrame | pa.Table]] = {
    ".parquet": read_table,  # pandas would drop the class names
    ".csv": partial(pd.read_csv, **_as_text),
    # Tab-separated files have no quoting, like GLUE's own: a quotation mark is part of the text.
    ".tsv": partial(pd.read_csv, sep="\t", quoting=csv.QUOTE_NONE, **_as_text),
    ".jsonl": partial(pd.read_json, lines=True, dtype=False),
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
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} must be UTF-8 text: {error}. Convert it, e.g. with iconv -t UTF-8.") from error
    except (ValueError, OSError) as error:
        raise RecipeError(f"{path} cannot be read as {path.suffix[1:]}: {error}") from error
    if not len(table):
        raise RecipeError(f"{path} has no rows.")
    return Dataset(table) if isinstance(table, pa.Table) else Dataset.from_pandas(table, preserve_index=False)


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
            raise RecipeError(f"{name}: column {column!r} must hold text, row {row} has {data[row][column]!r}.")


def leave_out_empty(data: Dataset, name: str, text_columns: Sequence[str]) -> Dataset:
    """Return the rows with text in any of the columns, and report how many have none; blanks are no text.

    Raises:
        RecipeError: If no row has text.
    """
    columns = [data[column] for column in text_columns]
    rows = [row for row, texts in enumerate(zip(*columns, strict=True)) if any(map(str.strip, texts))]
    if not rows:
        raise RecipeError(f"{name} must hold text; all its {len(data):,} rows are empty.")
    if len(rows) < len(data):
        print(f"{name}: {len(data) - len(rows):,} rows without text are left out")
    return data.select(rows)


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


def sample(data: Dataset, size: int | None, seed: int) -> Dataset:
    """Return `size` random rows in their order; all rows if `size` is None or larger."""
    if size is None or size >= len(data):
        return data
    return data.select(sorted(np.random.default_rng(seed).permutation(len(data))[:size]))


def tokenize(
    data: Dataset, tokenizer: PreTrainedTokenizerBase, text_columns: Sequence[str], max_length: int
) -> Dataset:
    """Add the tokens of the texts, truncated to max_length and unpadded, and their number as `length`.

    Texts are cut to 100 characters per token before they are tokenized, so that a huge text costs little.
    """
    max_length = min(max_length, tokenizer.model_max_length)
    characters = max_length * CHARACTERS_PER_TOKEN

    def tokenize_batch(rows: dict[str, list[str]]) -> dict[str, list[list[int]] | list[int]]:
        texts = [[text[:characters] for text in rows[column]] for column in text_columns]
        tokens = tokenizer(*texts, truncation=True, max_length=max_length)
        return {**tokens, "length": [len(ids) for ids in tokens["input_ids"]]}

    return data.map(tokenize_batch, batched=True, desc="Tokenizing")
