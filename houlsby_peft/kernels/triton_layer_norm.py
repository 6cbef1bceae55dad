"""A layer norm on a GPU as one Triton kernel, and its backward pass as another.

A program computes vectors as a whole, in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import Kernel


# A program holds a vector in its registers.
MOST_WIDTH = 8192
# Each program of the backward pass adds up what its vectors give to the gradients of the weights,
# so that the sums are the same each time.
_PROGRAMS = 256


@triton.jit
def _forward(
    hidden,
    weight,
    bias,
    result,
    mean,
    rstd,
    slots,
    weight_stride,
    bias_stride,
    vectors_of_row,
    width,
    eps,
    HAS_SLOTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    vector = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    mask = columns < width
    if HAS_SLOTS:
        slot = tl.load(slots + vector // vectors_of_row)
        weight += slot * weight_stride
        if HAS_BIAS:
            bias += slot * bias_stride
    values = tl.load(hidden + vector * width + columns, mask=mask, other=0.0).to(tl.float32)
    center = tl.sum(values) / width
    centered = tl.where(mask, values - center, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centered * centered) / width + eps)
    normalized = centered * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normalized += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    target = result + vector * width + columns
    tl.store(target, normalized.to(result.dtype.element_ty), mask=mask)
    if not HAS_SLOTS:
        tl.store(mean + vector, center)
        tl.store(rstd + vector, scale)


@triton.jit
def _backward(
    grad,
    hidden,
    mean,
    rstd,
    weight,
    grad_hidden,
    grad_weights,
    number,
    width,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    mask = columns < width
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((COLUMNS,), tl.float32)
    grad_bias = tl.zeros((COLUMNS,), tl.float32)
    for vector in range(program, number, tl.num_programs(0)):
        start = vector * tl.cast(width, tl.int64)
        values = tl.load(hidden + start + columns, mask=mask, other=0.0).to(tl.float32)
        above = tl.load(grad + start + columns, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(rstd + vector)
        normalized = (values - tl.load(mean + vector)) * scale
        through = above * factor
        along = tl.sum(through * normalized) / width
        below = (through - tl.sum(through) / width - normalized * along) * scale
        target = grad_hidden + start + columns
        tl.store(target, below.to(grad_hidden.dtype.element_ty), mask=mask)
        grad_weight += above * normalized
        grad_bias += above
    target = grad_weights + program * 2 * width + columns
    tl.store(target, grad_weight, mask=mask)
    tl.store(target + width, grad_bias, mask=mask)


@cache
def _kernel(function: Any, width: int, *flags: bool) -> Kernel:
    """Return a kernel for vectors of a width."""
    columns = triton.next_power_of_2(width)
    return Kernel(function, (*flags, columns), warps=min(16, max(1, columns // 256)))


def run(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `compute` in `layer_norm.py` does."""
    width, result = hidden.shape[-1], torch.empty_like(hidden)
    mean = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
    rstd = torch.empty_like(mean)
    _kernel(_forward, width, False, bias is not None).start(
        (mean.numel(), 1, 1),
        (hidden, weight, bias, result, mean, rstd, None),
        (0, 0, 1, width, eps),
    )
    return result, mean, rstd


def run_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return what `compute_rows` in `layer_norm.py` does."""
    width, result = hidden.shape[-1], torch.empty_like(hidden)
    vectors = hidden.numel() // width
    bias_stride = 0 if bias is None else bias.stride(0)
    _kernel(_forward, width, True, bias is not None).start(
        (vectors, 1, 1),
        (hidden, weight, bias, result, None, None, slots),
        (weight.stride(0), bias_stride, vectors // len(hidden), width, eps),
    )
    return result


def run_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `compute_backward` in `layer_norm.py` does."""
    width, number = hidden.shape[-1], mean.numel()
    programs = min(number, _PROGRAMS)
    grad_hidden = torch.empty_like(hidden)
    grad_weights = mean.new_empty((programs, 2, width))
    _kernel(_backward, width).start(
        (programs, 1, 1),
        (grad, hidden, mean, rstd, weight, grad_hidden, grad_weights),
        (number, width),
    )
    grad_weight, grad_bias = grad_weights.sum(0, dtype=weight.dtype).unbind()
    return grad_hidden, grad_weight, grad_bias
