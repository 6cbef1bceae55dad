"""Finds the layers of a model and where their sub-layers end: from the table, else by inference."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from .architectures import ARCHITECTURES, UNSUPPORTED, Stack, SubLayer
from .base_modules import is_inside
from .inferred_layers import infer_layers


def find_layers(
    model: nn.Module, modules: Mapping[str, nn.Module], positions: tuple[str, ...]
) -> dict[tuple[str, int], dict[str, SubLayer]]:
    """The sub-layers of every layer of a model.

    A model made of models (two towers, an encoder and a decoder) is described by the rows of its parts. What no row
    describes, also because another version of transformers names its modules otherwise, is inferred.

    Args:
        model: the base model.
        modules: its modules by name, in order.
        positions: which sub-layers to look for.

    Returns:
        From the name of a list of layers and an index in it to the sub-layers by position.

    Raises:
        ValueError: the architecture is not supported, has no layers, no such sub-layers, or cannot be inferred; with
            the reason and the remedy.
    """
    types = _model_types(model, modules)
    refused = [UNSUPPORTED[model_type] for model_type in types.values() if model_type in UNSUPPORTED]
    if refused:
        raise ValueError(refused[0])
    layers: dict[tuple[str, int], dict[str, SubLayer]] = {}
    described = set()
    for key, module in modules.items():
        model_type = _innermost_type(key, types)
        stack = _find_stack(key, module, modules, model_type) if isinstance(module, nn.ModuleList) else None
        if stack is not None:
            described.add(model_type)
            for index in range(len(module)):  # type: ignore[arg-type]
                layers[key, index] = _sub_layers(stack, f"{key}.{index}", modules, positions)
    rest = {key: module for key, module in modules.items() if _innermost_type(key, types) not in described}
    layers |= infer_layers(rest, positions)
    if not any(layers.values()):
        raise ValueError(_nothing_found(model, positions, has_layers=bool(layers)))
    return layers


def frozen_norms(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[str]:
    """How the names of the norms end that never train, as the rows of the model and of its parts say."""
    rows = [ARCHITECTURES[kind] for kind in set(_model_types(model, modules).values()) if kind in ARCHITECTURES]
    return [name for row in rows for name in row.frozen_norms]


def _model_types(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The type of each model of transformers in a model, by its name there."""
    return {
        key: str(inner.config.model_type)
        for key, inner in {"": model, **modules}.items()
        if isinstance(inner, PreTrainedModel)
    }


def _innermost_type(key: str, types: Mapping[str, str]) -> str | None:
    """The type of the innermost model around a module, of those that have a row in the table."""
    around = [outer for outer, kind in types.items() if kind in ARCHITECTURES and (not outer or is_inside(key, outer))]
    return types[max(around, key=len)] if around else None


def _find_stack(
    key: str, layers: nn.ModuleList, modules: Mapping[str, nn.Module], model_type: str | None
) -> Stack | None:
    """The row's description of a list of layers, if every layer is as described."""
    for stack in ARCHITECTURES[model_type].stacks if model_type else ():
        ends = (stack.attention, stack.feed_forward)
        names = [name for end in ends for name in (end.output, end.projection) if name]
        if f".{key}".endswith(f".{stack.layers}") and all(
            f"{key}.{index}.{name}" in modules for index in range(len(layers)) for name in names
        ):
            return stack
    return None


def _sub_layers(
    stack: Stack, layer: str, modules: Mapping[str, nn.Module], positions: tuple[str, ...]
) -> dict[str, SubLayer]:
    ends = {position: getattr(stack, position) for position in positions}
    return {position: end for position, end in ends.items() if end and f"{layer}.{end.output}" in modules}


def _nothing_found(model: nn.Module, positions: tuple[str, ...], has_layers: bool) -> str:
    if has_layers:
        return (
            f"HoulsbyConfig.positions must name a sub-layer that the model has; got {positions}, and a "
            f"{type(model).__name__} of this configuration has none of them. Use ('attention', 'feed_forward')."
        )
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return (
        f"The places of the adapters are known for these architectures: {', '.join(sorted(ARCHITECTURES))}; they are "
        "inferred for others that have a list of equal layers with attention in each. Got "
        f"{type(model).__name__} with model_type {model_type!r}, which has none. Name the modules whose output meets "
        "the skip connection in target_modules."
    )
