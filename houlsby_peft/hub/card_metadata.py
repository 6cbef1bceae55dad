"""The metadata of a card, and the rules that the Hub has for them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ..heads.tasks import Task
from .card_results import Run, of_method, scores, words


_TAGS = ("adapter", "houlsby", "peft")
_REPO_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# The Hub's names for what evaluate computes; others keep their own.
_METRICS = {"matthews_correlation", "accuracy", "f1", "pearson", "spearmanr", "exact_match", "recall", "precision"}


def card_metadata(
    name: str, base_model: str, task: Task, runs: Sequence[Run], further: Mapping[str, Any] | None = None
) -> ModelCardData:
    """The metadata that follow from an adapter and its runs.

    Args:
        name: of the adapter, for the table of results.
        base_model: its name on the Hub.
        task: what the head does.
        runs: of one or several seeds; the scores are the means.
        further: `license`, `language`, `datasets`, `tags` and so on; tags are added, others replace what follows from
            the runs.

    Raises:
        ValueError: The Hub would refuse them; see `check_metadata`.
    """
    own = of_method(runs, "houlsby")
    dataset: Mapping[str, Any] = (own[0].get("dataset") if own else None) or {}
    results = _results(own, dataset, task)
    facts: dict[str, Any] = {
        "library_name": "peft",
        "base_model": base_model,
        "base_model_relation": "adapter",
        "pipeline_tag": task.pipeline,
        "language": dataset.get("language"),
        "datasets": [dataset["id"]] if dataset.get("id") else None,
        "metrics": sorted({result.metric_type for result in results}) or None,
        "co2_eq_emissions": _emissions(own),
        **(further or {}),
        "tags": sorted({*_TAGS, *((further or {}).get("tags") or ())}),
    }
    data = ModelCardData(eval_results=results or None, model_name=name if results else None, **facts)
    check_metadata(data.to_dict())
    return data


def check_metadata(data: Mapping[str, Any]) -> None:
    """Check metadata for what the Hub refuses, so that it is known before an upload.

    Raises:
        ValueError: `base_model` or a dataset is no name on the Hub (as a local path), a language no code, a license no
            identifier, or the table of results lacks what it must have.
    """
    for key in ("base_model", "datasets"):
        for name in _as_list(data.get(key)):
            _require(
                isinstance(name, str) and bool(_REPO_ID.fullmatch(name)), key, name, "a name on the Hub: user/name"
            )
    for code in _as_list(data.get("language")):
        known = isinstance(code, str) and re.fullmatch(r"[a-z]{2,3}(-[A-Za-z]+)*|code|multilingual", code)
        _require(bool(known), "language", code, "an ISO 639 code such as en")
    for text in _as_list(data.get("license")):
        known = isinstance(text, str) and re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", text)
        _require(bool(known), "license", text, "an identifier such as apache-2.0")
    for key in ("tags", "metrics"):
        for text in _as_list(data.get(key)):
            _require(isinstance(text, str), key, text, "a list of words")
    for model in data.get("model-index") or []:
        for result in model.get("results") or [None]:
            _check_result(result)


def _check_result(result: Any) -> None:
    dataset = (result or {}).get("dataset") or {}
    for key in ("type", "name"):
        _require(isinstance(dataset.get(key), str), f"model-index dataset.{key}", dataset.get(key), "text")
    for key in ("config", "split", "revision"):
        _require(isinstance(dataset.get(key, ""), str), f"model-index dataset.{key}", dataset.get(key), "text")
    for metric in result.get("metrics") or [{}]:
        _require(isinstance(metric.get("type"), str), "model-index metric.type", metric.get("type"), "text")
        _require(isinstance(metric.get("value"), (int, float, str)), "model-index metric.value", metric, "a number")


def _results(own: Sequence[Run], dataset: Mapping[str, Any], task: Task) -> list[EvalResult]:
    """One result per score, the mean over the seeds; none if the data are not known."""
    name = dataset.get("name") or dataset.get("id")
    if not name or not own:
        return []
    values = {key: [scores(run)[key] for run in own if key in scores(run)] for key in scores(own[0])}
    return [
        EvalResult(
            task_type=task.pipeline,
            dataset_type=dataset.get("id") or re.sub(r"\W+", "-", name.lower()),
            dataset_name=name,
            dataset_config=None if dataset.get("config") is None else str(dataset["config"]),
            dataset_split=dataset.get("split"),
            dataset_revision=dataset.get("revision"),
            metric_type=next((metric for metric in sorted(_METRICS, key=len) if key.endswith(metric)), key),
            metric_name=words(key),
            metric_value=round(statistics.fmean(numbers), 4),
        )
        for key, numbers in values.items()
    ]


def _emissions(own: Sequence[Run]) -> dict[str, Any] | None:
    """As the Hub wants them: in grams of CO2."""
    run = next((run for run in own if run.get("emissions") is not None), None)
    if run is None:
        return None
    found = {
        "emissions": round(1000 * float(run["emissions"]), 3),
        "source": "codecarbon",
        "training_type": "fine-tuning",
    }
    return found | ({"hardware_used": run["hardware"]} if run.get("hardware") else {})


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"The card's {name} must be {rule}; got {value!r}.")
