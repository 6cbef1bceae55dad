"""Weights that are not where their module is: offloaded by accelerate, or sharded by DeepSpeed and FSDP."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from accelerate.utils import align_module_device  # type: ignore[import-untyped]
from peft.utils.integrations import gather_params_ctx
from torch import nn


# The attributes that accelerate's hooks set on a module.
_HOOK_ATTRIBUTES = ("_hf_hook", "_old_forward", "forward")


def copy_of(module: nn.Module) -> nn.Module:
    """Return a copy with whole weights of its own, and without accelerate's hook, which refers to the original's."""
    modules = list(module.modules())
    with ExitStack() as stack:
        if sharded := [weight for weight in module.parameters() if hasattr(weight, "ds_id")]:
            stack.enter_context(gather_params_ctx(sharded, modifier_rank=None))
        for each in modules:
            stack.enter_context(align_module_device(each))
        # A hook refers to the weights of the whole model, which must not be copied.
        copied = copy.deepcopy(module, {id(each._hf_hook): None for each in modules if hasattr(each, "_hf_hook")})
    for each in copied.modules():
        for name in _HOOK_ATTRIBUTES:
            each.__dict__.pop(name, None)
    return copied


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device that a module runs on; None if it has no weights, or only ones on the meta device."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if device is None:
        # Quantized weights may be buffers.
        device = next((tensor.device for tensor in chain(module.parameters(), module.buffers())), "meta")
    return None if torch.device(device) == torch.device("meta") else torch.device(device)


def dtype_of(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of a module's weights; None if it has none, or if they are quantized."""
    weight: torch.Tensor | None = next(module.parameters(), None)
    if weight is None:  # as in the copies that DataParallel makes, in which weights are plain attributes
        attributes = chain.from_iterable(vars(each).values() for each in module.modules())
        weight = next((value for value in attributes if isinstance(value, torch.Tensor)), None)
    return weight.dtype if weight is not None and weight.is_floating_point() else None


def adapter_dtype(base: torch.dtype, autocast_adapter_dtype: bool) -> torch.dtype:
    """Return the dtype of an adapter's weights on a base model of this dtype: float32 on half precision, if wanted."""
    return torch.float32 if autocast_adapter_dtype and base in (torch.float16, torch.bfloat16) else base


def check_at_hand(weights: Mapping[str, Any]) -> None:
    """Refuse to save, copy or replace weights of which this process does not hold the whole."""
    for name, weight in weights.items():
        is_tensor, is_dtensor = isinstance(weight, torch.Tensor), hasattr(weight, "full_tensor")
        if not is_tensor or weight.is_meta:
            problem = (
                "in memory and not quantized to be saved, copied or initialized; got "
                f"{name}, which is {'offloaded' if is_tensor else 'quantized'}. Do it before the model is "
                "offloaded or quantized."
            )
        elif is_dtensor or weight.numel() == 0:
            problem = (
                f"gathered before they are saved; this process holds only a part of {name}, "
                f"{'a DTensor (FSDP2)' if is_dtensor else 'which is empty (ZeRO-3)'}. On every process: "
                "weights = accelerator.get_state_dict(wrapped_model); then "
                "accelerator.unwrap_model(wrapped_model).save_pretrained(folder, state_dict=weights, "
                "is_main_process=accelerator.is_main_process). transformers' Trainer does this automatically."
            )
        else:
            continue
        raise ValueError(f"An adapter's weights must be {problem}")
