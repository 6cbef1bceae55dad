"""Adapters without the bottlenecks of some layers: in a `with` block, and as a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from peft import PeftModel
from torch import nn

from ..method.modules import base_model_of, layers_around
from ..method.tuner_layer import HoulsbyTunerLayer, state_of
from ..placement.view import View
from ..saved.record import Place, fold_places
from .combine import add_derived, places_of, weights_of


@contextmanager
def ablate(model: nn.Module, layers: Iterable[int], keep_norms: bool = True) -> Iterator[None]:
    """Bypass the trained bottlenecks of some layers inside a `with` block (Houlsby et al. 2019,
    section 3.6).

        with houlsby_peft.ablate(model, layers=range(0, 5)):
            scores = evaluate(model)

    Nothing is trained again and no weight changes. The layers are bypassed for all adapters of the
    model; task heads are kept. A bottleneck that other layers share is bypassed in the given layers
    only. The model is restored when the block ends, also after an error. Do not enable or disable
    adapters inside the block.

    Args:
        model: Model with Houlsby adapters, no matter how they were added.
        layers: Indices of the layers, starting at 0. In an encoder-decoder model they refer to both
            stacks.
        keep_norms: Whether to keep the trained norms of these layers. If False, the layers compute
            what they compute in the base model.

    Raises:
        ValueError: The model has no Houlsby adapter, or none of its adapters has a bottleneck in
            one of the layers.
    """
    base = base_model_of(model)
    bypassed: list[tuple[HoulsbyTunerLayer, bool]] = []
    for key, place in _select_layers(_find_all_places(base), set(layers)).items():
        if place.is_norm and keep_norms:
            continue
        for module in layers_around(base.get_submodule(key)):
            if isinstance(module, HoulsbyTunerLayer):
                bypassed.append((module, module._disable_adapters))
    try:
        for module, _ in bypassed:
            # enable_adapters(False) would also freeze the weights and disable the head.
            module._disable_adapters = True
        yield
    finally:
        for module, was_disabled in bypassed:
            module._disable_adapters = was_disabled


def find_adapted_layers(model: nn.Module) -> list[int]:
    """Return the indices of the layers with a bottleneck, in ascending order."""
    return sorted(_layers_with_bottleneck(_find_all_places(base_model_of(model))))


def prune(
    model: PeftModel,
    layers: Iterable[int],
    adapter_name: str,
    source: str = "default",
    keep_norms: bool = True,
) -> None:
    """Add a copy of an adapter without the bottlenecks of some layers.

        houlsby_peft.prune(model, layers=range(0, 5), adapter_name="small")
        model.save_pretrained("out", selected_adapters=["small"])

    `PeftModel.from_pretrained` then loads out/small. The new adapter computes what the source
    computes inside `ablate` with the same arguments, with fewer weights and in less time. It is not
    activated.

    Args:
        model: Model with the adapter.
        layers: Indices of the layers, starting at 0. In an encoder-decoder model they refer to both
            stacks.
        adapter_name: Name of the new adapter.
        source: Name of the adapter to copy.
        keep_norms: Whether to keep the trained norms of these layers.

    Raises:
        ValueError: `adapter_name` is taken, the source has no bottleneck in one of the layers, or
            no bottleneck would remain.
        KeyError: The model has no adapter `source`.
    """
    tuner: Any = model.base_model
    config = tuner.peft_config[source]
    record = tuner.records[source]
    layers = set(layers)
    remaining = places_of(tuner.model, config, record)
    for key, place in _select_layers(remaining, layers).items():
        if not (place.is_norm and keep_norms):
            del remaining[key]
    left = sorted(_layers_with_bottleneck(remaining))
    if not left:
        raise ValueError(
            f"A copy needs a bottleneck in some layer; without {sorted(layers)} it would have "
            "none. To run the base model, disable the adapter."
        )
    places = fold_places(remaining.values(), View(tuner.model).encoder)
    pruned = config.derived(replace(record, places=places), layers_to_transform=left)
    add_derived(tuner, adapter_name, pruned, source, weights_of(tuner.model, source))


def _find_all_places(base: nn.Module) -> dict[str, Place]:
    """Return the places of all Houlsby adapters of a base model."""
    places: dict[str, Place] = {}
    configs = getattr(base, "peft_config", {})
    for name, record in state_of(base).records.items():
        places |= places_of(base, configs[name], record)
    return places


def _layers_with_bottleneck(places: Mapping[str, Place]) -> set[int]:
    """Return the indices of the layers in which there is a bottleneck."""
    layers = set()
    for place in places.values():
        if place.layer is not None and place.is_bottleneck:
            layers.add(place.layer)
    return layers


def _select_layers(places: Mapping[str, Place], layers: set[int]) -> dict[str, Place]:
    """Return the places in the given layers, each of which must have a bottleneck."""
    adapted = _layers_with_bottleneck(places)
    if not layers <= adapted:
        raise ValueError(
            "Bottlenecks can only be removed from layers that have a Houlsby adapter, here "
            f"{sorted(adapted) or 'none'}; got {sorted(layers)}."
        )
    return {key: place for key, place in places.items() if place.layer in layers}
