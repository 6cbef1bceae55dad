"""GLUE's metrics as one evaluate.Metric that runs no code from the Hub."""

from collections.abc import Callable, Sequence

import datasets
import evaluate
import numpy as np
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef


Score = Callable[[NDArray[np.float64], NDArray[np.float64]], float]


def _zero_if_constant(score: Score) -> Score:
    """Matthews' and the other correlations divide by both standard deviations."""

    def checked(references: NDArray[np.float64], predictions: NDArray[np.float64]) -> float:
        return 0.0 if np.ptp(predictions) == 0 or np.ptp(references) == 0 else score(references, predictions)

    return checked


SCORES: dict[str, Score] = {
    "accuracy": accuracy_score,
    "f1": lambda references, predictions: f1_score(references, predictions, zero_division=0.0),
    "matthews_correlation": _zero_if_constant(matthews_corrcoef),
    "pearson": _zero_if_constant(lambda references, predictions: pearsonr(references, predictions)[0]),
    "spearmanr": _zero_if_constant(lambda references, predictions: spearmanr(references, predictions)[0]),
}

# Per task, the main score first: it is the one of the papers' tables and chooses the best epoch. CoLA's accuracy, of
# which the papers' analyses and Whritenour and Schoch 2019 speak, is in no table and no average.
TASK_SCORES: dict[str, tuple[str, ...]] = {
    "cola": ("matthews_correlation", "accuracy"),
    "sst2": ("accuracy",),
    "mrpc": ("f1", "accuracy"),
    "stsb": ("spearmanr", "pearson"),
    "qqp": ("f1", "accuracy"),
    "mnli": ("accuracy",),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
    "minimal_pairs": ("accuracy",),  # no task of GLUE: the recipe's own, for a run without data
}


class GlueMetric(evaluate.Metric):
    """The scores of one GLUE task (Wang et al. 2018, arXiv 1804.07461), under the names of evaluate's "glue"; for CoLA
    the accuracy, too.

    GlueMetric("mrpc", keep_in_memory=True).compute(predictions=[...], references=[...]) gives {"f1": ..., "accuracy":
    ...}. Predictions and references are class numbers, or for "stsb" similarity scores. A score without a value is 0:
    Matthews' and the two correlations when the predictions or the references are all alike, F1 when neither holds the
    class 1.

    Raises:
        ValueError: For an unknown task, no predictions, or predictions that are not finite.
    """

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in TASK_SCORES:
            raise ValueError(f"The task must be one of {', '.join(TASK_SCORES)}, got {self.config_name!r}.")
        number = datasets.Value("float64" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description="The scores of one task of GLUE.",
            citation="Wang et al. 2018, GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language "
            "Understanding, arXiv 1804.07461",
            inputs_description="predictions and references: class numbers, or scores for stsb",
            features=datasets.Features({"predictions": number, "references": number}),
        )

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        predicted, expected = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
        if not predicted.size:
            raise ValueError("A score needs at least one prediction, got none.")
        if not np.isfinite(predicted).all():
            raise ValueError(
                f"Predictions must be finite, {(~np.isfinite(predicted)).sum()} of {predicted.size} are not: the "
                "training has diverged; lower the learning rate."
            )
        return {name: float(SCORES[name](expected, predicted)) for name in TASK_SCORES[self.config_name]}
