"""`TaskBank`: many tasks on one base model, predicted side by side in the same batches."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from peft import PeftModel
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from ..batching import forget_batches
from ..config import HoulsbyConfig
from ..errors import AdapterError, check_bytes, check_count, shortened
from ..layer import HoulsbyTunerLayer
from .load import find_folder, load
from .predictor import Input, Predictor, check_inputs, check_logits, cut_arguments, explain_prediction_errors


class TaskBank:
    """One base model and any number of adapters for text classification, each with its own head.

    Each text of a batch may belong to a different task: all of them go through the base model together. An adapter is
    loaded when its task is first requested. All methods may be called from several threads, which take turns batch by
    batch.

    Args:
        adapters: The tasks, each with the folder or the name on the Hub of its adapter.
        base_model: The base model, or its name or folder, in place of the one that the first adapter names.
        max_bytes: Memory that the adapters' weights may take, in bytes. Beyond it, the least recently used ones are
            dropped. The adapters of one batch are always held together. The first adapter that is loaded always
            stays, and is not counted.
        token: Access token for private repositories. Default: the one that `hf auth login` or HF_TOKEN has set.
        device: Where to put the model. Default: where it is; the CPU for a new one.
        dtype: Dtype of the base model. Default: as in its files.

    Raises:
        ValueError: `adapters` is not a dict from tasks to adapters, or `max_bytes` is not a number of bytes.
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
        if not isinstance(adapters, Mapping) or not all(isinstance(task, str) for task in adapters):
            raise ValueError(
                "TaskBank needs a dict from the names of tasks to the folders of their adapters, or to their names on "
                f"the Hub; got {shortened(repr(adapters))}."
            )
        check_bytes("max_bytes", max_bytes)
        self._sources = dict(adapters)
        self._options: dict[str, Any] = {"base_model": base_model, "token": token, "device": device, "dtype": dtype}
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, _HeldAdapter] = OrderedDict()
        self._nbytes = 0
        self._loaded = 0
        self._first: Predictor | None = None
        self._tokenizers: dict[object, PreTrainedTokenizerBase] = {}
        self._lock = threading.Lock()

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks that can be requested."""
        return tuple(self._sources)

    @property
    def held(self) -> tuple[str, ...]:
        """The tasks whose adapters are in memory, the least recently used one first."""
        with self._lock:
            return tuple(self._held)

    def predict(self, requests: Iterable[tuple[str, Input]], batch_size: int = 32) -> list[dict[str, Any]]:
        """Predict each text for its task.

        Args:
            requests: Pairs of a task and a text, or a pair of texts. Texts are cut as `Predictor.predict` does.
            batch_size: Number of requests that are predicted at once.

        Returns:
            One `{"label": ..., "score": ...}` per request, in their order, as `Predictor.predict` gives it.

        Raises:
            AdapterError: A task is unknown, its adapter's files are damaged, for another base model or another kind of
                task, or its logits are not finite.
            HubError: A repository does not exist, is private or cannot be reached.
            ValueError: A request is not a task and its input, or `batch_size` is not a number of requests.
        """
        check_count("batch_size", batch_size)
        several = list(requests)
        if wrong := [each for each in several if not (isinstance(each, (tuple, list)) and len(each) == 2)]:
            raise ValueError(f"Each request must be a pair of a task and its input; got {shortened(repr(wrong[0]))}.")
        check_inputs([text for _, text in several], "text-classification")
        unknown = sorted({str(task) for task, _ in several} - self._sources.keys())
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
        # Downloads keep no other thread waiting; `load` finds the files in the cache.
        for task in {task for task, _ in batch} - set(self.held):
            find_folder(self._sources[task], token=self._options["token"])
        # Rows of a task stand together, so that they need not be gathered.
        order = sorted(range(len(batch)), key=lambda row: batch[row][0])
        with self._lock:
            adapters = self._get(task for task, _ in batch)
            rows = [(adapters[batch[row][0]], batch[row][1]) for row in order]
            logits = self._logits(rows)
            labels_of_base, dtype = self._model.config.id2label, self._model.dtype
        found = {}
        for (adapter, _), own, row in zip(rows, logits, order, strict=True):
            labels = adapter.config.labels or labels_of_base
            # Heads narrower than the widest were filled up.
            own = own[: len(labels)]
            check_logits(own, batch[row][0], dtype)
            found[row] = _best_class(own, adapter.config, labels)
        return [found[row] for row in range(len(batch))]

    @torch.inference_mode()
    def _logits(self, rows: Sequence[tuple[_HeldAdapter, Input]]) -> torch.Tensor:
        model = self._model
        base: PreTrainedModel = model.get_base_model()  # type: ignore[assignment]
        last = (
            len(embeddings.weight) - 1 if isinstance(embeddings := base.get_input_embeddings(), nn.Embedding) else None
        )
        encoded = []
        for adapter, text in rows:
            texts = (text,) if isinstance(text, str) else text
            with explain_prediction_errors(base, adapter.tokenizer):
                cut = cut_arguments(adapter.tokenizer, model.config, adapter.config)
                encoded.append(dict(adapter.tokenizer(*texts, **cut)))
                if last is not None and (token := max(encoded[-1]["input_ids"], default=0)) > last:
                    raise IndexError(f"token {token:,}")
        tokenizers = [adapter.tokenizer for adapter, _ in rows]
        if len({len(row["input_ids"]) for row in encoded}) > 1 and tokenizers[0].pad_token_id is None:
            raise AdapterError(
                f"Texts of different lengths need a tokenizer with a pad_token; that of {tokenizers[0].name_or_path} "
                "has none. Save it again with one, or give batch_size=1."
            )
        with explain_prediction_errors(base, *tokenizers):
            inputs = {
                key: value.to(model.device) for key, value in DataCollatorWithPadding(tokenizers[0])(encoded).items()
            }
            logits: torch.Tensor = model(**inputs, adapter_names=[adapter.name for adapter, _ in rows]).logits
        return logits.float().cpu()

    @property
    def _model(self) -> PeftModel:
        assert self._first is not None
        return self._first.model

    def _get(self, tasks: Iterable[str]) -> dict[str, _HeldAdapter]:
        """Return the adapters of these tasks, all of them in the model.

        Adapters that are requested together are never dropped for each other, even if that takes more memory.
        """
        wanted = dict.fromkeys(tasks)
        for task in wanted:
            if task in self._held:
                self._held.move_to_end(task)
        for task in wanted:
            if task not in self._held:
                self._held[task] = adapter = self._load(task)
                self._nbytes += adapter.nbytes
            self._drop_unused(wanted)
        for task in wanted:
            self._held[task].put_in()
        return {task: self._held[task] for task in wanted}

    def _load(self, task: str) -> _HeldAdapter:
        # While an adapter is loaded, no other is in the model: PEFT visits all modules several times for each, so that
        # the time would grow with the number of adapters held.
        for other in self._held.values():
            other.take_out()
        self._loaded += 1
        predictor = load(self._sources[task], beside=self._first, adapter_name=f"task_{self._loaded}", **self._options)
        if predictor.task.pipeline != "text-classification":
            raise AdapterError(
                f"The tasks of a bank must be text classification; that of {self._sources[task]} is "
                f"{predictor.task.pipeline}. Use houlsby_peft.load for it."
            )
        name = predictor.name
        parts = [(found, found[name]) for found in _mappings(predictor.model) if name in found]
        if self._first is None:
            # It is PEFT's active adapter, without which PEFT loads no other: it never leaves the model.
            self._first, parts = predictor, []
        return _HeldAdapter(name, predictor.config, self._share_tokenizer(predictor.tokenizer), parts)

    def _drop_unused(self, wanted: Iterable[str]) -> None:
        for task, adapter in tuple(self._held.items()):
            if self._nbytes <= self._max_bytes:
                return
            # Dropping the first one, which never leaves the model, would free nothing.
            if task not in wanted and adapter.parts:
                del self._held[task]
                self._nbytes -= adapter.nbytes
                adapter.take_out()
                forget_batches(self._model.get_base_model())

    def _share_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """Return an equal tokenizer if there is one: most adapters bring the base model's, of many megabytes."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return tokenizer
        key = (hashlib.sha256(backend.to_str().encode()).digest(), tokenizer.model_max_length, tokenizer.padding_side)
        return self._tokenizers.setdefault(key, tokenizer)


@dataclass
class _HeldAdapter:
    """An adapter in memory, which may be taken out of its model and put in again.

    Args:
        name: Its name in the model.
        config: Its configuration.
        tokenizer: The tokenizer for its texts.
        parts: What it has in the model, each with the mapping by adapter name that holds it.
    """

    name: str
    config: HoulsbyConfig
    tokenizer: PreTrainedTokenizerBase
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
                mapping[self.name] = part
            self.is_in_model = True

    def take_out(self) -> None:
        """Take it out of the model, if it is there."""
        if self.is_in_model:
            for mapping, _ in self.parts:
                del mapping[self.name]
            self.is_in_model = False


def _mappings(model: PeftModel) -> Iterator[Any]:
    """Yield all mappings of a model by adapter name."""
    yield model.peft_config
    yield model.get_base_model().houlsby_records
    for module in model.modules():
        if isinstance(module, (HoulsbyTunerLayer, AuxiliaryTrainingWrapper)):
            yield from (attrgetter(name)(module) for name in (*module.adapter_layer_names, *module.other_param_names))


def _best_class(logits: torch.Tensor, config: HoulsbyConfig, labels: Mapping[int, str]) -> dict[str, Any]:
    """Return the best class of a row by transformers' rules."""
    if config.kind_of_problem == "regression":
        scores = logits
    elif config.kind_of_problem == "multi_label_classification" or len(labels) == 1:
        scores = logits.sigmoid()
    else:
        scores = logits.softmax(-1)
    best = int(scores.argmax())
    return {"label": labels[best], "score": scores[best].item()}
