"""A bottleneck on a GPU as one Triton kernel, and its backward pass as two: the rows, and the sums
over them.

A program computes some rows: it reads their hidden states once for the projection down and once for
the sum. Products are in the dtype of the hidden states and summed in float32. Hidden states are
`(..., d)` and contiguous.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import Kernel


# The sizes of the tiles are fixed, so that nothing is tried out at the first call. A tile of
# weights has at most 8,192 numbers, for which any GPU has room.
_ROWS = 32
_COLUMNS = 128
_TILE = 8192
MOST_R = 256
_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_pytorch_tanh":
        return 0.5 * x * (1 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    elif ACTIVATION == "tanh":
        return _tanh(x)
    else:
        return x * tl.sigmoid(x)


@triton.jit
def _slope(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * density
    elif ACTIVATION == "gelu_pytorch_tanh":
        tanh = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        inner_slope = 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
        return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner_slope
    elif ACTIVATION == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    elif ACTIVATION == "tanh":
        tanh = _tanh(x)
        return 1 - tanh * tanh
    else:
        sigmoid = tl.sigmoid(x)
        return sigmoid * (1 + x * (1 - sigmoid))


@triton.jit
def _load(pointer, rows, columns, stride, last_row, last_column):
    """Load a tile in float32, with zeros outside the matrix."""
    mask = (rows[:, None] < last_row) & (columns[None, :] < last_column)
    tile = tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    return tile.to(tl.float32)


@triton.jit
def _store(pointer, tile, rows, columns, stride, last_row, last_column):
    mask = (rows[:, None] < last_row) & (columns[None, :] < last_column)
    target = pointer + rows[:, None] * stride + columns[None, :]
    tl.store(target, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _forward(
    hidden,
    down_weight,
    down_bias,
    up_weight,
    up_bias,
    result,
    inner,
    slots,
    down_weight_stride,
    down_bias_stride,
    up_weight_stride,
    up_bias_stride,
    number,
    width,
    r,
    HAS_SLOTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    if HAS_SLOTS:
        # A row of the batch has `number` vectors, and its weights are in a slot.
        row, slot = tl.program_id(1).to(tl.int64), tl.load(slots + tl.program_id(1))
        hidden, result = hidden + row * number * width, result + row * number * width
        down_weight += slot * down_weight_stride
        down_bias += slot * down_bias_stride
        up_weight += slot * up_weight_stride
        up_bias += slot * up_bias_stride
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    units = tl.arange(0, INNER)
    down = tl.zeros((ROWS, INNER), tl.float32)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        read = _load(hidden, rows, columns, width, number, width).to(PRODUCT)
        weight = _load(down_weight, units, columns, width, r, width).to(PRODUCT)
        down = tl.dot(read, tl.trans(weight), down, input_precision="ieee")
    down += tl.load(down_bias + units, mask=units < r, other=0.0).to(tl.float32)[None, :]
    if not HAS_SLOTS:
        _store(inner, down, rows, units, r, number, r)
    activated = _activate(down, ACTIVATION).to(PRODUCT)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        weight = _load(up_weight, columns, units, r, width, r).to(PRODUCT)
        branch = tl.dot(activated, tl.trans(weight), input_precision="ieee")
        bias = tl.load(up_bias + columns, mask=columns < width, other=0.0).to(tl.float32)
        total = _load(hidden, rows, columns, width, number, width) + branch + bias[None, :]
        _store(result, total, rows, columns, width, number, width)


@triton.jit
def _backward(
    grad,
    inner,
    down_weight,
    up_weight,
    grad_hidden,
    grad_inner,
    activated,
    number,
    width,
    r,
    ACTIVATION: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    units = tl.arange(0, INNER)
    through = tl.zeros((ROWS, INNER), tl.float32)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        read = _load(grad, rows, columns, width, number, width).to(PRODUCT)
        weight = _load(up_weight, columns, units, r, width, r).to(PRODUCT)
        through = tl.dot(read, weight, through, input_precision="ieee")
    down = _load(inner, rows, units, r, number, r)
    through *= _slope(down, ACTIVATION)
    _store(grad_inner, through, rows, units, r, number, r)
    _store(activated, _activate(down, ACTIVATION), rows, units, r, number, r)
    through_down = through.to(PRODUCT)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        weight = _load(down_weight, units, columns, width, r, width).to(PRODUCT)
        total = tl.dot(through_down, weight, input_precision="ieee")
        total += _load(grad, rows, columns, width, number, width)
        _store(grad_hidden, total, rows, columns, width, number, width)


@triton.jit
def _add_up(
    grad,
    hidden,
    grad_inner,
    activated,
    sums,
    number,
    width,
    r,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Add up the gradients of the weights over a part of the rows, for some columns."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    units = tl.arange(0, INNER)
    down = tl.zeros((INNER, COLUMNS), tl.float32)
    up = tl.zeros((COLUMNS, INNER), tl.float32)
    down_bias = tl.zeros((INNER,), tl.float32)
    up_bias = tl.zeros((COLUMNS,), tl.float32)
    for start in range(tl.program_id(1) * ROWS, number, tl.num_programs(1) * ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        above = _load(grad, rows, columns, width, number, width)
        through = _load(grad_inner, rows, units, r, number, r)
        read = _load(hidden, rows, columns, width, number, width).to(PRODUCT)
        branch = _load(activated, rows, units, r, number, r).to(PRODUCT)
        down = tl.dot(tl.trans(through.to(PRODUCT)), read, down, input_precision="ieee")
        up = tl.dot(tl.trans(above.to(PRODUCT)), branch, up, input_precision="ieee")
        down_bias += tl.sum(through, 0)
        up_bias += tl.sum(above, 0)
    # In the order of a bottleneck's parameters.
    sums += tl.program_id(1).to(tl.int64) * (2 * r * width + r + width)
    _store(sums, down, units, columns, width, r, width)
    sums += r * width
    if tl.program_id(0) == 0:
        tl.store(sums + units, down_bias, mask=units < r)
    sums += r
    _store(sums, up, columns, units, r, width, r)
    tl.store(sums + width * r + columns, up_bias, mask=columns < width)


@cache
def _kernel(function: Any, r: int, dtype: torch.dtype, *flags: Any) -> Kernel:
    """Return a kernel for bottlenecks of size r and hidden states of a dtype."""
    # The interpreter computes on a CPU, and no product in bfloat16.
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    product = tl.float32 if is_interpreted else _DTYPES[dtype]
    inner = max(16, triton.next_power_of_2(r))
    # With four warps, the registers are too few for the sums of a large bottleneck.
    return Kernel(
        function,
        (*flags, product, _ROWS, _columns(r), inner),
        warps=8 if inner > 64 else 4,
    )


def _columns(r: int) -> int:
    """Return how many columns a tile has."""
    return min(_COLUMNS, _TILE // max(16, triton.next_power_of_2(r)))  # type: ignore[no-any-return]


def run(
    hidden: torch.Tensor,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `compute` in `bottleneck.py` does."""
    r, width = down_weight.shape
    number = hidden.numel() // width
    result, inner = torch.empty_like(hidden), hidden.new_empty((*hidden.shape[:-1], r))
    _kernel(_forward, r, hidden.dtype, False, activation).start(
        (-(-number // _ROWS), 1, 1),
        (hidden, down_weight, down_bias, up_weight, up_bias, result, inner, None),
        (0, 0, 0, 0, number, width, r),
    )
    return result, inner


def run_rows(
    hidden: torch.Tensor,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor,
    slots: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Return what `compute` in `rows.py` does."""
    _, r, width = down_weight.shape
    weights = (down_weight, down_bias, up_weight, up_bias)
    number = hidden.numel() // (len(hidden) * width)
    result = torch.empty_like(hidden)
    _kernel(_forward, r, hidden.dtype, True, activation).start(
        (-(-number // _ROWS), len(hidden), 1),
        (hidden, *weights, result, None, slots),
        (*(weight.stride(0) for weight in weights), number, width, r),
    )
    return result


def run_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    inner: torch.Tensor,
    down_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, ...]:
    """Return what `compute_backward` in `bottleneck.py` does."""
    r, width = down_weight.shape
    number, dtype = grad.numel() // width, grad.dtype
    grad_hidden = torch.empty_like(grad)
    grad_inner, activated = torch.empty_like(inner), torch.empty_like(inner)
    parts = -(-number // _ROWS)
    _kernel(_backward, r, dtype, activation).start(
        (parts, 1, 1),
        (grad, inner, down_weight, up_weight, grad_hidden, grad_inner, activated),
        (number, width, r),
    )
    parts_of_columns = -(-width // _columns(r))
    # About as many programs as a GPU runs at once.
    parts = min(parts, max(1, 128 // parts_of_columns))
    sizes = (r * width, r, width * r, width)
    sums = grad.new_empty((parts, sum(sizes)), dtype=torch.float32)
    _kernel(_add_up, r, dtype).start(
        (parts_of_columns, parts, 1),
        (grad, hidden, grad_inner, activated, sums),
        (number, width, r),
    )
    down, down_bias, up, up_bias = sums.sum(0, dtype=down_weight.dtype).split(sizes)
    return grad_hidden, down.view(r, width), down_bias, up.view(width, r), up_bias
