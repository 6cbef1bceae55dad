"""Identify the base model that an adapter was trained on, without reading all of its weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


_CONFIG_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size")
_SAMPLES = 8
# Half precision keeps 8 bits of a weight; a base model loaded in it is still the same.
_RELATIVE, _ABSOLUTE = 1e-2, 1e-4


def fingerprint(model: nn.Module, references: Iterable[nn.Module]) -> dict[str, Any]:
    """Return a few facts of a base model's configuration and a few of its weights, in a form that JSON can hold.

    Args:
        model: The base model.
        references: Modules of it, of which a few weights are taken. Quantized weights, weights on the meta device and
            those that another process holds are left out, as are modules without weights.

    Returns:
        `{"config": {...}, "weights": [[...], ...]}`, with None in place of weights that cannot be read.
    """
    config = getattr(model, "config", None)
    facts = {key: getattr(config, key) for key in _CONFIG_KEYS if getattr(config, key, None) is not None}
    return {"config": facts, "weights": [_sample(module) for module in references]}


def compare_fingerprints(recorded: dict[str, Any] | None, found: dict[str, Any] | None) -> list[str]:
    """Return how two fingerprints differ, in words; empty if both can be of one base model.

    Weights that could not be read never differ.
    """
    recorded, found = recorded or {}, found or {}
    old, new = recorded.get("config", {}), found.get("config", {})
    differences = [f"{key} {old[key]!r}, here {new[key]!r}" for key in old if key in new and old[key] != new[key]]
    pairs = zip(recorded.get("weights", []), found.get("weights", []), strict=False)
    if any(a and b and not _are_close(a, b) for a, b in pairs):
        differences.append("other weights")
    return differences


def wrong_base_message(recorded_name: str | None, model: nn.Module, differences: list[str], adapter_name: str) -> str:
    """Return a message that an adapter is put on a base model that it was not trained on, naming both."""
    here = getattr(model, "name_or_path", None) or type(model).__name__
    return (
        f"Adapter {adapter_name!r} was trained on the base model {recorded_name or 'of unknown name'!r} and is loaded "
        f"on {here!r}, which differs: {'; '.join(differences)}. Its outputs will be meaningless; load it on the base "
        "model that it was trained on."
    )


def _sample(module: nn.Module) -> list[float] | None:
    weight = next((parameter for parameter in module.parameters() if parameter.dim() > 1), None)
    if weight is None or weight.is_meta or not weight.is_floating_point() or weight.numel() < _SAMPLES:
        return None
    if type(weight.data) is not torch.Tensor:
        # A tensor that torchao has quantized, or a sharded one, does not let single values be read.
        return None
    step = weight.numel() // _SAMPLES
    with torch.no_grad():
        values = weight.detach().flatten()[: step * _SAMPLES : step].float().tolist()
    return [float(f"{value:.6g}") for value in values]


def _are_close(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(
        math.isclose(x, y, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE) for x, y in zip(a, b, strict=True)
    )
