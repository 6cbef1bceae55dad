"""`AdapterRecord`: what an adapter's file says beyond the settings that its user chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .fingerprint import is_fingerprint


@dataclass
class Source:
    """The file that a configuration was read from, and the settings that were in it.

    A copy of a configuration was not read from a file, so a copy of this object is None.

    Args:
        settings: The settings.
        find_weights: Returns the file of the adapter's weights, which may have to be downloaded with the token.
        is_being_loaded: Whether PEFT has prepared the configuration to load the adapter.
        token: The user's access token for the Hub, as `huggingface_hub` takes it. It is neither shown nor pickled.
    """

    settings: dict[str, Any]
    find_weights: Callable[[bool | str | None], Path | None] | None = None
    is_being_loaded: bool = False
    token: bool | str | None = field(default=None, repr=False)

    @cached_property
    def weights(self) -> Path | None:
        """The file of the adapter's weights, once it is at hand; None if it is unknown."""
        return self.find_weights(self.token) if self.find_weights else None

    def __getstate__(self) -> dict[str, Any]:
        # A pickled model may be given away, the user's access to the Hub may not.
        return {**vars(self), "token": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


@dataclass
class AdapterRecord:
    """Facts that are recorded when an adapter is added to a model, and saved with it.

    Args:
        places: Where the adapter's bottlenecks and norms are in the model, as `placement.fold_places` gives them.
            None: not recorded, as in files of earlier versions.
        heads: Names of the modules that train and are saved as a whole: the task head and others.
        base: Fingerprint that identifies the base model.
        id2label: Names of the classes by number.
        problem_type: Kind of task of the head, as in transformers' configurations.
        two_layer_head: Whether the head has a hidden layer (see `TwoLayerHead`).
        max_length: The number of tokens to which texts were cut in training.
        null_threshold: For question answering: no answer is given if that scores higher than the best answer by more
            than this. None: there is always an answer.
        text_columns: For text classification: the names of the columns that held the texts, two for pairs.
        task_type: PEFT's name for the task of the head. Saved in PEFT's own field, not in the record.
        has_labels_of_base: Whether the labels are the base model's, which may still be renamed. Not saved.
        source: The file that this record was read from. None: it was made in this process. Not saved.
    """

    places: list[dict[str, str]] | None = None
    heads: list[str] = field(default_factory=list)
    base: dict[str, Any] | None = None
    id2label: dict[int, str] | None = None
    problem_type: str | None = None
    two_layer_head: bool = False
    max_length: int | None = None
    null_threshold: float | None = None
    text_columns: list[str] | None = None
    task_type: str | None = None
    has_labels_of_base: bool = False
    source: Source | None = None

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> AdapterRecord:
        """Read a record from JSON.

        Raises:
            ValueError: A value has a type that no version of this package writes.
        """
        checks = {
            "places": lambda value: isinstance(value, list) and all(map(_is_row_of_text, value)),
            "heads": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
            "base": is_fingerprint,
            "id2label": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
            "problem_type": _is_text,
            "two_layer_head": lambda value: isinstance(value, bool),
            "max_length": lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
            "null_threshold": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
            "text_columns": lambda value: (
                isinstance(value, list) and len(value) in (1, 2) and all(map(_is_text, value))
            ),
        }
        known = {name: fields[name] for name in checks if fields.get(name) is not None}
        for name, value in known.items():
            if not checks[name](value):
                raise ValueError(
                    f"The recorded {name} of an adapter must be as this package writes it; got {str(value)[:100]!r}. "
                    "Save the adapter again."
                )
        if "id2label" in known:
            known["id2label"] = numbered(known["id2label"])
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """Return what is saved: every fact that is known."""
        facts = asdict(self)
        del facts["source"], facts["task_type"], facts["has_labels_of_base"]
        return {name: value for name, value in facts.items() if value is not None and value is not False}


def numbered(labels: Mapping[Any, str]) -> dict[Any, str]:
    """Return labels with whole numbers as keys, which JSON turns into text, in their order, which saving changes."""
    known = {int(key) if str(key).isdecimal() else key: name for key, name in labels.items()}
    return dict(sorted(known.items())) if all(isinstance(key, int) for key in known) else known


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_row_of_text(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in (*value, *value.values()))
