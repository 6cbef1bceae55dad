"""The modules of a base model by the names that they have when nothing is wrapped."""

from __future__ import annotations

from collections.abc import Iterator

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the base model, without the model itself and what tuner layers and trained heads add.

    Like `named_modules`, in the same order and each module once. It does not walk through adapters, of which a model
    may have hundreds.
    """
    yield from _walk("", model, set())


def is_inside(name: str, outer: str) -> bool:
    """Whether a module is another one, or in it, by their names."""
    return f"{name}.".startswith(f"{outer}.")


def _walk(name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    base: nn.Module = module
    if isinstance(module, BaseTunerLayer):
        base = module.get_base_layer()
    elif isinstance(module, AuxiliaryTrainingWrapper):
        base = module.original_module
    if base in seen:
        return
    seen.add(base)
    if name:
        yield name, base
    for child_name, child in base.named_children():
        yield from _walk(f"{name}.{child_name}" if name else child_name, child, seen)
