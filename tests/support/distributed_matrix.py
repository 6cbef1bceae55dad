"""Prints the matrix: every strategy, every way to share bottlenecks, every check.

python tests/support/distributed_matrix.py               # all of it, about half an hour on two cores
python tests/support/distributed_matrix.py --strategies zero3 --variants 3-shared
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import pytest

from distributed_checks import CHECKS, TOLERANCE
from distributed_runs import STEPS, STRATEGIES, Run, Strategy, make_inputs, run


VARIANTS = {
    "not shared": ("--share_layers", "0"),
    "shared in each layer": ("--share_layers", "1"),
    "3-shared": ("--share_layers", "3"),
    "inside the norm": ("--kind", "pfeiffer"),
}
Outcome = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    strategies = [name for name in STRATEGIES if name != "several_nodes"]  # needs two launchers
    parser.add_argument("--strategies", nargs="+", choices=strategies, default=strategies)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder / "inputs")
        print(f"Two processes against one, {STEPS} steps, tolerance {TOLERANCE:g}")
        for variant in args.variants:
            one = run(folder / "inputs", folder / "one" / variant, None, *VARIANTS[variant])
            columns = {}
            for strategy in args.strategies:
                columns[strategy] = outcomes(folder, STRATEGIES[strategy], variant, one)
                shutil.rmtree(folder / strategy, ignore_errors=True)
            print_table(variant, columns)
            failed |= any("FAILED" in column.values() for column in columns.values())
    sys.exit(failed)


def outcomes(folder: Path, strategy: Strategy, variant: str, one: Run) -> Outcome:
    """What came of each check: "ok" or "FAILED"."""
    inputs, flags = folder / "inputs", VARIANTS[variant]
    path = folder / strategy.config

    def attempt(check: Callable[[], object]) -> str:
        try:
            check()
        except Exception:
            traceback.print_exc()
            return "FAILED"
        return "ok"

    result = {"trains": attempt(lambda: run(inputs, path, strategy.config, *flags))}
    two = Run(path)
    for check in CHECKS:
        result[check.__name__] = attempt(lambda check=check: check(two, one, strategy, inputs))
    result["resume"] = attempt(lambda: check_resume(inputs, path, strategy, flags))
    result["bf16"] = attempt(lambda: check_bf16(inputs, path / "bf16", strategy, flags, one))
    return result


def check_resume(inputs: Path, path: Path, strategy: Strategy, flags: tuple[str, ...]) -> None:
    """From the middle of an epoch on, the losses are those of the run without a break."""
    whole, middle = Run(path), path / "resumed" / "output" / "checkpoint-10"
    shutil.copytree(whole.output / "checkpoint-10", middle)
    resumed = run(
        inputs, path / "resumed", strategy.config, *flags, "--resume_from_checkpoint", "last"
    )  # fmt: skip
    assert resumed.records[0]["steps"] == list(range(1, STEPS + 1))
    assert resumed.records[0]["losses"] == pytest.approx(whole.records[0]["losses"], abs=1e-6)


def check_bf16(inputs: Path, path: Path, strategy: Strategy, flags: tuple[str, ...], one: Run) -> None:
    """Half precision rounds to three digits, so its losses are near those of float32 only at first."""
    half = run(inputs, path, strategy.config, *flags, "--bf16")
    assert half.results["strategy"]["mixed_precision"] == "bf16"
    assert half.records[0]["losses"][:5] == pytest.approx(one.records[0]["losses"][:5], rel=0.05)


def print_table(variant: str, columns: dict[str, Outcome]) -> None:
    print(f"\n| {variant} | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for check in next(iter(columns.values())):
        print(
            f"| {check.replace('_', ' ')} | {' | '.join(column[check] for column in columns.values())} |", flush=True
        )


if __name__ == "__main__":
    main()
