"""`TaskBank`: many tasks on one base model, predicted side by side in the same batches."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import AdapterError, check_bytes, check_count, shortened
from .adapter_list import check_threshold
from .base_model import count_tokens
from .held_adapters import Entry, HeldAdapter, HeldAdapters, list_files
from .padding import can_pad, check_lengths, stack
from .predictor import Input, check_inputs, explain_prediction_errors, represent
from .readers import Row


# Tasks that `warm_up` predicts in one batch.
_WARM_UP_TASKS = 32
# Tasks that an error names.
_MOST_NAMED = 10


class TaskBank:
    """One base model and any number of adapters, each with its own head.

    Tasks may be text classification with one or several labels, regression, token classification, question answering
    and embeddings. Each input of a batch may belong to a different task: those with the same kind of head go through
    the base model together. An adapter is loaded when its task is first requested. All methods may be called from
    several threads, which take turns batch by batch.

    Args:
        adapters: The tasks, each with the folder or the name on the Hub of its adapter.
        base_model: The base model, or its name or folder, in place of the one that the first adapter names. A model
            serves the tasks with its kind of head; those of other kinds load the one that they name.
        max_bytes: Memory that the adapters' weights may take, in bytes. Beyond it, the least recently used ones are
            dropped. The adapters of one batch are always held together. The first adapter that is loaded for each kind
            of head always stays, and is not counted.
        token: Access token for private repositories. Default: the one that `hf auth login` or HF_TOKEN has set.
        device: Where to put the model. Default: where it is; the CPU for a new one.
        dtype: Dtype of the base model. Default: as in its files.
        revisions: The revisions of tasks on the Hub: a branch, tag or commit each. Default: the latest versions. A
            task keeps the commit that it was loaded from until `reload`.
        thresholds: The least score of a class, for tasks of text classification. With several labels, the result is
            the list of all labels that reach it. With one, `label` is None if the best class does not reach it.

    Raises:
        ValueError: `adapters` is not a dict from tasks to adapters, `max_bytes` is not a number of bytes, a threshold
            is not between 0 and 1, or a revision or a threshold is for an unknown task.
    """

    def __init__(
        self,
        adapters: Mapping[str, str | os.PathLike[str]],
        *,
        base_model: PreTrainedModel | str | None = None,
        max_bytes: int = 2 * 10**9,
        token: str | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        revisions: Mapping[str, str] | None = None,
        thresholds: Mapping[str, float] | None = None,
    ) -> None:
        if not isinstance(adapters, Mapping) or not all(isinstance(task, str) for task in adapters):
            raise ValueError(
                "TaskBank needs a dict from the names of tasks to the folders of their adapters, or to their names on "
                f"the Hub; got {shortened(repr(adapters))}."
            )
        check_bytes("max_bytes", max_bytes)
        revisions, thresholds = revisions or {}, thresholds or {}
        for name, given in (("revisions", revisions), ("thresholds", thresholds)):
            if unknown := sorted(set(given) - set(adapters)):
                raise ValueError(f"{name} must be for tasks of adapters; got {shortened(', '.join(unknown))}.")
        self._entries = {
            task: _make_entry(task, source, revisions.get(task), thresholds.get(task))
            for task, source in adapters.items()
        }
        self._held = HeldAdapters(max_bytes, base_model, token, device, dtype)
        # The requests that are running, by entry. An entry that was replaced is dropped after the last of them.
        self._running: Counter[Entry] = Counter()
        # Held during a batch and while an adapter is loaded.
        self._lock = threading.Lock()
        # Held briefly while entries and running requests change. It may be acquired within the other lock.
        self._entries_lock = threading.Lock()

    def __repr__(self) -> str:
        return represent(self, {"tasks": self.tasks, "held": self.held, "nbytes": self._held.nbytes})

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks that can be requested."""
        with self._entries_lock:
            return tuple(self._entries)

    @property
    def held(self) -> tuple[str, ...]:
        """The tasks whose adapters are in memory, the least recently used one first."""
        with self._lock:
            return tuple(entry.task for entry in self._held)

    def predict(
        self,
        requests: Iterable[tuple[str, Input]],
        batch_size: int = 32,
        top_k: int | Sequence[int | None] | None = None,
    ) -> list[Any]:
        """Predict each input for its task.

        Args:
            requests: Pairs of a task and an input: a text, a pair of texts or, for question answering, a pair
                (question, context). Texts are cut as `Predictor.predict` does.
            batch_size: Number of requests that are predicted at once.
            top_k: As for `Predictor.predict`; or one for each request. Classes below a task's threshold are left out.

        Returns:
            One result per request, in their order, as `Predictor.predict` gives it and as the task's threshold, if it
            has one, changes it.

        Raises:
            AdapterError: A task is unknown, its adapter's files are damaged or for another base model, its kind of
                task is none of those above, or its outputs are not finite.
            HubError: A repository does not exist, is private or cannot be reached.
            ValueError: A request is not a task and an input of its kind, `batch_size` is not a number of requests, or
                `top_k` is not a number of classes or is for a task without classes.
        """
        check_count("batch_size", batch_size)
        several = list(requests)
        if wrong := [each for each in several if not (isinstance(each, (tuple, list)) and len(each) == 2)]:
            raise ValueError(f"Each request must be a pair of a task and its input; got {shortened(repr(wrong[0]))}.")
        check_inputs([text for _, text in several], "text-classification")
        limits = [top_k] * len(several) if top_k is None or isinstance(top_k, int) else list(top_k)
        if len(limits) != len(several):
            raise ValueError(f"top_k must be one number, or one per request; got {len(limits)} for {len(several)}.")
        with self._run([task for task, _ in several]) as entries:
            batch = [(entry, text, limit) for entry, (_, text), limit in zip(entries, several, limits, strict=True)]
            results = []
            for start in range(0, len(batch), batch_size):
                results += self._predict_batch(batch[start : start + batch_size], batch_size)
            return results

    def add(
        self,
        task: str,
        source: str | os.PathLike[str],
        revision: str | None = None,
        threshold: float | None = None,
        replace: bool = False,
    ) -> None:
        """Add a task. Its adapter is loaded at once, so that one that cannot be used is refused here.

        Args:
            task: The task.
            source: The folder of its adapter, or its name on the Hub.
            revision: A branch, tag or commit of the repository. Default: the latest version.
            threshold: See `TaskBank`.
            replace: Whether a task of this name gets the new adapter. Requests that are running keep the old one.

        Raises:
            AdapterError: The adapter cannot be loaded, or there is such a task and `replace` is not set.
            HubError: The repository does not exist, is private or cannot be reached.
            ValueError: An argument is not of the kind described above.
        """
        if not isinstance(task, str) or not task:
            raise ValueError(f"The name of a task must be a text; got {shortened(repr(task))}.")
        if task in self.tasks and not replace:
            raise AdapterError(
                f"The name of a task must be new to the bank; got {task!r}. Give replace=True to replace its adapter."
            )
        self._load(_make_entry(task, source, revision, threshold))

    def remove(self, task: str) -> None:
        """Remove a task and free its adapter's memory. Requests that are running get their results.

        Raises:
            AdapterError: There is no such task.
        """
        with self._entries_lock:
            self._find([task])
            entry = self._entries.pop(task)
        self._drop_if_unused(entry)

    def reload(self, task: str) -> bool:
        """Load a task's adapter again if its files have changed: those in its folder, or those of its revision.

        Requests that are running keep the old adapter. If the new one cannot be loaded, the old one stays.

        Returns:
            Whether there was anything new.

        Raises:
            AdapterError: There is no such task, or the new adapter cannot be loaded.
            HubError: The repository does not exist, is private or cannot be reached.
        """
        with self._entries_lock:
            old = self._find([task])[0]
        new = Entry(task, old.source, old.revision, old.threshold)
        files = list_files(new.find(self._held.token))
        with self._lock:
            if self._held.files(old) == files:
                return False
        self._load(new)
        return True

    def warm_up(self, tasks: Iterable[str] | None = None) -> None:
        """Load adapters and predict an example with each, so that the first requests need not wait.

        If `max_bytes` is too little for all of them, the last ones stay.

        Args:
            tasks: The tasks. Default: all of them.

        Raises:
            AdapterError: A task is unknown, or its adapter cannot be used.
            HubError: A repository does not exist, is private or cannot be reached.
        """
        wanted = self.tasks if tasks is None else tuple(tasks)
        for start in range(0, len(wanted), _WARM_UP_TASKS):
            with self._run(wanted[start : start + _WARM_UP_TASKS]) as entries:
                self._predict_batch([(entry, None, None) for entry in entries], _WARM_UP_TASKS)

    def _find(self, tasks: Sequence[str]) -> list[Entry]:
        if unknown := sorted({str(task) for task in tasks} - self._entries.keys()):
            known = [*self._entries][:_MOST_NAMED] + (["..."] if len(self._entries) > _MOST_NAMED else [])
            raise AdapterError(
                f"Tasks must be among those of the bank: {', '.join(known)}; got {', '.join(unknown)}. Give TaskBank "
                "their adapters."
            )
        return [self._entries[task] for task in tasks]

    @contextmanager
    def _run(self, tasks: Sequence[str]) -> Iterator[list[Entry]]:
        """Keep the adapters that these tasks have now, within the context, even if they are replaced."""
        with self._entries_lock:
            entries = self._find(tasks)
            used = set(entries)
            self._running.update(used)
        try:
            yield entries
        finally:
            with self._entries_lock:
                self._running.subtract(used)
            for entry in used:
                self._drop_if_unused(entry)

    def _drop_if_unused(self, entry: Entry) -> None:
        """Free the memory of an adapter that was replaced or removed, after the last request that uses it."""
        with self._entries_lock:
            if self._running[entry] > 0:
                return
            del self._running[entry]
            if self._entries.get(entry.task) is entry:
                return
        with self._lock:
            self._held.drop(entry)

    def _load(self, entry: Entry) -> None:
        """Load the adapter of a new entry, and let the entry replace the one of its task."""
        entry.find(self._held.token)  # a download keeps no other thread waiting
        with self._lock:
            adapter = self._held.get([entry])[entry]
            try:
                adapter.reader.check(adapter.reader.example, None, entry.threshold)
            except ValueError:
                self._held.drop(entry)
                raise
            with self._entries_lock:
                old = self._entries.get(entry.task)
                self._entries[entry.task] = entry
        if old is not None:
            self._drop_if_unused(old)

    def _predict_batch(self, batch: Sequence[tuple[Entry, Input | None, int | None]], batch_size: int) -> list[Any]:
        """Predict inputs at once; without an input, an example of the task's kind."""
        # Downloads keep no other thread waiting; `load` finds the files in the cache.
        with self._lock:
            missing = {entry for entry, _, _ in batch}.difference(self._held)
        for entry in missing:
            entry.find(self._held.token)
        with self._lock:
            adapters = self._held.get(entry for entry, _, _ in batch)
            asked = []
            for entry, text, top_k in batch:
                adapter = adapters[entry]
                given = adapter.reader.example if text is None else text
                adapter.reader.check(given, top_k, entry.threshold)
                asked.append((adapter, given, _encode(adapter, given)))
            values = _compute([(adapter, row) for adapter, _, rows in asked for row in rows], batch_size)
        results = []
        for (adapter, text, rows), (entry, _, top_k) in zip(asked, batch, strict=True):
            own = [next(values) for _ in rows]
            results.append(adapter.reader.decode(text, rows, own, top_k, entry.threshold))
        return results


def _make_entry(task: str, source: Any, revision: str | None, threshold: float | None) -> Entry:
    check_threshold(threshold, task)
    return Entry(task, source, revision, threshold)


def _encode(adapter: HeldAdapter, text: Input) -> list[Row]:
    base: PreTrainedModel = adapter.model.get_base_model()  # type: ignore[assignment]
    known = count_tokens(base)
    with explain_prediction_errors(base, adapter.reader.tokenizer):
        rows = adapter.reader.encode(text)
        check_lengths((len(row.inputs["input_ids"]) for row in rows), adapter.reader.task)
        for row in rows:
            largest = max(row.inputs["input_ids"])
            if known is not None and largest >= known:
                raise IndexError(f"token {largest:,}")
    return rows


def _find_group(number: int, adapter: HeldAdapter, row: Row) -> object:
    """Return what the rows that go through a model together have in common. One that cannot be padded goes alone."""
    tokenizer = adapter.reader.tokenizer
    alone = None if can_pad(tokenizer, adapter.model) else number
    return id(adapter.model), tuple(row.inputs), tokenizer.padding_side, alone


@torch.inference_mode()
def _compute(rows: Sequence[tuple[HeldAdapter, Row]], batch_size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Return the outputs of each row, in their order, as `Reader.decode` wants them."""
    # Rows of an adapter stand together, so that they need not be gathered.
    groups: dict[object, list[int]] = {}
    for row in sorted(range(len(rows)), key=lambda row: rows[row][0].reader.name):
        groups.setdefault(_find_group(row, *rows[row]), []).append(row)
    found: dict[int, tuple[torch.Tensor, ...]] = {}
    chunks = (group[i : i + batch_size] for group in groups.values() for i in range(0, len(group), batch_size))
    for chunk in chunks:
        model = rows[chunk[0]][0].model
        readers = [rows[row][0].reader for row in chunk]
        tokenizers = [reader.tokenizer for reader in readers]
        with explain_prediction_errors(model.get_base_model(), *tokenizers):  # type: ignore[arg-type]
            padded = stack(tokenizers[0], [rows[row][1].inputs for row in chunk])
            padded = {key: value.to(model.device) for key, value in padded.items()}
            outputs = model(**padded, adapter_names=[reader.name for reader in readers])
        wanted = [outputs[name].float().cpu() for name in readers[0].outputs]
        for number, row in enumerate(chunk):
            values = tuple(value[number] for value in wanted)
            if readers[0].is_per_token and "attention_mask" in padded:
                mask = padded["attention_mask"][number].bool().cpu()
                values = tuple(value[mask] for value in values)
            found[row] = values
    return (found[row] for row in range(len(rows)))
