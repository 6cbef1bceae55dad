"""`HeldAdapters`: adapters in memory, loaded when needed and dropped for lack of room."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..batching.slots import Slots
from ..beneath import open_beneath
from ..heads.tasks import TaskKind, task_kind_of_class
from ..saved.adapter import SAVED_FILES, SavedAdapter, adapter_of_run
from ..undo import take_modules
from .base_model import check_tokens, load_tokenizer
from .forms import Form, can_hold, form_key
from .forward import attempt
from .load import load_saved
from .predictor import Predictor, find_reader
from .questions import Question
from .readers import Reader


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
        """Open the adapter, as `SavedAdapter.open` does, and the one beneath it."""
        source = self.source.source
        if isinstance(source, SavedAdapter):
            return source
        saved = SavedAdapter.open(source, self.commit or self.source.revision, token)
        self.commit = saved.commit
        open_beneath(saved.config, token)
        return saved

    def list_files(self) -> Files:
        """Return the files that the adapter has now; empty for one on the Hub."""
        source = self.source.source
        if isinstance(source, SavedAdapter):
            return list_files(source.folder)
        return list_files(Path(source).expanduser())


@dataclass
class HeldAdapter:
    """An adapter in memory.

    `drop` lets it go. The first adapter of a model stays if it cannot be held in slots, because
    PEFT needs one, and its bytes do not count.
    """

    reader: Reader
    nbytes: int = 0
    drop: Callable[[], object] | None = None


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
        self._options = options
        # By weak references: an adapter is dropped when its task is gone.
        self._held: OrderedDict[ref[BankTask], HeldAdapter] = OrderedDict()
        self._loaded = 0
        # The first adapter of each kind of head, by the class of transformers that loads the base
        # model. The later ones are loaded beside it.
        self._first: dict[str, Predictor] = {}
        # By head, and by what the files of equal adapters have in common.
        self._forms: dict[Hashable, Form] = {}
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
        for key, task in needed.items():
            if key not in self._held:
                readers[task] = attempt(catch, self._hold, task)
                self._make_room(needed)
            else:
                readers[task] = self._held[key].reader
        self._make_room(needed)  # after a request that has taken more than is allowed
        return readers

    def _hold(self, task: BankTask) -> Reader:
        adapter = self._held[ref(task)] = self._load(task)
        return adapter.reader

    def _drop_gone(self) -> None:
        for key in list(self._held):
            adapter = self._held[key]
            if key() is None:
                del self._held[key]
                if adapter.drop is not None:
                    adapter.drop()

    def _make_room(self, needed: Collection[ref[BankTask]]) -> None:
        for key, adapter in list(self._held.items()):
            if self.nbytes <= self.max_bytes:
                return
            if adapter.drop is not None and key not in needed:
                del self._held[key]
                adapter.drop()
                self.is_full = True

    def _load(self, task: BankTask) -> HeldAdapter:
        saved = task.open(self.token)
        task.files = list_files(saved.folder)
        called = task.name or saved.name
        find_reader(saved.task, called)  # before a base model is loaded
        self._loaded += 1
        name = f"task_{self._loaded}"
        head, weights = saved.task.auto_class, saved.weights
        key = (head, form_key(saved, weights))
        # In memory, they are float32 at least.
        nbytes = sum(weight.numel() * max(weight.element_size(), 4) for weight in weights.values())
        first, form = self._first.get(head), self._forms.get(key)
        if first is None or form is None:
            predictor = load_saved(
                saved,
                self._base_model_for(saved.task),
                first,
                name,
                self._tokenizers,
                token=self.token,
                **self._options,
            )
            model = predictor.model
            with model.base_model.adding(name):  # type: ignore[operator]
                reader = _make_reader(task, predictor, called)
            form = self._find_form(model, name, key, weights)
            is_first = first is None
            first = self._first.setdefault(head, predictor)
            if form is None and is_first:
                return HeldAdapter(reader)
            if form is None:
                return HeldAdapter(reader, nbytes, partial(model.delete_adapter, name))
            if is_first:
                take_modules(model, name)
            else:
                model.delete_adapter(name)
            name = f"{name}_in_slots"
        reader = self._hold_in(form, task, saved, weights, first, name)
        return HeldAdapter(reader, nbytes, partial(self._drop, form, name))

    def _hold_in(
        self,
        form: Form,
        task: BankTask,
        saved: SavedAdapter,
        weights: Mapping[str, torch.Tensor],
        beside: Predictor,
        name: str,
    ) -> Reader:
        """Hold an adapter in a slot of its form, and return what reads the inputs of its task."""
        base = beside.base_model
        check_tokens(saved, base, is_shared=True)
        tokenizer = load_tokenizer(
            saved, beside.task, base.name_or_path, self.token, self._tokenizers
        )
        try:
            form.hold(name, saved, weights)
            predictor = Predictor(beside.model, name, beside.task, tokenizer, beside.compile)
            return _make_reader(task, predictor, task.name or saved.name)
        except BaseException:
            form.drop(name)
            raise

    def _find_form(
        self, model: PeftModel, name: str, key: Hashable, weights: Mapping[str, torch.Tensor]
    ) -> Form | None:
        """Return the form of an adapter that PEFT has added; None if it cannot be held in slots."""
        # With "warn", each adapter of another base model is to be warned of.
        if self._options["other_base"] != "refuse" or not can_hold(model, name):
            return None
        form = Form(model, name, key)
        if not form.fits(weights):
            self._close_empty(form.slots)
            return None
        self._forms[key] = form
        return form

    def _drop(self, form: Form, name: str) -> None:
        """Let go an adapter that is held in slots."""
        form.drop(name)
        self._close_empty(form.slots)

    def _close_empty(self, slots: Slots) -> None:
        """Let go slots without an adapter, and the forms that have them."""
        if slots.numbers:
            return
        slots.close()
        for key, form in list(self._forms.items()):
            if form.slots is slots:
                del self._forms[key]

    def _base_model_for(self, kind: TaskKind) -> PreTrainedModel | str | None:
        """Return the base model that was given, unless it is a model with another kind of head."""
        if isinstance(self._base_model, PreTrainedModel):
            kind_of_base = task_kind_of_class(type(self._base_model).__name__)
            if kind_of_base is not None and kind_of_base.auto_class != kind.auto_class:
                return None
        return self._base_model


def _make_reader(task: BankTask, predictor: Predictor, called: str) -> Reader:
    """Return what reads the inputs of a task, if its adapter can be used."""
    reader = predictor.reader(called)
    reader.fingerprint = _fingerprint(task.files or ())
    reader.read(Question(reader.example, threshold=task.source.threshold))
    return reader


def list_files(folder: Path) -> Files:
    """Return the files of an adapter."""
    files = []
    for name in SAVED_FILES:
        path = adapter_of_run(folder) / name
        if path.is_file():
            stat = path.stat()
            files.append((str(path), stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(files)


def _fingerprint(files: Files) -> str:
    """Return the first 16 digits of the SHA-256 of an adapter's files, with their names."""
    digest = hashlib.sha256()
    for path, *_ in files:
        digest.update(Path(path).name.encode())
        digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()[:16]
