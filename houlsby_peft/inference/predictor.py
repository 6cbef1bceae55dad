"""`Predictor`: an adapter on its base model, with tokenizer and labels, that predicts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import transformers
from peft import PeftModel
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import LARGE_INTEGER

from ..config import HoulsbyConfig
from ..errors import AdapterError
from ..tasks import Task
from .process_state import verbosity
from .question_answering import QuestionAnswering


if TYPE_CHECKING:
    from transformers import Pipeline


# A text, a pair of texts or, for question answering, a question and the text that answers it.
Input = str | tuple[str, str]


class Predictor:
    """An adapter on its base model, ready to predict: what `houlsby_peft.load` returns.

    Args:
        model: the base model with this adapter in it, and maybe others.
        name: the adapter's name in `model`.
        task: what its head does.
        tokenizer: what turns its texts into tokens.
    """

    def __init__(self, model: PeftModel, name: str, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.name = name
        self.task = task
        self.tokenizer = tokenizer

    @property
    def config(self) -> HoulsbyConfig:
        """The adapter's configuration."""
        return self.model.peft_config[self.name]  # type: ignore[return-value]

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes by number; empty where there are none."""
        return tuple(name for _, name in sorted((self.config.id2label or {}).items()))

    def predict(self, inputs: Input | Sequence[Input], batch_size: int = 32) -> list[Any]:
        """Predict for one input or several; longer ones than the model can read are cut.

        Args:
            inputs: texts, pairs of texts or, for question answering, pairs (question, context).
            batch_size: how many to predict at once.

        Returns:
            One result per input: `{"label": ..., "score": ...}` for text classification, where the score is a
            probability or, of a regression, the value; a list of entities for token classification;
            `{"answer": ..., "score": ..., "start": ..., "end": ...}` for question answering.

        Raises:
            AdapterError: There is no pipeline for the task.
        """
        pipeline = self.pipeline()
        several = [inputs] if isinstance(inputs, (str, tuple)) else list(inputs)
        keys = ("question", "context") if self.task.pipeline == "question-answering" else ("text", "text_pair")
        items: list[Any] = [item if isinstance(item, str) else dict(zip(keys, item, strict=True)) for item in several]
        options = cut(self.tokenizer, self.model.config) if self.task.pipeline == "text-classification" else {}
        return list(pipeline(items, batch_size=batch_size, **options)) if items else []

    def pipeline(self, **options: Any) -> Pipeline | QuestionAnswering:
        """A pipeline for this adapter, which stays right when other adapters are put beside this one.

        It is transformers' own, but for question answering, of which transformers 5 has none.

        Args:
            options: further arguments of the pipeline, such as `top_k` or `aggregation_strategy`.

        Raises:
            AdapterError: There is none for the task.
        """
        parts: dict[str, Any] = {"model": self._view(), "tokenizer": self.tokenizer}
        if not getattr(self.model, "hf_device_map", None):  # accelerate has put its modules where they are
            parts["device"] = self.model.device
        # Without the page that transformers logs about models of a class that it does not know, such as PeftModel.
        with verbosity(logging.CRITICAL):
            match self.task.pipeline:
                case "question-answering":
                    return QuestionAnswering(self._view(), self.tokenizer, **options)
                case "token-classification":
                    options.setdefault("aggregation_strategy", "simple")
                    return transformers.pipeline(self.task.pipeline, **parts, **options)
                case "text-classification":
                    return transformers.pipeline(self.task.pipeline, **parts, **options)
        raise AdapterError(
            "Prediction is for text classification, token classification and question answering; this adapter's task "
            f"is {self.task.pipeline}. Use its model and tokenizer."
        )

    def _view(self) -> PeftModel:
        """The model, all modules shared, with this adapter's labels, that makes this adapter active when called."""
        view = copy.copy(self.model)
        view.config = copy.deepcopy(self.model.config)
        for key, value in label_arguments(self.config).items():
            setattr(view.config, key, value)
        view.forward = partial(_forward, self.model, self.name)  # type: ignore[method-assign]
        return view


def cut(tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig) -> dict[str, Any]:
    """The tokenizer's arguments that cut texts to what the model can read; none where no length is known."""
    lengths = (tokenizer.model_max_length, getattr(model_config, "max_position_embeddings", None))
    known = [int(length) for length in lengths if length and length < LARGE_INTEGER]
    return {"truncation": True, "max_length": min(known)} if known else {}


def label_arguments(config: HoulsbyConfig) -> dict[str, Any]:
    """An adapter's labels as transformers' configurations hold them; empty if it has none."""
    if config.id2label is None:
        return {}
    label2id = {name: number for number, name in config.id2label.items()}
    return {"id2label": config.id2label, "label2id": label2id, "problem_type": config.problem_type}


def _forward(model: PeftModel, name: str, *args: Any, **inputs: Any) -> Any:
    if model.active_adapters != [name]:
        model.set_adapter(name, inference_mode=True)
    return model(*args, **inputs)
