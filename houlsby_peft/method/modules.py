"""The modules of a model with adapters: how they are walked, copied and cast, and their devices."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from accelerate.utils import align_module_device, recursively_apply
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from peft.utils.integrations import gather_params_ctx
from torch import nn
from torch.utils.hooks import RemovableHandle


_WRAPPERS = (BaseTunerLayer, AuxiliaryTrainingWrapper)
# The attributes that accelerate's hooks set on a module.
_HOOK_ATTRIBUTES = ("_hf_hook", "_old_forward", "forward")


def base_model_of(model: nn.Module) -> nn.Module:
    """Return the base model, no matter how adapters were added to it."""
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model.model if isinstance(model, BaseTuner) else model


def base_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of the base model, as `named_modules` does without adapters.

    The model itself is left out. Adapters, of which a model may have hundreds, are not visited.
    """
    return [(name, base) for name, _, base in _walk(model)]


def wrapped_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the wrappers around modules of the base model, by the names of these modules."""
    return [(name, module) for name, module, base in _walk(model) if module is not base]


def _walk(model: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    """Return the name of each module, the outermost wrapper around it, and the module itself."""
    walked = []
    seen: set[nn.Module] = set()
    ahead = [("", model)]
    while ahead:
        name, module = ahead.pop()
        base = base_module(module) if isinstance(module, _WRAPPERS) else module
        if base in seen:
            continue
        seen.add(base)
        if name:
            walked.append((name, module, base))
        for child_name, child in reversed(list(base.named_children())):
            ahead.append((f"{name}.{child_name}".lstrip("."), child))
    return walked


def base_module(module: nn.Module) -> nn.Module:
    """Return the module of the base model inside all wrappers that adapters have put around it."""
    base: nn.Module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    if isinstance(base, AuxiliaryTrainingWrapper):
        # An invertible module is around PEFT's wrapper of an embedding with trained tokens.
        return base_module(base.original_module)
    return base


def layers_around(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the tuner layers of all methods around a module of the base model, outermost first."""
    while isinstance(module, BaseTunerLayer):
        yield module
        module = module.base_layer  # type: ignore[assignment]


def is_inside(name: str, outer: str) -> bool:
    """Return whether a module is another module, or inside it, by their names."""
    return f"{name}.".startswith(f"{outer}.")


def is_in_any(name: str, outer_names: Collection[str]) -> bool:
    """Return whether a module is one of some modules, or inside one, by their names."""
    return any(is_inside(name, outer) for outer in outer_names)


def first_tensor(values: Iterable[Any]) -> Any:
    """Return the first tensor with a dimension, as hidden states are among the arguments of a
    layer, whatever the model calls them; None without one.
    """
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim():
            return value
    return None


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors inside arguments or results."""
    return recursively_apply(_cast_tensor, value, dtype)


def _cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def copy_of(module: nn.Module) -> nn.Module:
    """Return a copy with whole weights of its own, and without the hooks of the original."""
    sharded = [weight for weight in module.parameters() if hasattr(weight, "ds_id")]
    with ExitStack() as stack:
        if sharded:
            stack.enter_context(gather_params_ctx(sharded, modifier_rank=None))
        # A hook of accelerate refers to the weights of the whole model, which must not be copied.
        not_copied: dict[int, Any] = {}
        for part in module.modules():
            stack.enter_context(align_module_device(part))
            if hasattr(part, "_hf_hook"):
                not_copied[id(part._hf_hook)] = None
        copied = copy.deepcopy(module, not_copied)
    for part in copied.modules():
        for name in _HOOK_ATTRIBUTES:
            part.__dict__.pop(name, None)
        for key, hook in list(part._forward_pre_hooks.items()):
            if hook is _evaluate:
                del part._forward_pre_hooks[key]
    return copied


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device that a module runs on; None without weights, or with none but meta ones."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if device is not None:
        return torch.device(device)
    # Quantized weights may be buffers.
    for tensor in chain(module.parameters(), module.buffers()):
        return None if tensor.is_meta else tensor.device
    return None


def dtype_of(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of a module's weights; None if it has none, or if they are quantized."""
    for weight in chain(module.parameters(), _plain_attributes(module)):
        return weight.dtype if weight.is_floating_point() else None
    return None


def _plain_attributes(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that are plain attributes, as in the copies of DataParallel."""
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor):
                yield value


def hold_batch_norms(model: nn.Module) -> Iterator[RemovableHandle]:
    """Let the batch norms of a frozen base model use their running statistics in training, until
    the hooks are removed.

    The statistics would otherwise follow the adapter's data, and are not saved with it.
    """
    for _, module in base_modules(model):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            yield module.register_forward_pre_hook(_evaluate)


def _evaluate(module: nn.Module, args: Any) -> None:
    module.eval()
