"""A bottleneck on a GPU as one Triton kernel, and the part of its backward pass for each row as
another.

A program computes some rows: it reads their hidden states once for the projection down and once for
the sum. Products are in the dtype of the hidden states and summed in float32.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


# The sizes of the tiles are fixed, so that nothing is tried out at the first call. A tile of
# weights has at most 4,096 numbers, for which any GPU has room.
_ROWS = 32
_COLUMNS = 64
_TILE = 4096
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


@cache
def _options(r: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of a kernel, and on how many warps it runs."""
    # The interpreter computes on a CPU, and no product in bfloat16.
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    inner = max(16, triton.next_power_of_2(r))
    return {
        "PRODUCT": tl.float32 if is_interpreted else _DTYPES[dtype],
        "ROWS": _ROWS,
        "COLUMNS": min(_COLUMNS, _TILE // inner),
        "INNER": inner,
        # With four, the registers are too few for the sums of a large bottleneck.
        "num_warps": 8 if inner > 64 else 4,
        # Triton's own default will change.
        "enable_fp_fusion": True,
    }


def run(
    hidden: torch.Tensor,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `compute` in `bottleneck.py` does, for hidden states `(rows, d)`."""
    r, width = down_weight.shape
    result, inner = hidden.new_empty(hidden.shape), hidden.new_empty(len(hidden), r)
    _forward[triton.cdiv(len(hidden), _ROWS),](
        hidden,
        down_weight,
        down_bias,
        up_weight,
        up_bias,
        result,
        inner,
        None,
        0,
        0,
        0,
        0,
        len(hidden),
        width,
        r,
        HAS_SLOTS=False,
        ACTIVATION=activation,
        **_options(r, hidden.dtype),
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
    """Return what `compute` in `rows.py` does, for hidden states `(rows, ..., d)`."""
    _, r, width = down_weight.shape
    result = hidden.new_empty(hidden.shape)
    vectors = hidden.numel() // (len(hidden) * width)
    _forward[triton.cdiv(vectors, _ROWS), len(hidden)](
        hidden,
        down_weight,
        down_bias,
        up_weight,
        up_bias,
        result,
        None,
        slots,
        *(weight.stride(0) for weight in (down_weight, down_bias, up_weight, up_bias)),
        vectors,
        width,
        r,
        HAS_SLOTS=True,
        ACTIVATION=activation,
        **_options(r, hidden.dtype),
    )
    return result


def run_backward(
    grad: torch.Tensor,
    inner: torch.Tensor,
    down_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the hidden states `(rows, d)` and of what `down_proj` gave `(rows,
    r)`, and what was activated.
    """
    r, width = down_weight.shape
    grad_hidden = grad.new_empty(grad.shape)
    grad_inner, activated = torch.empty_like(inner), torch.empty_like(inner)
    _backward[triton.cdiv(len(grad), _ROWS),](
        grad,
        inner,
        down_weight,
        up_weight,
        grad_hidden,
        grad_inner,
        activated,
        len(grad),
        width,
        r,
        ACTIVATION=activation,
        **_options(r, grad.dtype),
    )
    return grad_hidden, grad_inner, activated
