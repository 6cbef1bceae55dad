"""`MixedBatch`: the adapter of each row of a batch, and stacked weights that compute all rows at
once.

One batched matrix product computes all adapters of a position. Weights are stacked for one call: a
forward pass or a generation. PEFT refuses `adapter_names` in training mode.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import has_offloaded_params
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from torch.nn import functional as F

from ..bottleneck import Bottleneck
from ..heads.head import HoulsbyHead
from ..layer import HoulsbyLayer, HoulsbyLayerNorm
from ..tuner_layer import BASE, Batch, batch_of
from .fan_out import FanOut
from .rows import RowFinder, Rows, first_tensor, run_adapter, select_rows


class MixedBatch:
    """The adapter of each row of a batch, or "__base__" for the base model, for one call of the
    model.

    Layers and heads call `apply`. It runs a layer once per adapter on the adapter's rows, with two
    faster ways for bottlenecks and norms whose weights can be stacked. If all rows have one
    adapter, nothing is stacked.
    """

    def __init__(self, names: Sequence[str], fan_out: FanOut | None = None) -> None:
        self.names = tuple(names)
        # What repeats the texts, if they have several adapters each.
        self.fan_out = fan_out
        # Whether an adapter has run, so that rows of one text may differ.
        self.is_changed = False
        self.only_name = self.names[0] if len(set(self.names)) == 1 else None
        # Where the rows are in each layer's hidden states; None if nothing is known of the model.
        self.rows: Rows | None = None
        # Whether each layer runs once, as it does unless tokens are generated.
        self.is_one_pass = False
        # By the layers that own the bottlenecks. In one pass only the last ones are kept, which the
        # next place may share; the next stack then takes the same memory.
        self._groups: dict[object, list[_Group]] = {}
        self._norm_weights: dict[object, dict[str, torch.Tensor]] = {}
        self._indices: dict[object, torch.Tensor | None] = {}
        self._padded: dict[object, _PaddedRows] = {}

    def find_rows(self, finder: RowFinder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find out where the layers have the rows, if the inputs of the model are known."""
        candidates = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *kwargs.values())
        inputs = first_tensor((*args, *candidates))
        if inputs is None:
            return
        if self.fan_out is None:
            _check_number(len(self.names), inputs)
        else:
            _check_number(self.fan_out.texts, inputs)
            args, kwargs = self.fan_out.repeat((args, kwargs))
        if self.only_name is None:
            self.rows = finder.find(len(self.names), args, kwargs)

    def apply(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a layer, a head or a wrapper of PEFT's computes: each row by its own
        adapter.
        """
        if self.only_name is not None:
            return run_adapter(layer, self.only_name, args, kwargs)
        inputs = first_tensor((*args, *kwargs.values()))
        if inputs is None or layer._get_available_adapters().isdisjoint(self.names):
            return run_adapter(layer, BASE, args, kwargs)
        self.is_changed = True
        names = self._names_of_indices(layer, inputs)
        if isinstance(layer, HoulsbyLayer):
            return self._run_bottlenecks(layer, names, *args)
        is_norm = isinstance(layer, HoulsbyLayerNorm) and len(args) + len(kwargs) == 1
        if is_norm and _multiplies_last(layer.base_layer):
            return self._run_norms(layer, names, inputs)
        return self._run_each(layer, names, args, kwargs, inputs.device)

    def _names_of_indices(self, layer: Any, inputs: torch.Tensor) -> tuple[str, ...]:
        """Return the adapter of each index of the first dimension."""
        if self.rows is None:
            _check_number(len(self.names), inputs)
            return self.names
        times = self.rows.times(layer, inputs)
        if times == 1:
            return self.names
        return tuple(name for name in self.names for _ in range(times))

    def _run_each(
        self,
        layer: Any,
        names: Sequence[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
    ) -> Any:
        """Run a layer of any kind once per adapter."""
        outputs, indices = [], []
        for name, rows in _rows_by_name(names).items():
            index = torch.tensor(rows, device=device)
            selected_args, selected_kwargs = select_rows((args, kwargs), index, len(names))
            with self._only(name):
                outputs.append(run_adapter(layer, name, selected_args, selected_kwargs))
            indices.append(index)
        return _join(layer, outputs, indices)

    @contextmanager
    def _only(self, name: str) -> Iterator[None]:
        """Within this context, all rows that reach a layer are of one adapter."""
        self.only_name = name
        try:
            yield
        finally:
            self.only_name = None

    def _run_bottlenecks(
        self,
        layer: HoulsbyLayer,
        names: tuple[str, ...],
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """Apply to each row the bottleneck of its adapter.

        Args:
            layer: The layer with the bottlenecks.
            names: The adapter of each row.
            hidden: Hidden states h of the shape `(rows, ..., width)`.
            residual: The residual input x, of the same shape, if it has entered.
        """
        # A GPU waits for what Python does per adapter here and in `_group`, so it is little.
        elsewhere = layer.houlsby_owner
        owners = {name: elsewhere.get(name, layer) for name in dict.fromkeys(names)}
        key = (names, hidden.device, tuple(owners.items()))
        if key not in self._groups:
            if self.is_one_pass:
                self._groups.clear()
            self._groups[key] = self._group(owners, names, hidden.device)
        result = hidden
        for group in self._groups[key]:
            adapted = _take(self._run_group(layer, group, hidden, residual), group.rows.unpadded)
            if group.rows.targets is None:
                result = adapted
            else:
                result = result.index_copy(0, group.rows.targets, adapted)
        return result

    def _run_group(
        self,
        layer: HoulsbyLayer,
        group: _Group,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """Apply the bottlenecks of a group to its rows, of the shape `(group rows, ..., width)`."""
        rows = _take(hidden, group.rows.sources)
        if group.stack is None:
            if residual is not None:
                residual = _take(residual, group.rows.sources)
            with self._only(group.name):
                return layer.run_adapter(group.name, rows, residual)
        read = rows
        if layer.skip is not None and group.stack.kind != "houlsby":
            read = layer.skip.read(group.stack.kind, hidden, residual)
            read = _take(read, group.rows.sources)
        # The rows of each adapter in succession.
        shape = (group.size, -1, rows.shape[-1])
        adapted = group.stack.forward(rows.reshape(shape), read.reshape(shape))
        return adapted.reshape(rows.shape)

    def _group(
        self, owners: Mapping[str, HoulsbyLayer], names: Sequence[str], device: torch.device
    ) -> list[_Group]:
        """Group the adapters whose bottlenecks can be stacked and that have about as many rows."""
        rows = _rows_by_name(names)
        members: dict[object, dict[str, Any]] = {}
        for name, owner in owners.items():
            if name not in owner.houlsby_adapter:
                continue
            bottleneck = owner.houlsby_adapter[name]
            key: object = name
            stacking_key = _stacking_key(bottleneck)
            if stacking_key is not None:
                # Rows are padded to the largest number in the group. Grouping by powers of two
                # bounds the padding.
                key = (stacking_key, len(rows[name]).bit_length())
            members.setdefault(key, {})[name] = bottleneck
        groups = []
        for key, bottlenecks in members.items():
            first, *_ = bottlenecks
            padded = self._pad([rows[name] for name in bottlenecks], names, device)
            stack = None
            if key != first:
                stack = _stack(list(bottlenecks.values()))
            groups.append(_Group(first, len(bottlenecks), padded, stack))
        return groups

    def _pad(
        self, rows: Sequence[list[int]], names: Sequence[str], device: torch.device
    ) -> _PaddedRows:
        """Return the rows of each adapter of a group, padded to the largest number of rows."""
        key = (len(names), *map(tuple, rows), device)
        if key not in self._padded:  # as in the layers before
            most = max(map(len, rows))
            sources: list[int] = []
            unpadded: list[int] = []
            targets: list[int] = []
            for rows_of_adapter in rows:
                unpadded += range(len(sources), len(sources) + len(rows_of_adapter))
                targets += rows_of_adapter
                # Padding repeats a row, which is written back once: the gradient would be that of
                # both.
                padding = most - len(rows_of_adapter)
                sources += [*rows_of_adapter, *rows_of_adapter[:1] * padding]
            self._padded[key] = _PaddedRows(
                self._index(sources, len(names), device),
                self._index(unpadded, len(sources), device),
                self._index(targets, len(names), device),
            )
        return self._padded[key]

    def _index(self, rows: list[int], count: int, device: torch.device) -> torch.Tensor | None:
        """Return an index of these rows; None for all of them in their order.

        Copying one to a GPU waits for all of its work, and cannot be captured in a graph, so all
        layers share it.
        """
        if rows == list(range(count)):
            return None
        key = (*rows, device)
        if key not in self._indices:
            self._indices[key] = torch.tensor(rows, device=device)
        return self._indices[key]

    def _run_norms(
        self, layer: HoulsbyLayerNorm, names: tuple[str, ...], hidden: torch.Tensor
    ) -> torch.Tensor:
        """Normalize all rows at once, and apply to each row the weights of its adapter's norm.

        Args:
            layer: The layer with the norms.
            names: The adapter of each row.
            hidden: Hidden states of the shape `(rows, ..., width)`.
        """
        weights, norm = self._weights_of_rows(layer, names, hidden), layer.base_layer
        wide = hidden.to(weights["weight"].dtype)
        if isinstance(norm, nn.LayerNorm):
            result = F.layer_norm(wide, wide.shape[-1:], eps=norm.eps)
            if "bias" in weights:
                result = torch.addcmul(weights["bias"], result, weights["weight"])
            else:
                result = result * weights["weight"]
        elif isinstance(norm, nn.RMSNorm):
            result = F.rms_norm(wide, wide.shape[-1:], eps=norm.eps) * weights["weight"]
        else:
            result = torch.func.functional_call(norm, weights, (wide,))
        return result.to(hidden.dtype)

    def _weights_of_rows(
        self, layer: HoulsbyLayerNorm, names: tuple[str, ...], hidden: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return each weight of the rows' norms by name, of the shape `(rows, 1, ..., width)`."""
        key = (layer, names, hidden.dim(), hidden.device)
        if key not in self._norm_weights:
            norms: dict[str, Any] = {name: layer.norm(name) for name in dict.fromkeys(names)}
            positions = {name: position for position, name in enumerate(norms)}
            parts = dict(norms[names[0]].named_parameters())
            device = parts["weight"].device
            index = self._index([positions[name] for name in names], len(norms), device)
            shape = (len(names), *[1] * (hidden.dim() - 2), hidden.shape[-1])
            weights = {}
            for part in parts:
                weights[part] = _take(_stack_weights(norms.values(), part), index).view(shape)
            self._norm_weights[key] = weights
        return self._norm_weights[key]


def _check_number(number: int, inputs: torch.Tensor) -> None:
    """Refuse, in PEFT's words, names of which there is not one per row."""
    if number != len(inputs):
        raise ValueError(
            "Length of `adapter_names` should be the same as the number of inputs, but got "
            f"{number} and {len(inputs)} respectively."
        )


def _rows_by_name(names: Sequence[str]) -> dict[str, list[int]]:
    """Return the rows of each adapter."""
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows.setdefault(name, []).append(row)
    return rows


def _multiplies_last(norm: nn.Module) -> bool:
    """Return whether a norm multiplies by its weights last, and they are at hand.

    The models' own norms do. A subclass of PyTorch's norms may do anything.
    """
    for kind in (nn.LayerNorm, nn.RMSNorm):
        if isinstance(norm, kind) and type(norm).forward is not kind.forward:
            return False
    return not has_offloaded_params(norm)


@dataclass(frozen=True)
class _PaddedRows:
    """The rows of a group of adapters, equally many of each; None: all rows in their order."""

    # The rows that are read: the first adapter's and their padding, then the second one's.
    sources: torch.Tensor | None
    # The positions among these that are no padding, and the rows that they are written to.
    unpadded: torch.Tensor | None
    targets: torch.Tensor | None


@dataclass(frozen=True)
class _Group:
    """Adapters of one position that are computed at once, and have equally many rows."""

    # The first one.
    name: str
    # How many they are.
    size: int
    rows: _PaddedRows
    # A bottleneck with the stacked weights of all of them; None if the first one's own is run.
    stack: Bottleneck | None


_MODULES = {"down_proj", "activation", "up_proj", "dropout"}


def _stacking_key(bottleneck: Any) -> tuple[object, ...] | None:
    """Return what bottlenecks in one stack have in common; None if one cannot be part of a stack.

    It is all that determines what a bottleneck computes in evaluation, except for the values of its
    weights. A stack needs the library's own class with plain weights in its projections and scaling
    only: no quantized, sharded or offloaded weights, and no activation with weights.
    """
    parameters, modules = bottleneck._parameters, bottleneck._modules
    if type(bottleneck) is not Bottleneck or modules.keys() != _MODULES:
        return None
    activation, down_proj = modules["activation"], modules["down_proj"]
    if parameters.keys() - {"scaling"} or activation._parameters or activation._modules:
        return None
    weight = down_proj._parameters.get("weight")
    if not _is_plain(weight) or not _is_plain(modules["up_proj"]._parameters.get("weight")):
        return None
    options = [option for option in vars(bottleneck).items() if not option[0].startswith("_")]
    return (*options, *parameters, weight.shape, weight.dtype)


def _is_plain(weight: torch.Tensor | None) -> bool:
    return type(weight) in (nn.Parameter, torch.Tensor) and not weight.is_meta  # type: ignore[union-attr]


def _stack(bottlenecks: Sequence[Any]) -> Bottleneck:
    """Return a bottleneck that computes several at once, on hidden states of the shape
    `(bottlenecks, tokens, width)`.

    It runs the same code, so that an option of `Bottleneck` without weights needs no code here.
    """
    stack: Bottleneck = copy.copy(bottlenecks[0])
    stack._modules = dict(stack._modules)
    for name in ("down_proj", "up_proj"):
        layers = [bottleneck._modules[name] for bottleneck in bottlenecks]
        stack._modules[name] = _StackedLinear(layers)
    if stack._parameters:
        scalings = _stack_weights(bottlenecks, "scaling").unsqueeze(1)
        stack._parameters = {"scaling": scalings}  # type: ignore[dict-item]
    return stack


class _StackedLinear(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.weight = _stack_weights(layers, "weight")
        self.bias = _stack_weights(layers, "bias").unsqueeze(1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Transform `(layers, tokens, inputs)` to `(layers, tokens, outputs)`."""
        return torch.baddbmm(self.bias, hidden, self.weight.mT)


def _stack_weights(modules: Iterable[Any], name: str) -> torch.Tensor:
    """Stack a weight of several modules, to the shape `(modules, ...)`."""
    return torch.stack([module._parameters[name] for module in modules])


def _take(hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return hidden if rows is None else hidden.index_select(0, rows)


def _join(layer: nn.Module, outputs: Sequence[Any], indices: Sequence[torch.Tensor]) -> Any:
    """Return one output with all rows, from outputs of the shapes `(rows of one adapter, ...)`.

    Heads with fewer outputs than the widest are filled up with -inf, which no softmax or argmax
    ever chooses.
    """
    first = outputs[0]
    if isinstance(first, tuple) and not any(isinstance(value, torch.Tensor) for value in first[1:]):
        hidden = _join(layer, [output[0] for output in outputs], indices)
        return (hidden, *first[1:])
    for output, index in zip(outputs, indices, strict=True):
        if not isinstance(output, torch.Tensor) or output.shape[:1] != (len(index),):
            module = getattr(layer, "original_module", layer)
            raise TypeError(
                "In a mixed batch, a module must return one tensor with a row per example; "
                f"{type(module).__name__} does not. Run the rows of each adapter separately."
            )
    if first.dim() == 1:
        return torch.cat(list(outputs))[torch.cat(list(indices)).argsort()]
    rows, width, dtype = 0, 0, first.dtype
    for output in outputs:
        rows += len(output)
        width = max(width, output.shape[-1])
        # The base model's head may be in another precision.
        dtype = torch.promote_types(dtype, output.dtype)
    result = first.new_full((rows, *first.shape[1:-1], width), float("-inf"), dtype=dtype)
    for output, index in zip(outputs, indices, strict=True):
        result[index, ..., : output.shape[-1]] = output.to(dtype)
    return result


@contextmanager
def run_mixed_batch(
    finder: RowFinder,
    names: Sequence[Any],
    adapters: Collection[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Iterator[None]:
    """Within this context and thread, apply to each row its own adapter.

    A row with a list of adapters becomes as many rows.
    """
    if finder.model.training:
        raise ValueError(
            "Cannot pass `adapter_names` when the model is in training mode; call model.eval() "
            "first."
        )
    fan_out = None
    if any(isinstance(name, (list, tuple)) for name in names):
        fan_out = FanOut(names)
        names = fan_out.names
    unknown = sorted(set(names) - {BASE} - set(adapters))
    if unknown:
        raise ValueError(
            f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}. Loaded are "
            f"{', '.join(adapters)}; rows of the base model are named {BASE!r}."
        )
    batch = MixedBatch(names, fan_out)
    with finder.activate(batch), ExitStack() as stack:
        batch.find_rows(finder, args, kwargs)
        if fan_out is not None:
            stack.enter_context(fan_out.attach(finder.model, batch, finder.batches))
        yield


def hook_other_wrappers(model: nn.Module, batches: Mapping[int, Batch]) -> None:
    """Let the wrappers that PEFT has added itself, for trained tokens and other methods, follow
    mixed batches.
    """
    for module in model.modules():
        is_wrapper = isinstance(module, AuxiliaryTrainingWrapper)
        if not is_wrapper or isinstance(module, HoulsbyHead):
            continue
        if "follows_mixed_batches" not in vars(module):
            vars(module)["follows_mixed_batches"] = True
            # A copy of the model gets a copy of this, with its own batches.
            module.register_forward_hook(partial(_run_rows, batches), with_kwargs=True)


def _run_rows(
    batches: Mapping[int, Batch],
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> Any:
    batch = batch_of(batches)
    if batch is None or module.disable_adapters:
        return output
    return batch.apply(module, args, kwargs)
