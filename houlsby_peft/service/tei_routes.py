"""The routes of text-embeddings-inference and of the Hub's inference API.

Each task has those of a server of its own below /tasks/NAME. At the root, `model` names the task,
which may be left out if there is only one.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Response
from pydantic import AfterValidator, BaseModel, Field

from ..predict.questions import Input
from .bodies import OfService, Text, Texts, ask, kind_of, shape
from .refusals import Json
from .service import Service


router = APIRouter()


def _refuse_prompt(name: str) -> str:
    raise ValueError(f"the model has no prompts; got {name!r}. Leave prompt_name out")


class Cut(BaseModel):
    """What all bodies of text-embeddings-inference have in common.

    Attributes:
        truncate: With False, a text that is longer than the model reads is refused, not cut.
    """

    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] = "Right"
    model: str | None = None


class Predict(Cut):
    """The body of /predict: a text, a pair of texts, or a list of lists of one or two texts."""

    inputs: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=2)]
        | Annotated[
            list[Annotated[list[Text], Field(min_length=1, max_length=2)]], Field(min_length=1)
        ]
    )
    raw_scores: Literal[False] = False


class Embed(Cut):
    """The body of /embed: a text or a list of texts."""

    inputs: Texts
    normalize: bool = True
    dimensions: int | None = Field(default=None, ge=1)
    prompt_name: Annotated[str, AfterValidator(_refuse_prompt)] | None = None


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


class Pipeline(Cut):
    """The body that huggingface_hub's InferenceClient sends."""

    inputs: Texts | Pair
    parameters: Parameters = Parameters()
    normalize: bool = True
    prompt_name: Annotated[str, AfterValidator(_refuse_prompt)] | None = None


async def classify(service: Service, body: Predict, task: str | None = None) -> list[Any]:
    """Return the classes of each text, the best first, or the value of a regression."""
    entries: list[Any] = body.inputs  # type: ignore[assignment]
    is_single = isinstance(entries, str) or isinstance(entries[0], str)
    if is_single:
        entries = [entries]
    inputs = map(_read_texts, entries)
    questions = await ask(
        service, inputs, task or body.model, "text-classification", body.truncate is False
    )
    classes = [shape(question) for question in questions]
    return classes[0] if is_single else classes


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
    raise HTTPException(
        422, "inputs must be texts, a question with its context, or text and text_pair."
    )


@router.post("/tasks/{task:path}/predict")
async def predict_of_task(task: str, body: Predict, service: OfService) -> Response:
    """Return the classes of a text or of several."""
    return Json(await classify(service, body, task))


@router.post("/embed")
@router.post("/tasks/{task:path}/embed")
async def embed(body: Embed, service: OfService, task: str | None = None) -> Response:
    """Return the vectors of texts."""
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    questions = await ask(
        service, texts, task or body.model, "feature-extraction", body.truncate is False
    )
    return Json([shape(question, body.normalize, body.dimensions) for question in questions])


@router.get("/info")
@router.get("/tasks/{task:path}/info")
async def info(service: OfService, task: str | None = None) -> Response:
    """Return what text-embeddings-inference says of its model."""
    facts = await service.engine.facts(await service.choose_task(task))
    kind: dict[str, Any] = {facts.pipeline: {}}
    if facts.pipeline == "feature-extraction":
        kind = {"embedding": {"pooling": "mean"}}
    if facts.pipeline == "text-classification":
        id2label = {str(number): label for number, label in enumerate(facts.labels)}
        label2id = {label: number for number, label in enumerate(facts.labels)}
        kind = {"classifier": {"id2label": id2label, "label2id": label2id}}
    options = service.options
    return Json(
        {
            "model_id": task or facts.base_model,
            "model_sha": facts.fingerprint,
            "model_dtype": facts.dtype,
            "model_type": kind,
            "max_concurrent_requests": options.max_queued,
            "max_input_length": facts.max_tokens,
            "max_batch_requests": options.batch_size,
            "max_client_batch_size": options.max_rows,
            "auto_truncate": True,
            "version": version("houlsby-peft"),
        }
    )


@router.get("/tasks/{task:path}/health", include_in_schema=False)
async def health(task: str, service: OfService) -> Response:
    """Return that a task is served."""
    await service.engine.facts(task)
    return Json({"status": "ok"})


# Behind the routes above, which begin as this one does.
@router.post("/")
@router.post("/tasks/{task:path}")
async def pipeline(body: Pipeline, service: OfService, task: str | None = None) -> Response:
    """Answer as the Hub's inference API, for huggingface_hub's InferenceClient."""
    entries = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    inputs = map(_read_input, entries)
    name = task.rstrip("/") if task else body.model
    questions = await ask(service, inputs, name, None, body.truncate is False)
    values = [shape(question, body.normalize) for question in questions]
    kind = kind_of(questions)
    top_k = body.parameters.top_k
    if top_k is not None:
        if kind != "text-classification":
            raise HTTPException(422, f"top_k is for text classification; the task is {kind}.")
        values = [classes[:top_k] for classes in values]
    # The clients read classes and vectors as a list with one entry for each text.
    is_nested = kind in ("text-classification", "feature-extraction")
    return Json(values if is_nested or isinstance(body.inputs, list) else values[0])
