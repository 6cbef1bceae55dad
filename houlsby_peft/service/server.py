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
from dataclasses import replace
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

from ..predict.adapter_list import read_adapters
from .app import make_app
from .engine import BankEngine, Engine
from .options import ServiceOptions
from .tokens import read_tokens


# Seconds after the signal to end in which clients are told to close their connections.
_LAST_CONNECTIONS = 0.5
# Seconds for those to send a request that have just connected.
_FIRST_BYTES = 1.0
# Seconds that running requests may take after the signal to end.
_LAST_REQUESTS = 30
# Seconds after which an idle connection is closed: more than proxies keep theirs, which would
# otherwise send requests into closing ones.
_IDLE = 75


def run(
    options: ServiceOptions,
    host: str,
    port: int,
    *,
    on_ray: bool = False,
    is_open: bool = False,
    log: str = "text",
    access_log: bool = False,
) -> None:
    """Run the service until the process is interrupted or terminated.

    Args:
        options: The options of the service. `hosts` is chosen by the host.
        host, port: The address to listen on. Port 0 is a free one.
        on_ray: Whether replicas in processes of their own predict.
        is_open: Whether other machines may ask without a token.
        log: "text" or "json", one object per line.
        access_log: Whether each request is logged.

    Raises:
        AdapterError, OSError: The adapters cannot be read, or the port is taken.
        ValueError: The address needs tokens, or there are fewer GPUs.
    """
    if options.gpus > torch.cuda.device_count():  # Ray would wait for them forever
        raise ValueError(
            f"gpus must be at most {torch.cuda.device_count()}, the GPUs that PyTorch finds here; "
            f"got {options.gpus:g}."
        )
    tokens = read_tokens(options.tokens)
    is_local = _is_loopback(host)
    if not (tokens or is_local or is_open):
        raise ValueError(
            f"{host} can be reached from other machines. Give clients tokens with --tokens or "
            "HOULSBY_TOKENS, or let anybody ask with --open."
        )
    count = len(read_adapters(options.adapters))
    with listen(host, port) as listener:
        _set_up_logs(log, access_log)
        # A page in a browser on this machine may find a name of its own for this address, but not
        # send another one.
        if is_local:
            options = replace(options, hosts=["127.0.0.1", "localhost", "[::1]"])
        engine = start_engine(options, on_ray)
        server = Server(make_app(engine, options, tokens), access_log)
        print(_greet(count, host, listener.getsockname()[1]), flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            # uvicorn sends itself the signal again at its end.
            signal.signal(number, lambda *_: None)
        try:
            server.run([listener])
        finally:
            if on_ray:
                from .local_ray import stop

                stop()


def _greet(count: int, host: str, port: int) -> str:
    tasks = "1 task" if count == 1 else f"{count} tasks"
    if ":" in host:
        host = f"[{host}]"
    return f"{tasks} on http://{host}:{port}/predict. Stop with Ctrl+C."


def start_engine(options: ServiceOptions, on_ray: bool) -> Engine:
    """Return an engine that is ready, in this process or on a Ray of its own."""
    if not on_ray:
        return BankEngine(options)
    from .local_ray import start

    return start(options)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Those who connect wait until the service is ready.

    Raises:
        OSError: The address is not one of this machine, or the port is taken.
        ValueError: There is no such port.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535; got {port}.")
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


class Server(uvicorn.Server):
    """uvicorn, which drops no connection when it ends."""

    def __init__(self, app: FastAPI, access_log: bool = False) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=access_log,
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
        """Return a record as a line of JSON."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _set_up_logs(form: str, access_log: bool) -> None:
    """Log changes of tasks, failures and, if asked for, requests to stderr."""
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(_JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    levels = {"houlsby_peft": logging.INFO, "uvicorn.error": logging.WARNING}
    levels["uvicorn.access"] = logging.INFO if access_log else logging.WARNING
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.addHandler(handler)
        logger.propagate = False
