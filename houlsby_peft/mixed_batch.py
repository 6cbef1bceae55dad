"""Rows of different adapters in one batch: stacked weights and one batched product instead of a loop over adapters.

For inference only: PEFT refuses `adapter_names` in training mode, and no gradient reaches the stacked weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .adapter_rows import BASE, AdapterRows, row_names
from .bottleneck import Bottleneck


class StackedWeights:
    """What one place stacked for the last `AdapterRows`, kept while it is given the same object."""

    _rows: Sequence[str] | None = None

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop the stacked weights."""
        if isinstance(self._rows, AdapterRows):
            self._rows.forget()
        self._rows = None
        self._key: object = None
        self._value: Any = None

    def _get(self, rows: Sequence[str], key: object, build: Callable[[], Any]) -> Any:
        if not isinstance(rows, AdapterRows) or rows is not self._rows or key != self._key:
            # Not as inference tensors: these could not be used again where gradients are recorded.
            with torch.inference_mode(False), torch.no_grad():
                self._value = build()
            self._rows, self._key = rows, key
        return self._value

    def __getstate__(self) -> dict[str, Any]:
        # A copied or pickled model builds its own; the stacked weights may be larger than the model.
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.clear()


class MixedBatch(StackedWeights):
    """Applies to each row of a batch the bottleneck of its own adapter.

    Adapters of the same size, activation and dtype and of about as many rows form a group; each group is two batched
    products over stacked weights. Rows of the base model, or of an adapter without a bottleneck here, stay unchanged.
    """

    def __call__(
        self, hidden: torch.Tensor, adapter_names: Sequence[str], lookup: Callable[[str], Bottleneck | None]
    ) -> torch.Tensor:
        """The adapted hidden states.

        Args:
            hidden: `(rows, ..., width)`.
            adapter_names: the adapter of each row, or "__base__".
            lookup: the bottleneck of an adapter at this place, or None.
        """

        def build() -> list[_Group]:
            names = row_names(hidden, adapter_names)
            found = {name: lookup(name) for name in dict.fromkeys(names) if name != BASE}
            used = {name: one for name, one in found.items() if one is not None}
            if not isinstance(adapter_names, AdapterRows):
                return _stack(names, used, hidden.device)
            # Places with the same bottlenecks, as sharing gives them, use the same stack.
            key = (len(names), *used.items(), hidden.device)
            return adapter_names.once(key, lambda: _stack(names, used, hidden.device))  # type: ignore[no-any-return]

        result = hidden
        for group in self._get(adapter_names, (hidden.shape[0], hidden.device), build):
            result = group.adapt(hidden, result)
        return result


class _Group:
    """Stacked bottlenecks of equal shape, and their rows: equally many for each, in the order of the bottlenecks."""

    def __init__(self, bottlenecks: list[Bottleneck], rows: list[int], in_order: bool, device: torch.device) -> None:
        self.activation = bottlenecks[0].activation
        self.down, self.down_bias = _stack_linear([bottleneck.down_proj for bottleneck in bottlenecks])
        self.up, self.up_bias = _stack_linear([bottleneck.up_proj for bottleneck in bottlenecks])
        # None: the group is the whole batch as it stands, so that nothing needs to be gathered.
        self.rows = None if in_order else torch.tensor(rows, device=device)

    def adapt(self, hidden: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """`result` with this group's rows replaced by their adapted `hidden` states."""
        own = hidden if self.rows is None else hidden.index_select(0, self.rows)
        stacked = own.to(self.down).reshape(self.down.shape[0], -1, hidden.shape[-1])
        branch: torch.Tensor = self.activation(torch.baddbmm(self.down_bias, stacked, self.down))
        branch = torch.baddbmm(self.up_bias, branch, self.up).reshape(own.shape)
        adapted = own + branch.to(hidden)
        return adapted if self.rows is None else result.index_copy(0, self.rows, adapted)


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
        # Rows are filled up to the most in the group, so that the number of groups grows with its logarithm only.
        groups.setdefault((weight.shape, weight.dtype, own, len(rows[name]).bit_length()), []).append(name)
    result = []
    for members in groups.values():
        most = max(len(rows[name]) for name in members)
        # Filled up with copies of a row, which come out, and are written back, as that row does.
        order = [row for name in members for row in rows[name] + rows[name][:1] * (most - len(rows[name]))]
        result.append(_Group([used[name] for name in members], order, order == list(range(len(names))), device))
    return result


def _stack_linear(layers: Iterable[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor]:
    # Transposed in memory, which a batched product reads up to a fifth faster than a transposed view.
    weights, biases = zip(*((layer.weight.t(), layer.bias) for layer in layers), strict=True)
    return torch.stack(weights), torch.stack(biases).unsqueeze(1)


class MixedNorm(StackedWeights):
    """Applies to each row of a batch the norm of its own adapter, or the base model's norm."""

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
        shape = (hidden.shape[0], *[1] * (hidden.dim() - 2), hidden.shape[-1])

        def build() -> dict[str, torch.Tensor]:
            names = row_names(hidden, adapter_names)
            norms = {name: (None if name == BASE else lookup(name)) or base for name in dict.fromkeys(names)}
            return _rows_of_weights(names, norms, shape)

        rows = self._get(adapter_names, (shape, hidden.device), build)
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
