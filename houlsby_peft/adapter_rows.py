"""Which adapter each row of a batch uses, and whether the weights of these adapters are still the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn


# PEFT's name for rows that use the base model alone.
BASE = "__base__"


class AdapterRows(tuple[str, ...]):
    """The adapter of each row. Layers keep what they stacked for as long as they are given the same object."""

    def once(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """What `build` gives, the same for all places that ask with an equal key."""
        if key not in self._built:
            self._built[key] = build()
        return self._built[key]

    def forget(self) -> None:
        """Forget what was built."""
        self._built.clear()

    @cached_property
    def _built(self) -> dict[Hashable, Any]:
        return {}


class RowsCache:
    """Gives out the same `AdapterRows` as long as the names and the weights of these adapters stay the same.

    One check per forward or generation for the whole model, because a check at each place would cost more than the
    products there. It sees weights that are replaced, moved or written in place, but, like autograd, not a write
    through `.data` in evaluation mode; `model.train()` forgets everything.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the last rows, so that all weights are stacked anew."""
        self._rows = AdapterRows()
        self._weights: list[tuple[dict[str, Any], str, torch.Tensor, int, int]] = []

    def get(self, names: Sequence[str], containers: Iterable[nn.ModuleDict]) -> AdapterRows:
        """The rows of these names.

        Args:
            names: the adapter of each row, or "__base__".
            containers: what all places have, by adapter name.
        """
        if self._rows != tuple(names) or not self._are_unchanged():
            self._rows = AdapterRows(names)
            self._weights = [
                (module._parameters, key, weight, weight.data_ptr(), _version(weight))
                for container in containers
                for name in dict.fromkeys(names)
                if name in container
                for module in container[name].modules()
                for key, weight in module._parameters.items()
                if weight is not None
            ]
        return self._rows

    def _are_unchanged(self) -> bool:
        return all(
            parameters.get(key) is weight and weight.data_ptr() == pointer and _version(weight) == version
            for parameters, key, weight, pointer, version in self._weights
        )

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.clear()


def _version(weight: torch.Tensor) -> int:
    """Counts the writes in place; inference tensors do not tell."""
    return 0 if weight.is_inference() else weight._version


def row_names(hidden: torch.Tensor, adapter_names: Sequence[str]) -> tuple[str, ...]:
    """The adapter of each row of `hidden`, which may hold several rows for each of the batch, one after the other.

    Beam search and several returned sequences repeat the rows; OPT flattens (batch, length) into one dimension.

    Raises:
        ValueError: the number of rows is no multiple of the number of names.
    """
    times, rest = divmod(hidden.shape[0], max(len(adapter_names), 1))
    if rest or not adapter_names:
        raise ValueError(
            "Length of `adapter_names` should be the same as the number of inputs, but got "
            f"{len(adapter_names)} and {hidden.shape[0]} respectively."
        )
    return tuple(name for name in adapter_names for _ in range(times))


def select_rows(value: Any, index: torch.Tensor, rows: int) -> Any:
    """The given rows of every tensor that has a row per example, inside any arguments."""
    if isinstance(value, torch.Tensor):
        return value.index_select(0, index) if value.dim() and value.shape[0] == rows else value
    if isinstance(value, tuple):
        return tuple(select_rows(item, index, rows) for item in value)
    if isinstance(value, dict):
        return {key: select_rows(item, index, rows) for key, item in value.items()}
    return value
