"""Start replicas on this machine, in a Ray of their own, and stop them."""

from __future__ import annotations

import logging
import os
import secrets
import sys

from ..errors import shortened
from .engine import Engine
from .options import ServiceOptions


# Ray reads these when it is imported. With a token, its processes refuse whoever does not know it:
# they listen on all addresses of the machine, and would run any code for anyone.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray announces a change of its own
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # Without this, metrics are offered without the token.
    "RAY_enable_metrics_collection": "0",
    # Its processes are then at 127.0.0.1, where Ray's other exporters of metrics listen as well.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def start(options: ServiceOptions) -> Engine:
    """Start replicas; return what calls them, when they are ready."""
    if "ray" not in sys.modules and not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & set(os.environ):
        os.environ.update(_ENVIRONMENT)
    import ray
    from ray import serve

    from .ray_engine import LOGGING, NAME, RayEngine, deploy_replicas

    try:
        quiet = {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
        # Ray may count fewer cores, as in a container; it would wait for the others forever.
        cores = max(os.cpu_count() or 1, options.cpus * options.min_replicas)
        ray.init(address="local", num_cpus=cores, **quiet)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled", logging_config=LOGGING)
        replicas = serve.run(
            deploy_replicas(options), name=NAME, route_prefix=None, logging_config=LOGGING
        )
        return RayEngine(replicas)
    except (RuntimeError, ray.exceptions.RayError) as error:
        raise OSError(f"Ray cannot start the service: {shortened(str(error))}") from error


def stop() -> None:
    """Stop the replicas and their Ray."""
    import ray

    # Its threads see the end of Ray as an error.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    # Ray Serve's own shutdown takes up to 25 seconds. Nothing of it is left after Ray's.
    ray.shutdown()
