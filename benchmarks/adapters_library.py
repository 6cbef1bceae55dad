"""Measure the `adapters` library in an environment of its own, and print the rows as JSON.

The library pins an older version of transformers than houlsby_peft requires, so compare ratios to
the floor of the same environment. If PEFT and houlsby_peft are installed there without their
dependencies, training and evaluation of both run side by side:

    python -m venv other
    other/bin/pip install adapters accelerate
    other/bin/pip install --no-deps peft -e .
    python benchmarks/run.py --adapters_python other/bin/python

Without `run.py`:

    other/bin/python benchmarks/adapters_library.py --shape minilm --batch 32 --length 64
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import adapters
import torch
import transformers

from models import floor, frozen
from steps import measure
from timing import keep_freed_memory, machine


try:
    from methods import METHODS, OURS
except ImportError as error:
    print(f"houlsby_peft is not measured: {error}", file=sys.stderr)
    ours = {}
else:
    ours = {
        f"{name}, transformers {transformers.__version__}": METHODS[name]
        for name in (OURS, f"{OURS}, no norms")
    }

FLOOR = "frozen floor"
NAME = f"adapters {adapters.__version__}, Houlsby r=64"


def adapted(base: Any) -> Any:
    """Return the model with the library's Houlsby adapter. The library never trains the norms."""
    adapters.init(base)
    config = adapters.DoubleSeqBnConfig(
        reduction_factor=base.config.hidden_size / 64, non_linearity="gelu"
    )
    base.add_adapter("task", config=config)
    base.train_adapter("task")
    return base


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="minilm")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    cell = (args.shape, args.batch, args.length)
    rows = [
        *measure("train", {FLOOR: floor, NAME: adapted, **ours}, cell, args.rounds, args.device),
        *measure("eval", {FLOOR: frozen, NAME: adapted, **ours}, cell, args.rounds, args.device),
    ]
    print(json.dumps({"machine": machine(args.device), "rows": rows}))


if __name__ == "__main__":
    main()
