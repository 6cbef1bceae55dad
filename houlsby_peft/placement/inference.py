"""Infer the layers of a model, and where their sub-layers end, if it is not in the table.

The layers are the items of the innermost list that have attention: all of them or, in a hybrid,
some of them. `InferredLayer` has the rules for one layer. Where the rules do not select exactly one
module, nothing is selected, and the list of layers is reported with the reason.

The rules find projections, never dropouts, because a module tree does not tell which dropout
follows which projection. In training the adapter then comes before the dropout. In evaluation there
is no difference.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache

from torch import nn

from ..method.modules import is_in_any, is_inside
from ..saved.record import fold_indices, full_name
from .inferred_layer import (
    InferredLayer,
    UnknownEndError,
    first_part,
    is_attention,
    is_cross,
    sizes_of,
)
from .table import SubLayer


logger = logging.getLogger(__name__)

# The sub-layer at each position, by the name of the list of layers and the index in it.
InferredSubLayers = dict[tuple[str, int], dict[str, SubLayer]]


def infer_layers(
    modules: Mapping[str, nn.Module],
    positions: Collection[str],
    is_included: Callable[[str], bool] = lambda name: True,
) -> tuple[InferredSubLayers, dict[str, str]]:
    """Return the sub-layers of all layers, and why lists with attention cannot be inferred.

    A layer without any included module is left out.

    Args:
        modules: The modules to look at, by name, outer ones first.
        positions: The positions of the sub-layers to find.
        is_included: Whether a module of this name may be adapted.
    """
    attentions = find_attentions(modules)
    inferred: InferredSubLayers = {}
    unknown: dict[str, str] = {}
    layers: list[str] = []
    for stack, layers_of_stack in _find_lists(modules, attentions, is_included).items():
        try:
            sub_layers = _infer_list(layers_of_stack, positions)
        except UnknownEndError as reason:
            unknown[stack] = str(reason)
            continue
        for index, ends in sub_layers.items():
            inferred[stack, index] = ends
            layers.append(full_name(stack, index))
    for name, stack in attentions.items():
        is_needed = "cross_attention" in positions or not is_cross(name, modules[name])
        if is_needed and is_included(name) and not is_in_any(name, [*layers, *unknown]):
            unknown[stack] = f"{name} is not in a layer that has a feed-forward as well"
    return inferred, unknown


def find_attentions(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the innermost attentions in lists, in the model's order, with the name of their list.

    An attention has linear modules. A module that is called attention but has convolutions, or the
    weights of a norm, does not count.
    """
    around_linear: set[str] = set()
    for name, module in modules.items():
        if sizes_of(module):
            around_linear.update(_outer_names(name))
    attentions: dict[str, str] = {}
    innermost = ""
    # Backwards, what is inside a module comes before it.
    for name in reversed(list(modules)):
        holds_attention = innermost and is_inside(innermost, name)
        if name not in around_linear or holds_attention or not is_attention(name, modules[name]):
            continue
        innermost = name
        for outer in _outer_names(name):
            if outer in modules and _is_list(modules[outer]):
                attentions[name] = outer
    return dict(reversed(attentions.items()))


def log_inferred(inferred: InferredSubLayers) -> None:
    """Log in one line which places were inferred, once for all models with the same ones."""
    indices: dict[tuple[str, str], list[int]] = {}
    for (stack, index), sub_layers in inferred.items():
        ends = [f"{position} after {end.output}" for position, end in sub_layers.items()]
        indices.setdefault((stack, ", ".join(ends) or "none"), []).append(index)
    layers = []
    for (stack, summary), numbers in indices.items():
        layers.append(f"{stack}.{fold_indices(numbers)} {summary}")
    log_once(
        "The table of architectures does not describe these layers, so the places of the adapters "
        f"are inferred: {'; '.join(layers)}. To choose others, give target_modules."
    )


@cache
def log_once(message: str) -> None:
    """Log a warning, each message once in a process."""
    logger.warning(message)


def _find_lists(
    modules: Mapping[str, nn.Module],
    attentions: Collection[str],
    is_included: Callable[[str], bool],
) -> dict[str, dict[int, InferredLayer]]:
    """Return the lists of layers with attention, by name, with their included layers by index.

    No list is inside another one. Inner lists are preferred, and lists with attention in each
    layer, because T5 keeps the sub-layers of each layer in a list as well.
    """
    complete: dict[str, dict[int, InferredLayer]] = {}
    hybrid: dict[str, dict[int, InferredLayer]] = {}
    for stack in _lists_around(attentions, modules):
        layers = _included_layers(stack, modules, is_included)
        have_attention = [bool(layer.attentions) for layer in layers.values()]
        if have_attention and all(have_attention):
            complete[stack] = layers
        elif any(have_attention):
            hybrid[stack] = layers
    lists: dict[str, dict[int, InferredLayer]] = {}
    for stack, layers in [*complete.items(), *hybrid.items()]:
        if not any(is_inside(stack, name) or is_inside(name, stack) for name in lists):
            lists[stack] = layers
    return lists


def _lists_around(attentions: Collection[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the lists that hold attentions, inner ones first."""
    stacks: list[str] = []
    for attention in attentions:
        for name in _outer_names(attention):
            if name not in stacks and name in modules and _is_list(modules[name]):
                stacks.append(name)
    return sorted(stacks, key=lambda name: name.count("."), reverse=True)


def _included_layers(
    stack: str, modules: Mapping[str, nn.Module], is_included: Callable[[str], bool]
) -> dict[int, InferredLayer]:
    """Return the layers of a list that have included modules, by index."""
    layers = {}
    for index in range(len(modules[stack])):  # type: ignore[arg-type]
        key = f"{stack}.{index}"
        if key in modules:  # a layer that is in the list several times has one name
            layer = InferredLayer(key, modules, is_included)
            if layer.is_included:
                layers[index] = layer
    return layers


def _infer_list(
    layers: Mapping[int, InferredLayer], positions: Collection[str]
) -> dict[int, dict[str, SubLayer]]:
    """Return the sub-layers of each layer of a list, by its index."""
    sub_layers = {}
    parts: set[str] = set()
    for index, layer in layers.items():
        if layer.attentions:
            sub_layers[index] = layer.sub_layers(positions)
            feed_forward = sub_layers[index].get("feed_forward")
            if feed_forward is not None:
                parts.add(first_part(feed_forward.output))
    for index, layer in layers.items():
        if not layer.attentions:
            sub_layers[index] = layer.feed_forward_in(parts)
    return dict(sorted(sub_layers.items()))


def _outer_names(name: str) -> list[str]:
    """Return the names of the modules around a module, the outermost first."""
    return [name[: dot.start()] for dot in re.finditer(r"\.", name)]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential))
