"""Finds where the adapters of a configuration go in a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn

from .architectures import ARCHITECTURES
from .config import HoulsbyConfig


@dataclass(frozen=True)
class Place:
    """One module of the model that becomes a tuner layer.

    Args:
        key: the module's name in the model.
        position: "attention", "feed_forward" or "cross_attention" for a bottleneck on the output of that sub-layer,
            "custom" for one that `target_modules` asked for, "norm" for a norm that is trained.
        stack: name of the list of layers that the module is in; "" for a module outside any list.
        layer: index in that list; None outside any list.
        projection: name of the module with the weights that determine width, device and dtype.
    """

    key: str
    position: str
    stack: str
    layer: int | None
    projection: str

    @property
    def is_norm(self) -> bool:
        return self.position == "norm"


def find_places(model: nn.Module, config: HoulsbyConfig) -> dict[str, Place]:
    """The places of all bottlenecks and trained norms, by module name, in the model's order.

    Args:
        model: the base model; modules that are tuner layers already count as the modules they wrap.
        config: what to adapt.

    Raises:
        ValueError: nothing is found, with the reason and the remedy.
    """
    modules = dict(base_modules(model))
    if config.target_modules is None:
        candidates = _architecture_places(model, modules, config)
    else:
        candidates = _target_places(modules, config)
    bottlenecks = {place.key: place for place in candidates if _wanted(place, config)}
    norms = {place.key: place for place in _norm_places(modules, config, bottlenecks) if place.key not in bottlenecks}
    return {key: bottlenecks.get(key) or norms[key] for key in modules if key in bottlenecks or key in norms}


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the base model: wrapped modules by their own name, without what tuner layers add."""
    inside: str | None = None
    for key, module in model.named_modules():
        if inside is not None and key.startswith(inside):
            continue
        inside = None
        if isinstance(module, BaseTunerLayer):
            inside = key + "."
            yield key, module.get_base_layer()
        elif key:
            yield key, module


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a layer norm or an RMS norm with weights; models bring their own classes of both."""
    named_so = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    weight = getattr(module, "weight", None)
    return (isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or named_so) and weight is not None and weight.ndim == 1


def output_width(key: str, module: nn.Module) -> int:
    """The size of the last dimension (of the channels, for a convolution) of a module's output.

    Raises:
        ValueError: the module does not tell.
    """
    for attribute in ("out_features", "nf", "embedding_dim", "out_channels", "embed_dim"):
        width = getattr(module, attribute, None)
        if isinstance(width, int):
            return width
    if is_norm(module):
        return int(module.weight.shape[-1])
    raise ValueError(
        f"A bottleneck needs the width of the output it is applied to; {key!r} is a {type(module).__name__}, which "
        "does not tell. Name a module with weights in target_modules, such as the projection before it."
    )


def _architecture_places(model: nn.Module, modules: dict[str, nn.Module], config: HoulsbyConfig) -> list[Place]:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    stacks = ARCHITECTURES.get(model_type or "")
    if stacks is None:
        raise ValueError(
            f"The places of the adapters are known for these architectures: {', '.join(sorted(ARCHITECTURES))}; got "
            f"{type(model).__name__} with model_type {model_type!r}. Name the modules whose output meets the skip "
            "connection in target_modules."
        )
    places = []
    for key in modules:
        for stack in stacks:
            for position in config.positions:
                sub_layer = getattr(stack, position)
                found = sub_layer and re.match(
                    rf"^(?P<stack>(?:.*\.)?{re.escape(stack.layers)})\.(?P<layer>\d+)\.{re.escape(sub_layer.output)}$",
                    key,
                )
                if found:
                    prefix = key.removesuffix(sub_layer.output)
                    projection = prefix + (sub_layer.projection or sub_layer.output)
                    places.append(Place(key, position, found["stack"], int(found["layer"]), projection))
    return places


def _target_places(modules: dict[str, nn.Module], config: HoulsbyConfig) -> list[Place]:
    names = SimpleNamespace(target_modules=config.target_modules, exclude_modules=None, modules_to_save=None)
    return [
        Place(key, "custom", *_layer_of(key, config), projection=key)
        for key in modules
        if check_target_module_exists(names, key)
    ]


def _norm_places(
    modules: dict[str, nn.Module], config: HoulsbyConfig, bottlenecks: dict[str, Place]
) -> Iterator[Place]:
    if not config.train_layer_norm:
        return
    norms = {key: module for key, module in modules.items() if is_norm(module) and _wanted_name(key, config)}
    layers = {key: _layer_of(key, config) for key in norms}
    adapted = {(place.stack, place.layer) for place in bottlenecks.values() if place.layer is not None}
    widest: dict[tuple[str, int | None], int] = {}
    for key, module in norms.items():
        widest[layers[key]] = max(widest.get(layers[key], 0), module.weight.shape[0])
    for key, module in norms.items():
        # Narrower norms sit inside the attention (of queries and keys per head), not around the sub-layers.
        around_adapted = layers[key] in adapted and module.weight.shape[0] == widest[layers[key]]
        if around_adapted or config.train_layer_norm == "all":
            yield Place(key, "norm", *layers[key], projection=key)


def _layer_of(key: str, config: HoulsbyConfig) -> tuple[str, int | None]:
    """The list of layers that a module is in and its index there; lists inside a layer (of experts) do not count."""
    patterns = config.layers_pattern or [r".*?"]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = re.match(rf"^(?P<stack>(?:.*?\.)??{pattern})\.(?P<layer>\d+)\.", key)
        if found:
            return found["stack"], int(found["layer"])
    found = re.match(r"^(?P<layer>\d+)\.", key)
    return ("", int(found["layer"])) if found else ("", None)


def _wanted(place: Place, config: HoulsbyConfig) -> bool:
    layers = config.layers_to_transform
    if layers is not None and place.layer not in ([layers] if isinstance(layers, int) else layers):
        return False
    return _wanted_name(place.key, config)


def _wanted_name(key: str, config: HoulsbyConfig) -> bool:
    """False for what `exclude_modules` names, and inside `modules_to_save`, which train as a whole."""
    names = SimpleNamespace(
        target_modules=[key], exclude_modules=config.exclude_modules, modules_to_save=config.modules_to_save
    )
    return bool(check_target_module_exists(names, key))
