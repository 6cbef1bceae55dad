"""`View`: one look at a base model, made once per adapter and handed on."""

from __future__ import annotations

from collections.abc import Container
from functools import cached_property

from torch import nn
from transformers import PreTrainedModel

from ..heads.find import find_head
from ..layer import base_module, base_modules, is_inside
from .inference import find_attentions


class View:
    """What placement, heads and the fingerprint read from a base model.

    A view does not follow later changes of the model.

    Args:
        model: The base model. A module that already is a tuner layer counts as the module that it wraps.

    Attributes:
        modules: Its modules by name, in the model's order.
        types: The `model_type` of each model of transformers inside it, by name; the model itself is "".
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = dict(base_modules(model))
        self.types: dict[str, str] = {
            key: str(inner.config.model_type)
            for key, inner in {"": model, **self.modules}.items()
            if isinstance(inner, PreTrainedModel)
        }

    @classmethod
    def of(cls, model: nn.Module | View) -> View:
        """Return a view of a model; a view itself is returned as it is."""
        return model if isinstance(model, View) else cls(model)

    @cached_property
    def encoder(self) -> str:
        """The name of the encoder in a task model, such as "bert"; "" if the model has none or is one itself."""
        prefix = getattr(self.model, "base_model_prefix", "")
        return prefix if prefix in self.modules else ""

    @cached_property
    def attentions(self) -> dict[str, str]:
        """The attentions in lists of layers, each with the name of its list; see `find_attentions`."""
        return find_attentions(self.modules)

    @cached_property
    def head(self) -> list[str]:
        """The names of the task head's modules; see `find_head`."""
        return find_head(self.model, self.attentions)

    @cached_property
    def output_embedding(self) -> str | None:
        """The name of the output embedding of a language model; None if there is none."""
        module = self.model.get_output_embeddings() if isinstance(self.model, PreTrainedModel) else None
        found = (key for key in self.modules if module is not None and self.modules[key] is base_module(module))
        return next(found, None)

    def type_around(self, key: str, known: Container[str]) -> str | None:
        """Return the type of the innermost model around a module, among the known types; None if there is none."""
        around = [
            outer for outer, kind in self.types.items() if kind in known and (not outer or is_inside(key, outer))
        ]
        return self.types[max(around, key=len)] if around else None
