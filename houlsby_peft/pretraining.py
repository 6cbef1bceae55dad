"""Start an adapter from one that was trained before, such as on the task's own text (Han et al. 2021, section 3)."""

from __future__ import annotations

import os
from typing import Any

from peft import PeftModel, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

from .checkpoints.fingerprint import compare_fingerprints
from .config import HoulsbyConfig
from .errors import AdapterError
from .registration import PREFIX


# The fields that decide which bottlenecks and norms an adapter has, and what they compute.
_SAME_FIELDS = (
    "r", "share_layers", "train_layer_norm", "layers_to_transform", "activation", "positions", "rank_pattern",
    "target_modules",
)  # fmt: skip


def init_from(model: PeftModel, name_or_path: str | os.PathLike[str], adapter_name: str = "default") -> None:
    """Initialize an adapter's bottlenecks and norms from a saved adapter; the task head keeps its own weights.

    Args:
        model: the model with the adapter to initialize.
        name_or_path: folder, or name on the Hub, of a Houlsby adapter with the same options on the same base model.
        adapter_name: the adapter to initialize.

    Raises:
        AdapterError: the saved adapter has other options, or was trained on another base model.
    """
    path = os.fspath(name_or_path)
    config: Any = model.peft_config[adapter_name]
    source = HoulsbyConfig.from_pretrained(path)
    for field in _SAME_FIELDS:
        here, there = getattr(config, field), getattr(source, field)
        if here != there:
            raise AdapterError(
                f"An adapter can only be initialized from one with the same options; {path} has {field}={there!r}, "
                f"adapter {adapter_name!r} has {here!r}. Train both with the same HoulsbyConfig."
            )
    if reasons := compare_fingerprints(source.record.base if source.record else None, config.record.base):
        raise AdapterError(
            f"An adapter can only be initialized from one of the same base model; {path} was trained on "
            f"{source.base_model_name_or_path!r}, which differs: {'; '.join(reasons)}. Use that base model."
        )
    weights = {key: value for key, value in load_peft_weights(path, device="cpu").items() if f".{PREFIX}" in key}
    own = get_peft_model_state_dict(model, adapter_name=adapter_name)
    set_peft_model_state_dict(model, own | weights, adapter_name=adapter_name)
