"""Averages of adapters: one adapter whose weights are a linear combination of others'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from .config import HoulsbyConfig
from .layer import HoulsbyTunerLayer


def check_alike(model: nn.Module, configs: Mapping[str, HoulsbyConfig], adapters: Sequence[str]) -> None:
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
        for field in ("activation", "trainable_token_indices"):
            if getattr(configs[first], field) != getattr(configs[other], field):
                raise _unlike(first, other, f"{field} {getattr(configs[first], field)!r}, not the other's")
        for key, container in _containers(model):
            a, b = ({k: tuple(t.shape) for k, t in _tensors(container, name).items()} for name in (first, other))
            for tensor in a | b:
                if a.get(tensor) != b.get(tensor):
                    raise _unlike(first, other, f"{key} {tensor} has the shapes {a.get(tensor)} and {b.get(tensor)}")


def average(model: nn.Module, adapters: Sequence[str], weights: Sequence[float], adapter_name: str) -> None:
    """Set every tensor of an adapter, of its bottlenecks, norms and heads, to the weighted sum of other adapters'.

    Args:
        model: the base model with the adapters, which are alike.
        adapters: names of the adapters to sum.
        weights: their coefficients; any numbers, which need not sum to 1.
        adapter_name: the adapter to fill, of the same shapes.
    """
    with torch.no_grad():
        for _, container in _containers(model):
            sources = [_tensors(container, name) for name in adapters]
            if sources[0] and isinstance(container, nn.ModuleDict):
                like = next(container[adapters[0]].parameters())
                container[adapter_name].to(device=like.device, dtype=like.dtype)
            for key, target in _tensors(container, adapter_name).items():
                # Sums in half precision would lose more than the adapters differ by.
                terms = [weight * source[key].float() for weight, source in zip(weights, sources, strict=True)]
                target.copy_(sum(terms[1:], terms[0]) if target.is_floating_point() else sources[0][key])


def _containers(model: nn.Module) -> Iterator[tuple[str, nn.ModuleDict | nn.ParameterDict]]:
    """Where tuner layers and heads keep what adapters have, by adapter name; with the name of the layer."""
    for key, module in model.named_modules():
        if isinstance(module, (HoulsbyTunerLayer, AuxiliaryTrainingWrapper)):
            for name in module.adapter_layer_names:
                yield key, attrgetter(name)(module)


def _tensors(container: nn.ModuleDict | nn.ParameterDict, adapter_name: str) -> dict[str, torch.Tensor]:
    if adapter_name not in container:
        return {}
    value = container[adapter_name]
    return dict(value.state_dict()) if isinstance(value, nn.Module) else {"": value}


def _unlike(first: str, other: str, difference: str) -> ValueError:
    return ValueError(
        f"Adapters that are averaged must have the same shapes; {first!r} and {other!r} differ: {difference}. Train "
        "them with the same configuration, or activate both, one after the other: set_adapter([...])."
    )
