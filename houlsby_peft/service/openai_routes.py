"""The routes of OpenAI and vLLM, where `model` is the name of a task, and of vLLM's router."""

from __future__ import annotations

import base64
import time
import uuid
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Response
from pydantic import BaseModel, BeforeValidator, Field

from ..predict.questions import Question
from .bodies import OfService, Texts, ask, kind_of, shape
from .refusals import Json
from .service import Service


router = APIRouter()


def _refuse_tokens(texts: Any) -> Any:
    """Refuse the numbers that some clients make of a text with OpenAI's own tokenizer."""
    first = texts[0] if isinstance(texts, list) and texts else None
    if isinstance(first, (int, list)):
        raise ValueError(
            "must be a text or a list of texts, as the model has another tokenizer than the client "
            "that sent numbers of tokens. LangChain sends texts with "
            "check_embedding_ctx_length=False"
        )
    return texts


Inputs = Annotated[Texts, BeforeValidator(_refuse_tokens)]


class Embeddings(BaseModel):
    """The body of /v1/embeddings: a text or a list of texts."""

    input: Inputs
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)


class Classify(BaseModel):
    """The body of /classify: `input` as vLLM reads it, or `inputs` as its router sends it."""

    input: Inputs | None = None
    inputs: Inputs | None = None
    model: str | None = None


@router.get("/v1/models")
async def models(service: OfService) -> Response:
    """Return the tasks as models."""
    data = [_describe(name, service) for name in await service.engine.tasks()]
    return Json({"object": "list", "data": data})


@router.get("/v1/models/{task:path}")
async def model(task: str, service: OfService) -> Response:
    """Return a task as a model."""
    await service.engine.facts(task)
    return Json(_describe(task, service))


@router.post("/v1/embeddings")
async def embeddings(body: Embeddings, service: OfService) -> Response:
    """Return the vectors of texts, of length 1."""
    questions = await ask(service, _as_list(body.input), body.model, "feature-extraction")
    data = []
    for number, question in enumerate(questions):
        vector = shape(question, True, body.dimensions)
        content: Any = vector
        if body.encoding_format == "base64":
            content = base64.b64encode(array("f", vector).tobytes()).decode()
        data.append({"object": "embedding", "index": number, "embedding": content})
    return Json({"object": "list", "data": data, **_usage(questions)})


@router.post("/classify")
@router.post("/v1/classify", include_in_schema=False)
@router.post("/tasks/{task:path}/classify")
async def classify(body: Classify, service: OfService, task: str | None = None) -> Response:
    """Return the best class and the probabilities of each `input`, as vLLM does.

    For `inputs`, return what vLLM's semantic router reads: all classes of a text or, for token
    classification, its entities with the positions of their letters.
    """
    task = task or body.model
    if (body.input is None) is (body.inputs is None):
        raise HTTPException(422, "The body must have either input or inputs.")
    if body.inputs is not None:
        questions = await ask(service, _as_list(body.inputs), task)
        if kind_of(questions) not in ("text-classification", "token-classification"):
            kind = kind_of(questions)
            raise HTTPException(424, f"This route is for classification; the task is {kind}.")
        results = [shape(question) for question in questions]
        return Json(results[0] if isinstance(body.inputs, str) else results)
    questions = await ask(service, _as_list(body.input or ""), task, "text-classification")
    data = []
    for number, question in enumerate(questions):
        assert question.facts is not None
        classes = shape(question)
        scores = [0.0] * len(classes)
        for entry in classes:
            scores[question.facts.labels.index(entry["label"])] = entry["score"]
        best = {"index": number, "label": classes[0]["label"]}
        data.append({**best, "probs": scores, "num_classes": len(scores)})
    identity = {"id": f"classify-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
    return Json({**identity, "data": data, **_usage(questions)})


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _describe(task: str, service: Service) -> dict[str, Any]:
    return {
        "id": task,
        "object": "model",
        "created": service.started,
        "owned_by": "houlsby_peft",
    }


def _usage(questions: Sequence[Question]) -> dict[str, Any]:
    """Return the task of an answer, and how many tokens it has taken."""
    tokens = sum(question.tokens for question in questions)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"model": questions[0].task, "usage": usage}
