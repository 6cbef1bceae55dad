"""Where the time of a step goes: matrix products, memory traffic and launches, and what of it is the adapter's."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from timing import compared, interleaved


Rows = list[dict[str, Any]]
# By the names of kernels, or of operators on a CPU; the first that fits. All others mostly move memory: norms,
# activations, dropout, sums, copies and casts.
KINDS = {
    "optimizer": r"multi_tensor_apply|adam",
    "attention": r"flash|fmha|attention|sdpa",
    "products": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|matmul|mkldnn|^aten::(mm|bmm|addmm|baddbmm)$|linear",
    "memory": r"",
}
PARTS = (*KINDS, "waiting")
# More is worth a fused kernel.
WORTH_A_KERNEL = 0.05


def profiles(
    calls: Mapping[str, Callable[[], object]], device: str, rounds: int, at_most: float, steps: int
) -> tuple[Rows, Rows]:
    """Measure steps with and without an adapter, and count their kernels.

    Args:
        calls: The step of the reference, then the step with an adapter, by name.
        device: "cpu" or "cuda".
        rounds: Number of rounds of the timing, which runs without the profiler.
        at_most: See `interleaved`.
        steps: Number of steps to profile.

    Returns:
        A row for each step: its median time, the number of kernels, and how much of the time each kind of kernels
        takes. What is left is `waiting_s`, in which the device waits for launches. A third row is the difference, and
        a fourth the difference relative to the time of the step with the adapter. Then the kernels that differ most.
    """
    times = compared(interleaved(calls, rounds, device, at_most), next(iter(calls)))
    found = {name: kernels(call, device, steps) for name, call in calls.items()}
    rows: Rows = []
    for name, own in found.items():
        parts = dict.fromkeys(KINDS, 0.0)
        for kernel, duration in own:
            parts[kind_of(kernel)] += duration / steps
        median = times[name]["median_s"]
        parts["waiting"] = max(0.0, median - sum(parts.values()))
        rows.append(
            {"step": name, "median_s": median, "kernels": len(own) // steps}
            | {f"{part}_s": value for part, value in parts.items()}
        )
    without, with_adapter = rows
    difference = {key: with_adapter[key] - without[key] for key in without if key != "step"}
    shares = {key: value / with_adapter["median_s"] for key, value in difference.items() if key.endswith("_s")}
    rows += [{"step": "the adapter", **difference}, {"step": "its share of the step", **shares}]
    return rows, _extra_kernels(*found.values(), steps)


def kernels(call: Callable[[], object], device: str, steps: int) -> list[tuple[str, float]]:
    """Return the names and seconds of all kernels of some calls; on a CPU, of all operators without what they call.

    Raises:
        RuntimeError: The profiler has recorded none, as where the driver does not permit it.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    call()
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
    if device == "cuda":
        # Annotations, such as the optimizer's, are listed among the kernels as well.
        found = [
            (event.name, event.time_range.elapsed_us() / 1e6)
            for event in profiler.events()
            if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        ]
    else:
        found = [(event.name, event.self_cpu_time_total / 1e6) for event in profiler.events()]
    if not found:
        raise RuntimeError("the profiler recorded no kernels")
    return found


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE))


def _extra_kernels(without: list[tuple[str, float]], own: list[tuple[str, float]], steps: int) -> Rows:
    """Return the kernels whose time differs most, with the differences of numbers and seconds per step."""
    seconds: defaultdict[str, float] = defaultdict(float)
    numbers: defaultdict[str, int] = defaultdict(int)
    for sign, found in ((-1, without), (1, own)):
        for kernel, duration in found:
            seconds[kernel] += sign * duration / steps
            numbers[kernel] += sign
    most = sorted(seconds, key=lambda kernel: -abs(seconds[kernel]))[:12]
    return [
        {
            "kernel": kernel[:110],
            "kind": kind_of(kernel),
            "number": numbers[kernel] / steps,
            "extra_s": seconds[kernel],
        }
        for kernel in most
    ]
