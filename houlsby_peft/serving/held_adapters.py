"""`HeldAdapters`: adapters in memory, loaded on shared base models when needed and dropped for lack
of room.
"""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.saved import SAVED_FILES, SavedAdapter, adapter_of_run
from ..heads.tasks import task_kind_of_class
from ..layer import HoulsbyTunerLayer
from ..modules import base_modules
from .load import load_saved
from .predictor import Predictor
from .readers import Reader, attempt


# The files of an adapter: each one's name, identity, time of change and size.
Files = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class TaskSource:
    """Where the adapter of a task is, and how it is used.

    Args:
        source: Its folder, its name on the Hub, or the opened adapter.
        revision: A branch, tag or commit of its repository. Default: the latest version. A task
            keeps the commit that it was loaded from until `TaskBank.reload`.
        threshold: The least score of a class, from 0 to 1, for a task of text classification. With
            several labels, the result is the list of all labels that reach it. With one, `label` is
            None if the best class does not.
    """

    source: str | os.PathLike[str] | SavedAdapter
    revision: str | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        """Refuse a threshold that no score, or every score, would reach."""
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(
                f"A threshold must be between 0 and 1; got {self.threshold} for {self.source!r}."
            )


# What stands for the adapter of a task.
Source = str | os.PathLike[str] | SavedAdapter | TaskSource


class Entry:
    """A task with its adapter. A changed task gets a new entry, so that running requests keep
    theirs.

    Attributes:
        commit: The commit that was downloaded first, which is used for as long as the entry exists.
        files: The files that the adapter was loaded from; None before.
    """

    def __init__(self, task: str, source: Source) -> None:
        self.task = task
        self.source = source if isinstance(source, TaskSource) else TaskSource(source)
        self.commit: str | None = None
        self.files: Files | None = None

    def open(self, token: str | None) -> SavedAdapter:
        """Open the adapter, as `SavedAdapter.open` does."""
        source = self.source.source
        if isinstance(source, SavedAdapter):
            return source
        saved = SavedAdapter.open(source, self.commit or self.source.revision, token)
        self.commit = saved.commit
        return saved


@dataclass
class HeldAdapter:
    """An adapter in memory, with what it has in its model, from which it may be taken out and put
    in again.
    """

    reader: Reader
    parts: list[tuple[Any, Any]]

    @property
    def nbytes(self) -> int:
        """Memory that its weights take."""
        # The plain mappings hold owners of shared bottlenecks, whose weights have been counted.
        parts = [part for mapping, part in self.parts if isinstance(mapping, nn.Module)]
        weights = (part.parameters() if isinstance(part, nn.Module) else [part] for part in parts)
        return sum(weight.nbytes for weight in chain.from_iterable(weights))

    def put_in(self) -> None:
        """Put it into the model, if it is not there."""
        if self.parts and self.reader.name not in self.reader.model.peft_config:
            for mapping, part in self.parts:
                mapping[self.reader.name] = part

    def take_out(self) -> None:
        """Take it out of the model, if it is there."""
        if self.parts and self.reader.name in self.reader.model.peft_config:
            for mapping, _ in self.parts:
                del mapping[self.reader.name]


class HeldAdapters:
    """Adapters in memory, the least recently used one first. One thread at a time may use it.

    `TaskBank` describes the arguments. `nbytes` counts the adapters that may be dropped; `is_full`
    says whether the last call of `get` dropped some for lack of room.
    """

    def __init__(
        self,
        max_bytes: float,
        base_model: PreTrainedModel | str | None,
        *,
        token: str | None,
        **options: Any,
    ) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.token = token
        self.is_full = False
        self._base_model = base_model
        self._options = {"token": token, **options}
        self._held: OrderedDict[ref[Entry], HeldAdapter] = OrderedDict()
        self._loaded = 0
        # Bytes that were loaded and dropped since freed memory was last returned to the system.
        self._turnover = 0
        # The first adapter of each kind of head, by the class of transformers that loads the base
        # model.
        self._first: dict[str, Predictor] = {}
        self._tokenizers: MutableMapping[object, PreTrainedTokenizerBase] = WeakValueDictionary()

    def __iter__(self) -> Iterator[Entry]:
        self._drop_gone()
        return iter([entry for key in self._held if (entry := key()) is not None])

    def get(
        self, entries: Iterable[Entry], catch: tuple[type[Exception], ...] = ()
    ) -> dict[Entry, Reader | Exception]:
        """Return what reads the inputs of these entries, whose adapters are all in their models, or
        the error of one.

        Adapters that are requested together are never dropped for each other, even if that takes
        more memory.
        """
        self._drop_gone()
        wanted = {entry: ref(entry) for entry in entries}
        for key in wanted.values():
            if key in self._held:
                self._held.move_to_end(key)
        found: dict[Entry, Reader | Exception] = {}
        self.is_full = False
        for entry, key in wanted.items():
            if key not in self._held:
                adapter = attempt(catch, self._load, entry)
                if isinstance(adapter, Exception):
                    found[entry] = adapter
                    continue
                self._held[key] = adapter
                self._count(adapter.nbytes)
            for other in [other for other, held in self._held.items() if held.parts]:
                if self.nbytes > self.max_bytes and other not in wanted.values():
                    self._drop(other)
                    self.is_full = True
            found[entry] = self._held[key].reader
        for key in wanted.values():
            if key in self._held:
                self._held[key].put_in()
        return found

    def _drop_gone(self) -> None:
        for key in [key for key in self._held if key() is None]:
            self._drop(key)

    def _drop(self, key: ref[Entry]) -> None:
        adapter = self._held.pop(key)
        adapter.take_out()
        self._count(-adapter.nbytes)

    def _count(self, change: int) -> None:
        """Count loaded or dropped bytes; after a hundredth of all held ones, return freed memory to
        the system.

        Loading frees as much memory as an adapter takes, in pieces between the weights that stay.
        glibc keeps these pieces and seldom uses them again: with 300 adapters of BERT-base, they
        took half as much as the weights.
        """
        self.nbytes += change
        self._turnover += abs(change)
        if self._turnover > self.nbytes / 100:
            self._turnover = 0
            with suppress(
                AttributeError, OSError, TypeError
            ):  # other C libraries have no such function
                ctypes.CDLL(None).malloc_trim(0)

    def _load(self, entry: Entry) -> HeldAdapter:
        saved = entry.open(self.token)
        entry.files = list_files(saved.folder)
        task = saved.task
        first = self._first.get(task.auto_class)
        # While an adapter is loaded, no other is in the model: PEFT visits all modules several
        # times for each, so that the time would grow with the number of adapters held.
        for other in self._held.values():
            if first is not None and other.reader.model is first.model:
                other.take_out()
        given = self._base_model
        if (
            isinstance(given, PreTrainedModel)
            and (own := task_kind_of_class(type(given).__name__)) is not None
        ):
            given = given if own.auto_class == task.auto_class else None
        self._loaded += 1
        predictor = load_saved(
            saved, given, first, f"task_{self._loaded}", self._tokenizers, **self._options
        )
        name = predictor.name
        try:
            reader = predictor.reader(entry.task or saved.name)
            reader.request(reader.example, None, entry.source.threshold)
        except Exception:
            if first is None:
                predictor.model.unload()  # a base model that was given is as it was, for the next attempt
            else:
                predictor.model.delete_adapter(name)
            raise
        if first is not None:
            mappings = [predictor.model.peft_config]
            for module in predictor.model.modules():
                if isinstance(module, (HoulsbyTunerLayer, AuxiliaryTrainingWrapper)):
                    names = (*module.adapter_layer_names, *module.other_param_names)
                    mappings += [attrgetter(name)(module) for name in names]
            return HeldAdapter(
                reader, [(mapping, mapping[name]) for mapping in mappings if name in mapping]
            )
        for other_kind in self._first.values():
            _share_weights(predictor.base_model, other_kind.base_model)
        self._first[task.auto_class] = predictor
        # It is PEFT's active adapter, without which PEFT loads no other: it never leaves the model.
        return HeldAdapter(reader, [])


def list_files(folder: Path) -> Files:
    """Return the files of an adapter."""
    paths = [adapter_of_run(folder) / name for name in SAVED_FILES]
    stats = {str(path): path.stat() for path in paths if path.is_file()}
    return tuple(
        (path, stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in stats.items()
    )


def _share_weights(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Let a model use the weights of another one where they are equal, so that they are in memory
    once.
    """
    known = dict(base_modules(other.base_model))
    for name, module in base_modules(model.base_model):
        for key, weight in module._parameters.items():
            shared = known[name]._parameters.get(key) if name in known else None
            if (
                type(weight) is not nn.Parameter
                or type(shared) is not nn.Parameter
                or weight.is_meta
            ):
                continue
            alike = (weight.shape, weight.dtype, weight.device) == (
                shared.shape,
                shared.dtype,
                shared.device,
            )
            if alike and torch.equal(weight, shared):
                module._parameters[key] = shared
