"""Average adapters: fill one adapter with a linear combination of the weights of others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from .checkpoints.weights import check_values
from .config import HoulsbyConfig
from .layer import HoulsbyTunerLayer


def check_alike(model: nn.Module, configs: Mapping[str, HoulsbyConfig], adapters: Sequence[str]) -> None:
    """Check that adapters can be averaged: equal shapes of bottlenecks, norms and heads, and the same activation.

    Args:
        model: Base model with the adapters.
        configs: Configurations of all Houlsby adapters of the model, by adapter name.
        adapters: Names of the adapters to average.

    Raises:
        ValueError: No adapter is given, one is unknown, or two differ. The message names the first difference.
    """
    if not adapters or any(name not in configs for name in adapters):
        raise ValueError(
            f"Only adapters of the model can be averaged, which are {', '.join(configs)}; got {list(adapters)}. Load "
            "the other adapters first."
        )
    first = adapters[0]
    for other in adapters[1:]:
        if difference := _find_difference(model, configs, first, other):
            raise ValueError(
                f"Adapters can only be averaged if they have the same shapes and options; {first!r} and {other!r} "
                f"differ: {difference}. Train them with the same configuration, or stack them with "
                "set_adapter([...])."
            )


def check_average(model: nn.Module, adapters: Sequence[str], weights: Sequence[float]) -> None:
    """Check that the weighted sums that `average` computes can be an adapter's weights, before one is added for them.

    Raises:
        ValueError: A coefficient or a sum is not finite.
    """
    if not all(isinstance(weight, (int, float)) and math.isfinite(weight) for weight in weights):
        raise ValueError(f"The coefficients of adapters must be finite numbers; got {list(weights)}. Use 1 / n each.")
    for module_name, container in _adapter_containers(model):
        for key, total in _sum_tensors(container, adapters, weights).items():
            like = _get_tensors(container, adapters[0])[key]
            check_values("The average of " + ", ".join(adapters), f"{module_name}.{key}", total, like)


def average(model: nn.Module, adapters: Sequence[str], weights: Sequence[float], adapter_name: str) -> None:
    """Set the bottlenecks, norms and heads of an adapter to the weighted sum of those of other adapters.

    Args:
        model: Base model with the adapters, which `check_alike` and `check_average` have accepted.
        adapters: Names of the adapters to sum.
        weights: One coefficient per adapter. They may be negative and need not sum to 1.
        adapter_name: Name of the adapter to fill. It has the same shapes and takes the dtypes and devices of the
            first adapter.
    """
    with torch.no_grad():
        for _, container in _adapter_containers(model):
            sums = _sum_tensors(container, adapters, weights)
            if sums and isinstance(container, nn.ModuleDict):
                like = next(container[adapters[0]].parameters())
                container[adapter_name].to(device=like.device, dtype=like.dtype)
            for key, target in _get_tensors(container, adapter_name).items():
                target.copy_(sums[key])


@torch.no_grad()
def _sum_tensors(
    container: nn.ModuleDict | nn.ParameterDict, adapters: Sequence[str], weights: Sequence[float]
) -> dict[str, torch.Tensor]:
    """Return the weighted sums of the adapters' tensors in a container, by name; of counts, the first adapter's."""
    sources = [_get_tensors(container, name) for name in adapters]
    sums = {}
    for key, first in sources[0].items():
        # In half precision, rounding errors of the sum can exceed the differences between the adapters.
        terms = [weight * source[key].float() for weight, source in zip(weights, sources, strict=True)]
        # Integer buffers of a head are counts, not weights.
        sums[key] = sum(terms[1:], terms[0]) if first.is_floating_point() else first
    return sums


def _find_difference(model: nn.Module, configs: Mapping[str, HoulsbyConfig], first: str, other: str) -> str | None:
    """Describe what prevents two adapters from being averaged, or return None."""
    for field in ("activation", "kind", "scaling", "invertible", "trainable_token_indices"):
        one, two = getattr(configs[first], field), getattr(configs[other], field)
        if one != two:
            return f"{field} is {one!r} and {two!r}"
    for module_name, container in _adapter_containers(model):
        one, two = (
            {key: tuple(tensor.shape) for key, tensor in _get_tensors(container, name).items()}
            for name in (first, other)
        )
        for key in one | two:
            if one.get(key) != two.get(key):
                return f"{module_name} {key} has the shapes {one.get(key)} and {two.get(key)}"
    return None


def _adapter_containers(model: nn.Module) -> Iterator[tuple[str, nn.ModuleDict | nn.ParameterDict]]:
    """Yield the dicts in which tuner layers and heads keep weights by adapter name, with the name of the module."""
    for module_name, module in model.named_modules():
        if isinstance(module, (HoulsbyTunerLayer, AuxiliaryTrainingWrapper)):
            for attribute in module.adapter_layer_names:
                yield module_name, attrgetter(attribute)(module)


def _get_tensors(container: nn.ModuleDict | nn.ParameterDict, adapter_name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter in a container, by name; a lone parameter has the name ""."""
    if adapter_name not in container:
        return {}
    value = container[adapter_name]
    return dict(value.state_dict()) if isinstance(value, nn.Module) else {"": value}
