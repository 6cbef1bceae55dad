"""`Service`: what the routes of the app share. It checks limits, asks the engine and counts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .engine import Engine, Query, Refusal, Status, TaskFacts
from .options import ServiceOptions
from .schedule import Prediction


T = TypeVar("T")


class RefusedError(Exception):
    """A request that cannot be answered, with the number of the row that is why."""

    def __init__(self, refusal: Refusal, row: int | None = None) -> None:
        super().__init__(refusal.rule)
        self.refusal = refusal
        self.row = row


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
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "houlsby_requests",
            "Requests for predictions, by the status of HTTP.",
            ["status"],
            registry=registry,
        )
        self._rows = Counter(
            "houlsby_predictions", "Rows that were predicted, by task.", ["task"], registry=registry
        )
        self._seconds = Histogram(
            "houlsby_request_seconds",
            "Time to answer a request for predictions.",
            registry=registry,
        )
        self._tasks = Gauge("houlsby_tasks", "Tasks that are served.", registry=registry)
        self._failed = Gauge(
            "houlsby_failed_tasks", "Tasks whose adapter cannot be loaded.", registry=registry
        )
        self._counted: set[str] = set()

    async def predict(self, queries: Sequence[Query]) -> list[Prediction]:
        """Answer each query. The first one that cannot be answered is a `RefusedError`."""
        start = time.perf_counter()
        status = 500
        try:
            predictions = await self._predict(queries)
            status = 200
            return predictions
        except RefusedError as error:
            status = error.refusal.status
            raise
        finally:
            self._requests.labels(str(status)).inc()
            self._seconds.observe(time.perf_counter() - start)

    async def _predict(self, queries: Sequence[Query]) -> list[Prediction]:
        self._check_limits(queries)
        answers = accept(await self.engine.predict(queries))
        predictions = []
        for number, answer in enumerate(answers):
            predictions.append(accept(answer, number))
        for query in queries:
            self._rows.labels(query.task).inc()
            self._counted.add(query.task)
        return predictions

    def _check_limits(self, queries: Sequence[Query]) -> None:
        most = self.options.max_rows
        if len(queries) > most:
            raise RefusedError(
                Refusal(
                    413,
                    f"A request must have at most {most:,} rows, counted once per task; got "
                    f"{len(queries):,}. Send several requests.",
                )
            )
        most = self.options.max_characters
        # A text that several tasks read is there once.
        inputs = {id(query.input): query.input for query in queries}
        characters = 0
        for text in inputs.values():
            characters += len(text) if isinstance(text, str) else sum(map(len, text))
        if characters > most:
            raise RefusedError(
                Refusal(
                    413,
                    f"The texts of a request must have at most {most:,} characters; got "
                    f"{characters:,}. Send several requests, or parts of a long text.",
                )
            )

    async def status(self) -> Status:
        """Return what is served."""
        return accept(await self.engine.status())

    async def facts(self, task: str) -> TaskFacts:
        """Return what is known of a task."""
        return accept(await self.engine.facts(task))

    async def choose_task(self, name: str | None) -> str:
        """Return the task that a request names; without a name, the only one."""
        if name is not None:
            return name
        names = (await self.status()).tasks
        if len(names) == 1:
            return names[0]
        raise RefusedError(
            Refusal(
                422,
                f"There are {len(names):,} tasks. Name one in the path, as /tasks/{names[0]}, or "
                'as "model".',
            )
        )

    async def measure(self) -> bytes:
        """Return the metrics as Prometheus reads them, without those of tasks that are gone."""
        answer = await self.engine.status()
        if isinstance(answer, Status):
            self._tasks.set(len(answer.tasks))
            self._failed.set(len(answer.failed))
            for task in self._counted.difference(answer.tasks):
                self._rows.remove(task)
                self._counted.remove(task)
        metrics: bytes = generate_latest(self._registry)
        return metrics


def accept(answer: T | Refusal, row: int | None = None) -> T:
    """Return an answer of the engine; its refusal is an error."""
    if isinstance(answer, Refusal):
        raise RefusedError(answer, row)
    return answer


def service_of(request: Request) -> Service:
    """Return the service that a request was sent to."""
    service: Service = request.app.state.service
    return service
