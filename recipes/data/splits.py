"""How a data set is divided: what trains, what chooses the best epoch, and what is scored."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import TrainingArguments

from data.data import locate_first, rows_of, sample
from data.reading import files_of
from run.arguments import DataArguments
from run.edge import RecipeError, log
from run.run import CONTENT, describe_content
from run.schedule import FEW


VALIDATION_SHARE, SHARE_OF_FEW = 0.1, 0.2
_FEWEST = 5  # examples of a label, one of which validation has in any case


def divide(
    splits: dict[str, Dataset],
    arguments: DataArguments,
    training: TrainingArguments,
    results: Mapping[str, Any] | None,
    labels: Sequence[Hashable] | None = None,
    text_columns: Sequence[str] = (),
    keep_repeated: bool = True,
) -> dict[str, Dataset]:
    """Return the splits to train on, with one for validation if the training evaluates.

    Given the `results` of a run, return those on which its model is scored: see split_to_score.
    Of each of the `labels` of train, a tenth or a fifth is for validation. Without `keep_repeated`,
    validation has no text of the training examples.
    """
    if results is not None:
        return split_to_score(splits, arguments, results, labels, text_columns, keep_repeated)
    if training.do_eval:
        splits = with_validation(splits, labels, () if keep_repeated else text_columns)
    if training.do_eval and not keep_repeated:
        splits = without_training_texts(splits, text_columns)
    if training.do_eval and len(splits["validation"]) < FEW:
        log(
            f"note: {len(splits['validation'])} validation examples say little: see the intervals "
            "of the scores"
        )
    return {**splits, "train": sample(splits["train"], arguments.max_train_samples)}


def with_validation(
    splits: dict[str, Dataset],
    labels: Sequence[Hashable] | None = None,
    text_columns: Sequence[str] = (),
) -> dict[str, Dataset]:
    """Return the splits with validation: without one, a random tenth of train is moved there, or a
    fifth if a tenth is less than FEW.

    It has this share of each label. Given the columns of the texts, rows with the same text stay
    together. The rows do not depend on the seed of the run, so that runs with several seeds are
    scored on the same rows.
    """
    if "validation" in splits:
        return splits
    train = splits["train"]
    text_numbers = np.arange(len(train))
    if text_columns:  # the same number for the same text
        numbers: dict[tuple[str, ...], int] = {}
        texts = rows_of(train, text_columns)
        text_numbers = np.array([numbers.setdefault(text, len(numbers)) for text in texts])
    drawn = _draw_rows(text_numbers, labels)
    is_drawn = np.isin(text_numbers, text_numbers[drawn])
    if not is_drawn.any() and text_columns:  # a few texts that repeat are all that there is
        return without_training_texts(with_validation(splits, labels), text_columns)
    if not is_drawn.any():
        raise RecipeError(
            f"No validation split can be made of {len(train):,} training examples, as one of each "
            "label must stay in training. Give one, as validation.csv."
        )
    log(
        f"no validation split: {is_drawn.sum():,} of the {len(train):,} training examples are used "
        "instead"
    )
    training = train.select(np.flatnonzero(~is_drawn))
    return {**splits, "train": training, "validation": train.select(np.flatnonzero(is_drawn))}


def _draw_rows(text_numbers: NDArray[np.int64], labels: Sequence[Hashable] | None) -> list[int]:
    """Draw a tenth or a fifth of the texts, of each label alike, and return the first row of each.

    The texts of a label are spread evenly over 0 to 1, from a random start. The lowest part of all
    is drawn: on average as much of a rare label, and of _FEWEST texts or more at least one.
    """
    first_rows = set(np.unique(text_numbers, return_index=True)[1].tolist())
    share = VALIDATION_SHARE
    if VALIDATION_SHARE * len(first_rows) < FEW:
        share = SHARE_OF_FEW
    generator = np.random.default_rng(0)
    rows_by_label: dict[Hashable, list[int]] = {}
    for row in generator.permutation(len(text_numbers)).tolist():
        if row in first_rows:
            label = None if labels is None else labels[row]
            rows_by_label.setdefault(label, []).append(row)
    positions = []
    for rows in rows_by_label.values():
        start = generator.random()
        if len(rows) >= _FEWEST:
            start *= min(1, share * len(rows))
        for number, row in enumerate(rows[:-1]):  # the last one stays in training
            positions.append(((number + start) / len(rows), row))
    count = max(1, round(share * len(first_rows)))
    return [row for _, row in sorted(positions)[:count]]


def without_training_texts(
    splits: dict[str, Dataset], text_columns: Sequence[str]
) -> dict[str, Dataset]:
    """Leave out the validation examples whose texts are training examples, unless all are.

    Those of the test split are counted in the log.
    """
    splits = dict(splits)
    training_texts = set(rows_of(splits["train"], text_columns))
    for name in ("validation", "test"):
        if name not in splits:
            continue
        texts = rows_of(splits[name], text_columns)
        new_rows = [row for row, text in enumerate(texts) if text not in training_texts]
        repeated = len(texts) - len(new_rows)
        if name == "validation" and 0 < repeated < len(texts):
            log(
                f"validation: {repeated:,} of {len(texts):,} left out, whose texts are training "
                "examples as well; --keep_repeated keeps them"
            )
            splits[name] = splits[name].select(new_rows)
        elif repeated:
            log(
                f"note: {repeated:,} of the {len(texts):,} texts of {name} are training examples "
                "as well: its scores say little about new texts"
            )
    return splits


def report_repeated(
    train: Dataset, text_columns: Sequence[str], labels: Sequence[Hashable]
) -> None:
    """Log how many training texts repeat, and which of them have different labels."""
    texts = rows_of(train, text_columns)
    labels_by_text: dict[tuple[str, ...], set[Hashable]] = {}
    for text, label in zip(texts, labels, strict=True):
        labels_by_text.setdefault(text, set()).add(label)
    repeated = len(texts) - len(labels_by_text)
    if not repeated:
        return
    message = f"note: {repeated:,} training examples repeat the text of an earlier one"
    rows = [row for row, text in enumerate(texts) if len(labels_by_text[text]) > 1]
    if rows:
        where = locate_first(train, rows)
        message += f"; {len(rows):,} have a text that has several labels ({where})"
    log(message)


def split_to_score(
    splits: dict[str, Dataset],
    arguments: DataArguments,
    results: Mapping[str, Any],
    labels: Sequence[Hashable] | None = None,
    text_columns: Sequence[str] = (),
    keep_repeated: bool = False,
) -> dict[str, Dataset]:
    """Return the splits on which a saved adapter or model is scored, without "train".

    Without a validation split, all examples are scored; of the data that the run was trained on,
    only those that it kept for validation. If it kept none of them, a line says so, and all are
    scored. `keep_repeated` is for runs that did not record it.
    """
    recorded = results.get("arguments", {})
    # By the content of the data or else by their name.
    checksum = describe_content(files_of(arguments), {}).get("train", {}).get("sum")
    recorded_checksum = results.get(CONTENT, {}).get("train", {}).get("sum")
    was_trained_on = recorded.get("data") == arguments.data
    if checksum and recorded_checksum:
        was_trained_on = checksum == recorded_checksum
    if was_trained_on:
        if recorded.get("keep_repeated", keep_repeated):
            text_columns = ()
        had_validation = "validation" in results.get("dataset", {}).get("rows", {})
        if "validation" in splits and text_columns:
            splits = without_training_texts(splits, text_columns)
        elif "validation" not in splits and had_validation and not recorded.get("validation_file"):
            splits = with_validation(splits, labels, text_columns)
        elif "validation" not in splits:
            log(
                f"all examples of {arguments.data} were trained on: their scores say little about "
                "new ones"
            )
    scored = {"validation": splits["train"], **splits}
    del scored["train"]
    return scored
