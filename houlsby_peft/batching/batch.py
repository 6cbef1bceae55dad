"""`MixedBatch`: the adapter of each row of a batch, and the weights that are stacked to compute all rows at once.

All adapters are computed in one batched matrix product per position instead of a loop over adapters. This is for
inference only: PEFT refuses `adapter_names` in training mode, and no gradient reaches the stacked weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from accelerate.utils import has_offloaded_params  # type: ignore[import-untyped]
from torch import nn
from torch.nn import functional as F

from ..bottleneck import Bottleneck
from ..heads.wrapper import HoulsbyHead
from ..layer import HoulsbyLayer, HoulsbyLayerNorm
from ..skip import Read
from .rows import Rows, first_tensor, select_rows


# PEFT's name for rows that use the base model alone.
BASE = "__base__"


class MixedBatch:
    """The adapter of each row of a batch.

    One object serves all layers of a model, and further batches with the same adapters, so that weights are stacked
    once. If all rows have one adapter, nothing is stacked.

    Args:
        names: The adapter of each row, or "__base__" for the base model.
        previous: A batch that this one replaces. Each layer frees what it stacked for it only after stacking anew, so
            that the next layer can use the same memory.
    """

    def __init__(self, names: Sequence[str], previous: MixedBatch | None = None) -> None:
        self.names = tuple(names)
        self.only_name = self.names[0] if len(set(self.names)) == 1 else None
        # Where the rows are in each layer's hidden states; None if nothing is known of the model.
        self.rows: Rows | None = None
        # By layer, for one shape and device: its groups of bottlenecks, or the weights of its norms.
        self._built: dict[nn.Module, tuple[object, Any]] = {}
        # The same groups by their bottlenecks, for layers that share these.
        self._shared: dict[object, list[_Group | _Variant]] = {}
        self._replaced: dict[nn.Module, tuple[object, Any]] = {}
        if previous is not None:
            previous._shared.clear()
            self._replaced = previous._built

    def adapt(self, layer: HoulsbyLayer, hidden: torch.Tensor, read: Read | None = None) -> torch.Tensor:
        """Apply to each row the bottleneck that its adapter has in a layer.

        Args:
            layer: The layer.
            hidden: Hidden states of the shape `(rows, ..., width)`.
            read: Returns what bottlenecks of a kind read. None: all of them read the hidden states.
        """
        if self.only_name is not None:
            return layer.run_bottleneck(self.only_name, hidden, read)

        def build() -> list[_Group | _Variant]:
            found = {name: layer.bottleneck(name) for name in dict.fromkeys(self.names)}
            used = {name: bottleneck for name, bottleneck in found.items() if bottleneck is not None}
            if not used:
                return []
            names = self.names_of_rows(layer, hidden)
            key = (hidden.shape[0], hidden.device, *used.items())
            groups = self._shared.get(key)
            if groups is None:  # another thread's batch may empty the dictionary at any time
                groups = self._shared[key] = _group(names, used, hidden.device)
            return groups

        result = hidden
        for group in self._build_once(layer, hidden, build):
            result = group.adapt(hidden, result, read)
        return result

    def normalize(self, layer: HoulsbyLayerNorm, *args: Any, **kwargs: Any) -> Any:
        """Apply to each row the norm of its adapter or, where it has none, the base model's norm.

        Args:
            layer: The layer.
            args, kwargs: Hidden states of the shape `(rows, ..., width)`, and what else the model gives its norm.

        Raises:
            TypeError: A norm returns more tensors than one.
        """
        base = layer.base_layer
        if self.only_name is not None:
            return layer.apply_norm(layer.norm(self.only_name) or base, *args, **kwargs)
        if all(layer.norm(name) is None for name in self.names):
            return layer.apply_norm(base, *args, **kwargs)
        (hidden, *more) = (*args, *kwargs.values())
        plain = next((cls for cls in (nn.LayerNorm, nn.RMSNorm) if isinstance(base, cls)), None)
        if more or (plain is not None and type(base).forward is not plain.forward) or has_offloaded_params(base):
            return self._normalize_each(layer, args, kwargs)

        def build() -> dict[str, torch.Tensor]:
            norms = {name: layer.norm(name) or base for name in dict.fromkeys(self.names)}
            shape = (hidden.shape[0], *[1] * (hidden.dim() - 2), hidden.shape[-1])
            return _weights_of_rows(self.names_of_rows(layer, hidden), norms, shape)

        rows: dict[str, torch.Tensor] = self._build_once(layer, hidden, build)
        wide = hidden.to(rows["weight"].dtype)
        if isinstance(base, nn.LayerNorm):
            result = F.layer_norm(wide, wide.shape[-1:], eps=base.eps)
            result = torch.addcmul(rows["bias"], result, rows["weight"]) if "bias" in rows else result * rows["weight"]
        elif isinstance(base, nn.RMSNorm):
            result = F.rms_norm(wide, wide.shape[-1:], eps=base.eps) * rows["weight"]
        else:
            # The models' own RMS norms multiply by their weight last, so that a weight per row broadcasts.
            result = torch.func.functional_call(base, rows, (wide,))
        return result.to(hidden.dtype)

    def _normalize_each(self, layer: HoulsbyLayerNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply norms whose weights cannot be stacked, such as I-BERT's and offloaded ones, one after the other."""
        inputs = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        names = self.names_of_rows(layer, inputs)
        normalized = torch.empty_like(inputs)
        more: list[Any] = []
        for name in dict.fromkeys(names):
            rows = rows_of(name, names, inputs.device)
            own_args, own_kwargs = select_rows((args, kwargs), rows, len(names))
            result = layer.apply_norm(layer.norm(name) or layer.base_layer, *own_args, **own_kwargs)
            if isinstance(result, tuple):
                result, *more = result
            if any(isinstance(value, torch.Tensor) for value in more):
                raise TypeError(
                    "Mixed batches need norms that return one tensor; "
                    f"{type(layer.base_layer).__name__} returns several. Run the rows of each adapter separately."
                )
            normalized = normalized.index_copy(0, rows, result)
        return (normalized, *more) if more else normalized

    def run_heads(self, wrapper: HoulsbyHead, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply to each row the head of its adapter.

        Heads may be any modules, so they run one after the other; this is once per forward pass, not once per layer.

        Returns:
            A tensor with a row per example. Heads with fewer outputs than the widest are filled up with -inf, which no
            softmax or argmax ever chooses.

        Raises:
            TypeError: A head returns anything but one tensor with a row per example.
        """
        if self.only_name is not None:
            return wrapper.run(self.only_name, *args, **kwargs)
        inputs = first_tensor((*args, *kwargs.values()))
        if inputs is None or not any(name in wrapper.modules_to_save for name in self.names):
            return wrapper.original_module(*args, **kwargs)
        names = self.names_of_rows(wrapper, inputs)
        index = {name: rows_of(name, names, inputs.device) for name in dict.fromkeys(names)}
        outputs = {}
        for name, rows in index.items():
            own_args, own_kwargs = select_rows((args, kwargs), rows, len(names))
            outputs[name] = wrapper.run(name, *own_args, **own_kwargs)
            if not isinstance(outputs[name], torch.Tensor) or outputs[name].shape[:1] != (len(rows),):
                raise TypeError(
                    "Mixed batches need heads that return one tensor with a row per example; "
                    f"{type(wrapper.head(name)).__name__} in modules_to_save does not. Run the rows of each adapter "
                    "separately."
                )
        first = outputs[names[0]]
        width = max(output.shape[-1] for output in outputs.values())
        # The base model's head may be in half precision.
        dtype = reduce(torch.promote_types, (output.dtype for output in outputs.values()))
        result = first.new_full((len(names), *first.shape[1:-1], width), float("-inf"), dtype=dtype)
        for name, output in outputs.items():
            result[index[name], ..., : output.shape[-1]] = output.to(dtype)
        return result

    def _build_once(self, layer: nn.Module, hidden: torch.Tensor, build: Callable[[], Any]) -> Any:
        """Return what was built for a layer and hidden states of one shape; the last one is kept."""
        rows = self.rows and self.rows.key(hidden.dim())
        key = (hidden.shape[0], hidden.dim(), hidden.device, rows)
        known, value = self._built.get(layer, (None, None))
        if known != key:
            value = build()
            self._built[layer] = (key, value)
            self._replaced.pop(layer, None)
        return value

    def names_of_rows(self, module: nn.Module, hidden: torch.Tensor) -> tuple[str, ...]:
        """Return the adapter at each index of the first dimension of what reaches a module.

        Raises:
            AdapterError: The rows of these hidden states are unknown.
            ValueError: Nothing is known of the module's model, and there is not one name per row.
        """
        if self.rows is not None:
            times = self.rows.times(module, hidden)
        elif hidden.shape[0] == len(self.names):
            times = 1
        else:
            raise ValueError(wrong_length_message(len(self.names), hidden.shape[0]))
        return tuple(name for name in self.names for _ in range(times))


def wrong_length_message(names: int, rows: int) -> str:
    """Return what PEFT says as well."""
    return (
        "Length of `adapter_names` should be the same as the number of inputs, but got "
        f"{names} and {rows} respectively."
    )


class _Variant:
    """A bottleneck that may compute anything, so that it is called on its rows instead of being stacked."""

    def __init__(self, bottleneck: Any, rows: list[int], in_order: bool, device: torch.device) -> None:
        self.bottleneck = bottleneck
        self.rows = _index(rows, in_order, device)

    def adapt(self, hidden: torch.Tensor, result: torch.Tensor, read: Read | None) -> torch.Tensor:
        """Return `result` with this bottleneck's rows replaced by their adapted `hidden` states."""
        own = _take(hidden, self.rows)
        if read is None:
            return _put(self.bottleneck(own), result, self.rows)
        return _put(self.bottleneck(own, _take(read(self.bottleneck.kind, hidden), self.rows)), result, self.rows)


class _Group:
    """Stacked bottlenecks of equal shape, and their rows: equally many for each, in the order of the bottlenecks."""

    def __init__(self, bottlenecks: list[Bottleneck], rows: list[int], in_order: bool, device: torch.device) -> None:
        self.activation = bottlenecks[0].activation
        self.down, self.down_bias = _stack_linear([bottleneck.down_proj for bottleneck in bottlenecks])
        self.up, self.up_bias = _stack_linear([bottleneck.up_proj for bottleneck in bottlenecks])
        if any(isinstance(bottleneck.scaling, nn.Parameter) or bottleneck.scaling != 1 for bottleneck in bottlenecks):
            factors = torch.stack(
                [bottleneck.scaling * torch.ones_like(bottleneck.up_proj.bias) for bottleneck in bottlenecks]
            )
            self.up, self.up_bias = self.up * factors.unsqueeze(1), self.up_bias * factors.unsqueeze(1)
        self.rows = _index(rows, in_order, device)
        # The rows of each kind, of which those of one kind follow each other.
        kinds = [bottleneck.kind for bottleneck in bottlenecks for _ in range(len(rows) // len(bottlenecks))]
        self.rows_of_kind = {
            kind: _index(
                [row for row, other in zip(rows, kinds, strict=True) if other == kind],
                in_order and len(set(kinds)) == 1,
                device,
            )
            for kind in dict.fromkeys(kinds)
        }

    def adapt(self, hidden: torch.Tensor, result: torch.Tensor, read: Read | None) -> torch.Tensor:
        """Return `result` with this group's rows replaced by their adapted `hidden` states."""
        own = inputs = _take(hidden, self.rows)
        if read is not None:
            parts = [_take(read(kind, hidden), rows) for kind, rows in self.rows_of_kind.items()]
            inputs = parts[0] if len(parts) == 1 else torch.cat(parts)
        stacked = inputs.to(self.down).reshape(self.down.shape[0], -1, hidden.shape[-1])
        branch: torch.Tensor = self.activation(torch.baddbmm(self.down_bias, stacked, self.down))
        branch = torch.baddbmm(self.up_bias, branch, self.up).reshape(own.shape)
        return _put(own + branch.to(hidden), result, self.rows)


def _index(rows: list[int], in_order: bool, device: torch.device) -> torch.Tensor | None:
    """Return the rows to gather; None for the whole batch in its order, which needs no gathering."""
    return None if in_order else torch.tensor(rows, device=device)


def _take(hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return hidden if rows is None else hidden.index_select(0, rows)


def _put(adapted: torch.Tensor, result: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return adapted if rows is None else result.index_copy(0, rows, adapted)


# Stacked weights must not be inference tensors, which cannot be used again where gradients are recorded.
@torch.inference_mode(False)
@torch.no_grad()
def _group(names: tuple[str, ...], used: Mapping[str, Bottleneck], device: torch.device) -> list[_Group | _Variant]:
    """Stack bottlenecks of the same size, activation and dtype that have about as many rows, of whichever kinds."""
    rows: dict[str, list[int]] = {name: [] for name in used}
    for row, name in enumerate(names):
        if name in rows:
            rows[name].append(row)
    result: list[_Group | _Variant] = []
    groups: dict[object, list[str]] = {}
    for name, bottleneck in used.items():
        if not _can_be_stacked(bottleneck):
            result.append(_Variant(bottleneck, rows[name], rows[name] == list(range(len(names))), device))
            continue
        weight = bottleneck.down_proj.weight
        # Rows are padded to the largest number in the group; grouping by powers of two bounds the padding.
        key = (weight.shape, weight.dtype, bottleneck.activation_name, len(rows[name]).bit_length())
        groups.setdefault(key, []).append(name)
    for members in groups.values():
        kinds = list(dict.fromkeys(used[name].kind for name in members))
        members.sort(key=lambda name: kinds.index(used[name].kind))
        most = max(len(rows[name]) for name in members)
        # Padding repeats a row, which is computed and written back twice with the same result.
        order = [row for name in members for row in rows[name] + rows[name][:1] * (most - len(rows[name]))]
        result.append(_Group([used[name] for name in members], order, order == list(range(len(names))), device))
    return result


def _can_be_stacked(bottleneck: Bottleneck) -> bool:
    """Return whether a bottleneck computes what `Bottleneck` does, from plain tensors; quantized weights are none.

    Offloaded weights, and an activation with its own weights, cannot be part of a stack either.
    """
    if type(bottleneck) is not Bottleneck or any(True for _ in bottleneck.activation.parameters()):
        return False
    weights = (getattr(layer.weight, "data", None) for layer in (bottleneck.down_proj, bottleneck.up_proj))
    return all(type(weight) is torch.Tensor and not weight.is_meta for weight in weights)


def _stack_linear(layers: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor]:
    # Transposed in memory, which a batched product reads up to a fifth faster than a transposed view.
    weights, biases = zip(*((layer.weight.t(), layer.bias) for layer in layers), strict=True)
    return torch.stack(weights), torch.stack(biases).unsqueeze(1)


@torch.inference_mode(False)
@torch.no_grad()
def _weights_of_rows(
    names: tuple[str, ...], norms: Mapping[str, nn.Module], shape: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    index = {name: position for position, name in enumerate(norms)}
    some = next(iter(norms.values()))
    rows = torch.tensor([index[name] for name in names], device=next(some.parameters()).device)
    dtype = max((next(norm.parameters()).dtype for norm in norms.values()), key=lambda dtype: dtype.itemsize)
    return {
        key: torch.stack([norm.get_parameter(key).to(dtype) for norm in norms.values()])[rows].view(shape)
        for key, _ in some.named_parameters()
    }


def rows_of(name: str, names: Sequence[str], device: torch.device) -> torch.Tensor:
    return torch.tensor([row for row, other in enumerate(names) if other == name], device=device)
