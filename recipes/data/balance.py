"""How often each class occurs: what the log says of it, and how rare classes are weighted."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from datasets import Dataset

from data.data import locate_first
from data.label_column import Label, are_numbers, classes_of, same_but_spelling
from data.labels import MULTI, REGRESSION, SHOWN, SINGLE, Labels
from run.edge import RecipeError, log


def check_classes_recur(labels: Labels, row_labels: Sequence[Label], train: Dataset) -> None:
    """Raise RecipeError if most examples have a label of their own, as of texts or numbers; note
    single ones.
    """
    if labels.problem_type == REGRESSION:
        return
    counts = Counter(chain.from_iterable(map(classes_of, row_labels)))
    single = [
        row for row, label in enumerate(row_labels) if 1 in map(counts.get, classes_of(label))
    ]
    if labels.problem_type == SINGLE and len(row_labels) > 2 and len(single) > len(row_labels) / 2:
        raise RecipeError(
            f"A classification needs several examples of a class; {len(single):,} of the "
            f"{len(row_labels):,} rows have a label in {labels.columns[0]!r} that no other row "
            "has. Name another column with --label_columns; for numbers, give --problem_type "
            "regression."
        )
    if single:
        names = [name for name, count in counts.items() if count == 1]
        log(
            f"note: classes with one example: {', '.join(names[:SHOWN])} "
            f"({locate_first(train, single)})"
        )


def rarest_classes(labels: Labels, encoded: Sequence[Any]) -> list[Hashable] | None:
    """Return the class of each row, of several the rarest, by which to split the rows evenly.

    Scores have none.
    """
    if labels.problem_type == REGRESSION:
        return None
    if labels.problem_type == SINGLE:
        return list(encoded)
    flags = np.asarray(encoded)
    # Of a row without a class, the number of classes.
    counted = np.where(flags > 0, flags.sum(0), np.inf)
    numbers = np.where(flags.any(1), counted.argmin(1), flags.shape[1])
    return [int(number) for number in numbers]


def note_missing_classes(labels: Labels, splits: Mapping[str, Dataset]) -> None:
    """Log which classes of the training examples have no validation example, and thus no score."""
    if labels.problem_type == REGRESSION or "validation" not in splits:
        return
    found = []
    for name in ("train", "validation"):
        rows = splits[name]["label"][:]
        found.append(
            {*np.flatnonzero(np.any(rows, axis=0)).tolist()} if np.ndim(rows) > 1 else {*rows}
        )
    missing = [labels.names[number] for number in sorted(found[0] - found[1])]
    if missing:
        more = ", ..." * (len(missing) > SHOWN)
        log(
            f"note: no validation example has the class {', '.join(missing[:SHOWN])}{more}: the "
            "scores say nothing about it"
        )


def balanced_weights(labels: Labels, encoded: Sequence[Any]) -> tuple[float, ...]:
    """Return weights with which each class counts alike in the loss.

    A class without examples has the weight 1. With several classes per row, the weight is for the
    presence of a class: the rows without it for each row with it.
    """
    if labels.problem_type == MULTI:
        counts = np.asarray(encoded).sum(0)
        weights = (len(encoded) - counts) / np.maximum(counts, 1)
    else:  # scikit-learn's "balanced"
        counts = np.bincount(encoded, minlength=len(labels.names))
        weights = len(encoded) / (np.count_nonzero(counts) * np.maximum(counts, 1))
    return tuple(np.where(counts > 0, weights, 1.0).tolist())


def describe_balance(labels: Labels, encoded: Sequence[Any]) -> str:
    """Return how often each class occurs among encoded labels, and notes, for the log."""
    if labels.problem_type == REGRESSION:
        return (
            f"{labels.names[0]}: scores from {min(encoded):g} to {max(encoded):g}, mean "
            f"{np.mean(encoded):.4g}, standard deviation {np.std(encoded):.4g}, by which they are "
            "standardized for the training"
        )
    counts: Counter[int] = Counter()
    for numbers in encoded:
        counts.update(np.flatnonzero(numbers) if labels.problem_type == MULTI else [numbers])
    listed = []
    for number, count in counts.most_common(SHOWN):
        listed.append(f"{labels.names[number]} {count:,} ({count / len(encoded):.1%})")
    text = f"{len(labels.names)} classes: {', '.join(listed)}"
    if len(counts) > SHOWN:
        text += f", and {len(counts) - SHOWN} more"
    return "\nnote: ".join([text, *_find_doubts(labels)])


def _find_doubts(labels: Labels) -> list[str]:
    """Return what suggests that the classes are not meant as such."""
    doubts = []
    if labels.problem_type == SINGLE:
        if are_numbers(labels.names):
            doubts.append("numbers as classes; for a score, give --problem_type regression")
        for separator in "|;,":
            joined = [name for name in labels.names if separator in name]
            parts = {part.strip() for name in joined for part in name.split(separator)}
            if len(joined) > 1 or parts & {*labels.names}:
                doubts.append(f"several labels in one text? Give --label_separator '{separator}'")
    spellings: dict[str, list[str]] = {}
    for name in labels.names:
        spellings.setdefault(same_but_spelling(name), []).append(name)
    for names in spellings.values():
        if len(names) > 1:
            listed = " and ".join(map(repr, names))
            doubts.append(f"{listed} are separate classes; if they are one, give --merge_labels")
    return doubts
