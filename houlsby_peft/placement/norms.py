"""Which norms of the base model an adapter trains (section 2.1 of the paper)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from ..config import HoulsbyConfig
from ..method.modules import is_in_any, is_inside
from ..saved.record import Place, full_name
from .selection import is_included, layer_of
from .table import SHARED_NORMS
from .view import Layer, View, is_norm, output_width


_QUERY_KEY_NORM = re.compile(r"(^|\.)(q|k|query|key)_?(layer)?_?norm$")


def find_norms(
    view: View, config: HoulsbyConfig, bottlenecks: Mapping[str, Place]
) -> Iterator[Place]:
    """Yield the norms that an adapter with these bottlenecks trains."""
    if not config.train_layer_norm:
        return
    if config.kind == "ladder":
        yield from _find_norms_of_ladders(config, bottlenecks.values())
        return
    output_widths = _narrowest_outputs(view, bottlenecks)
    norms: dict[Layer | None, dict[str, int]] = {}
    for key in _separate_norms(view, config, bottlenecks):
        layer = _layer_around(key, output_widths)
        norms.setdefault(layer, {})[key] = output_width(key, view.modules[key])
    for layer, widths in norms.items():
        for key, width in widths.items():
            # Norms of queries and keys are inside the attention, not around a sub-layer. Most are
            # narrower than both the layer's other norms and the sub-layers' outputs.
            is_around = False
            if layer is not None and not _QUERY_KEY_NORM.search(key):
                is_around = width >= min(output_widths[layer], max(widths.values()))
            if is_around or config.train_layer_norm == "all":
                stack, index = layer or layer_of(key, config)
                yield Place(key, "norm", stack, index, projection=key)


def _find_norms_of_ladders(config: HoulsbyConfig, ladders: Iterable[Place]) -> Iterator[Place]:
    """Yield the norm of the sum that a ladder is added to, if there is one: those below would
    change what ladders read.
    """
    for place in ladders:
        if place.norm and is_included(place.norm, config):
            yield Place(place.norm, "norm", place.stack, place.layer, projection=place.norm)


def _narrowest_outputs(view: View, bottlenecks: Mapping[str, Place]) -> dict[Layer, int]:
    """Return the width of the narrowest adapted sub-layer output in each adapted layer."""
    widths: dict[Layer, int] = {}
    for place in bottlenecks.values():
        if place.layer is not None:
            width = output_width(place.key, view.modules[place.projection])
            layer = place.stack, place.layer
            widths[layer] = min(width, widths.get(layer, width))
    return widths


def _separate_norms(
    view: View, config: HoulsbyConfig, bottlenecks: Collection[str]
) -> Iterator[str]:
    """Yield the norms that may train by themselves, outside of adapted modules and heads."""
    wholes = list(bottlenecks)
    if config.modules_to_save != []:
        wholes += view.head
    shared = tuple(f".{SHARED_NORMS[kind]}" for kind in view.types.values() if kind in SHARED_NORMS)
    for key, module in view.modules.items():
        is_shared = f".{key}".endswith(shared)
        if not is_norm(module) or is_shared or is_in_any(key, wholes):
            continue
        if is_included(key, config):
            yield key


def _layer_around(key: str, layers: Iterable[Layer]) -> Layer | None:
    """Return the first layer that a module is in; None if it is in none."""
    for layer in layers:
        if is_inside(key, full_name(*layer)):
            return layer
    return None
