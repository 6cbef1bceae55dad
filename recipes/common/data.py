"""Text data sets from files and from the Hub: one folder per task, one file per split."""

import csv
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from datasets import Dataset, load_dataset
from pyarrow.parquet import read_table
from transformers import PreTrainedTokenizerBase

from common.errors import RecipeError
from common.names import looks_like_a_path


SPLITS = ("train", "validation", "test")
# Far more than tokens have on average, so that what is cut off before tokenizing would be cut off after it.
CHARACTERS_PER_TOKEN = 100


def _read_lines(path: Path) -> pd.DataFrame:
    """A text per line, without the empty ones, as the column `text`."""
    return pd.DataFrame({"text": [line for line in path.read_text("utf-8").split("\n") if line.strip()]})


def _read_conll(path: Path) -> pd.DataFrame:
    """Words and tags of the sentences of a CoNLL file: its first and its last column; marks of documents are left out.

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


# Words such as "None" or "NA" are text here, not missing values, and "007" keeps its zeros.
_as_text = {"dtype": str, "keep_default_na": False}
READERS: dict[str, Callable[[Path], pd.DataFrame | pa.Table]] = {
    ".parquet": read_table,  # not by pandas, which would drop the names of the classes
    ".csv": partial(pd.read_csv, **_as_text),
    # Tab-separated values have no quoting (as in GLUE's own files): a quotation mark is a character of the text.
    ".tsv": partial(pd.read_csv, sep="\t", quoting=csv.QUOTE_NONE, **_as_text),
    ".jsonl": partial(pd.read_json, lines=True, dtype=False),
    ".txt": _read_lines,
    ".conll": _read_conll,
}


def load_splits(data: str, config: str | None = None) -> dict[str, Dataset]:
    """Reads the splits that are there of train (always), validation and test.

    Args:
        data: A folder with a file per split, as for read_split; one file, which is all train; or a name on the Hub.
        config: Configuration of the data set on the Hub.

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
        raise RecipeError(f"The data set {data!r} has no split 'train', only {', '.join(splits)}.")
    return {split: splits[split] for split in SPLITS if split in splits}


def read_split(folder: Path, split: str) -> Dataset:
    """Reads `folder`/`split` with the first ending of READERS that is there.

    Raises:
        RecipeError: If the folder or the file is missing, cannot be read or holds no row.
    """
    if not folder.is_dir():
        raise RecipeError(f"There is no folder {folder}. It should hold one file per split, such as train.parquet.")
    path = next((path for ending in READERS if (path := folder / f"{split}{ending}").is_file()), None)
    if path is None:
        found = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        raise RecipeError(f"{folder} has no split {split!r}: expected {split}{{{','.join(READERS)}}}, found {found}.")
    return read_file(path)


def read_file(path: Path) -> Dataset:
    """Reads a file by its ending, one of READERS.

    Raises:
        RecipeError: If it has another ending, cannot be read or holds no row.
    """
    if path.suffix not in READERS:
        raise RecipeError(f"{path} must end in one of {', '.join(READERS)}. Convert it, or rename it.")
    try:
        table = READERS[path.suffix](path)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} must be UTF-8 text: {error}. Convert it, as with iconv -t UTF-8.") from error
    except (ValueError, OSError) as error:
        raise RecipeError(f"{path} cannot be read as {path.suffix[1:]}: {error}") from error
    if not len(table):
        raise RecipeError(f"{path} holds no row.")
    return Dataset(table) if isinstance(table, pa.Table) else Dataset.from_pandas(table, preserve_index=False)


def describe_data(
    name: str, source: str | None, config: str | None, splits: Mapping[str, Dataset], split: str = "validation"
) -> dict[str, Any]:
    """What results.json says of the data: their name, where they are if that is the Hub, the split that the scores
    are of, and the rows of all splits."""
    on_hub = source is not None and not looks_like_a_path(source)
    place = {"id": source, "config": config} if on_hub else {}
    return {"name": name, **place, "split": split, "rows": {key: len(data) for key, data in splits.items()}}


def check_columns(
    data: Dataset, name: str, text_columns: Sequence[str], label_columns: Sequence[str] = ("label",)
) -> None:
    """Raises RecipeError unless `data`, called `name`, has the text columns, all of strings, and the labels'."""
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


def numeric_labels(data: Dataset, name: str, num_labels: int, score_range: tuple[float, float]) -> Dataset:
    """Checks the column `label` and makes it numeric.

    Args:
        data: The split.
        name: What to call it in errors.
        num_labels: Number of classes: labels are whole numbers from 0 to num_labels - 1. With 1 they are real scores.
        score_range: Lowest and highest score; used with num_labels = 1 only.

    Raises:
        RecipeError: If a label is not a number of that range.
    """
    labels = np.asarray(pd.to_numeric(pd.Series(data["label"]), errors="coerce"), dtype=np.float64)
    low, high = score_range if num_labels == 1 else (0, num_labels - 1)
    valid = (labels >= low) & (labels <= high)  # False for NaN, that is for what is no number
    if num_labels > 1:
        valid &= labels == np.round(labels)
    if not valid.all():
        row = int(np.argmin(valid))
        kind = "number" if num_labels == 1 else "whole number"
        raise RecipeError(
            f"{name}: label must be a {kind} from {low:g} to {high:g}, row {row} has {data[row]['label']!r}. "
            "Unlabelled rows (-1) can neither train nor score a model: leave them out."
        )
    values = labels.astype(np.float32 if num_labels == 1 else np.int64)
    return data.remove_columns("label").add_column("label", values.tolist() if num_labels > 1 else values)


def tokenize(
    data: Dataset, tokenizer: PreTrainedTokenizerBase, text_columns: Sequence[str], max_length: int
) -> Dataset:
    """Adds the tokens of the texts, cut to max_length, unpadded, and their number as `length` for length grouping.

    A text of any size costs little: it is cut to 100 characters per token before it is tokenized.
    """
    max_length = min(max_length, tokenizer.model_max_length)
    characters = max_length * CHARACTERS_PER_TOKEN

    def tokenize_batch(rows: dict[str, list[str]]) -> dict[str, list[list[int]] | list[int]]:
        texts = [[text[:characters] for text in rows[column]] for column in text_columns]
        tokens = tokenizer(*texts, truncation=True, max_length=max_length)
        return {**tokens, "length": [len(ids) for ids in tokens["input_ids"]]}

    return data.map(tokenize_batch, batched=True, desc="Tokenizing")
