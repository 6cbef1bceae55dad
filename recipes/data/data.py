"""The rows and columns of a data set: where the texts are, which rows are used, their tokens."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from datasets import Dataset, Value
from transformers import PreTrainedTokenizerBase

from data.exports import suggest_table
from houlsby_peft import AdapterError
from houlsby_peft.tables import LABEL_COLUMNS, check_number_of_texts, is_title, match_column
from houlsby_peft.tables import find_text_columns as find_usual_columns
from run.edge import RecipeError, log
from run.run import WHERE


_WIDTH_OF_TEXT = 15  # characters of a column, on average, that is taken for the text
_LISTED, _MOST_COLUMNS = 5, 20  # rows and columns in a message


def locate(data: Dataset, row: int) -> str:
    """Return where a row is in the user's file, such as "line 12"."""
    if WHERE in data.column_names:
        return str(data[row][WHERE])
    return f"row {row}"


def commit_of(data: Dataset) -> str | None:
    """Return the commit of a data set from the Hub, or None.

    The library datasets names the folder of its files after it.
    """
    for file in data.cache_files:
        name = Path(file["filename"]).parent.name
        if re.fullmatch("[0-9a-f]{40}", name):
            return name
    return None


def lines_of(data: Dataset) -> list[str]:
    """Return where each row is in the user's file, such as "12" for row 12 or line 12."""
    places = [locate(data, row) for row in range(len(data))]
    return [place.removeprefix("line ").removeprefix("row ") for place in places]


def locate_first(data: Dataset, rows: Sequence[int]) -> str:
    """Return where the first of some rows are, such as "line 3, line 8, ..."."""
    where = ", ".join(locate(data, row) for row in rows[:_LISTED])
    return where + ", ..." * (len(rows) > _LISTED)


def columns_of(data: Dataset) -> list[str]:
    """Return the columns of the user's file."""
    return [name for name in data.column_names if name != WHERE]


def list_columns(data: Dataset) -> str:
    """Return the columns of the user's file for a message, the first ones of many."""
    columns = columns_of(data)
    return ", ".join(columns[:_MOST_COLUMNS]) + ", ..." * (len(columns) > _MOST_COLUMNS)


def rows_of(data: Dataset, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the values of each row in these columns, such as its pair of texts."""
    return list(zip(*(data[column] for column in columns), strict=True))


def find_text_columns(
    data: Dataset,
    named: Sequence[str] | None,
    recorded: Sequence[str] | None = None,
    label_columns: Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Return the columns of a text or a pair of texts.

    They are those named on the command line, else those recorded if the data have all of them. Else
    they are found by their usual names. Without those, the column with the longest texts is used,
    as it is in place of a title, or the one beside a column of labels.
    """
    longest = None if named or recorded else _find_longest(data)
    try:
        # As `houlsby-peft predict` does.
        text_columns = tuple(find_usual_columns(columns_of(data), named, recorded=recorded))
    except AdapterError as error:
        if longest is None and not named:
            longest = _find_other(data, label_columns or LABEL_COLUMNS)
        if longest is None:
            raise AdapterError(f"{error}{suggest_table(data)}") from error
        log(f"no column has a usual name for text; {longest!r} has the longest")
        text_columns = (longest,)
    if longest is not None and len(text_columns) == 1 and is_title(text_columns[0]):
        text_columns = (longest,)
    check_number_of_texts(text_columns, recorded, "--text_columns", "This adapter")
    return text_columns


def _find_other(data: Dataset, label_columns: Sequence[str]) -> str | None:
    """Return the one column beside that of the labels, which has a usual name or, of two columns,
    fewer values; None if there are more.
    """
    usual = {name.lower() for name in label_columns}
    columns = columns_of(data)
    others = [name for name in columns if name.strip().lower() not in usual]
    if len(others) == 1 < len(columns):
        return others[0]
    if len(columns) != 2:
        return None
    counts = {name: len(set(map(str, data[name]))) for name in columns}
    is_clear = max(counts.values()) > len(data) / 2 >= min(counts.values())
    return max(counts, key=counts.__getitem__) if is_clear else None


def _find_longest(data: Dataset) -> str | None:
    """Return the column with the longest values that differ, or None if they are no texts."""
    first_rows, widths = data[:100], {}
    for name in columns_of(data):
        values = [value for value in first_rows[name] if isinstance(value, str)]
        if len(set(values)) > len(first_rows[name]) / 2:
            widths[name] = fmean(map(len, values))
    longest = max(widths, key=widths.__getitem__, default=None)
    if longest is None or widths[longest] < _WIDTH_OF_TEXT:
        return None
    return longest


def find_column(data: Dataset, named: str | None, usual: Sequence[str], flag: str) -> str:
    """Return the column that the flag names, else the first of the usual names that exists."""
    columns = columns_of(data)
    for name in [named] if named else usual:
        column = match_column(columns, name)
        if column is not None:
            return column
    description = repr(named) if named else f"named {' or '.join(usual)}"
    raise RecipeError(
        f"There is no column {description}, only {list_columns(data)}. Name it with {flag}."
    )


def check_columns(
    data: Dataset, name: str, text_columns: Sequence[str], label_columns: Sequence[str] = ()
) -> None:
    """Raise RecipeError unless the split `name` has these columns, and strings as texts."""
    needed = [*text_columns, *label_columns]
    missing = [column for column in needed if column not in data.column_names]
    if missing:
        raise RecipeError(
            f"{name} lacks the columns {', '.join(missing)}; it has {list_columns(data)}. "
            "Rename the columns of the file, or name others with flags."
        )
    for column in text_columns:
        for row, text in enumerate(data[column]):
            if not isinstance(text, str):
                raise RecipeError(
                    f"{name}: column {column!r} must hold text, {locate(data, row)} has {text!r}."
                )


def with_strings(data: Dataset, text_columns: Sequence[str]) -> Dataset:
    """Return the data with numbers as strings, and "" where a text is missing, as in a CSV file."""
    for column in text_columns:
        type_ = data.features.get(column)
        if isinstance(type_, Value) and "binary" not in type_.dtype:
            texts = ["" if value is None else str(value) for value in data[column]]
            data = data.remove_columns(column).add_column(column, texts)
    return data


def rows_with_text(data: Dataset, name: str, text_columns: Sequence[str]) -> Dataset:
    """Return the rows with text in any of the columns; report those with blanks only."""
    texts = map("".join, rows_of(data, text_columns))
    rows = [row for row, text in enumerate(texts) if text.strip()]
    if not rows:
        raise RecipeError(
            f"{name} must hold text; all its {len(data):,} rows are empty. Give examples with text."
        )
    return keep_rows(data, rows, name, "without text")


def keep_rows(data: Dataset, rows: Sequence[int], name: str, reason: str) -> Dataset:
    """Return some rows of the split `name`; report the others, and why they are left out."""
    left_out = sorted({*range(len(data))}.difference(rows))
    if left_out:
        count = f"{len(left_out):,} row{'s' * (len(left_out) > 1)}"
        log(f"{name}: {count} {reason} left out ({locate_first(data, left_out)})")
    return data.select(rows) if left_out else data


def sample(data: Dataset, size: int | None) -> Dataset:
    """Return `size` random rows in their order, or all rows if there are no more.

    The rows do not depend on the seed of the run, so that runs with several seeds differ in nothing
    else.
    """
    if size is None or size >= len(data):
        return data
    return data.select(sorted(np.random.default_rng(0).permutation(len(data))[:size]))


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise RecipeError unless a tokenizer tells which characters each token stands for."""
    if not tokenizer.is_fast:
        raise RecipeError(
            "This task needs a fast tokenizer, which tells the characters of each token; "
            f"{type(tokenizer).__name__} does not. Give another --model_name."
        )


def tokenize(
    data: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    text_columns: Sequence[str],
    max_length: int,
    name: str = "",
) -> Dataset:
    """Add the tokens of the texts, truncated to max_length and unpadded, and their `length`.

    Of the split called train, the log says how many texts reach max_length.
    """
    max_length = min(max_length, tokenizer.model_max_length)

    def tokenize_batch(rows: dict[str, list[str]]) -> dict[str, list[list[int]] | list[int]]:
        texts = [rows[column] for column in text_columns]
        tokens = tokenizer(*texts, truncation=True, max_length=max_length)
        return {**tokens, "length": list(map(len, tokens["input_ids"]))}

    tokenized = data.map(tokenize_batch, batched=True, desc="Tokenizing")
    if name == "train":
        full = list(tokenized["length"]).count(max_length)
        if full:
            log(
                f"{full:,} of {len(data):,} training texts reach {max_length} tokens, where texts "
                "are truncated; see --max_length"
            )
    return tokenized
