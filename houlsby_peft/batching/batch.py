"""`MixedBatch`: the adapter of each row of a batch.

PEFT refuses `adapter_names` in training mode.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from ..heads.head import HoulsbyHead
from ..method.layer import HoulsbyLayerNorm
from ..method.tuner_layer import BASE, Batch, HoulsbyTunerLayer, batch_of
from .fan_out import FanOut
from .heads import head_key, head_of_rows, saves_starts
from .parts import (
    Part,
    common_source,
    first_tensor,
    index_of,
    join,
    run_adapter,
    select_rows,
    split,
)
from .rows import RowFinder, Rows
from .slots import Slots
from .stack import Choice, ChoiceOfTensor


class MixedBatch:
    """The adapter of each row of a batch, or "__base__" for the base model, for one call of the
    model.

    Layers and heads call `apply`. It runs a layer once per adapter, on the adapter's rows. Adapters
    that are held in slots run at once; see `Stack`.
    """

    def __init__(self, names: Sequence[str], fan_out: FanOut | None = None) -> None:
        self.names = tuple(names)
        # What repeats the texts, if they have several adapters each.
        self.fan_out = fan_out
        # Whether unlike adapters have run, so that rows of one text may differ.
        self.is_changed = False
        self.only_name = self.names[0] if len(set(self.names)) == 1 else None
        # Where the rows are in each layer's hidden states; None if nothing is known of the model.
        self.rows: Rows | None = None
        # In a CUDA graph, all rows are of adapters in the same slots: these, and each row's number,
        # which changes from batch to batch.
        self.slots_in_graph: tuple[Slots, torch.Tensor] | None = None
        # What is the same at all places: the rows of each adapter by the names of all rows, and by
        # slots and names the rows in slots.
        self._parts: dict[tuple[str, ...], list[Part]] = {}
        self._in_slots: dict[tuple[Slots, tuple[str, ...]], tuple[Choice, _Selection]] = {}
        self._choices: dict[tuple[int, ...], Choice] = {}

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
        inputs = first_tensor((*args, *kwargs.values()))
        if self.only_name is not None:
            if inputs is None or not _is_held(layer, self.only_name):
                return run_adapter(layer, self.only_name, args, kwargs)
            names: tuple[str, ...] = (self.only_name,) * len(inputs)
        elif inputs is None:
            return run_adapter(layer, BASE, args, kwargs)
        elif (source := common_source(layer, self.names)) is not None:
            return run_adapter(layer, source, args, kwargs)
        else:
            names = self._names_of_indices(layer, inputs)
        self.is_changed = True
        if isinstance(layer, HoulsbyTunerLayer) and layer.slots:
            return self._run_slots(layer, names, *args)
        if isinstance(layer, HoulsbyHead) and saves_starts(inputs):
            return self._run_heads(layer, names, args, kwargs, inputs.device)
        return self._run_modules(layer, names, args, kwargs, inputs.device)

    def _names_of_indices(self, layer: Any, inputs: torch.Tensor) -> tuple[str, ...]:
        """Return the adapter of each index of the first dimension."""
        if self.rows is None:
            _check_number(len(self.names), inputs)
            return self.names
        times = self.rows.times(layer, inputs)
        if times == 1:
            return self.names
        return tuple(name for name in self.names for _ in range(times))

    def _run_modules(
        self,
        layer: Any,
        names: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
    ) -> Any:
        """Run a layer of any kind once per adapter, on its rows."""
        if names not in self._parts:
            self._parts[names] = split(names, device)
        parts = self._parts[names]
        outputs = []
        try:
            for part in parts:
                # All rows that reach a layer inside this one are of the adapter.
                self.only_name = part.name
                args_of_part = select_rows(args, part.index, len(names))
                kwargs_of_part = kwargs and select_rows(kwargs, part.index, len(names))
                outputs.append(run_adapter(layer, part.name, args_of_part, kwargs_of_part))
        finally:
            self.only_name = None
        return join(layer, outputs, parts)

    def _run_heads(
        self,
        layer: HoulsbyHead,
        names: Sequence[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
    ) -> Any:
        """Run once all heads that differ in their weights' values alone."""
        members: dict[object, dict[str, nn.Module]] = {}
        for name in dict.fromkeys(names):
            head = layer.head(name)
            members.setdefault(head_key(head) or name, {})[name] = head
        outputs, parts = [], []
        for several in members.values():
            first, *others = several
            rows = [row for row, name in enumerate(names) if name in several]
            part = Part(first, len(rows), index_of(rows, device))
            args_of_part, kwargs_of_part = select_rows((args, kwargs), part.index, len(names))
            head = several[first]
            if others:
                numbers = {name: number for number, name in enumerate(several)}
                choice = self._share(Choice([numbers[names[row]] for row in rows]))
                head = head_of_rows(list(several.values()), choice)
            self.only_name = first
            try:
                outputs.append(layer.run_head(head, *args_of_part, **kwargs_of_part))
            finally:
                self.only_name = None
            parts.append(part)
        return join(layer, outputs, parts)

    def _run_slots(
        self,
        layer: Any,
        names: tuple[str, ...],
        hidden: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply to each row the bottleneck or norm of its adapter: those in the same slots at once,
        and each of the others.

        Args:
            layer: The layer with the slots.
            names: The adapter of each row.
            hidden: Hidden states h of the shape `(rows, ..., width)`.
            residual: The residual input x, of the same shape, if it has entered.
        """
        result = hidden
        for slots in layer.slots:
            choice, rows = self._choose_in(slots, names)
            if not len(choice):
                continue
            stack, states = slots.stacks[layer], rows.take(hidden)
            if isinstance(layer, HoulsbyLayerNorm):
                changed = stack.run_norm(states, choice)
            elif layer.skip is None or stack.module.kind == "houlsby":
                changed = stack.run_bottleneck(states, states, choice)
            else:
                read = layer.skip.read(stack.module.kind, hidden, residual)
                changed = stack.run_bottleneck(states, rows.take(read), choice)
            result = rows.put(result, changed)
        others = [name for name in dict.fromkeys(names) if not layer.is_in_slots(name)]
        outer_name = self.only_name
        for name in others:
            _, rows = self._choose({name: 0}, names)
            inputs = [rows.take(states) for states in (hidden, residual) if states is not None]
            self.only_name = name
            try:
                changed = layer.run_adapter(name, *inputs)
            finally:
                self.only_name = outer_name
            result = rows.put(result, changed)
        return result

    def _choose_in(self, slots: Slots, names: tuple[str, ...]) -> tuple[Choice, _Selection]:
        """Return the slot of each row that has one."""
        if self.slots_in_graph is not None and self.slots_in_graph[0] is slots:
            _, index = self.slots_in_graph
            if self.only_name is not None:  # wherever the rows are
                return ChoiceOfTensor(index[:1].repeat(len(names))), _ALL
            return ChoiceOfTensor(index.repeat_interleave(len(names) // len(index))), _ALL
        key = (slots, names)
        if key not in self._in_slots:
            self._in_slots[key] = self._choose(slots.numbers, names)
        return self._in_slots[key]

    def _choose(
        self, numbers: Mapping[str, int], names: Sequence[str]
    ) -> tuple[Choice, _Selection]:
        """Return the adapter of each of their rows, those of one adapter together, and the rows."""
        ranks = {name: rank for rank, name in enumerate(dict.fromkeys(names))}
        rows = [row for row, name in enumerate(names) if name in numbers]
        rows.sort(key=lambda row: ranks[names[row]])
        choice = self._share(Choice([numbers[names[row]] for row in rows]))
        if rows == list(range(len(names))):
            return choice, _ALL
        return choice, _Selection(self._share(Choice(rows)))

    def _share(self, choice: Choice) -> Choice:
        """Return the first choice with these numbers: its tensor serves all places."""
        return self._choices.setdefault(choice.numbers, choice)


def _is_held(layer: Any, name: str) -> bool:
    """Return whether an adapter is held in slots at a layer, and has no module there."""
    return isinstance(layer, HoulsbyTunerLayer) and layer.is_in_slots(name)


def _check_number(number: int, inputs: torch.Tensor) -> None:
    """Refuse, in PEFT's words, names of which there is not one per row."""
    if number != len(inputs):
        raise ValueError(
            "Length of `adapter_names` should be the same as the number of inputs, but got "
            f"{number} and {len(inputs)} respectively."
        )


@dataclass(frozen=True)
class _Selection:
    """Some rows of a batch, in some order; None: all of them as they are."""

    rows: Choice | None

    def take(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return these rows."""
        return hidden if self.rows is None else self.rows.take(hidden)

    def put(self, hidden: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        """Return all rows, with these as they have been changed."""
        if self.rows is None:
            return changed
        return hidden.index_copy(0, self.rows.index(hidden.device), changed)


_ALL = _Selection(None)


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
