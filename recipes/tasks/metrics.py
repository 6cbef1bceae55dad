"""Metrics of the library `evaluate`, from the Hub or from a script, beside a task's own scores."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from huggingface_hub import is_offline_mode

from run.edge import RecipeError, log


@dataclass(frozen=True)
class Examples:
    """The predictions for a split and the references, as the metrics of a kind of task take them:

    class numbers, values, a list of 0 and 1 for each class, a list of tags for each sentence, or
    SQuAD's dictionaries. `average` is how scores of single classes become one, where it is needed.
    """

    predictions: list[Any]
    references: list[Any]
    average: str | None = None


def load_metrics(names: Sequence[str], config: str | None = None) -> dict[str, Any]:
    """Load metrics by their names on the Hub or the paths of their scripts, whose code is run."""
    metrics: dict[str, Any] = {}
    if not names:
        return metrics
    import evaluate  # only now, as the import takes seconds

    if is_offline_mode():  # of which evaluate knows nothing
        evaluate.config.HF_EVALUATE_OFFLINE = True
    for name in names:
        module_type = None if Path(name).exists() else "metric"
        try:
            metric = evaluate.load(name, config, module_type, keep_in_memory=True)
            metrics[Path(name).stem] = metric
        except Exception as error:  # a script may raise anything
            raise RecipeError(
                f"--metric {name} cannot be loaded: {error} Give the path of a script, such as "
                f"metrics/{Path(name).stem}.py, or a name on the Hub, which must be in reach."
            ) from error
    return metrics


def compute_metrics(metrics: dict[str, Any], examples: Examples) -> dict[str, float]:
    """Return the values of all metrics. One that cannot be computed is left out, with a warning."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        options = {}
        if examples.average and "average" in inspect.signature(metric._compute).parameters:
            options["average"] = examples.average
        try:
            result = metric.compute(
                predictions=examples.predictions, references=examples.references, **options
            )
        except Exception as error:  # a script may raise anything
            log(f"warning: --metric {name} is left out: {' '.join(str(error).split())}")
            continue
        numbers = list_numbers(name, result)
        if not numbers:
            log(f"warning: --metric {name} is left out: it gives no number, but {result!r:.100}")
        values |= numbers
    return values


def list_numbers(name: str, result: Any) -> dict[str, float]:
    """Return the finite numbers of a metric's result, by the metric's name and theirs.

    {"accuracy": 0.5} of accuracy is named "accuracy", {"PER": {"f1": 0.5}} of seqeval
    "seqeval.PER.f1".
    """
    numbers: dict[str, float] = {}
    if isinstance(result, dict):
        for key, value in result.items():
            numbers |= list_numbers(name if key == name else f"{name}.{key}", value)
    elif isinstance(result, Real) and not isinstance(result, bool) and math.isfinite(result):
        numbers[name] = float(result)
    return numbers
