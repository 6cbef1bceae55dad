"""Initialize an adapter from a saved one."""

from __future__ import annotations

import os
from typing import Any

from peft import PeftModel, set_peft_model_state_dict

from ..config import SHAPE_OPTIONS
from ..errors import AdapterError
from ..method.tuner_layer import state_of
from ..registration import PREFIX
from ..saved.adapter import SavedAdapter
from ..saved.fingerprint import compare_fingerprints
from ..saved.record import AdapterRecord, unfold_places
from .combine import tensors_of
from .differences import find_differences


# What is excluded may differ where only one of the models has it, such as a language model's head,
# and a `rank_pattern` in the names of its places. Otherwise the weights do not fit.
_OPTIONS = [name for name in SHAPE_OPTIONS if name not in ("exclude_modules", "rank_pattern")]


def init_from(
    model: PeftModel, name_or_path: str | os.PathLike[str], adapter_name: str = "default"
) -> None:
    """Initialize the bottlenecks and norms of an adapter from a saved adapter.

    The task head keeps its own weights. An adapter may have been pretrained on the task's text, for
    example (Han et al. 2021, section 3).

    Args:
        model: Model with the adapter to initialize.
        name_or_path: Folder, or name on the Hub, of a Houlsby adapter with the same options on the
            same base model.
        adapter_name: Name of the adapter to initialize.

    Raises:
        ValueError: The adapter is offloaded, or the saved weights do not fit.
        AdapterError: The saved adapter uses another method, has other options, was trained on
            another base model, or cannot be read.
        KeyError: The model has no adapter of this name.
    """
    config: Any = model.peft_config[adapter_name]
    saved = SavedAdapter.open(name_or_path)
    record = state_of(model).records[adapter_name]
    differences = find_differences(saved.config, saved.record, config, record, _OPTIONS)
    if config.share_layers:
        # The file has a shared bottleneck once, and does not tell at which places it is applied.
        only_in_one = _bottlenecks(saved.record) ^ _bottlenecks(record)
        differences += [f"only one has a bottleneck at {key}" for key in sorted(only_in_one)]
    differences += compare_fingerprints(saved.record.base, record.base)
    if differences:
        base_name = saved.config.base_model_name_or_path or "an unnamed model"
        raise AdapterError(
            "An adapter can only be initialized from one with the same options on the same base "
            f"model; {saved.name}, trained on {base_name}, and {adapter_name!r} differ: "
            f"{differences[0]}. Train both with the same HoulsbyConfig on the same model."
        )
    weights = tensors_of(model, adapter_name)
    bottlenecks_and_norms = [key for key in weights if f".{PREFIX}" in key]
    for key in bottlenecks_and_norms:
        del weights[key]
    for key, weight in saved.weights.items():
        if f".{PREFIX}" in key:
            weights[key] = weight
    set_peft_model_state_dict(model, weights, adapter_name=adapter_name)


def _bottlenecks(record: AdapterRecord) -> set[str]:
    """Return the names of the places that have a bottleneck."""
    return {place.key for place in unfold_places(record.places or ()) if place.is_bottleneck}
