"""Time of a batch whose rows use as many adapters, relative to a batch whose rows all use one.

Everything runs in one process, interleaved, so that a change in the machine's speed hits all alike; compare the
minima. PEFT's LoRA, which loops over the adapters in each layer, stands beside the Houlsby adapters.

    python benchmarks/mixed_batch.py --rows 32 --tokens 48 8 1 --rounds 20
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import BertConfig, BertModel

from houlsby_peft import HoulsbyConfig


LINEAR = ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]
METHODS: dict[str, Callable[[], PeftConfig]] = {
    "houlsby r=64": lambda: HoulsbyConfig(r=64),
    "houlsby r=64, no norms": lambda: HoulsbyConfig(r=64, train_layer_norm=False),
    "LoRA r=8 on all linear layers": lambda: LoraConfig(r=8, target_modules=LINEAR),
}


def make_model(method: str, adapters: int, device: str) -> PeftModel:
    """BERT-base with random weights and so many adapters, named "0", "1", ..."""
    torch.manual_seed(0)
    model = get_peft_model(BertModel(BertConfig(), add_pooling_layer=False), METHODS[method](), adapter_name="0")
    for name in range(1, adapters):
        model.add_adapter(str(name), METHODS[method]())
    return model.to(device).eval()


@torch.inference_mode()
def seconds(model: PeftModel, ids: torch.Tensor, names: list[str] | None) -> float:
    """The time of one forward pass; `names` are the adapters of the rows, None: all rows use the active one."""
    start = time.perf_counter()
    model(input_ids=ids, adapter_names=names)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="rows of the batch, and adapters")
    parser.add_argument("--tokens", type=int, nargs="+", default=[48, 8, 1], help="tokens of each row")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    args = parser.parse_args()
    mixed = [str(row) for row in range(args.rows)]
    print(
        f"BERT-base, {args.rows} rows, float32, {args.device}, {torch.get_num_threads()} threads, {args.rounds} rounds"
    )
    print(f"{'method':32} {'tokens a row':>12} {'one adapter':>12} {f'{args.rows} adapters':>12} {'ratio':>7}")
    models = {method: make_model(method, args.rows, args.device) for method in args.methods}
    for tokens in args.tokens:
        ids = torch.randint(0, 30522, (args.rows, tokens), device=args.device)
        best: dict[tuple[str, bool], float] = {}
        for round_ in range(args.rounds + 2):
            for method, model in models.items():
                for is_mixed in (False, True):
                    duration = seconds(model, ids, mixed if is_mixed else None)
                    # The first rounds stack the weights, and warm caches and allocators up.
                    if round_ >= 2:
                        best[method, is_mixed] = min(duration, best.get((method, is_mixed), duration))
        for method in models:
            one, many = best[method, False], best[method, True]
            print(f"{method:32} {tokens:12} {one * 1e3:9.1f} ms {many * 1e3:9.1f} ms {many / one:7.3f}", flush=True)


if __name__ == "__main__":
    main()
