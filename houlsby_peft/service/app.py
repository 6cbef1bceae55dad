"""The app: the service's own routes, and around them those of other protocols.

It knows an engine, which predicts in this process or on Ray.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Discriminator, Tag

from houlsby_peft_serve import ServiceOptions

from ..predict.held_adapters import TaskSource
from ..predict.questions import Question
from ..predict.task_bank import group_results
from . import openai_routes, tei_routes
from .bodies import Items, OfService, Predictions, Source
from .engine import Engine, Status
from .guards import Guard, Tokens
from .refusals import BusyError, Json, UnansweredError, add_error_handlers
from .service import Service


_PAGE = Path(__file__).with_name("page.html")
router = APIRouter()


def make_app(engine: Engine, options: ServiceOptions, tokens: Tokens) -> FastAPI:
    """Return the app; its `state.service` has what the routes share."""
    app = FastAPI(
        title="houlsby_peft",
        description="Predictions of many adapters on one base model.",
        version=version("houlsby-peft"),
        default_response_class=Json,
    )
    service = app.state.service = Service(engine, options)
    add_error_handlers(app)
    for routes in (openai_routes.router, tei_routes.router, router):
        app.include_router(routes)
    app.add_middleware(Guard, service=service, tokens=tokens)
    return app


@router.get("/", include_in_schema=False)
async def index() -> Response:
    """Return a page on which to try the tasks."""
    page = _PAGE.read_text(encoding="utf-8")
    # Only the page's own script runs, which asks only this service.
    [script] = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; "
        "style-src 'unsafe-inline'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(page, headers={"content-security-policy": policy})


def _form_of(body: Any) -> str:
    """Return which form the body of /predict has: rows with tasks, or the texts of one task."""
    if not isinstance(body, dict):
        return "rows"
    inputs = body.get("inputs")
    if isinstance(inputs, list) and inputs:
        inputs = inputs[0]
    return "texts" if isinstance(inputs, str) or (inputs and isinstance(inputs, list)) else "rows"


@router.post("/predict", response_model=Predictions | list[Any])
async def predict(
    body: Annotated[
        Annotated[Items, Tag("rows")] | Annotated[tei_routes.Predict, Tag("texts")],
        Discriminator(_form_of),
    ],
    service: OfService,
) -> Response:
    """Predict each row for its task. The form of text-embeddings-inference is accepted as well."""
    if isinstance(body, tei_routes.Predict):
        return Json(await tei_routes.classify(service, body))
    needs_all = any(item.tasks == "*" for item in body.inputs)
    all_tasks = await service.engine.tasks() if needs_all else ()
    questions: list[Question] = []
    asked: list[str | Sequence[str]] = []
    rows: list[int] = []
    for number, item in enumerate(body.inputs):
        names, of_all = item.names(all_tasks), item.tasks == "*"
        questions += [Question(item.input, name, item.top_k, of_all) for name in names]
        asked.append(names if item.tasks else "")
        rows += [number] * len(names)
    try:
        answered = await service.predict(questions)
    except UnansweredError as error:
        error.row = rows[error.row]
        raise
    return Json({"predictions": group_results(asked, answered)})


@router.get("/tasks")
async def tasks(service: OfService) -> Response:
    """Return the names of the tasks."""
    return Json({"tasks": await service.engine.tasks()})


@router.get("/tasks/{task:path}")
async def facts(task: str, service: OfService) -> Response:
    """Return the kind, the labels, the base model and the fingerprint of a task."""
    return Json({"task": task, **asdict(await service.engine.facts(task))})


@router.put("/tasks/{task:path}")
async def put(task: str, body: Source, service: OfService) -> Response:
    """Add a task to the list of adapters, or give it another adapter."""
    await service.engine.change(task, TaskSource(body.source, body.revision, body.threshold))
    return Json({"task": task})


@router.delete("/tasks/{task:path}")
async def delete(task: str, service: OfService) -> Response:
    """Remove a task from the list of adapters."""
    await service.engine.change(task, None)
    return Json({"task": task})


@router.post("/reload")
async def reload(service: OfService) -> Response:
    """Look at the folder or list of adapters now; return what /health does."""
    return Json(_describe(await service.engine.refresh(), service))


@router.get("/health")
async def health(service: OfService) -> Response:
    """Return the number of tasks, and why adapters cannot be loaded."""
    try:
        return Json(_describe(await service.engine.status(), service))
    except BusyError:  # and therefore alive
        return Json({"status": "ok", "busy": True})


@router.get("/health/live")
async def live() -> Response:
    """Return that the service is alive."""
    return Json({"status": "ok"})


@router.get("/health/ready")
async def ready(service: OfService) -> Response:
    """Return whether the service takes requests."""
    if service.is_ending:
        return Json({"status": "ending"}, 503)
    return Json({"status": "ok"})


@router.get("/metrics")
async def metrics(service: OfService) -> Response:
    """Return what docs/service.md lists, as Prometheus reads it."""
    return Response(await service.measure(), media_type=CONTENT_TYPE_LATEST)


def _describe(status: Status, service: Service) -> dict[str, Any]:
    state = "ok"
    if status.failed or status.list != "ok":
        state = "degraded"
    if service.is_ending:
        state = "ending"
    return {
        "status": state,
        "tasks": len(status.tasks),
        "in_memory": status.in_memory,
        "failed": status.failed,
        "list": status.list,
    }
