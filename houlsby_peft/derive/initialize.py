"""Initialize an adapter from a saved one."""

from __future__ import annotations

import os
from typing import Any

from peft import PeftModel, set_peft_model_state_dict

from ..checkpoints.fingerprint import compare_fingerprints
from ..checkpoints.saved import SavedAdapter
from ..config import SHAPE_OPTIONS
from ..errors import AdapterError
from ..layer import state_of
from ..record import unfold_places
from ..registration import PREFIX
from .combine import compare_options, tensors_of


def init_from(
    model: PeftModel, name_or_path: str | os.PathLike[str], adapter_name: str = "default"
) -> None:
    """Initialize the bottlenecks and norms of an adapter from a saved adapter. The task head keeps
    its own weights.

    An adapter may have been pretrained on the task's text, for example (Han et al. 2021, section
    3).

    Args:
        model: Model with the adapter to initialize.
        name_or_path: Folder, or name on the Hub, of a Houlsby adapter with the same options on the same base model.
        adapter_name: Name of the adapter to initialize.

    Raises:
        ValueError: The adapter is offloaded, or the saved weights do not fit.
        AdapterError: The saved adapter uses another method, has other options, was trained on
            another base model, or cannot be read.
        KeyError: The model has no adapter of this name.
    """
    config: Any = model.peft_config[adapter_name]
    saved = SavedAdapter.open(name_or_path)
    own, there = state_of(model).records[adapter_name], saved.record
    # What is excluded may differ where only one of the models has it, such as a language model's
    # head; otherwise the weights do not fit. The file of shared bottlenecks does not tell at which
    # places they are applied.
    options = [name for name in SHAPE_OPTIONS if name != "exclude_modules"]
    differences = compare_options(saved.config, config, options)
    if config.share_layers and not differences:
        bottlenecks = [
            {place.key for place in unfold_places(record.places or ()) if place.is_bottleneck}
            for record in (there, own)
        ]
        differences = [
            f"only one has a bottleneck at {key}" for key in sorted(bottlenecks[0] ^ bottlenecks[1])
        ]
    if differences := differences + compare_fingerprints(there.base, own.base):
        raise AdapterError(
            "An adapter can only be initialized from one with the same options on the same base model; "
            f"{saved.name}, trained on {saved.config.base_model_name_or_path or 'an unnamed model'}, and "
            f"{adapter_name!r} differ: {differences[0]}. Train both with the same HoulsbyConfig on the same model."
        )
    weights = {
        key: weight
        for key, weight in tensors_of(model, adapter_name).items()
        if f".{PREFIX}" not in key
    }
    weights |= {key: weight for key, weight in saved.read_weights().items() if f".{PREFIX}" in key}
    set_peft_model_state_dict(model, weights, adapter_name=adapter_name)
