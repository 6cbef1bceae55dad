"""`Service`: what the routes share. It checks limits, asks the engine, and counts."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import version

from fastapi import HTTPException, Request
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from houlsby_peft_serve import ServiceOptions

from ..predict.questions import Question
from .engine import Engine, Status
from .refusals import UnansweredError


# Tasks that have metrics of their own. The others share those of a task without a name.
_MOST_TASKS = 200


@dataclass
class RequestFacts:
    """What is logged and counted of a request.

    Attributes:
        id: The client's X-Request-ID, or a new one.
        route: The path of the route, with {task} in place of a name.
        rows: The number of questions to each task.
        adapters: The fingerprint of the adapter that has answered for each task.
    """

    id: str
    route: str = "unknown"
    rows: Counts[str] = field(default_factory=Counts)
    adapters: dict[str, str] = field(default_factory=dict)


# The request that is being answered.
REQUEST: ContextVar[RequestFacts] = ContextVar("request")


class Service:
    """An engine with the limits and the metrics of the service.

    Attributes:
        options: The options of the service.
        engine: What predicts.
        is_ending: Whether connections are closed after their answer.
        started: When the service started, in seconds since 1970.
    """

    def __init__(self, engine: Engine, options: ServiceOptions) -> None:
        self.options = options
        self.engine = engine
        self.is_ending = False
        self.started = int(time.time())
        self._base_model = ""
        self._status: Status
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "houlsby_requests",
            "Requests, without probes.",
            ["route", "status"],
            registry=registry,
        )
        self._rows = Counter(
            "houlsby_predictions", "Rows that were predicted.", ["task"], registry=registry
        )
        self._errors = Counter(
            "houlsby_task_errors", "Requests that got 500 or more.", ["task"], registry=registry
        )
        self._seconds = Histogram(
            "houlsby_request_seconds", "Time to predict a request.", ["task"], registry=registry
        )
        registry.register(self)
        self._named: set[str] = set()

    async def predict(self, questions: Sequence[Question]) -> list[Question]:
        """Answer questions; the first one without an answer is an `UnansweredError`."""
        if not all(question.task for question in questions):
            only_task = await self.choose_task(None)
            for question in questions:
                question.task = question.task or only_task
        REQUEST.get().rows.update(question.task for question in questions)
        self._check_limits(questions)
        answered = await self.engine.predict(questions)
        for number, question in enumerate(answered):
            if question.error is not None:
                raise UnansweredError(question.error, number)
            if question.facts is not None:
                self._base_model = question.facts.base_model
                REQUEST.get().adapters[question.task] = question.facts.fingerprint
        return answered

    def _check_limits(self, questions: Sequence[Question]) -> None:
        most = self.options.max_rows
        if len(questions) > most:
            raise HTTPException(
                413,
                f"A request must have at most {most:,} rows, counted once per task; got "
                f"{len(questions):,}. Send several requests.",
            )
        most = self.options.max_characters
        # A text that several tasks read is there once.
        inputs = {id(question.text): question.characters for question in questions}
        characters = sum(inputs.values())
        if characters > most:
            raise HTTPException(
                413,
                f"The texts of a request must have at most {most:,} characters; got "
                f"{characters:,}. Send several requests, or parts of a long text.",
            )

    async def choose_task(self, name: str | None) -> str:
        """Return the task that a request names; without a name, the only one."""
        if name is not None:
            return name
        names = await self.engine.tasks()
        if len(names) == 1:
            return names[0]
        raise HTTPException(
            422,
            f"There are {len(names):,} tasks; name one of GET /tasks: as task, as model, or in the "
            "path, as /tasks/NAME.",
        )

    def count(self, facts: RequestFacts, status: int, seconds: float) -> None:
        """Count a request that has been answered."""
        self._requests.labels(facts.route, str(status)).inc()
        for task, rows in facts.rows.items():
            name = self._name(task, status)
            self._seconds.labels(name).observe(seconds)
            if status == 200:
                self._rows.labels(name).inc(rows)
            if status >= 500:
                self._errors.labels(name).inc()

    def _name(self, task: str, status: int) -> str:
        """Return the name of a task in metrics; empty if it is unknown, or one of too many."""
        # With another status, the name may be any text of a client.
        is_new = task not in self._named
        if is_new and (status not in (200, 500) or len(self._named) >= _MOST_TASKS):
            return ""
        self._named.add(task)
        return task

    async def measure(self) -> bytes:
        """Return the metrics as Prometheus reads them, without those of tasks that are gone."""
        self._status = status = await self.engine.status()
        for task in self._named.difference(status.tasks, status.failed):
            for metric in (self._rows, self._errors, self._seconds):
                metric.remove_by_labels({"task": task})
            self._named.remove(task)
        metrics: bytes = generate_latest(self._registry)
        return metrics

    def collect(self) -> Iterable[Metric]:
        """Yield what the engine counts, as of the last look at it."""
        build = {"version": version("houlsby-peft"), "base_model": self._base_model}
        yield _gauge("build_info", "The version of houlsby_peft and the base model.", 1, build)
        status = self._status
        states = GaugeMetricFamily(
            "houlsby_task_up", "1 if the newest adapter of a task is served, or 0.", labels=["task"]
        )
        for task in list(dict.fromkeys([*status.failed, *status.tasks]))[:_MOST_TASKS]:
            states.add_metric([task], task not in status.failed)
        yield states
        is_read = status.list == "ok"
        most_bytes = self.options.max_bytes
        yield _gauge("tasks", "Tasks that are served.", len(status.tasks))
        yield _gauge("list_up", "1 if the folder or list of adapters can be read, or 0.", is_read)
        yield _gauge("adapters_in_memory", "Adapters in memory.", status.in_memory)
        yield _gauge("adapter_bytes", "Memory of these adapters.", status.adapter_bytes)
        yield _gauge("adapter_bytes_limit", "Memory that they may take.", most_bytes)
        yield _gauge("queued_requests", "Requests that run or wait.", status.queued)
        yield CounterMetricFamily("houlsby_batches", "Batches that have run.", status.batches)
        yield CounterMetricFamily("houlsby_batch_rows", "Rows of these batches.", status.batch_rows)


def _gauge(name: str, help: str, value: float, labels: dict[str, str] | None = None) -> Metric:
    labels = labels or {}
    metric = GaugeMetricFamily(f"houlsby_{name}", help, labels=list(labels))
    metric.add_metric(list(labels.values()), value)
    return metric


def service_of(request: Request) -> Service:
    """Return the service that a request was sent to."""
    service: Service = request.app.state.service
    return service
