"""Measure steps, batches of several adapters, predictions and memory on one NVIDIA GPU; see
`gpu.sh`.

The jobs run in the order of their importance until the time is over. What is done is written after
each job; the same command with the same folder measures what is missing.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import memory
import mixed
from houlsby_peft.kernels.capture import capture
from methods import FLOOR, FULL, LORA_ALL, METHODS, NO_NORMS, OURS, OURS_BF16
from models import build, inputs
from report import Rows, table
from steps import PHASES, PRECISIONS, graphed_step
from timing import compared, interleaved, keep_freed_memory, machine


ROOT = Path(__file__).parents[1]
# The part of the time in which jobs start.
MEASURING = 0.9
MAIN = (FLOOR, FULL, OURS, NO_NORMS, "LoRA r=8, query and value", LORA_ALL)
Job = tuple[str, Callable[[], Iterable[dict[str, Any]]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="Folder for results.json and tables.md.")
    parser.add_argument("--minutes", type=float, default=10, help="Time for everything.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--quick", action="store_true", help="A tiny model and few rounds, to try the kit itself."
    )
    args = parser.parse_args()
    keep_freed_memory()
    result = read(args.folder, describe(args.device))
    failed = work(jobs(args), result, args.folder, time.monotonic() + 60 * args.minutes * MEASURING)
    print(f"\n{page(result)}\nWritten to {args.folder}")
    sys.exit(1 if failed else 0)


def read(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Return what an earlier run on the same machine has left in the folder, or an empty result."""
    file = folder / "results.json"
    result = (
        json.loads(file.read_text())
        if file.is_file()
        else {"machine": facts, "measured": {}, "left out": {}}
    )
    if any(
        result["machine"].get(key) != facts.get(key) for key in ("gpu", "torch", "houlsby_peft")
    ):
        raise SystemExit(f"{file} is of another GPU or of other software. Name another folder.")
    return result


def work(todo: Iterable[Job], result: dict[str, Any], folder: Path, deadline: float) -> int:
    """Do the jobs that the result lacks until the deadline, write it after each, and return how
    many failed.
    """
    failed = 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, measure in todo:
        if name in result["measured"]:
            continue
        result["left out"].pop(name, None)
        if time.monotonic() > deadline:
            result["left out"][name] = "no time left"
        else:
            start = time.monotonic()
            try:
                free_memory()
                torch.set_float32_matmul_precision("highest")
                result["measured"][name] = list(measure())
                print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
            except torch.OutOfMemoryError as error:
                result["left out"][name] = f"out of memory: {error}"[:200]
            except Exception as error:
                # Whatever it is, it must not cost what else can be measured on this machine.
                traceback.print_exc()
                failed += 1
                result["left out"][name] = f"failed: {type(error).__name__}: {error}"[:200]
        (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
        (folder / "tables.md").write_text(page(result))
    return failed


def free_memory() -> None:
    """Return what no tensor uses to the GPU."""
    gc.collect()
    torch.cuda.empty_cache()


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Yield all jobs, the most important first, and jobs that use the same models together."""
    shapes = ("tiny",) if args.quick else ("base", "minilm", "large")
    first, bound = ((2, 8), (2, 16)) if args.quick else ((32, 128), (32, 512))
    others = (
        ()
        if args.quick
        else ((8, 128), (1, 128), (32, 512), (8, 512), (1, 512), (32, 64), (8, 64), (1, 64))
    )
    rounds = 2 if args.quick else 20
    device, shape = args.device, shapes[0]
    every = [name for name in METHODS if name != OURS_BF16]

    def step(
        shape: str, cell: tuple[int, int], precision: str, at_most: float, methods: Sequence[str]
    ) -> Job:
        kind = "main steps" if methods is MAIN else "steps"
        name = f"{kind}, {shape}, {cell[0]} x {cell[1]} tokens, {precision}"
        return name, partial(steps, shape, cell, precision, methods, rounds, at_most, device)

    def prediction(cell: tuple[int, int], ways: Sequence[str]) -> Job:
        name = f"prediction, {shape}, {cell[0]} x {cell[1]} tokens, {ways[-1]}"
        return name, partial(predictions, shape, cell, ways, rounds, device, args.quick)

    yield step(shape, first, "bf16 base", 4, MAIN)
    yield f"profile, {shape}, bf16 base", partial(profiles, shape, first, device)
    yield prediction(first, ("plain", "CUDA graph") if device == "cuda" else ("plain",))
    for precision in ("bf16 autocast", "float32"):
        yield step(shape, first, precision, 4, MAIN)
    several = (
        [(4, 8, (1, 3, 4))] if args.quick else [(64, 128, (1, 4, 16, 64)), (256, 16, (1, 256))]
    )
    for dtype in (torch.bfloat16, torch.float32):
        for rows, tokens, numbers in several:
            yield (
                f"mixed, {shape}, {rows} x {tokens} tokens, {dtype}",
                partial(
                    mixed.by_number, (shape, rows, tokens), numbers, dtype, device, rounds, 1.5
                ),
            )
    for precision in PRECISIONS:
        yield step(shape, first, precision, 4, every)
        yield step(shape, bound, precision, 4, every)
    if device == "cuda":
        yield "memory, BERT-large", partial(memory.beside_computed, "large", ((8, 128), (32, 128)))
    for cell in (first, (1, first[1])):
        yield prediction(cell, ("plain", "compiled"))
    for other, precision in itertools.product(
        shapes[1:], ("bf16 base", "bf16 autocast", "float32")
    ):
        yield step(other, first, precision, 3, every)
    for other, precision, cell in itertools.product(
        shapes, ("bf16 base", "bf16 autocast", "float32"), others
    ):
        yield step(other, cell, precision, 1.5, every)


_built: dict[tuple[str, torch.dtype], dict[str, nn.Module]] = {}


def models(
    shape: str, dtype: torch.dtype, methods: Iterable[str], device: str
) -> dict[str, nn.Module]:
    """Return the models of some methods for a shape and dtype, kept until another shape or dtype is
    asked for.
    """
    if (shape, dtype) not in _built:
        _built.clear()
        free_memory()
        _built[shape, dtype] = {}
    built = _built[shape, dtype]
    with torch.device(device):
        base = build(shape, lambda base: base).to(dtype)
        for name in methods:
            if name not in built:
                built[name] = METHODS[name](copy.deepcopy(base))
    return {name: built[name] for name in methods}


def steps(
    shape: str,
    cell: tuple[int, int],
    name: str,
    methods: Sequence[str],
    rounds: int,
    at_most: float,
    device: str,
) -> Rows:
    """Measure training and evaluation of methods, interleaved, in one precision."""
    precision = PRECISIONS[name]
    if precision.tf32:
        torch.set_float32_matmul_precision("high")
    built = models(shape, precision.base, methods, device)
    given, rows = inputs(*cell, device), []
    phases = dict(PHASES)
    if device == "cuda":
        phases["train, CUDA graph"] = graphed_step
    for phase, prepare in phases.items():
        # In evaluation, the floor is the base model itself.
        chosen = (
            {FLOOR: built[FULL]} | {key: built[key] for key in list(built)[2:]}
            if phase == "eval"
            else built
        )
        calls = {method: prepare(model, given, precision) for method, model in chosen.items()}
        found = compared(interleaved(calls, rounds, device, at_most), FLOOR)
        for model in chosen.values():
            model.zero_grad()
        facts = {
            "shape": shape,
            "batch": cell[0],
            "length": cell[1],
            "precision": name,
            "phase": phase,
        }
        rows += [{**facts, "method": method, **row} for method, row in found.items()]
    return rows


def profiles(shape: str, cell: tuple[int, int], device: str) -> Rows:
    """Return what a step consists of with the base model in bfloat16: its time, that of the CPU
    until all is started, that of the GPU in all its kernels and how many they are; and of adapters,
    where each of them spends most.
    """
    given, rows = inputs(*cell, device), []
    built = models(shape, torch.bfloat16, (FLOOR, FULL, OURS), device)
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for phase, (name, model) in itertools.product(PHASES, built.items()):
        call = PHASES[phase](model, given, PRECISIONS["bf16 base"])
        row: dict[str, Any] = {"phase": phase, "method": name}
        row["step_s"] = min(interleaved({name: call}, 5, device)[name])
        row["cpu_s"] = min(_started(call, device) for _ in range(5))
        with profile(activities=activities) as profiler:
            call()
            _wait(device)
        averages = profiler.key_averages()
        kernels = [part for part in averages if part.device_type == DeviceType.CUDA]
        row["gpu_s"] = sum(part.self_device_time_total for part in kernels) / 1e6
        row["kernels"] = sum(part.count for part in kernels)
        rows.append(row)
        if name == OURS:
            facts = {"phase": phase, "method": name}
            rows += [{**facts, **part} for part in _largest_parts(kernels, averages)]
        model.zero_grad()
    return rows


def _largest_parts(kernels: Iterable[Any], averages: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the kernels and the operations of the CPU that take most of a step."""
    for part in sorted(kernels, key=lambda part: -part.self_device_time_total)[:25]:
        seconds = part.self_device_time_total / 1e6
        yield {"part": part.key[:60], "gpu_s": seconds, "kernels": part.count}
    for part in sorted(averages, key=lambda part: -part.self_cpu_time_total)[:25]:
        yield {"part": part.key[:60], "cpu_s": part.self_cpu_time_total / 1e6, "times": part.count}


def _started(call: Callable[[], object], device: str) -> float:
    """Return the time until everything of a call is started."""
    _wait(device)
    start = time.perf_counter()
    call()
    duration = time.perf_counter() - start
    _wait(device)
    return duration


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def predictions(
    shape: str,
    cell: tuple[int, int],
    ways: Sequence[str],
    rounds: int,
    device: str,
    is_quick: bool,
) -> Rows:
    """Measure predictions of the base model and of one adapter in several ways: plain, in a CUDA
    graph or compiled.

    `difference` is the largest one of a logit to the plain forward pass, relative to the largest
    logit.
    """
    built = models(shape, torch.bfloat16, (FULL, OURS), device)
    ids = inputs(*cell, device)["input_ids"]
    torch._dynamo.reset()
    calls: dict[tuple[str, str], Callable[[], torch.Tensor]] = {}
    for name, model in ((FLOOR, built[FULL].eval()), (OURS, built[OURS].eval())):
        calls[name, "plain"] = partial(_logits, model, ids)
        if "CUDA graph" in ways:
            calls[name, "CUDA graph"] = graphed(partial(_logits, model), ids)
        if "compiled" in ways:
            mode: dict[str, Any] = {"backend": "eager"} if is_quick else {"mode": "reduce-overhead"}
            compiled = torch.compile(model, fullgraph=True, dynamic=False, **mode)
            calls[name, "compiled"] = partial(_logits, compiled, ids)
    logits = {key: call().clone() for key, call in calls.items()}
    found = compared(interleaved(calls, rounds, device, 2), (FLOOR, "plain"))
    rows: Rows = []
    for (name, way), row in found.items():
        plain = logits[name, "plain"]
        difference = float((logits[name, way] - plain).abs().max() / plain.abs().max())
        rows.append({"model": name, "way": way, "difference": difference, **row})
    return rows


@torch.no_grad()
def _logits(model: Callable[..., Any], ids: torch.Tensor) -> torch.Tensor:
    # With mode="reduce-overhead", the next call overwrites what the last one has returned.
    torch.compiler.cudagraph_mark_step_begin()
    logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def graphed(
    call: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Capture a call in a CUDA graph, and return a function that replays it on what `ids` holds by
    then.
    """
    static, side = ids.clone(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # to warm up, as PyTorch's documentation has it
        for _ in range(3):
            call(static)
    torch.cuda.current_stream().wait_stream(side)
    graph, output = capture(partial(call, static))

    def replay() -> torch.Tensor:
        static.copy_(ids)
        graph.replay()
        return output

    return replay


def describe(device: str) -> dict[str, Any]:
    """Describe the machine, the GPU and the version of the library."""
    revision = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    facts = {**machine(device), "houlsby_peft": revision.stdout.strip() or "no git repository"}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu_memory_bytes": gpu.total_memory,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
        }
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return facts


def page(result: dict[str, Any]) -> str:
    """Return all tables in Markdown."""
    parts = dict(result["measured"])
    parts["Not measured"] = [
        {"job": name, "reason": reason} for name, reason in result["left out"].items()
    ]
    parts["Machine"] = [{"": key, "value": value} for key, value in result["machine"].items()]
    return (
        "\n\n".join(
            f"## {title}\n\n{table(rows, 'github')}" for title, rows in parts.items() if rows
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
