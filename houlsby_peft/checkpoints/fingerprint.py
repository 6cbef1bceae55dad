"""Identify the base model that an adapter was trained on, by a few values of each of its matrices."""

from __future__ import annotations

import base64
import math
import re
import warnings
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..errors import AdapterError, shortened
from ..weights import PRECISIONS, first_of


_CONFIG_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size")
# The rows of a weight that one value each is taken from. They do not depend on the number of rows,
# so that embeddings keep their values when a vocabulary is resized. The other dimensions but the
# last count as rows as well.
_ROWS = (0, 1, 10, 100)
# The index of a layer in a module's name. Larger ones are no layers of a model.
_LAYER = re.compile(r"(?<![^.])\d{1,3}(?![^.])")
# The sum of the differences between the values of two weights, as a part of the sum of the larger
# values. Its mean is 1 for weights that were trained apart. Half precision, int8, pruning by half,
# noise, merged LoRA and further training stay below 0.6 in each layer of a real encoder. A mean
# over fewer weights says nothing.
_MOST_DIFFERENCE, _LEAST_WEIGHTS = 0.75, 3

_REFUSES = ContextVar("refuses other base models", default=False)


def fingerprint(
    model: nn.Module, modules: Iterable[tuple[str, nn.Module]], without: Collection[str] = ()
) -> dict[str, Any]:
    """Return a few facts of a base model's configuration and a few values of its matrices, as JSON
    can hold them.

    The result is `{"config": {...}, "tensors": {name: values, ...}}`. The values of a weight are
    four numbers in bfloat16 or NaN, in base64; those of the layers of a list follow one another,
    with "*" for their index in the name. Names begin at the encoder, which other classes of
    transformers contain under a prefix. Quantized weights, weights on the meta device and those
    that another process holds are left out.

    `modules` are the base model's, without any adapters. Modules named in `without` do not identify
    it: heads, and what is new in it.
    """
    config = getattr(model, "config", None)
    facts = {
        key: getattr(config, key) for key in _CONFIG_KEYS if getattr(config, key, None) is not None
    }
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    inside = tuple(f"{name}." for name in without)
    rows: dict[str, dict[int, list[float]]] = {}
    for module_name, module in modules:
        if f"{module_name}.".startswith(inside):
            continue
        for name, weight in module.named_parameters(recurse=False):
            # Of a subclass of tensors, which is quantized or sharded, single values cannot be read.
            # Vectors say little: norms have weights near 1, and many biases are 0.
            is_plain = (
                type(weight) in (nn.Parameter, torch.Tensor) and type(weight.data) is torch.Tensor
            )
            is_known = (
                not weight.is_meta
                and weight.dtype in PRECISIONS
                and weight.dim() > 1
                and weight.numel() > 0
            )
            if is_plain and is_known:
                full_name = f"{module_name}.{name}".removeprefix(prefix)
                layer = _LAYER.search(full_name)
                values = rows.setdefault(_LAYER.sub("*", full_name, count=1), {})
                values[int(layer[0]) if layer else -1] = _sample(weight)
    return {"config": facts, "tensors": {key: _encode(layers) for key, layers in rows.items()}}


def compare_fingerprints(
    recorded: Mapping[str, Any] | None, found: Mapping[str, Any] | None
) -> list[str]:
    """Return how two fingerprints differ, in words; empty if both can be of one base model.

    Layers differ if their values do as much as those of unrelated models. Weights that only one has
    never differ.
    """
    recorded, found = recorded or {}, found or {}
    old, new = recorded.get("config", {}), found.get("config", {})
    reasons = [
        f"{key} {old[key]!r}, here {new[key]!r}"
        for key in old
        if key in new and old[key] != new[key]
    ]
    tensors = found.get("tensors", {})
    differences: dict[str, list[float]] = {}
    for key, values in recorded.get("tensors", {}).items():
        if key in tensors:
            for place, difference in _compare(key, values, tensors[key]):
                differences.setdefault(place, []).append(difference)
    groups = {place: parts for place, parts in differences.items() if len(parts) >= _LEAST_WEIGHTS}
    rest = [part for place, parts in differences.items() if place not in groups for part in parts]
    if len(rest) >= _LEAST_WEIGHTS or not groups:
        groups["modules outside the layers"] = rest
    others = [
        place for place, parts in groups.items() if sum(parts) > _MOST_DIFFERENCE * len(parts)
    ]
    return [*reasons, f"other weights in {first_of(others)}"] if others else reasons


@contextmanager
def refuse_other_bases() -> Iterator[None]:
    """Raise an error within the context where `report_other_base` would only warn, in this thread."""
    token = _REFUSES.set(True)
    try:
        yield
    finally:
        _REFUSES.reset(token)


def report_other_base(
    recorded_name: str | None, model: nn.Module, differences: Sequence[str], adapter_name: str
) -> None:
    """Warn that an adapter is put on a base model that it was not trained on, or refuse it."""
    here, there = (
        getattr(model, "name_or_path", None) or type(model).__name__,
        recorded_name or "of unknown name",
    )
    message = (
        f"Adapter {adapter_name!r} was trained on the base model {shortened(there)!r} and is loaded on {here!r}, "
        f"which differs: {shortened('; '.join(differences))}. Its outputs will be meaningless; load it on the base "
        "model that it was trained on."
    )
    if _REFUSES.get():
        raise AdapterError(
            f'{message} With other_base="warn", or --other-base warn, it is loaded nevertheless.'
        )
    warnings.warn(message, stacklevel=3)


def _sample(weight: torch.Tensor) -> list[float]:
    """Return one value of each row, each time from another column; NaN for rows that there are not."""
    width = weight.shape[-1]
    rows = [row for row in _ROWS if row < weight.numel() // width]
    places = [row * width + number * width // len(_ROWS) for number, row in enumerate(rows)]
    values = torch.take(weight.detach(), torch.tensor(places, device=weight.device)).tolist()
    return values + [math.nan] * (len(_ROWS) - len(values))


def _encode(layers: Mapping[int, list[float]]) -> str:
    missing = [math.nan] * len(_ROWS)
    rows = (
        [layers[-1]]
        if -1 in layers
        else [layers.get(layer, missing) for layer in range(max(layers) + 1)]
    )
    bits = array("h", torch.tensor(rows).bfloat16().view(torch.int16).flatten().tolist())
    return base64.b64encode(bits.tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    """Return the values of `_encode`, one row per layer."""
    bits = torch.tensor(
        array("h", base64.b64decode(text, validate=True)).tolist(), dtype=torch.int16
    )
    return bits.view(torch.bfloat16).float().reshape(-1, len(_ROWS))


def _compare(key: str, recorded: str, found: str) -> Iterator[tuple[str, float]]:
    """Yield the name of each layer, or of another module, and by how much the values of a weight
    differ in it.
    """
    old, new = _decode(recorded), _decode(found)
    old, new = old[: len(new)], new[: len(old)]
    is_known = ~(old.isnan() | new.isnan())
    parts = key.split(".")
    difference = torch.where(is_known, (old - new).abs(), 0.0).sum(dim=1)
    size = torch.where(is_known, torch.maximum(old.abs(), new.abs()), 0.0).sum(dim=1)
    for layer in size.nonzero().flatten().tolist():
        name = (
            ".".join([*parts[: parts.index("*")], str(layer)])
            if "*" in parts
            else ".".join(parts[:-1])
        )
        yield name, float(difference[layer] / size[layer])
