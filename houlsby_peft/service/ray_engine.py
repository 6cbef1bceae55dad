"""The engine on Ray Serve: replicas of `BankEngine`, on one machine or on a cluster.

On one machine, the app runs outside of Ray and calls the replicas. On a cluster, `build` makes the
application for `serve deploy`, in which Ray runs the app as well.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import yaml
from fastapi import FastAPI

from houlsby_peft_serve import ServiceOptions

from ..errors import shortened
from ..predict.adapter_list import read_adapters
from ..predict.held_adapters import TaskSource
from ..predict.questions import Question, TaskFacts
from .app import make_app
from .engine import BankEngine, Engine, Status
from .guards import read_tokens
from .refusals import BusyError


# Ray reads these when it is imported. With a token, its processes refuse whoever does not know it:
# they listen on all addresses of the machine, and would run any code for anyone. On a cluster, Ray
# is there before this module, and its own options hold.
if "ray" not in sys.modules and not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & set(os.environ):
    os.environ.update(
        {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray announces a change of its own
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # Without this, metrics are offered without the token.
            "RAY_enable_metrics_collection": "0",
            # Its processes are then at 127.0.0.1, where Ray's other exporters of metrics listen.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
    )
import ray
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError


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

    async def predict(self, questions: Sequence[Question]) -> list[Question]:
        """Return questions with their results or errors. Too many that wait are a `BusyError`."""
        return await self._call("predict", questions)  # type: ignore[no-any-return]

    async def tasks(self) -> tuple[str, ...]:
        """Return the names of the tasks of a replica."""
        return await self._call("tasks")  # type: ignore[no-any-return]

    async def status(self) -> Status:
        """Return what a replica serves."""
        return await self._call("status")  # type: ignore[no-any-return]

    async def facts(self, task: str) -> TaskFacts:
        """Return what is known of a task."""
        return await self._call("facts", task)  # type: ignore[no-any-return]

    async def change(self, task: str, source: TaskSource | None) -> None:
        """Change the list of adapters. The other replicas see it when they look at it next."""
        await self._call("change", task, source)

    async def refresh(self) -> Status:
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
            raise BusyError("Too many requests are waiting. Try again later.") from None
        except RayTaskError as error:  # whose text is a traceback
            raise error.cause from None


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
        ray_actor_options={"num_cpus": options.cores, "num_gpus": options.gpus},
        logging_config=LOGGING,
    )
    return replicas.bind(options)


def start(options: ServiceOptions) -> Engine:
    """Start replicas on this machine; return what calls them, when they are ready."""
    try:
        quiet = {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
        # Ray may count fewer cores, as in a container; it would wait for the others forever.
        cores = max(os.cpu_count() or 1, options.cores * options.min_replicas)
        ray.init(address="local", num_cpus=cores, **quiet)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled", logging_config=LOGGING)
        replicas = serve.run(
            deploy_replicas(options), name=NAME, route_prefix=None, logging_config=LOGGING
        )
        return RayEngine(replicas)
    except (RuntimeError, RayError) as error:
        raise OSError(f"Ray cannot start the service: {shortened(str(error))}") from error


def stop() -> None:
    """Stop the replicas and their Ray."""
    # Its threads see the end of Ray as an error.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    # Ray Serve's own shutdown takes up to 25 seconds. Nothing of it is left after Ray's.
    ray.shutdown()


def build(args: Mapping[str, Any]) -> serve.Application:
    """Return the application for a cluster; `args` are the fields of `ServiceOptions`."""
    options = ServiceOptions(**{**args, "ray": True})
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


def deployment_file(options: ServiceOptions) -> str:
    """Return the service's deployment file for `serve deploy` and `serve run`, as YAML.

    Ray has its own options for the address, the log and the machines.
    """
    options = replace(options, ray=True)
    args = asdict(options)
    for name in ("host", "port", "ray", "replicas", "open", "log", "access_log"):
        del args[name]
    args |= {"cpus": options.cores, "replicas": options.max_replicas, "hosts": list(options.hosts)}
    content = {
        "proxy_location": "EveryNode",
        "http_options": {"host": options.host, "port": options.port, "request_timeout_s": 120},
        "logging_config": LOGGING,
        "applications": [
            {
                "name": NAME,
                "route_prefix": "/",
                "import_path": f"{__name__}:build",
                "args": args,
            },
        ],
    }
    text: str = yaml.safe_dump(content, sort_keys=False)
    return text
