"""What a base checkpoint lacks and an adapter has to bring: the head, and in some of BERT's the pooler."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from .base_modules import is_inside
from .config import HoulsbyConfig
from .head import find_head
from .plan import modules_to_save


logger = logging.getLogger(__name__)


def add_new_modules(model: nn.Module, config: HoulsbyConfig, adapted: Iterable[str]) -> bool:
    """Adds what the base checkpoint lacks to the configuration's modules to save, unless they are an empty list.

    Args:
        model: the base model.
        config: the configuration, changed in place.
        adapted: names of the modules that get a bottleneck.

    Returns:
        Whether there is anything.
    """
    if config.modules_to_save == []:
        return False
    adapted = list(adapted)
    heads = find_head(model, adapted)
    asked = modules_to_save(model, config)
    new = [key for key in find_new(model, heads, adapted) if key not in asked]
    if new and not config.was_trained_elsewhere:  # a file says itself what was trained
        logger.warning(
            "The base checkpoint has no weights for %s: they are new, are trained, and are saved with the adapter.",
            ", ".join(new),
        )
        heads += new
    if heads:
        config.modules_to_save = list(dict.fromkeys([*(config.modules_to_save or []), *heads]))
    return bool(heads)


def find_new_modules(model: nn.Module) -> list[str]:
    """Return the full names of the modules that the base checkpoint lacks: the task head and, if new, the pooler.

    Every method of fine-tuning has to train them.
    """
    heads = find_head(model, ())
    return heads + find_new(model, heads, ())


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
