"""Averages of adapters: one adapter whose weights are a linear combination of others'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from .config import HoulsbyConfig
from .tuner_layer import HoulsbyTunerLayer


def check_alike(model: nn.Module, configs: dict[str, HoulsbyConfig], adapters: Sequence[str]) -> None:
    """Check that adapters can be averaged: the same bottlenecks, norms and heads, with the same activation.

    Args:
        model: the base model with the adapters.
        configs: configurations of all adapters of the model.
        adapters: the ones to average.

    Raises:
        ValueError: there is none, one is unknown, or two differ; the message names a difference.
    """
    unknown = [name for name in adapters if name not in configs]
    if unknown or not adapters:
        raise ValueError(
            f"An average must be of adapters of the model, which are {', '.join(configs)}; got {list(adapters)}. Load "
            "the others first."
        )
    first = adapters[0]
    for other in adapters[1:]:
        if configs[first].activation != configs[other].activation:
            raise _unlike(first, other, f"activations {configs[first].activation!r}, {configs[other].activation!r}")
        for key, modules in _modules_by_adapter(model):
            shapes = [_shapes(modules[name]) if name in modules else {} for name in (first, other)]
            for tensor in shapes[0] | shapes[1]:
                pair = [shape.get(tensor, "none") for shape in shapes]
                if pair[0] != pair[1]:
                    raise _unlike(first, other, f"{key}.{tensor} has the shapes {pair[0]} and {pair[1]}")


def average(model: nn.Module, adapters: Sequence[str], weights: Sequence[float], adapter_name: str) -> None:
    """Set every tensor of an adapter, of its bottlenecks, norms and heads, to the weighted sum of other adapters'.

    Args:
        model: the base model with the adapters, which are alike.
        adapters: names of the adapters to sum.
        weights: their coefficients; any numbers, which need not sum to 1.
        adapter_name: the adapter to fill.
    """
    with torch.no_grad():
        for _, modules in _modules_by_adapter(model):
            if adapters[0] not in modules:
                continue
            like = next(modules[adapters[0]].parameters())
            modules[adapter_name].to(device=like.device, dtype=like.dtype)
            sources = [modules[name].state_dict() for name in adapters]
            for key, target in modules[adapter_name].state_dict().items():
                # Sums in half precision would lose more than the adapters differ by.
                terms = [weight * source[key].float() for weight, source in zip(weights, sources, strict=True)]
                target.copy_(sum(terms[1:], terms[0]) if target.is_floating_point() else sources[0][key])


def _modules_by_adapter(model: nn.Module) -> Iterator[tuple[str, nn.ModuleDict]]:
    """What adapters have at each place and in each head, by adapter name."""
    for key, module in model.named_modules():
        if isinstance(module, (HoulsbyTunerLayer, AuxiliaryTrainingWrapper)):
            for name in module.adapter_layer_names:
                container = getattr(module, name, None)
                if isinstance(container, nn.ModuleDict):
                    yield key, container


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}


def _unlike(first: str, other: str, difference: str) -> ValueError:
    return ValueError(
        f"Adapters that are averaged must have the same shapes; {first!r} and {other!r} differ: {difference}. Train "
        "them with the same configuration, or activate both, one after the other: set_adapter([...])."
    )
