"""Which modules a configuration selects: layers, their lists, exclusions and patterns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from types import SimpleNamespace

from peft import NoMatchingPeftModuleError
from peft.tuners.tuners_utils import check_target_module_exists

from ..config import HoulsbyConfig
from ..errors import shortened
from ..saved.record import Place, fold_indices, full_name
from .view import View


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
    if config.layers_to_transform is not None and place.layer not in _layer_indices(config):
        return False
    patterns = _layer_patterns(config) or [".*"]
    is_in_list = any(re.search(rf"(^|\.)(?:{pattern})$", place.stack) for pattern in patterns)
    return is_in_list and is_included(place.key, config)


def layer_of(key: str, config: HoulsbyConfig) -> tuple[str, int | None]:
    """Return the list of layers that contains a module, and the index in it.

    A list inside a layer does not count.
    """
    for pattern in _layer_patterns(config) or [r".*?"]:
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
    for index in _layer_indices(config):
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


def check_patterns(config: HoulsbyConfig) -> None:
    """Refuse patterns that are not regular expressions, before they are matched."""
    for name in ("target_modules", "exclude_modules"):
        pattern = getattr(config, name)
        if isinstance(pattern, str):
            _check_pattern(name, pattern)
    # These are put into larger expressions, in which flags may only stand at the beginning.
    for pattern in _layer_patterns(config):
        _check_pattern("layers_pattern", pattern, "^")
    for pattern in config.rank_pattern:
        _check_pattern("rank_pattern", pattern, "^")


def _check_pattern(name: str, pattern: str, prefix: str = "") -> None:
    """Refuse a pattern that is not a regular expression, or not one after a prefix."""
    try:
        re.compile(prefix + pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"HoulsbyConfig.{name} must be a regular expression; got {shortened(repr(pattern))}: "
            f"{error}. Escape special characters with a backslash."
        ) from error


def _layer_indices(config: HoulsbyConfig) -> list[int]:
    """Return the indices that `layers_to_transform` names; none if it is left out."""
    if isinstance(config.layers_to_transform, int):
        return [config.layers_to_transform]
    return config.layers_to_transform or []


def _layer_patterns(config: HoulsbyConfig) -> list[str]:
    """Return the patterns for the name of the list of layers; none allow every list."""
    if isinstance(config.layers_pattern, str):
        return [config.layers_pattern]
    return config.layers_pattern or []
