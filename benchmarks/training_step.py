"""Time of a training step with adapters, relative to the frozen floor.

The floor is what no method that adapts the first layer can avoid: a forward pass, and a backward pass from the loss to
the input embeddings that computes no weight gradient. All methods run in one process, interleaved, so that a change in
the machine's speed hits all alike; compare the minima.

    python benchmarks/training_step.py --shape minilm --batch 32 --length 64 --rounds 30
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from houlsby_peft import HoulsbyConfig


SHAPES = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
LINEAR = ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]
METHODS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "floor": lambda base: base.requires_grad_(False),
    "full fine-tuning": lambda base: base,
    "houlsby r=64": lambda base: get_peft_model(base, HoulsbyConfig(r=64)),
    "houlsby r=64, no norms": lambda base: get_peft_model(base, HoulsbyConfig(r=64, train_layer_norm=False)),
    "houlsby r=64, shared in each layer": lambda base: get_peft_model(base, HoulsbyConfig(r=64, share_layers=1)),
    "houlsby r=64, 3-shared": lambda base: get_peft_model(base, HoulsbyConfig(r=64, share_layers=3)),
    "LoRA r=8 on q and v": lambda base: get_peft_model(base, LoraConfig(r=8, target_modules=["query", "value"])),
    "LoRA r=16 on all linear layers": lambda base: get_peft_model(base, LoraConfig(r=16, target_modules=LINEAR)),
}


def make_step(method: str, args: argparse.Namespace) -> Callable[[], None]:
    """One whole training step of a method: zero the gradients, forward, backward, update."""
    torch.manual_seed(0)
    model = METHODS[method](BertForSequenceClassification(BertConfig(**SHAPES[args.shape]))).train().to(args.device)
    ids = torch.randint(0, 30522, (args.batch, args.length), device=args.device)
    labels = torch.randint(0, 2, (args.batch,), device=args.device)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable) if trainable else None
    if method == "floor":
        # The backward pass must reach the embeddings, although nothing in the model needs a gradient.
        model.bert.embeddings.register_forward_hook(lambda module, args, output: output.requires_grad_(True))

    def step() -> None:
        if optimizer:
            optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        if optimizer:
            optimizer.step()
        if args.device == "cuda":
            torch.cuda.synchronize()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    args = parser.parse_args()
    steps = {method: make_step(method, args) for method in dict.fromkeys(["floor", *args.methods])}
    seconds: dict[str, list[float]] = {method: [] for method in steps}
    for round_ in range(args.rounds + 3):
        for method, step in steps.items():
            start = time.perf_counter()
            step()
            # The first rounds warm caches and allocators up.
            if round_ >= 3:
                seconds[method].append(time.perf_counter() - start)
    floor = seconds["floor"]
    print(f"BERT shape {args.shape}, {args.batch} x {args.length} tokens, float32, {torch.get_num_threads()} threads")
    print(f"{'method':38} {'min s':>8} {'median s':>9} {'min/floor':>10} {'median/floor':>13}")
    for method, values in seconds.items():
        ratio, median = min(values) / min(floor), statistics.median(values) / statistics.median(floor)
        print(f"{method:38} {min(values):8.4f} {statistics.median(values):9.4f} {ratio:10.3f} {median:13.3f}")


if __name__ == "__main__":
    main()
