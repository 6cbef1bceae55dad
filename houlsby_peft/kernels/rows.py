"""Bottlenecks of the rows of a batch as one operation, which reads `weights[slot]` of each row.

It is for prediction alone and has no backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

from .bottleneck import ACTIVATIONS, kernels_for


def run(
    hidden: torch.Tensor, weights: Sequence[torch.Tensor], slots: torch.Tensor, activation: str
) -> torch.Tensor:
    """Add to each row the branch of the bottleneck in its slot, by a Triton kernel where one is
    faster.

    Args:
        hidden: Hidden states `(rows, ..., d)`, contiguous.
        weights: Of all slots, in the order of a bottleneck's parameters: `(slots, r, d)`,
            `(slots, r)`, `(slots, d, r)` and `(slots, d)`.
        slots: The slot of each row, `(rows,)`.
        activation: A key of `ACTIVATIONS`.
    """
    kernels = kernels_for(hidden, weights[0].shape[1])
    add_branches: Callable[..., torch.Tensor] = compute if kernels is None else kernels.run_rows
    return add_branches(hidden, *weights, slots, activation)


def compute_in_turn(
    read: torch.Tensor,
    weights: Sequence[Any],
    runs: Sequence[tuple[int, int]],
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the branches of one bottleneck after another, with their weights where they are.

    Args:
        read: What the branches are computed from, `(rows, ..., d)`, in the dtype of the weights.
        weights: As for `run`.
        runs: The bottlenecks of consecutive rows, each with how many rows it has.
        activate: The activation.
    """
    down_weights, down_biases, up_weights, up_biases = weights
    numbers, counts = zip(*runs, strict=True)
    vectors = read.reshape(-1, read.shape[-1])
    vectors_of_row = len(vectors) // len(read)
    sizes = [count * vectors_of_row for count in counts]
    inner = vectors.new_empty(len(vectors), len(down_biases[0]))
    for number, rows, target in zip(numbers, vectors.split(sizes), inner.split(sizes), strict=True):
        torch.addmm(down_biases[number], rows, down_weights[number].t(), out=target)
    inner, branch = activate(inner), vectors.new_empty(vectors.shape)
    for number, rows, target in zip(numbers, inner.split(sizes), branch.split(sizes), strict=True):
        torch.addmm(up_biases[number], rows, up_weights[number].t(), out=target)
    return branch.view(read.shape)


def find_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the numbers of consecutive rows, each with how many rows have it."""
    return [(number, len(list(rows))) for number, rows in groupby(numbers)]


def compute(
    hidden: torch.Tensor,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor,
    slots: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Return what `run` does, by PyTorch's operations: a few, however many slots there are."""
    activate, _ = ACTIVATIONS[activation]
    rows = hidden.reshape(len(hidden), -1, hidden.shape[-1])
    weights = [weight.index_select(0, slots) for weight in (down_weight, down_bias, up_weight)]
    weights.append(up_bias.index_select(0, slots))
    down, down_offset, up, up_offset = (weight.to(hidden.dtype) for weight in weights)
    inner = torch.baddbmm(down_offset.unsqueeze(1), rows, down.mT)
    branch = torch.baddbmm(up_offset.unsqueeze(1), activate(inner), up.mT)
    return branch.add_(rows).reshape(hidden.shape)
