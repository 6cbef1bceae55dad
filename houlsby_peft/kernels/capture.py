"""CUDA graphs: operations that a GPU starts at once, not one after the other as Python does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture(compute: Callable[[], Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a graph of a computation, and its result, which each replay overwrites.

    Args:
        compute: What has run before, because libraries choose their kernels in the first pass,
            which cannot be captured.
        pool: The memory of other graphs that never run at the same time. Default: memory of its
            own.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads, as those that load batches, go on.
    capturing = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
    # A capture that fails would leave its stream in use.
    with torch.cuda.stream(torch.cuda.current_stream()), capturing:
        return graph, compute()
