"""Text data sets from files and from the Hub: their splits, their columns, their tokens."""

import shlex
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError
from transformers import PreTrainedTokenizerBase

from houlsby_peft import AdapterError
from houlsby_peft.tables import check_number_of_texts, match_column
from houlsby_peft.tables import find_text_columns as find_usual_columns
from training.errors import RecipeError
from training.files import measure
from training.rules import looks_like_a_path
from training.tables import READERS, columns_of, find_split, locate, log, number_rows, read_file, read_split


SPLITS = ("train", "validation", "test")
VALIDATION_SHARE = 0.1
# Columns that the Trainer takes for labels.
LABEL_NAMES = ("label", "labels", "label_ids")
# Far more than a token has on average, so that text cut before tokenizing would also be cut after it.
CHARACTERS_PER_TOKEN = 100
_LISTED = 5  # lines of a file in a message


def load_splits(data: str, config: str | None = None, **files: str | None) -> dict[str, Dataset]:
    """Load train and, if present, validation and test.

    Args:
        data: A folder with a file per split, as in read_split; one file, which becomes train; or a name on the Hub.
        config: The configuration of a data set on the Hub.
        files: Files of single splits, by their names, which replace those of `data`.

    Raises:
        RecipeError: If train is missing, a file cannot be read, or the Hub has no such data set.
    """
    own = {split: read_file(Path(file).expanduser()) for split, file in files.items() if file is not None}
    path = Path(data).expanduser()
    if path.is_file():
        return {"train": read_file(path), **own}
    if looks_like_a_path(data):
        present = {file.stem for file in path.glob("*") if file.suffix in READERS}
        return {split: read_split(path, split) for split in SPLITS if split in present or split == "train"} | own
    try:
        splits = load_dataset(data, config)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:  # RuntimeError: it is a script
        raise RecipeError(
            f"Cannot load the data set {data!r} from the Hub: {error}. Without a network, give a folder or a file."
        ) from error
    if "train" not in splits:
        raise RecipeError(f"The data set {data!r} must have a split 'train', got only {', '.join(splits)}.")
    return {split: number_rows(splits[split]) for split in SPLITS if split in splits} | own


def find_files(data: str, **files: str | None) -> dict[str, Path]:
    """Return the files that load_splits reads, by their splits; those on the Hub have none.

    Args:
        data, files: As for load_splits.
    """
    own = {split: Path(file).expanduser() for split, file in files.items() if file is not None}
    path = Path(data).expanduser()
    if path.is_file():
        return {"train": path, **own}
    if not looks_like_a_path(data):
        return own
    return {split: file for split in SPLITS if (file := find_split(path, split)) is not None} | own


def describe_data(
    name: str, source: str | None, config: str | None, splits: Mapping[str, Dataset], split: str = "validation"
) -> dict[str, Any]:
    """Return what results.json says of the data: the name, the address on the Hub if they are there, the size and the
    checksum if they are a file, the split that the scores are of, and the rows of all splits."""
    on_hub = source is not None and not looks_like_a_path(source)
    address: dict[str, Any] = {"id": source, "config": config} if on_hub else {}
    if source is not None and (path := Path(source).expanduser()).is_file():
        address = {"file": measure(path)}
    return {"name": name, **address, "split": split, "rows": {key: len(data) for key, data in splits.items()}}


def find_text_columns(
    data: Dataset, named: Sequence[str] | None, recorded: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the columns of a text or a pair of texts: those named on the command line, else those recorded if the
    data have all of them, else by their usual names.

    Args:
        data: The data.
        named: The names on the command line.
        recorded: The columns that what is evaluated was trained on. None: nothing is evaluated, or they are unknown.

    Raises:
        RecipeError: If more than two are named, or none is named and none found.
        AdapterError: If they are one and those recorded two, or the reverse.
    """
    found = _find_text_columns(data, named, recorded)
    check_number_of_texts(found, recorded, "--text_columns")
    return found


def _find_text_columns(data: Dataset, named: Sequence[str] | None, recorded: Sequence[str] | None) -> tuple[str, ...]:
    if named is not None:
        if not 1 <= len(named) <= 2:
            raise RecipeError(f"--text_columns must name a text or a pair of texts, got {', '.join(named)}.")
        taken = [name for name in named if name in LABEL_NAMES]
        if taken:
            raise RecipeError(
                f"--text_columns must not name {taken[0]!r}, which is a label's name. Rename the column."
            )
        return tuple(match_column(columns_of(data), name) or name for name in named)
    try:
        return tuple(find_usual_columns(columns_of(data), recorded=recorded))  # as `houlsby-peft predict` finds them
    except AdapterError as error:
        widths = {name: sum(map(len, map(str, data[:100][name]))) for name in columns_of(data)}
        raise RecipeError(
            f"No column has one of the usual names for text, such as text or message: there are {', '.join(widths)}. "
            f"Name one, or two for pairs: --text_columns {shlex.quote(max(widths, key=widths.get))} if that is the "
            "text."
        ) from error


def find_column(data: Dataset, named: str | None, usual: Sequence[str], flag: str) -> str:
    """Return the column that the flag names, else the first of the usual names that exists.

    Raises:
        RecipeError: If there is none.
    """
    columns = columns_of(data)
    found = next((column for name in ([named] if named else usual) if (column := match_column(columns, name))), None)
    if found is None:
        wanted = repr(named) if named else f"named {' or '.join(usual)}"
        raise RecipeError(f"There is no column {wanted}, only {', '.join(columns)}. Name it with {flag}.")
    return found


def check_columns(
    data: Dataset,
    name: str,
    text_columns: Sequence[str],
    label_columns: Sequence[str] = ("label",),
    flags: Sequence[str] = (),
) -> None:
    """Raise RecipeError unless the split `name` has the text columns, all of strings, and the label columns.

    Args:
        data: The split.
        name: Its name.
        text_columns: Names of the columns of the texts.
        label_columns: Names of the columns of the labels.
        flags: The recipe's flags that name other columns, if it has any.
    """
    needed = (*text_columns, *label_columns)
    missing = [column for column in needed if column not in data.column_names]
    if missing:
        remedy = f"Name others with {' or '.join(flags)}, or rename" if flags else "Rename"
        raise RecipeError(
            f"{name} lacks the column {missing[0]!r}: it needs {', '.join(needed)} "
            f"and has {', '.join(columns_of(data))}. {remedy} the columns of the file."
        )
    for column in text_columns:
        row = next((row for row, text in enumerate(data[column]) if not isinstance(text, str)), None)
        if row is not None:
            raise RecipeError(
                f"{name}: column {column!r} must hold text, {locate(data, row)} has {data[row][column]!r}. "
                "Give it a text, or leave the row out."
            )


def rows_with_text(data: Dataset, name: str, text_columns: Sequence[str]) -> Dataset:
    """Return the rows with text in any of the columns, and report how many have none; blanks are no text.

    Raises:
        RecipeError: If no row has text.
    """
    columns = [data[column] for column in text_columns]
    rows = [row for row, texts in enumerate(zip(*columns, strict=True)) if any(map(str.strip, texts))]
    if not rows:
        raise RecipeError(f"{name} must hold text; all its {len(data):,} rows are empty. Give examples with text.")
    return keep_rows(data, rows, f"{name}: {{}} without text")


def keep_rows(data: Dataset, rows: Sequence[int], what: str) -> Dataset:
    """Return some rows of a data set, and report how many others there are and where the first of them are.

    Args:
        data: The data set.
        rows: The numbers of the rows to keep, in their order.
        what: What the others are, with {} for their number, such as "train: {} without text".
    """
    if len(rows) == len(data):
        return data
    others = np.setdiff1d(np.arange(len(data)), rows)
    count = f"{len(others):,} row{'s' if len(others) > 1 else ''}"
    first = ", ".join(locate(data, int(row)) for row in others[:_LISTED])
    log(f"{what.format(count)} left out ({first}{', ...' if len(others) > _LISTED else ''})")
    return data.select(rows)


def with_validation(splits: dict[str, Dataset], labels: Sequence[Hashable] | None = None) -> dict[str, Dataset]:
    """Return the splits; if there is no validation split, move a random tenth of train into one, of each label alike.

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
    wanted = max(1, round(VALIDATION_SHARE * len(train)))
    generator = np.random.default_rng(0)
    of_label: dict[Hashable, list[int]] = {}
    for row in generator.permutation(len(train)):
        of_label.setdefault(None if labels is None else labels[row], []).append(int(row))
    # The rows of each label are spread evenly over 0 to 1, from a random start. Those of the lowest tenth are chosen,
    # so that even of rare labels a tenth is chosen on average.
    shares = (
        ((number + start) / len(rows), row)
        for rows in of_label.values()
        for start in [generator.random()]
        for number, row in enumerate(rows[:-1])
    )
    chosen = sorted(row for _, row in sorted(shares)[:wanted])
    if not chosen:
        raise RecipeError(
            f"No validation split can be made of {len(train):,} training examples, as one of each label must stay in "
            "training. Give one, as validation.csv."
        )
    log(f"no validation split: {len(chosen):,} of the {len(train):,} training examples are used instead")
    kept = np.setdiff1d(np.arange(len(train)), chosen)
    return {**splits, "train": train.select(kept), "validation": train.select(chosen)}


def sample(data: Dataset, size: int | None) -> Dataset:
    """Return `size` random rows in their order; all rows if `size` is None or larger.

    The rows do not depend on the seed of the run, so that runs with several seeds differ in nothing else.
    """
    if size is None or size >= len(data):
        return data
    return data.select(sorted(np.random.default_rng(0).permutation(len(data))[:size]))


def tokenize(
    data: Dataset, tokenizer: PreTrainedTokenizerBase, text_columns: Sequence[str], max_length: int, name: str = ""
) -> Dataset:
    """Add the tokens of the texts, truncated to max_length and unpadded, and their number as `length`.

    Texts are cut to 100 characters per token before they are tokenized, so that a huge text costs little. Of the split
    called train, the log says how many texts reach max_length.
    """
    max_length = token_limit(tokenizer, max_length, len(text_columns))
    characters = max_length * CHARACTERS_PER_TOKEN

    def tokenize_batch(rows: dict[str, list[str]]) -> dict[str, list[list[int]] | list[int]]:
        texts = [[text[:characters] for text in rows[column]] for column in text_columns]
        tokens = tokenizer(*texts, truncation=True, max_length=max_length)
        return {**tokens, "length": [len(ids) for ids in tokens["input_ids"]]}

    tokenized = data.map(tokenize_batch, batched=True, desc="Tokenizing")
    full = sum(length == max_length for length in tokenized["length"]) if name == "train" else 0
    if full:
        log(f"{full:,} of {len(data):,} training texts reach {max_length} tokens, where texts are truncated; see "
            "--max_length")  # fmt: skip
    return tokenized


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
