"""A layer norm on a GPU as one Triton kernel, and its backward pass as another.

A program computes vectors as a whole, in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


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
def _options(width: int) -> dict[str, Any]:
    columns = triton.next_power_of_2(width)
    return {
        "COLUMNS": columns,
        "num_warps": min(16, max(1, columns // 256)),
        # Triton's own default will change.
        "enable_fp_fusion": True,
    }


def run(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `compute` in `layer_norm.py` does."""
    width = hidden.shape[-1]
    result = hidden.new_empty(hidden.shape)
    mean = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
    rstd = torch.empty_like(mean)
    _forward[(mean.numel(),)](
        hidden,
        weight,
        bias,
        result,
        mean,
        rstd,
        None,
        0,
        0,
        1,
        width,
        eps,
        HAS_SLOTS=False,
        HAS_BIAS=bias is not None,
        **_options(width),
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
    width = hidden.shape[-1]
    vectors = hidden.numel() // width
    result = hidden.new_empty(hidden.shape)
    _forward[(vectors,)](
        hidden,
        weight,
        bias,
        result,
        None,
        None,
        slots,
        weight.stride(0),
        0 if bias is None else bias.stride(0),
        vectors // len(hidden),
        width,
        eps,
        HAS_SLOTS=True,
        HAS_BIAS=bias is not None,
        **_options(width),
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
    grad_hidden = hidden.new_empty(hidden.shape)
    grad_weights = mean.new_empty((programs, 2, width))
    _backward[(programs,)](
        grad,
        hidden,
        mean,
        rstd,
        weight,
        grad_hidden,
        grad_weights,
        number,
        width,
        **_options(width),
    )
    grad_weight, grad_bias = grad_weights.sum(0, dtype=weight.dtype).unbind()
    return grad_hidden, grad_weight, grad_bias
