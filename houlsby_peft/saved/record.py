"""What an adapter's file says beyond the options of its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

import torch
from huggingface_hub.dataclasses import type_validator


# Where an invertible adapter has its coupling and the inverse of it.
_COUPLING_POSITIONS = ("embeddings", "output_embedding")
# The parts of a place that name a module, as they are called in a file.
_MODULE_PARTS = {"module": "key", "projection": "projection", "entry": "entry", "norm": "norm"}
# No model has more places, or larger bottlenecks.
_MOST = 100_000
_MOST_LAYERS = 1_000
# What the names of adapters beneath ladders begin with.
BENEATH = "beneath_"
# The fields of a record that are not in its part of the file.
_NOT_SAVED = {"task_type", "has_labels_of_base", "is_problem_type_inferred"}


@dataclass(frozen=True)
class Place:
    """A module of the base model that becomes a tuner layer.

    Args:
        key: The module's name in the model.
        position: "attention", "feed_forward" or "cross_attention" for a bottleneck at the end of
            this sub-layer, "custom" for one that `target_modules` names, "norm" for a trained norm,
            "embeddings" for an invertible module, "output_embedding" for its inverse.
        stack: Name of the list of layers that contains the module; "" outside any list.
        layer: Index in this list; None outside any list.
        projection: Name of the module whose weights determine width, device and dtype.
        entry: Name of the module that the residual input of the sub-layer enters. None: no
            bottleneck reads it.
        norm: Name of the norm after the skip connection, if a bottleneck may read its output.
        r: Size of the bottleneck, if it differs from the configuration's.
        reads: Indices of the layers whose input a ladder reads: `0-11`. None: it has no ladder.
    """

    key: str
    position: str
    stack: str
    layer: int | None
    projection: str
    entry: str | None = None
    norm: str | None = None
    r: int | None = None
    reads: str | None = None

    @property
    def is_norm(self) -> bool:
        """Whether the module is a trained norm."""
        return self.position == "norm"

    @property
    def is_coupling(self) -> bool:
        """Whether the module has an invertible module or its inverse."""
        return self.position in _COUPLING_POSITIONS

    @property
    def is_bottleneck(self) -> bool:
        """Whether the module gets a bottleneck."""
        return not self.is_norm and not self.is_coupling

    @property
    def is_ladder(self) -> bool:
        """Whether a ladder, which counts as a bottleneck, ends here."""
        return self.reads is not None

    @property
    def rungs(self) -> dict[int, str]:
        """The modules whose input a ladder reads, by the indices of their layers."""
        entry = self.relative(self.entry or "")
        indices = _unfold_indices(self.reads or "")
        return {
            index: full_name(self.stack, index, entry) for index in indices if index is not None
        }

    @property
    def modules(self) -> list[str]:
        """The names of all modules that belong to the place."""
        names = (self.key, self.projection, self.entry, self.norm, *self.rungs.values())
        return [name for name in names if name is not None]

    def relative(self, name: str) -> str:
        """Return a module's name inside the place's layer; outside any list, its full name."""
        if self.layer is None:
            return name
        return name.removeprefix(f"{full_name(self.stack, self.layer)}.")


def full_name(stack: str, layer: int | None, module: str = "") -> str:
    """Return the full name of a layer, or of a module in it; see `Place.relative`."""
    return module if layer is None else f"{stack}.{layer}.{module}".strip(".")


def fold_places(places: Iterable[Place], encoder: str = "") -> list[dict[str, str]]:
    """Return places as an adapter's file records them: one dict per kind of place.

    {"position": "attention", "stack": "encoder.layer", "layers": "0-11",
     "module": "attention.output.dropout", "projection": "attention.output.dense"}

    Names begin inside the encoder of a task model, so that an adapter fits its other classes. Names
    outside the encoder begin with a dot. "entry", "norm" and "r" are there if the place has them.
    The output embedding is left out, because it depends on the head of the model.

    Args:
        places: Places by their names in the model.
        encoder: Name of the encoder in the model; "" if the model is the encoder.
    """
    layers: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for place in places:
        if place.position == "output_embedding":
            continue
        is_in_list = place.layer is not None
        stack = _leave_encoder(place.stack, encoder) if is_in_list else place.stack
        kind = {"position": place.position, "stack": stack}
        for part, attribute in _MODULE_PARTS.items():
            name = getattr(place, attribute)
            if name is not None:
                kind[part] = place.relative(name) if is_in_list else _leave_encoder(name, encoder)
        if place.r is not None:
            kind["r"] = str(place.r)
        if place.reads is not None:
            kind["reads"] = place.reads
        indices = layers.setdefault(tuple(kind.items()), [])
        if place.layer is not None:
            indices.append(place.layer)
    return [dict(kind) | {"layers": fold_indices(indices)} for kind, indices in layers.items()]


def unfold_places(folded: Iterable[Mapping[str, str]], encoder: str = "") -> Iterator[Place]:
    """Yield the places that `fold_places` has folded, by their names in a model."""
    for kind in folded:
        r = int(kind["r"]) if "r" in kind else None
        for layer in _unfold_indices(kind["layers"]):
            stack = kind["stack"] if layer is None else _enter_encoder(kind["stack"], encoder)
            names = {}
            for part, attribute in _MODULE_PARTS.items():
                if part in kind and layer is None:
                    names[attribute] = _enter_encoder(kind[part], encoder)
                elif part in kind:
                    names[attribute] = full_name(stack, layer, kind[part])
            yield Place(
                position=kind["position"],
                stack=stack,
                layer=layer,
                r=r,
                reads=kind.get("reads"),
                **names,
            )


def _leave_encoder(name: str, encoder: str) -> str:
    """Return a full name as it is inside the encoder; with a dot in front if it is outside."""
    if not encoder:
        return name
    return name.removeprefix(f"{encoder}.") if name.startswith(f"{encoder}.") else f".{name}"


def _enter_encoder(name: str, encoder: str) -> str:
    """Undo `_leave_encoder`."""
    return name[1:] if name.startswith(".") else f"{encoder}.{name}".strip(".")


def fold_indices(indices: Iterable[int]) -> str:
    """Return ascending indices with consecutive ones folded: `0-3,5`."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and index == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], index]
        else:
            ranges.append([index])
    return ",".join("-".join(map(str, bounds)) for bounds in ranges)


def _unfold_indices(text: str) -> Iterator[int | None]:
    """Yield the indices that `fold_indices` has folded; None once if there are none."""
    if not text:
        yield None
        return
    for bounds in text.split(","):
        first, _, last = bounds.partition("-")
        yield from range(int(first), int(last or first) + 1)


@dataclass(frozen=True)
class AdapterRecord:
    """Facts that are recorded when an adapter is added to a model, and saved with it.

    Args:
        places: Where the adapter's bottlenecks and norms are in the model; see `fold_places`.
        heads: Names of the modules that are trained and saved as a whole: the task head and others.
        base: Fingerprint that identifies the base model.
        id2label: Names of the classes by number.
        problem_type: Kind of the head's task, as in transformers' configurations.
        two_layer_head: Whether the head has a hidden layer (see `TwoLayerHead`).
        max_length: Number of tokens to which texts were cut in training.
        null_threshold: For question answering: by how much the score of no answer must exceed the
            best answer's for no answer to be given. None: there always is an answer.
        thresholds: For several labels per text: the least probability for each class.
        text_columns: For text classification: the names of the columns of texts, two for pairs.
        beneath: For a ladder on another adapter: "sha256" of this one, and the "commit" that it was
            downloaded from.
        task_type: PEFT's name for the head's task. The file has it in PEFT's own field.
        has_labels_of_base: Whether the labels are the base model's, which may be renamed until the
            adapter is saved. Not saved.
        is_problem_type_inferred: Whether the labels of a batch have told the problem type. Not
            saved.
    """

    places: list[dict[str, str]] | None = None
    heads: list[str] = field(default_factory=list)
    base: dict[str, Any] | None = None
    id2label: dict[int, str] | None = None
    problem_type: str | None = None
    two_layer_head: bool = False
    max_length: int | None = None
    null_threshold: float | int | None = None
    thresholds: list[float | int] | None = None
    text_columns: list[str] | None = None
    beneath: dict[str, str] | None = None
    task_type: str | None = None
    has_labels_of_base: bool = False
    is_problem_type_inferred: bool = False

    @property
    def beneath_name(self) -> str:
        """The name in a model of the adapter beneath a ladder: the same for the same adapter."""
        return f"{BENEATH}{(self.beneath or {}).get('sha256', '')[:12]}"

    @property
    def ladder(self) -> Place | None:
        """The place of the adapter's ladder, by names inside the encoder; None if it is none."""
        for place in unfold_places(self.places or ()):
            if place.is_ladder:
                return place
        return None

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> AdapterRecord:
        """Read a record that anybody may have written; it must have the form of `to_dict`."""
        type_validator("HoulsbyConfig.recorded", facts, dict)
        values: dict[str, Any] = {}
        for name, type_of_fact in get_type_hints(cls).items():
            value = facts.get(name)
            if value is None or name in _NOT_SAVED:
                continue
            if name == "id2label" and isinstance(value, dict):
                value = numbered(value)
            type_validator(f"HoulsbyConfig.recorded: {name}", value, type_of_fact)
            values[name] = value
        _check_places(values.get("places", []))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the part of the file: every fact that is known."""
        facts = {}
        for name, value in asdict(self).items():
            if name not in _NOT_SAVED and value is not None and value is not False:
                facts[name] = value
        return facts


@dataclass(frozen=True)
class SavedState:
    """What is known of a saved adapter beside the options of its configuration.

    Args:
        record: What the adapter's file records.
        settings: The options that shape the adapter's weights, as the file has them. None: the
            adapter was made by these options, not loaded.
        shapes: The shapes of the tensors in the file, by name. None: unknown.
    """

    record: AdapterRecord
    settings: Mapping[str, Any] | None = None
    shapes: Mapping[str, torch.Size] | None = None


def _check_places(folded: Iterable[Mapping[str, str]]) -> None:
    """Refuse places that would fill the memory or that cannot be unfolded."""
    try:
        for number, place in enumerate(unfold_places(folded)):
            if number == _MOST or not 0 < (place.r or 1) < _MOST:
                raise ValueError(f"more places than {_MOST:,}, or a larger r")
            if place.reads is None:
                continue
            for count, layer in enumerate(_unfold_indices(place.reads)):
                if count == _MOST_LAYERS or layer is None:
                    raise ValueError(f"a ladder that reads no layer, or more than {_MOST_LAYERS:,}")
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"HoulsbyConfig.recorded: places must be as this library has saved them; got {reason}."
        ) from error


def numbered(labels: Mapping[Any, str]) -> dict[Any, str]:
    """Undo JSON: return labels with integer keys, sorted. Other keys than numbers stay."""
    by_number: dict[Any, str] = {}
    for key, name in labels.items():
        by_number[int(key) if str(key).isdecimal() else key] = name
    if all(isinstance(key, int) for key in by_number):
        return dict(sorted(by_number.items()))
    return by_number
