"""Compare adapters to full fine-tuning, the frozen floor, LoRA and the `adapters` library.

    python benchmarks/run.py                 # the whole table on the CPU: hours
    python benchmarks/run.py --quick         # a few minutes
    python benchmarks/run.py --device cuda
    python benchmarks/run.py --parts steps --cells minilm:32:64 base:8:128 --rounds 30
    python benchmarks/run.py --parts steps --methods "Houlsby r=64"
    python benchmarks/run.py --parts export --rounds 30
    python benchmarks/run.py --parts mixed changes --mixed_cells base:32:48 base:32:8 --threads 2

The results are tables and JSON. All methods run interleaved in one process, and the machine should
be idle. The table shows the ratio of the minima, and the median and the range of the ratios of all
rounds. Two figures have no noise: floating-point operations (of matrix products) and bytes saved
for the backward pass. On a CPU, times are processor times of the process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fan_out
import growth
import mixed
import starting
from methods import EVALUATED, FLOOR, METHODS, QUICK
from report import Rows, table
from steps import measure
from timing import keep_freed_memory, machine


# On one thread of a CPU a training step of the largest takes half a minute.
CELLS = {
    "cpu": [
        "minilm:32:64",
        *(f"base:{batch}:{length}" for batch in (1, 8) for length in (64, 128, 512)),
        *(f"base:32:{length}" for length in (64, 128)),
        *(f"large:{batch}:{length}" for batch in (1, 8) for length in (64, 128)),
    ],
    "cuda": [
        f"{shape}:{batch}:{length}"
        for shape in ("base", "large")
        for batch in (1, 8, 32)
        for length in (64, 128, 512)
    ],
}
PARTS = ("steps", "mixed", "changes", "fan_out", "growth", "start", "export")


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    result: dict[str, Any] = {"machine": machine(args.device)}
    print(json.dumps(result["machine"], indent=2))
    if "steps" in args.parts:
        result["steps"] = []
        for cell in map(parse, args.cells):
            result["steps"] += steps(cell, args)
    if "mixed" in args.parts:
        result["tasks"] = in_each_cell(mixed.by_tasks, args)
    if "changes" in args.parts:
        result["changes"] = in_each_cell(mixed.after_a_change, args)
    if "fan_out" in args.parts:
        shape, length, numbers = (
            ("tiny", 16, (1, 4)) if args.quick else ("base", 128, (1, 2, 4, 8, 16, 32, 64))
        )
        result["fan_out"] = shown(
            fan_out.by_tasks_of_a_text(shape, length, numbers, args.rounds, args.device, 420)
        )
    if "growth" in args.parts:
        result |= grown(args)
    if "start" in args.parts:
        result["imports"] = shown(starting.imports(args.rounds))
        result["actions"] = shown(starting.actions("tiny" if args.quick else "base", args.rounds))
    if "export" in args.parts:
        result["export"] = exported(args)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nWritten to {args.output}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="One small shape, few methods and rounds."
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cells", nargs="+", help="shape:batch:length, such as base:8:128.")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        metavar="METHOD",
        help="Compare only these with the frozen floor.",
    )
    parser.add_argument(
        "--mixed_cells",
        nargs="+",
        help="The same for batches of several tasks. Default: base:64:32.",
    )
    parser.add_argument("--rounds", type=int, help="Default: 20, or 5 with --quick.")
    parser.add_argument("--threads", type=int, default=1, help="Threads on the CPU.")
    parser.add_argument("--device", choices=CELLS, default="cpu")
    parser.add_argument(
        "--adapters_python", help="Python of an environment with the `adapters` library."
    )
    parser.add_argument(
        "--output", type=Path, default=Path("benchmark.json"), help="JSON file for all figures."
    )
    args = parser.parse_args()
    args.methods = tuple(
        dict.fromkeys([FLOOR, *(args.methods or (QUICK if args.quick else METHODS))])
    )
    args.cells = args.cells or (["minilm:8:32"] if args.quick else CELLS[args.device])
    args.mixed_cells = args.mixed_cells or ["tiny:8:16" if args.quick else "base:64:32"]
    args.rounds = args.rounds or (5 if args.quick else 20)
    return args


def parse(cell: str) -> tuple[str, int, int]:
    """Return shape, rows and tokens of a cell such as base:8:128."""
    shape, batch, length = cell.split(":")
    return shape, int(batch), int(length)


def steps(cell: tuple[str, int, int], args: argparse.Namespace) -> Rows:
    """Measure training and evaluation, also of the `adapters` library if it is given."""
    rows = measure(
        "train", {name: METHODS[name] for name in args.methods}, cell, args.rounds, args.device
    )
    evaluated = {name: EVALUATED[name] for name in args.methods if name in EVALUATED}
    rows += measure("eval", evaluated, cell, args.rounds, args.device)
    if args.adapters_python:
        rows += adapters_library(cell, args)
    return shown(rows)


def adapters_library(cell: tuple[str, int, int], args: argparse.Namespace) -> Rows:
    """Measure the library, and houlsby_peft if it runs there, relative to the floor of that
    environment.
    """
    shape, batch, length = map(str, cell)
    script = str(Path(__file__).with_name("adapters_library.py"))
    options = ["--shape", shape, "--batch", batch, "--length", length, "--rounds", str(args.rounds)]
    options += ["--threads", str(args.threads), "--device", args.device]
    command = [args.adapters_python, script, *options]
    found = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    return [row for row in found["rows"] if row["method"] != FLOOR]


def in_each_cell(measured: Callable[..., Rows], args: argparse.Namespace) -> Rows:
    """Measure batches of different adapters in each of their cells."""
    rows: Rows = []
    for cell in args.mixed_cells:
        found = measured(*parse(cell), args.rounds, args.device)
        rows += shown([{"cell": cell, **row} for row in found])
    return rows


def grown(args: argparse.Namespace) -> dict[str, Rows]:
    """Measure growth with the bottleneck size, the adapted layers and the number of adapters in
    memory.
    """
    shape = "tiny" if args.quick else "base"
    cell = ("tiny", 8, 32) if args.quick else ("minilm", 32, 64)
    numbers = (1, 10, 30) if args.quick else (1, 10, 100, 1000)
    return {
        "sizes": shown(growth.by_size_and_layers(cell, args.rounds, args.device)),
        "held": shown(growth.by_adapters_held(shape, numbers)),
    }


def exported(args: argparse.Namespace) -> Rows:
    """Measure one text and 32 texts in onnxruntime and quantized, on the CPU, if the packages are
    installed.
    """
    try:
        from exported import latencies
    except ImportError as error:
        print(f"\nThe part export needs houlsby-peft[export,quantized] ({error}).")
        return []
    rows: Rows = []
    for shape, length in [("tiny", 16)] if args.quick else [("minilm", 64), ("base", 64)]:
        rows += shown(latencies(shape, [1, 32], length, args.rounds))
    return rows


def shown(rows: Rows) -> Rows:
    """Print rows as a table and return them."""
    print(f"\n{table(rows)}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
