"""The values of options as people give them: of other libraries, of NumPy, in any order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


# The sub-layers that may get a bottleneck, in their order in a layer.
POSITIONS = ("attention", "feed_forward", "cross_attention")
# What other methods and libraries call an option, and what to use here.
_OTHER_NAMES = {
    "adapter_dropout": "use dropout",
    "adapter_size": "use r",
    "bias": "leave it out, as a bottleneck always trains its biases",
    "bottleneck_dim": "use r",
    "bottleneck_size": "use r",
    "layers": "use layers_to_transform",
    "leave_out": "use layers_to_transform, which names the layers to adapt",
    "ln_after": "use train_layer_norm",
    "ln_before": "use train_layer_norm",
    "lora_alpha": "use scaling, which is the factor itself and not divided by r",
    "lora_dropout": "use dropout",
    "non_linearity": "use activation",
    "rank": "use r",
    "reduction_factor": "use r, which is the model's width divided by this factor",
}


def refuse_other_names(names: Iterable[str]) -> None:
    """Explain the options of other methods, for which Python's own error has no remedy."""
    for name in names:
        if name in _OTHER_NAMES:
            raise TypeError(f"HoulsbyConfig has no option {name!r}: {_OTHER_NAMES[name]}.")


def plain(value: Any) -> Any:
    """Return a value as JSON holds it: of NumPy's numbers and arrays, Python's; of sets, lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    if isinstance(value, (list, tuple, range)):
        return [plain(item) for item in value]
    return value


def count(value: Any) -> Any:
    """Return a whole number of another type, as a search or JSON may give it, as an int."""
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else value


def in_order(positions: Any, kind: str) -> Any:
    """Return positions in their order in a layer; by default, those of the kind's publication."""
    if positions is None:
        return ("attention", "feed_forward") if kind == "houlsby" else ("feed_forward",)
    if not isinstance(positions, (list, tuple)):
        positions = [positions]
    unknown = [name for name in positions if name not in POSITIONS]
    return (*(name for name in POSITIONS if name in positions), *unknown)
