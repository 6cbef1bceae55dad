"""Compute the memory per device and the traffic per step of full fine-tuning and adapters under each strategy.

Nothing is allocated. Sizes come from the shapes of the weights. Activations come from a forward pass on fake tensors
that records what autograd would save, with fused attention, as on a GPU, and masks of dropout as on a CPU. Everything
is in float32 and trained with AdamW; with --bf16, activations are those of autocast. Not counted are the temporary
tensors of single operations, the workspaces of cuDNN and NCCL, and the fragmentation of the allocator.

    python benchmarks/memory.py --shape large --batch 8 --length 128 --processes 4
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from peft import get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, BertForSequenceClassification

from houlsby_peft import HoulsbyConfig
from models import SHAPES, inputs, saved_bytes
from steps import Precision, training_step


FLOAT = 4
# AdamW stores two moments per weight.
MOMENTS = 2
# Selects a fused kernel of attention on a CPU as well.
FUSED = {"attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Sizes:
    """Numbers of weights.

    Args:
        total: Of the whole model.
        trained: Of the trained weights.
        largest_unit: Of the largest unit that is gathered at once, which is a layer or the embeddings.
    """

    total: int
    trained: int
    largest_unit: int


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, without activations.

    Args:
        weights, gradients, optimizer: What is kept from step to step.
        buffers: DDP's copy of the gradients, or the two gathered units (the current and the next one).
        sent: What the device sends to others in a step, with ring algorithms.
    """

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    sent: float


def whole(sizes: Sizes, n: int) -> Memory:
    """Return the memory on one device, or with DDP."""
    trained = FLOAT * sizes.trained
    copy = trained if n > 1 else 0
    return Memory(FLOAT * sizes.total, trained, MOMENTS * trained, copy, 2 * (n - 1) / n * trained)


def zero1(sizes: Sizes, n: int) -> Memory:
    """Return the memory with ZeRO-1. DeepSpeed stores a copy of the trained weights with their moments, also split."""
    trained = FLOAT * sizes.trained
    return Memory(FLOAT * sizes.total, trained, (MOMENTS + 1) * trained / n, 0, 2 * (n - 1) / n * trained)


def zero2(sizes: Sizes, n: int) -> Memory:
    trained = FLOAT * sizes.trained
    return Memory(FLOAT * sizes.total, trained / n, (MOMENTS + 1) * trained / n, 0, 2 * (n - 1) / n * trained)


def split(sizes: Sizes, n: int, copies: int) -> Memory:
    """Return the memory with everything split. All weights are gathered for the forward and the backward pass."""
    trained, total = FLOAT * sizes.trained, FLOAT * sizes.total
    sent = (n - 1) / n * (2 * total + trained)
    return Memory(total / n, trained / n, (MOMENTS + copies) * trained / n, 2 * FLOAT * sizes.largest_unit, sent)


STRATEGIES: dict[str, Callable[[Sizes, int], Memory]] = {
    "one device": lambda sizes, n: whole(sizes, 1),
    "DDP": whole,
    "ZeRO-1": zero1,
    "ZeRO-2": zero2,
    "ZeRO-3": lambda sizes, n: split(sizes, n, copies=1),
    "FSDP2": lambda sizes, n: split(sizes, n, copies=0),
}


def build(shape: str, config: HoulsbyConfig | None, **options: float) -> nn.Module:
    """Return a BERT classifier in training mode on the default device. If `config` is None, all weights train.

    `options` are other fields of BERT's configuration.
    """
    model = BertForSequenceClassification(BertConfig(**SHAPES[shape], **options)).train()
    return model if config is None else get_peft_model(model, config)


def sizes(model: nn.Module) -> Sizes:
    bert = model.get_submodule("base_model.model.bert" if hasattr(model, "peft_config") else "bert")
    units = [bert.embeddings, *bert.encoder.layer]
    return Sizes(
        total=_count(model),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        largest_unit=max(map(_count, units)),
    )


def activations(shape: str, config: HoulsbyConfig | None, batch: int, length: int, bf16: bool = False) -> int:
    """Return the bytes that autograd saves in a forward pass of `batch` rows of `length` tokens."""
    with torch.device("meta"):
        # With dropout in the attention, PyTorch keeps matrices of tokens x tokens on a CPU, and none on a GPU.
        model = build(shape, config, **FUSED)
    # Fake CPU tensors, because meta tensors would select another implementation of attention.
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        ids, labels = torch.zeros(batch, length, dtype=torch.long), torch.zeros(batch, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return saved_bytes(model, {"input_ids": ids, "labels": labels})


def peak(shape: str, config: HoulsbyConfig | None, batch: int, length: int, bf16: bool = False) -> int:
    """Return the bytes that training allocates at most on a GPU, with the model itself.

    The workspaces of the CUDA libraries are not counted if they have been used before.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = build(shape, config)
    step = training_step(model, inputs(batch, length, "cuda"), Precision(autocast=bf16))
    # The optimizer allocates its moments in the first step.
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def beside_computed(
    shape: str, cells: Iterable[tuple[int, int]], device: str, r: int = 64
) -> Iterator[dict[str, object]]:
    """Yield the computed memory of training on one device, in MB, and on a GPU what PyTorch has allocated.

    Args:
        shape: A key of `SHAPES`.
        cells: Batch sizes and lengths.
        device: "cpu" or "cuda".
        r: Bottleneck size.
    """
    for (batch, length), bf16 in itertools.product(cells, (False, True)):
        for trained, config in (("all", None), ("adapters", HoulsbyConfig(r=r))):
            with torch.device("meta"):
                found = sizes(build(shape, config))
            m = STRATEGIES["one device"](found, 1)
            computed = m.weights + m.gradients + m.optimizer + activations(shape, config, batch, length, bf16)
            row = {"shape": shape, "rows": batch, "tokens": length, "trained": trained}
            row |= {"precision": "bf16 autocast" if bf16 else "float32", "computed_mb": computed / 1e6}
            if device == "cpu":
                yield {**row, "note": "needs CUDA"}
                continue
            try:
                measured = peak(shape, config, batch, length, bf16)
            except torch.OutOfMemoryError:
                yield {**row, "note": "out of memory"}
            else:
                yield {**row, "measured_mb": measured / 1e6, "ratio": measured / computed}


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="large", help="Size of BERT.")
    parser.add_argument("--r", type=int, default=64, help="Bottleneck size.")
    parser.add_argument("--share_layers", type=int, default=0, help="See HoulsbyConfig.")
    parser.add_argument("--batch", type=int, default=8, help="Rows per device.")
    parser.add_argument("--length", type=int, default=128, help="Tokens per row.")
    parser.add_argument("--processes", type=int, default=4, help="Number of devices.")
    parser.add_argument("--bf16", action="store_true", help="Activations in bfloat16, with autocast.")
    args = parser.parse_args()
    print(
        f"BERT-{args.shape}, {args.batch} rows of {args.length} tokens on each of {args.processes} devices, MB (1e6)"
    )
    print("\n| | strategy | weights | gradients | optimizer | buffers | activations | sum | sent per step |")
    print(f"|{'---|' * 9}")
    for name, config in (("full", None), ("adapters", HoulsbyConfig(r=args.r, share_layers=args.share_layers))):
        with torch.device("meta"):
            found = sizes(build(args.shape, config))
        kept = activations(args.shape, config, args.batch, args.length, args.bf16)
        for strategy, compute in STRATEGIES.items():
            m = compute(found, args.processes)
            lasting = [m.weights, m.gradients, m.optimizer, m.buffers, kept]
            row = " | ".join(f"{value / 1e6:,.1f}" for value in [*lasting, sum(lasting), m.sent])
            print(f"| {name} | {strategy} | {row} |")


if __name__ == "__main__":
    main()
