"""How often each class occurs: what the log says of it, and how rare classes are weighted."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from data.label_forms import same_but_spelling
from data.label_reading import Label, are_numbers, classes_of
from data.labels import MULTI, REGRESSION, SHOWN, SINGLE, Labels
from run.edge import RecipeError
from tasks.scores import ClassScores


def check_classes_recur(labels: Labels, row_labels: Sequence[Label]) -> None:
    """Raise RecipeError if most examples have a label of their own, as of texts or numbers."""
    counts = list(Counter(row_labels).values())
    once = counts.count(1)
    if labels.problem_type == SINGLE and len(row_labels) > 2 and once > len(row_labels) / 2:
        raise RecipeError(
            f"A classification needs several examples of a class; {once:,} of the "
            f"{len(row_labels):,} rows have a label in {labels.columns[0]!r} that no other row "
            "has. Name another column with --label_columns; for numbers, give --problem_type "
            "regression."
        )


def rarest_classes(labels: Labels, row_labels: Sequence[Label]) -> list[Hashable] | None:
    """Return the class of each row, of several the rarest, by which to split the rows evenly.

    Scores have none.
    """
    if labels.problem_type == REGRESSION:
        return None
    if labels.problem_type == SINGLE:
        return list(row_labels)
    counts: Counter[str] = Counter()
    for label in row_labels:
        counts.update(classes_of(label))
    return [min(classes_of(label), key=counts.__getitem__, default="") for label in row_labels]


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
        for separator in "|;":
            if len([name for name in labels.names if separator in name]) > 1:
                doubts.append(f"several labels in one text? Give --label_separator '{separator}'")
    spellings: dict[str, list[str]] = {}
    for name in labels.names:
        spellings.setdefault(same_but_spelling(name), []).append(name)
    for names in spellings.values():
        if len(names) > 1:
            listed = " and ".join(map(repr, names))
            doubts.append(f"{listed} are separate classes; if they are one, give --merge_labels")
    return doubts


def describe_constant(classes: ClassScores) -> str | None:
    """Return what to say of a model that predicts one class for all examples, or None."""
    if classes.expected.ndim != 1 or len(np.unique(classes.expected)) < 2:
        return None
    if len(np.unique(classes.predicted)) > 1:
        return None
    predicted = classes.names[classes.predicted[0]]
    counts = np.bincount(classes.expected)
    most_frequent = classes.names[counts.argmax()]
    return (
        f"note: all {len(classes.predicted):,} predictions are {predicted!r}: the model tells no "
        f"classes apart. Always {most_frequent!r} has the accuracy "
        f"{counts.max() / counts.sum():.3f}. Try a third of --learning_rate, or more epochs."
    )
