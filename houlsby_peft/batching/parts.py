"""A layer that runs in parts: each on some rows of its arguments, with their adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers.utils.generic import ModelOutput

from ..heads.head import HoulsbyHead
from ..method.tuner_layer import BASE, HoulsbyTunerLayer
from .slots import Slots
from .stack import Choice


@dataclass(frozen=True)
class Part:
    """Rows of a batch that run at once.

    Attributes:
        names: The adapter of each of them, those of one adapter together.
        index: What selects them; None for all rows of the batch as they are.
        slots: What holds their adapters; None for modules.
        choice: The number of each row's adapter, if there are several: in the slots, or else in the
            order of the names.
    """

    names: tuple[str, ...]
    index: slice | torch.Tensor | None
    slots: Slots | None = None
    choice: Choice | None = None


def only_name_of(names: Sequence[str]) -> str | None:
    """Return the adapter of all rows, if they have the same."""
    return names[0] if len(set(names)) == 1 else None


def split(
    names: Sequence[str], key_of: Callable[[str], object], device: torch.device
) -> list[Part]:
    """Return a part for each key: for adapters that are held in the same slots, for those whose
    heads have the same shapes, or for a single one.

    Args:
        names: The adapter of each row.
        key_of: Returns the key of an adapter.
        device: Where the rows are.
    """
    rows_of_name: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows_of_name.setdefault(name, []).append(row)
    names_of_key: dict[object, list[str]] = {}
    for name in rows_of_name:
        names_of_key.setdefault(key_of(name), []).append(name)
    parts = []
    for key, distinct in names_of_key.items():
        rows = list(chain.from_iterable(rows_of_name[name] for name in distinct))
        slots = key if isinstance(key, Slots) else None
        choice = None
        if slots is not None or len(distinct) > 1:
            numbers = {name: number for number, name in enumerate(distinct)}
            if slots is not None:
                numbers = slots.numbers
            choice = Choice([numbers[names[row]] for row in rows])
        of_rows = tuple(names[row] for row in rows)
        parts.append(Part(of_rows, _index_of(rows, len(names), device), slots, choice))
    return parts


def _index_of(
    rows: Sequence[int], number: int, device: torch.device
) -> slice | torch.Tensor | None:
    """Return what selects rows of a tensor: without a copy to a GPU, which waits for it, if they
    are consecutive.
    """
    consecutive = range(rows[0], rows[0] + len(rows))
    if rows != list(consecutive):
        return torch.tensor(rows, device=device)
    if len(rows) == number:
        return None
    return slice(consecutive.start, consecutive.stop)


def run_adapter(
    layer: Any, adapter_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a tuner layer, a head or a wrapper of PEFT's as one adapter does, or as the base model
    does for `BASE`.
    """
    if isinstance(layer, (HoulsbyTunerLayer, HoulsbyHead)):
        return layer.run_adapter(adapter_name, *args, **kwargs)
    if adapter_name in layer._get_available_adapters():
        return layer._forward_wrapped_mixed_batch(args[0], adapter_name, *args[1:], **kwargs)
    return layer.original_module(*args, **kwargs)


def common_adapter(layer: Any, names: Iterable[str]) -> str | None:
    """Return one adapter, or `BASE`, as which a tuner layer, a head or a wrapper of PEFT's runs for
    all of these adapters: they apply the same module there, or none. None if they differ.
    """
    if not isinstance(layer, HoulsbyTunerLayer):
        is_head = isinstance(layer, HoulsbyHead)
        present = layer.modules_to_save if is_head else layer._get_available_adapters()
        return None if any(name in present for name in names) else BASE
    first = next(iter(names), BASE)
    module = layer.module_of(first)
    for name in set(names):
        if layer.module_of(name) is not module or layer.is_in_slots(name):
            return None
    return first


def select_rows(value: Any, index: torch.Tensor | slice | None, rows: int) -> Any:
    """Return the rows of an index, of every tensor with a row per example inside arguments.

    Args:
        value: Tensors of the shape `(rows, ...)` and others, in tuples, dicts and outputs.
        index: Rows to select, of the shape `(selected,)`, or consecutive ones; None for all.
        rows: The number of rows.
    """
    if index is None:
        return value
    if isinstance(value, torch.Tensor):
        if not value.dim() or value.shape[0] != rows:
            return value
        if isinstance(index, slice):
            return value[index]
        return value.index_select(0, index.to(value.device))
    if isinstance(value, tuple):
        return tuple([select_rows(item, index, rows) for item in value])
    if isinstance(value, dict):
        selected = {key: select_rows(item, index, rows) for key, item in value.items()}
        return type(value)(**selected) if isinstance(value, ModelOutput) else selected
    return value


def join(layer: nn.Module, outputs: Sequence[Any], parts: Sequence[Part]) -> Any:
    """Return one output with all rows, from outputs of the shapes `(rows of a part, ...)`.

    Heads with fewer outputs than the widest are filled up with -inf, which no softmax or argmax
    ever chooses.
    """
    first = outputs[0]
    if parts[0].index is None:
        return first
    if isinstance(first, tuple) and not any(isinstance(value, torch.Tensor) for value in first[1:]):
        hidden = join(layer, [output[0] for output in outputs], parts)
        return (hidden, *first[1:])
    for output, part in zip(outputs, parts, strict=True):
        if not isinstance(output, torch.Tensor) or output.shape[:1] != (len(part.names),):
            module = getattr(layer, "original_module", layer)
            raise TypeError(
                "In a mixed batch, a module must return one tensor with a row per example; "
                f"{type(module).__name__} does not. Run the rows of each adapter separately."
            )
    dtype, shape = first.dtype, [sum(map(len, outputs)), *first.shape[1:]]
    for output in outputs:
        # The base model's head may be in another precision.
        dtype = torch.promote_types(dtype, output.dtype)
        if output.dim() > 1:
            shape[-1] = max(shape[-1], output.shape[-1])
    result = first.new_full(shape, float("-inf"), dtype=dtype)
    for output, part in zip(outputs, parts, strict=True):
        columns = result
        if output.dim() > 1:
            columns = result[..., : output.shape[-1]]
        columns[part.index] = output.to(dtype)
    return result
