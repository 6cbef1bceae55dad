"""The engine behind the app: a `TaskBank` that follows its folder or list, and predicts for many
clients in one thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Protocol

import torch

from ..errors import AdapterError, HubError, shortened
from ..predict.adapter_list import changing_list, read_adapters, resolve
from ..predict.held_adapters import TaskSource
from ..predict.readers import Input
from ..predict.task_bank import TaskBank, UnknownTaskError
from .options import ServiceOptions
from .schedule import Job, Prediction, Schedule


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Query:
    """What a request asks of one task; see `Question`."""

    task: str
    input: Input
    top_k: int | None = None
    all_classes: bool = False


@dataclass(frozen=True)
class Refusal:
    """Why something cannot be answered, and the status of HTTP that says so."""

    status: int
    rule: str


@dataclass(frozen=True)
class Status:
    """What an engine serves.

    Attributes:
        tasks: The names of the tasks, with those whose adapter cannot be loaded.
        in_memory: The number of adapters in memory.
        failed: The reason for each task whose adapter cannot be loaded.
        list: "ok", or what is wrong with the folder or list of adapters.
    """

    tasks: tuple[str, ...]
    in_memory: int
    failed: dict[str, str]
    list: str


@dataclass(frozen=True)
class TaskFacts:
    """What is known of a task.

    Attributes:
        pipeline: Its kind, as transformers calls its pipeline.
        labels: The names of its classes by number.
        base_model: The name of the base model.
        max_tokens: The tokens that longer texts are cut to, or read in parts of.
        dtype: The dtype of the base model.
    """

    pipeline: str
    labels: tuple[str, ...]
    base_model: str
    max_tokens: int | None
    dtype: str


class Engine(Protocol):
    """What the app knows of what predicts."""

    async def predict(self, queries: Sequence[Query]) -> list[Prediction | Refusal] | Refusal:
        """Answer each query, or refuse all of them because too many are waiting."""

    async def status(self) -> Status | Refusal:
        """Return what is served."""

    async def facts(self, task: str) -> TaskFacts | Refusal:
        """Return what is known of a task, whose adapter is loaded if it is not."""

    async def change(self, task: str, source: TaskSource | None) -> Refusal | None:
        """Add a task to the list of adapters, or replace it; None removes it."""

    async def refresh(self) -> Status | Refusal:
        """Look at the folder or list of adapters now."""


class BankEngine:
    """A `TaskBank` whose batches are gathered from the requests of all clients."""

    def __init__(self, options: ServiceOptions) -> None:
        torch.set_num_threads(options.cpus)
        self._options = options
        device = "cuda" if options.gpus else None
        self._bank = TaskBank(
            {},
            base_model=options.base_model,
            max_bytes=options.max_bytes,
            device=device,
            compile=options.compile,
        )
        self._schedule = Schedule(self._bank, options.batch_size)
        self._arrived: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._count = 0
        self._state_of_list = "ok"
        self._changing = threading.Lock()
        self._refresh()
        threading.Thread(target=self._work, daemon=True).start()
        if options.watch:
            threading.Thread(target=self._watch, daemon=True).start()

    async def predict(self, queries: Sequence[Query]) -> list[Prediction | Refusal] | Refusal:
        """Answer each query, or refuse all of them because too many are waiting."""
        if self._count >= self._options.max_queued:
            return Refusal(503, "Too many requests are waiting. Try again later.")
        job = Job(self._bank.question(*astuple(query)) for query in queries)
        self._count += 1
        try:
            self._arrived.put(job)
            results = await asyncio.wrap_future(job.future)
        finally:
            self._count -= 1
        answers: list[Prediction | Refusal] = []
        for query, result in zip(queries, results, strict=True):
            if isinstance(result, Exception):
                answers.append(self._explain(query.task, result))
            else:
                answers.append(result)
        return answers

    async def status(self) -> Status:
        """Return what is served."""
        bank = self._bank
        failed = {task: hide_folders(reason) for task, reason in bank.failed.items()}
        names = tuple(dict.fromkeys([*bank.tasks, *failed]))
        held = await asyncio.to_thread(lambda: bank.held)
        return Status(names, len(held), failed, self._state_of_list)

    async def facts(self, task: str) -> TaskFacts | Refusal:
        """Return what is known of a task, whose adapter is loaded if it is not."""
        try:
            reader = await asyncio.to_thread(self._bank.reader, task)
        except Exception as error:
            return self._explain(task, error)
        return TaskFacts(
            pipeline=reader.task.pipeline,
            labels=tuple(name for _, name in sorted(reader.labels.items())),
            base_model=Path(str(reader.model.get_base_model().name_or_path)).name,
            max_tokens=reader.cut.get("max_length"),
            dtype=str(reader.model.dtype).removeprefix("torch."),
        )

    async def change(self, task: str, source: TaskSource | None) -> Refusal | None:
        """Add a task to the list of adapters, or replace it; None removes it."""
        try:
            await asyncio.to_thread(self._change, task, source)
        except UnknownTaskError as error:
            return Refusal(404, str(error))
        except (ValueError, OSError) as error:
            return Refusal(422, hide_folders(str(error)))
        return None

    async def refresh(self) -> Status:
        """Look at the folder or list of adapters now."""
        await asyncio.to_thread(self._refresh)
        return await self.status()

    def _change(self, task: str, source: TaskSource | None) -> None:
        """Change the list of adapters. An adapter that cannot be loaded leaves it as it is."""
        path = Path(self._options.adapters)
        try:
            with changing_list(path) as adapters:
                if source is None:
                    self._bank.remove(task)
                    del adapters[task]
                else:
                    self._bank.add(task, resolve(path, source), replace=True)
                    fields = asdict(source).items()
                    adapters[task] = {name: value for name, value in fields if value is not None}
        finally:
            self._refresh()

    def _refresh(self) -> None:
        """Serve what the folder or list has now. While it cannot be read, the tasks stay as they
        are.
        """
        with self._changing:
            try:
                self._bank.serve(read_adapters(self._options.adapters))
                self._state_of_list = "ok"
            except Exception as error:  # a folder may change while it is read
                reason = hide_folders(str(error))
                if reason != self._state_of_list:
                    _LOG.warning("The adapters cannot be read. %s", reason)
                self._state_of_list = reason

    def _watch(self) -> None:
        while True:
            time.sleep(self._options.watch)
            self._refresh()

    def _work(self) -> None:
        """Predict what arrives, for as long as the process runs."""
        while True:
            if self._schedule.is_idle:
                self._schedule.add(self._arrived.get())
            while not self._arrived.empty():
                self._schedule.add(self._arrived.get())
            try:
                for job in self._schedule.step():
                    if job.future.set_running_or_notify_cancel():
                        job.future.set_result(job.results)
            except BaseException as error:  # a panic of tokenizers is no Exception
                _LOG.error("Predictions failed.", exc_info=error)
                for job in self._schedule.drop_all():
                    if job.future.set_running_or_notify_cancel():
                        job.future.set_exception(RuntimeError("The predictions failed."))

    def _explain(self, task: str, error: Exception) -> Refusal:
        """Return why a question cannot be answered, in words for its client."""
        if isinstance(error, UnknownTaskError):
            if task in self._bank.failed:
                rule = f"The adapter of task {task!r} cannot be loaded; GET /health says why."
                return Refusal(500, rule)
            return Refusal(404, f"task must be one of GET /tasks; got {shortened(repr(task))}.")
        if isinstance(error, (AdapterError, HubError)):
            return Refusal(500, hide_folders(str(error)))
        if isinstance(error, ValueError):
            return Refusal(422, hide_folders(str(error)))
        _LOG.error("A prediction for task %r failed.", task, exc_info=error)
        return Refusal(500, "The prediction failed; the log of the service says why.")


def hide_folders(text: str) -> str:
    """Return a text in which the absolute paths of this machine have lost their folders."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/]+/)+", "", text)
