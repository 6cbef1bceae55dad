"""Walk a model with adapters, and tell, copy or cast the devices and dtypes of its modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from accelerate.utils import align_module_device  # type: ignore[import-untyped]
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from peft.utils.integrations import gather_params_ctx
from torch import nn


# The attributes that accelerate's hooks set on a module.
_HOOK_ATTRIBUTES = ("_hf_hook", "_old_forward", "forward")


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of the base model, as `named_modules` does on a model without
    adapters.

    The model itself is left out. Adapters, of which a model may have hundreds, are not visited.
    """
    return ((name, base) for name, _, base in _walk("", model, set()))


def wrapped_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the wrappers that adapters have put around modules of the base model, by the names of
    these modules.
    """
    return ((name, module) for name, module, base in _walk("", model, set()) if module is not base)


def _walk(
    name: str, module: nn.Module, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    base = base_module(module)
    if base in seen:
        return
    seen.add(base)
    if name:
        yield name, module, base
    for child_name, child in base.named_children():
        yield from _walk(f"{name}.{child_name}" if name else child_name, child, seen)


def base_module(module: nn.Module) -> nn.Module:
    """Return the module of the base model inside all wrappers that adapters have put around it."""
    base: nn.Module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    # An invertible module is around PEFT's wrapper of an embedding with trained tokens.
    return base_module(base.original_module) if isinstance(base, AuxiliaryTrainingWrapper) else base


def layers_around(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the tuner layers around a module of the base model, from the outermost on, also those
    of other methods.
    """
    while isinstance(module, BaseTunerLayer):
        yield module
        module = module.base_layer  # type: ignore[assignment]


def is_inside(name: str, outer: str) -> bool:
    """Return whether a module is another module, or inside it, by their names."""
    return f"{name}.".startswith(f"{outer}.")


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors inside arguments or results."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(cast(item, dtype) for item in value)
    if type(value) is dict:
        return {key: cast(item, dtype) for key, item in value.items()}
    return value


def copy_of(module: nn.Module) -> nn.Module:
    """Return a copy with whole weights of its own, and without accelerate's hook, which refers to
    the original's.
    """
    modules = list(module.modules())
    with ExitStack() as stack:
        if sharded := [weight for weight in module.parameters() if hasattr(weight, "ds_id")]:
            stack.enter_context(gather_params_ctx(sharded, modifier_rank=None))
        for each in modules:
            stack.enter_context(align_module_device(each))
        # A hook refers to the weights of the whole model, which must not be copied.
        copied = copy.deepcopy(
            module, {id(each._hf_hook): None for each in modules if hasattr(each, "_hf_hook")}
        )
    for each in copied.modules():
        for name in _HOOK_ATTRIBUTES:
            each.__dict__.pop(name, None)
    return copied


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device that a module runs on; None if it has no weights, or only ones on the meta
    device.
    """
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if device is None:
        # Quantized weights may be buffers.
        device = next(
            (tensor.device for tensor in chain(module.parameters(), module.buffers())), "meta"
        )
    return None if torch.device(device) == torch.device("meta") else torch.device(device)


def dtype_of(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of a module's weights; None if it has none, or if they are quantized."""
    weight: torch.Tensor | None = next(module.parameters(), None)
    if (
        weight is None
    ):  # as in the copies that DataParallel makes, in which weights are plain attributes
        attributes = chain.from_iterable(vars(each).values() for each in module.modules())
        weight = next((value for value in attributes if isinstance(value, torch.Tensor)), None)
    return weight.dtype if weight is not None and weight.is_floating_point() else None
