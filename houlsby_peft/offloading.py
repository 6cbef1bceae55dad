"""Modules whose weights accelerate keeps elsewhere, on the CPU or on disk, and brings in for each forward."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from itertools import chain

import torch
from accelerate.utils import align_module_device  # type: ignore[import-untyped]
from torch import nn

from .sharded import gathered


# What accelerate's hooks set on a module.
_HOOK_ATTRIBUTES = ("_hf_hook", "_old_forward", "forward")


def copy_of(module: nn.Module) -> nn.Module:
    """A copy that holds its weights whole and itself, without the hook, which would bring in the original's."""
    modules = list(module.modules())
    with gathered(module), ExitStack() as stack:
        for each in modules:
            stack.enter_context(align_module_device(each))
        # A hook refers to the weights of the whole model, which must not be copied along.
        copied = copy.deepcopy(module, {id(each._hf_hook): None for each in modules if hasattr(each, "_hf_hook")})
    for each in copied.modules():
        for name in _HOOK_ATTRIBUTES:
            each.__dict__.pop(name, None)
    return copied


def device_of(module: nn.Module) -> torch.device | None:
    """Where a module's weights are while it runs, or the buffers that hold quantized ones; None if it has neither, or
    only ones on the meta device."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if device is None:
        device = next((tensor.device for tensor in chain(module.parameters(), module.buffers())), "meta")
    return None if torch.device(device) == torch.device("meta") else torch.device(device)


def dtype_of(module: nn.Module) -> torch.dtype | None:
    """The dtype of a module's weights; None if it has none, or if they are quantized."""
    weight = next(module.parameters(), None)
    return weight.dtype if weight is not None and weight.is_floating_point() else None


def check_weights_are_at_hand(model: nn.Module) -> None:
    """Refuse to load an adapter through `PeftModel.from_pretrained` onto a base with layers on disk.

    PEFT takes such a base apart and puts it together again with the adapter's weights on disk too, under names that
    only fit methods with one tensor per adapter and place.

    Raises:
        ValueError: PEFT has taken the base apart.
    """
    on_disk = "disk" in getattr(model, "hf_device_map", {}).values()
    if on_disk and not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(
            "PeftModel.from_pretrained cannot load a Houlsby adapter onto a base model with layers on disk. Load the "
            "base model again, add an empty adapter and fill it: model = get_peft_model(base, "
            "HoulsbyConfig.from_pretrained(path)); set_peft_model_state_dict(model, load_peft_weights(path))."
        )
