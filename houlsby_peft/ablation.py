"""Remove the bottlenecks of some layers from an adapter: temporarily, to measure their effect, or permanently."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import index

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from .checkpoints.weights import FILE_PREFIX
from .config import HoulsbyConfig
from .errors import check_kind, shortened
from .layer import HoulsbyLayer, HoulsbyTunerLayer, base_modules, is_inside, layers_around
from .model import HoulsbyModel
from .placement.place import Place, fold_places
from .placement.places import find_norms, find_places


@contextmanager
def ablate(model: nn.Module, layers: Iterable[int], keep_norms: bool = True) -> Iterator[None]:
    """Bypass the trained bottlenecks of some layers inside a `with` block (Houlsby et al. 2019, section 3.6).

        with houlsby_peft.ablate(model, layers=range(0, 5)):
            scores = evaluate(model)

    Nothing is trained again and no weight changes. The layers are bypassed for all adapters of the model; task heads
    are kept. A bottleneck that is shared with other layers is bypassed in the given layers only. The model is restored
    when the block ends, also after an error. Do not enable or disable adapters inside the block.

    Args:
        model: Model with Houlsby adapters, no matter how they were added.
        layers: Indices of the layers, starting at 0. In an encoder-decoder model they refer to both stacks.
        keep_norms: Whether to keep the trained norms of these layers. If False, the base model's norms are used and
            the layers compute what they compute in the base model.

    Raises:
        ValueError: The model has no Houlsby adapter, or none of its adapters has a bottleneck in one of the layers.
    """
    if isinstance(model, PeftModel):
        model = model.get_base_model()
    elif isinstance(model, HoulsbyModel):
        model = model.model
    places = {
        key: place for config in _houlsby_configs(model).values() for key, place in find_places(model, config).items()
    }
    removed = _select_layers(places, _as_indices(layers))
    modules = [
        module
        for key, place in removed.items()
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


def prune(
    model: PeftModel, layers: Iterable[int], adapter_name: str, source: str = "default", keep_norms: bool = True
) -> None:
    """Add a copy of an adapter without the bottlenecks of some layers.

        houlsby_peft.prune(model, layers=range(0, 5), adapter_name="small")
        model.save_pretrained("out", selected_adapters=["small"])  # PeftModel.from_pretrained loads out/small

    The new adapter computes what the source computes inside `ablate` with the same arguments, with fewer weights and
    in less time. It is not activated.

    Args:
        model: Model with the adapter.
        layers: Indices of the layers, starting at 0. In an encoder-decoder model they refer to both stacks.
        adapter_name: Name of the new adapter.
        source: Name of the adapter to copy.
        keep_norms: Whether to keep the trained norms of these layers. If True, the new adapter holds all norms of the
            model, including those that the source did not train; they are small.

    Raises:
        ValueError: `adapter_name` is taken, `source` is not a Houlsby adapter of the model, the source has no
            bottleneck in one of the layers, or no bottleneck would remain.
    """
    check_kind("model", model, PeftModel, "a PeftModel, which peft.get_peft_model returns")
    base, layers = model.get_base_model(), _as_indices(layers)
    configs = _houlsby_configs(base)
    if adapter_name in model.peft_config or source not in configs:
        raise ValueError(
            f"prune copies one of the model's Houlsby adapters, which are {', '.join(configs)}, to a new name; got "
            f"the source {source!r} and the new name {adapter_name!r}. Choose an existing source and an unused name."
        )
    config = configs[source]
    places = find_places(base, config)
    removed = _select_layers(places, layers)
    remaining = _adapted_layers(places) - layers
    outside = [key for key, place in places.items() if place.is_bottleneck and place.layer is None]
    if not remaining or outside:
        raise ValueError(
            "A pruned adapter needs at least one bottleneck, and all of them in layers; without the layers "
            f"{sorted(layers)}, {source!r} has {', '.join(outside) or 'none'}. Remove fewer layers."
        )
    norms = "all" if keep_norms and config.train_layer_norm else config.train_layer_norm
    kept = {key: place for key, place in places.items() if key not in removed or (place.is_norm and keep_norms)}
    if norms == "all":
        # The norms that the settings tell of, from which places are found in another class of this architecture.
        bottlenecks = {key: place for key, place in kept.items() if place.is_bottleneck}
        every = replace(config, train_layer_norm=norms)
        kept |= {place.key: place for place in find_norms(base, dict(base_modules(base)), every, bottlenecks)}
    changes = {"layers_to_transform": sorted(remaining), "train_layer_norm": norms}
    record = vars(base)["houlsby_records"][source]
    weights = get_peft_model_state_dict(model, adapter_name=source, save_embedding_layers=False)
    # On a base model in half precision, the copy is in float32 only if the source is.
    is_cast = not any(weight.dtype in (torch.float16, torch.bfloat16) for weight in weights.values())
    pruned = config.derived(record, fold_places(kept.values()), **changes)
    model.add_adapter(adapter_name, pruned, autocast_adapter_dtype=is_cast)
    try:
        _copy_weights(model, source, adapter_name, leave_out=() if keep_norms else removed)
    except Exception:
        model.delete_adapter(adapter_name)
        raise


def _copy_weights(model: PeftModel, source: str, adapter_name: str, leave_out: Collection[str]) -> None:
    """Fill an adapter with the weights of another one, except what is inside some modules."""
    weights = get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
    for key, weight in get_peft_model_state_dict(model, adapter_name=source, save_embedding_layers=False).items():
        name = key.removeprefix(FILE_PREFIX)
        if key in weights and not any(is_inside(name, module) for module in leave_out):
            weights[key] = weight
    set_peft_model_state_dict(model, weights, adapter_name=adapter_name)
    # A shared bottleneck may have another owner now, and thus another key in the state dict.
    for module in model.modules():
        if isinstance(module, HoulsbyLayer) and adapter_name in module.houlsby_adapter:
            module.houlsby_adapter[adapter_name].load_state_dict(module.bottleneck(source).state_dict())  # type: ignore[union-attr]


def _houlsby_configs(base: nn.Module) -> dict[str, HoulsbyConfig]:
    """Return the configurations of the Houlsby adapters of a model, which may have adapters of other methods too.

    With them, the adapters' places are found where they are in this model.
    """
    configs = getattr(base, "peft_config", {})
    return {
        name: config.derived(vars(base)["houlsby_records"][name])
        for name, config in configs.items()
        if isinstance(config, HoulsbyConfig)
    }


def _as_indices(layers: Iterable[int]) -> set[int]:
    try:
        return set(map(index, layers))
    except TypeError:
        raise TypeError(f"layers must be indices of layers, such as [0, 1]; got {shortened(repr(layers))}.") from None


def _adapted_layers(places: dict[str, Place]) -> set[int]:
    return {place.layer for place in places.values() if place.layer is not None and place.is_bottleneck}


def _select_layers(places: dict[str, Place], layers: set[int]) -> dict[str, Place]:
    """Return the places in the given layers.

    Raises:
        ValueError: One of the layers has no bottleneck.
    """
    adapted = _adapted_layers(places)
    if not layers <= adapted:
        raise ValueError(
            "Bottlenecks can only be removed from layers that have a Houlsby adapter, here "
            f"{sorted(adapted) or 'none'}; got {sorted(layers)}."
        )
    return {key: place for key, place in places.items() if place.layer in layers}
