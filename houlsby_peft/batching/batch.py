"""`MixedBatch`: the adapter of each row of a batch, and the weights that are stacked to compute all
    rows at once.

All adapters of a position are computed in one batched matrix product instead of a loop over
adapters. Weights are stacked for one call: a forward pass or a generation. PEFT refuses
`adapter_names` in training mode.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from accelerate.utils import has_offloaded_params  # type: ignore[import-untyped]
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from torch.nn import functional as F

from ..bottleneck import Bottleneck
from ..heads.head import HoulsbyHead
from ..layer import BASE, Batch, HoulsbyLayer, HoulsbyLayerNorm, batch_of
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
        self._norms: dict[object, dict[str, torch.Tensor]] = {}
        self._indices: dict[object, torch.Tensor] = {}
        self._padded: dict[object, list[torch.Tensor | None]] = {}

    def find_rows(self, finder: RowFinder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find out where the layers have the rows, if the inputs of the model are known."""
        inputs = first_tensor(
            (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *kwargs.values())
        )
        if inputs is not None:
            if self.fan_out is None:
                check_number(self.names, inputs)
            else:
                check_number(range(self.fan_out.texts), inputs)
                args, kwargs = self.fan_out.repeat((args, kwargs))
            if self.only_name is None:
                self.rows = finder.find(len(self.names), args, kwargs)

    def apply(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a layer, a head or a wrapper of PEFT's computes: each row by its own adapter."""
        if self.only_name is not None:
            return run_adapter(layer, self.only_name, args, kwargs)
        inputs = first_tensor((*args, *kwargs.values()))
        if inputs is None or layer._get_available_adapters().isdisjoint(self.names):
            return run_adapter(layer, BASE, args, kwargs)
        self.is_changed = True
        names = self.names
        if self.rows is None:
            check_number(names, inputs)
        elif (times := self.rows.times(layer, inputs)) != 1:
            names = tuple(name for name in names for _ in range(times))
        if isinstance(layer, HoulsbyLayer):
            return self._run_bottlenecks(layer, names, *args)
        if isinstance(layer, HoulsbyLayerNorm) and len(args) + len(kwargs) == 1:
            base = layer.base_layer
            plain = next(
                (norm for norm in (nn.LayerNorm, nn.RMSNorm) if isinstance(base, norm)), type(base)
            )
            # A subclass of PyTorch's norms may do anything. The models' own norms multiply by their
            # weights last.
            if type(base).forward is plain.forward and not has_offloaded_params(base):
                return self._run_norms(layer, names, inputs)
        return self._run_each(layer, names, args, kwargs, inputs.device)

    def _run_each(
        self,
        layer: Any,
        names: Sequence[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
    ) -> Any:
        """Run a layer of any kind once per adapter."""
        index = {
            name: torch.tensor(
                [row for row, other in enumerate(names) if other == name], device=device
            )
            for name in dict.fromkeys(names)
        }
        outputs = []
        for name, rows in index.items():
            own_args, own_kwargs = select_rows((args, kwargs), rows, len(names))
            with self._only(name):
                outputs.append(run_adapter(layer, name, own_args, own_kwargs))
        return _join(layer, outputs, list(index.values()))

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
        # A GPU waits for what Python does per adapter here and in `_group`, so it is little.
        elsewhere = layer.houlsby_owner
        owners = {name: elsewhere.get(name, layer) for name in dict.fromkeys(names)}
        key = (names, hidden.device, tuple(owners.items()))
        if key not in self._groups:
            if self.is_one_pass:
                self._groups.clear()
            used = {
                name: held[name]
                for name, owner in owners.items()
                if name in (held := owner.houlsby_adapter)
            }
            self._groups[key] = self._group(used, names, hidden.device)
        result = hidden
        for group in self._groups[key]:
            own = _take(hidden, group.rows)
            if group.stack is None:
                with self._only(group.name):
                    own_residual = None if residual is None else _take(residual, group.rows)
                    adapted = layer.run_adapter(group.name, own, own_residual)
            else:
                read, shape = own, (group.size, -1, own.shape[-1])
                if layer.skip is not None and group.stack.kind != "houlsby":
                    read = _take(layer.skip.read(group.stack.kind, hidden, residual), group.rows)
                adapted = group.stack.forward(own.reshape(shape), read.reshape(shape)).reshape(
                    own.shape
                )
            adapted = _take(adapted, group.kept)
            result = (
                adapted if group.written is None else result.index_copy(0, group.written, adapted)
            )
        return result

    def _group(
        self, used: Mapping[str, Any], names: Sequence[str], device: torch.device
    ) -> list[_Group]:
        """Group the adapters whose bottlenecks can be stacked and that have about as many rows."""
        rows: dict[str, list[int]] = {name: [] for name in used}
        for row, name in enumerate(names):
            if name in rows:
                rows[name].append(row)
        members: dict[object, list[str]] = {}
        for name, bottleneck in used.items():
            facts = _facts(bottleneck)
            # Rows are padded to the largest number in the group; grouping by powers of two bounds
            # the padding.
            key: object = name if facts is None else (facts, len(rows[name]).bit_length())
            members.setdefault(key, []).append(name)
        groups = []
        for key, group in members.items():
            same = (names, *group, device)
            if same not in self._padded:  # as in the layers before
                most = max(len(rows[name]) for name in group)
                # Padding repeats a row, which is written back once: the gradient would be that of
                # both.
                order = [
                    row
                    for name in group
                    for row in rows[name] + rows[name][:1] * (most - len(rows[name]))
                ]
                own = [
                    each * most + i
                    for each, name in enumerate(group)
                    for i in range(len(rows[name]))
                ]
                lists = (
                    (order, len(names)),
                    (own, len(order)),
                    ([order[position] for position in own], len(names)),
                )
                self._padded[same] = [self._index(*each, device) for each in lists]
            stack = None if isinstance(key, str) else _stack([used[name] for name in group])
            index, kept, written = self._padded[same]
            groups.append(_Group(group[0], len(group), index, kept, written, stack))
        return groups

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
        """Normalize all rows at once, and then apply to each row the weights of its adapter's norm."""
        key = (layer, names, hidden.dim(), hidden.device)
        if key not in self._norms:
            norms: dict[str, Any] = {name: layer.norm(name) for name in dict.fromkeys(names)}
            some = norms[names[0]]
            order = {name: position for position, name in enumerate(norms)}
            device = next(some.parameters()).device
            index = self._index([order[name] for name in names], len(norms), device)
            shape = (len(names), *[1] * (hidden.dim() - 2), hidden.shape[-1])
            self._norms[key] = {
                part: _take(
                    torch.stack([norm._parameters[part] for norm in norms.values()]), index
                ).view(shape)
                for part, _ in some.named_parameters()
            }
        rows, base = self._norms[key], layer.base_layer
        wide = hidden.to(rows["weight"].dtype)
        if isinstance(base, nn.LayerNorm):
            result = F.layer_norm(wide, wide.shape[-1:], eps=base.eps)
            result = (
                torch.addcmul(rows["bias"], result, rows["weight"])
                if "bias" in rows
                else result * rows["weight"]
            )
        elif isinstance(base, nn.RMSNorm):
            result = F.rms_norm(wide, wide.shape[-1:], eps=base.eps) * rows["weight"]
        else:
            result = torch.func.functional_call(base, rows, (wide,))
        return result.to(hidden.dtype)


def check_number(names: Sequence[object], inputs: torch.Tensor) -> None:
    """Refuse, in PEFT's words, names of which there is not one per row."""
    if len(names) != len(inputs):
        raise ValueError(
            "Length of `adapter_names` should be the same as the number of inputs, but got "
            f"{len(names)} and {len(inputs)} respectively."
        )


@dataclass(frozen=True)
class _Group:
    """Adapters of one position that are computed at once, and have equally many rows."""

    # The first one.
    name: str
    # How many they are.
    size: int
    # Their rows, in the order of the adapters; None for the whole batch in its order.
    rows: torch.Tensor | None
    # What of these is no padding, and which rows of the batch it is; None for all of them.
    kept: torch.Tensor | None
    written: torch.Tensor | None
    # A bottleneck with the stacked weights of all of them; None if the first one's own is run.
    stack: Bottleneck | None


_MODULES = {"down_proj", "activation", "up_proj", "dropout"}
_PLAIN = (nn.Parameter, torch.Tensor)


def _facts(bottleneck: Any) -> tuple[object, ...] | None:
    """Return all but the values of its weights that determines what a bottleneck computes in
    evaluation; None if it cannot be part of a stack.

    That needs the library's own class with plain weights in its projections and scaling only: no
    quantized, sharded or offloaded weights, and no activation with its own.
    """
    parameters, modules = bottleneck._parameters, bottleneck._modules
    if (
        type(bottleneck) is not Bottleneck
        or parameters.keys() - {"scaling"}
        or modules.keys() != _MODULES
    ):
        return None
    activation, down, up = (
        modules[name]._parameters for name in ("activation", "down_proj", "up_proj")
    )
    if activation or modules["activation"]._modules:
        return None
    down, up = down.get("weight"), up.get("weight")
    if type(down) not in _PLAIN or type(up) not in _PLAIN or down.is_meta or up.is_meta:
        return None
    own = [fact for fact in vars(bottleneck).items() if fact[0][0] != "_"]
    return (*own, *parameters, down.shape, down.dtype)


def _stack(bottlenecks: Sequence[Any]) -> Bottleneck:
    """Return a bottleneck that computes several at once, on hidden states of the shape
    (bottlenecks, tokens, width).

    It runs the same code, so that an option of `Bottleneck` without weights needs no code here.
    """
    stack: Bottleneck = copy.copy(bottlenecks[0])
    stack._modules = stack._modules | {
        name: _StackedLinear([bottleneck._modules[name]._parameters for bottleneck in bottlenecks])
        for name in ("down_proj", "up_proj")
    }
    if stack._parameters:
        scalings = torch.stack([bottleneck.scaling for bottleneck in bottlenecks])
        stack._parameters = {"scaling": scalings.unsqueeze(1)}  # type: ignore[dict-item]
    return stack


class _StackedLinear(nn.Module):
    def __init__(self, layers: Sequence[Mapping[str, torch.Tensor]]) -> None:
        super().__init__()
        self.weight = torch.stack([layer["weight"] for layer in layers])
        self.bias = torch.stack([layer["bias"] for layer in layers]).unsqueeze(1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(self.bias, hidden, self.weight.mT)


def _take(hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return hidden if rows is None else hidden.index_select(0, rows)


def _join(layer: nn.Module, outputs: Sequence[Any], rows: Sequence[torch.Tensor]) -> Any:
    """Return one output with all rows. Heads with fewer outputs than the widest are filled up with
    -inf.

    No softmax or argmax ever chooses what is filled up.
    """
    first = outputs[0]
    if isinstance(first, tuple) and not any(isinstance(value, torch.Tensor) for value in first[1:]):
        return (_join(layer, [output[0] for output in outputs], rows), *first[1:])
    if not all(
        isinstance(output, torch.Tensor) and output.shape[:1] == (len(own),)
        for output, own in zip(outputs, rows, strict=True)
    ):
        raise TypeError(
            "In a mixed batch, a module must return one tensor with a row per example; "
            f"{type(getattr(layer, 'original_module', layer)).__name__} does not. Run the rows of each adapter "
            "separately."
        )
    if first.dim() == 1:
        return torch.cat(list(outputs))[torch.cat(list(rows)).argsort()]
    number, width = sum(map(len, rows)), max(output.shape[-1] for output in outputs)
    # The base model's head may be in another precision.
    dtype = reduce(torch.promote_types, (output.dtype for output in outputs))
    result = first.new_full((number, *first.shape[1:-1], width), float("-inf"), dtype=dtype)
    for output, own in zip(outputs, rows, strict=True):
        result[own, ..., : output.shape[-1]] = output.to(dtype)
    return result


@contextmanager
def run_mixed_batch(
    finder: RowFinder,
    names: Sequence[Any],
    known: Collection[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Iterator[None]:
    """Within this context and thread, apply to each row its own adapter; one with several becomes
    as many rows.
    """
    if finder.model.training:
        raise ValueError(
            "Cannot pass `adapter_names` when the model is in training mode; call model.eval() first."
        )
    fan_out = None
    if any(isinstance(each, (list, tuple)) for each in names):
        fan_out = FanOut(names)
        names = fan_out.names
    if unknown := sorted(set(names) - {BASE} - set(known)):
        raise ValueError(
            f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}. Loaded are {', '.join(known)}; rows "
            f"of the base model are named {BASE!r}."
        )
    batch = MixedBatch(names, fan_out)
    with finder.activate(batch), ExitStack() as stack:
        batch.find_rows(finder, args, kwargs)
        if fan_out is not None:
            is_running = lambda: batch_of(finder.batches) is batch  # noqa: E731
            stack.enter_context(fan_out.attach(finder.model, is_running, lambda: batch.is_changed))
        yield


def hook_other_wrappers(model: nn.Module, batches: Mapping[int, Batch]) -> None:
    """Let the wrappers that PEFT has added itself, for trained tokens and other methods, follow
    mixed batches.
    """
    for module in model.modules():
        is_other = isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(
            module, HoulsbyHead
        )
        if is_other and "follows_mixed_batches" not in vars(module):
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
    return output if batch is None or module.disable_adapters else batch.apply(module, args, kwargs)
