"""The engine on Ray Serve: replicas of `BankEngine`, on one machine or on a cluster.

On one machine, the app runs outside of Ray and calls the replicas. On a cluster, `build` makes the
application for `serve deploy`, in which Ray runs the app as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import yaml
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from ..predict.adapter_list import read_adapters
from ..predict.held_adapters import TaskSource
from .app import make_app
from .engine import BankEngine, Query, Refusal, Status, TaskFacts
from .options import ServiceOptions
from .schedule import Prediction
from .tokens import read_tokens


NAME = "houlsby"
LOGGING = {"enable_access_log": False, "log_level": "WARNING"}
# Seconds before a request is repeated whose replica was lost.
_PAUSES = (0.0, 0.5, 1.0)
# Requests that the app may be about to refuse.
_MOST_REFUSED = 1000


class RayEngine:
    """Calls replicas. A request to a lost one is repeated.

    Args:
        replicas: Ray's handle of a deployment of `BankEngine`.
    """

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    async def predict(self, queries: Sequence[Query]) -> list[Prediction | Refusal] | Refusal:
        """Answer each question, or refuse all of them because too many are waiting."""
        return await self._call("predict", queries)  # type: ignore[no-any-return]

    async def status(self) -> Status | Refusal:
        """Return what a replica serves."""
        return await self._call("status")  # type: ignore[no-any-return]

    async def facts(self, task: str) -> TaskFacts | Refusal:
        """Return what is known of a task."""
        return await self._call("facts", task)  # type: ignore[no-any-return]

    async def change(self, task: str, source: TaskSource | None) -> Refusal | None:
        """Change the list of adapters. The other replicas see it when they look at it next."""
        return await self._call("change", task, source)  # type: ignore[no-any-return]

    async def refresh(self) -> Status | Refusal:
        """Let a replica look at the adapters now."""
        return await self._call("refresh")  # type: ignore[no-any-return]

    async def _call(self, method: str, *args: Any) -> Any:
        remote = getattr(self._replicas, method).remote
        try:
            for pause in _PAUSES:
                with suppress(RayActorError):
                    return await remote(*args)
                await asyncio.sleep(pause)
            return await remote(*args)
        except BackPressureError:
            return Refusal(503, "Too many requests are waiting. Try again later.")


def deploy_replicas(options: ServiceOptions) -> serve.Application:
    """Return the deployment of the replicas."""
    replicas = serve.deployment(
        BankEngine,
        name="Replicas",
        # While a batch is predicted, the next one is gathered.
        max_ongoing_requests=2 * options.batch_size,
        max_queued_requests=options.max_queued,
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.batch_size,
        },
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        logging_config=LOGGING,
    )
    return replicas.bind(options)


def build(args: Mapping[str, Any]) -> serve.Application:
    """Return the application for a cluster; `args` are the fields of `ServiceOptions`."""
    options = ServiceOptions(**args)
    read_adapters(options.adapters)  # refused here, before replicas start and fail

    class App:
        """The app, with the handle of its replicas."""

        def __init__(self, replicas: Any) -> None:
            self._engine = RayEngine(replicas)

        def __serve_build_asgi_app__(self) -> FastAPI:
            return make_app(self._engine, options, read_tokens(options.tokens))

    ongoing = 2 * options.batch_size * options.max_replicas
    app = serve.deployment(
        serve.ingress()(App),
        name="App",
        # The app itself refuses requests beyond those that replicas run and may queue, with the
        # rule. Only beyond these further ones does Ray's proxy refuse them, as plain text.
        max_ongoing_requests=ongoing + options.max_queued + _MOST_REFUSED,
        max_queued_requests=options.max_queued + _MOST_REFUSED,
        ray_actor_options={"num_cpus": 0},
        logging_config=LOGGING,
    )
    return app.bind(deploy_replicas(options))


def deployment_file(options: ServiceOptions, host: str, port: int) -> str:
    """Return the service's deployment file for `serve deploy` and `serve run`, as YAML."""
    content = {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": port, "request_timeout_s": 120},
        "logging_config": LOGGING,
        "applications": [
            {
                "name": NAME,
                "route_prefix": "/",
                "import_path": f"{__name__}:build",
                "args": asdict(options),
            },
        ],
    }
    text: str = yaml.safe_dump(content, sort_keys=False)
    return text
