"""`HeldAdapters`: adapters in memory, loaded when needed and dropped for lack of room."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, ref

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.saved import SAVED_FILES, SavedAdapter, adapter_of_run
from ..heads.tasks import TaskKind, task_kind_of_class
from ..tuner_layer import state_of
from ..undo import parts_of
from .load import load_saved
from .predictor import Predictor, find_reader, removed_on_error
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


class BankTask:
    """A task of a bank with its adapter.

    A changed task is a new `BankTask`, so that running requests keep the adapter they began with.

    Attributes:
        name: The task.
        source: Where its adapter is, and how it is used.
        commit: The commit that was downloaded first, which is used for as long as the task exists.
        files: The files that the adapter was loaded from; None before.
    """

    def __init__(self, name: str, source: Source) -> None:
        self.name = name
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

    def list_files(self) -> Files:
        """Return the files that the adapter has now; empty for one on the Hub."""
        source = self.source.source
        if isinstance(source, SavedAdapter):
            return list_files(source.folder)
        return list_files(Path(source).expanduser())


@dataclass
class HeldAdapter:
    """An adapter in memory, which may be taken out of its model and put in again.

    `parts` are what it has there: each with the mapping by adapter name that holds it. The first
    adapter of a model has none here, because PEFT needs one that stays.
    """

    reader: Reader
    parts: list[tuple[Any, Any]]

    def __post_init__(self) -> None:
        """Count the memory that the weights take."""
        self.nbytes = 0
        for mapping, part in self.parts:
            if isinstance(mapping, nn.ModuleDict):
                self.nbytes += sum(weight.nbytes for weight in part.parameters())
            elif isinstance(mapping, nn.Module):
                self.nbytes += part.nbytes
            # Plain dicts hold the configuration, the record and references to bottlenecks.

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

    `TaskBank` describes the arguments. `is_full` says whether the last call of `get` dropped
    adapters for lack of room.
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
        self.token = token
        self.is_full = False
        self._base_model = base_model
        self._options = {"token": token, **options}
        # By weak references: an adapter is dropped when its task is gone.
        self._held: OrderedDict[ref[BankTask], HeldAdapter] = OrderedDict()
        self._loaded = 0
        # The first adapter of each kind of head, by the class of transformers that loads the base
        # model. The later ones are loaded beside it.
        self._first: dict[str, Predictor] = {}
        self._tokenizers: MutableMapping[object, PreTrainedTokenizerBase] = WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        """Memory that the adapters take which may be dropped."""
        return sum(adapter.nbytes for adapter in self._held.values())

    def __iter__(self) -> Iterator[BankTask]:
        self._drop_gone()
        for key in list(self._held):
            task = key()
            if task is not None:
                yield task

    def get(
        self, tasks: Iterable[BankTask], catch: tuple[type[Exception], ...] = ()
    ) -> dict[BankTask, Reader | Exception]:
        """Return what reads the inputs of these tasks, whose adapters are then all in their models.

        A task whose adapter cannot be loaded has its error in place of a reader, if that is to be
        caught. Adapters that are requested together are never dropped for each other, even if they
        take more memory than is allowed.
        """
        self._drop_gone()
        needed = {ref(task): task for task in tasks}
        for key in needed:
            if key in self._held:
                self._held.move_to_end(key)
        self.is_full = False
        readers: dict[BankTask, Reader | Exception] = {}
        for task in needed.values():
            readers[task] = attempt(catch, self._hold, task)
            self._make_room(needed)
        for key in needed:
            if key in self._held:
                self._held[key].put_in()
        return readers

    def _hold(self, task: BankTask) -> Reader:
        key = ref(task)
        if key not in self._held:
            self._held[key] = self._load(task)
        return self._held[key].reader

    def _drop_gone(self) -> None:
        for key in list(self._held):
            if key() is None:
                self._held.pop(key).take_out()

    def _make_room(self, needed: Collection[ref[BankTask]]) -> None:
        for key, adapter in list(self._held.items()):
            if self.nbytes <= self.max_bytes:
                return
            if adapter.parts and key not in needed:
                self._held.pop(key).take_out()
                self.is_full = True

    def _load(self, task: BankTask) -> HeldAdapter:
        saved = task.open(self.token)
        task.files = list_files(saved.folder)
        find_reader(saved.task, task.name or saved.name)  # before a base model is loaded
        head = saved.task.auto_class
        first = self._first.get(head)
        if first is not None:
            self._take_out_of(first.model)
        self._loaded += 1
        predictor = load_saved(
            saved,
            self._base_model_for(saved.task),
            first,
            f"task_{self._loaded}",
            self._tokenizers,
            **self._options,
        )
        with removed_on_error(predictor.model, predictor.name):
            reader = predictor.reader(task.name or saved.name)
            reader.request(reader.example, None, task.source.threshold)
        if first is None:
            self._first[head] = predictor
            return HeldAdapter(reader, [])
        model, name = predictor.model, predictor.name
        parts = parts_of(model, name)
        for mapping in (model.peft_config, state_of(model).records):
            parts.append((mapping, mapping[name]))
        return HeldAdapter(reader, parts)

    def _take_out_of(self, model: PeftModel) -> None:
        """Take all adapters but the first out of a model.

        PEFT visits all modules several times for each adapter that it adds. The time would grow
        with the number of adapters in the model.
        """
        for adapter in self._held.values():
            if adapter.reader.model is model:
                adapter.take_out()

    def _base_model_for(self, kind: TaskKind) -> PreTrainedModel | str | None:
        """Return the base model that was given, unless it is a model with another kind of head."""
        if isinstance(self._base_model, PreTrainedModel):
            kind_of_base = task_kind_of_class(type(self._base_model).__name__)
            if kind_of_base is not None and kind_of_base.auto_class != kind.auto_class:
                return None
        return self._base_model


def list_files(folder: Path) -> Files:
    """Return the files of an adapter."""
    files = []
    for name in SAVED_FILES:
        path = adapter_of_run(folder) / name
        if path.is_file():
            stat = path.stat()
            files.append((str(path), stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(files)
