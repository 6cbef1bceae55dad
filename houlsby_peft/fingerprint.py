"""Recognizes the base model that an adapter was trained on, without reading all of its weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


_CONFIG_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size")
_SAMPLES = 8
# Half precision keeps 8 bits of a weight; a base loaded in it is still the same base.
_RELATIVE, _ABSOLUTE = 1e-2, 1e-4


def fingerprint(model: nn.Module, references: Iterable[nn.Module]) -> dict[str, Any]:
    """A few facts of a base model's configuration and a few of its weights, as JSON can hold them.

    Args:
        model: the base model.
        references: modules of it, of which a handful of weights are taken. Quantized weights, and those on the meta
            device or held by another process, are left out; so are modules without weights.

    Returns:
        `{"config": {...}, "weights": [[...], ...]}`, with None in place of weights that cannot be read.
    """
    config = getattr(model, "config", None)
    facts = {key: getattr(config, key) for key in _CONFIG_KEYS if getattr(config, key, None) is not None}
    return {"config": facts, "weights": [_sample(module) for module in references]}


def differences(recorded: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What tells two fingerprints apart, in words; empty if they can be of one base. Unread weights never differ."""
    old, new = recorded.get("config", {}), found["config"]
    said = [f"{key} {old[key]!r}, here {new[key]!r}" for key in old if key in new and old[key] != new[key]]
    pairs = zip(recorded.get("weights", []), found["weights"], strict=False)
    if any(a and b and not _close(a, b) for a, b in pairs):
        said.append("other weights")
    return said


def warn_of_wrong_base(recorded_name: str | None, model: nn.Module, reasons: list[str], adapter_name: str) -> None:
    """Warn that an adapter is put on a base that it was not trained on, naming both."""
    here = getattr(model, "name_or_path", None) or type(model).__name__
    warnings.warn(
        f"Adapter {adapter_name!r} was trained on the base model {recorded_name or 'of unknown name'!r} and is loaded "
        f"on {here!r}, which is another one: {'; '.join(reasons)}. Its outputs will be meaningless; load it on the "
        "base model that it was trained on.",
        stacklevel=2,
    )


def _sample(module: nn.Module) -> list[float] | None:
    weight = next((parameter for parameter in module.parameters() if parameter.dim() > 1), None)
    if weight is None or weight.is_meta or not weight.is_floating_point() or weight.numel() < _SAMPLES:
        return None
    if type(weight.data) is not torch.Tensor:
        # Quantized by torchao, or sharded: reading single values is not among what such a tensor can do.
        return None
    step = weight.numel() // _SAMPLES
    with torch.no_grad():
        values = weight.detach().flatten()[: step * _SAMPLES : step].float().tolist()
    return [float(f"{value:.6g}") for value in values]


def _close(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(
        math.isclose(x, y, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE) for x, y in zip(a, b, strict=True)
    )
