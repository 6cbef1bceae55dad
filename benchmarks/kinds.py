"""Compare the time of a batch of adapters of three kinds with that of as many adapters of one kind, on BERT.

    python benchmarks/kinds.py --cell base:32:64 --rounds 20

All batches have three adapters in the feed-forwards, each on a third of the rows: blocks of rows, or one row after the
other. The ratios are to three adapters of Houlsby's kind in blocks. Times are processor times on the CPU.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from peft import PeftModel, get_peft_model
from transformers import BertConfig, BertModel

from houlsby_peft import HoulsbyConfig
from models import SHAPES
from timing import compared, interleaved, keep_freed_memory, machine


KINDS = ("houlsby", "pfeiffer", "parallel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", default="base:32:64", help="shape:batch:length")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(machine(args.device))
    shape, rows, length = args.cell.split(":")
    ids = torch.randint(0, 30522, (int(rows), int(length)), device=args.device)
    names = [f"task_{row * 3 // len(ids)}" for row in range(len(ids))]
    orders = {"blocks": names, "one by one": [f"task_{row % 3}" for row in range(len(ids))]}
    models = {"all kinds": adapted(shape, KINDS), **{f"only {kind}": adapted(shape, [kind] * 3) for kind in KINDS}}
    calls = {
        (which, order): torch.inference_mode()(partial(model.to(args.device), ids, adapter_names=names))
        for order, names in orders.items()
        for which, model in models.items()
        # A model keeps the stacked weights of one batch.
        if order == "blocks" or which in ("all kinds", "only houlsby")
    }
    found = {}
    for order in orders:
        found |= interleaved({key: call for key, call in calls.items() if key[1] == order}, args.rounds, args.device)
    for (which, order), row in compared(found, ("only houlsby", "blocks")).items():
        print(
            f"{which:14} {order:10}  {row['min_s']:.4f} s  ratio of the minima {row['ratio_of_minima']:.3f}, "
            f"median of the ratios {row['median_ratio']:.3f}"
        )


def adapted(shape: str, kinds: list[str] | tuple[str, ...]) -> PeftModel:
    """Return a model with an adapter of each kind, in evaluation mode."""
    torch.manual_seed(0)
    base = BertModel(BertConfig(**SHAPES[shape]), add_pooling_layer=False)
    configs = [HoulsbyConfig(r=64, kind=kind, positions=("feed_forward",), train_layer_norm=False) for kind in kinds]
    model = get_peft_model(base, configs[0], adapter_name="task_0")
    for number, config in enumerate(configs[1:], start=1):
        model.add_adapter(f"task_{number}", config)
    return model.eval()


if __name__ == "__main__":
    main()
