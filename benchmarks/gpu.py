"""Measure steps, mixed batches, predictions, memory and a profile on one NVIDIA GPU; `gpu.sh` starts this.

The parts run in order of their importance until the time is over. The report names what was left out, and why.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphs
import memory
import methods
import mixed
import profiling
from methods import FLOOR, FULL, METHODS, OURS
from models import build, inputs
from report import Report
from steps import PHASES, PRECISIONS
from timing import compared, interleaved, keep_freed_memory, machine


Rows = list[dict[str, Any]]
ROOT = Path(__file__).parents[1]
# The part of the time in which measurements end; the rest is for starting and for the chart.
_MEASURING = 0.9
# Seconds that the tests may take.
_TESTS = 120
# Seconds that compiling two models of BERT-base's size and measuring them may take.
_COMPILING = 150


@dataclass(frozen=True)
class Sizes:
    """What is measured, the most important first.

    Args:
        methods: Keys of `METHODS`.
        shapes: Keys of `SHAPES`.
        first: Rows and tokens that are measured first for each shape.
        bound: Rows and tokens whose kernels take longer than their launches.
        others: The other rows and tokens.
        mixed: Rows, tokens, numbers of adapters and precision of the batches of several adapters.
        predicted: Rows and tokens of predictions.
        compiled: Those of compiled predictions.
        compiler: Arguments of `torch.compile`.
        memory: The shape whose memory is compared with the computed one, its rows and its tokens.
        rounds: Number of rounds, if there is time for them.
    """

    methods: tuple[str, ...]
    shapes: tuple[str, ...]
    first: tuple[int, int]
    bound: tuple[int, int]
    others: tuple[tuple[int, int], ...]
    mixed: tuple[tuple[int, int, tuple[int, ...], str], ...]
    predicted: tuple[tuple[int, int], ...]
    compiled: tuple[tuple[int, int], ...]
    compiler: dict[str, Any]
    memory: tuple[str, tuple[tuple[int, int], ...]]
    rounds: int


WHOLE = Sizes(
    methods=tuple(name for name in METHODS if name != methods.OURS_BF16),
    shapes=("base", "minilm", "large"),
    first=(32, 128),
    bound=(32, 512),
    others=((8, 128), (1, 128), (32, 512), (8, 512), (1, 512), (32, 64), (8, 64), (1, 64)),
    mixed=(
        (64, 128, (1, 4, 16, 64), "bf16 base"),
        (64, 128, (1, 16, 64), "bf16 base and adapters"),
        (256, 128, (1, 64, 256), "bf16 base"),
        (256, 16, (1, 64, 256), "bf16 base"),
        (64, 128, (1, 64), "float32"),
    ),
    predicted=((1, 128), (8, 128), (32, 128), (1, 512)),
    compiled=((1, 128), (32, 128)),
    compiler={"mode": "reduce-overhead"},
    memory=("large", ((8, 128), (32, 128))),
    rounds=20,
)
QUICK = Sizes(
    methods=methods.QUICK,
    shapes=("tiny",),
    first=(2, 8),
    bound=(2, 16),
    others=(),
    mixed=((4, 8, (1, 3, 4), "bf16 base"),),
    predicted=((1, 8),),
    compiled=((1, 8),),
    compiler={"backend": "eager"},
    memory=("tiny", ((2, 8),)),
    rounds=2,
)


@dataclass(frozen=True)
class Job:
    """One measurement.

    Args:
        section: The section of the report.
        name: What is measured.
        rows: Returns or yields the rows of the section's table.
        needs_cuda: Whether it is left out on a CPU.
        seconds: The time that must be left for it to start, which is that of its longest measurement.
    """

    section: str
    name: str
    rows: Callable[[], Iterable[dict[str, Any]]]
    needs_cuda: bool = False
    seconds: float = 20


class Models:
    """The models of all methods for one shape and dtype, kept until others are asked for: building takes seconds."""

    def __init__(self, names: tuple[str, ...], device: str) -> None:
        self.names = names
        self.device = device
        self._key: object = None
        self._models: dict[str, nn.Module] = {}

    def get(self, shape: str, dtype: torch.dtype) -> dict[str, nn.Module]:
        """Return the models by method."""
        if self._key != (shape, dtype):
            self.free()
            with torch.device(self.device):
                base = build(shape, lambda base: base).to(dtype)
                self._models = {name: METHODS[name](copy.deepcopy(base)) for name in self.names}
            self._key = (shape, dtype)
        return self._models

    def free(self) -> None:
        """Free the memory of the models."""
        self._key, self._models = None, {}
        free_memory()


def free_memory() -> None:
    """Return what no tensor uses to the GPU, so that nothing fails for lack of it later."""
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    args = parse_arguments()
    keep_freed_memory()
    sizes = QUICK if args.quick else WHOLE
    report = Report(args.folder, describe(args.device), sizes.first)
    if args.continued:
        report.load()
    work(jobs(sizes, args.device), report, args.device, time.monotonic() + 60 * args.minutes * _MEASURING)
    report.write(with_chart=True)
    print(f"\n{report.text()}\nWritten to {args.folder}")
    sys.exit(1 if report.failures else 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Folder for the results.")
    parser.add_argument("--minutes", type=float, default=10, help="Time for everything.")
    parser.add_argument(
        "--continue", dest="continued", action="store_true", help="Measure what results.json in the folder lacks."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="A tiny model and few rounds, to try the kit itself.")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no NVIDIA GPU here. Without one: --device cpu --quick")
    return args


def work(todo: Iterable[Job], report: Report, device: str, deadline: float) -> None:
    """Do the jobs until the time is over, and write the report after each, so that nothing measured is lost.

    A job that is in the report is left out. One that fails or needs more memory is noted, and the next one follows.
    """
    for job in todo:
        start = time.monotonic()
        if report.has(job.section, job.name):
            continue
        if job.needs_cuda and device != "cuda":
            report.note(job.section, job.name, "needs CUDA")
        elif start + job.seconds > deadline:
            report.note(job.section, job.name, "no time left")
        else:
            _do(job, report, deadline)
            print(f"{job.section}, {job.name}: {time.monotonic() - start:.1f} s", flush=True)
        report.write()


def _do(job: Job, report: Report, deadline: float) -> None:
    report.forget(job.section, job.name)
    try:
        # Here and not after the last job: after an error of CUDA that stays, this fails as well.
        free_memory()
        torch.set_float32_matmul_precision("highest")
        for row in job.rows():
            report.add(job.section, job.name, row)
            if time.monotonic() > deadline:
                report.note(job.section, job.name, "no time left for the rest, if there is any")
                break
    except torch.OutOfMemoryError as error:
        report.note(job.section, job.name, f"out of memory: {_first_line(error)}")
    except Exception as error:
        # Whatever it is, it must not cost what else can be measured on this machine.
        traceback.print_exc()
        report.note(job.section, job.name, f"failed: {type(error).__name__}: {_first_line(error)}", failed=True)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def jobs(sizes: Sizes, device: str) -> Iterator[Job]:
    """Yield all jobs, the most important first, and jobs that use the same models together."""
    models = Models(sizes.methods, device)
    shape = sizes.shapes[0]
    eager = tuple(way for way in mixed.WAYS if way != mixed.GRAPH)

    def step(shape: str, cell: tuple[int, int], precision: str, at_most: float) -> Job:
        name = f"{shape}, {cell[0]} x {cell[1]} tokens, {precision}"
        return Job("steps", name, lambda: steps(models, shape, cell, precision, sizes.rounds, at_most))

    def several(rows: int, tokens: int, numbers: tuple[int, ...], precision: str, ways: Sequence[str]) -> Job:
        cell = (shape, rows, tokens)
        return Job(
            "mixed",
            f"{shape}, {rows} x {tokens} tokens, up to {numbers[-1]} adapters, {precision}, {' and '.join(ways)}",
            lambda: mixed.by_number(cell, numbers, precision, ways, device, sizes.rounds, at_most=1.5),
        )

    def predicted(cell: tuple[int, int], compiler: dict[str, Any] | None) -> Job:
        how = "compiled" if compiler else "plain and in CUDA graphs"
        name = f"{shape}, {cell[0]} x {cell[1]} tokens, {how}"
        most = _COMPILING if compiler else Job.seconds
        return Job("prediction", name, lambda: predictions(models, shape, cell, sizes.rounds, compiler), seconds=most)

    def profiled(cell: tuple[int, int], phase: str) -> Job:
        name = f"{shape}, {cell[0]} x {cell[1]} tokens, {phase}"
        return Job("profile", name, lambda: profiles(models, shape, cell, phase, sizes.rounds))

    for precision in PRECISIONS:
        yield step(shape, sizes.first, precision, at_most=4)
        if precision != "float32":
            yield step(shape, sizes.bound, precision, at_most=4)
    # With the models of the last precision, whose base is in bfloat16.
    for phase, cell in itertools.product(PHASES, (sizes.first, sizes.bound, (1, sizes.first[1]))):
        yield profiled(cell, phase)
    for each in sizes.mixed[:2]:
        yield several(*each, eager)
    yield Job("memory", f"BERT-{sizes.memory[0]}", lambda: compare_memory(models, *sizes.memory))
    for other in sizes.shapes[1:]:
        for precision in ("float32", "bf16 autocast", "bf16 base"):
            yield step(other, sizes.first, precision, at_most=3)
    yield Job("tests", "pytest -m cuda", run_tests, needs_cuda=True, seconds=_TESTS)
    # After these, because a failed capture can make dropout fail in all later training of this process.
    for each in sizes.mixed[:2]:
        yield several(*each, (mixed.GRAPH,))
    for cell in sizes.predicted:
        yield predicted(cell, None)
    for cell in sizes.compiled:
        yield predicted(cell, sizes.compiler)
    for each in sizes.mixed[2:]:
        yield several(*each, eager)
        yield several(*each, (mixed.GRAPH,))
    for other in sizes.shapes:
        for precision in ("bf16 base", "bf16 autocast", "float32"):
            for cell in sizes.others:
                yield step(other, cell, precision, at_most=1.5)


def steps(
    models: Models, shape: str, cell: tuple[int, int], name: str, rounds: int, at_most: float
) -> Iterator[dict[str, Any]]:
    """Measure training and evaluation of all methods, interleaved, in one precision.

    A method for which there is too little memory beside the models of the others is noted.
    """
    precision = PRECISIONS[name]
    if precision.tf32:
        torch.set_float32_matmul_precision("high")
    built = models.get(shape, precision.base)
    given = inputs(*cell, models.device)
    for phase, prepare in PHASES.items():
        # In evaluation, the floor is the base model itself.
        chosen = built
        if phase == "eval":
            chosen = {FLOOR: built[FULL]} | {key: built[key] for key in built if key not in (FLOOR, FULL)}
        calls = {}
        for method, model in chosen.items():
            call = prepare(model, given, precision)
            if fits(call):
                calls[method] = call
            else:
                model.zero_grad()
                free_memory()
        if FLOOR not in calls:
            raise torch.OutOfMemoryError("not even the floor fits")
        found = compared(interleaved(calls, rounds, models.device, at_most), FLOOR)
        for method, model in chosen.items():
            model.zero_grad()
            row = {"shape": shape, "batch": cell[0], "length": cell[1], "precision": name, "phase": phase}
            yield {**row, "method": method, **found.get(method, {"note": "out of memory"})}


def fits(call: Callable[[], object]) -> bool:
    """Try a call once, and return whether there was enough memory for it."""
    try:
        call()
    except torch.OutOfMemoryError:
        return False
    return True


def predictions(
    models: Models, shape: str, cell: tuple[int, int], rounds: int, compiler: dict[str, Any] | None
) -> Rows:
    """Measure predictions with a base model in bfloat16 and an adapter in float32."""
    built = models.get(shape, torch.bfloat16)
    chosen = {FLOOR: built[FULL], OURS: built[OURS]}
    ids = inputs(*cell, models.device)["input_ids"]
    found = graphs.predictions(chosen, ids, rounds, at_most=2, compiler=compiler)
    return [{"shape": shape, **row} for row in found]


def profiles(models: Models, shape: str, cell: tuple[int, int], phase: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Profile a step with and without an adapter, with a base model in bfloat16."""
    built = models.get(shape, torch.bfloat16)
    given = inputs(*cell, models.device)
    chosen = {FLOOR: built[FLOOR if phase == "train" else FULL], OURS: built[OURS]}
    calls = {name: PHASES[phase](model, given) for name, model in chosen.items()}
    facts = {"shape": shape, "rows": cell[0], "tokens": cell[1], "phase": phase}
    found, extra = profiling.profiles(calls, models.device, rounds, at_most=2, steps=min(rounds, 5))
    yield from ({**facts, **row} for row in (*found, *extra))


def compare_memory(models: Models, shape: str, cells: tuple[tuple[int, int], ...]) -> Iterator[dict[str, Any]]:
    """Compare the peak memory of training with the computed one, when no other models are in memory."""
    models.free()
    return memory.beside_computed(shape, cells, models.device)


def run_tests() -> Rows:
    """Run the tests that need CUDA."""
    # Other versions of other libraries may warn, which fails no test here.
    options = ["-q", "-W", "default", "-m", "cuda"]
    command = [sys.executable, "-m", "pytest", *options, "tests/core", "tests/test_benchmarks.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TESTS, check=False)
    print(done.stdout[-10_000:], done.stderr[-2_000:], sep="\n")
    summary = (done.stdout.strip() or done.stderr.strip() or "nothing was printed").splitlines()[-1]
    if done.returncode:
        raise RuntimeError(summary)
    return [{"command": "pytest -m cuda", "result": summary}]


def describe(device: str) -> dict[str, Any]:
    """Describe the machine, the GPU, and the versions of the software."""
    facts = {**machine(device), "peft": version("peft")}
    revision = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    facts["houlsby_peft"] = _printed(revision) or "no git repository"
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu_memory_bytes": gpu.total_memory,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _printed(["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
    return facts


def _printed(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    main()
