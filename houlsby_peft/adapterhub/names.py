"""Translate AdapterHub's format: kinds and sizes of bottlenecks, and the keys of weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ..errors import AdapterError
from ..saved.record import Place, full_name


# The library's options for the sub-layers.
_POSITIONS = {
    "mh_adapter": "attention",
    "output_adapter": "feed_forward",
    "cross_adapter": "cross_attention",
}
# The options that decide which kind a bottleneck is of.
_OF_KINDS = ("original_ln_before", "original_ln_after", "residual_before_ln", "is_parallel")
# The base models whose layers both libraries adapt at the same place, by whether the norm comes
# before or after the sub-layer. Before: the library gives bottlenecks no norm.
_PRE_NORM = ("gpt2", "gptj", "llama", "mbart", "mistral", "mt5", "t5")
_POST_NORM = (
    "albert", "bart", "bert", "bert-generation", "deberta", "deberta-v2", "distilbert", "electra",
    "plbart", "roberta", "xlm-roberta",
)  # fmt: skip
# Where bottlenecks are inside the module that ends a sub-layer. Elsewhere the layer holds them
# under these names.
_INSIDE = (
    "bert", "bert-generation", "deberta", "deberta-v2", "electra", "mt5", "roberta", "t5",
    "xlm-roberta",
)  # fmt: skip
_CONTAINERS = {
    "attention": "attention_adapters",
    "feed_forward": "output_adapters",
    "cross_attention": "cross_attention_adapters",
}
# Weights of a bottleneck: their names here and in the library.
_PARTS = {
    "down_proj.weight": "adapter_down.0.weight",
    "down_proj.bias": "adapter_down.0.bias",
    "up_proj.weight": "adapter_up.weight",
    "up_proj.bias": "adapter_up.bias",
    "scaling": "scaling",
}
# An invertible module has two networks.
_COUPLING_PARTS = ("F", "G")
_OWN_KEY = re.compile(r"(?P<place>.+)\.houlsby_adapter\.(?P<part>.+)")


def find_kind(options: Mapping[str, Any], model_type: str) -> str:
    """Return the kind of a bottleneck from the library's options, which are complete.

    Raises:
        AdapterError: The options describe another kind.
    """
    norm_before, norm_after = options["original_ln_before"], options["original_ln_after"]
    residual = options["residual_before_ln"]
    if options["is_parallel"]:
        kind, is_exact = "parallel", norm_after is True
    elif not norm_before:
        kind, is_exact = "houlsby", norm_after and isinstance(residual, bool)
    else:
        # AdapterPlus lacks the norm after the sub-layer. So do some models, on which it computes
        # what the Pfeiffer kind does.
        is_plus = model_type in _PRE_NORM and residual is False and norm_after is False
        kind, is_exact = "pfeiffer", is_plus or (residual is True and norm_after is True)
    if is_exact:
        return kind
    values = [f"{name}={options[name]!r}" for name in _OF_KINDS]
    raise AdapterError(
        "The norm and the skip connection must be those of a Houlsby, Pfeiffer or parallel "
        f"adapter; got {', '.join(values)}, which computes something else on a {model_type} model "
        "and has no counterpart here."
    )


def check_base_type(model_type: str, kind: str, positions: Collection[str]) -> None:
    """Refuse base models that the `adapters` library does not adapt at the same places."""
    model_types = sorted((*_PRE_NORM, *_POST_NORM))
    # In ALBERT, the library exchanges the attention's output and its residual input. "pfeiffer"
    # reads the sum of both.
    is_exchanged = model_type == "albert" and "attention" in positions and kind != "pfeiffer"
    if model_type not in model_types or is_exchanged:
        raise AdapterError(
            "Only adapters of base models whose layers the `adapters` library and this package "
            f"adapt at the same place can be converted, which are {', '.join(model_types)} "
            "(albert: after the attention only the kind 'pfeiffer'); got the kind "
            f"{kind!r} on a {model_type}. Train the adapter anew."
        )


def _size_of(width: int, factor: float) -> int:
    """Return the bottleneck size that the library makes of a reduction factor."""
    return max(1, int(width // factor))


def library_keys(
    names: Collection[str], places: Mapping[str, Place], model: nn.Module, adapter_name: str
) -> dict[str, str]:
    """Return the library's keys of an adapter's bottlenecks and coupling by their names here.

    Keys lack the base model's prefix, and names lack PEFT's. Norms and heads are left out.
    """
    config: Any = model.config
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    keys = {}
    for name in names:
        match = _OWN_KEY.fullmatch(name)
        if match is None:
            continue
        key, part = match["place"], match["part"]
        if part[0] in _COUPLING_PARTS:
            stack = "encoder." if config.is_encoder_decoder else ""
            keys[name] = f"{stack}invertible_adapters.{adapter_name}.{part}"
        elif part in _PARTS:
            place = places[key]
            layer = f"{place.stack}.{place.layer}".removeprefix(prefix)
            container = _CONTAINERS[place.position]
            if config.model_type in _INSIDE:
                container = place.relative(key).rpartition(".")[0]
            keys[name] = f"{layer}.{container}.adapters.{adapter_name}.{_PARTS[part]}"
    return keys


def own_config(options: Mapping[str, Any], width: int, kind: str) -> dict[str, Any]:
    """Return the fields of `HoulsbyConfig` that do not depend on the base model's layers."""
    return {
        "r": _size_of(width, _usual_factor(options)),
        "activation": options["non_linearity"],
        "dropout": float(options["dropout"]),
        "train_layer_norm": False,
        "kind": kind,
        "positions": tuple(position for name, position in _POSITIONS.items() if options[name]),
        "scaling": options["scaling"],
        "invertible": options["inv_adapter"],
        "invertible_reduction_factor": options["inv_adapter_reduction_factor"] or 2.0,
    }


def layer_config(
    options: Mapping[str, Any], width: int, places: Mapping[str, Place]
) -> dict[str, Any]:
    """Return the other fields of `HoulsbyConfig`: sizes by layer, and layers to leave out."""
    fields: dict[str, Any] = {}
    stacks, left_out = set(), []
    adapted = {}
    layers = {(place.stack, place.layer) for place in places.values() if place.layer is not None}
    # The library counts the encoder's layers first, then the decoder's.
    ordered = sorted(layers, key=lambda layer: ("decoder" in layer[0], layer))
    for library_number, (stack, index) in enumerate(ordered):
        stacks.add(stack)
        if library_number in options["leave_out"]:
            left_out.append(full_name(stack, index))
        else:
            adapted[stack, index] = library_number
    if options["leave_out"] and len(stacks) == 1:
        fields["layers_to_transform"] = sorted(index for _, index in adapted)
    elif options["leave_out"]:
        fields["exclude_modules"] = left_out
    factors = options["reduction_factor"]
    if isinstance(factors, dict):
        usual_factor = _usual_factor(options)
        fields["rank_pattern"] = {}
        for key, place in places.items():
            number = adapted.get((place.stack, place.layer))  # type: ignore[arg-type]
            size = _size_of(width, factors.get(str(number), usual_factor))
            if number is not None and size != _size_of(width, usual_factor):
                fields["rank_pattern"][key] = size
    return fields


def _usual_factor(options: Mapping[str, Any]) -> Any:
    """Return the reduction factor of layers without a factor of their own."""
    factors = options["reduction_factor"]
    if isinstance(factors, dict):
        return factors.get("default", max(factors.values()))
    return factors
