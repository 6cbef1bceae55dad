"""Combine adapters: a linear combination of their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from ..config import SHAPE_OPTIONS, HoulsbyConfig
from ..layer import HoulsbyLayer, HoulsbyLayerNorm, HoulsbyTunerLayer
from ..placement.places import View, find_places
from ..record import AdapterRecord, Place, fold_places
from ..registration import PREFIX


# Options that say where and how large bottlenecks are. Combined adapters may differ in these alone.
_OF_PLACES = {"r", "rank_pattern", "positions", "layers_to_transform", "layers_pattern", "share_layers"} | {
    "target_modules", "exclude_modules", "train_layer_norm", "invertible_reduction_factor"
}  # fmt: skip


def combine(
    tuner: Any, adapters: Sequence[str], weights: Sequence[float], adapter_name: str
) -> None:
    """Add an adapter that combines other adapters; see `HoulsbyModel.add_weighted_adapter`."""
    model: Any = tuner.model
    configs: list[Any] = [tuner.peft_config[name] for name in adapters]
    records = [tuner.records[name] for name in adapters]
    _check_alike(adapters, configs, records)
    base_norms = {
        f"{key}.{PREFIX}norm.{part}": weight
        for key, layer in _layers(model, HoulsbyLayerNorm)
        for part, weight in layer.base_layer.state_dict().items()
    }
    states = [base_norms | weights_of(model, name) for name in adapters]
    combined: dict[str, torch.Tensor] = {}
    for key in dict.fromkeys(chain(*states)):
        terms = [
            (state[key], weight)
            for state, weight in zip(states, weights, strict=True)
            if key in state
        ]
        first = combined[key] = terms[0][0]
        if (
            first.is_floating_point()
        ):  # counts, such as a batch norm's, stay those of the first adapter
            # In half precision, rounding errors of the sum can exceed the differences between the
            # adapters.
            wide = torch.promote_types(first.dtype, torch.float32)
            combined[key] = torch.stack([weight * tensor.to(wide) for tensor, weight in terms]).sum(
                dim=0
            )

    places = [
        places_of(model, config, record) for config, record in zip(configs, records, strict=True)
    ]
    union = {key: place for each in places for key, place in each.items()}
    bottlenecks = [{key for key, place in each.items() if place.is_bottleneck} for each in places]
    sizes = {
        key: len(combined[f"{key}.{PREFIX}adapter.down_proj.bias"])
        for key in set().union(*bottlenecks)
    }
    r = Counter(sizes.values()).most_common(1)[0][0]
    # One bottleneck cannot be shared if the places differ at which several are.
    sharing = {config.share_layers for config in configs}
    share_layers = (
        sharing.pop()
        if len(sharing) == 1 and all(each == bottlenecks[0] for each in bottlenecks)
        else 0
    )
    # The labels are those of the first adapter that has a head.
    first = next((number for number, record in enumerate(records) if record.heads), 0)
    heads = list(dict.fromkeys(head for record in records for head in record.heads))
    sized = {key: replace(union[key], r=size if size != r else None) for key, size in sizes.items()}
    view = View(model)
    config = configs[first].derived(
        replace(records[first], heads=heads),
        fold_places(
            ({**union, **sized}[key] for key in view.modules if key in union), view.encoder
        ),
        r=r,
        rank_pattern={},
        share_layers=share_layers,
    )
    add_derived(tuner, adapter_name, config, adapters[0], combined)


def compare_options(one: HoulsbyConfig, two: HoulsbyConfig, names: Iterable[str]) -> list[str]:
    """Return which of these options differ, in words."""
    pairs = ((name, getattr(one, name), getattr(two, name)) for name in names)
    return [
        f"{name} is {first!r} and {second!r}" for name, first, second in pairs if first != second
    ]


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
    """Add an adapter with given weights, in the precision of its source; on an error, leave nothing
    behind.
    """
    if adapter_name in tuner.peft_config:
        raise ValueError(
            f"adapter_name must be unused; the model has an adapter {adapter_name!r}. Delete it first."
        )
    own = tensors_of(tuner.model, source)
    is_cast = not any(weight.dtype in (torch.float16, torch.bfloat16) for weight in own.values())
    tuner.peft_config[adapter_name] = config
    try:
        tuner.inject_adapter(tuner.model, adapter_name)
        tuner._cast_adapter_dtype(adapter_name, autocast_adapter_dtype=is_cast)
        new = tensors_of(tuner.model, adapter_name)
        set_peft_model_state_dict(
            tuner.model, {key: weights[key] for key in new}, adapter_name=adapter_name
        )
    except Exception:
        if adapter_name in tuner.peft_config:  # PEFT may have removed it
            tuner.delete_adapter(adapter_name)
        raise


def tensors_of(model: nn.Module, adapter_name: str) -> dict[str, torch.Tensor]:
    # Without the embeddings, which would make PEFT ask the Hub whether their size has changed.
    return get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)  # type: ignore[no-any-return]


def weights_of(model: nn.Module, adapter_name: str) -> dict[str, torch.Tensor]:
    """Return an adapter's weights by their names in a file, a shared bottleneck at each of its
    places.
    """
    weights = tensors_of(model, adapter_name)
    for key, layer in _layers(model, HoulsbyLayer):
        if owner := layer.houlsby_owner.get(adapter_name):
            own = owner.houlsby_adapter[adapter_name].state_dict()
            weights |= {f"{key}.{PREFIX}adapter.{part}": weight for part, weight in own.items()}
    return weights


def _layers(model: nn.Module, kind: type[HoulsbyTunerLayer]) -> Iterator[tuple[str, Any]]:
    """Yield tuner layers with their names in the base model; another method may be around them."""
    for key, module in model.named_modules():
        if isinstance(module, kind):
            yield key.replace(".base_layer", ""), module


def _check_alike(
    names: Sequence[str], configs: Sequence[HoulsbyConfig], records: Sequence[AdapterRecord]
) -> None:
    """Check that adapters compute the same function of their weights, and number the same classes
    alike.
    """
    fields = [
        *(option for option in SHAPE_OPTIONS if option not in _OF_PLACES),
        "trainable_token_indices",
    ]
    labels = [record.id2label or {} if record.heads else {} for record in records]
    for number in range(1, len(names)):
        differences = compare_options(configs[0], configs[number], fields)
        if labels[0] != labels[number] and sorted(labels[0].values()) == sorted(
            labels[number].values()
        ):
            differences.append(f"the classes are {labels[0]} and {labels[number]}")
        if differences:
            raise ValueError(
                f"Only adapters with the same options can be combined; {names[0]!r} and {names[number]!r} differ: "
                f"{differences[0]}. Train them with the same configuration, or stack them with set_adapter([...])."
            )
