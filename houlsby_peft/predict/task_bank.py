"""`TaskBank`: many tasks on one base model, predicted side by side in the same batches."""

from __future__ import annotations

import logging
import os
import reprlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from ..errors import AdapterError, shortened
from .adapter_list import read_adapters
from .forward import Batcher, attempt, run_batch, split
from .held_adapters import BankTask, Files, HeldAdapters, Source, TaskSource, list_files
from .questions import Input, Question, Row
from .readers import Reader


_LOG = logging.getLogger(__name__)
# Stands for an example of the kind that a task reads.
_EXAMPLE: Any = object()
# Tasks that `warm_up` predicts in one batch.
_WARM_UP_TASKS = 32


class UnknownTaskError(AdapterError):
    """The bank has no such task."""


@dataclass(frozen=True)
class _FailedLoad:
    """Why `serve` could not load an adapter. It is not tried again before its files change."""

    source: TaskSource
    files: Files
    reason: str

    def holds(self, source: TaskSource, files: Files) -> bool:
        """Return whether loading these files would fail again; an adapter on the Hub has none."""
        return bool(files) and (self.source, self.files) == (source, files)


class TaskBank:
    """One base model and any number of adapters, each with its own head.

    Tasks may be text classification with one or several labels, regression, token classification,
    question answering and embeddings. Each input of a batch may belong to a different task: those
    with the same kind of head go through the base model together. An adapter is loaded when its
    task is first requested. All methods may be called from several threads, which take turns batch
    by batch.

    Args:
        adapters: The tasks, each with its adapter: a folder, a name on the Hub, a `SavedAdapter` or
            a `TaskSource`. Or a folder of adapters or runs, each of which is a task of its name.
        base_model: The base model, or its name or folder, in place of the one that the first
            adapter names. A model serves the tasks with its kind of head; those of other kinds load
            the one that they name.
        max_bytes: Memory that the adapters' weights may take, in bytes. Beyond it, the least
            recently used ones are dropped. The adapters of one batch are always held together. Up
            to twice as much is reserved, and more while the room doubles.
        token: Access token for private repositories. Default: the one that `hf auth login` or
            HF_TOKEN has set.
        device: Where to put the model. Default: where it is; the CPU for a new one.
        dtype: Dtype of the base model. Default: as in its files.
        other_base: As for `load`.
        compile: Whether a GPU repeats the model's layers as CUDA graphs (see `Predictor`). One
            graph serves all tasks whose adapters differ in the values of their weights alone.
    """

    def __init__(
        self,
        adapters: Mapping[str, Source] | str | os.PathLike[str],
        *,
        base_model: PreTrainedModel | str | None = None,
        max_bytes: float = 2 * 10**9,
        token: str | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        other_base: Literal["refuse", "warn"] = "refuse",
        compile: bool = False,
    ) -> None:
        if isinstance(adapters, (str, os.PathLike)):
            adapters = read_adapters(adapters)
        # Replaced as a whole when tasks change, so that it can be read without a lock.
        self._tasks = {name: BankTask(name, source) for name, source in adapters.items()}
        self._held = HeldAdapters(
            max_bytes,
            base_model,
            token=token,
            device=device,
            dtype=dtype,
            other_base=other_base,
            compile=compile,
        )
        self._failed: dict[str, _FailedLoad] = {}
        # Encoded questions in their order, whose adapters stay in memory until they are answered.
        self._open: WeakKeyDictionary[Question, None] = WeakKeyDictionary()
        # Held during a batch and while an adapter is loaded.
        self._lock = threading.Lock()
        # Held while tasks change. The other lock may be acquired within it.
        self._changing = threading.RLock()

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks that can be requested."""
        return tuple(self._tasks)

    @property
    def failed(self) -> dict[str, str]:
        """The reason for each task of the last `serve` whose adapter could not be loaded."""
        return {name: failure.reason for name, failure in self._failed.items()}

    @property
    def held(self) -> tuple[str, ...]:
        """The tasks whose adapters are in memory, the least recently used one first."""
        with self._lock:
            return tuple(task.name for task in self._held)

    @property
    def nbytes(self) -> int:
        """The memory that adapters take which may be dropped, in bytes."""
        with self._lock:
            return self._held.nbytes

    def predict(
        self,
        requests: Iterable[tuple[str | Sequence[str], Input]],
        batch_size: int = 32,
        top_k: int | Sequence[int | None] | None = None,
        return_errors: bool = False,
    ) -> list[Any]:
        """Predict each input for its task, or for several.

        Where adapters change only upper layers, the layers below run once for all tasks of a text
        in a batch.

        Args:
            requests: Pairs of a task and an input: a text, a pair of texts or, for question
                answering, a pair (question, context). Texts are cut as `Predictor.predict` does. A
                list of tasks stands for all of them.
            batch_size: Number of pairs of a task and an input that are predicted at once.
            top_k: As for `Predictor.predict`; or one for each request. Classes below a task's
                threshold are left out.
            return_errors: Whether a request that cannot be answered gets its error as the result,
                and the others their answers, instead of the error being raised.

        Returns:
            One result per request, in their order, as `Predictor.predict` gives it and as the
            task's threshold, if it has one, changes it; for a list of tasks, a dict with the result
            of each.

        Raises:
            AdapterError: A task is unknown, its adapter's files are damaged or for another base
                model, its kind of task is none of those above, or its outputs are not finite.
            HubError: A repository does not exist, is private or cannot be reached.
            ValueError: An input is not of its task's kind or has no token, or `top_k` is not a
                number of classes or is for a task without classes.
        """
        several = list(requests)
        limits = list(top_k) if isinstance(top_k, Sequence) else [top_k] * len(several)
        _check_requests(several, limits)
        questions = []
        for (tasks, text), limit in zip(several, limits, strict=True):
            questions += [Question(text, name, limit) for name in _as_names(tasks)]
        self._answer(questions, batch_size, return_errors)
        return group_results([tasks for tasks, _ in several], questions)

    def ask(
        self, text: Input, tasks: str | Iterable[str] | None = None, batch_size: int = 64
    ) -> dict[str, Any]:
        """Ask one text many questions.

        Args:
            text: The input.
            tasks: The tasks, or one, which read such an input. Default: all that do.
            batch_size: Number of tasks that are predicted at once.

        Returns:
            The result of each task, as `predict` gives it.

        Raises:
            AdapterError, HubError, ValueError: As for `predict`.
        """
        names = self.tasks if tasks is None else _as_names(tasks)
        questions = [Question(text, name, of_all=tasks is None) for name in names]
        self._answer(questions, batch_size)
        [results] = group_results([names], questions)
        return results  # type: ignore[no-any-return]

    def reader(self, task: str) -> Reader:
        """Return what reads the inputs of a task, whose adapter is loaded if it is not. Raises as
        `predict` does.
        """
        bank_task = self._find(task)
        bank_task.open(self._held.token)
        with self._lock:
            return self._hold([bank_task])[bank_task]  # type: ignore[return-value]

    def serve(self, adapters: Mapping[str, Source]) -> dict[str, str]:
        """Serve these tasks and no others.

        A task whose adapter is new, or has new files in its folder, gets it once it is loaded;
        requests that are running keep the old one. A task whose new adapter cannot be loaded keeps
        the old one, and is tried again when its files have changed. When `max_bytes` is reached,
        the adapters of further tasks are loaded on request.

        Args:
            adapters: As for `TaskBank`.

        Returns:
            The reason for each task whose adapter cannot be loaded, which is also `failed`.
        """
        with self._changing:
            offered = {name: BankTask(name, source) for name, source in adapters.items()}
            for name in self._tasks.keys() - offered.keys():
                self._forget(name)
            failed: dict[str, _FailedLoad] = {}
            is_full = False
            for name, task in offered.items():
                files = task.list_files()
                if self._has_loaded(task, files):
                    continue
                failure = self._failed.get(name)
                if failure is None or not failure.holds(task.source, files):
                    if is_full and name not in self._tasks:
                        self._put(task)
                        continue
                    failure = self._try_to_load(task, files)
                    is_full = self._held.is_full
                if failure is not None:
                    failed[name] = failure
            self._tasks = {name: self._tasks[name] for name in offered if name in self._tasks}
            self._failed = failed
        return self.failed

    def add(self, task: str, source: Source, replace: bool = False) -> None:
        """Add a task. Its adapter is loaded at once, so that one that cannot be used is refused
        here.

        Args:
            task: The task.
            source: Its adapter, as for `TaskBank`.
            replace: Whether a task of this name gets the new adapter. Requests that are running
                keep the old one.

        Raises:
            AdapterError: The adapter cannot be loaded, or there is such a task and `replace` is not
                set.
            HubError: The repository does not exist, is private or cannot be reached.
            ValueError: The task has no classes for a threshold.
        """
        with self._changing:
            if task in self._tasks and not replace:
                raise AdapterError(
                    f"The name of a task must be new to the bank; got {task!r}. Give replace=True "
                    "to replace its adapter."
                )
            self._load(BankTask(task, source))

    def remove(self, task: str) -> None:
        """Remove a task and free its adapter's memory. Requests that are running get their results.

        Raises:
            AdapterError: There is no such task.
        """
        with self._changing:
            self._forget(self._find(task).name)

    def reload(self, task: str) -> bool:
        """Load a task's adapter again if its files have changed: those in its folder, or those of
        its revision.

        Requests that are running keep the old adapter. If the new one cannot be loaded, the old one
        stays.

        Returns:
            Whether there was anything new.

        Raises:
            AdapterError, HubError: There is no such task, or the new adapter cannot be loaded.
        """
        with self._changing:
            current = self._find(task)
            changed = BankTask(task, current.source)
            if current.files == list_files(changed.open(self._held.token).folder):
                return False
            self._load(changed)
            return True

    def warm_up(self, tasks: str | Iterable[str] | None = None) -> None:
        """Load adapters and predict an example with each, so that the first requests need not wait.

        If `max_bytes` is too little for all of them, the last ones stay.

        Args:
            tasks: The tasks, or one. Default: all of them.

        Raises:
            AdapterError, HubError: As for `predict`.
        """
        names = self.tasks if tasks is None else _as_names(tasks)
        self._answer([Question(_EXAMPLE, name) for name in names], _WARM_UP_TASKS)

    def _find(self, name: str) -> BankTask:
        tasks = self._tasks
        if name not in tasks:
            if name in self._failed:
                raise AdapterError(
                    f"The adapter of task {name!r} cannot be loaded: {self._failed[name].reason}"
                )
            raise UnknownTaskError(
                f"A task must be among those of the bank: {reprlib.repr([*tasks])}; got "
                f"{shortened(name)}. Add its adapter."
            )
        return tasks[name]

    def _has_loaded(self, task: BankTask, files: Files) -> bool:
        """Return whether the bank has a task with the same source, and has loaded these files, or
        none yet.
        """
        current = self._tasks.get(task.name)
        if current is None or current.source != task.source:
            return False
        return not files or current.files in (None, files)

    def _load(self, task: BankTask) -> None:
        """Load the adapter of a task, which then replaces the task of its name."""
        task.open(self._held.token)  # a download keeps no other thread waiting
        with self._lock:
            self._hold([task])
        self._put(task)

    def _try_to_load(self, task: BankTask, files: Files) -> _FailedLoad | None:
        """Load the adapter of a task; return why it cannot be loaded, whatever is wrong with it."""
        try:
            self._load(task)
        except Exception as error:
            reason = shortened(str(error) or type(error).__name__)
            _LOG.warning("The adapter of task %r cannot be loaded. %s", task.name, reason)
            return _FailedLoad(task.source, files, reason)
        return None

    def _put(self, task: BankTask) -> None:
        change = "replaced" if task.name in self._tasks else "added"
        self._tasks = {**self._tasks, task.name: task}
        _LOG.info("Task %r was %s.", task.name, change)

    def _forget(self, name: str) -> None:
        tasks = dict(self._tasks)
        del tasks[name]
        self._tasks = tasks
        _LOG.info("Task %r was removed.", name)

    def _hold(
        self, tasks: Iterable[BankTask], catch: tuple[type[Exception], ...] = ()
    ) -> dict[BankTask, Reader | Exception]:
        """Return what reads the inputs of tasks. Their adapters, and those of open questions, are
        then in their models.
        """
        needed = dict.fromkeys(tasks)
        for question in self._open:
            if question.bank_task is not None:
                needed[question.bank_task] = None
        return self._held.get(needed, catch)

    def accept(self, question: Question) -> None:
        """Give a question the adapter that its task has now, and keeps until it is answered."""
        try:
            question.bank_task = self._find(question.task)
        except AdapterError as error:
            question.close(error.with_traceback(None))

    def encode(self, questions: Sequence[Question]) -> None:
        """Load the adapters that questions need, and give the questions their rows.

        A question that cannot be answered gets its error as the result.
        """
        questions_of: dict[BankTask, list[Question]] = {}  # tasks in the order of their questions
        for question in questions:
            if question.bank_task is not None:
                questions_of.setdefault(question.bank_task, []).append(question)
        with self._lock:
            missing = questions_of.keys() - set(self._held)
        # Downloads keep no other thread waiting; `HeldAdapters` finds the files in the cache.
        unreadable: dict[BankTask, Reader | Exception] = {}
        for task in missing:
            saved = attempt((Exception,), task.open, self._held.token)
            if isinstance(saved, Exception):
                unreadable[task] = saved
        with self._lock:
            readable = [task for task in questions_of if task not in unreadable]
            readers = unreadable | self._hold(readable, (Exception,))
            for task, waiting in questions_of.items():
                for question in waiting:
                    error = attempt((Exception,), _read, question, task, readers[task])
                    if isinstance(error, Exception):
                        question.close(error)
                    else:
                        self._open[question] = None

    def run(self, rows: Sequence[Row]) -> None:
        """Run a batch of rows of encoded questions, as a `Batcher` has chosen it."""
        with self._lock:
            run_batch(rows)

    def decode(self, question: Question) -> None:
        """Give a question whose rows have run its result, and let its adapter go."""
        if question.result is None:
            reader = question.rows[0].reader
            question.close(attempt((Exception,), reader.answer, question))
        self._open.pop(question, None)

    def _answer(
        self, questions: Sequence[Question], batch_size: int, return_errors: bool = False
    ) -> None:
        """Give each question its result. Without `return_errors`, the first error is raised."""
        # Until all of them are answered, they keep the adapters that the tasks have now.
        for question in questions:
            self.accept(question)
        try:
            for part in split(questions, batch_size):
                self.encode(part)
                if not return_errors:
                    _raise_first(part)
                rows = [row for question in part for row in question.rows]
                for batch in Batcher(rows, batch_size):
                    self.run(batch)
                for question in part:
                    self.decode(question)
                if not return_errors:
                    _raise_first(part)
        finally:
            for question in questions:
                self._open.pop(question, None)
                question.close(question.result)


def _read(question: Question, task: BankTask, reader: Reader | Exception) -> None:
    """Let the reader of its task read a question."""
    if isinstance(reader, Exception):
        raise reader
    if question.text is _EXAMPLE:
        question.text = reader.example
    if not question.all_classes:
        question.threshold = task.source.threshold
    elif reader.has_classes:
        question.top_k = len(reader.labels)
    reader.read(question)


def _raise_first(questions: Iterable[Question]) -> None:
    for question in questions:
        if question.error is not None:
            raise question.error


def _check_requests(requests: Sequence[object], limits: Sequence[object]) -> None:
    """Refuse requests that are not pairs, which would be read as others or fail without a word."""
    for request in requests:
        if not isinstance(request, (tuple, list)) or len(request) != 2:
            raise ValueError(
                "Each request must be a pair of a task, or a list of tasks, and an input; got "
                f"{shortened(repr(request))}. For one text: bank.ask(text)."
            )
    if len(limits) != len(requests):
        raise ValueError(
            f"top_k must be one number, or one for each of the {len(requests)} requests; got "
            f"{len(limits)}."
        )


def _as_names(tasks: str | Iterable[str]) -> list[str]:
    """Return the names of tasks, or of one."""
    return [tasks] if isinstance(tasks, str) else list(tasks)


def group_results(asked: Iterable[str | Sequence[str]], questions: Iterable[Question]) -> list[Any]:
    """Return one result per text, of which one task was asked or a list of them: for a list, a dict
    with the result of each, but for those that are left out.
    """
    remaining = iter(questions)
    answers: list[Any] = []
    for tasks in asked:
        if isinstance(tasks, str):
            answers.append(next(remaining).result)
            continue
        results = {}
        for question in islice(remaining, len(tasks)):
            if not question.is_left_out:
                results[question.task] = question.result
        answers.append(results)
    return answers
