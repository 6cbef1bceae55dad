"""Identify the base model that an adapter was trained on, by a few values of each of its weights."""

from __future__ import annotations

import base64
import math
import warnings
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ..errors import AdapterError
from .weights import PRECISIONS, first_of


_CONFIG_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size")
# The rows of a weight that one value each is taken from. They do not depend on the number of rows, so that embeddings
# keep their values when a vocabulary is resized. The other dimensions but the last count as rows as well.
_ROWS = (0, 1, 10, 100)
# Of an index that is part of a module's name, larger ones are no layers of a model.
_MOST_LAYERS = 1000
# Values are recorded in bfloat16, which has 8 significant bits. Rounded to float16 before, a value may differ by one
# unit of the last bit, and a value near zero by less than 1e-7.
_RELATIVE, _ABSOLUTE = 1e-2, 1e-6

_REFUSES = ContextVar("refuses other base models", default=False)

# Of the samples that earlier versions have recorded.
_SAMPLES = 8
_ABSOLUTE_OF_SAMPLES = 1e-4


def fingerprint(
    model: nn.Module,
    modules: Iterable[tuple[str, nn.Module]],
    references: Iterable[nn.Module],
    without: Collection[str] = (),
) -> dict[str, Any]:
    """Return a few facts of a base model's configuration and a few values of its weights, as JSON can hold them.

    Quantized weights, weights on the meta device and those that another process holds are left out. It takes some
    milliseconds.

    Args:
        model: The base model.
        modules: Its modules by name, without any adapters.
        references: The two modules that earlier versions have taken values from.
        without: Names of modules that are not part of what identifies the base model: heads, and what is new in it.

    Returns:
        `{"config": {...}, "weights": [[...], ...], "tensors": {name: values, ...}}`. The values of a weight are four
        numbers in bfloat16 or NaN, in base64; those of the layers of a list follow one another, with "*" for their
        index in the name. Names begin at the encoder, which other classes of transformers contain under a prefix.
    """
    config = getattr(model, "config", None)
    facts = {key: getattr(config, key) for key in _CONFIG_KEYS if getattr(config, key, None) is not None}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    inside = tuple(f"{name}." for name in without)
    rows: dict[str, dict[int, list[float]]] = {}
    for module_name, module in modules:
        if f"{module_name}.".startswith(inside):
            continue
        for name, weight in module.named_parameters(recurse=False):
            if _is_readable(weight):
                key, layer = _fold(f"{module_name}.{name}".removeprefix(prefix))
                rows.setdefault(key, {})[layer] = _values(weight)
    return {
        "config": facts,
        "weights": [_sample(module) for module in references],
        "tensors": {key: _encode(layers) for key, layers in rows.items()},
    }


def compare_fingerprints(recorded: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> list[str]:
    """Return how two fingerprints differ, in words; empty if both can be of one base model.

    Weights that only one of them has never differ. Without any weight in common, as in the fingerprints of earlier
    versions, the samples of two weights are compared.
    """
    recorded, found = recorded or {}, found or {}
    old, new = recorded.get("config", {}), found.get("config", {})
    differences = [f"{key} {old[key]!r}, here {new[key]!r}" for key in old if key in new and old[key] != new[key]]
    tensors = found.get("tensors", {})
    pairs = [(key, values, tensors[key]) for key, values in recorded.get("tensors", {}).items() if key in tensors]
    if others := sorted({place for pair in pairs for place in _find_other_values(*pair)}):
        names = [stack if layer < 0 else f"{stack}.{layer}".lstrip(".") for stack, layer in others]
        differences.append(f"other weights in {first_of(names)}")
    elif not pairs:
        samples = zip(recorded.get("weights", []), found.get("weights", []), strict=False)
        if any(a and b and not _are_close(a, b) for a, b in samples):
            differences.append("other weights")
    return differences


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
    """Warn that an adapter is put on a base model that it was not trained on.

    Raises:
        AdapterError: `refuse_other_bases` is in effect.
    """
    here = getattr(model, "name_or_path", None) or type(model).__name__
    message = (
        f"Adapter {adapter_name!r} was trained on the base model {recorded_name or 'of unknown name'!r} and is loaded "
        f"on {here!r}, which differs: {'; '.join(differences)}. Its outputs will be meaningless; load it on the base "
        "model that it was trained on."
    )
    if _REFUSES.get():
        raise AdapterError(message)
    warnings.warn(message, stacklevel=3)


def is_fingerprint(value: Any) -> bool:
    """Return whether a value from JSON has the form that this or an earlier version of `fingerprint` gives."""
    if not isinstance(value, dict) or not isinstance(value.get("config"), dict):
        return False
    rows, tensors = value.get("weights"), value.get("tensors", {})
    are_rows = isinstance(rows, list) and all(
        row is None or (isinstance(row, list) and all(isinstance(number, (int, float)) for number in row))
        for row in rows
    )
    if not are_rows or not isinstance(tensors, dict):
        return False
    try:
        return all(isinstance(key, str) and len(_decode(values)) >= 0 for key, values in tensors.items())
    except (TypeError, ValueError):
        return False


def _is_readable(weight: torch.Tensor) -> bool:
    # Of a subclass of tensors, which is quantized or sharded, single values cannot be read.
    is_plain = type(weight) in (nn.Parameter, torch.Tensor) and type(weight.data) is torch.Tensor
    return is_plain and not weight.is_meta and weight.dtype in PRECISIONS and weight.numel() > 0


def _fold(name: str) -> tuple[str, int]:
    """Return the name of a weight with "*" in place of its first index, and the index; -1 if it has none."""
    parts = name.split(".")
    for number, part in enumerate(parts):
        if part.isdecimal() and int(part) < _MOST_LAYERS:
            return ".".join([*parts[:number], "*", *parts[number + 1 :]]), int(part)
    return name, -1


def _values(weight: torch.Tensor) -> list[float]:
    values = torch.take(weight.detach(), _positions(weight.shape).to(weight.device)).tolist()
    return values + [math.nan] * (len(_ROWS) - len(values))


@lru_cache(maxsize=1024)
def _positions(shape: torch.Size) -> torch.Tensor:
    """Return where a weight of this shape is sampled: one value of each row, each time in another column."""
    width = shape[-1] if len(shape) > 1 else 1
    rows = [row for row in _ROWS if row < math.prod(shape) // width]
    return torch.tensor([row * width + number * width // len(_ROWS) for number, row in enumerate(rows)])


def _encode(layers: Mapping[int, list[float]]) -> str:
    missing = [math.nan] * len(_ROWS)
    rows = [layers[-1]] if -1 in layers else [layers.get(layer, missing) for layer in range(max(layers) + 1)]
    bits = array("h", torch.tensor(rows).bfloat16().view(torch.int16).flatten().tolist())
    return base64.b64encode(bits.tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    """Return the values of `_encode`, one row per layer.

    Raises:
        ValueError: The text is not what `_encode` gives.
    """
    bits = torch.tensor(array("h", base64.b64decode(text, validate=True)).tolist(), dtype=torch.int16)
    return bits.view(torch.bfloat16).float().reshape(-1, len(_ROWS))


def _find_other_values(key: str, recorded: str, found: str) -> Iterator[tuple[str, int]]:
    """Yield the layers, as name and index, in which a weight differs; for other modules, the index is -1."""
    old, new = _decode(recorded), _decode(found)
    old, new = old[: len(new)], new[: len(old)]
    is_missing = old.isnan() | new.isnan()
    is_same = torch.isclose(old, new, rtol=_RELATIVE, atol=_ABSOLUTE) | is_missing
    parts = key.split(".")
    if "*" not in parts and (last := int((~is_missing).sum()) - 1) > 1:
        # The last row that both have may be one of the new rows of a small vocabulary that was resized twice.
        is_same[:, last] = True
    stack = parts[: parts.index("*")] if "*" in parts else parts[:-1]
    for layer in (~is_same.all(dim=1)).nonzero().flatten().tolist():
        yield ".".join(stack), layer if "*" in parts else -1


def _sample(module: nn.Module) -> list[float] | None:
    weight = next((parameter for parameter in module.parameters() if parameter.dim() > 1), None)
    if weight is None or not _is_readable(weight) or weight.numel() < _SAMPLES:
        return None
    step = weight.numel() // _SAMPLES
    with torch.no_grad():
        values = weight.detach().flatten()[: step * _SAMPLES : step].float().tolist()
    return [float(f"{value:.6g}") for value in values]


def _are_close(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(
        math.isclose(x, y, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE_OF_SAMPLES) for x, y in zip(a, b, strict=True)
    )
