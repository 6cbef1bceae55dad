"""What stands before the routes: who may ask, which bodies are read, and what is said of a request
in its headers, in the log and in the metrics.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import shortened
from .refusals import answer_error
from .service import REQUEST, RequestFacts, Service


# Bytes of a body per character of its texts: JSON may write one as two escapes of six.
_BYTES = 12
# Bytes that are received without being kept.
_MOST_DISCARDED = 100_000_000
# Seconds in which a body must arrive.
_BODY_SECONDS = 60
# Values of a body for each of its rows: a row has up to eight, and names of tasks beside.
_VALUES_OF_A_ROW = 16
# The page and what tells whether the service runs need no token.
_PUBLIC = ("/", "/health", "/health/live", "/health/ready")
# What asks for these asks every few seconds.
_PROBES = ("/health", "/health/live", "/health/ready", "/metrics")
_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Fingerprints in the header of an answer.
_MOST_ADAPTERS = 50
ACCESS_LOG = logging.getLogger("houlsby_peft.access")


@dataclass(frozen=True)
class Tokens:
    """The tokens of clients. One for managing is good for predictions as well.

    Args:
        predict: Those for predictions, and all else that changes nothing. Without any, of either
            kind, no token is needed for this.
        manage: Those for changing tasks. Without any, nobody may.
    """

    predict: tuple[str, ...] = ()
    manage: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.predict or self.manage)

    def may_manage(self, token: str) -> bool:
        """Return whether a client may change tasks."""
        return _is_among(token, self.manage)

    def may_predict(self, token: str) -> bool:
        """Return whether a client may ask for predictions."""
        return not self or _is_among(token, self.predict + self.manage)


def _is_among(token: str, tokens: tuple[str, ...]) -> bool:
    # All are compared, in the same time, so that nothing can be learned of a token by guessing.
    is_among = False
    for valid in tokens:
        is_among |= hmac.compare_digest(token.encode(), valid.encode())
    return is_among


def read_tokens(path: str | None) -> Tokens:
    """Return the tokens of a file or, without one, of the environment variable HOULSBY_TOKENS.

    Both hold YAML: a mapping from `predict` and `manage` to a token or a list of tokens.

    Raises:
        OSError: There is no such file.
        ValueError: It is not such a mapping, or a token cannot be sent in a header.
    """
    text = os.environ.get("HOULSBY_TOKENS", "")
    source = "HOULSBY_TOKENS"
    if path is not None:
        text, source = Path(path).expanduser().read_text(encoding="utf-8"), path
    try:
        tokens: dict[str, tuple[str, ...]] = {}
        for name, value in (yaml.safe_load(text) or {}).items():
            listed = [value] if isinstance(value, str) else value
            tokens[name] = tuple(map(str.strip, listed))
            for token in tokens[name]:
                if not _ID.fullmatch(token):
                    raise ValueError("a token is empty, too long or not of printable ASCII")
        if path is not None and not any(tokens.values()):
            raise ValueError("there is no token")
        return Tokens(**tokens)
    except (ValueError, TypeError, AttributeError, yaml.YAMLError):
        # Without the text, whose tokens are secret.
        raise ValueError(
            f"{source} must be YAML, as in `predict: [one, another]` and `manage: [third]`, with a "
            "token or a list of tokens for each, of at most 128 printable ASCII characters."
        ) from None


class Guard:
    """Middleware that refuses requests which no route should see, and tells of all others."""

    def __init__(self, app: ASGIApp, service: Service, tokens: Tokens) -> None:
        self._app = app
        self._service = service
        self._tokens = tokens
        options = service.options
        self._hosts = [host.lower() for host in options.hosts] or ["*"]
        self._most_bytes = max(1_000_000, _BYTES * options.max_characters)
        self._most_values = _VALUES_OF_A_ROW * options.max_rows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        facts = _facts_of(scope)
        REQUEST.set(facts)
        status = 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(MutableHeaders(scope=message), facts)
            await send(message)

        incoming = _Incoming(receive)
        # What is answered to GET is answered to HEAD, of which the server sends no body.
        inner = dict(scope)
        if scope["method"] == "HEAD":
            inner["method"] = "GET"
        try:
            self._check_host(inner)
            self._check_token(inner)
            await self._app(inner, await self._read_body(inner, incoming), send_with_headers)
        except HTTPException as error:
            await incoming.discard()
            headers = dict(error.headers or {})
            answer = answer_error(scope["path"], error.status_code, error.detail, headers=headers)
            await answer(scope, receive, send_with_headers)
        finally:
            if "route" in inner:
                facts.route = inner["route"].path.replace(":path", "")
            self._tell(scope, facts, status, time.perf_counter() - start)

    def _add_headers(self, headers: MutableHeaders, facts: RequestFacts) -> None:
        headers["x-content-type-options"] = "nosniff"
        headers["x-request-id"] = facts.id
        if facts.adapters:
            named = [f"{quote(task)}={digest}" for task, digest in facts.adapters.items()]
            headers["x-adapters"] = ", ".join(named[:_MOST_ADAPTERS])
        if self._service.is_ending:
            headers["connection"] = "close"

    def _tell(self, scope: Scope, facts: RequestFacts, status: int, seconds: float) -> None:
        """Count and log a request, unless it is a probe's."""
        if facts.route in _PROBES:
            return
        self._service.count(facts, status, seconds)
        fields: dict[str, Any] = {
            "method": scope["method"],
            "route": facts.route,
            "status": status,
            "task": shortened(",".join(list(facts.rows)[:_MOST_ADAPTERS])),  # a client's text
            "rows": sum(facts.rows.values()),
            "seconds": round(seconds, 4),
            "request_id": facts.id,
        }
        text = " ".join(f"{name}={value}" for name, value in fields.items())
        ACCESS_LOG.info(text, extra={"fields": fields})

    def _check_host(self, scope: Scope) -> None:
        """Refuse a name of another host, by which a page in a browser may have found this one."""
        if "*" in self._hosts:
            return
        names = Headers(scope=scope).getlist("host")
        name = re.sub(r":\d*$", "", names[0]).lower() if len(names) == 1 else ""
        for host in self._hosts:
            if name == host or (host.startswith("*.") and name.endswith(host[1:])):
                return
        raise HTTPException(400, "The header Host must be a name of this service; see --hosts.")

    def _check_token(self, scope: Scope) -> None:
        """Refuse a client that may not do what it asks for."""
        path, method = scope["path"], scope["method"]
        if path in _PUBLIC and method == "GET":
            return
        kind, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            token = ""
        if not self._tokens.may_predict(token):
            rule = "A token is needed: send the header Authorization: Bearer TOKEN."
            if token:
                rule = "The token is none of this service's; see --tokens of the service."
            raise HTTPException(401, rule, {"www-authenticate": "Bearer"})
        changes_tasks = method in ("PUT", "DELETE") or path == "/reload"
        if changes_tasks and not self._tokens.may_manage(token):
            raise HTTPException(
                403, "Tasks are changed with a token for managing; see --tokens of the service."
            )

    async def _read_body(self, scope: Scope, incoming: _Incoming) -> Receive:
        """Read the body of a request that has one, and return what gives it to the routes.

        It must be JSON, and of no more bytes and values than the largest request needs. The time to
        check its values would otherwise keep all other requests waiting.
        """
        if scope["method"] not in ("POST", "PUT") or scope["path"] == "/reload":
            return incoming.receive
        headers = Headers(scope=scope)
        # A page of another site may send other types without asking.
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "The body must be JSON, with Content-Type: application/json.")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException(415, "The body must not be compressed; it has a Content-Encoding.")
        body = await incoming.read(self._most_bytes)
        if body.count(b",") >= self._most_values and _count_values(body) > self._most_values:
            raise HTTPException(
                413, f"A request must have at most {self._service.options.max_rows:,} rows."
            )
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Message:
            return messages.pop() if messages else await incoming.receive()

        return receive_body


class _Incoming:
    """The body of a request, as it arrives."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_complete = False

    async def receive(self) -> Message:
        """Return the next message."""
        message: Message = await self._receive()
        self._is_complete = not message.get("more_body", False)
        return message

    async def read(self, most_bytes: int) -> bytes:
        """Return the whole body, or refuse it if it is too large or too slow."""
        parts: list[bytes] = []
        end = time.monotonic() + _BODY_SECONDS
        while not self._is_complete:
            try:
                message = await asyncio.wait_for(self.receive(), end - time.monotonic())
            except asyncio.TimeoutError:
                self._is_complete = True  # nothing is waited for any longer
                rule = f"The body must arrive in {_BODY_SECONDS} seconds."
                raise HTTPException(408, rule, {"connection": "close"}) from None
            parts.append(message.get("body", b""))
            if sum(map(len, parts)) > most_bytes:
                raise HTTPException(
                    413, f"A request must have at most {most_bytes:,} bytes. Send several."
                )
        return b"".join(parts)

    async def discard(self) -> None:
        """Receive the rest without keeping it: a client that still sends would see no answer."""
        size = 0
        while not self._is_complete and size < _MOST_DISCARDED:
            message = await self.receive()
            size += len(message.get("body", b""))


def _facts_of(scope: Scope) -> RequestFacts:
    """Return a request with the client's id, or one of its own, and the route of a probe."""
    given = Headers(scope=scope).get("x-request-id", "")
    facts = RequestFacts(given if _ID.fullmatch(given) else uuid.uuid4().hex)
    if scope["path"] in _PROBES:
        facts.route = scope["path"]
    return facts


def _count_values(body: bytes) -> int:
    """Return the number of values in lists and objects of JSON; 0 if it is none."""
    try:
        waiting = [json.loads(body)]
    except (ValueError, RecursionError):
        return 0
    count = 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            count += len(value)
            waiting += value
    return count
