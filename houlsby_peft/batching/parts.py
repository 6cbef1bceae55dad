"""A layer that runs in parts: on some rows of its arguments, as one adapter does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils.generic import ModelOutput

from ..heads.head import HoulsbyHead
from ..method.tuner_layer import BASE, HoulsbyTunerLayer


@dataclass(frozen=True)
class Part:
    """Some rows of a batch.

    Attributes:
        name: Their adapter.
        rows: Their number.
        index: What selects them.
    """

    name: str
    rows: int
    index: slice | torch.Tensor


def split(names: Sequence[str], device: torch.device) -> list[Part]:
    """Return a part for each adapter.

    Args:
        names: The adapter of each row.
        device: Where the rows are.
    """
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows.setdefault(name, []).append(row)
    return [Part(name, len(some), index_of(some, device)) for name, some in rows.items()]


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


def common_source(layer: Any, names: Iterable[str]) -> str | None:
    """Return the adapter, or `BASE`, as which a tuner layer, a head or a wrapper of PEFT's runs for
    each of these adapters; None if they differ.
    """
    if not isinstance(layer, HoulsbyTunerLayer):
        is_head = isinstance(layer, HoulsbyHead)
        present = layer.modules_to_save if is_head else layer._get_available_adapters()
        return None if any(name in present for name in names) else BASE
    common = None
    for name in names:
        source = layer.source(name)
        if common not in (None, source):
            return None
        common = source
    return common or BASE


def select_rows(value: Any, index: torch.Tensor | slice, rows: int) -> Any:
    """Return the rows of an index, of every tensor with a row per example inside arguments.

    Args:
        value: Tensors of the shape `(rows, ...)` and others, in tuples, dicts and outputs.
        index: Rows to select, of the shape `(selected,)`, or consecutive ones.
        rows: The number of rows.
    """
    if isinstance(value, torch.Tensor):
        if not value.dim() or value.shape[0] != rows:
            return value
        if isinstance(index, slice):
            return value[index]
        return value.index_select(0, index.to(value.device))
    if isinstance(value, tuple):
        return tuple([select_rows(item, index, rows) for item in value])
    if isinstance(value, dict):
        if not value:
            return value
        selected = {key: select_rows(item, index, rows) for key, item in value.items()}
        return type(value)(**selected) if isinstance(value, ModelOutput) else selected
    return value


def first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    """Return the first tensor with a dimension."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim():
            return value
    return None


def index_of(rows: Sequence[int], device: torch.device) -> slice | torch.Tensor:
    """Return what selects rows of a tensor: without a copy to a GPU, which waits for it, if they
    are consecutive.
    """
    first, last = rows[0], rows[-1]
    if last - first + 1 == len(rows):
        return slice(first, last + 1)
    return torch.tensor(rows, device=device)


def join(
    layer: nn.Module,
    outputs: Sequence[Any],
    parts: Sequence[Part],
) -> Any:
    """Return one output with all rows, from outputs of the shapes `(rows of one adapter, ...)`.

    Heads with fewer outputs than the widest are filled up with -inf, which no softmax or argmax
    ever chooses.
    """
    first = outputs[0]
    if isinstance(first, tuple) and not any(isinstance(value, torch.Tensor) for value in first[1:]):
        hidden = join(layer, [output[0] for output in outputs], parts)
        return (hidden, *first[1:])
    for output, part in zip(outputs, parts, strict=True):
        if not isinstance(output, torch.Tensor) or output.shape[:1] != (part.rows,):
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
