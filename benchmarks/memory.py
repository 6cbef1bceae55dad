"""Compute the memory per device and the traffic per step of full fine-tuning and adapters under
each strategy.

Nothing is allocated. Sizes come from the shapes of the weights. Activations come from a forward
pass on fake tensors that records what autograd would save, with fused attention, as on a GPU, and
masks of dropout as on a CPU. Everything is in float32 and trained with AdamW; with --bf16,
activations are those of autocast. Not counted are the temporary tensors of single operations, the
workspaces of cuDNN and NCCL, and the fragmentation of the allocator. What the operation of a
bottleneck saves beside its modules, at most 3% of all activations, is not taken off.

    python benchmarks/memory.py --shape large --batch 8 --length 128 --processes 4
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from peft import get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, BertForSequenceClassification

from houlsby_peft import HoulsbyConfig
from models import SHAPES, inputs, saved_bytes
from report import table
from steps import Precision, training_step


FLOAT = 4
# AdamW stores two moments per weight.
MOMENTS = 2
# Selects a fused kernel of attention on a CPU as well.
FUSED = {"attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Sizes:
    """Numbers of weights: all, the trained ones, and those of the largest layer (or the
    embeddings).
    """

    total: int
    trained: int
    largest_unit: int


def strategies(sizes: Sizes, n: int) -> dict[str, dict[str, float]]:
    """Return the bytes on each of n devices by strategy, without activations.

    Weights, gradients and optimizer are kept from step to step. Buffers are DDP's copy of the
    gradients, or the two units that are gathered at a time. DeepSpeed keeps a copy of the trained
    weights with their moments. `sent` is what a device sends in a step, with ring algorithms.
    """
    total, trained, units = (
        FLOAT * sizes.total,
        FLOAT * sizes.trained,
        2 * FLOAT * sizes.largest_unit,
    )
    reduced, gathered = 2 * (n - 1) / n * trained, (n - 1) / n * (2 * total + trained)
    rows = {
        "one device": (total, trained, MOMENTS * trained, 0, 0),
        "DDP": (total, trained, MOMENTS * trained, trained if n > 1 else 0, reduced),
        "ZeRO-1": (total, trained, (MOMENTS + 1) * trained / n, 0, reduced),
        "ZeRO-2": (total, trained / n, (MOMENTS + 1) * trained / n, 0, reduced),
        "ZeRO-3": (total / n, trained / n, (MOMENTS + 1) * trained / n, units, gathered),
        "FSDP2": (total / n, trained / n, MOMENTS * trained / n, units, gathered),
    }
    names = ("weights", "gradients", "optimizer", "buffers", "sent")
    return {strategy: dict(zip(names, row, strict=True)) for strategy, row in rows.items()}


def build(shape: str, config: HoulsbyConfig | None, **options: float) -> nn.Module:
    """Return a BERT classifier in training mode on the default device. If `config` is None, all
    weights train.

    `options` are other fields of BERT's configuration.
    """
    model = BertForSequenceClassification(BertConfig(**SHAPES[shape], **options)).train()
    return model if config is None else get_peft_model(model, config)


def sizes(model: nn.Module) -> Sizes:
    bert = model.get_submodule("base_model.model.bert" if hasattr(model, "peft_config") else "bert")
    units = [bert.embeddings, *bert.encoder.layer]
    return Sizes(
        total=_count(model),
        trained=sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        ),
        largest_unit=max(map(_count, units)),
    )


def activations(
    shape: str, config: HoulsbyConfig | None, batch: int, length: int, bf16: bool = False
) -> int:
    """Return the bytes that autograd saves in a forward pass of `batch` rows of `length` tokens."""
    with torch.device("meta"):
        # With dropout in the attention, PyTorch keeps matrices of tokens x tokens on a CPU, and
        # none on a GPU.
        model = build(shape, config, **FUSED)
    # Fake CPU tensors, because meta tensors would select another implementation of attention.
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        ids, labels = (
            torch.zeros(batch, length, dtype=torch.long),
            torch.zeros(batch, dtype=torch.long),
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return saved_bytes(model, {"input_ids": ids, "labels": labels})


def peak(
    shape: str, config: HoulsbyConfig | None, batch: int, length: int, bf16: bool = False
) -> int:
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
    shape: str, cells: Iterable[tuple[int, int]], r: int = 64
) -> Iterator[dict[str, object]]:
    """Yield the computed memory of training on one GPU, in MB, and what PyTorch has allocated
    there.

    Args:
        shape: A key of `SHAPES`.
        cells: Batch sizes and lengths.
        r: Bottleneck size.
    """
    for (batch, length), bf16 in itertools.product(cells, (False, True)):
        for trained, config in (("all", None), ("adapters", HoulsbyConfig(r=r))):
            with torch.device("meta"):
                lasting = strategies(sizes(build(shape, config)), 1)["one device"]
            computed = sum(lasting.values()) + activations(shape, config, batch, length, bf16)
            measured = peak(shape, config, batch, length, bf16)
            row = {"shape": shape, "rows": batch, "tokens": length, "trained": trained}
            row |= {
                "precision": "bf16 autocast" if bf16 else "float32",
                "computed_mb": computed / 1e6,
            }
            yield {**row, "measured_mb": measured / 1e6, "ratio": measured / computed}


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="large", help="Size of BERT.")
    parser.add_argument("--r", type=int, default=64, help="Bottleneck size.")
    parser.add_argument("--share_layers", type=int, default=0, help="See HoulsbyConfig.")
    parser.add_argument("--batch", type=int, default=8, help="Rows per device.")
    parser.add_argument("--length", type=int, default=128, help="Tokens per row.")
    parser.add_argument("--processes", type=int, default=4, help="Number of devices.")
    parser.add_argument(
        "--bf16", action="store_true", help="Activations in bfloat16, with autocast."
    )
    args = parser.parse_args()
    rows = []
    for name, config in (
        ("full", None),
        ("adapters", HoulsbyConfig(r=args.r, share_layers=args.share_layers)),
    ):
        with torch.device("meta"):
            found = sizes(build(args.shape, config))
        kept = activations(args.shape, config, args.batch, args.length, args.bf16)
        for strategy, lasting in strategies(found, args.processes).items():
            sent = lasting.pop("sent")
            figures = {
                **lasting,
                "activations": kept,
                "sum": sum(lasting.values()) + kept,
                "sent per step": sent,
            }
            shown = {key: f"{value / 1e6:,.1f}" for key, value in figures.items()}
            rows.append({"trained": name, "strategy": strategy, **shown})
    print(
        f"BERT-{args.shape}, {args.batch} x {args.length} tokens on each of {args.processes} "
        "devices, MB (1e6)\n"
    )
    print(table(rows, "github"))


if __name__ == "__main__":
    main()
