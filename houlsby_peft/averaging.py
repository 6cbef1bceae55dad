"""Combine adapters: fill one with a linear combination of others' weights, or with their bottlenecks side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers.activations import ACT2FN

from .bottleneck import Bottleneck
from .checkpoints.weights import check_values
from .config import HoulsbyConfig
from .layer import HoulsbyLayer, HoulsbyTunerLayer


def check_alike(model: nn.Module, configs: Mapping[str, HoulsbyConfig], adapters: Sequence[str]) -> None:
    """Check that adapters can be averaged: equal shapes of bottlenecks, norms and heads, and the same activation.

    Args:
        model: Base model with the adapters.
        configs: Configurations of all Houlsby adapters of the model, by adapter name.
        adapters: Names of the adapters to average.

    Raises:
        ValueError: No adapter is given, one is unknown, or two differ. The message names the first difference.
    """
    _check_known(configs, adapters)
    _check_at_hand(model, adapters)
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
    _check_finite(weights)
    _check_sums(_adapter_containers(model), adapters, weights)


def _check_sums(
    containers: Iterable[tuple[str, nn.ModuleDict | nn.ParameterDict]],
    adapters: Sequence[str],
    weights: Sequence[float],
) -> None:
    for module_name, container in containers:
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
            _fill(container, adapters, weights, adapter_name)


def _fill(
    container: nn.ModuleDict | nn.ParameterDict, adapters: Sequence[str], weights: Sequence[float], adapter_name: str
) -> None:
    sums = _sum_tensors(container, adapters, weights)
    if sums and isinstance(container, nn.ModuleDict):
        like = next(container[adapters[0]].parameters())
        container[adapter_name].to(device=like.device, dtype=like.dtype)
    for key, target in _get_tensors(container, adapter_name).items():
        target.copy_(sums[key])


def find_joined_options(
    model: nn.Module, configs: Mapping[str, HoulsbyConfig], adapters: Sequence[str], weights: Sequence[float]
) -> dict[str, Any]:
    """Check that the bottlenecks of adapters can be joined, and return what changes in the configuration.

    Args:
        model: Base model with the adapters.
        configs: Configurations of all Houlsby adapters of the model, by adapter name.
        adapters: Names of the adapters to join.
        weights: One coefficient per adapter.

    Returns:
        The bottleneck size and what follows from it. If the adapters share bottlenecks in different ways, the joined
        one shares none.

    Raises:
        ValueError: No adapter is given, one is unknown, two differ in more than the sizes and the sharing of their
            bottlenecks, or a joined weight is not finite. The message names the first difference.
    """
    _check_known(configs, adapters)
    _check_at_hand(model, adapters)
    _check_finite(weights)
    first = adapters[0]
    if configs[first].invertible:
        raise ValueError(
            "The bottlenecks of adapters can be joined, their invertible modules cannot, because the second network "
            f"of one reads what the first has changed; {first!r} has invertible={configs[first].invertible!r}. Use "
            "combination_type='linear'."
        )
    if list(ACT2FN[configs[first].activation].parameters()):
        raise ValueError(
            "The bottlenecks of adapters can be joined only if their activation has no weights of its own; "
            f"{first!r} has activation={configs[first].activation!r}. Use combination_type='linear'."
        )
    for other in adapters[1:]:
        if difference := _find_obstacle(model, configs, first, other):
            raise ValueError(
                "The bottlenecks of adapters can only be joined if they compute the same but for their sizes; "
                f"{first!r} and {other!r} differ: {difference}. Stack them with set_adapter([...]), or train them "
                "with the same configuration."
            )
    if any(_mean_containers(model, first)):
        # 0.3 - 0.1 - 0.2 is not exactly 0.
        if abs(math.fsum(weights)) <= 1e-9 * max(map(abs, weights)):
            raise ValueError(
                "Norms and heads of joined adapters are weighted means, so the coefficients must not sum to 0; got "
                f"{list(weights)}."
            )
        _check_sums(_mean_containers(model, first), adapters, _normalize(weights))
    sizes = {}
    for key, layer in _layers_with(model, first):
        parts = [layer.bottleneck(name) for name in adapters]
        sizes[key] = sum(part.down_proj.out_features for part in parts if part is not None)
        like = next(part.down_proj.weight for part in parts if part is not None)
        for name, tensor in _join(parts, weights, configs[first]).items():
            check_values("The joined adapter of " + ", ".join(adapters), f"{key}.{name}", tensor, like)
    r = Counter(sizes.values()).most_common(1)[0][0]
    sharing = {configs[name].share_layers for name in adapters}
    share_layers = sharing.pop() if len(sharing) == 1 else 0
    return {
        "r": r,
        "share_layers": share_layers,
        "rank_pattern": {key: size for key, size in sizes.items() if size != r},
    }


@torch.no_grad()
def join(
    model: nn.Module,
    config: HoulsbyConfig,
    adapters: Sequence[str],
    weights: Sequence[float],
    adapter_name: str,
) -> None:
    """Set the bottlenecks of an adapter to those of others side by side, and its norms and heads to weighted means.

    For the same input, each bottleneck then adds exactly the weighted sum of what the others add:
    `sum(w * up(act(down(h)))) = [w1 up1, w2 up2, ...] act([down1; down2; ...] h)`.

    Args:
        model: Base model with the adapters, which `find_joined_options` has accepted.
        config: Configuration of the first of them.
        adapters: Names of the adapters to join.
        weights: One coefficient per adapter.
        adapter_name: Name of the adapter to fill.
    """
    for _, layer in _layers_with(model, adapter_name):
        if adapter_name in layer.houlsby_adapter:
            parts = [layer.bottleneck(name) for name in adapters]
            target = layer.houlsby_adapter[adapter_name]
            like = parts[0].down_proj.weight  # type: ignore[union-attr]
            target.to(device=like.device, dtype=like.dtype)
            target.load_state_dict(_join(parts, weights, config))
    for _, container in _mean_containers(model, adapter_name):
        _fill(container, adapters, _normalize(weights), adapter_name)


def _normalize(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _join(
    parts: Sequence[Bottleneck | None], weights: Sequence[float], config: HoulsbyConfig
) -> dict[str, torch.Tensor]:
    """Return the weights of a bottleneck whose branch is the weighted sum of the branches of others."""
    downs, ups, biases, shift = [], [], [], 0.0
    for part, weight in zip(parts, weights, strict=True):
        assert part is not None
        # What the joined bottleneck's own factor does not do. A factor per channel scales the rows.
        factor: Any = weight * part.scaling / (config.scaling if isinstance(config.scaling, (int, float)) else 1)
        factor = _widen(factor) if isinstance(factor, torch.Tensor) else factor
        downs.append(part.down_proj.weight.data)
        biases.append(part.down_proj.bias.data)
        ups.append(_widen(part.up_proj.weight) * (factor[:, None] if isinstance(factor, torch.Tensor) else factor))
        shift = shift + _widen(part.up_proj.bias) * factor
    joined = {
        "down_proj.weight": torch.cat(downs),
        "down_proj.bias": torch.cat(biases),
        "up_proj.weight": torch.cat(ups, dim=1),
        "up_proj.bias": shift,
    }
    own = parts[0].scaling if parts[0] is not None else None
    return joined | ({"scaling": torch.ones_like(own)} if isinstance(own, nn.Parameter) else {})  # type: ignore[return-value]


@torch.no_grad()
def _sum_tensors(
    container: nn.ModuleDict | nn.ParameterDict, adapters: Sequence[str], weights: Sequence[float]
) -> dict[str, torch.Tensor]:
    """Return the weighted sums of the adapters' tensors in a container, by name; of counts, the first adapter's."""
    sources = [_get_tensors(container, name) for name in adapters]
    sums = {}
    for key, first in sources[0].items():
        # In half precision, rounding errors of the sum can exceed the differences between the adapters.
        terms = [weight * _widen(source[key]) for weight, source in zip(weights, sources, strict=True)]
        # Integer buffers of a head are counts, not weights.
        sums[key] = sum(terms[1:], terms[0]) if first.is_floating_point() else first
    return sums


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _find_obstacle(model: nn.Module, configs: Mapping[str, HoulsbyConfig], first: str, other: str) -> str | None:
    """Describe what prevents the bottlenecks of two adapters from being joined, or return None."""
    for field in ("activation", "kind", "scaling", "invertible", "trainable_token_indices"):
        one, two = getattr(configs[first], field), getattr(configs[other], field)
        # A number is folded into the weights.
        if one != two and not (field == "scaling" and not isinstance(one, str) and not isinstance(two, str)):
            return f"{field} is {one!r} and {two!r}"
    places = [dict(_layers_with(model, name)) for name in (first, other)]
    if unlike := sorted(places[0].keys() ^ places[1].keys()):
        return f"only one has a bottleneck at {unlike[0]}"
    for key, layer in places[0].items():
        if not all(type(layer.bottleneck(name)) is Bottleneck for name in (first, other)):
            return f"the one at {key} is not a plain bottleneck"
    shapes = [
        {
            f"{module_name} {key}": tuple(tensor.shape)
            for module_name, container in _mean_containers(model)
            for key, tensor in _get_tensors(container, name).items()
        }
        for name in (first, other)
    ]
    return _compare_shapes(*shapes) or _compare_labels(model, first, other)


def _find_difference(model: nn.Module, configs: Mapping[str, HoulsbyConfig], first: str, other: str) -> str | None:
    """Describe what prevents two adapters from being averaged, or return None."""
    for field in ("activation", "kind", "scaling", "invertible", "trainable_token_indices"):
        one, two = getattr(configs[first], field), getattr(configs[other], field)
        if one != two:
            return f"{field} is {one!r} and {two!r}"
    shapes = [
        {
            f"{module_name} {key}": tuple(tensor.shape)
            for module_name, container in _adapter_containers(model)
            for key, tensor in _get_tensors(container, name).items()
        }
        for name in (first, other)
    ]
    return _compare_shapes(*shapes) or _compare_owners(model, first, other) or _compare_labels(model, first, other)


def _compare_labels(model: nn.Module, first: str, other: str) -> str | None:
    """Describe how two heads number the same classes differently, or return None. They may be of different tasks."""
    records = [vars(model)["houlsby_records"][name] for name in (first, other)]
    one, two = (record.id2label or {} if record.heads else {} for record in records)
    is_unlike = one != two and sorted(one.values()) == sorted(two.values())
    return f"the classes are {one} and {two}" if is_unlike else None


def _compare_owners(model: nn.Module, first: str, other: str) -> str | None:
    """Describe where only one of two adapters applies a shared bottleneck, or where they share different ones."""
    names = {module: key for key, module in model.named_modules()}
    one, two = (
        {key: names[layer.houlsby_owner.get(name, layer)] for key, layer in _layers_with(model, name)}
        for name in (first, other)
    )
    return next(
        (
            f"at {key} is the bottleneck of {one.get(key, 'none')} and of {two.get(key, 'none')}"
            for key in {**one, **two}
            if one.get(key) != two.get(key)
        ),
        None,
    )


def _compare_shapes(one: Mapping[str, tuple[int, ...]], two: Mapping[str, tuple[int, ...]]) -> str | None:
    return next(
        (
            f"{key} has the shapes {one.get(key)} and {two.get(key)}"
            for key in {**one, **two}
            if one.get(key) != two.get(key)
        ),
        None,
    )


def _layers_with(model: nn.Module, adapter_name: str) -> Iterator[tuple[str, HoulsbyLayer]]:
    """Yield the layers in which an adapter has a bottleneck, owned or shared, with their names."""
    for key, module in model.named_modules():
        if isinstance(module, HoulsbyLayer) and module.bottleneck(adapter_name) is not None:
            yield key, module


def _mean_containers(
    model: nn.Module, adapter_name: str | None = None
) -> Iterator[tuple[str, nn.ModuleDict | nn.ParameterDict]]:
    """Yield the containers of norms and heads, of all adapters or of one."""
    for module_name, module in model.named_modules():
        if isinstance(module, (HoulsbyTunerLayer, AuxiliaryTrainingWrapper)) and not isinstance(module, HoulsbyLayer):
            for attribute in module.adapter_layer_names:
                container = attrgetter(attribute)(module)
                if adapter_name is None or adapter_name in container:
                    yield module_name, container


def _check_known(configs: Mapping[str, HoulsbyConfig], adapters: Sequence[str]) -> None:
    if not adapters or any(name not in configs for name in adapters):
        raise ValueError(
            f"Only adapters of the model can be combined, which are {', '.join(configs)}; got {list(adapters)}. Load "
            "the other adapters first."
        )


def _check_at_hand(model: nn.Module, adapters: Sequence[str]) -> None:
    """Refuse weights that are elsewhere, which would be summed to nothing, or not plain tensors."""
    for module_name, container in _adapter_containers(model):
        for name in adapters:
            for key, tensor in _get_tensors(container, name).items():
                if not isinstance(tensor, torch.Tensor) or tensor.is_meta or not tensor.numel():
                    raise ValueError(
                        "Only adapters whose weights are in memory, whole and not quantized can be combined; those of "
                        f"{name!r} are not, such as {key or 'the tokens'} of {module_name}. Combine the adapters "
                        "before the model is offloaded, sharded or quantized."
                    )


def _check_finite(weights: Sequence[float]) -> None:
    if not all(isinstance(weight, (int, float)) and math.isfinite(weight) for weight in weights):
        raise ValueError(f"The coefficients of adapters must be finite numbers; got {list(weights)}. Use 1 / n each.")


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
