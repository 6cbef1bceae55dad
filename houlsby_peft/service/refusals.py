"""How errors are answered: in the form that the clients of each route read."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ..errors import shortened
from .service import RefusedError


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
    if path.startswith(("/v1/", "/classify")):
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": rule, "type": kind, "param": None, "code": status}
        return Json({"error": error}, status, headers)
    kind = "validation"
    if status >= 500:
        kind = "backend"
    if status == 503:
        kind = "overloaded"
    content = {"detail": detail or rule, "error": rule, "error_type": kind}
    return Json(content, status, headers)


async def _answer_refusal(request: Request, error: RefusedError) -> Json:
    refusal = error.refusal
    detail = {"rule": refusal.rule, "row": error.row}
    return answer_error(request.url.path, refusal.status, refusal.rule, detail)


async def _answer_http_error(request: Request, error: HTTPException) -> Json:
    headers = dict(error.headers or {})
    return answer_error(request.url.path, error.status_code, str(error.detail), headers=headers)


async def _answer_wrong_body(request: Request, error: RequestValidationError) -> Json:
    """Answer with the wrong fields. The input, which may be no valid text, is not repeated."""
    details = []
    status = 422
    for wrong in error.errors():
        place: list[str | int] = []
        for part in wrong["loc"]:
            if isinstance(part, int):
                place.append(part)
            # Of the two forms of /predict, only one is in question.
            elif part not in ("rows", "texts"):
                place.append(shortened(part))
        details.append({"loc": place, "msg": wrong["msg"], "type": wrong["type"]})
        if wrong["type"] == "json_invalid":
            status = 400
    where = ".".join(map(str, details[0]["loc"]))
    rule = f"{where}: {details[0]['msg']}"
    return answer_error(request.url.path, status, rule, details)


def add_error_handlers(app: FastAPI) -> None:
    """Let an app answer its errors."""
    app.add_exception_handler(RefusedError, _answer_refusal)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_wrong_body)
