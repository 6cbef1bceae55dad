"""The service on Ray Serve: replicas of a `WatchedBank` behind an HTTP interface.

`build` makes the application, on one machine (`houlsby-peft serve`) and on a cluster (`serve deploy`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import yaml
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from starlette.responses import Response

from ..errors import check_bytes, check_count
from .adapter_list import read_adapters
from .http import HttpService, Overloaded, count_rows
from .watched_bank import Query, Refusal, WatchedBank


NAME = "houlsby"
_LOG = logging.getLogger(__name__)
LOGGING = {"enable_access_log": False, "log_level": "WARNING"}
# Of requests whose replica was lost, before and after the first pause.
_ATTEMPTS = 4
_PAUSE = 0.5
# Requests that the ingress may be about to refuse.
_MOST_REFUSED = 1000


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a service: the arguments of `build`, under `args` in a deployment file.

    Args:
        adapters: See `read_adapters`. On a cluster, a path that all nodes can read.
        base_model: The base model, or its folder, in place of the one that the adapters name.
        batch_size: Rows that a replica predicts at once, and the most rows of a request.
        batch_wait: Seconds to wait for further requests before a batch that is not full is predicted.
        max_bytes: Memory for adapters in each replica, in bytes (see `TaskBank`).
        watch: Seconds between two looks at the folder or list of adapters. 0: it is read once.
        min_replicas, max_replicas: Limits of the number of replicas, which depends on the load.
        cpus: CPU cores, and threads, of a replica.
        gpus: GPUs of a replica: 0, 1 or a part of one.
        max_queued: Requests that may wait for a replica. Further ones get the status 503.
    """

    adapters: str
    base_model: str | None = None
    batch_size: int = 32
    batch_wait: float = 0.005
    max_bytes: float = 2e9
    watch: float = 5.0
    min_replicas: int = 1
    max_replicas: int = 1
    cpus: int = 1
    gpus: float = 0
    max_queued: int = 512

    def __post_init__(self) -> None:
        for name in ("batch_size", "min_replicas", "cpus", "max_queued"):
            check_count(name, getattr(self, name))
        check_count("max_replicas", self.max_replicas, least=self.min_replicas)
        check_bytes("max_bytes", self.max_bytes)
        for name in ("batch_wait", "watch", "gpus"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
                raise ValueError(f"{name} must be a number of at least 0; got {value!r}.")


class BankReplica:
    """A replica: a `WatchedBank` whose batches are gathered from the requests of all clients.

    Args:
        options: The service's options.
    """

    def __init__(self, options: ServiceOptions) -> None:
        torch.set_num_threads(options.cpus)
        self._bank = WatchedBank(
            options.adapters,
            options.batch_size,
            base_model=options.base_model,
            max_bytes=options.max_bytes,
            device="cuda" if options.gpus else None,
        )
        self.predict.set_max_batch_size(options.batch_size)
        self.predict.set_batch_wait_timeout_s(options.batch_wait)
        if options.watch:
            threading.Thread(target=self._watch, args=(options.watch,), daemon=True).start()

    @serve.batch(max_batch_size=32, batch_size_fn=count_rows)  # type: ignore[untyped-decorator]
    async def predict(self, requests: list[list[Query]]) -> list[list[Any] | Refusal]:
        """Predict the rows of several requests together."""
        # In a thread, so that requests for the next batch are received meanwhile.
        return await asyncio.to_thread(self._bank.answer, requests)

    async def status(self) -> dict[str, Any]:
        """Return the status of the bank, and the names of its tasks."""
        return await asyncio.to_thread(lambda: {**self._bank.status(), "names": list(self._bank.tasks)})

    def _watch(self, seconds: float) -> None:
        pause = threading.Event()
        while not pause.wait(seconds):
            try:
                self._bank.refresh()
            except Exception:  # a folder may change while it is read; it is read again after the pause
                _LOG.warning("The adapters could not be read.", exc_info=True)


class Ingress:
    """The HTTP interface. It repeats requests whose replica was lost; predictions change nothing.

    Args:
        replicas: The handle of the replicas.
        options: The service's options.
    """

    def __init__(self, replicas: Any, options: ServiceOptions) -> None:
        self._replicas = replicas
        self._http = HttpService(self._predict, self._status, options.batch_size)

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        return await self._http(request)

    async def _predict(self, rows: list[Query]) -> Any:
        return await self._call("predict", rows)

    async def _status(self) -> Any:
        return await self._call("status")

    async def _call(self, method: str, *args: Any) -> Any:
        for attempt in range(_ATTEMPTS):
            try:
                return await getattr(self._replicas, method).remote(*args)
            except BackPressureError as error:
                raise Overloaded from error
            except RayActorError:
                if attempt == _ATTEMPTS - 1:
                    raise
                await asyncio.sleep(_PAUSE * attempt)
        raise AssertionError("unreachable")


def build(args: Mapping[str, Any]) -> serve.Application:
    """Return the application for Ray Serve.

    Args:
        args: The fields of `ServiceOptions`.

    Raises:
        AdapterError: The folder or list of adapters is not valid, or has no adapter.
        ValueError: An option is unknown or breaks its rule.
    """
    names = [field.name for field in fields(ServiceOptions)]
    if unknown := sorted(set(args) - set(names)):
        raise ValueError(f"The options of a service are {', '.join(names)}; got {', '.join(unknown)}.")
    if "adapters" not in args:
        raise ValueError("A service needs the option adapters: a folder of adapters, or a JSON or YAML list.")
    options = ServiceOptions(**args)
    read_adapters(options.adapters)  # refused here, before replicas start and fail
    # While a batch is predicted, the next one is gathered.
    ongoing = 2 * options.batch_size
    replicas = serve.deployment(
        BankReplica,
        max_ongoing_requests=ongoing,
        max_queued_requests=options.max_queued,
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.batch_size,
        },
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        logging_config=LOGGING,
    )
    ingress = serve.deployment(
        Ingress,
        # The ingress itself refuses requests beyond those that replicas run and may queue, with the rule. Only beyond
        # these further ones does Ray's proxy refuse them, as plain text.
        max_ongoing_requests=ongoing * options.max_replicas + options.max_queued + _MOST_REFUSED,
        max_queued_requests=options.max_queued + _MOST_REFUSED,
        ray_actor_options={"num_cpus": 0},
        logging_config=LOGGING,
    )
    return ingress.bind(replicas.bind(options), options)


def http_options(host: str, port: int) -> dict[str, Any]:
    """Return the options of Ray Serve's HTTP proxy."""
    return {"host": host, "port": port, "request_timeout_s": 120}


def deployment_file(options: ServiceOptions, host: str, port: int) -> str:
    """Return the service's deployment file for `serve deploy` and `serve run`, as YAML."""
    content = {
        "proxy_location": "EveryNode",
        "http_options": http_options(host, port),
        "logging_config": LOGGING,
        "applications": [
            {
                "name": NAME,
                "route_prefix": "/",
                "import_path": f"{__name__}:build",
                "args": asdict(options),
            }
        ],
    }
    text: str = yaml.safe_dump(content, sort_keys=False)
    return text
