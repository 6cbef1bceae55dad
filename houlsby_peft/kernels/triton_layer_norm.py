"""A layer norm on a GPU as one Triton kernel, and its backward pass as another.

A program computes whole vectors, in float32.
"""

from __future__ import annotations

from functools import cache

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
    VECTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < width
    factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    grad_weight = tl.zeros((VECTORS, COLUMNS), tl.float32)
    grad_bias = tl.zeros((VECTORS, COLUMNS), tl.float32)
    for start in range(program * VECTORS, number, tl.num_programs(0) * VECTORS):
        vectors = (start + tl.arange(0, VECTORS)).to(tl.int64)
        is_vector = vectors < number
        mask = is_vector[:, None] & is_column[None, :]
        offsets = vectors[:, None] * width + columns[None, :]
        values = tl.load(hidden + offsets, mask=mask, other=0.0).to(tl.float32)
        above = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
        center = tl.load(mean + vectors, mask=is_vector, other=0.0)[:, None]
        scale = tl.load(rstd + vectors, mask=is_vector, other=0.0)[:, None]
        normalized = (values - center) * scale
        through = above * factor
        along = tl.sum(through * normalized, 1)[:, None] / width
        below = (through - tl.sum(through, 1)[:, None] / width - normalized * along) * scale
        tl.store(grad_hidden + offsets, below.to(grad_hidden.dtype.element_ty), mask=mask)
        grad_weight += above * normalized
        grad_bias += above
    target = grad_weights + program * 2 * width + columns
    tl.store(target, tl.sum(grad_weight, 0), mask=is_column)
    tl.store(target + width, tl.sum(grad_bias, 0), mask=is_column)


@cache
def _forward_kernel(width: int, has_slots: bool, has_bias: bool) -> Kernel:
    """Return the kernel for vectors of a width, with 32 numbers for each thread."""
    columns = triton.next_power_of_2(width)
    return Kernel(_forward, (has_slots, has_bias, columns), warps=max(1, columns // 1024))


@cache
def _backward_kernel(width: int) -> Kernel:
    """Return the kernel for vectors of a width, with 16 numbers for each thread."""
    columns = triton.next_power_of_2(width)
    vectors = max(1, 4096 // columns)
    return Kernel(_backward, (vectors, columns), warps=max(1, vectors * columns // 512))


def run(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `compute` in `layer_norm.py` does."""
    width, result = hidden.shape[-1], torch.empty_like(hidden)
    mean = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
    rstd = torch.empty_like(mean)
    _forward_kernel(width, False, bias is not None).start(
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
    _forward_kernel(width, True, bias is not None).start(
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
    kernel = _backward_kernel(width)
    vectors, _ = kernel.constants
    programs = min(-(-number // vectors), _PROGRAMS)
    grad_hidden = torch.empty_like(hidden)
    grad_weights = mean.new_empty((programs, 2, width))
    kernel.start(
        (programs, 1, 1),
        (grad, hidden, mean, rstd, weight, grad_hidden, grad_weights),
        (number, width),
    )
    grad_weight, grad_bias = grad_weights.sum(0, dtype=weight.dtype).unbind()
    return grad_hidden, grad_weight, grad_bias
