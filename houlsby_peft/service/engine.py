"""The engine behind the app: a `TaskBank` that follows its folder or list, and predicts for many
clients in one thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from houlsby_peft_serve import ServiceOptions

from ..errors import UNPRINTABLE
from ..predict.adapter_list import ListError, changing_list, read_adapters, resolve
from ..predict.held_adapters import TaskSource
from ..predict.questions import Question, TaskFacts
from ..predict.task_bank import TaskBank, UnknownTaskError
from .refusals import BusyError, ChangeError, hide_folders, status_of
from .schedule import Job, Schedule


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """What an engine serves.

    Attributes:
        tasks: The names of the tasks.
        failed: The reason for each task whose newest adapter cannot be loaded. Those that are also
            in `tasks` are served with an earlier one.
        list: "ok", or what is wrong with the folder or list of adapters.
        in_memory, adapter_bytes: The number of adapters in memory, and the bytes that they take.
        queued: Requests that run or wait.
        batches, batch_rows: Batches that have run, and their rows.
    """

    tasks: tuple[str, ...]
    failed: dict[str, str]
    list: str
    in_memory: int
    adapter_bytes: int
    queued: int
    batches: int
    batch_rows: int


class Engine(Protocol):
    """What the app knows of what predicts."""

    async def predict(self, questions: Sequence[Question]) -> list[Question]:
        """Return questions with their results or errors. Too many that wait are a `BusyError`."""

    async def tasks(self) -> tuple[str, ...]:
        """Return the names of the tasks."""

    async def status(self) -> Status:
        """Return what is served."""

    async def facts(self, task: str) -> TaskFacts:
        """Return what is known of a task, whose adapter is loaded if it is not. Raises as
        `TaskBank.predict` does.
        """

    async def change(self, task: str, source: TaskSource | None) -> None:
        """Add a task to the list of adapters, or replace it; None removes it. Raises
        `UnknownTaskError` or `ChangeError`.
        """

    async def refresh(self) -> Status:
        """Look at the folder or list of adapters now."""


class BankEngine:
    """A `TaskBank` whose batches are gathered from the requests of all clients."""

    def __init__(self, options: ServiceOptions) -> None:
        torch.set_num_threads(options.cores)
        self._options = options
        self._bank = TaskBank(
            {},
            base_model=options.base_model,
            max_bytes=options.max_bytes,
            device="cuda" if options.gpus else None,
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

    async def predict(self, questions: Sequence[Question]) -> list[Question]:
        """Return questions with their results or errors. Too many that wait are a `BusyError`."""
        if self._count >= self._options.max_queued:
            raise BusyError("Too many requests are waiting. Try again later.")
        for question in questions:
            self._bank.accept(question)
        job = Job(questions)
        self._count += 1
        try:
            self._arrived.put(job)
            await asyncio.wrap_future(job.future)
        finally:
            self._count -= 1
        for question in questions:
            error = question.result
            if isinstance(error, Exception) and status_of(error) is None:
                _LOG.error("A prediction for task %r failed.", question.task, exc_info=error)
                # The error of a library may not be one that another process can read.
                question.result = RuntimeError("The prediction failed.")
        return list(questions)

    async def tasks(self) -> tuple[str, ...]:
        """Return the names of the tasks."""
        return self._bank.tasks

    async def status(self) -> Status:
        """Return what is served."""
        return await asyncio.to_thread(self._status)

    def _status(self) -> Status:
        bank = self._bank
        return Status(
            tasks=bank.tasks,
            failed={task: hide_folders(reason) for task, reason in bank.failed.items()},
            list=self._state_of_list,
            in_memory=len(bank.held),
            adapter_bytes=bank.nbytes,
            queued=self._count,
            batches=self._schedule.batches,
            batch_rows=self._schedule.batch_rows,
        )

    async def facts(self, task: str) -> TaskFacts:
        """Return what is known of a task, whose adapter is loaded if it is not."""
        reader = await asyncio.to_thread(self._bank.reader, task)
        return reader.facts

    async def change(self, task: str, source: TaskSource | None) -> None:
        """Add a task to the list of adapters, or replace it; None removes it."""
        try:
            await asyncio.to_thread(self._change, task, source)
        except (UnknownTaskError, ListError):
            raise
        except (ValueError, OSError) as error:
            raise ChangeError(str(error)) from error

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
                    if UNPRINTABLE.search(task):
                        raise ValueError("The name of a task must be printable.")
                    if str(source.source).startswith("~"):
                        raise ValueError("The source must be a folder, or a name on the Hub.")
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
                if isinstance(error, OSError) and error.strerror:
                    reason = f"{Path(error.filename or '').name}: {error.strerror}"
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
                        job.future.set_result(None)
            except BaseException as error:  # a panic of tokenizers is no Exception
                _LOG.error("Predictions failed.", exc_info=error)
                for job in self._schedule.drop_all():
                    if job.future.set_running_or_notify_cancel():
                        job.future.set_exception(RuntimeError("The predictions failed."))
