"""`WatchedBank`: a `TaskBank` that follows its list of adapters, and answers each request for itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AdapterError, HubError, shortened
from .adapter_list import Listed, read_adapters
from .held_adapters import Files, list_files
from .predictor import Input
from .task_bank import TaskBank


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Query:
    """A row of a request.

    Args:
        task: The task.
        input: The input.
        top_k: See `Predictor.predict`.
    """

    task: str
    input: Input
    top_k: int | None = None


@dataclass(frozen=True)
class Refusal:
    """Why a request gets no predictions.

    Args:
        status: The status of HTTP.
        rule: The rule that it breaks, and how to correct it.
        row: The row that breaks the rule; None if it is no row.
    """

    status: int
    rule: str
    row: int | None = None


class WatchedBank:
    """The tasks of a folder or list of adapters, in a `TaskBank`.

    Adapters that cannot be loaded are recorded and refused on request; the others are served.

    Args:
        adapters: See `read_adapters`.
        batch_size: Number of rows that are predicted at once.
        options: Further arguments of `TaskBank`.

    Raises:
        AdapterError: The folder or list is not valid, or has no adapter.
    """

    def __init__(self, adapters: str, batch_size: int = 32, **options: Any) -> None:
        self._path = adapters
        self._batch_size = batch_size
        self._listed = read_adapters(adapters)
        # What the bank serves, which differs from the list where an adapter cannot be loaded.
        self._served = dict(self._listed)
        self._files = {task: _list_files(listed) for task, listed in self._listed.items()}
        # Why tasks cannot be loaded, and why the list cannot be read.
        self._failed: dict[str, str] = {}
        self._problem: str | None = None
        self._bank = TaskBank(
            {task: listed.source for task, listed in self._listed.items()},
            revisions={task: listed.revision for task, listed in self._listed.items() if listed.revision},
            thresholds={
                task: listed.threshold for task, listed in self._listed.items() if listed.threshold is not None
            },
            **options,
        )
        for number, task in enumerate(self._bank.tasks):
            if len(self._bank.held) + len(self._failed) < number:
                break  # more would only drop what was loaded
            self._try(task, lambda task=task: self._bank.warm_up([task]))
        for task in self._failed:  # else every request would try to load it again
            self._bank.remove(task)
            del self._served[task]

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks of the list, in its order."""
        return tuple(self._listed)

    def status(self) -> dict[str, Any]:
        """Return the number of tasks, those whose adapter cannot be loaded, and what is wrong with the list."""
        return {
            "tasks": len(self._listed),
            "in_memory": len(self._bank.held),
            "failed": dict(self._failed),
            "list": self._problem or "ok",
        }

    def refresh(self) -> None:
        """Read the folder or list again: add, replace and remove tasks as it says, and reload changed files.

        What cannot be loaded is recorded. A task whose new adapter cannot be loaded keeps its old one.
        """
        try:
            listed = read_adapters(self._path)
        except (AdapterError, OSError) as error:
            self._problem = str(error)
            return
        self._problem = None
        for task in self._listed.keys() - listed.keys():
            if task in self._bank.tasks:
                self._bank.remove(task)
            for known in (self._failed, self._files, self._served):
                known.pop(task, None)
        for task, new in listed.items():
            files = _list_files(new)
            # An adapter on the Hub is tried again each time, as the network may be back.
            again = files is None and task in self._failed
            if self._listed.get(task) == new and self._files.get(task) == files and not again:
                continue
            self._files[task] = files
            self._try(task, lambda task=task, new=new: self._serve(task, new))
        self._listed = listed

    def answer(self, requests: Sequence[Sequence[Query]]) -> list[list[Any] | Refusal]:
        """Return the predictions of each request, or why it is refused. No request fails because of another one."""
        known = self._bank.tasks
        answers: dict[int, list[Any] | Refusal] = {}
        for number, rows in enumerate(requests):
            unknown = next((row for row, query in enumerate(rows) if query.task not in known), None)
            if unknown is not None:
                answers[number] = self._refuse_unknown(rows[unknown].task, unknown)
        valid = [number for number in range(len(requests)) if number not in answers]
        flat = [query for number in valid for query in requests[number]]
        try:
            found = iter(
                self._bank.predict(
                    [(query.task, query.input) for query in flat],
                    batch_size=self._batch_size,
                    top_k=[query.top_k for query in flat],
                )
            )
            answers |= {number: [next(found) for _ in requests[number]] for number in valid}
        except Exception as error:
            # One row is wrong. The halves are tried by themselves, down to that row.
            if len(valid) > 1:
                half = len(valid) // 2
                for part in (valid[:half], valid[half:]):
                    own = self.answer([requests[number] for number in part])
                    answers |= dict(zip(part, own, strict=True))
            elif len(flat) > 1:
                alone = [self.answer([[query]])[0] for query in flat]
                wrong = next((row for row, each in enumerate(alone) if isinstance(each, Refusal)), None)
                answers[valid[0]] = (
                    [each[0] for each in alone if not isinstance(each, Refusal)]
                    if wrong is None
                    else Refusal(alone[wrong].status, alone[wrong].rule, wrong)  # type: ignore[union-attr]
                )
            else:
                answers[valid[0]] = _refuse(error)
        return [answers[number] for number in range(len(requests))]

    def _serve(self, task: str, listed: Listed) -> None:
        if self._served.get(task) == listed:
            self._bank.reload(task)
        else:
            self._bank.add(task, listed.source, listed.revision, listed.threshold, replace=True)
            self._served[task] = listed

    def _refuse_unknown(self, task: str, row: int) -> Refusal:
        if task in self._failed:
            return Refusal(500, f"The adapter of task {task!r} cannot be loaded; GET /health says why.", row)
        return Refusal(404, f"task must be one of GET /tasks; got {shortened(repr(task))}.", row)

    def _try(self, task: str, load: Any) -> None:
        try:
            load()
            self._failed.pop(task, None)
        except Exception as error:  # whatever is wrong with one adapter, the others are served
            self._failed[task] = shortened(str(error) or type(error).__name__)
            _LOG.warning("The adapter of task %r cannot be loaded. %s", task, self._failed[task])


def _list_files(listed: Listed) -> Files | None:
    """Return the files of an adapter in a folder; None for one on the Hub."""
    folder = Path(listed.source)
    return list_files(folder) if folder.is_dir() else None


def _refuse(error: Exception) -> Refusal:
    """Return what is wrong with a single row."""
    if isinstance(error, (AdapterError, HubError)):
        return Refusal(500, str(error), 0)
    if isinstance(error, ValueError):
        return Refusal(422, str(error), 0)
    _LOG.error("A prediction failed.", exc_info=error)
    return Refusal(500, "The prediction failed; the log of the service says why.", 0)
