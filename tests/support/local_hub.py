"""A Hugging Face Hub on a free loopback port, that real clients push to and pull from, each in a
process of its own.

with LocalHub() as hub:
    hub.add("org/base", folder)
    hub.call(client_function, "argument", home=tmp_path)
    hub.faults.append(Fault("PUT", "/lfs/", "close"))  # breaks the next upload of a large file
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import uvicorn
from starlette.requests import Request
from starlette.responses import Response

from hub_protocol import Repo, Store, application


QUIET = {
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
# A process that has imported the library, and lets a copy of itself make each call. The client
# library reads its environment when it is imported, so a copy reads it again.
CLIENTS = """
import importlib, json, os, sys, traceback
from huggingface_hub import constants, hf_api
import houlsby_peft, peft, transformers

for line in sys.stdin:
    module, function, arguments, environment = json.loads(line)
    if os.fork():
        os.wait()
        print("\\nEND", flush=True)
        continue
    os.chdir(environment["HF_HOME"])
    os.environ.clear()
    os.environ.update(environment)
    importlib.reload(constants)
    hf_api.api.endpoint = constants.ENDPOINT
    try:
        result = getattr(importlib.import_module(module), function)(*arguments)
        print("\\nRESULT " + json.dumps(result))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)
"""


@dataclass
class Fault:
    """Breaks the next `times` requests of a method to a path (a regular expression).

    `how` is the status of the answer, "close" to break the connection off in the middle of the
    answer, or "overtaken" to let someone else commit to the repository first. With `late`, the
    request is carried out first and only its answer is lost.
    """

    method: str
    path: str
    how: int | Literal["close", "overtaken"]
    times: int = 1
    late: bool = False


class LocalHub:
    """The server, in a thread of this process, with what it stores."""

    def __init__(self) -> None:
        self.store = Store()
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self._app = application(self.store)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> LocalHub:
        config = uvicorn.Config(
            self, host="127.0.0.1", port=self.port, log_level="critical", lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server could not start"
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        """Open connections are closed."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()

    def add(self, name: str, files: dict[str, bytes] | Path, private: bool = False) -> Repo:
        """Store a repository, of given files or of those in a folder, without a client."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()}
        repo = self.store.repos.setdefault(name, Repo(name, private))
        repo.commit("add", dict(files))
        return repo

    def environment(
        self, home: Path, token: str | None = "hf_write", **changes: str
    ) -> dict[str, str]:
        """The environment of a client of this hub, with its own cache, and large files by LFS."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("HF_")
        }
        paths = {"HF_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
        tokens = {"HF_TOKEN": token} if token else {}
        return {**inherited, "HF_ENDPOINT": self.url, **paths, **QUIET, **tokens, **changes}

    def call(self, function: Callable[..., Any], *arguments: Any, **environment: Any) -> Any:
        """Call a function in a new client process, whose working folder is `home`, with its own
        cache there.

        The client imports what this process can import, so the function may stand in any test file.
        Its arguments and its result travel as JSON.
        """
        Path(environment["home"]).mkdir(parents=True, exist_ok=True)
        changed = self.environment(**environment)
        clients = _clients()
        clients.stdin.write(
            json.dumps([function.__module__, function.__name__, arguments, changed]) + "\n"
        )
        clients.stdin.flush()
        printed: list[str] = []
        for line in iter(clients.stdout.readline, "END\n"):
            assert line, "".join(printed)
            printed.append(line)
        results = [line for line in printed if line.startswith("RESULT ")]
        assert results, "".join(printed)
        return json.loads(results[-1].removeprefix("RESULT "))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application: the protocol, and the faults before it."""
        request = Request(scope, receive)
        self.requests.append(f"{request.method} {request.url.path}")
        faults = [fault for fault in self.faults if fault.times and _hits(fault, request)]
        if not faults:
            await self._app(scope, receive, send)
            return
        fault = faults[0]
        fault.times -= 1
        if fault.how == "overtaken":
            name = "/".join(request.url.path.split("/")[3:5])
            self.store.repos[name].commit("someone else's", {"notes.md": b"Mind the gap."})
            await self._app(scope, receive, send)
            return
        if fault.late:
            await self._app(scope, receive, _nowhere)
        if isinstance(fault.how, int):
            await Response("broken", fault.how)(scope, receive, send)
            return
        # An answer that is shorter than announced makes uvicorn close the connection.
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]}
        )
        await send({"type": "http.response.body", "body": b"half"})


@cache
def _clients() -> subprocess.Popen[str]:
    """Start the process that makes the calls to all hubs."""
    environment = {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(sys.path)}
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    clients = subprocess.Popen([sys.executable, "-c", CLIENTS], text=True, env=environment, **piped)
    atexit.register(clients.communicate)  # it ends when nothing can come any more
    return clients


def _hits(fault: Fault, request: Request) -> bool:
    return fault.method == request.method and bool(re.search(fault.path, request.url.path))


async def _nowhere(message: object) -> None:
    """Takes the place of the client that never gets an answer."""
