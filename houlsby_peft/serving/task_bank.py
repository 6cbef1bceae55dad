"""`TaskBank`: many tasks on one base model, predicted side by side in the same batches."""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ..checkpoints.saved import SavedAdapter
from ..errors import AdapterError, shortened
from .held_adapters import Entry, Files, HeldAdapters, Source, TaskSource, list_files
from .readers import Input, Reader, Request, attempt, predict_requests


# Tasks that `warm_up` predicts in one batch.
_WARM_UP_TASKS = 32


class TaskBank:
    """One base model and any number of adapters, each with its own head.

    Tasks may be text classification with one or several labels, regression, token classification,
    question answering and embeddings. Each input of a batch may belong to a different task: those
    with the same kind of head go through the base model together. An adapter is loaded when its
    task is first requested. All methods may be called from several threads, which take turns batch
    by batch.

    Args:
        adapters: The tasks, each with its adapter: a folder, a name on the Hub, a `SavedAdapter` or
            a `TaskSource`.
        base_model: The base model, or its name or folder, in place of the one that the first
            adapter names. A model serves the tasks with its kind of head; those of other kinds load
            the one that they name.
        max_bytes: Memory that the adapters' weights may take, in bytes. Beyond it, the least
            recently used ones are dropped. The adapters of one batch are always held together. The
            first adapter that is loaded for each kind of head always stays, and is not counted.
        token: Access token for private repositories. Default: the one that `hf auth login` or
            HF_TOKEN has set.
        device: Where to put the model. Default: where it is; the CPU for a new one.
        dtype: Dtype of the base model. Default: as in its files.
        other_base: As for `load`.
    """

    def __init__(
        self,
        adapters: Mapping[str, Source],
        *,
        base_model: PreTrainedModel | str | None = None,
        max_bytes: float = 2 * 10**9,
        token: str | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        other_base: Literal["refuse", "warn"] = "refuse",
    ) -> None:
        # Replaced as a whole when tasks change, so that it can be read without a lock.
        self._entries = {task: Entry(task, source) for task, source in adapters.items()}
        self._held = HeldAdapters(
            max_bytes, base_model, token=token, device=device, dtype=dtype, other_base=other_base
        )
        # What `serve` could not load, with its files and the reason; it is not tried again before
        # these change.
        self._refused: dict[str, tuple[TaskSource, Files, str]] = {}
        # Held during a batch and while an adapter is loaded.
        self._lock = threading.Lock()
        # Held while tasks change. The other lock may be acquired within it.
        self._changing = threading.RLock()

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks that can be requested."""
        return tuple(self._entries)

    @property
    def failed(self) -> dict[str, str]:
        """The reason for each task of the last `serve` whose adapter could not be loaded."""
        return {task: reason for task, (_, _, reason) in self._refused.items()}

    @property
    def held(self) -> tuple[str, ...]:
        """The tasks whose adapters are in memory, the least recently used one first."""
        with self._lock:
            return tuple(entry.task for entry in self._held)

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
            top_k: As for `Predictor.predict`; or one for each request. Classes below a task's threshold are left out.
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
        limits = [top_k] * len(several) if top_k is None or isinstance(top_k, int) else list(top_k)
        catch: tuple[type[Exception], ...] = (Exception,) if return_errors else ()
        # Until all requests are answered, these keep the adapters that the tasks have now.
        batch = [
            (attempt(catch, self._find, task), text, limit)
            for (tasks, text), limit in zip(several, limits, strict=True)
            for task in ([tasks] if isinstance(tasks, str) else tasks)
        ]
        results: list[Any] = []
        for start in range(0, len(batch), batch_size):
            results += self._predict_batch(batch[start : start + batch_size], batch_size, catch)
        each = iter(results)
        return [
            next(each) if isinstance(tasks, str) else {task: next(each) for task in tasks}
            for tasks, _ in several
        ]

    def ask(
        self, text: Input, tasks: Iterable[str] | None = None, batch_size: int = 64
    ) -> dict[str, Any]:
        """Ask one text many questions.

        Args:
            text: An input that all of the tasks read.
            tasks: The tasks. Default: all of them.
            batch_size: Number of tasks that are predicted at once.

        Returns:
            The result of each task, as `predict` gives it.

        Raises:
            AdapterError, HubError, ValueError: As for `predict`.
        """
        [found] = self.predict([(self.tasks if tasks is None else tuple(tasks), text)], batch_size)
        return found  # type: ignore[no-any-return]

    def reader(self, task: str) -> Reader:
        """Return what reads the inputs of a task, whose adapter is loaded if it is not. Raises as
        `predict` does.
        """
        entry = self._find(task)
        entry.open(self._held.token)
        with self._lock:
            return self._held.get([entry])[entry]  # type: ignore[return-value]

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
            wanted = {task: Entry(task, source) for task, source in adapters.items()}
            self._entries = {task: entry for task, entry in self._entries.items() if task in wanted}
            refused, is_full = {}, False
            for task, entry in wanted.items():
                source, old, before = entry.source, self._entries.get(task), self._refused.get(task)
                given = source.source
                # None for an adapter on the Hub.
                files = list_files(
                    given.folder if isinstance(given, SavedAdapter) else Path(given).expanduser()
                )
                if old and old.source == source and (not files or old.files in (None, files)):
                    continue
                if before and files and before[:2] == (source, files):
                    refused[task] = before
                    continue  # what is on the Hub is tried again each time, as the network may be back
                try:
                    if old or not is_full:
                        self._load(entry)
                        is_full = self._held.is_full
                    self._entries = {**self._entries, task: entry}
                except (
                    Exception
                ) as error:  # whatever is wrong with one adapter, the others are served
                    refused[task] = (source, files, shortened(str(error) or type(error).__name__))
            self._entries = {task: self._entries[task] for task in wanted if task in self._entries}
            self._refused = refused
        return self.failed

    def add(self, task: str, source: Source, replace: bool = False) -> None:
        """Add a task. Its adapter is loaded at once, so that one that cannot be used is refused
        here.

        Args:
            task: The task.
            source: Its adapter, as for `TaskBank`.
            replace: Whether a task of this name gets the new adapter. Requests that are running keep the old one.

        Raises:
            AdapterError: The adapter cannot be loaded, or there is such a task and `replace` is not
                set.
            HubError: The repository does not exist, is private or cannot be reached.
            ValueError: The task has no classes for a threshold.
        """
        with self._changing:
            if task in self._entries and not replace:
                raise AdapterError(
                    f"The name of a task must be new to the bank; got {task!r}. Give replace=True to replace its "
                    "adapter."
                )
            self._load(Entry(task, source))

    def remove(self, task: str) -> None:
        """Remove a task and free its adapter's memory. Requests that are running get their results.

        Raises:
            AdapterError: There is no such task.
        """
        with self._changing:
            self._find(task)
            self._entries = {
                other: entry for other, entry in self._entries.items() if other != task
            }

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
            old = self._find(task)
            new = Entry(task, old.source)
            if old.files == list_files(new.open(self._held.token).folder):
                return False
            self._load(new)
            return True

    def warm_up(self, tasks: Iterable[str] | None = None) -> None:
        """Load adapters and predict an example with each, so that the first requests need not wait.

        If `max_bytes` is too little for all of them, the last ones stay.

        Args:
            tasks: The tasks. Default: all of them.

        Raises:
            AdapterError, HubError: As for `predict`.
        """
        entries = [self._find(task) for task in (self.tasks if tasks is None else tasks)]
        for start in range(0, len(entries), _WARM_UP_TASKS):
            batch = [(entry, None, None) for entry in entries[start : start + _WARM_UP_TASKS]]
            self._predict_batch(batch, _WARM_UP_TASKS, ())

    def _find(self, task: str) -> Entry:
        entries = self._entries
        if task not in entries:
            raise AdapterError(
                f"A task must be among those of the bank: {reprlib.repr([*entries])}; got {shortened(task)}. Add its "
                "adapter."
            )
        return entries[task]

    def _load(self, entry: Entry) -> None:
        """Load the adapter of a new entry, and let the entry replace the one of its task."""
        entry.open(self._held.token)  # a download keeps no other thread waiting
        with self._lock:
            self._held.get([entry])
        self._entries = {**self._entries, entry.task: entry}

    def _predict_batch(
        self,
        batch: Sequence[tuple[Entry | Exception, Input | None, int | None]],
        batch_size: int,
        catch: tuple[type[Exception], ...],
    ) -> list[Any]:
        """Predict inputs at once; without an input, an example of the task's kind."""
        entries = list(dict.fromkeys(entry for entry, *_ in batch if isinstance(entry, Entry)))
        with self._lock:
            missing = set(entries).difference(self._held)
        # Downloads keep no other thread waiting; `HeldAdapters` finds the files in the cache.
        opened = {entry: attempt(catch, entry.open, self._held.token) for entry in missing}
        failed = {entry: error for entry, error in opened.items() if isinstance(error, Exception)}
        with self._lock:
            readers = {
                **failed,
                **self._held.get([entry for entry in entries if entry not in failed], catch),
            }
            found: list[Any] = []
            for entry, text, top_k in batch:
                reader = readers[entry] if isinstance(entry, Entry) else entry
                if isinstance(entry, Entry) and isinstance(reader, Reader):
                    given = reader.example if text is None else text
                    found.append(
                        attempt(catch, reader.request, given, top_k, entry.source.threshold)
                    )
                else:
                    found.append(reader)
            requests = [request for request in found if isinstance(request, Request)]
            results = iter(predict_requests(requests, batch_size, catch))
        return [next(results) if isinstance(each, Request) else each for each in found]
