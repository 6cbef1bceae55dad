"""Which adapter each row of a batch uses, and whether the weights of these adapters are still the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


# PEFT's name for rows that use the base model alone.
BASE = "__base__"
# What a place keeps by adapter name.
Container = nn.ModuleDict | dict[str, Any]


class AdapterRows(tuple[str, ...]):
    """The adapter of each row. Layers keep what they stacked for as long as they are given the same object."""


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
        self._watched: list[tuple[dict[str, Any], str, object, object]] = []

    def get(self, names: Sequence[str], containers: Callable[[], Iterable[Container]]) -> AdapterRows:
        """The rows of these names.

        Args:
            names: the adapter of each row, or "__base__".
            containers: gives what all places keep by adapter name: modules, whose weights are watched, or references.
        """
        if self._rows != tuple(names) or not all(_is_unchanged(*entry) for entry in self._watched):
            self._rows = AdapterRows(names)
            self._watched = [
                (entries, key, entries.get(key), _state(entries.get(key)))
                for container in containers()
                for name in dict.fromkeys(names)
                for entries, key in _entries(container, name)
            ]
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.clear()


def _entries(container: Container, name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Where what an adapter has at a place, and each weight of it, can be looked up again."""
    if not isinstance(container, nn.ModuleDict):
        yield container, name
        return
    yield container._modules, name
    if name in container:
        for module in container[name].modules():
            for key in module._parameters:
                yield module._parameters, key


def _is_unchanged(entries: dict[str, Any], key: str, value: object, state: object) -> bool:
    return entries.get(key) is value and _state(value) == state


def _state(value: object) -> object:
    """Differs after a tensor was given other memory or written in place; inference tensors do not tell of writes."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.data_ptr(), 0 if value.is_inference() else value._version


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
