"""`MixedBatch`: the adapter of each row of a batch.

PEFT refuses `adapter_names` in training mode.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from ..heads.head import HoulsbyHead
from ..method.modules import first_tensor
from ..method.tuner_layer import BASE, Batch, HoulsbyTunerLayer, activate, batch_of
from .fan_out import FanOut
from .heads import head_key, head_of_rows
from .parts import (
    Part,
    common_adapter,
    join,
    only_name_of,
    run_adapter,
    select_rows,
    split,
)
from .rows import RowFinder, Rows
from .slots import Slots
from .stack import ChoiceOfTensor, saves_starts


class MixedBatch:
    """The adapter of each row of a batch, or "__base__" for the base model, for one call of the
    model.

    Layers and heads call `apply`. It runs a layer in parts: once per adapter, on the adapter's
    rows. Adapters that are held in slots run at once; see `Stack`.
    """

    def __init__(self, names: Sequence[str], fan_out: FanOut | None = None) -> None:
        self.names = tuple(names)
        # What repeats the texts, if they have several adapters each.
        self.fan_out = fan_out
        # Whether unlike adapters have run, so that rows of one text may differ.
        self.is_changed = False
        self.only_name = only_name_of(self.names)
        # Where the rows are in each layer's hidden states; None if nothing is known of the model.
        self.rows: Rows | None = None
        # In a CUDA graph, all rows are of adapters in the same slots: these, and each row's number,
        # which changes from batch to batch.
        self.slots_in_graph: tuple[Slots, torch.Tensor] | None = None
        # The same at all places: by the names of all rows, and the slots of a layer.
        self._parts: dict[tuple[object, ...], list[Part]] = {}

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
        is_tuned = isinstance(layer, HoulsbyTunerLayer)
        if self.only_name is not None and not (is_tuned and layer.is_in_slots(self.only_name)):
            return run_adapter(layer, self.only_name, args, kwargs)
        inputs = first_tensor((*args, *kwargs.values()))
        if inputs is None:
            return run_adapter(layer, BASE, args, kwargs)
        if self.only_name is not None:
            names: tuple[str, ...] = (self.only_name,) * len(inputs)
        else:
            common = common_adapter(layer, self.names)
            if common is not None:
                return run_adapter(layer, common, args, kwargs)
            names = self._names_of_indices(layer, inputs)
        self.is_changed = True
        parts = self._parts_of(layer, names, inputs.device)
        outputs = [self._run_part(part, layer, args, kwargs, len(names)) for part in parts]
        return join(layer, outputs, parts)

    def _names_of_indices(self, layer: Any, inputs: torch.Tensor) -> tuple[str, ...]:
        """Return the adapter of each index of the first dimension."""
        if self.rows is None:
            _check_number(len(self.names), inputs)
            return self.names
        times = self.rows.times(layer, inputs)
        if times == 1:
            return self.names
        return tuple(name for name in self.names for _ in range(times))

    def _parts_of(self, layer: Any, names: tuple[str, ...], device: torch.device) -> list[Part]:
        """Return the parts in which a layer runs: all rows of the same slots at once, and those of
        each other adapter. On a GPU, heads that differ in their values alone run at once as well.
        """
        if isinstance(layer, HoulsbyHead):
            if saves_starts(device):
                return split(names, lambda name: head_key(layer.head(name)) or name, device)
            return split(names, str, device)
        all_slots = layer.slots if isinstance(layer, HoulsbyTunerLayer) else []
        if self.slots_in_graph is not None and self.slots_in_graph[0] in all_slots:
            slots, index = self.slots_in_graph
            if self.only_name is not None:  # wherever the rows are
                index = index[:1].repeat(len(names))
            else:
                index = index.repeat_interleave(len(names) // len(index))
            return [Part(names, None, slots, ChoiceOfTensor(index))]
        key = (names, *all_slots)
        if key not in self._parts:
            self._parts[key] = split(names, partial(_slots_or_name, all_slots), device)
        return self._parts[key]

    def _run_part(
        self, part: Part, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int
    ) -> Any:
        """Return what a layer computes for a part of the rows, to which all rows that reach other
        layers inside this one then belong.
        """
        args = select_rows(args, part.index, rows)
        kwargs = select_rows(kwargs, part.index, rows) if kwargs else kwargs
        outer = self.names, self.only_name, self.rows
        self.names, self.only_name, self.rows = part.names, only_name_of(part.names), None
        try:
            if part.slots is not None:
                return part.slots.run(layer, part.choice, *args, **kwargs)
            if part.choice is None:
                return run_adapter(layer, part.names[0], args, kwargs)
            heads = [layer.head(name) for name in dict.fromkeys(part.names)]
            return layer.run_head(head_of_rows(heads, part.choice), *args, **kwargs)
        finally:
            self.names, self.only_name, self.rows = outer


def _slots_or_name(all_slots: Sequence[Slots], name: str) -> Slots | str:
    """Return the slots that hold an adapter, or its name if none do."""
    for slots in all_slots:
        if name in slots.numbers:
            return slots
    return name


def _check_number(number: int, inputs: torch.Tensor) -> None:
    """Refuse, in PEFT's words, names of which there is not one per row."""
    if number != len(inputs):
        raise ValueError(
            "Length of `adapter_names` should be the same as the number of inputs, but got "
            f"{number} and {len(inputs)} respectively."
        )


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
    with activate(finder.batches, batch), ExitStack() as stack:
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
