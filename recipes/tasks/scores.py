"""Scores: how they are computed, class by class, and GLUE's columns and averages."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from statistics import mean
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import softmax
from scipy.stats import binomtest, pearsonr, spearmanr
from sklearn.metrics import (
    accuracy_score,
    classification_report,
    confusion_matrix,
    f1_score,
    matthews_corrcoef,
    precision_recall_fscore_support,
    r2_score,
)

from run.edge import RecipeError


MAX_LISTED = 40  # classes in a printed table
NO_CLASS = "(no class)"  # where a text may have none
_RESAMPLES = 200  # of the examples, for an interval
_MAX_NAME = 30  # characters of a class in a printed table
Score = Callable[[NDArray[np.float64], NDArray[np.float64]], float]


def _zero_if_constant(score: Score) -> Score:
    """Return 0 where a correlation, which divides by both standard deviations, has no value."""

    def checked(references: NDArray[np.float64], predictions: NDArray[np.float64]) -> float:
        if np.ptp(predictions) == 0 or np.ptp(references) == 0:
            return 0.0
        return score(references, predictions)

    return checked


SCORES: dict[str, Score] = {
    "accuracy": accuracy_score,
    "f1": partial(f1_score, zero_division=0.0),
    "matthews_correlation": _zero_if_constant(matthews_corrcoef),
    "pearson": _zero_if_constant(lambda *values: float(pearsonr(*values)[0])),
    "r2": lambda *values: float(r2_score(*values)) if len(values[0]) > 1 else 0.0,
    "spearmanr": _zero_if_constant(lambda *values: float(spearmanr(*values)[0])),
    "mean_absolute_error": lambda a, b: float(np.abs(a - b).mean()),
    "root_mean_squared_error": lambda a, b: float(np.sqrt(np.square(a - b).mean())),
}


# The scores that GLUE's server averages for each task, by the recipe's names; the papers' score
# first.
GLUE_TASKS = {
    "cola": ("matthews_correlation",),
    "sst2": ("accuracy",),
    "mrpc": ("f1", "accuracy"),
    "stsb": ("spearmanr", "pearson"),
    "qqp": ("f1", "accuracy"),
    "mnli": ("matched_accuracy", "mismatched_accuracy"),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
}
# The papers' nine columns.
COLUMNS = {
    "CoLA": ("cola", "matthews_correlation"),
    "SST-2": ("sst2", "accuracy"),
    "MRPC": ("mrpc", "f1"),
    "STS-B": ("stsb", "spearmanr"),
    "QQP": ("qqp", "f1"),
    "MNLI-m": ("mnli", "matched_accuracy"),
    "MNLI-mm": ("mnli", "mismatched_accuracy"),
    "QNLI": ("qnli", "accuracy"),
    "RTE": ("rte", "accuracy"),
}
WNLI = {"WNLI": ("wnli", "accuracy")}
_NAMES = {
    **{task: column for column, (task, _) in (COLUMNS | WNLI).items() if task != "mnli"},
    "mnli": "MNLI",
    "squad": "SQuAD",
    "minimal_pairs": "generated sentences",
    "matthews_correlation": "Matthews correlation",
    "f1": "F1",
    "exact_match": "exact match",
    "spearmanr": "Spearman correlation",
    "pearson": "Pearson correlation",
    "matched_accuracy": "accuracy (matched)",
    "mismatched_accuracy": "accuracy (mismatched)",
    "loss": "loss",
    "r2": "R²",
}

ByTask = Mapping[str, Mapping[str, float]]  # such as {"mrpc": {"f1": 89.5, "accuracy": 85.3}}


def proper_name(name: str) -> str:
    """Return the name of a task or a score as it is printed: "CoLA" for "cola", "F1" for "f1"."""
    return _NAMES.get(name, name.replace("crowdflower", "CF").replace("_", " "))


def mean_of_nine(scores: ByTask) -> float | None:
    """Return the mean of the papers' nine columns, with both of MNLI and without WNLI; None if one
    is missing.
    """
    values = [scores.get(task, {}).get(name) for task, name in COLUMNS.values()]
    present = [value for value in values if value is not None]
    return mean(present) if len(present) == len(values) else None


def server_average(scores: ByTask) -> float | None:
    """Return the average of GLUE's server: the mean over nine tasks, with WNLI, of the mean of each
    task's scores; None if one is missing.
    """
    means = []
    for task, names in GLUE_TASKS.items():
        of_task = scores.get(task, {})
        if not of_task.keys() >= set(names):
            return None
        means.append(mean(of_task[name] for name in names))
    return mean(means)


Intervals = Mapping[str, Mapping[str, float]]  # by score: low and high, perhaps right and rows


def format_scores(scores: Mapping[str, float], intervals: Intervals | None = None) -> str:
    """Return rounded scores as text, with their intervals where these are known:
    "accuracy 0.933 (28 of 30, 0.79 to 0.98), loss 0.231".
    """
    shown = []
    for name, score in scores.items():
        text = f"{name} {score:.3f}"
        if intervals and name in intervals:
            text += f" ({format_interval(intervals[name])})"
        shown.append(text)
    return ", ".join(shown)


def format_interval(interval: Mapping[str, float]) -> str:
    """Return an interval as text, of an accuracy with its count: "28 of 30, 0.79 to 0.98"."""
    text = f"{interval['low']:.2f} to {interval['high']:.2f}"
    if "right" in interval:
        return f"{interval['right']:,} of {interval['rows']:,}, {text}"
    return text


def find_intervals(
    score: Callable[[NDArray[np.float32], NDArray[Any]], Mapping[str, float]],
    outputs: NDArray[np.float32],
    labels: NDArray[Any],
) -> dict[str, dict[str, float]]:
    """Return the 95 % intervals of a classifier's scores, if other examples were drawn.

    That of an accuracy is Wilson's, with the count; the others are percentiles of the score on
    examples that are drawn again from those at hand: as many of each class, as a macro-F1 would
    rise without a rare one.
    """
    generator = np.random.default_rng(0)
    is_class = labels.ndim == 1 and labels.dtype.kind == "i"
    groups = labels if is_class else np.zeros(len(labels), np.int64)
    order = np.argsort(groups, kind="stable")
    _, begins, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    begin_of_group, size_of_group = np.repeat(begins, sizes), np.repeat(sizes, sizes)
    drawn: dict[str, list[float]] = {}
    for _ in range(_RESAMPLES):
        rows = order[begin_of_group + generator.integers(size_of_group)]
        for name, value in score(outputs[rows], labels[rows]).items():
            drawn.setdefault(name, []).append(value)
    intervals = {}
    for name, values in drawn.items():
        low, high = np.percentile(values, [2.5, 97.5]).tolist()
        intervals[name] = {"low": low, "high": high}
    if "accuracy" in intervals:
        accuracy = score(outputs, labels)["accuracy"]
        right = round(accuracy * len(labels))
        interval = binomtest(right, len(labels)).proportion_ci(method="wilson")
        low, high = float(interval.low), float(interval.high)
        intervals["accuracy"] = {"right": right, "rows": len(labels), "low": low, "high": high}
    return intervals


def check_finite(outputs: NDArray[np.float32]) -> None:
    """Raise RecipeError if a model's outputs are not all finite."""
    if not np.isfinite(outputs).all():
        raise RecipeError(
            "The model's outputs are not finite: the training has diverged. Lower --learning_rate."
        )


@dataclass(frozen=True)
class ClassScores:
    """What a model has predicted for examples of known classes, as class numbers, or a 0 or 1 for
    each class.

    The first `scored` classes have scores; others are in the confusion matrix only. `confidence` is
    the probability of each predicted class, if each example has one class.
    """

    expected: NDArray[np.int64]
    predicted: NDArray[np.int64]
    names: tuple[str, ...]
    scored: int
    confidence: NDArray[np.float64] | None = None

    @property
    def constant(self) -> str | None:
        """The class or classes that are predicted for all examples, if they are not all of it."""
        first = self.predicted[:1]
        if (self.predicted != first).any() or np.array_equal(self.expected, self.predicted):
            return None
        if self.expected.ndim == 1:
            return self.names[int(first[0])]
        return "; ".join(compress(self.names, first[0])) or NO_CLASS

    @property
    def present(self) -> list[int]:
        """The scored classes that occur among the labels or the predictions, as in macro-F1."""
        if self.expected.ndim == 2:
            return list(np.flatnonzero((self.expected + self.predicted).any(axis=0)).tolist())
        numbers = np.union1d(self.expected, self.predicted)
        return list(numbers[numbers < self.scored].tolist())

    def by_class(self) -> dict[str, dict[str, float]]:
        """Return precision, recall, F1 and support of each present class; without any, an empty
        dict.
        """
        if not self.present:
            return {}
        columns = precision_recall_fscore_support(
            self.expected, self.predicted, labels=self.present, zero_division=0.0
        )
        by_class = {}
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for number, (precision, recall, f1, support) in zip(self.present, rows, strict=True):
            by_class[self.names[number]] = {
                "precision": precision,
                "recall": recall,
                "f1": f1,
                "support": support,
            }
        return by_class

    def table(self) -> str:
        """Return scikit-learn's report of the present classes: of those with the lowest F1, if they
        are many.
        """
        if not self.present:
            return "none occurs among the labels or the predictions"
        names = []
        for number in self.present:
            name = " ".join(self.names[number].split())
            is_long = len(name) > _MAX_NAME
            names.append(f"{name[: _MAX_NAME - 11]}...{name[-8:]}" if is_long else name)
        report = classification_report(
            self.expected,
            self.predicted,
            labels=self.present,
            target_names=names,
            digits=3,
            zero_division=0.0,
        )
        header, _, *lines = report.rstrip().splitlines()
        classes = lines[: len(names)]
        averages = [line for line in lines[len(names) :] if line]
        left_out = len(classes) - MAX_LISTED
        if left_out > 0:
            f1 = [scores["f1"] for scores in self.by_class().values()]
            lowest = sorted(np.argsort(f1, kind="stable")[:MAX_LISTED])
            classes = [classes[number] for number in lowest]
            classes.append(f"... and {left_out} classes with a higher F1, which results.json lists")
        return "\n".join([header, *classes, "", *averages])

    def confusion(self) -> tuple[NDArray[np.int64], list[str]] | None:
        """Return the counts of predictions (columns) by label (rows) of all classes that occur, and
        their names; None if examples have several labels, or no class occurs.
        """
        if self.expected.ndim == 2 or not self.present:
            return None
        numbers = np.union1d(self.expected, self.predicted)
        matrix = confusion_matrix(self.expected, self.predicted, labels=numbers)
        return matrix, [self.names[number] for number in numbers]

    def mistakes(self, at_most: int) -> pd.DataFrame:
        """Return the wrong predictions of which the model was most confident: row, label,
        prediction, probability.
        """
        assert self.confidence is not None
        wrong = np.flatnonzero(self.expected != self.predicted)
        rows = wrong[np.argsort(-self.confidence[wrong], kind="stable")][:at_most]
        names = np.array(self.names, dtype=object)
        columns = {"label": names[self.expected[rows]], "predicted": names[self.predicted[rows]]}
        return pd.DataFrame({"row": rows, **columns, "probability": self.confidence[rows].round(3)})

    def reliability(self, bins: int = 10) -> tuple[pd.DataFrame, float]:
        """Return the share of right predictions by confidence, and the expected calibration error.

        That is the mean of the distance between confidence and this share over bins of equal width,
        weighted by their examples (Guo et al. 2017, equation 3).
        """
        assert self.confidence is not None
        is_right = self.expected == self.predicted
        table = pd.DataFrame({"confidence": self.confidence, "right": is_right, "examples": 1})
        number = np.minimum((self.confidence * bins).astype(int), bins - 1)
        of_bins = table.groupby(number).agg(
            {"confidence": "mean", "right": "mean", "examples": "sum"}
        )
        distances = (of_bins["confidence"] - of_bins["right"]).abs()
        error = (of_bins["examples"] * distances).sum() / max(len(table), 1)
        return of_bins, float(error)


@dataclass(frozen=True)
class ValueScores:
    """What a model has predicted for examples with a score."""

    expected: NDArray[np.floating[Any]]
    predicted: NDArray[np.floating[Any]]
    constant: None = None

    def by_class(self) -> None:
        """A score has no classes."""


def score_classes(
    outputs: NDArray[np.float32], labels: NDArray[Any], names: Sequence[str]
) -> ClassScores:
    """Return what a classifier has predicted, from its logits, (examples, classes)."""
    several = np.ndim(labels) == 2
    predicted = outputs > 0 if several else outputs.argmax(-1)
    confidence = None if several else softmax(outputs.astype(np.float64), axis=-1).max(-1)
    return ClassScores(
        labels.astype(np.int64), predicted.astype(np.int64), tuple(names), len(names), confidence
    )


def describe_constant(name: str) -> str:
    """Return what to say of a model that gives one answer for all examples."""
    return (
        f"note: all predictions are {name!r}: the model tells nothing apart, and the scores are no "
        "result. Try a third of --learning_rate, or more epochs."
    )


def find_majority(data: Any, names: Sequence[str]) -> dict[str, Any] | None:
    """Return the most frequent class of some examples with its share, which always predicting it
    has as accuracy; None without single classes.
    """
    if data is None or len(names) < 2 or "label" not in data.column_names:
        return None
    if getattr(data.features["label"], "dtype", None) != "int64":
        return None
    counts = Counter(data["label"][:])
    if min(counts) < 0:
        return None
    number, count = counts.most_common(1)[0]
    return {"class": names[number], "share": count / len(data)}


def describe_majority(dataset: Mapping[str, Any]) -> str | None:
    """Return what always predicting the most frequent class scores, for the log."""
    majority = dataset.get("majority")
    if majority is None:
        return None
    rows = dataset["rows"]["validation"]
    return (
        f"Always {majority['class']!r} has the accuracy {majority['share']:.3f} on these {rows:,} "
        "examples."
    )
