"""What stands before the routes: tokens, the form and the size of bodies, and headers."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .refusals import answer_error
from .service import Service
from .tokens import Tokens


# Bytes of a body per character of its texts: JSON may write one as two escapes of six.
_BYTES = 12
# Bytes that are received without being kept. A client that still sends would not see the answer.
_MOST_DISCARDED = 100_000_000
# The page and what tells whether the service runs need no token.
_PUBLIC = ("/", "/health", "/health/live", "/health/ready")


class Guard:
    """Middleware that refuses requests which no route should see."""

    def __init__(self, app: ASGIApp, service: Service, tokens: Tokens) -> None:
        self._app = app
        self._service = service
        self._tokens = tokens
        self._most_bytes = max(1_000_000, _BYTES * service.options.max_characters)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-content-type-options"] = "nosniff"
                if self._service.is_ending:
                    headers["connection"] = "close"
            await send(message)

        try:
            self._check_token(scope)
            self._check_body(scope)
        except HTTPException as error:
            await _discard_body(receive)
            headers = dict(error.headers or {})
            answer = answer_error(scope["path"], error.status_code, error.detail, headers=headers)
            await answer(scope, receive, send_with_headers)
            return
        size = 0

        async def receive_counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._most_bytes:
                if message.get("more_body"):
                    await _discard_body(receive)
                raise HTTPException(
                    413, f"A request must have at most {self._most_bytes:,} bytes. Send several."
                )
            return message

        await self._app(scope, receive_counted, send_with_headers)

    def _check_token(self, scope: Scope) -> None:
        """Refuse a client that may not do what it asks for."""
        path, method = scope["path"], scope["method"]
        if path in _PUBLIC and method in ("GET", "HEAD"):
            return
        kind, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            token = ""
        if not self._tokens.may_predict(token):
            raise HTTPException(
                401,
                "A token is needed: send the header Authorization: Bearer TOKEN.",
                {"www-authenticate": "Bearer"},
            )
        changes_tasks = method in ("PUT", "DELETE") or path == "/reload"
        if changes_tasks and not self._tokens.may_manage(token):
            raise HTTPException(
                403, "Tasks are changed with a token for managing; see --tokens of the service."
            )

    def _check_body(self, scope: Scope) -> None:
        """Refuse a body that is no JSON or that says itself that it is too large."""
        if scope["method"] not in ("POST", "PUT") or scope["path"] == "/reload":
            return
        headers = Headers(scope=scope)
        # A page of another site may send other types without asking.
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "The body must be JSON, with Content-Type: application/json.")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException(415, "The body must not be compressed; it has a Content-Encoding.")


async def _discard_body(receive: Receive) -> None:
    size = 0
    more_body = True
    while more_body and size < _MOST_DISCARDED:
        message = await receive()
        size += len(message.get("body", b""))
        more_body = message.get("more_body", False)
