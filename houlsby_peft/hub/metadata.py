"""The metadata at the top of a model card, which the Hub reads."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCardData

from ..heads.tasks import TaskKind
from .results import TrainingRun, collect_scores, get_scores, readable_name


if TYPE_CHECKING:
    from ..serving.readers import Input


# The Hub's names for what evaluate computes; other scores keep their own names.
_METRICS = (
    "accuracy",
    "exact_match",
    "f1",
    "matthews_correlation",
    "pearson",
    "precision",
    "recall",
    "spearmanr",
)


def make_metadata(
    name: str,
    base_model: str | None,
    task: TaskKind | None,
    runs: Sequence[TrainingRun],
    metadata: Mapping[str, Any],
) -> ModelCardData:
    """Return the metadata that follow from an adapter and its runs; those of the user take
    precedence.
    """
    dataset: Mapping[str, Any] = runs[0].get("dataset", {}) if runs else {}
    data_name = dataset.get("name") or dataset.get("id")
    scores = get_scores(runs[0]) if data_name and task else {}
    text = {key: str(value) for key, value in dataset.items()}  # the Hub accepts nothing but text
    results = [
        EvalResult(
            task_type=task.pipeline if task else "",
            dataset_type=text.get("id") or re.sub(r"\W+", "-", str(data_name).lower()),
            dataset_name=str(data_name),
            dataset_config=text.get("config"),
            dataset_split=text.get("split"),
            dataset_revision=text.get("revision"),
            metric_type=next(filter(score.endswith, _METRICS), score),
            metric_name=readable_name(score),
            metric_value=round(
                statistics.fmean(collect_scores(runs, score)), 4
            ),  # the mean of the seeds
        )
        for score in scores
    ]
    data: dict[str, Any] = {
        "eval_results": results or None,
        "model_name": name if results else None,
        "library_name": "peft",
        "base_model": base_model,
        "base_model_relation": "adapter" if base_model else None,
        "pipeline_tag": task.pipeline if task else None,
        "language": dataset.get("language"),
        "datasets": [dataset["id"]] if dataset.get("id") else None,
        "metrics": sorted({result.metric_type for result in results}) or None,
        **metadata,
        "tags": sorted({"adapter", "houlsby", "peft", *as_list(metadata.get("tags"))}),
    }
    return ModelCardData(**data)


def make_widget(
    task: TaskKind | None, example: Input | Sequence[Input] | None, answer: Sequence[object] | None
) -> list[dict[str, Any]] | None:
    """Return the examples of the widget on the Hub's page, with the adapter's predictions where it
    can show them.

    The widget has no field for the second text of a pair, except for question answering.
    """
    is_question = task is not None and task.pipeline == "question-answering"
    items = (
        []
        if task is None or example is None
        else [example]
        if isinstance(example, (str, tuple))
        else example
    )
    widget: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        if isinstance(item, str) is is_question:
            continue
        shown: dict[str, Any] = (
            {"text": item} if isinstance(item, str) else {"text": item[0], "context": item[1]}
        )
        found = answer[number] if answer else None
        if isinstance(found, Mapping) and "score" in found:
            score = round(float(found["score"]), 4)
            shown["output"] = (
                {"answer": found["answer"], "score": score}
                if is_question
                else [{"label": str(found.get("label")), "score": score}]
            )
        widget.append(shown)
    return widget or None


def as_list(value: Any) -> list[Any]:
    return (
        list(value) if isinstance(value, (list, tuple, set)) else [] if value is None else [value]
    )
