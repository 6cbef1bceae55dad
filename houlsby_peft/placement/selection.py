"""Which modules a configuration selects: layers, their lists, exclusions, patterns and norms."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from peft import NoMatchingPeftModuleError
from peft.tuners.tuners_utils import check_target_module_exists

from ..config import HoulsbyConfig
from ..method.modules import is_in_any, is_inside
from ..saved.record import Place, fold_indices, full_name
from .table import SHARED_NORMS
from .view import View, is_norm, output_width


_QUERY_KEY_NORM = re.compile(r"(^|\.)(q|k|query|key)_?(layer)?_?norm$")


def is_included(key: str, config: HoulsbyConfig) -> bool:
    """Return False for what `exclude_modules` names, and for what is inside `modules_to_save`.

    A list of names also excludes what is inside the named modules. A regular expression is compared
    with the name of each module, as in PEFT. What `modules_to_save` names trains as a whole.
    """
    if not config.exclude_modules and not config.modules_to_save:
        return True
    keys = [key]
    if not isinstance(config.exclude_modules, str):
        keys += [key[: dot.start()] for dot in re.finditer(r"\.", key)]
    rules = SimpleNamespace(
        target_modules=keys,
        exclude_modules=config.exclude_modules,
        modules_to_save=config.modules_to_save,
    )
    return all(check_target_module_exists(rules, name) for name in keys)


def is_selected(place: Place, config: HoulsbyConfig) -> bool:
    """Return whether a place is in the layers to adapt, and not excluded."""
    layers = _as_list(config.layers_to_transform)
    if config.layers_to_transform is not None and place.layer not in layers:
        return False
    patterns = _as_list(config.layers_pattern) or [".*"]
    is_in_list = any(re.search(rf"(^|\.)(?:{pattern})$", place.stack) for pattern in patterns)
    return is_in_list and is_included(place.key, config)


def layer_of(key: str, config: HoulsbyConfig) -> tuple[str, int | None]:
    """Return the list of layers that contains a module, and the index in it.

    A list inside a layer does not count.
    """
    for pattern in _as_list(config.layers_pattern) or [r".*?"]:
        match = re.match(rf"^(?P<stack>(?:.*?\.)??(?:{pattern}))\.(?P<layer>\d+)\.", key)
        if match:
            return match["stack"], int(match["layer"])
    match = re.match(r"^(?P<layer>\d+)\.", key)
    if match:
        return "", int(match["layer"])
    return "", None


def check_layers(view: View, config: HoulsbyConfig, candidates: Collection[Place]) -> None:
    """Refuse the index of a layer that the model lacks: the adapter would silently be smaller.

    A layer without a sub-layer to adapt, as in a hybrid model, is there all the same.
    """
    stacks = {place.stack for place in candidates if place.layer is not None}
    if not stacks:
        return
    unknown = []
    for index in _as_list(config.layers_to_transform):
        if not any(full_name(stack, index) in view.modules for stack in stacks):
            unknown.append(index)
    if unknown:
        raise NoMatchingPeftModuleError(
            f"HoulsbyConfig.layers_to_transform has {unknown}; the layers are "
            f"{name_layers(candidates)}."
        )


def name_layers(candidates: Iterable[Place]) -> str:
    """Return the layers of some places: `encoder.layer.0-11`."""
    indices: dict[str, set[int]] = {}
    for place in candidates:
        if place.layer is not None:
            indices.setdefault(place.stack, set()).add(place.layer)
    layers = []
    for stack, numbers in indices.items():
        layers.append(f"{stack}.{fold_indices(sorted(numbers))}".lstrip("."))
    return ", ".join(layers)


def find_norms(
    view: View, config: HoulsbyConfig, bottlenecks: Mapping[str, Place]
) -> Iterator[Place]:
    """Yield the norms that an adapter with these bottlenecks trains (section 2.1 of the paper).

    Beside a ladder, this is the norm of the sum that it is added to, if there is one: those below
    would change what ladders read.
    """
    if not config.train_layer_norm:
        return
    if config.kind == "ladder":
        for place in bottlenecks.values():
            if place.norm and is_included(place.norm, config):
                yield Place(place.norm, "norm", place.stack, place.layer, projection=place.norm)
        return
    narrowest: dict[tuple[str, int], int] = {}  # output of an adapted sub-layer in each layer
    for place in bottlenecks.values():
        if place.layer is not None:
            width = output_width(place.key, view.modules[place.projection])
            layer = place.stack, place.layer
            narrowest[layer] = min(width, narrowest.get(layer, width))
    norms = _separate_norms(view, config, bottlenecks, narrowest)
    for layer_around, widths in norms.items():
        for key, width in widths.items():
            # Norms of queries and keys are inside the attention, not around a sub-layer. Most are
            # narrower than both the layer's other norms and the sub-layers' outputs.
            is_around = False
            if layer_around is not None and not _QUERY_KEY_NORM.search(key):
                is_around = width >= min(narrowest[layer_around], max(widths.values()))
            if is_around or config.train_layer_norm == "all":
                stack, index = layer_around or layer_of(key, config)
                yield Place(key, "norm", stack, index, projection=key)


def _separate_norms(
    view: View,
    config: HoulsbyConfig,
    bottlenecks: Collection[str],
    layers: Collection[tuple[str, int]],
) -> dict[tuple[str, int] | None, dict[str, int]]:
    """Return the norms outside of adapted modules and heads, each with its width, by the layer that
    they are in; None: in none of these layers.
    """
    wholes = list(bottlenecks)
    if config.modules_to_save != []:
        wholes += view.head
    shared = tuple(f".{SHARED_NORMS[kind]}" for kind in view.types.values() if kind in SHARED_NORMS)
    norms: dict[tuple[str, int] | None, dict[str, int]] = {}
    for key, module in view.modules.items():
        is_shared = f".{key}".endswith(shared)
        if not is_norm(module) or is_shared or is_in_any(key, wholes):
            continue
        if is_included(key, config):
            around = [layer for layer in layers if is_inside(key, full_name(*layer))]
            widths = norms.setdefault(around[0] if around else None, {})
            widths[key] = output_width(key, module)
    return norms


def _as_list(option: Any) -> list[Any]:
    """Return an option of one value or several as a list; empty if it is left out."""
    if option is None:
        return []
    return option if isinstance(option, list) else [option]
