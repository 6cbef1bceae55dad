"""Text data sets from files and from the Hub: their splits, their columns, their tokens."""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from datasets import Dataset, disable_progress_bars, load_dataset
from pyarrow.parquet import read_table
from transformers import PreTrainedTokenizerBase, TrainingArguments

from common.arguments import DataArguments
from common.edge import RecipeError, log, looks_like_a_path
from common.run import CONTENT, WHERE, describe_content
from houlsby_peft import AdapterError
from houlsby_peft.tables import TableReader, check_number_of_texts, find_encoding, match_column
from houlsby_peft.tables import find_text_columns as find_usual_columns


SPLITS = ("train", "validation", "test")
_WIDTH_OF_TEXT = 15  # characters of a column, on average, that is taken for the text
VALIDATION_SHARE = 0.1
LABEL_NAMES = ("label", "labels", "label_ids")  # columns that the Trainer takes for labels
_LISTED = 5  # rows in a message
_FEWEST = 5  # examples of a label, one of which validation has in any case

if not sys.stderr.isatty():
    disable_progress_bars()


def locate(data: Dataset, row: int) -> str:
    """Return where a row is in the user's file, such as "line 12"."""
    return data[row][WHERE] if WHERE in data.column_names else f"row {row}"


def columns_of(data: Dataset) -> list[str]:
    return [name for name in data.column_names if name != WHERE]


def _number_rows(data: Dataset) -> Dataset:
    return data.add_column(WHERE, [f"row {row}" for row in range(len(data))])


def _read_parquet(path: Path, encoding: str | None) -> Dataset:
    return _number_rows(
        Dataset(read_table(path))
    )  # with the names of the classes, if there are any


def _read_rows(path: Path, encoding: str | None) -> Dataset:
    """Read separated values or a JSON object per line. A column without a name, such as an index,
    is left out.
    """
    table = TableReader(path, encoding)
    lines, rows = zip(*table.rows(), strict=True)
    columns: dict[str, list[Any]] = {
        name: [row.get(name) for row in rows] for name in table.columns if name
    }
    separator = "" if path.suffix.lower() == ".jsonl" else f", separator {table.separator!r}"
    found = table.encoding.removesuffix("-sig").replace("utf", "UTF")
    doubt = (
        ""
        if encoding or found.startswith("UTF")
        else " (if letters look wrong, name another with --encoding)"
    )
    log(f"{path}: {len(rows):,} rows{separator}, encoding {found}{doubt}")
    return Dataset(pa.table({**columns, WHERE: [f"line {line}" for line in lines]}))


def _read_lines(path: Path, encoding: str | None) -> Dataset:
    """Read one text per line, without empty lines, as the column `text`."""
    lines = enumerate(path.read_text(encoding or find_encoding(path)).split("\n"), start=1)
    return Dataset.from_list(
        [{"text": line, WHERE: f"line {number}"} for number, line in lines if line.strip()]
    )


def _read_conll(path: Path, encoding: str | None) -> Dataset:
    """Read sentences from a CoNLL file: words from its first column, tags from its last, without
        document marks.

    A line before a sentence that begins with "# " and has an equals sign is a comment, as in
    CoNLL-U.
    """
    sentences: list[dict[str, Any]] = [{"tokens": [], "tags": [], WHERE: "line 1"}]
    for number, line in enumerate(
        path.read_text(encoding or find_encoding(path)).split("\n"), start=1
    ):
        columns = line.split()
        is_comment = line.startswith("# ") and "=" in line and not sentences[-1]["tokens"]
        if not columns or columns[0] == "-DOCSTART-" or is_comment:
            sentences.append({"tokens": [], "tags": [], WHERE: f"line {number + 1}"})
        elif len(columns) == 1:
            raise RecipeError(
                f"{path}: line {number} must have a word and a tag, got {line[:50]!r}."
            )
        else:
            sentences[-1]["tokens"].append(columns[0])
            sentences[-1]["tags"].append(columns[-1])
    return Dataset.from_list([sentence for sentence in sentences if sentence["tokens"]])


READERS: dict[str, Callable[[Path, str | None], Dataset]] = {
    ".parquet": _read_parquet,
    ".csv": _read_rows,
    ".tsv": _read_rows,
    ".jsonl": _read_rows,
    ".txt": _read_lines,
    ".conll": _read_conll,
}


def read_file(path: Path, encoding: str | None = None) -> Dataset:
    """Read a file by its extension, one of READERS; the column WHERE says where each row is in it."""
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


def find_split(folder: Path, split: str) -> Path | None:
    """Return the file `split` in a folder, with the first extension of READERS that exists in any
    case, or None.
    """
    files = (
        {file.name.lower(): file for file in sorted(folder.iterdir())} if folder.is_dir() else {}
    )
    return next((files[name] for suffix in READERS if (name := f"{split}{suffix}") in files), None)


def read_split(folder: Path, split: str, encoding: str | None = None) -> Dataset:
    """Read the file `split` in a folder, as find_split finds it."""
    path = find_split(folder, split)
    if path is None:
        found = ", ".join(sorted(file.name for file in folder.glob("*"))) or "nothing"
        raise RecipeError(
            f"{folder} has no split {split!r}: expected {split}{{{','.join(READERS)}}}, found {found}."
        )
    return read_file(path, encoding)


def files_of(arguments: DataArguments) -> dict[str, Path]:
    """Return the files of a data set, by their splits; those on the Hub have none."""
    named = {"validation": arguments.validation_file, "test": arguments.test_file}
    path = Path(arguments.data).expanduser()
    files = (
        {"train": path} if path.is_file() else {split: find_split(path, split) for split in SPLITS}
    )
    files |= {split: Path(file).expanduser() for split, file in named.items() if file is not None}
    return {split: file for split, file in files.items() if file is not None}


def load_data(arguments: DataArguments, training: TrainingArguments) -> dict[str, Dataset]:
    """Load train and, if present, validation and test, from files or from the Hub."""
    with training.main_process_first():
        splits = {
            split: read_file(path, arguments.encoding)
            for split, path in files_of(arguments).items()
        }
        if "train" in splits:
            return splits
        if looks_like_a_path(arguments.data):
            read_split(Path(arguments.data).expanduser(), "train")  # which says what is there
        on_hub = load_dataset(arguments.data, arguments.data_config)
        return {
            split: _number_rows(on_hub[split]) for split in SPLITS if split in {*on_hub, "train"}
        } | splits


def find_text_columns(
    data: Dataset, named: Sequence[str] | None, recorded: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the columns of a text or a pair of texts: those named on the command line, else those
    recorded if the data have all of them, else by their usual names, else the one with the longest
    texts.
    """
    columns = columns_of(data)
    try:
        found = tuple(
            find_usual_columns(columns, named, recorded=recorded)
        )  # as `houlsby-peft predict` finds them
    except AdapterError:
        head = data[:100]
        widths = {
            name: sum(map(len, map(str, head[name]))) / len(head[name])
            for name in columns
            if head[name]
        }
        longest = max(widths, key=widths.__getitem__, default="")
        if named or recorded or widths.get(longest, 0) < _WIDTH_OF_TEXT:
            raise
        log(f"no column has a usual name for text; {longest!r} has the longest")
        found = (longest,)
    check_number_of_texts(found, recorded, "--text_columns", "This adapter")
    return found


def find_column(data: Dataset, named: str | None, usual: Sequence[str], flag: str) -> str:
    """Return the column that the flag names, else the first of the usual names that exists."""
    columns = columns_of(data)
    found = next(
        (
            column
            for name in ([named] if named else usual)
            if (column := match_column(columns, name))
        ),
        None,
    )
    if found is None:
        wanted = repr(named) if named else f"named {' or '.join(usual)}"
        raise RecipeError(
            f"There is no column {wanted}, only {', '.join(columns)}. Name it with {flag}."
        )
    return found


def check_columns(
    data: Dataset, name: str, text_columns: Sequence[str], label_columns: Sequence[str] = ()
) -> None:
    """Raise RecipeError unless the split `name` has these columns, and those of the texts hold
    nothing but strings.
    """
    missing = [
        column for column in (*text_columns, *label_columns) if column not in data.column_names
    ]
    if missing:
        raise RecipeError(
            f"{name} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has "
            f"{', '.join(columns_of(data))}. Rename the columns of the file, or name others where a flag does."
        )
    for column in text_columns:
        row = next(
            (row for row, text in enumerate(data[column]) if not isinstance(text, str)), None
        )
        if row is not None:
            raise RecipeError(
                f"{name}: column {column!r} must hold text, {locate(data, row)} has {data[row][column]!r}. "
                "Give it a text, or leave the row out."
            )


def rows_with_text(data: Dataset, name: str, text_columns: Sequence[str]) -> Dataset:
    """Return the rows with text in any of the columns, and report how many have none; blanks are no
    text.
    """
    columns = [data[column] for column in text_columns]
    rows = [
        row for row, texts in enumerate(zip(*columns, strict=True)) if any(map(str.strip, texts))
    ]
    if not rows:
        raise RecipeError(
            f"{name} must hold text; all its {len(data):,} rows are empty. Give examples with text."
        )
    return keep_rows(data, rows, f"{name}: {{}} without text")


def keep_rows(data: Dataset, rows: Sequence[int], what: str) -> Dataset:
    """Return some rows of a data set, and report how many others there are and where the first of
    them are.
    """
    if len(rows) == len(data):
        return data
    others = np.setdiff1d(np.arange(len(data)), rows)
    count = f"{len(others):,} row{'s' if len(others) > 1 else ''}"
    first = ", ".join(locate(data, int(row)) for row in others[:_LISTED])
    log(f"{what.format(count)} left out ({first}{', ...' if len(others) > _LISTED else ''})")
    return data.select(rows)


def _texts_of(data: Dataset, text_columns: Sequence[str]) -> pd.Series:
    return pd.Series(
        list(zip(*(data[column] for column in text_columns), strict=True)), dtype=object
    )


def report_repeated(
    train: Dataset, text_columns: Sequence[str], labels: Sequence[Hashable]
) -> None:
    """Log how many texts of the training examples repeat, and which of them have different labels."""
    texts = _texts_of(train, text_columns)
    if not texts.duplicated().any():
        return
    counts = pd.Series(labels, dtype=object).groupby(texts).nunique()
    rows = np.flatnonzero(texts.isin(counts[counts > 1].index))
    where = ", ".join(locate(train, int(row)) for row in rows[:_LISTED]) + ", ..." * (
        len(rows) > _LISTED
    )
    different = (
        f"; {len(rows):,} have a text that has several labels ({where})" if len(rows) else ""
    )
    log(
        f"note: {texts.duplicated().sum():,} training examples repeat the text of an earlier one{different}"
    )


def without_known(splits: dict[str, Dataset], text_columns: Sequence[str]) -> dict[str, Dataset]:
    """Return the splits without the validation examples whose texts are training examples as well,
    unless all are; count those of the test split.
    """
    splits, train = dict(splits), _texts_of(splits["train"], text_columns)
    for name in ("validation", "test"):
        is_known = (
            _texts_of(splits[name], text_columns).isin(train)
            if name in splits
            else pd.Series(dtype=bool)
        )
        if name == "validation" and is_known.any() and not is_known.all():
            log(f"validation: {is_known.sum():,} of {len(is_known):,} left out, whose texts are training examples as "
                "well; --keep_repeated keeps them")  # fmt: skip
            splits[name] = splits[name].select(np.flatnonzero(~is_known))
        elif is_known.any():
            log(f"note: {is_known.sum():,} of the {len(is_known):,} texts of {name} are training examples as well: "
                "its scores say little about new texts")  # fmt: skip
    return splits


def with_validation(
    splits: dict[str, Dataset],
    labels: Sequence[Hashable] | None = None,
    text_columns: Sequence[str] = (),
) -> dict[str, Dataset]:
    """Return the splits; if there is no validation split, move a random tenth of train into one, of
    each label alike.

    Given the columns of the texts, rows with the same text stay together. The rows do not depend on
    the seed of the run, so that runs with several seeds are scored on the same rows.
    """
    if "validation" in splits:
        return splits
    train = splits["train"]
    texts = (
        pd.factorize(_texts_of(train, text_columns))[0] if text_columns else np.arange(len(train))
    )
    first = np.unique(texts, return_index=True)[1]
    wanted = max(1, round(VALIDATION_SHARE * len(first)))
    generator = np.random.default_rng(0)
    of_label: dict[Hashable, list[int]] = {}
    for row in generator.permutation(len(train)):
        if first[texts[row]] == row:
            of_label.setdefault(None if labels is None else labels[row], []).append(int(row))
    # The rows of each label are spread evenly over 0 to 1, from a random start. Those of the lowest
    # tenth are chosen, so that even of rare labels a tenth is chosen on average; of five rows or
    # more, at least one.
    shares = (
        ((number + start) / len(rows), row)
        for rows in of_label.values()
        for start in [
            generator.random()
            * (min(1, VALIDATION_SHARE * len(rows)) if len(rows) >= _FEWEST else 1)
        ]
        for number, row in enumerate(rows[:-1])
    )
    chosen = np.flatnonzero(np.isin(texts, texts[[row for _, row in sorted(shares)[:wanted]]]))
    if not len(chosen) and text_columns:  # a few texts that repeat are all that there is
        return without_known(with_validation(splits, labels), text_columns)
    if not len(chosen):
        raise RecipeError(
            f"No validation split can be made of {len(train):,} training examples, as one of each label must stay in "
            "training. Give one, as validation.csv."
        )
    log(
        f"no validation split: {len(chosen):,} of the {len(train):,} training examples are used instead"
    )
    kept = np.setdiff1d(np.arange(len(train)), chosen)
    return {**splits, "train": train.select(kept), "validation": train.select(chosen)}


def sample(data: Dataset, size: int | None) -> Dataset:
    """Return `size` random rows in their order; all rows if `size` is None or larger.

    The rows do not depend on the seed of the run, so that runs with several seeds differ in nothing
    else.
    """
    if size is None or size >= len(data):
        return data
    return data.select(sorted(np.random.default_rng(0).permutation(len(data))[:size]))


def tokenize(
    data: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    text_columns: Sequence[str],
    max_length: int,
    name: str = "",
) -> Dataset:
    """Add the tokens of the texts, truncated to max_length and unpadded, and their number as
    `length`.

    Of the split called train, the log says how many texts reach max_length.
    """
    max_length = min(max_length, tokenizer.model_max_length)

    def tokenize_batch(rows: dict[str, list[str]]) -> dict[str, list[list[int]] | list[int]]:
        tokens = tokenizer(
            *(rows[column] for column in text_columns), truncation=True, max_length=max_length
        )
        return {**tokens, "length": [len(ids) for ids in tokens["input_ids"]]}

    tokenized = data.map(tokenize_batch, batched=True, desc="Tokenizing")
    full = sum(length == max_length for length in tokenized["length"]) if name == "train" else 0
    if full:
        log(f"{full:,} of {len(data):,} training texts reach {max_length} tokens, where texts are truncated; see "
            "--max_length")  # fmt: skip
    return tokenized


def divide(
    splits: dict[str, Dataset],
    arguments: DataArguments,
    training: TrainingArguments,
    results: Mapping[str, Any] | None,
    labels: Sequence[Hashable] | None = None,
    text_columns: Sequence[str] = (),
) -> dict[str, Dataset]:
    """Return the splits to train on, with one for validation if it is wanted, which has no text of
    train if that is wanted; with the results of a run, those on which its model is scored, as
    split_to_score does.
    """
    if results is not None:
        return split_to_score(splits, arguments, results, labels, text_columns)
    if training.do_eval:
        keeps_repeated = getattr(arguments, "keep_repeated", True)
        splits = with_validation(splits, labels, () if keeps_repeated else text_columns)
        splits = splits if keeps_repeated else without_known(splits, text_columns)
    return {**splits, "train": sample(splits["train"], arguments.max_train_samples)}


def split_to_score(
    splits: dict[str, Dataset],
    arguments: DataArguments,
    results: Mapping[str, Any],
    labels: Sequence[Any] | None = None,
    text_columns: Sequence[str] = (),
) -> dict[str, Dataset]:
    """Return the splits with the validation split on which a saved adapter or model is scored,
    without "train".

    Data without a validation split are scored whole, unless the run was trained on them, by its
    results.json: then it is scored on the examples that it has left out of the training.
    """
    splits = dict(splits)
    if "validation" not in splits:
        before = results.get("arguments", {})
        now, then = (content.get("train", {}).get("sum") for content in (
            describe_content(files_of(arguments), {}), results.get(CONTENT, {})
        ))  # fmt: skip
        was_trained_on = now == then if now and then else before.get("data") == arguments.data
        was_split = "validation" in results.get("dataset", {}).get("rows", {})
        if was_trained_on and was_split and not before.get("validation_file"):
            splits = with_validation(
                splits, labels, text_columns if before.get("keep_repeated") is False else ()
            )
        else:
            if was_trained_on:
                log(
                    f"all examples of {arguments.data} were trained on: their scores say little about new ones"
                )
            splits["validation"] = splits["train"]
    splits.pop("train")
    return splits
