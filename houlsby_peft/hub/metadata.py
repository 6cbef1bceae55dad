"""The metadata at the top of a model card, which the Hub reads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from ..errors import AdapterError, shortened
from ..heads.tasks import TaskKind
from .results import Report, readable_name


if TYPE_CHECKING:
    from ..predict.questions import Input


# The Hub's names for what evaluate computes; other scores keep their own names.
_METRICS = (
    *("accuracy", "exact_match", "f1", "matthews_correlation", "pearson", "precision", "recall"),
    "spearmanr",
)
# What the metadata of a page may stand for.
_MOST_CHARACTERS = 1_000_000
_MOST_DEPTH = 50


def make_metadata(
    name: str,
    base_model: str | None,
    task: TaskKind | None,
    report: Report,
    metadata: Mapping[str, Any],
) -> ModelCardData:
    """Return the metadata that follow from an adapter and its runs; those of the user take
    precedence.
    """
    dataset = report.dataset
    data: dict[str, Any] = {
        "library_name": "peft",
        "base_model": base_model,
        "language": dataset.get("language"),
        "tags": {"adapter", "houlsby", "peft", *as_list(metadata.get("tags"))},
    }
    if base_model:
        data["base_model_relation"] = "adapter"
    if dataset.get("id"):
        data["datasets"] = [dataset["id"]]
    if task is not None:
        data["pipeline_tag"] = task.pipeline
        if results := _evaluation_results(task, report):
            data["eval_results"] = results
            data["model_name"] = name
            data["metrics"] = sorted({result.metric_type for result in results})
    return ModelCardData(**{**data, **metadata, "tags": sorted(data["tags"])})


def _evaluation_results(task: TaskKind, report: Report) -> list[EvalResult]:
    """Return the scores on a named data set."""
    dataset = report.dataset
    if not (data_name := dataset.get("name") or dataset.get("id")):
        return []
    facts = {key: str(value) for key, value in dataset.items()}  # the Hub accepts nothing but text
    results = []
    for score, value in report.scores.items():
        metrics = [metric for metric in _METRICS if score.endswith(metric)]  # f1 for matched_f1
        result = EvalResult(
            task_type=task.pipeline,
            dataset_type=facts.get("id") or re.sub(r"\W+", "-", str(data_name).lower()),
            dataset_name=str(data_name),
            dataset_config=facts.get("config"),
            dataset_split=facts.get("split"),
            dataset_revision=facts.get("revision"),
            metric_type=metrics[0] if metrics else score,
            metric_name=readable_name(score),
            metric_value=round(value, 4),
        )
        results.append(result)
    return results


def make_widget(
    task: TaskKind | None, example: Input | Sequence[Input] | None, answer: Sequence[object] | None
) -> list[dict[str, Any]] | None:
    """Return the examples of the widget on the Hub's page, with the adapter's predictions where it
    can show them.

    The widget has no field for the second text of a pair, except for question answering.
    """
    if task is None or example is None:
        return None
    is_question = task.pipeline == "question-answering"
    inputs = [example] if isinstance(example, (str, tuple)) else example
    widget: list[dict[str, Any]] = []
    for text, prediction in zip(inputs, answer or [None] * len(inputs), strict=False):
        if isinstance(text, str) is is_question:
            continue
        if is_question:
            item: dict[str, Any] = {"text": text[0], "context": text[1]}
        else:
            item = {"text": text}
        if isinstance(prediction, Mapping) and "score" in prediction:
            score = round(float(prediction["score"]), 4)
            item["output"] = [{"label": str(prediction.get("label")), "score": score}]
            if "answer" in prediction:
                item["output"] = {"answer": prediction["answer"], "score": score}
        widget.append(item)
    return widget or None


def check_metadata(page: str) -> None:
    """Refuse a page whose metadata are no YAML, or stand for far more than they are long.

    An alias repeats a value, which may hold aliases itself. Written out, as the Hub's functions do,
    a page of a few lines can fill the memory.
    """
    if not (block := REGEX_YAML_BLOCK.search(page)):
        return
    try:
        count = _count_characters(block[2])
        if count <= max(len(page), _MOST_CHARACTERS):
            yaml.safe_load(block[2])  # which knows fewer tags than the parser
    except yaml.YAMLError as error:
        raise AdapterError(
            f"The metadata of {REPOCARD_NAME} must be YAML. {shortened(str(error))}"
        ) from error
    if count > max(len(page), _MOST_CHARACTERS):
        raise AdapterError(
            f"The metadata of {REPOCARD_NAME} must stand for at most {_MOST_CHARACTERS:,} "
            "characters; its aliases repeat more. Write the values out, or remove them."
        )


def _count_characters(text: str) -> float:
    """Count the characters of YAML's values. An alias counts like the value that it repeats."""
    count_of_anchor: dict[str | None, float] = {}
    anchors: list[str | None] = []  # of the lists and mappings that are open
    counts: list[float] = [0]  # of the document, and of these
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            anchors.append(event.anchor)
            counts.append(1)
            if len(counts) > _MOST_DEPTH:
                raise yaml.YAMLError(f"Lists may be {_MOST_DEPTH} deep in one another.")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, count = anchors.pop(), counts.pop()
            count_of_anchor[anchor] = count
        elif isinstance(event, yaml.ScalarEvent):
            count = 1 + len(event.value)
            count_of_anchor[event.anchor] = count
        elif isinstance(event, yaml.AliasEvent):
            count = count_of_anchor.get(event.anchor, math.inf)  # of a list that holds itself
        else:
            continue
        counts[-1] += count
    return counts[0]


def as_list(value: Any) -> list[Any]:
    """Return metadata that may be one value or several as a list."""
    if value is None:
        return []
    if isinstance(value, (list, tuple, set)):
        return list(value)
    return [value]
