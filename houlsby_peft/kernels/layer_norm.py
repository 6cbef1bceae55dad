"""A layer norm with weights in float32 for hidden states in half precision, as one operation, and
the norms of the rows of a batch as another, which is for prediction alone.

Everything is computed in the dtype of the weights, and only the result is rounded.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .bottleneck import usable_kernels
from .plain import differentiate, has_plain_weights, is_plain_call, without_autocast


_aten: Any = torch.ops.aten


def can_run(norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `run` computes what a norm does with these arguments."""
    if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
        return False
    return is_plain_call(args[0]) and has_plain_weights(norm, nn.LayerNorm, args[0])


def run(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Normalize hidden states `(..., d)`; the result has their dtype."""
    inputs = (hidden, norm.weight, norm.bias, norm.eps)
    if torch.is_grad_enabled():
        result: torch.Tensor = _Differentiable.apply(*inputs)
    else:
        result, _, _ = _run(*inputs)
    return result


def run_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Normalize each row by the norm in its slot, by a Triton kernel where there is one.

    Args:
        hidden: Hidden states `(rows, ..., d)`, contiguous; the result has their dtype.
        weight, bias: Those of all slots, `(slots, d)` each.
        slots: The slot of each row, `(rows,)`.
        eps: What is added to the variance.
    """
    kernels = _kernels_for(hidden)
    normalize = compute_rows if kernels is None else kernels.run_rows
    result: torch.Tensor = normalize(hidden, weight, bias, slots, eps)
    return result


def compute(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the result `(..., d)`, and the means and inverse deviations `(..., 1)`."""
    # With hidden states in half precision, PyTorch's norm would add up the gradients of the weights
    # in half precision on a CPU, and refuse weights in float32 on a GPU.
    wide = hidden.to(weight.dtype)
    with without_autocast(hidden.device):
        result, mean, rstd = torch.native_layer_norm(wide, weight.shape, weight, bias, eps)
    return result.to(hidden.dtype), mean, rstd


def compute_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the hidden states, the weight and the bias."""
    wide, wide_grad = hidden.to(weight.dtype), grad.to(weight.dtype)
    # Only the shape of the bias matters, which is the weight's.
    grad_hidden, grad_weight, grad_bias = _aten.native_layer_norm_backward(
        wide_grad, wide, weight.shape, mean, rstd, weight, weight, [True, True, True]
    )
    return grad_hidden.to(hidden.dtype), grad_weight, grad_bias


def compute_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return what `run_rows` does."""
    shape = (len(hidden), *[1] * (hidden.dim() - 2), hidden.shape[-1])
    wide = F.layer_norm(hidden.to(weight.dtype), hidden.shape[-1:], eps=eps)
    wide *= weight.index_select(0, slots).reshape(shape)
    if bias is not None:
        wide += bias.index_select(0, slots).reshape(shape)
    return wide.to(hidden.dtype)


def _kernels_for(hidden: torch.Tensor) -> Any:
    """Return the module of the Triton kernels, or None if PyTorch's operations compute."""
    if hidden.device.type != "cuda" or hidden.dtype is torch.float64:
        return None
    if usable_kernels(hidden.device) is None:
        return None
    from . import triton_layer_norm

    return triton_layer_norm if hidden.shape[-1] <= triton_layer_norm.MOST_WIDTH else None


def _run(hidden: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kernels = _kernels_for(hidden)
    if kernels is None:
        return compute(hidden, *others)
    return kernels.run(hidden, *others)  # type: ignore[no-any-return]


def _run_backward(
    grad: torch.Tensor, hidden: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kernels = _kernels_for(hidden)
    if kernels is None:
        return compute_backward(grad, hidden, *others)
    return kernels.run_backward(grad.contiguous(), hidden, *others)  # type: ignore[no-any-return]


class _Differentiable(torch.autograd.Function):
    """The operation with its gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        result: torch.Tensor
        result, mean, rstd = _run(*inputs)
        *tensors, ctx.eps = inputs
        ctx.save_for_backward(*tensors, mean, rstd)
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        if grad is None:
            return (None,) * 4
        *inputs, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            # For second derivatives, PyTorch differentiates what the operation consists of.
            return (*differentiate(partial(compute, eps=ctx.eps), inputs, grad), None)
        hidden, weight, bias = inputs
        grad_hidden, grad_weight, grad_bias = _run_backward(grad, hidden, mean, rstd, weight)
        return grad_hidden, grad_weight, None if bias is None else grad_bias, None
