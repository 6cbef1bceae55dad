"""Finds what a checkpoint lacks of the encoder itself, such as BERT's pooler where only its masked words were trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from .base_modules import is_inside


def find_new(model: nn.Module, heads: Sequence[str], adapted: Iterable[str]) -> list[str]:
    """Full names of the encoder's modules beside its layers that are new, as the checkpoint did not have them.

    They must be trained and saved like a head: frozen, they would stay random, and be others when the adapter is
    loaded. transformers marks the weights that it has loaded; without such marks, as of a model that was made from its
    configuration, nothing is taken for new.

    Args:
        model: the base model.
        heads: names of its heads; without one, what is beside the layers may have no part in its output.
        adapted: names of the modules that get a bottleneck.
    """
    encoder = getattr(model, "base_model", None)
    if not heads or not isinstance(encoder, nn.Module) or not any(map(_is_loaded, model.parameters())):
        return []
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is encoder)
    adapted = list(adapted)
    return [
        prefix + name
        for name, child in encoder.named_children()
        if _is_new(child) and not any(is_inside(key, prefix + name) for key in adapted)
    ]


def _is_loaded(weight: torch.Tensor) -> bool:
    return getattr(weight, "_is_hf_initialized", False)


def _is_new(module: nn.Module) -> bool:
    """Whether all weights of a module are known to be new. Offloaded, sharded and quantized ones lose the mark."""
    weights = list(module.parameters())
    return bool(weights) and not any(
        _is_loaded(weight) or weight.is_meta or not weight.is_floating_point() or not weight.numel()
        or type(weight.data) is not torch.Tensor
        for weight in weights
    )  # fmt: skip
