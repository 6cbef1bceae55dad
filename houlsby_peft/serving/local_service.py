"""Run the service on this machine, in a Ray of its own: what `houlsby-peft serve` does."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
from typing import Any

import torch

from ..errors import shortened
from .adapter_list import read_adapters


# Ray reads these when it is imported. With a token, its processes refuse whoever does not know it:
# they listen on all addresses of the machine, and would run any code for anyone.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray announces a change of its own
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_enable_metrics_collection": "0",  # which would listen on further ports
    # On a busy machine, its processes need more than 5 to start.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
# Seconds that running requests may take after the signal to end.
_LAST_REQUESTS = 30


def start(args: dict[str, Any], host: str, port: int) -> None:
    """Start the service on this machine, with the options of `service.ServiceOptions`; return when
    it is ready.
    """
    gpus, gpus_here = args.get("gpus", 0), torch.cuda.device_count()
    if gpus > gpus_here:  # Ray would wait for them forever
        raise ValueError(
            f"gpus must be at most {gpus_here}, the GPUs that PyTorch finds here; got {gpus:g}."
        )
    # Ray's proxy would share the port with another service, whose answers would then mix with its
    # own.
    socket.create_server((host, port)).close()
    if "ray" not in sys.modules and not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & set(os.environ):
        os.environ.update(_ENVIRONMENT)
    import ray
    from ray import serve

    from .service import LOGGING, NAME, build, http_options

    # A page in a browser on this machine may find a name of its own for this address, but not send
    # another one.
    own_names = ["127.0.0.1", "localhost"]
    hosts = own_names if host in own_names else ["*"]
    application = build({"hosts": hosts, **args})
    try:
        quiet = {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
        # Ray may count fewer cores, as in a container; it would wait for the others forever.
        ray.init(address="local", num_cpus=max(os.cpu_count() or 1, args.get("cpus", 1)), **quiet)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(http_options=http_options(host, port), logging_config=LOGGING)
        serve.run(application, name=NAME, logging_config=LOGGING)
    except (RuntimeError, ray.exceptions.RayError) as error:
        raise OSError(f"Ray cannot start the service: {shortened(str(error))}") from error


def run(args: dict[str, Any], host: str, port: int) -> None:
    """Run the service on this machine until the process is interrupted or terminated.

    The arguments are those of `start`.
    """
    count = len(read_adapters(args["adapters"]))
    tasks = "1 task" if count == 1 else f"{count} tasks"
    print(f"Starting {tasks}, which takes up to a minute.", flush=True)
    start(args, host, port)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which handles them as well
        signal.signal(number, lambda *_: stopped.set())
    print(f"{tasks} on http://{host}:{port}/predict. Stop with Ctrl+C.", flush=True)
    stopped.wait()
    stop()


def stop() -> None:
    """Stop the service and its Ray, after the running requests."""
    import ray
    from ray import serve

    from .service import NAME

    try:
        serve.get_app_handle(NAME).end.remote().result(timeout_s=_LAST_REQUESTS)
    except TimeoutError:
        logging.getLogger(__name__).warning("Requests were cut off.")
    # Its threads see the end of Ray as an error.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    # Ray Serve's own shutdown takes up to 25 seconds. Nothing of it is left after Ray's.
    ray.shutdown()
