"""Scores as they are shown: rounded, without the Trainer's times, and class by class."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import softmax
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import (
    accuracy_score,
    classification_report,
    confusion_matrix,
    f1_score,
    matthews_corrcoef,
    precision_recall_curve,
    precision_recall_fscore_support,
)

from common.edge import RecipeError


MAX_LISTED = 40  # classes in a printed table
_FEWEST = 5  # examples with and without a class, from which its threshold is chosen
_MAX_NAME = 30  # characters of a class in a printed table
_TIMES = ("runtime", "_per_second", "model_preparation_time")
Score = Callable[[NDArray[np.float64], NDArray[np.float64]], float]


def _zero_if_constant(score: Score) -> Score:
    """Return 0 where a correlation, which divides by both standard deviations, has no value."""

    def checked(references: NDArray[np.float64], predictions: NDArray[np.float64]) -> float:
        return 0.0 if np.ptp(predictions) == 0 or np.ptp(references) == 0 else score(references, predictions)

    return checked


SCORES: dict[str, Score] = {
    "accuracy": accuracy_score,
    "f1": lambda references, predictions: f1_score(references, predictions, zero_division=0.0),
    "matthews_correlation": _zero_if_constant(matthews_corrcoef),
    "pearson": _zero_if_constant(lambda references, predictions: pearsonr(references, predictions)[0]),
    "spearmanr": _zero_if_constant(lambda references, predictions: spearmanr(references, predictions)[0]),
    "mean_absolute_error": lambda references, predictions: np.abs(references - predictions).mean(),
    "root_mean_squared_error": lambda references, predictions: np.sqrt(np.square(references - predictions).mean()),
}


def check_finite(outputs: NDArray[np.float32]) -> None:
    """Raise RecipeError if a model's outputs are not all finite."""
    if not np.isfinite(outputs).all():
        raise RecipeError("The model's outputs are not finite: the training has diverged. Lower --learning_rate.")


def without_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the scores among the Trainer's metrics: without the prefix "eval_", the epoch and the times."""
    return {
        key.removeprefix("eval_"): value
        for key, value in metrics.items()
        if key != "epoch" and not key.endswith(_TIMES)
    }


def format_scores(scores: Mapping[str, float]) -> str:
    """Return rounded scores as text: "f1 0.812, accuracy 0.684"."""
    return ", ".join(f"{name} {score:.3f}" for name, score in scores.items())


@dataclass(frozen=True)
class ClassScores:
    """What a model has predicted for examples of known classes.

    Attributes:
        expected, predicted: Class numbers: (examples,), or for several labels per example a 0 or 1 for each class,
            (examples, classes).
        names: The names of the classes by number.
        scored: The number of classes, counted from the first, that have scores. Others are in the confusion matrix
            only.
        confidence: The probability of each predicted class, (examples,), if each example has one class.
    """

    expected: NDArray[np.int64]
    predicted: NDArray[np.int64]
    names: tuple[str, ...]
    scored: int
    confidence: NDArray[np.float64] | None = None

    @property
    def present(self) -> list[int]:
        """The scored classes that occur among the labels or the predictions, as in macro-F1."""
        if self.expected.ndim == 2:
            return np.flatnonzero((self.expected + self.predicted).any(axis=0)).tolist()
        return [number for number in np.union1d(self.expected, self.predicted).tolist() if number < self.scored]

    def by_class(self) -> dict[str, dict[str, float]]:
        """Return precision, recall, F1 and support of each present class; without any, an empty dict."""
        if not self.present:
            return {}
        columns = precision_recall_fscore_support(
            self.expected, self.predicted, labels=self.present, zero_division=0.0
        )
        names = ("precision", "recall", "f1", "support")
        rows = zip(self.present, *(column.tolist() for column in columns), strict=True)
        return {self.names[number]: dict(zip(names, scores, strict=True)) for number, *scores in rows}

    def table(self) -> str:
        """Return scikit-learn's report of the present classes: of those with the lowest F1, if they are many."""
        if not self.present:
            return "none occurs among the labels or the predictions"
        names = [_shorten(self.names[number]) for number in self.present]
        report = classification_report(
            self.expected, self.predicted, labels=self.present, target_names=names, digits=3, zero_division=0.0
        )
        header, _, *lines = report.rstrip().splitlines()
        classes, averages = lines[: len(names)], [line for line in lines[len(names) :] if line]
        left_out = len(classes) - MAX_LISTED
        if left_out > 0:
            f1 = [scores["f1"] for scores in self.by_class().values()]
            lowest = sorted(np.argsort(f1, kind="stable")[:MAX_LISTED])
            classes = [classes[number] for number in lowest]
            classes.append(f"... and {left_out} classes with a higher F1, which results.json lists")
        return "\n".join([header, *classes, "", *averages])

    def confusion(self) -> tuple[NDArray[np.int64], list[str]] | None:
        """Return the counts of predictions (columns) by label (rows) of all classes that occur, and their names; None
        if examples have several labels, or no class occurs."""
        if self.expected.ndim == 2 or not self.present:
            return None
        numbers = np.union1d(self.expected, self.predicted)
        matrix = confusion_matrix(self.expected, self.predicted, labels=numbers)
        return matrix, [self.names[number] for number in numbers]

    def mistakes(self, at_most: int) -> pd.DataFrame:
        """Return the wrong predictions of which the model was most confident: row, label, prediction, confidence."""
        assert self.confidence is not None
        wrong = np.flatnonzero(self.expected != self.predicted)
        rows = wrong[np.argsort(-self.confidence[wrong], kind="stable")][:at_most]
        names = np.array(self.names, dtype=object)
        columns = {"label": names[self.expected[rows]], "predicted": names[self.predicted[rows]]}
        return pd.DataFrame({"row": rows, **columns, "confidence": self.confidence[rows].round(4)})

    def reliability(self, bins: int = 10) -> tuple[pd.DataFrame, float]:
        """Return the share of right predictions by confidence, and the expected calibration error.

        That is the mean of the distance between confidence and this share over bins of equal width, weighted by their
        examples (Guo et al. 2017, equation 3).
        """
        assert self.confidence is not None
        is_right = self.expected == self.predicted
        table = pd.DataFrame({"confidence": self.confidence, "right": is_right, "examples": 1})
        number = np.minimum((self.confidence * bins).astype(int), bins - 1)
        found = table.groupby(number).agg({"confidence": "mean", "right": "mean", "examples": "sum"})
        error = (found["examples"] * (found["confidence"] - found["right"]).abs()).sum() / max(len(table), 1)
        return found, float(error)


@dataclass(frozen=True)
class ValueScores:
    """What a model has predicted for examples with a score.

    Attributes:
        expected, predicted: The scores, (examples,).
    """

    expected: NDArray[np.float64]
    predicted: NDArray[np.float64]

    def by_class(self) -> None:
        """A score has no classes."""


def choose_thresholds(probabilities: NDArray[np.float64], labels: NDArray[np.float64]) -> list[float]:
    """Return for each class the threshold with the best F1, or 0.5 if it has few examples; arrays are (examples,
    classes)."""
    chosen = []
    for scores, expected in zip(probabilities.T, labels.T, strict=True):
        if not _FEWEST <= expected.sum() <= len(expected) - _FEWEST:
            chosen.append(0.5)
            continue
        precision, recall, thresholds = precision_recall_curve(expected, scores)
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
        best = int(f1[:-1].argmax())
        # In the middle of the gap below the least score that is still given.
        below = thresholds[best - 1] if best else 0.0
        chosen.append(round(float(thresholds[best] + below) / 2, 4))
    return chosen


def score_classes(outputs: NDArray[np.float32], labels: NDArray[Any], names: Sequence[str]) -> ClassScores:
    """Return what a classifier has predicted.

    Args:
        outputs: The logits, (examples, classes).
        labels: Class numbers, (examples,), or for several labels per example a 0 or 1 for each class,
            (examples, classes).
        names: The names of the classes by number.
    """
    several = np.ndim(labels) == 2
    predicted = outputs > 0 if several else outputs.argmax(-1)
    confidence = None if several else softmax(outputs.astype(np.float64), axis=-1).max(-1)
    return ClassScores(labels.astype(np.int64), predicted.astype(np.int64), tuple(names), len(names), confidence)


def _shorten(name: str) -> str:
    name = " ".join(name.split())
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 11]}...{name[-8:]}"
