"""Adapters held in memory on one base model: loaded when they are needed, dropped when they take too much memory."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

from peft import PeftModel
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..config import HoulsbyConfig
from ..tuner_layer import HoulsbyTunerLayer
from .predictor import Predictor


@dataclass
class HeldAdapter:
    """An adapter in memory, which may be taken out of its model and put in again.

    Args:
        name: its name in the model.
        config: its configuration.
        tokenizer: what turns its texts into tokens.
        parts: what it has in the model, each with the mapping by adapter name in which it belongs.
    """

    name: str
    config: HoulsbyConfig
    tokenizer: PreTrainedTokenizerBase
    parts: list[tuple[Any, Any]]
    is_in_model: bool = True

    @property
    def nbytes(self) -> int:
        """Memory that its weights take."""
        # The owners of shared bottlenecks, in plain mappings, have been counted as such.
        parts = [part for mapping, part in self.parts if isinstance(mapping, nn.Module)]
        weights = (part.parameters() if isinstance(part, nn.Module) else [part] for part in parts)
        return sum(weight.nbytes for weight in chain.from_iterable(weights))

    def put_in(self) -> None:
        """Put it into the model, if it is not there."""
        if not self.is_in_model:
            for mapping, part in self.parts:
                mapping[self.name] = part
            self.is_in_model = True

    def take_out(self) -> None:
        """Take it out of the model, if it is there."""
        if self.is_in_model:
            for mapping, _ in self.parts:
                del mapping[self.name]
            self.is_in_model = False


class HeldAdapters:
    """The adapters of a model by task, of which the least recently used ones make room for others.

    While an adapter is loaded, no other is in the model: PEFT walks over all modules several times for each, which
    would make the time to load an adapter grow with the number of those held.

    Args:
        load: loads the adapter of a task under a name, beside another one if one has been loaded before.
        max_bytes: how much memory the adapters' weights may take together.
    """

    def __init__(self, load: Callable[[str, str, Predictor | None], Predictor], max_bytes: int) -> None:
        self._load = load
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, HeldAdapter] = OrderedDict()
        self._nbytes = 0
        self._loaded = 0
        self._first: Predictor | None = None
        self._tokenizers: dict[object, PreTrainedTokenizerBase] = {}

    @property
    def model(self) -> PeftModel:
        """The model that the adapters are on; only once there is one."""
        assert self._first is not None
        return self._first.model

    def __iter__(self) -> Iterator[str]:
        """The tasks whose adapters are in memory, the least recently used one first."""
        return iter(tuple(self._held))

    def get(self, tasks: Iterable[str]) -> dict[str, HeldAdapter]:
        """The adapters of these tasks, all of them in the model.

        The tasks that are asked for together are never dropped for each other, even if that takes more memory.
        """
        wanted = dict.fromkeys(tasks)
        for task in wanted:
            if task in self._held:
                self._held.move_to_end(task)
        for task in wanted:
            if task not in self._held:
                self._held[task] = adapter = self._new(task)
                self._nbytes += adapter.nbytes
            self._drop(wanted)
        for task in wanted:
            self._held[task].put_in()
        return {task: self._held[task] for task in wanted}

    def _new(self, task: str) -> HeldAdapter:
        for other in self._held.values():
            other.take_out()
        self._loaded += 1
        predictor = self._load(task, f"task_{self._loaded}", self._first)
        parts = [(found, found[predictor.name]) for found in _mappings(predictor.model) if predictor.name in found]
        if self._first is None:
            # It is PEFT's active adapter, without which PEFT loads no other: it never leaves the model.
            self._first, parts = predictor, []
        return HeldAdapter(predictor.name, predictor.config, self._shared(predictor.tokenizer), parts)

    def _drop(self, wanted: Iterable[str]) -> None:
        for task, adapter in tuple(self._held.items()):
            if self._nbytes <= self._max_bytes:
                return
            # To drop the first one, which never leaves the model, would free nothing.
            if task not in wanted and adapter.parts:
                del self._held[task]
                self._nbytes -= adapter.nbytes
                adapter.take_out()

    def _shared(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """The first tokenizer that is equal to this one: most adapters bring the base model's, of many megabytes."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return tokenizer
        key = (hashlib.sha256(backend.to_str().encode()).digest(), tokenizer.model_max_length, tokenizer.padding_side)
        return self._tokenizers.setdefault(key, tokenizer)


def _mappings(model: PeftModel) -> Iterator[Any]:
    """All that a model keeps by adapter name."""
    yield model.peft_config
    for module in model.modules():
        if isinstance(module, (HoulsbyTunerLayer, AuxiliaryTrainingWrapper)):
            yield from (attrgetter(name)(module) for name in (*module.adapter_layer_names, *module.other_param_names))
