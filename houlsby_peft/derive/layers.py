"""Adapters without the bottlenecks of some layers: in a `with` block, and as a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from ..layer import HoulsbyTunerLayer, state_of
from ..modules import layers_around
from ..placement.places import View
from ..record import Place, fold_places
from .combine import add_derived, places_of, weights_of


@contextmanager
def ablate(model: nn.Module, layers: Iterable[int], keep_norms: bool = True) -> Iterator[None]:
    """Bypass the trained bottlenecks of some layers inside a `with` block (Houlsby et al. 2019,
    section 3.6).

        with houlsby_peft.ablate(model, layers=range(0, 5)):
            scores = evaluate(model)

    Nothing is trained again and no weight changes. The layers are bypassed for all adapters of the
    model; task heads are kept. A bottleneck that is shared with other layers is bypassed in the
    given layers only. The model is restored when the block ends, also after an error. Do not enable
    or disable adapters inside the block.

    Args:
        model: Model with Houlsby adapters, no matter how they were added.
        layers: Indices of the layers, starting at 0. In an encoder-decoder model they refer to both stacks.
        keep_norms: Whether to keep the trained norms of these layers. If False, the base model's
            norms are used and the layers compute what they compute in the base model.

    Raises:
        ValueError: The model has no Houlsby adapter, or none of its adapters has a bottleneck in
            one of the layers.
    """
    model, places = _find_all_places(model)
    modules = [
        module
        for key, place in _select_layers(places, set(layers)).items()
        if not (place.is_norm and keep_norms)
        for module in layers_around(model.get_submodule(key))
        if isinstance(module, HoulsbyTunerLayer)
    ]
    before = [module._disable_adapters for module in modules]
    try:
        for module in modules:
            # enable_adapters(False) would also freeze the weights and disable the head.
            module._disable_adapters = True
        yield
    finally:
        for module, disabled in zip(modules, before, strict=True):
            module._disable_adapters = disabled


def find_adapted_layers(model: nn.Module) -> list[int]:
    """Return the indices of the layers with a bottleneck, in ascending order."""
    places = _find_all_places(model)[1].values()
    return sorted(
        {place.layer for place in places if place.layer is not None and place.is_bottleneck}
    )


def prune(
    model: PeftModel,
    layers: Iterable[int],
    adapter_name: str,
    source: str = "default",
    keep_norms: bool = True,
) -> None:
    """Add a copy of an adapter without the bottlenecks of some layers.

        houlsby_peft.prune(model, layers=range(0, 5), adapter_name="small")
        model.save_pretrained("out", selected_adapters=["small"])  # PeftModel.from_pretrained loads
        out/small

    The new adapter computes what the source computes inside `ablate` with the same arguments, with
    fewer weights and in less time. It is not activated.

    Args:
        model: Model with the adapter.
        layers: Indices of the layers, starting at 0. In an encoder-decoder model they refer to both stacks.
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
    layers, places = set(layers), places_of(tuner.model, config, tuner.records[source])
    removed = _select_layers(places, layers)
    kept = {
        key: place
        for key, place in places.items()
        if key not in removed or (place.is_norm and keep_norms)
    }
    remaining = {
        place.layer for place in kept.values() if place.is_bottleneck and place.layer is not None
    }
    pruned = config.derived(
        tuner.records[source],
        fold_places(kept.values(), View(tuner.model).encoder),
        layers_to_transform=sorted(remaining),
    )
    add_derived(tuner, adapter_name, pruned, source, weights_of(tuner.model, source))


def _find_all_places(model: nn.Module) -> tuple[nn.Module, dict[str, Place]]:
    """Return the base model and the places of all of its adapters, no matter how they were added."""
    if isinstance(model, PeftModel):
        model = model.get_base_model()
    elif isinstance(model, BaseTuner):
        model = model.model
    configs = getattr(model, "peft_config", {})
    places: dict[str, Place] = {}
    for name, record in state_of(model).records.items():
        places |= places_of(model, configs[name], record)
    return model, places


def _select_layers(places: Mapping[str, Place], layers: set[int]) -> dict[str, Place]:
    """Return the places in the given layers, each of which must have a bottleneck."""
    adapted = {
        place.layer for place in places.values() if place.layer is not None and place.is_bottleneck
    }
    if not layers <= adapted:
        raise ValueError(
            "Bottlenecks can only be removed from layers that have a Houlsby adapter, here "
            f"{sorted(adapted) or 'none'}; got {sorted(layers)}."
        )
    return {key: place for key, place in places.items() if place.layer in layers}
