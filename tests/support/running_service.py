"""A service on a free loopback port: in a thread of this process, or as the command runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import houlsby_peft


class Client:
    """Sends requests to a service."""

    url: str

    def ask(
        self,
        path: str,
        body: bytes | None = None,
        kind: str | None = "application/json",
        method: str | None = None,
        **headers: str,
    ) -> tuple[int, Any]:
        """Send a request; return the status, and the JSON or the text of the answer."""
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if kind is not None:
            headers["content-type"] = kind
        request = urllib.request.Request(f"{self.url}{path}", body, headers, method=method)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                request, timeout=120
            ) as response:
                status, content = response.status, response.read().decode()
                self.headers = response.headers
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read().decode()
            self.headers = error.headers
        return status, json.loads(content) if content.startswith(("{", "[")) else content

    def post(self, path: str, content: object, **headers: str) -> tuple[int, Any]:
        """Send JSON."""
        return self.ask(path, json.dumps(content).encode(), **headers)

    def predict(self, *rows: object) -> tuple[int, Any]:
        """Send rows in the service's own form."""
        return self.post("/predict", {"inputs": rows})


class ServiceInThread(Client):
    """A service in a thread, with the options of `ServiceOptions`."""

    def __init__(self, adapters: Path, tokens: Any = None, **options: Any) -> None:
        from houlsby_peft.service.app import make_app
        from houlsby_peft.service.engine import BankEngine
        from houlsby_peft.service.guards import Tokens
        from houlsby_peft.service.server import Server, listen
        from houlsby_peft_serve import ServiceOptions

        self.adapters = adapters
        self.options = ServiceOptions(str(adapters), **{"watch": 0, **options})
        self.engine = BankEngine(self.options)
        self.app = make_app(self.engine, self.options, tokens or Tokens())
        self._server = Server(self.app)
        listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, args=([listener],))
        self._thread.start()

    def stop(self) -> None:
        """End it, as the signal does."""
        self._server.should_exit = True
        self._thread.join(60)


class ServiceProcess(Client):
    """A service in a process of its own, which finds no Ray unless it is asked for."""

    def __init__(self, adapters: Path, log: Path, *flags: str) -> None:
        root = str(Path(houlsby_peft.__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.adapters = adapters
        self.log = log
        program = "import sys, houlsby_peft_cli; houlsby_peft_cli.main(sys.argv[1:])"
        if "--ray" not in flags:
            program = f"import sys; sys.modules['ray'] = None; {program}"
        command = [sys.executable, "-c", program, "serve", "--adapters", str(adapters)]
        command += ["--cpus", "1", "--port", "0", *flags]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": path}
            )
        end = time.time() + 500
        while " on http://" not in log.read_text():
            assert self.process.poll() is None, log.read_text()
            assert time.time() < end, log.read_text()
            time.sleep(0.1)
        address = log.read_text().partition(" on ")[2]
        self.url = address.partition("/predict")[0]
        self.port = int(self.url.rpartition(":")[2])

    def __enter__(self) -> ServiceProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """End it, if a test has failed before it did."""
        self.process.terminate()
        self.process.wait(60)
