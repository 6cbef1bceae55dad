"""`ServiceOptions`: the options of the service, whichever engine runs it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServiceOptions:
    """Options of the service; under `args` in a deployment file for Ray.

    Args:
        adapters: See `read_adapters`. On a cluster, a path that all nodes can read.
        base_model: The base model, or its folder, in place of the one that the adapters name.
        batch_size: Rows that are predicted at once.
        max_bytes: Memory for adapters in each process, in bytes (see `TaskBank`).
        watch: Seconds between two looks at the folder or list of adapters. 0: it is read once.
        cpus: CPU cores, and threads, of the process that predicts.
        gpus: GPUs of this process: 0, 1 or, with Ray, a part of one.
        compile: Whether a GPU repeats the model's layers as CUDA graphs (see `TaskBank`).
        max_queued: Requests that may wait. Further ones get the status 503.
        max_rows: Rows of a request, counted once per task. More get the status 413.
        max_characters: Characters of the texts of a request. More get the status 413.
        hosts: Names of the service in the header Host of requests. Requests with another name are
            refused; "*" is any.
        tokens: A file with the bearer tokens of clients (see `read_tokens`). Default: the
            environment variable HOULSBY_TOKENS.
        min_replicas, max_replicas: With Ray, limits of the number of replicas, which depends on the
            load.
    """

    adapters: str
    base_model: str | None = None
    batch_size: int = 32
    max_bytes: float = 2e9
    watch: float = 5.0
    cpus: int = 1
    gpus: float = 0
    compile: bool = False
    max_queued: int = 512
    max_rows: int = 1024
    max_characters: int = 200_000
    hosts: list[str] = field(default_factory=lambda: ["*"])
    tokens: str | None = None
    min_replicas: int = 1
    max_replicas: int = 1
