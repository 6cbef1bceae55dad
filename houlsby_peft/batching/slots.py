"""`Slots`: adapters that are held for prediction alone, as rows of one tensor.

These adapters have the same shapes at the same layers. The numbers of one adapter are a row, and
each weight of all adapters is a view `(slots, ...)` of the same columns, so that an adapter costs
its numbers and no module. An adapter that may be trained, saved or moved keeps weights of its own:
PyTorch would write all slots where one is pickled, and a weight that is set anew would leave its
slot behind.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..method.bottleneck import Bottleneck
from .stack import Stack, stacking_key


class Slots:
    """Adapters of one form, each a number in the stacks of the layers.

    Args:
        modules: By layer, what an adapter of this form applies there. Layers that share a
            bottleneck have the same module. All weights have one dtype and device, and their values
            are not used.
    """

    def __init__(self, modules: Mapping[Any, Any]) -> None:
        # By the name of an adapter.
        self.numbers: dict[str, int] = {}
        by_module: dict[Any, Stack] = {}
        for module in modules.values():
            if module not in by_module:
                by_module[module] = Stack(copy.deepcopy(module).to("meta"), {})
        self._stacks = list(by_module.values())
        # By layer.
        self.stacks = {layer: by_module[module] for layer, module in modules.items()}
        self._facts = _describe(modules)
        for layer in modules:
            layer.slots.append(self)
        self._of_model = next(iter(modules)).state.slots
        self._of_model.append(self)
        weights = [weight for module in by_module for weight in module.parameters()]
        self._width = sum(weight.numel() for weight in weights)
        self.rows = weights[0].detach().new_empty((0, self._width))
        self._set_views()

    def _set_views(self) -> None:
        """Give each stack its weights, as columns of all rows."""
        start = 0
        for stack in self._stacks:
            for name, weight in stack.module.named_parameters():
                columns = self.rows[:, start : start + weight.numel()]
                stack.weights[name] = columns.unflatten(1, weight.shape)
                start += weight.numel()

    def fits(self, modules: Mapping[Any, Any]) -> bool:
        """Return whether an adapter with these modules can be held here, too."""
        if self._facts != _describe(modules):
            return False
        shared = {(self.stacks[layer], module) for layer, module in modules.items()}
        return len(shared) == len(self._stacks) == len(set(modules.values()))

    @torch.no_grad()
    def put(self, name: str, weights: Iterable[tuple[Stack, str, torch.Tensor]]) -> None:
        """Copy an adapter's weights into a slot: those of each stack by name."""
        room = len(self.rows)
        if len(self.numbers) == room:
            self._resize(max(1, 2 * room))
        taken = set(self.numbers.values())
        number = next(number for number in range(len(self.rows)) if number not in taken)
        for stack, weight_name, weight in weights:
            stack.weights[weight_name][number].copy_(weight)
        self.numbers[name] = number

    def drop(self, name: str) -> None:
        """Free an adapter's slot. Memory goes back when three of four slots are free."""
        is_held = self.numbers.pop(name, None) is not None
        if is_held and 4 * len(self.numbers) <= len(self.rows):
            self._resize(len(self.numbers))

    @torch.no_grad()
    def _resize(self, room: int) -> None:
        """Give the adapters as many slots, and new numbers."""
        taken = torch.tensor([*self.numbers.values()], dtype=torch.long, device=self.rows.device)
        rows = self.rows.new_empty((room, self._width))
        torch.index_select(self.rows, 0, taken, out=rows[: len(taken)])
        self.rows = rows
        self.numbers = {name: number for number, name in enumerate(self.numbers)}
        self._set_views()

    def run(
        self, layer: Any, choice: Any, hidden: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply to each row the bottleneck or norm that its adapter has at a layer.

        Args:
            layer: The layer.
            choice: The slot of each row.
            hidden: Hidden states h of the shape `(rows, ..., width)`.
            residual: The residual input x, of the same shape, if it has entered.
        """
        stack = self.stacks[layer]
        if not isinstance(stack.module, Bottleneck):
            return stack.run_norm(hidden, choice)
        read = hidden
        if layer.skip is not None and stack.module.kind != "houlsby":
            read = layer.skip.read(stack.module.kind, hidden, residual)
        return stack.run_bottleneck(hidden, read, choice)

    def close(self) -> None:
        """Take the slots off their layers."""
        self._of_model.remove(self)
        for layer in self.stacks:
            layer.slots.remove(self)


def slots_for(modules: Mapping[Any, Any], slots_of_model: Iterable[Slots]) -> Slots:
    """Return the slots that an adapter with these modules fits into, or new ones."""
    for slots in slots_of_model:
        if slots.fits(modules):
            return slots
    return Slots(modules)


def _describe(modules: Mapping[Any, Any]) -> dict[Any, tuple[object, ...]]:
    """Return by layer what the modules in its stack have in common."""
    facts: dict[Any, tuple[object, ...]] = {}
    for layer, module in modules.items():
        if isinstance(module, Bottleneck):
            facts[layer] = stacking_key(module) or ()
        else:
            facts[layer] = (type(module), module.eps, module.weight.shape, module.weight.dtype)
    return facts
