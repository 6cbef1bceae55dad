"""Combine adapters: a linear combination of their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from ..config import SHAPE_OPTIONS, HoulsbyConfig
from ..method.layer import HoulsbyLayer
from ..placement.places import find_places
from ..registration import PREFIX
from ..saved.record import AdapterRecord, Place
from .differences import find_differences


# Options that select places. Adapters with the same places may have come to them in other ways.
_SELECTING_PLACES = {
    "rank_pattern",
    "positions",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "train_layer_norm",
}


def combine(
    tuner: Any, adapters: Sequence[str], weights: Sequence[float], adapter_name: str
) -> None:
    """Add an adapter that combines equal ones; see `HoulsbyModel.add_weighted_adapter`."""
    unknown = [name for name in adapters if name not in tuner.records]
    if unknown or not adapters or len(adapters) != len(weights):
        raise ValueError(
            "adapters must be names of Houlsby adapters of the model, each with a coefficient in "
            f"weights; got {list(adapters)!r} and {len(weights):,} weights, of the adapters "
            f"{', '.join(tuner.records)}."
        )
    first = adapters[0]
    for name in adapters:
        difference = _find_difference(tuner, first, name)
        if difference is not None:
            raise ValueError(
                "Only adapters with equal options, places and sharing can be combined; "
                f"{first!r} and {name!r} differ: {difference}. Train them with the same "
                "configuration, or stack them with model.base_model.set_adapter([...])."
            )
    states = [weights_of(tuner.model, name) for name in adapters]
    combined = {key: _weighted_sum(states, weights, key) for key in states[0]}
    config = tuner.peft_config[first].derived(tuner.records[first])
    add_derived(tuner, adapter_name, config, first, combined)


def _find_difference(tuner: Any, one: str, two: str) -> str | None:
    """Return in words why two adapters cannot be combined; None if they can."""
    options = [option for option in SHAPE_OPTIONS if option not in _SELECTING_PLACES]
    options.append("trainable_token_indices")
    record, other_record = tuner.records[one], tuner.records[two]
    config, other_config = tuner.peft_config[one], tuner.peft_config[two]
    differences = find_differences(config, record, other_config, other_record, options)
    if differences:
        return differences[0]
    weights, other_weights = weights_of(tuner.model, one), weights_of(tuner.model, two)
    for key in (*weights, *other_weights):
        if key not in other_weights:
            return f"only {one!r} has {key}"
        if key not in weights:
            return f"only {two!r} has {key}"
        shape, other_shape = tuple(weights[key].shape), tuple(other_weights[key].shape)
        if shape != other_shape:
            return f"{key} has the shapes {shape} and {other_shape}"
    labels, other_labels = record.id2label or {}, other_record.id2label or {}
    if record.heads and _is_reordered(labels, other_labels):
        return f"the classes are {labels} and {other_labels}"
    return None


def _is_reordered(labels: Mapping[int, str], other_labels: Mapping[int, str]) -> bool:
    """Return whether the same classes have other numbers.

    A combination would mix the outputs of two classes, and call it one of them.
    """
    return labels != other_labels and sorted(labels.values()) == sorted(other_labels.values())


def _weighted_sum(
    states: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float], key: str
) -> torch.Tensor:
    """Return the sum of the adapters' tensors of one name, each times its coefficient.

    Counts, such as a batch norm's, are the first adapter's.
    """
    first = states[0][key]
    if not first.is_floating_point():
        return first
    # In half precision, rounding errors of the sum can exceed the differences between the adapters.
    wide = torch.promote_types(first.dtype, torch.float32)
    total = torch.zeros_like(first, dtype=wide)
    for state, weight in zip(states, weights, strict=True):
        total += weight * state[key].to(wide)
    return total


def places_of(model: nn.Module, config: HoulsbyConfig, record: AdapterRecord) -> dict[str, Place]:
    """Return an adapter's places as they are in this model, with their sizes."""
    return find_places(model, config.derived(record))


def add_derived(
    tuner: Any,
    adapter_name: str,
    config: HoulsbyConfig,
    source: str,
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Add an adapter with given weights, in the precision of its source.

    An error leaves nothing behind.
    """
    if adapter_name in tuner.peft_config:
        raise ValueError(
            f"adapter_name must be unused; the model has an adapter {adapter_name!r}. "
            "Delete it first."
        )
    dtypes = {weight.dtype for weight in tensors_of(tuner.model, source).values()}
    is_cast = dtypes.isdisjoint((torch.float16, torch.bfloat16))
    tuner.peft_config[adapter_name] = config
    with tuner.adding(adapter_name):
        tuner.inject_adapter(tuner.model, adapter_name)
        tuner._cast_adapter_dtype(adapter_name, autocast_adapter_dtype=is_cast)
        added = {key: weights[key] for key in tensors_of(tuner.model, adapter_name)}
        set_peft_model_state_dict(tuner.model, added, adapter_name=adapter_name)


def tensors_of(model: nn.Module, adapter_name: str) -> dict[str, torch.Tensor]:
    """Return an adapter's weights by their names in a file."""
    # PEFT would ask the Hub whether the size of the embeddings has changed.
    return get_peft_model_state_dict(  # type: ignore[no-any-return]
        model, adapter_name=adapter_name, save_embedding_layers=False
    )


def weights_of(model: nn.Module, adapter_name: str) -> dict[str, torch.Tensor]:
    """Return an adapter's weights by their names in a file, a shared bottleneck at each of its
    places.
    """
    weights = tensors_of(model, adapter_name)
    for key, layer in model.named_modules():
        if isinstance(layer, HoulsbyLayer) and adapter_name in layer.houlsby_owner:
            # Another method may be around the layer.
            start = f"{key.replace('.base_layer', '')}.{PREFIX}adapter"
            for name, weight in layer.module_of(adapter_name).state_dict().items():
                weights[f"{start}.{name}"] = weight
    return weights
