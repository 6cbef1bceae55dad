"""What stands where in the two formats: kinds and sizes of bottlenecks, and the keys of their
weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ..config import HoulsbyConfig
from ..errors import AdapterError
from ..record import Place


# The library's options for the sub-layers.
POSITIONS = {
    "mh_adapter": "attention",
    "output_adapter": "feed_forward",
    "cross_adapter": "cross_attention",
}
# Each kind's options in the library; the first two and the fourth decide what a bottleneck
# computes.
KINDS: dict[str, dict[str, Any]] = {
    "houlsby": {"original_ln_before": False, "original_ln_after": True, "residual_before_ln": True},
    "pfeiffer": {"original_ln_before": True, "original_ln_after": True, "residual_before_ln": True},
    "parallel": {
        "original_ln_before": False,
        "original_ln_after": True,
        "is_parallel": True,
        "init_weights": "mam_adapter",
    },
}
# The base models whose layers both libraries adapt at the same place, by whether the norm comes
# before or after the sub-layer. Before: the library gives bottlenecks no norm.
_PRE_NORM = ("gpt2", "gptj", "llama", "mbart", "mistral", "mt5", "t5")
_POST_NORM = (
    "albert", "bart", "bert", "bert-generation", "deberta", "deberta-v2", "distilbert", "electra", "plbart", "roberta",
    "xlm-roberta",
)  # fmt: skip
# Where bottlenecks are inside the module that ends a sub-layer. Elsewhere the layer holds them
# under these names.
INSIDE = (
    "bert",
    "bert-generation",
    "deberta",
    "deberta-v2",
    "electra",
    "mt5",
    "roberta",
    "t5",
    "xlm-roberta",
)
CONTAINERS = {
    "attention": "attention_adapters",
    "feed_forward": "output_adapters",
    "cross_attention": "cross_attention_adapters",
}
# Weights of a bottleneck: their names here and in the library.
PARTS = {
    "down_proj.weight": "adapter_down.0.weight",
    "down_proj.bias": "adapter_down.0.bias",
    "up_proj.weight": "adapter_up.weight",
    "up_proj.bias": "adapter_up.bias",
    "scaling": "scaling",
}
_OWN_KEY = re.compile(r"(?P<place>.+)\.houlsby_adapter\.(?P<part>.+)")


def find_kind(options: Mapping[str, Any], model_type: str) -> str:
    """Return the kind of a bottleneck from the library's options, which are complete."""
    before, after, residual = (
        options[name] for name in ("original_ln_before", "original_ln_after", "residual_before_ln")
    )
    if options["is_parallel"] and after is True:
        return "parallel"
    if not options["is_parallel"] and not before and after and isinstance(residual, bool):
        return "houlsby"
    # Without a norm after the sub-layer, AdapterPlus computes what the Pfeiffer kind does.
    is_plus = model_type in _PRE_NORM and residual is False and after is False
    if not options["is_parallel"] and before and ((residual is True and after is True) or is_plus):
        return "pfeiffer"
    given = ", ".join(f"{name}={options[name]!r}" for name in (*KINDS["houlsby"], "is_parallel"))
    raise AdapterError(
        f"The norm and the skip connection must be those of a Houlsby, Pfeiffer or parallel adapter; got {given}, "
        f"which computes something else on a {model_type} model and has no counterpart here."
    )


def check_base_type(model_type: str, kind: str, positions: Collection[str]) -> None:
    """Refuse base models in which the `adapters` library does not have its bottlenecks at the same
    places.
    """
    known = sorted((*_PRE_NORM, *_POST_NORM))
    # There, the library exchanges the attention's output and its residual input, of which
    # "pfeiffer" reads the sum.
    is_exchanged = model_type == "albert" and "attention" in positions and kind != "pfeiffer"
    if model_type not in known or is_exchanged:
        raise AdapterError(
            "Only adapters of base models whose layers the `adapters` library and this package adapt at the same "
            f"place can be converted, which are {', '.join(known)} (albert: after the attention only the kind "
            f"'pfeiffer'); got the kind {kind!r} on a {model_type}. Train the adapter anew."
        )


def size_of(width: int, factor: float) -> int:
    """Return the bottleneck size that the library makes of a reduction factor."""
    return max(1, int(width // factor))


def library_layers(places: Mapping[str, Place]) -> dict[tuple[str, int], int]:
    """Return the number that the library gives each layer: the encoder's come first, then the
    decoder's.
    """
    layers = {(place.stack, place.layer) for place in places.values() if place.layer is not None}
    ordered = sorted(layers, key=lambda layer: ("decoder" in layer[0], layer))
    return {layer: number for number, layer in enumerate(ordered)}


def library_keys(
    names: Mapping[str, Any], places: Mapping[str, Place], model: nn.Module, adapter_name: str
) -> dict[str, str]:
    """Return the library's keys of an adapter's bottlenecks and coupling, without the base model's
    prefix.

    The names are the adapter's own, without PEFT's prefix; those of norms and heads are left out.
    """
    config: Any = model.config
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    is_inside = config.model_type in INSIDE
    keys = {}
    for name in names:
        found = _OWN_KEY.fullmatch(name)
        if not found:
            continue
        key, part = found["place"], found["part"]
        if part[0] in "FG":
            stack = "encoder." if config.is_encoder_decoder else ""
            keys[name] = f"{stack}invertible_adapters.{adapter_name}.{part}"
            continue
        place = places[key]
        where = place.relative(key).rpartition(".")[0] if is_inside else CONTAINERS[place.position]
        layer = f"{place.stack}.{place.layer}".removeprefix(prefix)
        if part in PARTS:
            keys[name] = f"{layer}.{where}.adapters.{adapter_name}.{PARTS[part]}"
    return keys


def own_config(options: Mapping[str, Any], width: int, kind: str) -> dict[str, Any]:
    """Return the fields of `HoulsbyConfig` that do not depend on the base model's layers."""
    factors = options["reduction_factor"]
    if isinstance(factors, dict):
        factors = factors.get("default", max(factors.values()))
    return {
        "r": size_of(width, factors),
        "activation": options["non_linearity"],
        "dropout": float(options["dropout"]),
        "train_layer_norm": False,
        "kind": kind,
        "positions": tuple(position for name, position in POSITIONS.items() if options[name]),
        "scaling": options["scaling"],
        "invertible": options["inv_adapter"],
        "invertible_reduction_factor": options["inv_adapter_reduction_factor"] or 2.0,
    }


def layer_config(
    options: Mapping[str, Any], width: int, places: Mapping[str, Place]
) -> dict[str, Any]:
    """Return the fields of `HoulsbyConfig` that do: sizes by layer, and layers that are left out."""
    layers = library_layers(places)
    left_out, factors = set(options["leave_out"]), options["reduction_factor"]
    fields: dict[str, Any] = {}
    kept = {layer: number for layer, number in layers.items() if number not in left_out}
    if left_out and len({stack for stack, _ in layers}) == 1:
        fields["layers_to_transform"] = sorted(index for _, index in kept)
    elif left_out:
        fields["exclude_modules"] = [
            f"{stack}.{index}".lstrip(".") for stack, index in layers.keys() - kept.keys()
        ]
    if isinstance(factors, dict):
        usual = factors.get("default", max(factors.values()))
        numbers = {key: kept.get((place.stack, place.layer)) for key, place in places.items()}  # type: ignore[arg-type]
        fields["rank_pattern"] = {
            key: r
            for key, number in numbers.items()
            if number is not None
            and (r := size_of(width, factors.get(str(number), usual))) != size_of(width, usual)
        }
    return fields


def describe(
    config: HoulsbyConfig,
    names: Collection[str],
    places: Mapping[str, Place],
    sizes: Mapping[str, int],
    width: int,
) -> dict[str, Any]:
    """Return the library's options for an adapter with weights of these names and bottlenecks of
    these sizes.

    `places` are all that the base model could have.
    """
    layers = library_layers(places)
    numbers = {key: layers[place.stack, place.layer] for key, place in places.items()}  # type: ignore[index]
    by_layer: dict[int, set[int]] = {}
    for key in sizes.keys() & places.keys():
        by_layer.setdefault(numbers[key], set()).add(sizes[key])
    positions = {place.position for key, place in places.items() if key in sizes}
    lacking = [key for key in places if numbers[key] in by_layer and key not in sizes]
    parts = {found["part"] for name in names if (found := _OWN_KEY.fullmatch(name))}
    misfits = {
        "trained norms": any(".houlsby_norm." in name for name in names),
        "trained embeddings of tokens": config.trainable_token_indices,
        "other weights of a bottleneck": [
            part for part in parts - PARTS.keys() if part[0] not in "FG"
        ],
        "bottlenecks that are not at the ends of sub-layers": sizes.keys() - places.keys(),
        "bottlenecks of several sizes in a layer": any(
            len(found) > 1 for found in by_layer.values()
        ),
        "layers with a part of the bottlenecks": [
            key for key in lacking if places[key].position in positions
        ],
    }
    if reasons := [reason for reason, is_there in misfits.items() if is_there]:
        raise AdapterError(
            f"AdapterHub's format has no place for {' and '.join(reasons)}. Train the adapter without, as with "
            "train_layer_norm=False."
        )
    factors = {number: width / min(found) for number, found in by_layer.items()}
    for number, [r] in by_layer.items():
        if size_of(width, factors[number]) < r:  # by rounding
            factors[number] = math.nextafter(factors[number], 0)
    common = next(iter(factors.values()))
    is_same = all(factor == common for factor in factors.values())
    return {
        **KINDS[config.kind],
        **{name: position in positions for name, position in POSITIONS.items()},
        "reduction_factor": common
        if is_same
        else {str(number): factor for number, factor in sorted(factors.items())},
        "non_linearity": config.activation,
        "dropout": config.dropout,
        "scaling": float(config.scaling) if not isinstance(config.scaling, str) else config.scaling,
        "leave_out": sorted(set(layers.values()) - by_layer.keys()),
        "inv_adapter": config.invertible,
        "inv_adapter_reduction_factor": config.invertible_reduction_factor
        if config.invertible
        else None,
    }
