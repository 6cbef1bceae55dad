"""Scores of text classification, from a model's outputs."""

import numpy as np
from glue_metric import SCORES
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, f1_score

from common.errors import RecipeError
from common.labels import MULTI, REGRESSION, SINGLE


# The score that chooses the best epoch.
MAIN_SCORE = {SINGLE: "accuracy", MULTI: "macro_f1", REGRESSION: "spearmanr"}


def check_finite(outputs: NDArray[np.float32]) -> None:
    """Raises RecipeError if the outputs of a model are not all numbers."""
    if not np.isfinite(outputs).all():
        raise RecipeError("The model's outputs are not finite: the training has diverged. Lower --learning_rate.")


def classification_scores(
    outputs: NDArray[np.float32], labels: NDArray[np.generic], problem_type: str
) -> dict[str, float]:
    """Accuracy and macro-F1; for several labels per row exact matches, micro- and macro-F1; correlations of scores.

    Macro-F1 is the mean over the classes that are among the labels or the predictions, 0 for one that is never both.

    Args:
        outputs: (rows, classes), or (rows, 1) for a regression.
        labels: As Labels.encode makes them.
        problem_type: One of PROBLEM_TYPES.
    """
    check_finite(outputs)
    if problem_type == REGRESSION:
        return {name: float(SCORES[name](labels, outputs[:, 0])) for name in ("spearmanr", "pearson")}
    several = problem_type == MULTI
    predicted = (outputs > 0).astype(int) if several else outputs.argmax(-1)
    averages = ("micro", "macro") if several else ("macro",)
    f1 = {f"{kind}_f1": f1_score(labels, predicted, average=kind, zero_division=0.0) for kind in averages}
    return {name: float(value) for name, value in {"accuracy": accuracy_score(labels, predicted), **f1}.items()}
