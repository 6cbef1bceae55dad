"""Identify the base model that an adapter was trained on, by a few values of each weight."""

from __future__ import annotations

import base64
import math
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import nn

from ..errors import AdapterError, shortened
from .weights import PRECISIONS, first_of


_CONFIG_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size")
# The rows of a weight that one value each is taken from. They do not depend on the number of rows,
# so that embeddings keep their values when a vocabulary is resized. The other dimensions but the
# last count as rows as well.
_ROWS = (0, 1, 10, 100, *range(20))
# The values of the first rows spread over the columns, and so do those of the others.
_FIRST_ROWS = 4
# The index of a layer in a module's name. Larger ones are no layers of a model.
_LAYER = re.compile(r"(?<![^.])\d{1,3}(?![^.])")
# The largest relative difference of two weights, sum(abs(a - b)) / sum(max(abs(a), abs(b))), that
# are those of one model. It is 1 on average for weights that were trained apart. Half precision,
# int8, pruning by half, noise, merged LoRA and further training stay below 0.7 in each weight of a
# real encoder.
_MOST_DIFFERENCE = 0.75
# Fewer values of a weight say nothing.
_LEAST_VALUES = 10
_OUTSIDE = "modules outside the layers"

_REFUSES = ContextVar("refuses other base models", default=False)


def fingerprint(
    model: nn.Module, modules: Iterable[tuple[str, nn.Module]], without: Collection[str] = ()
) -> dict[str, Any]:
    """Return a few facts of a base model's configuration and a few values of its matrices, as JSON
    can hold them.

    The result is `{"config": {...}, "samples": n, "tensors": {name: values, ...}}`. The values of a
    weight are n numbers in bfloat16 or NaN, in base64. The layers of a list have one name, with "*"
    for their index, and their values follow one another. Names begin at the encoder, which other
    classes of transformers contain under a prefix. Quantized weights, weights on the meta device
    and those that another process holds are left out.

    `modules` are the base model's, without any adapters. Modules named in `without` do not identify
    it: heads, and what is new in it.
    """
    config = getattr(model, "config", None)
    facts = {}
    for key in _CONFIG_KEYS:
        if getattr(config, key, None) is not None:
            facts[key] = getattr(config, key)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    left_out = tuple(f"{name}." for name in without)
    samples: dict[str, dict[int, list[float]]] = {}
    for module_name, module in modules:
        if f"{module_name}.".startswith(left_out):
            continue
        for name, weight in module.named_parameters(recurse=False):
            if _is_readable(weight):
                full_name = f"{module_name}.{name}".removeprefix(prefix)
                layer = _LAYER.search(full_name)
                layers = samples.setdefault(_LAYER.sub("*", full_name, count=1), {})
                layers[int(layer[0]) if layer else -1] = _sample(weight)
    tensors = {name: _encode(layers) for name, layers in samples.items()}
    return {"config": facts, "samples": len(_ROWS), "tensors": tensors}


def check_fingerprint(recorded: Mapping[str, Any]) -> None:
    """Refuse a recorded fingerprint, which may be a stranger's, unless it has the form that
    `fingerprint` returns.
    """
    config, tensors = recorded.get("config", {}), recorded.get("tensors", {})
    is_valid = isinstance(config, dict) and isinstance(tensors, dict)
    if is_valid and _has_samples(recorded):
        try:
            for values in tensors.values():
                _decode(values)
        except (TypeError, ValueError, RuntimeError):
            is_valid = False
    if not is_valid:
        raise AdapterError(
            "The recorded fingerprint of the base model has an unknown form: "
            f"{shortened(repr(recorded))}. Save or download the adapter again."
        )


def compare_fingerprints(
    recorded: Mapping[str, Any] | None, present: Mapping[str, Any] | None
) -> list[str]:
    """Return how two fingerprints differ, in words; empty if both can be of one base model.

    A weight differs if its values do as much as those of unrelated models. Weights that only one of
    them has never differ.
    """
    recorded, present = recorded or {}, present or {}
    recorded_facts, facts = recorded.get("config", {}), present.get("config", {})
    reasons = []
    for key, fact in recorded_facts.items():
        if key in facts and facts[key] != fact:
            reasons.append(f"{key} {fact!r}, here {facts[key]!r}")
    if _has_samples(recorded) and _has_samples(present):
        different = _find_different(recorded["tensors"], present["tensors"])
        if different:
            reasons.append(f"other weights in {first_of(different)}")
    return reasons


def _find_different(recorded: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """Return the layers, and the modules outside the layers, whose weights are of another model."""
    layers: dict[str, None] = {}
    modules: dict[str, None] = {}
    for name, values in recorded.items():
        if name not in present:
            continue
        a, b = _decode(values), _decode(present[name])
        in_both = min(len(a), len(b))
        a, b = a[:in_both], b[:in_both]
        is_known = ~(a.isnan() | b.isnan())
        difference = torch.where(is_known, (a - b).abs(), 0.0).sum(dim=1)
        size = torch.where(is_known, torch.maximum(a.abs(), b.abs()), 0.0).sum(dim=1)
        says_much = is_known.sum(dim=1) >= _LEAST_VALUES
        is_other = says_much & (difference > _MOST_DIFFERENCE * size)
        stack, star, _ = name.partition("*")
        for layer in is_other.nonzero().flatten().tolist():
            if star:
                layers[f"{stack}{layer}"] = None
            else:
                modules[name.rpartition(".")[0]] = None
    return [*layers, *(modules if len(modules) <= 1 else [_OUTSIDE])]


@contextmanager
def refuse_other_bases() -> Iterator[None]:
    """Let `report_other_base` raise an error within the context, in this thread, not only warn."""
    token = _REFUSES.set(True)
    try:
        yield
    finally:
        _REFUSES.reset(token)


def report_other_base(recorded_name: str | None, name: str, differences: Sequence[str]) -> None:
    """Warn that an adapter is put on a base model that it was not trained on, or refuse it."""
    message = (
        "An adapter was trained on the base model "
        f"{shortened(recorded_name or 'of unknown name')!r} and is loaded on {name!r}, which "
        f"differs: {shortened('; '.join(differences))}. Its outputs will be meaningless; load it "
        "on the base model that it was trained on."
    )
    if _REFUSES.get():
        raise AdapterError(
            f'{message} With other_base="warn", or --other-base warn, it is loaded nevertheless.'
        )
    warnings.warn(message, stacklevel=3)


def _has_samples(record: Mapping[str, Any]) -> bool:
    """Return whether a fingerprint has today's samples; those of any other form say nothing."""
    return record.get("samples") == len(_ROWS) and "tensors" in record


def _is_readable(weight: torch.Tensor) -> bool:
    """Return whether single values of a weight can be read, and say something."""
    # Quantized and sharded weights are of subclasses of tensors.
    if type(weight) not in (nn.Parameter, torch.Tensor) or type(weight.data) is not torch.Tensor:
        return False
    if weight.is_meta or weight.dtype not in PRECISIONS or weight.numel() == 0:
        return False
    # Vectors say little: norms have weights near 1, and many biases are 0.
    return weight.dim() > 1


def _sample(weight: torch.Tensor) -> list[float]:
    """Return one value of each of `_ROWS`, each time from another column; NaN for rows that there
    are not.
    """
    width = weight.shape[-1]
    rows = weight.numel() // width
    places = []
    for row, column in zip(_ROWS, _columns(width), strict=True):
        places.append(min(row, rows - 1) * width + column)
    values = torch.take(weight.detach(), torch.tensor(places, device=weight.device)).tolist()
    return [value if row < rows else math.nan for row, value in zip(_ROWS, values, strict=True)]


@cache
def _columns(width: int) -> list[int]:
    """Return the column of each value."""
    others = len(_ROWS) - _FIRST_ROWS
    first = [number * width // _FIRST_ROWS for number in range(_FIRST_ROWS)]
    return first + [number * width // others for number in range(others)]


def _encode(layers: Mapping[int, list[float]]) -> str:
    rows = []
    if -1 in layers:  # outside the layers
        rows.append(layers[-1])
    for layer in range(max(layers) + 1):
        rows.append(layers.get(layer, [math.nan] * len(_ROWS)))
    bits = torch.tensor(rows, device="cpu").bfloat16().view(torch.int16)
    return base64.b64encode(bits.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    """Return the values of `_encode`, of the shape `(layers, rows)`."""
    bits = bytearray(base64.b64decode(text, validate=True))
    return torch.frombuffer(bits, dtype=torch.bfloat16).float().reshape(-1, len(_ROWS))
