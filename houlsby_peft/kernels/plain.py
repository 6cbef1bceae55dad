"""When an operation may stand for modules: nothing else must happen where they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn


_HALF = (torch.bfloat16, torch.float16)


def is_plain_call(hidden: torch.Tensor) -> bool:
    """Return whether PyTorch computes hidden states at once, in their own dtype.

    Compilers, exporters and function transforms look into modules. Autocast chooses another dtype.
    The modules keep the strides of hidden states that are not contiguous, as of a convolution.
    """
    if type(hidden) is not torch.Tensor or torch.compiler.is_compiling():
        return False
    if not hidden.is_contiguous() or torch.autograd.forward_ad._current_level >= 0:
        return False
    if torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active():
        return False
    device = hidden.device.type
    return not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == hidden.dtype


def has_plain_weights(module: nn.Module, kind: type[nn.Module], hidden: torch.Tensor) -> bool:
    """Return whether a module's weights can be read in its place.

    Weights that are quantized, sharded or offloaded come with another class or with hooks.

    Args:
        module: The module.
        kind: The class that it must have.
        hidden: The hidden states that it would be called with.
    """
    if type(module) is not kind or "forward" in vars(module) or has_hooks(module):
        return False
    # DataParallel's copies have plain tensors as attributes.
    weights = module._parameters or vars(module)
    bias = weights.get("bias")
    return _fits(weights.get("weight"), hidden) and (bias is None or _fits(bias, hidden))


def has_hooks(module: nn.Module) -> bool:
    """Return whether something else happens when a module is called."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _fits(weight: Any, hidden: torch.Tensor) -> bool:
    """Return whether a weight is on the device of the hidden states, at least as precise, and
    contiguous, as kernels read it.
    """
    if type(weight) not in (nn.Parameter, torch.Tensor) or weight.device != hidden.device:
        return False
    if not weight.is_contiguous():
        return False
    if weight.dtype == hidden.dtype:
        return True
    return weight.dtype is torch.float32 and hidden.dtype in _HALF


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Within this context, compute in the dtype of the operands.

    A backward pass may run inside autocast. Entering PyTorch's own context takes longer than a
    small product.
    """
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def differentiate(
    compute: Callable[..., tuple[torch.Tensor, ...]],
    inputs: Sequence[torch.Tensor | None],
    grad: torch.Tensor,
) -> list[torch.Tensor | None]:
    """Return the gradient of each input that needs one, which can be differentiated again.

    Args:
        compute: A function of the inputs.
        inputs: Tensors, or None for those that are left out.
        grad: The gradient of the first result.
    """
    needed = [value for value in inputs if value is not None and value.requires_grad]
    result = compute(*inputs)[0]
    gradients = torch.autograd.grad(result, needed, grad, create_graph=True)
    by_input = dict(zip(map(id, needed), gradients, strict=True))
    return [by_input.get(id(value)) for value in inputs]


@cache
def has_triton(device: torch.device) -> bool:
    """Return whether Triton is there for a GPU, an NVIDIA GPU since Ampere."""
    if torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
