"""The `adapters` library at the same shape, and the same floor, in an environment of its own: rows as JSON.

It pins an older transformers than houlsby_peft needs, so that only ratios to the floor of each environment compare:

    python -m venv other && other/bin/pip install adapters
    python benchmarks/run.py --adapters_python other/bin/python

or, by itself, `other/bin/python benchmarks/adapters_library.py --shape minilm --batch 32 --length 64 --rounds 20`.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import adapters
import torch
from models import floor, frozen
from steps import measure
from timing import keep_freed_memory, machine


FLOOR = "frozen floor"
NAME = f"adapters {adapters.__version__}, Houlsby r=64"


def adapted(base: Any) -> Any:
    """The model with the library's own Houlsby adapter; the library never trains the norms."""
    adapters.init(base)
    config = adapters.DoubleSeqBnConfig(reduction_factor=base.config.hidden_size / 64, non_linearity="gelu")
    base.add_adapter("task", config=config)
    base.train_adapter("task")
    return base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        *measure("train", {FLOOR: floor, NAME: adapted}, cell, args.rounds, args.device),
        *measure("eval", {FLOOR: frozen, NAME: adapted}, cell, args.rounds, args.device),
    ]
    print(json.dumps({"machine": machine(args.device), "rows": rows}))


if __name__ == "__main__":
    main()
