"""Rows of different adapters in one batch: stacked weights and one batched product instead of a loop over adapters.

For inference only: PEFT refuses `adapter_names` in training mode, and no gradient reaches the stacked weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .bottleneck import Bottleneck


# PEFT's name for rows that use the base model alone.
BASE = "__base__"


class WeightCache:
    """Keeps what was built from weights while the same, unchanged weights are asked for under the same key."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the last result and the weights that it was built from."""
        self._key: object = None
        self._weights: list[torch.Tensor] = []
        self._versions: list[tuple[int, int]] = []
        self._value: Any = None

    def get(self, key: object, weights: Sequence[torch.Tensor], build: Callable[[], Any]) -> Any:
        """The result of `build()`, which must depend on `key` and `weights` alone; built under `no_grad`."""
        versions = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]
        same = key == self._key and versions == self._versions and len(weights) == len(self._weights)
        if not (same and all(new is old for new, old in zip(weights, self._weights, strict=True))):
            with torch.no_grad():
                self._value = build()
            self._key, self._weights, self._versions = key, list(weights), versions
        return self._value

    def __getstate__(self) -> dict[str, Any]:
        # A copied or pickled model builds its own; the stacked weights may be larger than the model's adapters.
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.clear()


def row_names(hidden: torch.Tensor, adapter_names: Sequence[str]) -> tuple[str, ...]:
    """The adapter of each row of `hidden`; some models flatten (batch, length) into the first dimension (OPT).

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


class MixedBatch:
    """Applies to each row of a batch the bottleneck of its own adapter.

    Adapters of the same size, activation, dtype and number of rows form a group; each group is two batched products
    over stacked weights. Rows of the base model, or of an adapter without a bottleneck here, pass through unchanged.
    """

    def __init__(self) -> None:
        self._cache = WeightCache()

    def clear(self) -> None:
        """Drop the stacked weights."""
        self._cache.clear()

    def __call__(
        self, hidden: torch.Tensor, adapter_names: Sequence[str], lookup: Callable[[str], Bottleneck | None]
    ) -> torch.Tensor:
        """The adapted hidden states.

        Args:
            hidden: `(rows, ..., width)`.
            adapter_names: the adapter of each row, or "__base__".
            lookup: the bottleneck of an adapter at this place, or None.
        """
        found = {name: lookup(name) for name in dict.fromkeys(adapter_names) if name != BASE}
        used = {name: bottleneck for name, bottleneck in found.items() if bottleneck is not None}
        if len(used) == 1 and len(set(adapter_names)) == 1:
            adapted: torch.Tensor = next(iter(used.values()))(hidden)
            return adapted
        names = row_names(hidden, adapter_names)
        weights = [weight for bottleneck in used.values() for weight in bottleneck.parameters()]
        groups = self._cache.get((names, hidden.device), weights, lambda: _stack(names, used, hidden.device))
        result = hidden
        for group in groups:
            result = group.add_to(result, hidden)
        return result


class _Group:
    """Bottlenecks of equal shape, stacked, and the rows that use them, in the order of the bottlenecks."""

    def __init__(self, bottlenecks: list[Bottleneck], rows: list[int], in_order: bool, device: torch.device) -> None:
        self.activation = bottlenecks[0].activation
        self.down, self.down_bias = _stack_linear([bottleneck.down_proj for bottleneck in bottlenecks])
        self.up, self.up_bias = _stack_linear([bottleneck.up_proj for bottleneck in bottlenecks])
        # None: the group is the whole batch as it stands, so that nothing needs to be gathered.
        self.rows = None if in_order else torch.tensor(rows, device=device)

    def add_to(self, result: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        own = hidden if self.rows is None else hidden.index_select(0, self.rows)
        stacked = own.to(self.down.dtype).reshape(self.down.shape[0], -1, hidden.shape[-1])
        branch: torch.Tensor = self.activation(torch.baddbmm(self.down_bias, stacked, self.down))
        branch = torch.baddbmm(self.up_bias, branch, self.up).reshape(own.shape).to(hidden.dtype)
        return result + branch if self.rows is None else result.index_add(0, self.rows, branch)


def _stack(names: tuple[str, ...], used: dict[str, Bottleneck], device: torch.device) -> list[_Group]:
    rows: dict[str, list[int]] = {name: [] for name in used}
    for row, name in enumerate(names):
        if name in rows:
            rows[name].append(row)
    groups: dict[object, list[str]] = {}
    for name, bottleneck in used.items():
        weight = bottleneck.down_proj.weight
        # An activation with weights of its own cannot be shared by a stack.
        own = name if any(True for _ in bottleneck.activation.parameters()) else bottleneck.activation_name
        groups.setdefault((weight.shape, weight.dtype, own, len(rows[name])), []).append(name)
    result = []
    for members in groups.values():
        order = [row for name in members for row in rows[name]]
        result.append(_Group([used[name] for name in members], order, order == list(range(len(names))), device))
    return result


def _stack_linear(layers: Iterable[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor]:
    weights, biases = zip(*((layer.weight, layer.bias) for layer in layers), strict=True)
    return torch.stack(weights).transpose(1, 2), torch.stack(biases).unsqueeze(1)


class MixedNorm:
    """Applies to each row of a batch the norm of its own adapter, or the base model's norm."""

    def __init__(self) -> None:
        self._cache = WeightCache()

    def clear(self) -> None:
        """Drop the stacked weights."""
        self._cache.clear()

    def __call__(
        self,
        hidden: torch.Tensor,
        adapter_names: Sequence[str],
        base: nn.Module,
        lookup: Callable[[str], nn.Module | None],
    ) -> torch.Tensor:
        """The normalized hidden states.

        Args:
            hidden: `(rows, ..., width)`.
            adapter_names: the adapter of each row, or "__base__".
            base: the base model's norm, used where an adapter has none.
            lookup: the norm of an adapter at this place, or None.
        """
        names = row_names(hidden, adapter_names)
        norms = {name: (None if name == BASE else lookup(name)) or base for name in dict.fromkeys(names)}
        weights = [weight for norm in norms.values() for weight in norm.parameters()]
        shape = (len(names), *[1] * (hidden.dim() - 2), hidden.shape[-1])
        rows = self._cache.get((names, shape, hidden.device), weights, lambda: _rows_of_weights(names, norms, shape))
        return _normalize(base, hidden.to(rows["weight"].dtype), rows).to(hidden.dtype)


def _rows_of_weights(
    names: tuple[str, ...], norms: dict[str, nn.Module], shape: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    index = {name: position for position, name in enumerate(norms)}
    some = next(iter(norms.values()))
    rows = torch.tensor([index[name] for name in names], device=next(some.parameters()).device)
    dtype = max((next(norm.parameters()).dtype for norm in norms.values()), key=lambda dtype: dtype.itemsize)
    return {
        key: torch.stack([norm.get_parameter(key).to(dtype) for norm in norms.values()])[rows].view(shape)
        for key, _ in some.named_parameters()
    }


def _normalize(base: nn.Module, hidden: torch.Tensor, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    width = (hidden.shape[-1],)
    if isinstance(base, nn.LayerNorm):
        normalized = F.layer_norm(hidden, width, eps=base.eps)
        return (
            torch.addcmul(rows["bias"], normalized, rows["weight"]) if "bias" in rows else normalized * rows["weight"]
        )
    if isinstance(base, nn.RMSNorm):
        return F.rms_norm(hidden, width, eps=base.eps) * rows["weight"]
    # The models' own RMS norms multiply by their weight last, so that a weight per row broadcasts.
    return torch.func.functional_call(base, rows, (hidden,))  # type: ignore[no-any-return]
