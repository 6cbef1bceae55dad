"""One place of an adapter in a model: its names, and how an adapter's file records the places of all layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


# The ends of the model, where an invertible adapter has its module and the inverse.
_ENDS = ("embeddings", "output_embedding")
_FOLDED_INDICES = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


@dataclass(frozen=True)
class Place:
    """A module of the base model that becomes a tuner layer.

    Args:
        key: The module's name in the model.
        position: "attention", "feed_forward" or "cross_attention" for a bottleneck on the output of that sub-layer,
            "custom" for one that `target_modules` asks for, "norm" for a trained norm; "embeddings" for an invertible
            module, "output_embedding" for its inverse.
        stack: Name of the list of layers that contains the module; "" outside any list.
        layer: Index in that list; None outside any list.
        projection: Name of the module whose weights determine width, device and dtype.
        entry: Name of the module whose input is the residual input of the sub-layer. None: no bottleneck reads it.
        norm: Name of the norm of the sum of the sub-layer's output and its residual input, if a bottleneck may read it
            and the model has one.
    """

    key: str
    position: str
    stack: str
    layer: int | None
    projection: str
    entry: str | None = None
    norm: str | None = None

    @property
    def is_norm(self) -> bool:
        """Whether the module is a trained norm."""
        return self.position == "norm"

    @property
    def is_end(self) -> bool:
        """Whether the module is followed by an invertible one, or preceded by the inverse."""
        return self.position in _ENDS

    @property
    def is_bottleneck(self) -> bool:
        """Whether the module gets a bottleneck."""
        return not self.is_norm and not self.is_end

    @property
    def modules(self) -> list[str]:
        """The names of all modules that the place consists of."""
        names = (self.key, self.projection, self.entry, self.norm)
        return [name for name in names if name is not None]

    def relative(self, name: str) -> str:
        """Return the name of a module of this layer without the layer's name; outside any list, the name itself."""
        if self.layer is None:
            return name
        if not self.stack.endswith("*"):
            return name.removeprefix(f"{self.stack}.{self.layer}.".lstrip("."))
        part, _, rest = name.removeprefix(self.stack[:-1]).partition(f".{self.layer}")
        return part + rest


def full_name(stack: str, layer: int | None, module: str) -> str:
    """Return the full name of a module of a layer; see `Place.relative`."""
    if layer is None:
        return module
    if not stack.endswith("*"):
        return f"{stack}.{layer}.{module}".lstrip(".")
    part, dot, rest = module.partition(".")
    return f"{stack[:-1]}{part}.{layer}{dot}{rest}"


def fold_places(places: Iterable[Place]) -> list[dict[str, str]]:
    """Return places as an adapter's file records them: a row per kind of place, with the indices of its layers.

    {"position": "attention", "stack": "bert.encoder.layer", "layers": "0-11",
     "module": "attention.output.dropout", "projection": "attention.output.dense"}

    Where a bottleneck may read the residual input, the row has "entry" as well and, in a post-LN model, "norm". The
    output embedding is left out, because it depends on the head of the model that the adapter is loaded on.
    """
    layers: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[int]] = {}
    for place in places:
        if place.position == "output_embedding":
            continue
        names = {"module": place.key, "projection": place.projection, "entry": place.entry, "norm": place.norm}
        relative = tuple((part, place.relative(name)) for part, name in names.items() if name is not None)
        indices = layers.setdefault((place.position, place.stack, relative), [])
        if place.layer is not None:
            indices.append(place.layer)
    return [
        {"position": position, "stack": stack, "layers": fold_indices(indices), **dict(names)}
        for (position, stack, names), indices in layers.items()
    ]


def unfold_places(rows: Iterable[Mapping[str, str]]) -> list[Place]:
    """Return the places that `fold_places` has folded.

    Raises:
        ValueError: A row lacks a part, or its layers are not indices such as "0-3,5".
    """
    places = []
    for row in rows:
        try:
            position, stack, layers, module, projection = (
                row[name] for name in ("position", "stack", "layers", "module", "projection")
            )
        except KeyError as missing:
            raise ValueError(
                f"A recorded place must have position, stack, layers, module and projection; {dict(row)} lacks "
                f"{missing}. Save the adapter again."
            ) from None
        if layers and not _FOLDED_INDICES.fullmatch(layers):
            raise ValueError(
                f"Recorded layers must be indices such as 0-3,5; got {layers[:100]!r}. Save the adapter again."
            )
        indices: list[int | None] = [None]
        if layers:
            runs = [[int(end) for end in run.split("-")] for run in layers.split(",")]
            indices = [index for run in runs for index in range(run[0], run[-1] + 1)]
        for index in indices:
            key, width = (full_name(stack, index, name) for name in (module, projection))
            read = {name: full_name(stack, index, row[name]) for name in ("entry", "norm") if name in row}
            places.append(Place(key, position, stack, index, width, **read))
    return places


def fold_indices(indices: Iterable[int]) -> str:
    """Return ascending indices with consecutive ones folded: `0-3,5`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], index]
        else:
            runs.append([index])
    return ",".join("-".join(map(str, run)) for run in runs)
