"""`HeldAdapters`: adapters in memory, loaded on shared base models when needed and dropped for lack of room."""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from peft import PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..batching import fix_weights, forget_batches
from ..checkpoints.untrusted import TOKENIZER_FILES, read_config
from ..errors import AdapterError
from ..heads.tasks import task_of_class, task_of_config
from ..layer import HoulsbyTunerLayer, base_modules
from .load import find_folder, load_beside
from .predictor import Predictor
from .readers import READERS, Reader


_FILES = (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, *TOKENIZER_FILES)
# The files of an adapter: each one's name, identity, time of change and size.
Files = tuple[tuple[str, int, int, int], ...]


@dataclass(eq=False)
class Entry:
    """A task and where its adapter is. A changed task gets a new entry, so that running requests keep theirs.

    Args:
        task: The task.
        source: The folder of its adapter, or its name on the Hub.
        revision: A branch, tag or commit of the repository. Default: the latest version.
        threshold: The least score that a class needs (see `TaskBank`).
        commit: The commit that was downloaded first, which is used for as long as the entry exists.
    """

    task: str
    source: str | os.PathLike[str]
    revision: str | None = None
    threshold: float | None = None
    commit: str | None = field(default=None, compare=False)

    def find(self, token: str | None) -> Path:
        """Return the adapter's folder; the files of one on the Hub are downloaded to the cache.

        Raises:
            AdapterError: There is no such folder, or no safetensors file in the repository.
            HubError: The repository does not exist, is private or cannot be reached.
        """
        folder = find_folder(self.source, self.commit or self.revision, token)
        if folder.parent.name == "snapshots":
            self.commit = folder.name
        return folder


@dataclass
class HeldAdapter:
    """An adapter in memory, which may be taken out of its model and put in again.

    Args:
        reader: What reads its inputs and computes its results.
        model: The model that it belongs to.
        files: The files that it was loaded from.
        parts: What it has in the model, each with the mapping by adapter name that holds it.
    """

    reader: Reader
    model: PeftModel
    files: Files
    parts: list[tuple[Any, Any]]
    is_in_model: bool = True

    @property
    def nbytes(self) -> int:
        """Memory that its weights take."""
        # The plain mappings hold owners of shared bottlenecks, whose weights have been counted.
        parts = [part for mapping, part in self.parts if isinstance(mapping, nn.Module)]
        weights = (part.parameters() if isinstance(part, nn.Module) else [part] for part in parts)
        return sum(weight.nbytes for weight in chain.from_iterable(weights))

    def put_in(self) -> None:
        """Put it into the model, if it is not there."""
        if not self.is_in_model:
            for mapping, part in self.parts:
                mapping[self.reader.name] = part
            self.is_in_model = True

    def take_out(self) -> None:
        """Take it out of the model, if it is there."""
        if self.is_in_model:
            for mapping, _ in self.parts:
                del mapping[self.reader.name]
            self.is_in_model = False


class HeldAdapters:
    """Adapters in memory, the least recently used one first. One thread at a time may use it.

    There is one model per kind of head, because the classes of transformers have one head each. Their base models
    share the weights that are equal.

    Args:
        max_bytes: Memory that the adapters' weights may take, in bytes.
        base_model: The base model, or its name or folder, in place of the one that the first adapter names.
        token, device, dtype: As for `load`.
    """

    def __init__(
        self,
        max_bytes: float,
        base_model: PreTrainedModel | str | None,
        token: str | None,
        device: str | torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.token = token
        self._base_model = base_model
        self._options: dict[str, Any] = {"token": token, "device": device, "dtype": dtype}
        self._held: OrderedDict[Entry, HeldAdapter] = OrderedDict()
        self._loaded = 0
        # Bytes that were loaded and dropped since freed memory was last returned to the system.
        self._turnover = 0
        # The first adapter of each kind of head, by the class of transformers that loads the base model.
        self._first: dict[str, Predictor] = {}
        self._tokenizers: MutableMapping[object, PreTrainedTokenizerBase] = WeakValueDictionary()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._held)

    def get(self, entries: Iterable[Entry]) -> dict[Entry, HeldAdapter]:
        """Return the adapters of these entries, all of them in their models.

        Adapters that are requested together are never dropped for each other, even if that takes more memory.
        """
        wanted = dict.fromkeys(entries)
        for entry in wanted:
            if entry in self._held:
                self._held.move_to_end(entry)
        for entry in wanted:
            if entry not in self._held:
                self._held[entry] = adapter = self._load(entry)
                self._count(adapter.nbytes)
            self._drop_unused(wanted)
        for entry in wanted:
            self._held[entry].put_in()
        return {entry: self._held[entry] for entry in wanted}

    def drop(self, entry: Entry) -> None:
        """Free the memory of an adapter, if it is held."""
        adapter = self._held.pop(entry, None)
        if adapter is not None:
            adapter.take_out()
            forget_batches(adapter.model.get_base_model())
            self._count(-adapter.nbytes)

    def files(self, entry: Entry) -> Files | None:
        """Return the files that a held adapter was loaded from; None if it is not held."""
        return self._held[entry].files if entry in self._held else None

    def _drop_unused(self, wanted: Iterable[Entry]) -> None:
        for entry, adapter in tuple(self._held.items()):
            if self.nbytes <= self.max_bytes:
                return
            # Dropping the first one, which never leaves the model, would free nothing.
            if entry not in wanted and adapter.parts:
                self.drop(entry)

    def _count(self, change: int) -> None:
        """Count loaded or dropped bytes; after a hundredth of all held ones, return freed memory to the system.

        Loading frees as much memory as an adapter takes, in pieces between the weights that stay. glibc keeps these
        pieces and seldom uses them again: with 300 adapters of BERT-base, they took half as much as the weights.
        """
        self.nbytes += change
        self._turnover += abs(change)
        if self._turnover > self.nbytes / 100:
            self._turnover = 0
            with suppress(AttributeError, OSError, TypeError):  # other C libraries have no such function
                ctypes.CDLL(None).malloc_trim(0)

    def _load(self, entry: Entry) -> HeldAdapter:
        folder = entry.find(self.token)
        files = list_files(folder)
        task = task_of_config(read_config(folder), folder)
        if task.pipeline not in READERS:
            raise AdapterError(
                f"The tasks of a bank must be {', '.join(READERS)}; that of {entry.source} is {task.pipeline}. Use "
                "houlsby_peft.load for it."
            )
        first = self._first.get(task.auto_class)
        # While an adapter is loaded, no other is in the model: PEFT visits all modules several times for each, so that
        # the time would grow with the number of adapters held.
        for other in self._held.values():
            if first is not None and other.model is first.model:
                other.take_out()
        given = self._base_model
        if isinstance(given, PreTrainedModel) and (own := task_of_class(type(given).__name__)) is not None:
            given = given if own.auto_class == task.auto_class else None
        self._loaded += 1
        predictor = load_beside(
            entry.source, entry.commit or entry.revision, given, first, f"task_{self._loaded}", self._tokenizers,
            **self._options,
        )  # fmt: skip
        reader = READERS[task.pipeline](predictor, entry.task)
        name = predictor.name
        parts = [(found, found[name]) for found in _mappings(predictor.model) if name in found]
        if list_files(folder) != files:
            if first is None:
                predictor.model.unload()  # a base model that was given is as it was, for the next attempt
            else:
                for mapping, _ in parts:
                    del mapping[name]
            raise AdapterError(f"The files of {entry.source} must not change while they are read. Load them again.")
        if first is None:
            # It is PEFT's active adapter, without which PEFT loads no other: it never leaves the model.
            parts = []
            for other_kind in self._first.values():
                _share_weights(predictor.base_model, other_kind.base_model)
            self._first[task.auto_class] = predictor
            fix_weights(predictor.model.get_base_model())
        return HeldAdapter(reader, predictor.model, files, parts)


def list_files(folder: Path) -> Files:
    """Return the files of an adapter."""
    stats = {name: (folder / name).stat() for name in _FILES if (folder / name).is_file()}
    return tuple((str(folder / name), stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in stats.items())


def _mappings(model: PeftModel) -> Iterator[Any]:
    """Yield all mappings of a model by adapter name."""
    yield model.peft_config
    yield model.get_base_model().houlsby_records
    for module in model.modules():
        if isinstance(module, (HoulsbyTunerLayer, AuxiliaryTrainingWrapper)):
            yield from (attrgetter(name)(module) for name in (*module.adapter_layer_names, *module.other_param_names))


def _share_weights(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Let a model use the weights of another one where they are equal, so that they are in memory once."""
    known = dict(base_modules(other.base_model))
    for name, module in base_modules(model.base_model):
        for key, weight in module._parameters.items():
            shared = known[name]._parameters.get(key) if name in known else None
            if (
                weight is None
                or shared is None
                or type(weight) is not nn.Parameter
                or type(shared) is not nn.Parameter
            ):
                continue
            alike = (weight.shape, weight.dtype, weight.device) == (shared.shape, shared.dtype, shared.device)
            if alike and not weight.is_meta and torch.equal(weight, shared):
                module._parameters[key] = shared
