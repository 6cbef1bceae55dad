"""The names that an adapter can have: PEFT keeps adapters, and tells their weights apart, by name."""

from __future__ import annotations

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from .base_modules import base_modules
from .layer import HoulsbyLayer, HoulsbyLayerNorm
from .loading import FILE_PREFIX
from .tuner_layer import HoulsbyTunerLayer


# What tuner layers and trained heads add to the names of a model's weights.
_ADDED_PARTS = (
    "base_layer",
    *HoulsbyLayer.adapter_layer_names,
    *HoulsbyLayerNorm.adapter_layer_names,
    "down_proj",
    "up_proj",
    "original_module",
    "modules_to_save",
)


def check_name(model: nn.Module, adapter_name: str) -> None:
    """Refuse a name that no module can have, a part of the model's own names, or an adapter's of another method.

    Raises:
        ValueError: the name is one of these.
    """
    if not adapter_name or "." in adapter_name or hasattr(nn.ModuleDict(), adapter_name):
        raise ValueError(
            "The name of an adapter must be one that a module can have: not empty, without a dot, and no attribute of "
            f"PyTorch's ModuleDict; got {adapter_name!r}. Give another adapter_name."
        )
    parts = {*FILE_PREFIX.split("."), *_ADDED_PARTS}
    for key, base in base_modules(model):
        parts.update(key.split("."), (name for name, _ in base.named_parameters(recurse=False)))
    if adapter_name in parts:
        raise ValueError(
            "The name of an adapter must be no part of the names of the model's modules, as PEFT leaves out all "
            f"weights with such a part when it saves another adapter; got {adapter_name!r}. Give another "
            f"adapter_name, such as {'task_' + adapter_name!r}."
        )
    others = (m for m in model.modules() if isinstance(m, BaseTunerLayer) and not isinstance(m, HoulsbyTunerLayer))
    for module in others:
        if adapter_name in module._get_available_adapters():
            raise ValueError(
                f"Adapters of all methods must have names of their own; {adapter_name!r} is one of "
                f"{type(module).__module__} in this model. Give another adapter_name."
            )
