"""`TaskBank`: many tasks on one base model, predicted side by side in the same batches."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import DataCollatorWithPadding, PreTrainedModel

from ..config import HoulsbyConfig
from ..errors import AdapterError
from .held_adapters import HeldAdapter, HeldAdapters
from .load import find_folder, load
from .predictor import Input, Predictor, cut


class TaskBank:
    """One base model and any number of adapters for text classification, each with a head of its own.

    The texts of a batch may be of as many tasks: they go through the base model together. An adapter is loaded when
    its task is first asked for. All methods may be called from several threads, which take turns batch by batch.

    Args:
        adapters: the tasks, and the folder or the name on the Hub of the adapter of each.
        base_model: the base model, or its name or folder, in place of the one that the first adapter names.
        max_bytes: how much memory the adapters' weights may take; beyond it, the least recently used ones are
            dropped. The adapters of one batch are always held together; the first one that is loaded always stays,
            and is not counted.
        token: for private repositories. Default: the one that `hf auth login` or HF_TOKEN has set.
        device: where to put the model. Default: where it is, for a new one the CPU.
        dtype: of the base model. Default: as in its files.
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
    ) -> None:
        self._sources = dict(adapters)
        self._options: dict[str, Any] = {"base_model": base_model, "token": token, "device": device, "dtype": dtype}
        self._adapters = HeldAdapters(self._load, max_bytes)
        self._lock = threading.Lock()

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks that can be asked for."""
        return tuple(self._sources)

    @property
    def held(self) -> tuple[str, ...]:
        """The tasks whose adapters are in memory, the least recently used one first."""
        with self._lock:
            return tuple(self._adapters)

    def predict(self, requests: Iterable[tuple[str, Input]], batch_size: int = 32) -> list[dict[str, Any]]:
        """Predict each text for its task; longer ones than the model can read are cut.

        Args:
            requests: pairs of a task and a text, or a pair of texts.
            batch_size: how many to predict at once.

        Returns:
            One `{"label": ..., "score": ...}` per request, in their order, as `Predictor.predict` gives it.

        Raises:
            AdapterError: A task is unknown, or its adapter's files are damaged, for another base model or another
                kind of task.
            HubError: A repository does not exist, is private or cannot be reached.
        """
        several = list(requests)
        unknown = sorted({task for task, _ in several} - self._sources.keys())
        if unknown:
            raise AdapterError(
                f"Tasks must be among those of the bank: {', '.join(self.tasks)}; got {', '.join(unknown)}. Give "
                "TaskBank their adapters."
            )
        results = []
        for start in range(0, len(several), batch_size):
            results += self._predict_batch(several[start : start + batch_size])
        return results

    def _predict_batch(self, batch: Sequence[tuple[str, Input]]) -> list[dict[str, Any]]:
        # Downloads keep no other thread waiting; what is in the cache is found again by `load`.
        for task in {task for task, _ in batch} - set(self.held):
            find_folder(self._sources[task], token=self._options["token"])
        # Rows of a task stand together, so that none have to be gathered.
        order = sorted(range(len(batch)), key=lambda row: batch[row][0])
        with self._lock:
            adapters = self._adapters.get(task for task, _ in batch)
            rows = [(adapters[batch[row][0]], batch[row][1]) for row in order]
            logits = self._logits(rows)
            known = self._adapters.model.config.id2label
        found = {row: _result(logits[i], rows[i][0].config, known) for i, row in enumerate(order)}
        return [found[row] for row in range(len(batch))]

    @torch.inference_mode()
    def _logits(self, rows: Sequence[tuple[HeldAdapter, Input]]) -> torch.Tensor:
        model = self._adapters.model
        collate = DataCollatorWithPadding(rows[0][0].tokenizer)
        inputs = collate([self._encode(adapter, text) for adapter, text in rows])
        inputs = {key: value.to(model.device) for key, value in inputs.items()}
        logits: torch.Tensor = model(**inputs, adapter_names=[adapter.name for adapter, _ in rows]).logits
        return logits.float().cpu()

    def _encode(self, adapter: HeldAdapter, text: Input) -> dict[str, list[int]]:
        texts = (text,) if isinstance(text, str) else text
        return dict(adapter.tokenizer(*texts, **cut(adapter.tokenizer, self._adapters.model.config)))

    def _load(self, task: str, name: str, beside: Predictor | None) -> Predictor:
        predictor = load(self._sources[task], beside=beside, adapter_name=name, **self._options)
        if predictor.task.pipeline != "text-classification":
            raise AdapterError(
                f"The tasks of a bank must be text classification; that of {self._sources[task]} is "
                f"{predictor.task.pipeline}. Use houlsby_peft.load for it."
            )
        return predictor


def _result(logits: torch.Tensor, config: HoulsbyConfig, default_labels: Mapping[int, str]) -> dict[str, Any]:
    """The best class of a row, by transformers' rules; narrower heads than the batch's widest are filled up."""
    labels = config.id2label or default_labels
    own = logits[: len(labels)]
    if config.problem_type == "regression":
        scores = own
    elif config.problem_type == "multi_label_classification" or len(labels) == 1:
        scores = own.sigmoid()
    else:
        scores = own.softmax(-1)
    best = int(scores.argmax())
    return {"label": labels[best], "score": scores[best].item()}
