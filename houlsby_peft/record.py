"""`AdapterRecord`: what an adapter's file says beyond its user's settings, such as the `Place` of
each module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, get_type_hints

from huggingface_hub.dataclasses import type_validator


# The ends of the model, where an invertible adapter has its module and the inverse.
_COUPLING_POSITIONS = ("embeddings", "output_embedding")
# More places, and a larger bottleneck, than any model has.
_MOST = 100_000
# The fields of a record that its file does not have.
_NOT_SAVED = {"task_type", "has_labels_of_base", "is_problem_type_inferred"}


@dataclass(frozen=True)
class Place:
    """A module of the base model that becomes a tuner layer.

    Args:
        key: The module's name in the model.
        position: "attention", "feed_forward" or "cross_attention" for a bottleneck on the output of
            that sub-layer, "custom" for one that `target_modules` asks for, "norm" for a trained
            norm; "embeddings" for an invertible module, "output_embedding" for its inverse.
        stack: Name of the list of layers that contains the module; "" outside any list.
        layer: Index in that list; None outside any list.
        projection: Name of the module whose weights determine width, device and dtype.
        entry: Name of the module whose input is the residual input of the sub-layer. None: no bottleneck reads it.
        norm: Name of the norm of the sum of the sub-layer's output and its residual input, if a
            bottleneck may read it and the model has one.
        r: The size of the bottleneck, if it is not that of the configuration.
    """

    key: str
    position: str
    stack: str
    layer: int | None
    projection: str
    entry: str | None = None
    norm: str | None = None
    r: int | None = None

    @property
    def is_norm(self) -> bool:
        """Whether the module is a trained norm."""
        return self.position == "norm"

    @property
    def is_coupling(self) -> bool:
        """Whether the module is followed by an invertible one, or preceded by the inverse."""
        return self.position in _COUPLING_POSITIONS

    @property
    def is_bottleneck(self) -> bool:
        """Whether the module gets a bottleneck."""
        return not self.is_norm and not self.is_coupling

    @property
    def modules(self) -> list[str]:
        """The names of all modules that the place consists of."""
        names = (self.key, self.projection, self.entry, self.norm)
        return [name for name in names if name is not None]

    def relative(self, name: str) -> str:
        """Return the name of a module of this layer without the layer's name; outside any list, the
        name itself.
        """
        return (
            name
            if self.layer is None
            else name.removeprefix(f"{full_name(self.stack, self.layer)}.")
        )


def full_name(stack: str, layer: int | None, module: str = "") -> str:
    """Return the full name of a layer or of a module of it; see `Place.relative`."""
    return module if layer is None else f"{stack}.{layer}.{module}".strip(".")


def fold_places(places: Iterable[Place], encoder: str = "") -> list[dict[str, str]]:
    """Return places as an adapter's file records them: a row per kind of place, with the indices of
    its layers.

    {"position": "attention", "stack": "encoder.layer", "layers": "0-11",
     "module": "attention.output.dropout", "projection": "attention.output.dense"}

    Names begin inside the encoder of a task model, so that an adapter fits its other classes. Those
    outside of it begin with a dot. Where a bottleneck may read the residual input, the row has
    "entry" as well and, in a post-LN model, "norm"; where its size is not that of the
    configuration, "r". The output embedding is left out, because it depends on the head of the
    model that the adapter is loaded on. A model without an encoder in it has "" for one.
    """

    def inside(name: str) -> str:
        return (
            name.removeprefix(f"{encoder}.")
            if not encoder or name.startswith(f"{encoder}.")
            else f".{name}"
        )

    layers: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[int]] = {}
    for place in places:
        if place.position == "output_embedding":
            continue
        names = {
            "module": place.key,
            "projection": place.projection,
            "entry": place.entry,
            "norm": place.norm,
        }
        known = {part: place.relative(name) for part, name in names.items() if name is not None}
        if place.layer is None:
            known = {part: inside(name) for part, name in known.items()}
        if place.r is not None:
            known["r"] = str(place.r)
        stack = place.stack if place.layer is None else inside(place.stack)
        indices = layers.setdefault((place.position, stack, tuple(known.items())), [])
        if place.layer is not None:
            indices.append(place.layer)
    return [
        {"position": position, "stack": stack, "layers": fold_indices(indices), **dict(known)}
        for (position, stack, known), indices in layers.items()
    ]


def unfold_places(rows: Iterable[Mapping[str, str]], encoder: str = "") -> Iterator[Place]:
    """Yield the places that `fold_places` has folded, by their names in a model."""

    def full(name: str) -> str:
        return name[1:] if name.startswith(".") else f"{encoder}.{name}".strip(".")

    for row in rows:
        r = int(row["r"]) if "r" in row else None
        runs = [run.partition("-") for run in row["layers"].split(",") if run]
        ranges = [range(int(first), int(last or first) + 1) for first, _, last in runs]
        for index in chain(*ranges) if ranges else [None]:
            stack = row["stack"] if index is None else full(row["stack"])
            names: dict[str, Any] = {
                part: full(row[part]) if index is None else full_name(stack, index, row[part])
                for part in ("module", "projection", "entry", "norm")
                if part in row
            }
            key, projection = names.pop("module"), names.pop("projection")
            yield Place(key, row["position"], stack, index, projection, **names, r=r)


def fold_indices(indices: Iterable[int]) -> str:
    """Return ascending indices with consecutive ones folded: `0-3,5`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], index]
        else:
            runs.append([index])
    return ",".join("-".join(map(str, run)) for run in runs)


@dataclass
class AdapterRecord:
    """Facts that are recorded when an adapter is added to a model, and saved with it.

    Args:
        places: Where the adapter's bottlenecks and norms are in the model, as `fold_places` gives
            them.
        heads: Names of the modules that train and are saved as a whole: the task head and others.
        base: Fingerprint that identifies the base model.
        id2label: Names of the classes by number, unless the user has given them with the configuration.
        problem_type: Kind of task of the head, as in transformers' configurations.
        two_layer_head: Whether the head has a hidden layer (see `TwoLayerHead`).
        max_length: The number of tokens to which texts were cut in training.
        null_threshold: For question answering: no answer is given if that scores higher than the
            best answer by more than this. None: there is always an answer.
        thresholds: For several labels per text: the least probability with which each class is
            given.
        text_columns: For text classification: the names of the columns that held the texts, two for
            pairs.
        task_type: PEFT's name for the task of the head. Saved in PEFT's own field, not in the
            record.
        has_labels_of_base: Whether the labels are the base model's, which may still be renamed. Not
            saved.
        is_problem_type_inferred: Whether a loss has inferred the problem type from its labels, as
            the next loss does again. Not saved.
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
    task_type: str | None = None
    has_labels_of_base: bool = False
    is_problem_type_inferred: bool = False

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> AdapterRecord:
        """Read a record from JSON, which may be a stranger's; it must be of the form that `to_dict`
        gives.
        """
        type_validator("HoulsbyConfig.recorded", facts, dict)
        types = get_type_hints(cls)
        known = {
            name: facts[name] for name in types.keys() - _NOT_SAVED if facts.get(name) is not None
        }
        if "id2label" in known:
            known["id2label"] = numbered(known["id2label"])
        for name, value in known.items():
            type_validator(f"HoulsbyConfig.recorded: {name}", value, types[name])
        for number, place in enumerate(unfold_places(known.get("places", ()))):
            if number == _MOST or not 0 < (place.r or 1) < _MOST:
                raise ValueError(
                    f"HoulsbyConfig.recorded: places must be fewer than {_MOST:,}, and r smaller."
                )
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """Return what is saved: every fact that is known."""
        facts = {name: value for name, value in asdict(self).items() if name not in _NOT_SAVED}
        return {
            name: value for name, value in facts.items() if value is not None and value is not False
        }


def numbered(labels: Mapping[Any, str]) -> dict[Any, str]:
    """Return labels with whole numbers as keys, which JSON turns into text, in their order, which
    saving changes.
    """
    known = {int(key) if str(key).isdecimal() else key: name for key, name in labels.items()}
    return dict(sorted(known.items())) if all(isinstance(key, int) for key in known) else known
