"""The methods that are compared. Each takes a base model and returns the model to train."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

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


METHODS: dict[str, Method] = {
    FLOOR: floor,
    FULL: lambda base: base,
    OURS: houlsby(r=64),
    OURS_BF16: lambda base: houlsby(r=64)(base.to(torch.bfloat16)),
    NO_NORMS: houlsby(r=64, train_layer_norm=False),
    f"{OURS}, shared in each layer": houlsby(r=64, share_layers=1),
    f"{OURS}, shared in each layer, no norms": houlsby(r=64, share_layers=1, train_layer_norm=False),
    f"{OURS}, 3-shared": houlsby(r=64, share_layers=3),
    f"{OURS}, 3-shared, no norms": houlsby(r=64, share_layers=3, train_layer_norm=False),
    "LoRA r=8, query and value": lora(8, ["query", "value"]),
    LORA_ALL: lora(16, LINEAR),
}
QUICK = (FLOOR, FULL, OURS, f"{OURS}, 3-shared", LORA_ALL)
# In evaluation the floor is the base model itself.
EVALUATED = {name: frozen if name == FLOOR else method for name, method in METHODS.items() if name != FULL}
