"""Initialize an adapter from a saved one, such as one pretrained on the task's text (Han et al. 2021, section 3)."""

from __future__ import annotations

import os

from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from .checkpoints.fingerprint import compare_fingerprints
from .checkpoints.weights import find_weights, first_of
from .config import SHAPE_FIELDS, HoulsbyConfig
from .errors import AdapterError, check_kind
from .placement.place import unfold_places
from .registration import PREFIX


def init_from(model: PeftModel, name_or_path: str | os.PathLike[str], adapter_name: str = "default") -> None:
    """Initialize the bottlenecks and norms of an adapter from a saved adapter. The task head keeps its own weights.

    Args:
        model: Model with the adapter to initialize.
        name_or_path: Folder, or name on the Hub, of a Houlsby adapter with the same options on the same base model.
        adapter_name: Name of the adapter to initialize.

    Raises:
        TypeError: `model` is not a `PeftModel`.
        ValueError: The model has no Houlsby adapter of this name, the adapter is offloaded, or the saved weights do
            not fit.
        AdapterError: The saved adapter uses another method, has other options, was trained on another base model, or
            cannot be read.
    """
    check_kind("model", model, PeftModel, "a PeftModel, which peft.get_peft_model returns")
    path = os.fspath(name_or_path)
    config = model.peft_config.get(adapter_name)
    if not isinstance(config, HoulsbyConfig):
        own = [name for name, config in model.peft_config.items() if isinstance(config, HoulsbyConfig)]
        raise ValueError(
            f"init_from initializes one of the model's Houlsby adapters, which are {', '.join(own) or 'none'}; got "
            f"{adapter_name!r}. Add the adapter first."
        )
    source = HoulsbyConfig.from_pretrained(path)  # of another class if the file says so
    if not isinstance(source, HoulsbyConfig):
        raise AdapterError(
            f"An adapter can only be initialized from a Houlsby adapter; {path} is a {source.peft_type.value} "
            "adapter. Give a folder that a Houlsby adapter was saved to."
        )
    # A difference in what is excluded may concern modules that only one of the models has, such as a language model's
    # head; otherwise the weights do not fit.
    for field in (name for name in SHAPE_FIELDS if name != "exclude_modules"):
        here, there = getattr(config, field), getattr(source, field)
        if here != there:
            raise AdapterError(
                f"An adapter can only be initialized from one with the same options; {path} has {field}={there!r}, "
                f"adapter {adapter_name!r} has {here!r}. Train both with the same HoulsbyConfig."
            )
    # Not the configuration's record, which is another model's if one configuration served for both.
    own = vars(model.get_base_model())["houlsby_records"][adapter_name]
    if reasons := compare_fingerprints(source.record.base if source.record else None, own.base):
        raise AdapterError(
            f"An adapter can only be initialized from one of the same base model; {path} was trained on "
            f"{source.base_model_name_or_path or 'an unnamed model'}, which differs: {'; '.join(reasons)}. Use that "
            "base model."
        )
    # The file of shared bottlenecks does not tell at which places they are applied.
    if config.share_layers and source.record and source.record.places and own.places:
        there, here = (
            {place.key for place in unfold_places(rows) if place.is_bottleneck}
            for rows in (source.record.places, own.places)
        )
        if unlike := sorted(there ^ here):
            raise AdapterError(
                "An adapter can only be initialized from one that shares its bottlenecks between the same places; "
                f"only one of {path} and adapter {adapter_name!r} has a bottleneck at {first_of(unlike)}. Train both "
                "with the same HoulsbyConfig."
            )
    file = find_weights(path, None, {})
    try:
        saved = load_file(file)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} cannot be read: {error}. Save or download the adapter again.") from error
    # Without the embeddings, which would make PEFT ask the Hub whether their size has changed.
    weights = get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
    weights = {key: weight for key, weight in weights.items() if f".{PREFIX}" not in key}
    weights |= {key: weight for key, weight in saved.items() if f".{PREFIX}" in key}
    set_peft_model_state_dict(model, weights, adapter_name=adapter_name)
