"""`HttpService`: the JSON interface of a service, apart from the engine that runs it."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from ..errors import check_count, shortened
from .watched_bank import Query, Refusal


_MAX_BYTES = 1_000_000
_FIELDS = {"task", "text", "text_pair", "question", "context", "top_k"}
# The fields of a row beside `task` and `top_k`, in the order in which the model reads them.
_INPUTS = (("text",), ("text", "text_pair"), ("question", "context"))
_EXAMPLE = '{"inputs": [{"task": "reviews", "text": "Good soup."}]}'


class Overloaded(Exception):
    """More requests are waiting than the service accepts."""


class HttpService:
    """Answers `POST /predict`, `GET /health`, `GET /tasks` and `GET /metrics`.

    A request is `{"inputs": [{"task": ..., "text": ...}, ...]}`, where a row may also have `text_pair` and `top_k`, or
    `question` and `context` in place of `text`. The answer is `{"predictions": [...]}`, one per row. If anything is
    wrong with a request, the answer is `{"error": {"rule": ..., "row": ...}}` with one of these statuses: 400 if it is
    not of this form, 404 for an unknown task, 413 if it is too large, 422 if a row's input is not what its task needs,
    500 if the adapter of a task cannot be used, 503 if too many requests are waiting.

    Args:
        predict: Returns the predictions for the rows of a request, or why it is refused.
        status: Returns the service's status: `status` of `WatchedBank`, and `names` with the names of the tasks.
        max_rows: The largest number of rows in a request.
    """

    def __init__(
        self,
        predict: Callable[[list[Query]], Awaitable[list[Any] | Refusal]],
        status: Callable[[], Awaitable[dict[str, Any]]],
        max_rows: int = 32,
    ) -> None:
        self._predict = predict
        self._status = status
        self._max_rows = max_rows
        self._routes = {
            ("POST", "/predict"): self._answer,
            ("GET", "/health"): self._health,
            ("GET", "/tasks"): self._tasks,
            ("GET", "/metrics"): self._metrics,
        }
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "houlsby_requests", "Requests for predictions, by the status of HTTP.", ["status"], registry=self._registry
        )
        self._rows = Counter(
            "houlsby_predictions", "Rows that were predicted, by task.", ["task"], registry=self._registry
        )
        self._seconds = Histogram(
            "houlsby_request_seconds", "Time to answer a request for predictions.", registry=self._registry
        )

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        path = request.url.path.rstrip("/")
        route = self._routes.get((request.method, path))
        if route is None:
            methods = [method for method, known in self._routes if known == path]
            if methods:
                return _refuse(Refusal(405, f"{path} must be requested by {methods[0]}; got {request.method}."))
            paths = ", ".join(" ".join(key) for key in self._routes)
            return _refuse(Refusal(404, f"The path must be one of {paths}; got {shortened(path)}."))
        return await route(request)

    async def _answer(self, request: Request) -> Response:
        start = time.perf_counter()
        try:
            rows = _read_rows(await _read_body(request), self._max_rows)
            found = await self._predict(rows)
        except _WrongRequest as error:
            found = error.refusal
        except Overloaded:
            found = Refusal(503, "Too many requests are waiting. Try again later.")
        if isinstance(found, Refusal):
            response = _refuse(found)
        else:
            response = _json({"predictions": found})
            for query in rows:
                self._rows.labels(query.task).inc()
        self._requests.labels(str(response.status_code)).inc()
        self._seconds.observe(time.perf_counter() - start)
        return response

    async def _health(self, request: Request) -> Response:
        try:
            status = await self._status()
        except Overloaded:
            status = {"busy": True}  # and therefore alive
        return _json({"status": "ok", **{key: value for key, value in status.items() if key != "names"}})

    async def _tasks(self, request: Request) -> Response:
        try:
            return _json({"tasks": (await self._status())["names"]})
        except Overloaded:
            return _refuse(Refusal(503, "Too many requests are waiting. Try again later."))

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class _WrongRequest(Exception):
    def __init__(self, status: int, rule: str, row: int | None = None) -> None:
        self.refusal = Refusal(status, rule, row)


async def _read_body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BYTES:
            raise _WrongRequest(413, f"A request must have at most {_MAX_BYTES:,} bytes. Send several.")
    return body


def _read_rows(body: bytes, most: int) -> list[Query]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = shortened(str(error))
        raise _WrongRequest(400, f"The body must be JSON such as {_EXAMPLE}; {reason}.") from error
    inputs = content.get("inputs") if isinstance(content, dict) else None
    if not isinstance(inputs, list) or not 1 <= len(inputs) <= most or set(content) != {"inputs"}:
        got = f"{len(inputs):,} rows" if isinstance(inputs, list) and len(inputs) > most else repr(content)
        raise _WrongRequest(
            400, f"The body must have inputs, a list of 1 to {most:,} rows, such as {_EXAMPLE}; got {shortened(got)}."
        )
    return [_read_row(number, row) for number, row in enumerate(inputs)]


def _read_row(number: int, row: Any) -> Query:
    rule = "A row must have task and either text, text and text_pair, or question and context, and may have top_k"
    if not isinstance(row, dict) or not isinstance(row.get("task"), str) or not set(row) <= _FIELDS:
        raise _WrongRequest(400, f"{rule}; got {shortened(repr(row))}.", number)
    given = set(row) - {"task", "top_k"}
    fields = next((names for names in _INPUTS if set(names) == given), None)
    if fields is None or not all(isinstance(row[name], str) for name in fields):
        raise _WrongRequest(400, f"{rule}, and they must be text; got {shortened(repr(row))}.", number)
    texts = [row[name] for name in fields]
    top_k = row.get("top_k")
    try:
        "".join(texts).encode()
        if top_k is not None:
            check_count("top_k", top_k)
    except UnicodeEncodeError as error:
        raise _WrongRequest(400, "A text must be valid UTF-8; got half of a surrogate pair.", number) from error
    except ValueError as error:
        raise _WrongRequest(400, str(error), number) from error
    return Query(row["task"], texts[0] if len(texts) == 1 else (texts[0], texts[1]), top_k)


def _refuse(refusal: Refusal) -> Response:
    error = {"rule": refusal.rule} | ({} if refusal.row is None else {"row": refusal.row})
    return _json({"error": error}, refusal.status)


def _json(content: Any, status: int = 200) -> Response:
    # Scores of tags are NumPy's.
    body = json.dumps(content, ensure_ascii=False, default=float).encode("utf-8", "replace")
    headers = {"retry-after": "1"} if status == 503 else None
    return Response(body, status, headers, "application/json")


def count_rows(requests: Sequence[Sequence[Query]]) -> int:
    """Return the number of rows in requests."""
    return sum(map(len, requests))
