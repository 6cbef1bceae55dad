"""How errors are answered: which status each class of errors has, in the form that the clients of
each route read.
"""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ..errors import AdapterError, HubError, shortened
from ..predict.questions import EmptyInputError
from ..predict.task_bank import UnknownTaskError


# Of the wrong fields of a body, as many are named.
_MOST_FIELDS = 10


class BusyError(RuntimeError):
    """Too many requests are waiting."""


class ChangeError(ValueError):
    """Tasks cannot be changed as a request asks."""


class UnansweredError(Exception):
    """A question has no answer.

    Attributes:
        error: Why.
        row: The number of the row that asks it.
    """

    def __init__(self, error: Exception, row: int) -> None:
        super().__init__(str(error))
        self.error = error
        self.row = row


# The first class that an error is of decides.
_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (BusyError, 503),
    (EmptyInputError, 400),
    (UnknownTaskError, 404),
    (ChangeError, 422),
    (AdapterError, 500),
    (HubError, 500),
    (ValueError, 422),
)
# As text-embeddings-inference calls them.
_KINDS = {400: "empty", 424: "backend", 500: "backend", 503: "overloaded"}


def status_of(error: Exception) -> int | None:
    """Return the status of HTTP for an error that gives its reason; None for an unknown one."""
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return status
    return None


def hide_folders(text: str) -> str:
    """Return a text in which the absolute paths of this machine have lost their folders."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/]+/)+", "", text)


class Json(JSONResponse):  # type: ignore[misc]
    """JSON in UTF-8. What cannot be encoded, as half of a surrogate pair in a label, is "?"."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def answer_error(
    path: str,
    status: int,
    rule: str,
    detail: Any = None,
    headers: dict[str, str] | None = None,
) -> Json:
    """Return the answer to a request that cannot be answered.

    Clients of OpenAI's routes read `error.message`. Those of text-embeddings-inference read `error`
    and `error_type`. Our own read `detail`.
    """
    if path.startswith("/v1/") or path.endswith("/classify"):
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": rule, "type": kind, "param": None, "code": status}
        return Json({"error": error}, status, headers)
    kind = _KINDS.get(status, "validation")
    detail = detail or {"rule": rule, "row": None}
    content = {"detail": detail, "error": rule, "error_type": kind}
    return Json(content, status, headers)


async def _answer_error(request: Request, error: Exception) -> Json:
    row = None
    if isinstance(error, UnansweredError):
        row, error = error.row, error.error
    rule = hide_folders(str(error))
    status = status_of(error)
    if status is None:
        status, rule = 500, "The prediction failed; the log of the service says why."
    return answer_error(request.url.path, status, rule, {"rule": rule, "row": row})


async def _answer_http_error(request: Request, error: HTTPException) -> Json:
    headers = dict(error.headers or {})
    return answer_error(request.url.path, error.status_code, str(error.detail), headers=headers)


async def _answer_wrong_body(request: Request, error: RequestValidationError) -> Json:
    """Answer with the wrong fields. The input, which may be no valid text, is not repeated."""
    details = []
    for wrong in error.errors()[:_MOST_FIELDS]:
        place: list[str | int] = []
        for part in wrong["loc"]:
            if isinstance(part, int):
                place.append(part)
            # Of the two forms of /predict, only one is in question.
            elif part not in ("rows", "texts"):
                place.append(shortened(part))
        details.append({"loc": place, "msg": wrong["msg"], "type": wrong["type"]})
    status = 400 if details[0]["type"] == "json_invalid" else 422
    where = ".".join(map(str, details[0]["loc"]))
    rule = f"{where}: {details[0]['msg']}"
    return answer_error(request.url.path, status, rule, details)


def add_error_handlers(app: FastAPI) -> None:
    """Let an app answer its errors."""
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_wrong_body)
    for kind in (UnansweredError, AdapterError, HubError, BusyError, ChangeError):
        app.add_exception_handler(kind, _answer_error)
