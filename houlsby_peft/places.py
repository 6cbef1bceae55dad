"""Finds where the adapters of a configuration go in a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn

from .base_modules import base_modules, is_inside
from .config import HoulsbyConfig
from .head import find_head
from .stacks import find_layers, frozen_norms


_QUERY_KEY_NORM = re.compile(r"(^|\.)(q|k|query|key)_?(layer)?_?norm$")


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
        ValueError: nothing is found, or a layer is not there, with the reason and the remedy.
    """
    modules = dict(base_modules(model))
    if config.target_modules is None:
        candidates = list(_architecture_places(model, modules, config))
    else:
        candidates = _target_places(modules, config)
    _check_layers(candidates, config)
    bottlenecks = {place.key: place for place in candidates if _wanted(place, config)}
    _check_not_nested(model, bottlenecks)
    heads = [] if config.modules_to_save == [] else find_head(model, bottlenecks)
    others = [*bottlenecks, *heads]
    frozen = tuple(f".{name}" for name in frozen_norms(model, modules))
    norms = {
        key: module
        for key, module in modules.items()
        if is_norm(module) and not f".{key}".endswith(frozen) and not any(is_inside(key, other) for other in others)
    }
    places = bottlenecks | {place.key: place for place in _norm_places(norms, config, bottlenecks)}
    return {key: places[key] for key in modules if key in places}


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
        return module.get_parameter("weight").shape[-1]
    raise ValueError(
        f"A bottleneck needs the width of the output it is applied to; {key!r} is a {type(module).__name__}, which "
        "does not tell. Name a module with weights in target_modules, such as the projection before it."
    )


def _architecture_places(model: nn.Module, modules: dict[str, nn.Module], config: HoulsbyConfig) -> Iterator[Place]:
    for (stack, index), sub_layers in find_layers(model, modules, config.positions).items():
        for position, end in sub_layers.items():
            layer = f"{stack}.{index}"
            yield Place(f"{layer}.{end.output}", position, stack, index, f"{layer}.{end.projection or end.output}")


def _check_layers(candidates: Iterable[Place], config: HoulsbyConfig) -> None:
    asked = config.layers_to_transform
    last = max((place.layer for place in candidates if place.layer is not None), default=None)
    highest = max(asked) if isinstance(asked, list) else asked
    if highest is not None and last is not None and highest > last:
        raise ValueError(
            f"HoulsbyConfig.layers_to_transform must be among this model's layers, 0 to {last}; got {asked!r}. Layers "
            "are counted from 0; None adapts all."
        )


def _check_not_nested(model: nn.Module, bottlenecks: dict[str, Place]) -> None:
    for key in bottlenecks:
        for outer in (key[: dot.start()] for dot in re.finditer(r"\.", key)):
            if outer in bottlenecks or isinstance(model.get_submodule(outer), BaseTunerLayer):
                raise ValueError(
                    f"A bottleneck cannot be on a module inside another wrapped module; {key!r} is inside {outer!r}. "
                    "Leave one of the two out of target_modules, or name it in exclude_modules."
                )


def _target_places(modules: dict[str, nn.Module], config: HoulsbyConfig) -> list[Place]:
    names = SimpleNamespace(target_modules=config.target_modules, exclude_modules=None, modules_to_save=None)
    return [
        Place(key, "custom", *_layer_of(key, config), projection=key)
        for key in modules
        if check_target_module_exists(names, key)
    ]


def _norm_places(norms: dict[str, nn.Module], config: HoulsbyConfig, bottlenecks: dict[str, Place]) -> Iterator[Place]:
    if not config.train_layer_norm:
        return
    adapted = {
        f"{place.stack}.{place.layer}".lstrip("."): (place.stack, place.layer)
        for place in bottlenecks.values()
        if place.layer is not None
    }
    inside = {
        key: next((layer for layer in adapted if is_inside(key, layer)), None)
        for key in norms
        if _wanted_name(key, config)
    }
    widest: dict[str | None, int] = {}
    for key, layer in inside.items():
        widest[layer] = max(widest.get(layer, 0), output_width(key, norms[key]))
    for key, layer in inside.items():
        # Norms of queries and keys sit inside the attention, not around the sub-layers; most are narrower.
        of_queries = output_width(key, norms[key]) < widest[layer] or _QUERY_KEY_NORM.search(key)
        if config.train_layer_norm == "all" or (layer is not None and not of_queries):
            yield Place(key, "norm", *(adapted[layer] if layer else _layer_of(key, config)), projection=key)


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
    layers, patterns = config.layers_to_transform, config.layers_pattern or [".*"]
    if layers is not None and place.layer not in ([layers] if isinstance(layers, int) else layers):
        return False
    counted = any(
        re.search(rf"(^|\.){pattern}$", place.stack)
        for pattern in ([patterns] if isinstance(patterns, str) else patterns)
    )
    return counted and _wanted_name(place.key, config)


def _wanted_name(key: str, config: HoulsbyConfig) -> bool:
    """False for what `exclude_modules` names, and inside `modules_to_save`, which train as a whole."""
    names = SimpleNamespace(
        target_modules=[key], exclude_modules=config.exclude_modules, modules_to_save=config.modules_to_save
    )
    return bool(check_target_module_exists(names, key))
