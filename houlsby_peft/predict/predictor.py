"""`Predictor`: an adapter on its base model, with tokenizer and labels, and how it gets there."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import transformers
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import HoulsbyConfig
from ..errors import AdapterError
from ..heads.tasks import TaskKind
from ..method.tuner_layer import record_of
from ..saved.record import AdapterRecord
from .base_model import label_arguments, set_verbosity
from .forward import Batcher, run_batch, split
from .graphs import use_graphs
from .questions import Input, Question
from .readers import READERS, Reader


if TYPE_CHECKING:
    from transformers import Pipeline


class Predictor:
    """An adapter on its base model, ready to predict: what `houlsby_peft.load` returns.

    Each call names its adapter, so that predictors on one base model may run in several threads.
    The model's active adapter and what trains in it stay as they are.

    Args:
        model: The base model with this adapter and possibly others, in evaluation mode.
        name: The adapter's name in `model`.
        task: What its head does.
        tokenizer: The tokenizer for its texts.
        compile: Whether a GPU repeats the model's layers as CUDA graphs, which takes less of the
            CPU. A graph is captured for each size of batches: rows are filled up to a power of two
            or a multiple of 8, and texts to a multiple of 32 tokens. It is for all adapters of the
            model.
    """

    def __init__(
        self,
        model: PeftModel,
        name: str,
        task: TaskKind,
        tokenizer: PreTrainedTokenizerBase,
        compile: bool = False,
    ) -> None:
        self.model = model
        self.name = name
        self.task = task
        self.tokenizer = tokenizer
        self.compile = compile
        if compile:
            use_graphs(model)

    @property
    def base_model(self) -> PreTrainedModel:
        """The base model."""
        return self.model.get_base_model()  # type: ignore[return-value]

    @property
    def config(self) -> HoulsbyConfig:
        """The adapter's configuration."""
        return self.model.peft_config[self.name]  # type: ignore[return-value]

    @property
    def record(self) -> AdapterRecord:
        """What is recorded of the adapter."""
        return record_of(self.model, self.name)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes by number; empty if there are none."""
        return tuple(name for _, name in sorted((self.record.id2label or {}).items()))

    def reader(self, called: str | None = None, **options: Any) -> Reader:
        """Return what encodes this adapter's inputs and decodes its outputs.

        `called` is the adapter's name in errors, by default its own; `options` are those of
        `predict`.
        """
        called = called or self.name
        reader = find_reader(self.task, called)
        if reader.needs_spans and not self.tokenizer.is_fast:
            raise AdapterError(
                "Token classification and question answering are predicted with a fast tokenizer, "
                f"which tells where each token is; the task of {called!r} is {self.task.pipeline}, "
                f"with a {type(self.tokenizer).__name__}. Use its model and tokenizer."
            )
        made = reader(self.model, self.name, self.tokenizer, self.task, called, **options)
        made.fills_up = self.compile
        return made

    def predict(
        self,
        inputs: Input | Iterable[Input],
        batch_size: int = 32,
        top_k: int | None = None,
        **options: Any,
    ) -> list[Any]:
        """Predict for one input or several.

        Texts are cut to the length that the adapter was trained with, and to what the model can
        read. For token classification they are read in parts of that length, so that every word
        gets a tag.

        Args:
            inputs: Texts, pairs of texts or, for question answering, pairs (question, context).
            batch_size: Number of inputs that are predicted at once.
            top_k: For text classification, the number of classes to return for each input. A number
                that is at least that of the classes gives them all. Default: the best class by
                itself, not in a list.
            options: For question answering, the tokens of a window (`max_length`), those that two
                windows share (`stride`, 128) and those of an answer at most (`max_answer_length`,
                30), and by how much no answer must score higher than the best one to be chosen
                (`null_threshold`). Default: as in training.

        Returns:
            One result per input, of plain texts and numbers. For text classification, a
            `ClassPrediction`, or with `top_k` a list of these, the highest score first. With
            several labels per text, it is the list of those that reach their thresholds, which
            training has recorded, or 0.5. For token classification, a list of `EntityPrediction`.
            For question answering, an `AnswerPrediction`; if none is given, its score is the
            probability of that. For an adapter without a head, a vector: the mean of the tokens'
            last hidden states.

        Raises:
            AdapterError: Nothing can be predicted for the task, the outputs are not finite, or the
                tokenizer does not fit the base model.
            ValueError: An input is not of the task's kind or has no text, `top_k` is not a number
                of classes or the adapter chooses among no classes, or the model is in training
                mode.
        """
        reader = self.reader(**options)
        several: Any = inputs
        if isinstance(inputs, (str, tuple)) or not isinstance(inputs, Iterable):
            several = [inputs]
        elif hasattr(inputs, "keys"):
            raise ValueError(
                "Inputs must be a text, a pair or a list of these; got a table or mapping, whose "
                "names would be predicted. Give one of its columns, such as data['text']."
            )
        results: list[Any] = []
        for texts in split(list(several), batch_size):
            questions = [Question(text, top_k=top_k) for text in texts]
            for question in questions:
                reader.read(question)
            rows = [row for question in questions for row in question.rows]
            for batch in Batcher(rows, batch_size):
                run_batch(batch)
            results += map(reader.answer, questions)
        return results

    def pipeline(self, **options: Any) -> Pipeline:
        """Return the pipeline of transformers for this adapter, which stays valid when others are
        loaded beside it.

        It cuts no texts by itself. Transformers 5 has none for question answering.

        Args:
            options: Further arguments of the pipeline, such as `top_k` or `aggregation_strategy`.

        Raises:
            AdapterError: The model is in training mode.
        """
        if self.model.training:
            raise AdapterError(
                "A pipeline would switch the model, which is in training mode, to evaluation. Call "
                "model.eval() first."
            )
        view = copy.copy(self.model)  # with all modules shared
        view.config = copy.deepcopy(self.model.config)
        for key, value in label_arguments(self.record).items():
            setattr(view.config, key, value)
        view.forward = partial(_forward, self.model, self.name)  # type: ignore[method-assign]
        # Where accelerate has placed the modules, they stay.
        device = {} if getattr(self.model, "hf_device_map", None) else {"device": self.model.device}
        # Quietly, because transformers logs a page about classes of models that it does not know,
        # such as PeftModel.
        with set_verbosity(logging.CRITICAL):
            return transformers.pipeline(  # type: ignore[call-overload,no-any-return]
                self.task.pipeline, model=view, tokenizer=self.tokenizer, **device, **options
            )


def find_reader(task: TaskKind, called: str) -> type[Reader]:
    """Return what reads the inputs of a task; the adapter's name stands in the error."""
    if task.pipeline not in READERS:
        raise AdapterError(
            "Prediction is for text classification, embeddings, token classification and question "
            f"answering; the task of {called!r} is {task.pipeline}. Use its model and tokenizer."
        )
    return READERS[task.pipeline]


def _forward(model: PeftModel, name: str, **inputs: Any) -> Any:
    return model(**inputs, adapter_names=[name] * len(inputs["input_ids"]))
