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
# Whether a GPU multiplies in half precision and keeps the sums in float32: since PyTorch 2.8.
_KEEPS_SUMS = torch.version.cuda is not None and "dtype" in _aten.mm.overloads()


def _gelu_tanh(hidden: torch.Tensor) -> torch.Tensor:
    return F.gelu(hidden, approximate="tanh")


def _gelu_backward(
    grad: torch.Tensor, hidden: torch.Tensor, activated: torch.Tensor
) -> torch.Tensor:
    return _aten.gelu_backward(grad, hidden)  # type: ignore[no-any-return]


def _gelu_tanh_backward(
    grad: torch.Tensor, hidden: torch.Tensor, activated: torch.Tensor
) -> torch.Tensor:
    return _aten.gelu_backward(grad, hidden, approximate="tanh")  # type: ignore[no-any-return]


def _relu_backward(
    grad: torch.Tensor, hidden: torch.Tensor, activated: torch.Tensor
) -> torch.Tensor:
    return _aten.threshold_backward(grad, activated, 0)  # type: ignore[no-any-return]


def _silu_backward(
    grad: torch.Tensor, hidden: torch.Tensor, activated: torch.Tensor
) -> torch.Tensor:
    return _aten.silu_backward(grad, hidden)  # type: ignore[no-any-return]


def _tanh_backward(
    grad: torch.Tensor, hidden: torch.Tensor, activated: torch.Tensor
) -> torch.Tensor:
    return _aten.tanh_backward(grad, activated)  # type: ignore[no-any-return]


_Backward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# By the names of transformers' `ACT2FN`: each activation, and the gradient of what it is applied to
# from the gradient of its result, what it was applied to, and its result.
ACTIVATIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], _Backward]] = {
    "gelu": (F.gelu, _gelu_backward),
    "gelu_pytorch_tanh": (_gelu_tanh, _gelu_tanh_backward),
    "relu": (F.relu, _relu_backward),
    "silu": (F.silu, _silu_backward),
    "swish": (F.silu, _silu_backward),
    "tanh": (torch.tanh, _tanh_backward),
}
_CLASSES = {name: type(ACT2FN[name]) for name in ACTIVATIONS}


_MODULES = {"down_proj", "activation", "up_proj", "dropout"}


def can_run(bottleneck: Any, hidden: torch.Tensor) -> bool:
    """Return whether `run` computes what a `Bottleneck` does, and may be faster.

    It is not in float32 on a CPU, where there are no launches or casts to save.
    """
    if hidden.dtype is torch.float32 and hidden.device.type == "cpu":
        return False
    if bottleneck.activation_name not in ACTIVATIONS or not is_plain_call(hidden):
        return False
    scaling = bottleneck.scaling
    if isinstance(scaling, torch.Tensor) or scaling != 1:
        return False
    modules = bottleneck._modules
    if bottleneck._parameters or modules.keys() != _MODULES:
        return False  # a variant with further weights
    activation, dropout = modules["activation"], modules["dropout"]
    if type(activation) is not _CLASSES[bottleneck.activation_name]:
        return False  # one that somebody has put in its place
    if has_hooks(activation) or has_hooks(dropout):
        return False
    if dropout.training and type(dropout) is not nn.Identity:
        return False
    down_proj, up_proj = modules["down_proj"], modules["up_proj"]
    return has_plain_weights(down_proj, nn.Linear, hidden) and has_plain_weights(
        up_proj, nn.Linear, hidden
    )


def run(bottleneck: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Add the branch of a bottleneck to hidden states `(..., d)`."""
    down_proj, up_proj = bottleneck._modules["down_proj"], bottleneck._modules["up_proj"]
    inputs = (hidden, down_proj.weight, down_proj.bias, up_proj.weight, up_proj.bias)
    if torch.is_grad_enabled():
        result: torch.Tensor = _Differentiable.apply(*inputs, bottleneck.activation_name)
    else:
        result, _ = torch.ops.houlsby_peft.bottleneck.default(*inputs, bottleneck.activation_name)
    return result


torch.library.define(
    "houlsby_peft::bottleneck",
    "(Tensor hidden, Tensor down_weight, Tensor down_bias, Tensor up_weight, Tensor up_bias, "
    "str activation) -> (Tensor, Tensor)",
)
torch.library.define(
    "houlsby_peft::bottleneck_backward",
    "(Tensor grad, Tensor hidden, Tensor inner, Tensor down_weight, Tensor up_weight, "
    "str activation) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


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
        with torch.cuda.device_of(rows):
            _, inner = triton_bottleneck.run(rows, weight, bias, weight, bias, "relu")
            triton_bottleneck.run_backward(rows, inner, weight, weight, "relu")
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
    return _of_its_own(branch.add_(hidden), hidden.shape), inner


def _run_kernel(
    hidden: torch.Tensor, down_weight: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `compute` does, by a Triton kernel where one is faster."""
    kernels = kernels_for(hidden, len(down_weight))
    if kernels is None:
        return compute(hidden, down_weight, *others)
    rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
    with torch.cuda.device(hidden.device):
        result, inner = kernels.run(rows, down_weight, *others)
    return _of_its_own(result, hidden.shape), inner.view(*hidden.shape[:-1], inner.shape[-1])


def _of_its_own(result: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a result in a shape, not as a view: some models change it in place, as Falcon's."""
    return torch.ops.aten._unsafe_view.default(result, shape)  # type: ignore[no-any-return]


def compute_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    inner: torch.Tensor,
    down_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the hidden states and of the weights, in the order of `compute`."""
    wide = down_weight.dtype
    rows = hidden.reshape(-1, hidden.shape[-1])
    inner_rows = inner.reshape(-1, inner.shape[-1])
    grad_rows = grad.reshape(rows.shape)
    with without_autocast(hidden.device):
        grad_hidden, grad_inner, activated = _run_rows_backward(
            grad_rows, inner_rows, down_weight, up_weight, activation
        )
        grad_down_weight = _multiply(grad_inner.t(), rows, wide)
        grad_up_weight = _multiply(grad_rows.t(), activated, wide)
    return (
        grad_hidden.view(hidden.shape),
        grad_down_weight,
        grad_inner.sum(0, dtype=wide),
        grad_up_weight,
        grad_rows.sum(0, dtype=wide),
    )


def _multiply(left: torch.Tensor, right: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Return the product of two matrices in a dtype that may be wider than theirs."""
    if left.dtype == wide:
        return left.mm(right)
    if left.is_cuda and _KEEPS_SUMS:
        return _aten.mm.dtype(left, right, wide)  # type: ignore[no-any-return]
    return left.to(wide).mm(right.to(wide))


def compute_rows_backward(
    grad: torch.Tensor,
    inner: torch.Tensor,
    down_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the hidden states `(rows, d)` and of `inner` `(rows, r)`, and what
    was activated `(rows, r)`.
    """
    activate, activate_backward = ACTIVATIONS[activation]
    activated = activate(inner)
    grad_activated = grad.mm(up_weight.to(grad.dtype))
    grad_inner = activate_backward(grad_activated, inner, activated)
    grad_hidden = grad_inner.mm(down_weight.to(grad.dtype)).add_(grad)
    return grad_hidden, grad_inner, activated


def _run_rows_backward(
    grad: torch.Tensor, inner: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `compute_rows_backward` does, by a Triton kernel where one is faster."""
    kernels = kernels_for(grad, inner.shape[-1])
    if kernels is None:
        return compute_rows_backward(grad, inner, *others)
    with torch.cuda.device(grad.device):
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = kernels.run_backward(
            grad.contiguous(), inner.contiguous(), *others
        )
    return gradients


def _fake(
    hidden: torch.Tensor, down_weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    inner = hidden.new_empty((*hidden.shape[:-1], down_weight.shape[0]))
    return hidden.new_empty(hidden.shape), inner


def _fake_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    inner: torch.Tensor,
    down_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, ...]:
    return (
        hidden.new_empty(hidden.shape),
        torch.empty_like(down_weight),
        down_weight.new_empty(down_weight.shape[0]),
        torch.empty_like(up_weight),
        up_weight.new_empty(up_weight.shape[0]),
    )


class _Differentiable(torch.autograd.Function):
    """The operation with its gradients. What `torch.library` registers takes longer to start."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        result: torch.Tensor
        result, inner = torch.ops.houlsby_peft.bottleneck.default(*inputs)
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
        gradients = torch.ops.houlsby_peft.bottleneck_backward.default(
            grad, hidden, inner, down_weight, up_weight, ctx.activation
        )
        return (*gradients, None)


torch.library.impl("houlsby_peft::bottleneck", "default", _run_kernel)
torch.library.impl("houlsby_peft::bottleneck_backward", "default", compute_backward)
torch.library.register_fake("houlsby_peft::bottleneck", _fake)
torch.library.register_fake("houlsby_peft::bottleneck_backward", _fake_backward)
