"""The methods that are compared. Each takes a base model and returns the model to train."""

from __future__ import annotations

import torch
from peft import IA3Config, LNTuningConfig, LoraConfig, get_peft_model
from torch import nn

from houlsby_peft import HoulsbyConfig
from models import Method, floor, frozen


LINEAR = ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]
FLOOR = "frozen floor"
FULL = "full fine-tuning"
OURS = "Houlsby r=64"
OURS_BF16 = f"{OURS}, bfloat16 base"
NO_NORMS = f"{OURS}, no norms"
LORA_ALL = "LoRA r=16, all linear layers"


def houlsby(**options: object) -> Method:
    """Return a method that adds Houlsby adapters."""
    return lambda base: get_peft_model(base, HoulsbyConfig(**options))


def lora(r: int, target_modules: list[str]) -> Method:
    """Return a method that adds PEFT's LoRA."""
    return lambda base: get_peft_model(base, LoraConfig(r=r, target_modules=target_modules))


def upper_half(base: nn.Module) -> nn.Module:
    """Add adapters to the upper half of the layers."""
    depth = base.config.num_hidden_layers
    return houlsby(r=64, layers_to_transform=list(range(depth // 2, depth)))(base)


METHODS: dict[str, Method] = {
    FLOOR: floor,
    FULL: lambda base: base,
    OURS: houlsby(r=64),
    OURS_BF16: lambda base: houlsby(r=64)(base.to(torch.bfloat16)),
    NO_NORMS: houlsby(r=64, train_layer_norm=False),
    f"{OURS}, shared in each layer": houlsby(r=64, share_layers=1),
    f"{OURS}, 3-shared": houlsby(r=64, share_layers=3),
    "Houlsby r=8": houlsby(r=8),
    f"{OURS}, upper half": upper_half,
    "Pfeiffer r=64": houlsby(r=64, kind="pfeiffer"),
    "parallel r=64": houlsby(r=64, kind="parallel"),
    "LoRA r=8, query and value": lora(8, ["query", "value"]),
    "LoRA r=8, all linear layers": lora(8, LINEAR),
    LORA_ALL: lora(16, LINEAR),
    "IA3": lambda base: get_peft_model(base, IA3Config()),
    "layer norms": lambda base: get_peft_model(base, LNTuningConfig(target_modules=["LayerNorm"])),
}
QUICK = (FLOOR, FULL, OURS, f"{OURS}, 3-shared", LORA_ALL)
# In evaluation the floor is the base model itself.
EVALUATED = {
    name: frozen if name == FLOOR else method for name, method in METHODS.items() if name != FULL
}
