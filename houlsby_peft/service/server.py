"""Run the service on this machine: what `houlsby-peft serve` does.

The app runs in this process, on uvicorn. So does the engine, unless there are to be several
replicas, which Ray runs.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import select
import signal
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from houlsby_peft_serve import ServiceOptions

from ..predict.adapter_list import read_adapters
from .app import make_app
from .engine import BankEngine, Engine
from .guards import ACCESS_LOG, read_tokens


# Seconds after the signal to end in which clients are told to close their connections.
_LAST_CONNECTIONS = 0.5
# Seconds for those to send a request that have just connected.
_FIRST_BYTES = 1.0
# Files and connections that are open at once, if the system allows so many.
_MOST_FILES = 65_536
_LOG = logging.getLogger(__name__)
# Seconds in which a new connection must send a request.
_REQUEST_SECONDS = 20
# Seconds that running requests may take after the signal to end.
_LAST_REQUESTS = 30
# Seconds after which an idle connection is closed: more than proxies keep theirs, which would
# otherwise send requests into closing ones.
_IDLE = 75


def run(options: ServiceOptions) -> None:
    """Run the service until the process is interrupted or terminated.

    Raises:
        AdapterError, OSError: The adapters cannot be read, or the port is taken.
        ValueError: The address needs tokens, or there are fewer GPUs.
    """
    if options.gpus > torch.cuda.device_count():  # Ray would wait for them forever
        raise ValueError(
            f"--gpus must be at most {torch.cuda.device_count()}, the GPUs that PyTorch finds "
            f"here; got {options.gpus:g}."
        )
    tokens = read_tokens(options.tokens)
    is_local = _is_loopback(options.host)
    if not (tokens or is_local or options.open):
        raise ValueError(
            f"{options.host} can be reached from other machines. Give clients tokens with --tokens "
            "or HOULSBY_TOKENS, or let anybody ask with --open."
        )
    read_adapters(options.adapters)  # what is wrong with them ends it here
    with listen(options.host, options.port) as listener:
        _set_up_logs(options)
        if options.tokens and Path(options.tokens).expanduser().stat().st_mode & 0o004:
            _LOG.warning("All users of this machine can read the tokens; chmod 600 mends it.")
        # A page in a browser on this machine may find a name of its own for this address, but not
        # send another one.
        if is_local and not options.hosts:
            options = replace(options, hosts=("127.0.0.1", "localhost", "[::1]"))
        _allow_many_connections()
        engine = _start_engine(options)
        server = Server(make_app(engine, options, tokens))
        _greet(options, len(asyncio.run(engine.tasks())), listener.getsockname()[1])
        for number in (signal.SIGINT, signal.SIGTERM):
            # uvicorn sends itself the signal again at its end.
            signal.signal(number, lambda *_: None)
        try:
            server.run([listener])
        finally:
            if options.is_on_ray:
                from .ray_engine import stop

                stop()


def _greet(options: ServiceOptions, count: int, port: int) -> None:
    """Tell the address, on standard output or as a line of the log."""
    tasks = "1 task" if count == 1 else f"{count} tasks"
    host = f"[{options.host}]" if ":" in options.host else options.host
    line = f"{tasks} on http://{host}:{port}/predict. Stop with Ctrl+C."
    if options.log == "json":
        logging.getLogger("houlsby_peft").info(line)
    else:
        print(line, flush=True)


def _allow_many_connections() -> None:
    """Raise the number of open files as far as this process may, as each connection is one."""
    try:
        import resource
    except ImportError:  # on Windows, where there is no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _MOST_FILES if most == resource.RLIM_INFINITY else min(most, _MOST_FILES)
    with suppress(ValueError, OSError):  # some systems have less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))


def _start_engine(options: ServiceOptions) -> Engine:
    """Return an engine that is ready, in this process or on a Ray of its own."""
    if not options.is_on_ray:
        return BankEngine(options)
    from .ray_engine import start

    return start(options)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Those who connect wait until the service is ready.

    Raises:
        OSError: The address is not one of this machine, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(
            f"The service cannot listen on port {port} of {host}: {error.strerror or error}. "
            "Choose another --port, or --host."
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Connection(H11Protocol):
    """A connection that is closed if it is silent when a request should arrive.

    h11 limits the bytes before a body, and refuses two Host headers.
    """

    _timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(_REQUEST_SECONDS, self._close_if_silent)

    def connection_lost(self, error: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(error)
        self._timer.cancel()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._timer.cancel()
        self._timer = self.loop.call_later(_IDLE, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn, which drops no connection when it ends."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_LAST_REQUESTS,
                timeout_keep_alive=_IDLE,
            )
        )
        self._service = app.state.service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer those who are connected, then stop listening, then end."""
        self._service.is_ending = True
        await asyncio.sleep(_LAST_CONNECTIONS)
        for listener in sockets or []:
            # No one else gets in line, and those who have are let in.
            listener.listen(0)
            while select.select([listener], [], [], 0)[0]:
                await asyncio.sleep(0.001)
        for server in self.servers:
            server.close()
        # uvicorn would close the connections on which no request has begun.
        for _ in range(int(_FIRST_BYTES / 0.05)):
            if not self.server_state.connections:
                break
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line of JSON, which has each fact of a request by its name."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _set_up_logs(options: ServiceOptions) -> None:
    """Log changes of tasks, failures and, if asked for, requests to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if options.log == "json":
        handler.setFormatter(_JsonLines())
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    transformers.utils.logging.disable_default_handler()
    transformers.utils.logging.enable_propagation()
    logging.getLogger("houlsby_peft").setLevel(logging.INFO)
    ACCESS_LOG.setLevel(logging.INFO if options.access_log else logging.WARNING)
