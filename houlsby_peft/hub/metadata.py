"""The metadata at the top of a model card, which the Hub reads: made, checked, and which of them old weights made."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..heads.tasks import Task
from .results import TrainingRun, collect_scores, get_scores, readable_name


if TYPE_CHECKING:
    from ..serving.predictor import Input


_TAGS = ("adapter", "houlsby", "peft")
# The Hub's names for what evaluate computes; other scores keep their own names.
_METRICS = ("accuracy", "exact_match", "f1", "matthews_correlation", "pearson", "precision", "recall", "spearmanr")


def make_metadata(
    name: str, base_model: str | None, task: Task | None, runs: Sequence[TrainingRun], metadata: Mapping[str, Any]
) -> ModelCardData:
    """Return the metadata that follow from an adapter and its runs; those of the user take precedence.

    Raises:
        ValueError: The metadata break a rule of the Hub; see `check_metadata`.
    """
    dataset: Mapping[str, Any] = runs[0].get("dataset", {}) if runs else {}
    data_name = dataset.get("name") or dataset.get("id")
    scores = get_scores(runs[0]) if data_name and task else {}

    def text(key: str) -> str | None:
        return str(dataset[key]) if key in dataset else None  # the Hub accepts nothing but text

    eval_results = [
        EvalResult(
            task_type=task.pipeline if task else "",
            dataset_type=dataset.get("id") or re.sub(r"\W+", "-", str(data_name).lower()),
            dataset_name=str(data_name),
            dataset_config=text("config"),
            dataset_split=text("split"),
            dataset_revision=text("revision"),
            metric_type=next(filter(score.endswith, _METRICS), score),
            metric_name=readable_name(score),
            metric_value=round(statistics.fmean(collect_scores(runs, score)), 4),  # the mean of the seeds
        )
        for score in scores
    ]
    emissions = next((run for run in runs if "emissions" in run), None)
    data: dict[str, Any] = {
        "eval_results": eval_results or None,
        "model_name": name if eval_results else None,
        "library_name": "peft",
        "base_model": base_model,
        "base_model_relation": "adapter" if base_model else None,
        "pipeline_tag": task.pipeline if task else None,
        "language": dataset.get("language"),
        "datasets": [dataset["id"]] if dataset.get("id") else None,
        "metrics": sorted({result.metric_type for result in eval_results}) or None,
        "co2_eq_emissions": emissions
        and {
            "emissions": round(1000 * float(emissions["emissions"]), 3),  # grams
            "source": "codecarbon",
            "training_type": "fine-tuning",
            **({"hardware_used": emissions["hardware"]} if emissions.get("hardware") else {}),
        },
        **metadata,
        "tags": [*_TAGS, *as_list(metadata.get("tags"))],
    }
    check_metadata(data)
    return ModelCardData(**{**data, "tags": sorted(set(data["tags"]))})


def check_metadata(data: Mapping[str, Any]) -> None:
    """Check metadata for the mistakes that people make, without asking the Hub.

    Raises:
        ValueError: `base_model` or a dataset is not a name on the Hub (but a local path, for example), a language is
            not a code, a license is not an identifier, or a tag or metric is not text.
    """
    language = re.compile(r"[a-z]{2,3}(-[A-Za-z]+)*|code|multilingual")
    rules: dict[str, tuple[Callable[[str], object], str]] = {
        "base_model": (is_repo_id, "a name on the Hub: user/name"),
        "datasets": (is_repo_id, "a name on the Hub: user/name"),
        "language": (language.fullmatch, "an ISO 639 code such as en"),
        "license": (re.compile(r"[a-z0-9][a-z0-9.+-]*").fullmatch, "an identifier such as apache-2.0"),
        "tags": (bool, "a list of words"),
        "metrics": (bool, "a list of words"),
    }
    for key, (is_valid, rule) in rules.items():
        for value in as_list(data.get(key)):
            if not (isinstance(value, str) and is_valid(value)):
                raise ValueError(f"The card's {key} must be {rule}; got {value!r}.")


def is_repo_id(name: str) -> bool:
    """Return whether a repository on the Hub could have this name: "user/name" or "name"."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name == name.strip()  # validate_repo_id accepts a newline at the end


def make_widget(
    task: Task | None, example: Input | Sequence[Input] | None, answer: Sequence[object] | None
) -> list[dict[str, Any]] | None:
    """Return the examples of the widget on the Hub's page, with the adapter's predictions where it can show them.

    The widget has no field for the second text of a pair, except for question answering.
    """
    if task is None:
        return None
    is_question = task.pipeline == "question-answering"
    widget: list[dict[str, Any]] = []
    for number, item in enumerate(as_inputs(example)):
        if isinstance(item, str) is is_question:
            continue
        found = answer[number] if answer and number < len(answer) else None
        shown: dict[str, Any] = (
            {"text": item} if isinstance(item, str) else dict(zip(("text", "context"), item, strict=True))
        )
        if isinstance(found, Mapping) and task.pipeline == "text-classification":
            shown["output"] = [{"label": str(found["label"]), "score": round(float(found["score"]), 4)}]
        elif isinstance(found, Mapping) and is_question:
            shown["output"] = {"answer": str(found["answer"]), "score": round(float(found["score"]), 4)}
        widget.append(shown)
    return widget or None


def as_inputs(example: Input | Sequence[Input] | None) -> Sequence[Input]:
    """Return an example, which is an input or a list of inputs, as a list."""
    return [example] if isinstance(example, (str, tuple)) else [] if example is None else example


def is_of_weights(key: str, value: Any) -> bool:
    """Return whether metadata were generated from an adapter's old weights, such as its scores and predictions."""
    if key == "widget":
        return any(isinstance(example, Mapping) and "output" in example for example in as_list(value))
    return key in ("model-index", "metrics", "co2_eq_emissions")


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple, set)) else [] if value is None else [value]
