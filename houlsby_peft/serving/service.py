"""The service on Ray Serve: replicas of a `TaskBank` behind an HTTP interface of FastAPI.

`build` makes the application, on one machine (`houlsby-peft serve`) and on a cluster (`serve
deploy`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml
from fastapi import FastAPI, HTTPException, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import AdapterError, HubError, shortened
from .adapter_list import read_adapters
from .readers import Input
from .task_bank import TaskBank


NAME = "houlsby"
LOGGING = {"enable_access_log": False, "log_level": "WARNING"}
_LOG = logging.getLogger(__name__)
_MAX_BYTES = 1_000_000
# Seconds before a request is repeated whose replica was lost.
_PAUSES = (0.0, 0.5, 1.0)
# Requests that the ingress may be about to refuse.
_MOST_REFUSED = 1000


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a service: the arguments of `build`, under `args` in a deployment file.

    Args:
        adapters: See `read_adapters`. On a cluster, a path that all nodes can read.
        base_model: The base model, or its folder, in place of the one that the adapters name.
        batch_size: Rows that a replica predicts at once, and the most rows of a request of several,
            counted once per task.
        batch_wait: Seconds to wait for further requests before a batch that is not full is
            predicted.
        max_bytes: Memory for adapters in each replica, in bytes (see `TaskBank`).
        watch: Seconds between two looks at the folder or list of adapters. 0: it is read once.
        min_replicas, max_replicas: Limits of the number of replicas, which depends on the load.
        cpus: CPU cores, and threads, of a replica.
        gpus: GPUs of a replica: 0, 1 or a part of one.
        max_queued: Requests that may wait for a replica. Further ones get the status 503.
        hosts: Names of the service in the header Host of requests. Requests with another name are
            refused; "*" is any.
    """

    adapters: str
    base_model: str | None = None
    batch_size: int = 32
    batch_wait: float = 0.005
    max_bytes: float = 2e9
    watch: float = 5.0
    min_replicas: int = 1
    max_replicas: int = 1
    cpus: int = 1
    gpus: float = 0
    max_queued: int = 512
    hosts: list[str] = field(default_factory=lambda: ["*"])


class Item(BaseModel):
    """An input: `task` or `tasks`, and either `text`, `text` and `text_pair`, or `question` and
    `context`.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    task: str | None = None
    tasks: list[str] | None = Field(default=None, min_length=1)
    text: str | None = None
    text_pair: str | None = None
    question: str | None = None
    context: str | None = None
    top_k: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_texts(self) -> Item:
        texts = {}
        for name in ("text", "text_pair", "question", "context"):
            if getattr(self, name) is not None:
                texts[name] = getattr(self, name)
        forms = {"text"}, {"text", "text_pair"}, {"question", "context"}
        if texts.keys() not in forms or (self.task is None) is (self.tasks is None):
            raise ValueError(
                "a row must have task or tasks, and either text, text and text_pair, or question "
                "and context"
            )
        "".join(texts.values()).encode()  # half of a surrogate pair is a ValueError
        return self

    @property
    def names(self) -> list[str]:
        """The tasks."""
        if self.tasks is None:
            return [str(self.task)]
        return list(dict.fromkeys(self.tasks))

    @property
    def input(self) -> Input:
        """The input of a `Predictor`."""
        if self.question is not None:
            return self.question, str(self.context)
        if self.text_pair is not None:
            return str(self.text), self.text_pair
        return str(self.text)


# The status of HTTP, and the object that is sent as JSON.
Answer = tuple[int, dict[str, Any]]


def count(items: Sequence[Item]) -> int:
    """Return the number of predictions that a request asks for."""
    return sum(len(item.names) for item in items)


class Items(BaseModel):
    """The body of a request for predictions."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"example": {"inputs": [{"task": "reviews", "text": "Good soup."}]}},
    )

    inputs: list[Item] = Field(min_length=1)


class Predictions(BaseModel):
    """The answer: the predictions of the rows, in their order, as `TaskBank.predict` gives them."""

    predictions: list[Any]


def answer(bank: TaskBank, requests: Sequence[Sequence[Item]], batch_size: int) -> list[Answer]:
    """Return the answer to each request. No request fails because of another one."""
    items = list(chain.from_iterable(requests))
    try:
        results = bank.predict(
            [(item.names, item.input) for item in items],
            batch_size,
            [item.top_k for item in items],
            return_errors=True,
        )
    except Exception as error:
        if len(requests) == 1:
            return [_explain_error(bank, items[0].names[0], error, None)]
        # The model itself fails for one of them.
        return [answer(bank, [request], batch_size)[0] for request in requests]
    answers = []
    start = 0
    for request in requests:
        end = start + len(request)
        answers.append(_answer_request(bank, request, results[start:end]))
        start = end
    return answers


def _answer_request(
    bank: TaskBank, request: Sequence[Item], results: Sequence[Mapping[str, Any]]
) -> Answer:
    """Return the answer to a request, from the results of each item by task: the first error, or
    all predictions.
    """
    predictions: list[Any] = []
    for number, (item, by_task) in enumerate(zip(request, results, strict=True)):
        for task, result in by_task.items():
            if isinstance(result, Exception):
                return _explain_error(bank, task, result, number)
        predictions.append(by_task[str(item.task)] if item.tasks is None else by_task)
    return 200, {"predictions": predictions}


def _explain_error(bank: TaskBank, task: str, error: Exception, number: int | None) -> Answer:
    if task in bank.failed and task not in bank.tasks:
        rule = f"The adapter of task {task!r} cannot be loaded; GET /health says why."
        return refuse(500, rule, number)
    if task not in bank.tasks:
        return refuse(404, f"task must be one of GET /tasks; got {shortened(repr(task))}.", number)
    if isinstance(error, (AdapterError, HubError)):
        return refuse(500, hide_folders(str(error)), number)
    if isinstance(error, ValueError):
        return refuse(422, hide_folders(str(error)), number)
    _LOG.error("A prediction failed.", exc_info=error)
    return refuse(500, "The prediction failed; the log of the service says why.", number)


def refuse(status: int, rule: str, row: int | None = None) -> Answer:
    """Return the answer to a request that breaks a rule, in one of its rows."""
    return status, {"detail": {"rule": rule, "row": row}}


def hide_folders(text: str) -> str:
    """Return a text in which the absolute paths of this machine have lost their folders."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/]+/)+", "", text)


class BankReplica:
    """A replica: a `TaskBank` whose batches are gathered from the requests of all clients."""

    def __init__(self, options: ServiceOptions) -> None:
        torch.set_num_threads(options.cpus)
        self._options = options
        device = "cuda" if options.gpus else None
        self._bank = TaskBank(
            {}, base_model=options.base_model, max_bytes=options.max_bytes, device=device
        )
        self._state_of_list = "ok"
        self.refresh()
        self.predict.set_max_batch_size(options.batch_size)
        self.predict.set_batch_wait_timeout_s(options.batch_wait)

        def watch() -> None:
            while options.watch:
                time.sleep(options.watch)
                self.refresh()

        threading.Thread(target=watch, daemon=True).start()

    # A request alone, whose item may have more tasks than a batch has rows, is a batch.
    @serve.batch(  # type: ignore[untyped-decorator]
        max_batch_size=32,
        batch_size_fn=lambda requests: sum(map(count, requests)) if len(requests) > 1 else 1,
    )
    async def predict(self, requests: list[list[Item]]) -> list[Answer]:
        """Predict the items of several requests together."""
        # In a thread, so that requests for the next batch are received meanwhile.
        return await asyncio.to_thread(answer, self._bank, requests, self._options.batch_size)

    async def status(self) -> Answer:
        """Return the names of the tasks, those whose adapter cannot be loaded, and what is wrong
        with the list.
        """
        bank = self._bank
        failed = {task: hide_folders(reason) for task, reason in bank.failed.items()}
        held = await asyncio.to_thread(lambda: bank.held)
        names = list(dict.fromkeys([*bank.tasks, *failed]))
        return 200, {
            "names": names,
            "in_memory": len(held),
            "failed": failed,
            "list": self._state_of_list,
        }

    def refresh(self) -> None:
        """Serve what the folder or list has now. While it cannot be read, the tasks stay as they
        are.
        """
        try:
            reasons_so_far = self._bank.failed
            for task, reason in self._bank.serve(read_adapters(self._options.adapters)).items():
                if reasons_so_far.get(task) != reason:
                    _LOG.warning("The adapter of task %r cannot be loaded. %s", task, reason)
            self._state_of_list = "ok"
        except Exception as error:  # a folder may change while it is read
            self._state_of_list = hide_folders(str(error))


app = FastAPI(title="houlsby_peft", description="Predictions of many adapters on one base model.")


@app.exception_handler(RequestValidationError)
async def _explain(_: Any, error: RequestValidationError) -> Response:
    # FastAPI would repeat the input, which may be no valid text.
    details = [{"loc": detail["loc"], "msg": detail["msg"]} for detail in error.errors()]
    return JSONResponse({"detail": details}, 422)


class LimitBody:
    """Middleware that refuses a request of more than a million bytes while it is received."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > _MAX_BYTES:
                raise HTTPException(
                    413, f"A request must have at most {_MAX_BYTES:,} bytes. Send several."
                )
            return message

        await self.app(scope, counted, send)


app.add_middleware(LimitBody)


class Ingress:
    """The HTTP interface. Requests whose replica was lost are repeated, as they change nothing."""

    def __init__(self, replicas: Any, options: ServiceOptions) -> None:
        self._replicas = replicas
        self.options = options
        self.running = 0
        self.is_ending = False
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "houlsby_requests",
            "Requests for predictions, by the status of HTTP.",
            ["status"],
            registry=registry,
        )
        self.rows = Counter(
            "houlsby_predictions", "Rows that were predicted, by task.", ["task"], registry=registry
        )
        self.seconds = Histogram(
            "houlsby_request_seconds",
            "Time to answer a request for predictions.",
            registry=registry,
        )

    async def end(self) -> None:
        """Refuse further requests, and return when the running ones are answered."""
        self.is_ending = True
        while self.running:
            await asyncio.sleep(0.05)

    async def call(self, method: str, *args: Any) -> Answer:
        """Return what a method of a replica answers, or that it cannot be called now."""
        remote = getattr(self._replicas, method).remote
        try:
            for pause in _PAUSES:
                with suppress(RayActorError):
                    return await remote(*args)  # type: ignore[no-any-return]
                await asyncio.sleep(pause)
            return await remote(*args)  # type: ignore[no-any-return]
        except BackPressureError:
            return refuse(503, "Too many requests are waiting. Try again later.")


def _ingress() -> Ingress:
    return serve.get_replica_context().servable_object  # type: ignore[no-any-return]


@app.get("/", include_in_schema=False)
async def index() -> Response:
    """Return a page on which to try the tasks."""
    return FileResponse(Path(__file__).with_name("page.html"))


@app.post("/predict", response_model=Predictions)
async def predict(body: Items) -> Response:
    """Predict each row for its task."""
    ingress, start = _ingress(), time.perf_counter()
    ingress.running += 1
    try:
        status, content = await _predict(ingress, body.inputs)
    finally:
        ingress.running -= 1
    if status == 200:
        for task in chain.from_iterable(item.names for item in body.inputs):
            ingress.rows.labels(task).inc()
    ingress.requests.labels(str(status)).inc()
    ingress.seconds.observe(time.perf_counter() - start)
    return JSONResponse(content, status)


async def _predict(ingress: Ingress, items: list[Item]) -> Answer:
    most, asked = ingress.options.batch_size, count(items)
    if ingress.is_ending:
        return refuse(503, "The service is ending.")
    if asked > most and len(items) > 1:
        return refuse(
            400,
            f"inputs must be one row, or at most {most:,} rows, counted once per task; got "
            f"{asked:,}. Send several requests.",
        )
    return await ingress.call("predict", items)


@app.get("/tasks")
async def tasks() -> Response:
    """Return the names of the tasks."""
    status, content = await _ingress().call("status")
    if status == 200:
        content = {"tasks": content["names"]}
    return JSONResponse(content, status)


@app.get("/health")
async def health() -> dict[str, Any]:
    """Return the number of tasks, and why adapters cannot be loaded."""
    status, content = await _ingress().call("status")
    if status != 200:
        return {"status": "ok", "busy": True}  # and therefore alive
    return {"status": "ok", "tasks": len(content.pop("names")), **content}


@app.get("/metrics")
async def metrics() -> Response:
    """Return requests by status, predictions by task and latencies, as Prometheus reads them."""
    return Response(generate_latest(_ingress().registry), media_type=CONTENT_TYPE_LATEST)


def build(args: Mapping[str, Any]) -> serve.Application:
    """Return the application for Ray Serve; `args` are the fields of `ServiceOptions`."""
    options = ServiceOptions(**args)
    read_adapters(options.adapters)  # refused here, before replicas start and fail
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=options.hosts)
    # While a batch is predicted, the next one is gathered.
    ongoing = 2 * options.batch_size
    replicas = serve.deployment(
        BankReplica,
        max_ongoing_requests=ongoing,
        max_queued_requests=options.max_queued,
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.batch_size,
        },
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        logging_config=LOGGING,
    )
    ingress = serve.deployment(
        serve.ingress(app)(Ingress),
        name="Ingress",
        # The ingress itself refuses requests beyond those that replicas run and may queue, with the
        # rule. Only beyond these further ones does Ray's proxy refuse them, as plain text.
        max_ongoing_requests=ongoing * options.max_replicas + options.max_queued + _MOST_REFUSED,
        max_queued_requests=options.max_queued + _MOST_REFUSED,
        ray_actor_options={"num_cpus": 0},
        logging_config=LOGGING,
    )
    return ingress.bind(replicas.bind(options), options)


def http_options(host: str, port: int) -> dict[str, Any]:
    """Return the options of Ray Serve's HTTP proxy."""
    return {"host": host, "port": port, "request_timeout_s": 120}


def deployment_file(options: ServiceOptions, host: str, port: int) -> str:
    """Return the service's deployment file for `serve deploy` and `serve run`, as YAML."""
    content = {
        "proxy_location": "EveryNode",
        "http_options": http_options(host, port),
        "logging_config": LOGGING,
        "applications": [
            {
                "name": NAME,
                "route_prefix": "/",
                "import_path": f"{__name__}:build",
                "args": asdict(options),
            },
        ],
    }
    text: str = yaml.safe_dump(content, sort_keys=False)
    return text
