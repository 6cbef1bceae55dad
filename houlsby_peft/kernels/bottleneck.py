"""A bottleneck as one operation, and its backward pass as another.

`Bottleneck` states what is computed. The operations compute in the dtype of the hidden states and
give the weights' gradients in the weights' dtype. In one dtype, the results on a CPU are those of
the modules bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .plain import (
    differentiate,
    has_hooks,
    has_plain_weights,
    has_triton,
    is_plain_call,
    without_autocast,
)


_aten: Any = torch.ops.aten


_Backward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# By the names of transformers' `ACT2FN`: each activation, and the gradient of what it is applied to
# from the gradient of its result, what it was applied to, and its result.
ACTIVATIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], _Backward]] = {
    "gelu": (F.gelu, lambda grad, hidden, _: _aten.gelu_backward(grad, hidden)),
    "gelu_pytorch_tanh": (
        partial(F.gelu, approximate="tanh"),
        lambda grad, hidden, _: _aten.gelu_backward(grad, hidden, approximate="tanh"),
    ),
    "relu": (F.relu, lambda grad, _, activated: _aten.threshold_backward(grad, activated, 0)),
    "silu": (F.silu, lambda grad, hidden, _: _aten.silu_backward(grad, hidden)),
    "swish": (F.silu, lambda grad, hidden, _: _aten.silu_backward(grad, hidden)),
    "tanh": (torch.tanh, lambda grad, _, activated: _aten.tanh_backward(grad, activated)),
}
_CLASSES = {name: type(ACT2FN[name]) for name in ACTIVATIONS}
# A variant of the bottleneck has further ones, or further weights.
MODULES = {"down_proj", "activation", "up_proj", "dropout"}


def can_run(bottleneck: Any, hidden: torch.Tensor) -> bool:
    """Return whether `run` computes what a `Bottleneck` does, and may be faster.

    It is not in float32, where there are no casts to save.
    """
    if hidden.dtype is torch.float32 or bottleneck.activation_name not in ACTIVATIONS:
        return False
    scaling = bottleneck.scaling
    if isinstance(scaling, torch.Tensor) or scaling != 1:
        return False
    return is_plain_call(hidden) and _has_plain_modules(bottleneck, hidden)


def _has_plain_modules(bottleneck: Any, hidden: torch.Tensor) -> bool:
    """Return whether a bottleneck's modules compute no more than their weights tell."""
    modules = bottleneck._modules
    if bottleneck._parameters or modules.keys() != MODULES:
        return False
    activation, dropout = modules["activation"], modules["dropout"]
    if type(activation) is not _CLASSES[bottleneck.activation_name]:
        return False  # one that somebody has put in its place
    if has_hooks(activation) or has_hooks(dropout):
        return False
    if dropout.training and type(dropout) is not nn.Identity:
        return False
    projections = (modules["down_proj"], modules["up_proj"])
    return all(has_plain_weights(linear, nn.Linear, hidden) for linear in projections)


def run(bottleneck: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Add the branch of a bottleneck to hidden states `(..., d)`."""
    down_proj, up_proj = bottleneck._modules["down_proj"], bottleneck._modules["up_proj"]
    inputs = (hidden, down_proj.weight, down_proj.bias, up_proj.weight, up_proj.bias)
    if torch.is_grad_enabled():
        result: torch.Tensor = _Differentiable.apply(*inputs, bottleneck.activation_name)
    else:
        result, _ = _run_kernel(*inputs, bottleneck.activation_name)
    return result


def kernels_for(hidden: torch.Tensor, r: int) -> Any:
    """Return the module of the Triton kernels for hidden states on a GPU; None if PyTorch's own
    products compute them.

    In float32, PyTorch's are faster, and follow its setting of TF32.
    """
    if hidden.device.type != "cuda" or hidden.dtype not in (torch.bfloat16, torch.float16):
        return None
    kernels = usable_kernels(hidden.device)
    return kernels if kernels is not None and r <= kernels.MOST_R else None


@cache
def usable_kernels(device: torch.device) -> Any:
    """Return the module of the Triton kernels if they run on a device; otherwise None.

    Triton compiles with a C compiler and Python's headers, which many containers lack.
    """
    if not has_triton(device):
        return None
    from . import triton_bottleneck

    weight = torch.full((16, 16), 0.1, device=device)
    bias, rows = weight[0], weight.bfloat16()
    try:
        _, inner = triton_bottleneck.run(rows, weight, bias, weight, bias, "relu")
        triton_bottleneck.run_backward(rows, rows, inner, weight, weight, "relu")
    except Exception as error:
        warnings.warn(
            f"Bottlenecks are computed by PyTorch's operations on {device}, as Triton's kernels do "
            f"not run: {error}",
            stacklevel=2,
        )
        return None
    return triton_bottleneck


def compute(
    hidden: torch.Tensor,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states with the branch `(..., d)`, and `down_proj(hidden)` `(..., r)`."""
    activate, _ = ACTIVATIONS[activation]
    dtype = hidden.dtype
    inner = F.linear(hidden, down_weight.to(dtype), down_bias.to(dtype))
    branch = F.linear(activate(inner), up_weight.to(dtype), up_bias.to(dtype))
    # Not as a view: some models change what they get in place, as Falcon's.
    return _aten._unsafe_view.default(branch.add_(hidden), hidden.shape), inner


def _run_kernel(
    hidden: torch.Tensor, down_weight: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `compute` does, by a Triton kernel where one is faster."""
    kernels = kernels_for(hidden, len(down_weight))
    if kernels is None:
        return compute(hidden, down_weight, *others)
    return kernels.run(hidden.contiguous(), down_weight, *others)  # type: ignore[no-any-return]


def compute_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    inner: torch.Tensor,
    down_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the hidden states and of the weights, in the order of `compute`."""
    activate, activate_backward = ACTIVATIONS[activation]
    dtype, wide = grad.dtype, down_weight.dtype
    rows = hidden.reshape(-1, hidden.shape[-1])
    inner_rows = inner.reshape(-1, inner.shape[-1])
    grad_rows = grad.reshape(rows.shape)
    with without_autocast(hidden.device):
        activated = activate(inner_rows)
        grad_activated = grad_rows.mm(up_weight.to(dtype))
        grad_inner = activate_backward(grad_activated, inner_rows, activated)
        grad_hidden = grad_inner.mm(down_weight.to(dtype)).add_(grad_rows)
        wide_inner, wide_grad = grad_inner.to(wide), grad_rows.to(wide)
        grad_down_weight = wide_inner.t().mm(rows.to(wide))
        grad_up_weight = wide_grad.t().mm(activated.to(wide))
    return (
        grad_hidden.view(hidden.shape),
        grad_down_weight,
        wide_inner.sum(0),
        grad_up_weight,
        wide_grad.sum(0),
    )


def _run_backward(
    grad: torch.Tensor, hidden: torch.Tensor, inner: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, ...]:
    """Return what `compute_backward` does, by Triton kernels where they are faster."""
    kernels = kernels_for(grad, inner.shape[-1])
    if kernels is None:
        return compute_backward(grad, hidden, inner, *others)
    tensors = (grad.contiguous(), hidden.contiguous(), inner.contiguous())
    return kernels.run_backward(*tensors, *others)  # type: ignore[no-any-return]


class _Differentiable(torch.autograd.Function):
    """The operation with its gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        result: torch.Tensor
        result, inner = _run_kernel(*inputs)
        *tensors, ctx.activation = inputs
        ctx.save_for_backward(*tensors, inner)
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        if grad is None:
            return (None,) * 6
        *inputs, inner = ctx.saved_tensors
        if torch.is_grad_enabled():
            # For second derivatives, PyTorch differentiates what the operation consists of.
            return (*differentiate(partial(compute, activation=ctx.activation), inputs, grad), None)
        hidden, down_weight, _down_bias, up_weight, _up_bias = inputs
        gradients = _run_backward(grad, hidden, inner, down_weight, up_weight, ctx.activation)
        return (*gradients, None)
