"""The models that are measured, and what can be counted without a clock.

Needs only transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification


SHAPES = {
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 512,
    },
    "minilm": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
Method = Callable[[Any], nn.Module]


def build(shape: str, method: Method) -> nn.Module:
    """Return a BERT classifier with random weights and a method applied, in training mode on the
    default device.
    """
    torch.manual_seed(0)
    return method(BertForSequenceClassification(BertConfig(**SHAPES[shape]))).train()


def floor(model: nn.Module) -> nn.Module:
    """Freeze the model, but let the backward pass reach the embeddings' output.

    This is the cost that no method can avoid if it adapts the first layer.
    """
    model.requires_grad_(False)
    model.get_submodule("bert.embeddings").register_forward_hook(
        lambda module, args, output: output.requires_grad_(True)
    )
    return model


def frozen(model: nn.Module) -> nn.Module:
    """Freeze the model."""
    return model.requires_grad_(False)


def inputs(batch: int, length: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return random tokens without padding, and labels of two classes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 30522, (batch, length), generator=generator)
    return {"input_ids": ids.to(device), "labels": (ids[:, 0] % 2).to(device)}


def saved_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Return the bytes that autograd saves for the backward pass, not counting the model's own
    weights.
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**batch)
    for tensor in [*model.parameters(), *model.buffers()]:
        kept.pop(tensor.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values())


def flops(call: Callable[[], object]) -> int:
    """Return the floating-point operations of a call's matrix products.

    Those inside the fused attention of a CPU, which is used in evaluation, are not counted.
    """
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()
