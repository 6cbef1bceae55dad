"""The routes of text-embeddings-inference and of the Hub's inference API.

Each task has those of a server of its own below /tasks/NAME. At the root, `model` names the task,
which may be left out if there is only one.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, Field

from ..predict.readers import Input
from .bodies import Text
from .engine import Query, Refusal
from .refusals import Json
from .schedule import Prediction
from .service import RefusedError, Service, service_of


router = APIRouter()
OfService = Annotated[Service, Depends(service_of)]


class Predict(BaseModel):
    """The body of /predict: a text, a pair of texts, or a list of lists of one or two texts.

    Texts are always cut to what the model reads.
    """

    inputs: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=2)]
        | Annotated[
            list[Annotated[list[Text], Field(min_length=1, max_length=2)]], Field(min_length=1)
        ]
    )
    raw_scores: Literal[False] = False
    truncate: bool | None = None
    model: str | None = None


class Embed(BaseModel):
    """The body of /embed: a text or a list of texts.

    Texts are always cut to what the model reads.
    """

    inputs: Text | Annotated[list[Text], Field(min_length=1)]
    normalize: bool = True
    dimensions: int | None = Field(default=None, ge=1)
    truncate: bool | None = None
    model: str | None = None


class Parameters(BaseModel):
    """Parameters of the Hub's inference API. Others would change the answer, and are refused."""

    model_config = {"extra": "forbid"}

    top_k: int | None = Field(default=None, ge=1)
    aggregation_strategy: Literal["simple", "first"] | None = None


class Pair(BaseModel):
    """A question and its context, or a pair of texts."""

    model_config = {"extra": "forbid"}

    question: Text | None = None
    context: Text | None = None
    text: Text | None = None
    text_pair: Text | None = None


class Pipeline(BaseModel):
    """The body that huggingface_hub's InferenceClient sends."""

    inputs: Text | Annotated[list[Text], Field(min_length=1)] | Pair
    parameters: Parameters = Parameters()
    normalize: bool = True
    truncate: bool | None = None


async def classify(service: Service, body: Predict, task: str | None = None) -> list[Any]:
    """Return the classes of each text, the best first, or the value of a regression."""
    name = await service.choose_task(task or body.model)
    entries: list[Any] = body.inputs  # type: ignore[assignment]
    is_single = isinstance(entries, str) or isinstance(entries[0], str)
    if is_single:
        entries = [entries]
    queries = [Query(name, _read_texts(entry), all_classes=True) for entry in entries]
    predictions = await service.predict(queries)
    check_pipeline(predictions, "text-classification")
    classes = [as_classes(prediction.value) for prediction in predictions]
    return classes[0] if is_single else classes


async def embed(service: Service, body: Embed, task: str | None = None) -> list[list[float]]:
    """Return the vector of each text."""
    name = await service.choose_task(task or body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    predictions = await service.predict([Query(name, text) for text in texts])
    check_pipeline(predictions, "feature-extraction")
    vectors = []
    for prediction in predictions:
        vectors.append(shape_vector(prediction.value, body.normalize, body.dimensions))
    return vectors


async def run_pipeline(service: Service, body: Pipeline, task: str) -> Any:
    """Return what the Hub's inference API does for the kind of the task."""
    entries = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    top_k = body.parameters.top_k
    queries = []
    for entry in entries:
        queries.append(Query(task, _read_input(entry), top_k, all_classes=top_k is None))
    predictions = await service.predict(queries)
    values: list[Any] = []
    # The clients read classes and vectors as a list with one entry for each text.
    is_nested = True
    for prediction in predictions:
        if prediction.pipeline == "text-classification":
            values.append(as_classes(prediction.value))
        elif prediction.pipeline == "feature-extraction":
            values.append(shape_vector(prediction.value, body.normalize))
        else:
            values.append(prediction.value)
            is_nested = isinstance(body.inputs, list)
    return values if is_nested else values[0]


async def describe(service: Service, task: str | None = None) -> dict[str, Any]:
    """Return what text-embeddings-inference says of its model."""
    facts = await service.facts(await service.choose_task(task))
    kind: dict[str, Any] = {facts.pipeline: {}}
    if facts.pipeline == "feature-extraction":
        kind = {"embedding": {"pooling": "mean"}}
    if facts.pipeline == "text-classification":
        numbers = range(len(facts.labels))
        id2label = dict(zip(map(str, numbers), facts.labels, strict=True))
        label2id = dict(zip(facts.labels, numbers, strict=True))
        kind = {"classifier": {"id2label": id2label, "label2id": label2id}}
    options = service.options
    return {
        "model_id": task or facts.base_model,
        "model_sha": None,
        "model_dtype": facts.dtype,
        "model_type": kind,
        "max_concurrent_requests": options.max_queued,
        "max_input_length": facts.max_tokens,
        "max_batch_requests": options.batch_size,
        "max_client_batch_size": options.max_rows,
        "auto_truncate": True,
        "version": version("houlsby-peft"),
    }


def check_pipeline(predictions: Sequence[Prediction], pipeline: str) -> None:
    """Refuse a task of another kind than a route is for, with the status of
    text-embeddings-inference.
    """
    for prediction in predictions:
        if prediction.pipeline != pipeline:
            rule = f"This route is for {pipeline}; the task is {prediction.pipeline}."
            raise RefusedError(Refusal(424, rule))


def as_classes(value: Any) -> list[Any]:
    """Return the classes of a text as a list; of a regression, a list with its value."""
    return value if isinstance(value, list) else [value]


def shape_vector(
    vector: list[float], is_normalized: bool, dimensions: int | None = None
) -> list[float]:
    """Return the first dimensions of a vector, of length 1 if it is to be normalized."""
    values = vector[:dimensions]
    length = sum(value * value for value in values) ** 0.5
    if not is_normalized or not length:
        return values
    return [value / length for value in values]


def _read_texts(entry: str | list[str]) -> Input:
    if isinstance(entry, str):
        return entry
    if len(entry) == 1:
        return entry[0]
    return entry[0], entry[1]


def _read_input(entry: str | Pair) -> Input:
    if isinstance(entry, str):
        return entry
    for first, second in ((entry.question, entry.context), (entry.text, entry.text_pair)):
        if first is not None and second is not None:
            return first, second
    if entry.text is not None:
        return entry.text
    raise RefusedError(
        Refusal(422, "inputs must be texts, a question with its context, or text and text_pair.")
    )


@router.post("/tasks/{task:path}/predict")
async def predict_of_task(task: str, body: Predict, service: OfService) -> Response:
    """Return the classes of a text or of several."""
    return Json(await classify(service, body, task))


@router.post("/embed")
async def embed_texts(body: Embed, service: OfService) -> Response:
    """Return the vectors of texts."""
    return Json(await embed(service, body))


@router.post("/tasks/{task:path}/embed")
async def embed_of_task(task: str, body: Embed, service: OfService) -> Response:
    """Return the vectors of texts."""
    return Json(await embed(service, body, task))


@router.post("/")
async def pipeline_of_only_task(body: Pipeline, service: OfService) -> Response:
    """Answer for the only task as for /tasks/NAME."""
    return Json(await run_pipeline(service, body, await service.choose_task(None)))


@router.get("/info")
async def info(service: OfService) -> Response:
    """Return what is known of the only task."""
    return Json(await describe(service))


@router.get("/tasks/{task:path}/info")
async def info_of_task(task: str, service: OfService) -> Response:
    """Return what is known of a task."""
    return Json(await describe(service, task))


@router.get("/tasks/{task:path}/health", include_in_schema=False)
async def health_of_task(task: str, service: OfService) -> Response:
    """Return that a task is served."""
    await service.facts(task)
    return Json({"status": "ok"})


@router.post("/tasks/{task:path}")
async def pipeline(task: str, body: Pipeline, service: OfService) -> Response:
    """Answer as the Hub's inference API, for huggingface_hub's InferenceClient."""
    return Json(await run_pipeline(service, body, task.rstrip("/")))
