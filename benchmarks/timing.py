"""Interleaved timing: each round runs every call once, so a change in the machine's speed affects
all calls.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch


Key = TypeVar("Key", bound=Hashable)

WARM_UP = 3
# Rounds that are timed at least, whatever they take.
FEWEST = 3
# Options of glibc's mallopt: allocate large blocks on the heap, and do not return its end to the
# system.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Make glibc keep freed memory. Otherwise some steps request it from the system again, which
    adds 2% at random.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def seconds(call: Callable[[], object], device: str) -> float:
    """Return the time of a call.

    On a GPU, it is the time between two events. On a CPU, it is the processor time of this process,
    which other processes affect less than wall-clock time.
    """
    if device == "cpu":
        start = time.process_time()
        call()
        return time.process_time() - start
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def interleaved(
    calls: Mapping[Key, Callable[[], object]],
    rounds: int,
    device: str = "cpu",
    at_most: float = math.inf,
) -> dict[Key, list[float]]:
    """Return the times of each call in each round, after warming up caches, allocators and the
    GPU's clock.

    Args:
        calls: The calls by name.
        rounds: Number of rounds.
        device: "cpu" or "cuda".
        at_most: Seconds after which no further round starts, once three have been timed. If the
            first round takes more than a quarter of them, it is the only one to warm up.
    """
    times: dict[Key, list[float]] = {name: [] for name in calls}
    start, warm_up, done = time.monotonic(), WARM_UP, 0
    while done < warm_up + min(rounds, FEWEST) or (
        done < warm_up + rounds and time.monotonic() - start < at_most
    ):
        for name, call in calls.items():
            duration = seconds(call, device)
            if done >= warm_up:
                times[name].append(duration)
        done += 1
        if done == 1 and time.monotonic() - start > at_most / 4:
            warm_up = 1
    return times


def compared(times: Mapping[Key, list[float]], reference: Key) -> dict[Key, dict[str, Any]]:
    """Return the minimum and median of each call, and its ratios to the reference.

    `ratio_of_minima` divides the minima; `median_ratio` and `ratio_range` are over the ratios of
    the rounds.
    """
    result = {}
    for name, values in times.items():
        ratios = [value / other for value, other in zip(values, times[reference], strict=True)]
        result[name] = {
            "min_s": min(values),
            "median_s": statistics.median(values),
            "ratio_of_minima": min(values) / min(times[reference]),
            "median_ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
        }
    return result


def machine(device: str) -> dict[str, Any]:
    """Describe the machine and the versions of the software."""
    import transformers

    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        cpu = next(
            (
                line.split(":")[1].strip()
                for line in info.read_text().splitlines()
                if "model name" in line
            ),
            cpu,
        )
    return {
        "cpu": cpu,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
