"""Compare text generation with adapters to the base model and to LoRA, on a decoder of
SmolLM2-135M's shape.

    python benchmarks/generation.py                # some minutes on an idle machine
    python benchmarks/generation.py --layers 2 --rounds 1 --new_tokens 2
    python benchmarks/generation.py --device cuda --dtype bfloat16

The weights are random, which costs the same. All calls run interleaved in one process. Each
continues prompts of 32 tokens by some tokens, with a KV cache. The table shows the medians, over
the rounds, of the ratios to the base model. On a CPU, times are processor times of the process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from houlsby_peft import HoulsbyConfig
from report import table
from timing import compared, interleaved, keep_freed_memory, machine


SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
PROMPT = 32
LORA = "LoRA r=16, all linear layers, not merged"
METHODS: dict[str, Callable[[], PeftConfig]] = {
    "Houlsby r=64": partial(HoulsbyConfig, r=64),
    "Houlsby r=64, no norms": partial(HoulsbyConfig, r=64, train_layer_norm=False),
    LORA: partial(LoraConfig, r=16, target_modules="all-linear"),
}
BASE = "base model"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new_tokens", type=int, default=8)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    print(machine(args.device))
    for rows in args.rows:
        found = measure(rows, args)
        base = found[BASE]["median_s"] / args.new_tokens
        print(f"\n{rows} rows, {1e3 * base:.1f} ms per token with the base model")
        print(table([{"method": name, **figures} for name, figures in found.items()]), flush=True)


def measure(rows: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the times of all methods, and of batches with another adapter in each row."""
    calls = {BASE: generate(build(None, rows, args), rows, args)}
    for name, make in METHODS.items():
        model = build(make, rows, args)
        calls[name] = generate(model, rows, args)
        if rows > 1:
            names = [f"task{row}" for row in range(rows)]
            calls[f"{name}, {rows} adapters"] = generate(model, rows, args, adapter_names=names)
    return compared(interleaved(calls, args.rounds, args.device), BASE)


def build(
    make: Callable[[], PeftConfig] | None, rows: int, args: argparse.Namespace
) -> torch.nn.Module:
    """Return a decoder, with as many adapters as there are rows."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=args.layers)).to(
        getattr(torch, args.dtype)
    )
    if make is not None:
        model = get_peft_model(model, make(), adapter_name="task0")
        for row in range(1, rows):
            model.add_adapter(f"task{row}", make())
    return model.to(args.device).eval()


def generate(
    model: torch.nn.Module, rows: int, args: argparse.Namespace, **options: Any
) -> Callable[[], object]:
    """Return a call that continues prompts of random tokens."""
    ids = torch.randint(
        3, SHAPE["vocab_size"], (rows, PROMPT), generator=torch.Generator().manual_seed(0)
    )
    inputs = {
        "input_ids": ids.to(args.device),
        "attention_mask": torch.ones_like(ids).to(args.device),
    }
    length = {"min_new_tokens": args.new_tokens, "max_new_tokens": args.new_tokens}
    return partial(model.generate, **inputs, **length, do_sample=False, pad_token_id=0, **options)


if __name__ == "__main__":
    main()
