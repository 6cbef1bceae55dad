"""The routes of OpenAI and vLLM: `model` is the name of a task."""

from __future__ import annotations

import base64
import time
import uuid
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, Field

from .bodies import Text
from .engine import Query
from .refusals import Json
from .schedule import Prediction
from .service import Service, service_of
from .tei_routes import as_classes, check_pipeline, shape_vector


router = APIRouter()
OfService = Annotated[Service, Depends(service_of)]


class Inputs(BaseModel):
    """The body of /classify: a text or a list of texts."""

    input: Text | Annotated[list[Text], Field(min_length=1)]
    model: str | None = None

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else self.input


class Embeddings(Inputs):
    """The body of /v1/embeddings."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)


@router.get("/v1/models")
async def models(service: OfService) -> Response:
    """Return the tasks as models."""
    status = await service.status()
    data = [_describe(name, service) for name in status.tasks]
    return Json({"object": "list", "data": data})


@router.get("/v1/models/{task:path}")
async def model(task: str, service: OfService) -> Response:
    """Return a task as a model."""
    await service.facts(task)
    return Json(_describe(task, service))


@router.post("/v1/embeddings")
async def embeddings(body: Embeddings, service: OfService) -> Response:
    """Return the vectors of texts, of length 1."""
    task, predictions = await _predict(body, service, "feature-extraction")
    data = []
    for number, prediction in enumerate(predictions):
        vector = shape_vector(prediction.value, True, body.dimensions)
        content: Any = vector
        if body.encoding_format == "base64":
            content = base64.b64encode(array("f", vector).tobytes()).decode()
        data.append({"object": "embedding", "index": number, "embedding": content})
    return Json({"object": "list", "data": data, "model": task, "usage": _usage(predictions)})


@router.post("/classify")
@router.post("/v1/classify", include_in_schema=False)
async def classify(body: Inputs, service: OfService) -> Response:
    """Return the best class of each text, and the probabilities of all."""
    task, predictions = await _predict(body, service, "text-classification")
    data = []
    for number, prediction in enumerate(predictions):
        classes = as_classes(prediction.value)
        scores = [0.0] * len(classes)
        for entry in classes:
            scores[prediction.labels.index(entry["label"])] = entry["score"]
        data.append(
            {
                "index": number,
                "label": classes[0]["label"],
                "probs": scores,
                "num_classes": len(scores),
            }
        )
    return Json(
        {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": task,
            "data": data,
            "usage": _usage(predictions),
        }
    )


async def _predict(
    body: Inputs, service: Service, pipeline: str
) -> tuple[str, Sequence[Prediction]]:
    task = await service.choose_task(body.model)
    queries = [Query(task, text, all_classes=True) for text in body.texts]
    predictions = await service.predict(queries)
    check_pipeline(predictions, pipeline)
    return task, predictions


def _describe(task: str, service: Service) -> dict[str, Any]:
    return {
        "id": task,
        "object": "model",
        "created": service.started,
        "owned_by": "houlsby_peft",
    }


def _usage(predictions: Sequence[Prediction]) -> dict[str, int]:
    tokens = sum(prediction.tokens for prediction in predictions)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
