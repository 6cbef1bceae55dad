"""An adapter without the bottlenecks of some layers: within a block, to see what they matter, or for good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from .checkpoints.weights import FILE_PREFIX
from .config import HoulsbyConfig
from .layer import HoulsbyLayer, HoulsbyTunerLayer
from .model import HoulsbyModel
from .placement.places import Place, find_places


@contextmanager
def ablate(model: nn.Module, layers: Iterable[int], keep_norms: bool = True) -> Iterator[None]:
    """Bypass the trained bottlenecks of some layers within a `with` block (Houlsby et al. 2019, section 3.6).

        with houlsby_peft.ablate(model, layers=range(0, 5)):
            scores = evaluate(model)

    Nothing is trained again and no weight is touched. All adapters of the model lose these layers; the heads stay. A
    bottleneck that is shared with other layers is bypassed in the given ones only. After the block, also after an
    error in it, everything is as before. Adapters must not be enabled or disabled as a whole inside the block.

    Args:
        model: a model with Houlsby adapters, however they were added.
        layers: indices, counted from 0; of every stack, in models with an encoder and a decoder.
        keep_norms: whether the trained norms of these layers stay. If not, the base model's norms are used there, and
            the layers compute what the base model's layers do.

    Raises:
        ValueError: the model has no Houlsby adapter, or none in one of the layers.
    """
    base = _base_model(model)
    removed = _in_layers(_places(base, *_configs(base).values()), set(layers))
    modules = [
        module
        for key, place in removed.items()
        if not (place.is_norm and keep_norms) and isinstance(module := base.get_submodule(key), HoulsbyTunerLayer)
    ]
    before = [module._disable_adapters for module in modules]
    try:
        for module in modules:
            # Not enable_adapters(), which would also freeze weights and disable the head.
            module._disable_adapters = True
        yield
    finally:
        for module, disabled in zip(modules, before, strict=True):
            module._disable_adapters = disabled


def prune(
    model: PeftModel, layers: Iterable[int], adapter_name: str, source: str = "default", keep_norms: bool = True
) -> None:
    """Add an adapter that is another one without the bottlenecks of some layers.

        houlsby_peft.prune(model, layers=range(0, 5), adapter_name="small")
        model.save_pretrained("out", selected_adapters=["small"])  # out/small, which PeftModel.from_pretrained loads

    It computes what the other one does inside `ablate` with the same arguments, with fewer weights and in less time.
    It is not active yet.

    Args:
        model: the model with the adapter.
        layers: indices, counted from 0; of every stack, in models with an encoder and a decoder.
        adapter_name: name of the new adapter.
        source: name of the adapter to take the weights from.
        keep_norms: whether the trained norms of these layers stay. The new adapter then has all norms of the model,
            also those that were not trained; they are small.

    Raises:
        ValueError: a name is taken or unknown, the adapter has nothing in one of the layers, or nothing elsewhere.
    """
    base, layers = model.get_base_model(), set(layers)
    configs = _configs(base)
    if adapter_name in model.peft_config or source not in configs:
        raise ValueError(
            f"prune makes a new adapter from a Houlsby adapter of the model, which are {', '.join(configs)}; got the "
            f"new name {adapter_name!r} and the source {source!r}."
        )
    config = configs[source]
    places = _places(base, config)
    removed = _in_layers(places, layers)
    kept = _adapted_layers(places) - layers
    outside = [key for key, place in places.items() if not place.is_norm and place.layer is None]
    if not kept or outside:
        raise ValueError(
            f"A pruned adapter must have its bottlenecks in layers, and in one at least; without {sorted(layers)}, "
            f"{source!r} has {', '.join(outside) or 'none'}. Remove fewer layers."
        )
    pruned = config.derived(layers_to_transform=sorted(kept))
    if keep_norms and config.train_layer_norm:
        pruned.train_layer_norm = "all"
    model.add_adapter(adapter_name, pruned)
    _copy(model, source, adapter_name, leave_out=() if keep_norms else tuple(removed))


def _copy(model: PeftModel, source: str, target: str, leave_out: tuple[str, ...]) -> None:
    """Give an adapter the weights that another one has for the same modules, but for those named in `leave_out`."""
    weights = get_peft_model_state_dict(model, adapter_name=target)
    for key, weight in get_peft_model_state_dict(model, adapter_name=source).items():
        if key in weights and not key.startswith(tuple(f"{FILE_PREFIX}{name}." for name in leave_out)):
            weights[key] = weight
    set_peft_model_state_dict(model, weights, adapter_name=target)
    # The owner of a shared bottleneck may be another one now, and its key with it.
    for layer in model.modules():
        if isinstance(layer, HoulsbyLayer) and (bottleneck := layer.bottleneck(target)) is not None:
            bottleneck.load_state_dict(layer.bottleneck(source).state_dict())  # type: ignore[union-attr]


def _base_model(model: nn.Module) -> nn.Module:
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model.model if isinstance(model, HoulsbyModel) else model


def _configs(base: nn.Module) -> dict[str, HoulsbyConfig]:
    configs = getattr(base, "peft_config", {})
    return {name: config for name, config in configs.items() if isinstance(config, HoulsbyConfig)}


def _places(base: nn.Module, *configs: HoulsbyConfig) -> dict[str, Place]:
    return {key: place for config in configs for key, place in find_places(base, config).items()}


def _adapted_layers(places: dict[str, Place]) -> set[int]:
    return {place.layer for place in places.values() if place.layer is not None and not place.is_norm}


def _in_layers(places: dict[str, Place], layers: set[int]) -> dict[str, Place]:
    """The places in the given layers, each of which must have a bottleneck."""
    adapted = _adapted_layers(places)
    if not layers <= adapted:
        raise ValueError(
            f"Bottlenecks can be removed from layers that have a Houlsby adapter, here {sorted(adapted) or 'none'}; "
            f"got {sorted(layers)}."
        )
    return {key: place for key, place in places.items() if place.layer in layers}
