"""`Predictor`: an adapter on its base model, with tokenizer and labels."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import LARGE_INTEGER

from ..config import HoulsbyConfig
from ..errors import AdapterError, check_count, shortened
from ..heads.tasks import Task
from .base_model import count_positions, count_tokens, is_from_libraries, label_arguments
from .embedding import Embedding
from .padding import can_pad, check_lengths
from .process_state import set_verbosity
from .question_answering import QuestionAnswering
from .tagging import TagPipeline


if TYPE_CHECKING:
    from transformers import Pipeline


# A text, a pair of texts or, for question answering, a question and the text that answers it.
Input = str | tuple[str, str]
# Outputs of a model that results are computed from.
_OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
# Elements of a tuple that a `repr` shows.
_MOST_SHOWN = 6


class Predictor:
    """An adapter on its base model, ready to predict: what `houlsby_peft.load` returns.

    Each call names its adapter, so that predictors on one base model may run in several threads. The model's active
    adapter and what trains in it stay as they are.

    Args:
        model: The base model with this adapter and possibly others, in evaluation mode.
        name: The adapter's name in `model`.
        task: What its head does.
        tokenizer: The tokenizer for its texts.
    """

    def __init__(self, model: PeftModel, name: str, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.name = name
        self.task = task
        self.tokenizer = tokenizer

    @property
    def base_model(self) -> PreTrainedModel:
        """The base model."""
        return self.model.get_base_model()  # type: ignore[return-value]

    @property
    def config(self) -> HoulsbyConfig:
        """The adapter's configuration."""
        return self.model.peft_config[self.name]  # type: ignore[return-value]

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes by number; empty if there are none."""
        return tuple(name for _, name in sorted((self.config.labels or {}).items()))

    def __repr__(self) -> str:
        facts = {
            "name": self.name,
            "task": self.config.kind_of_problem or self.task.pipeline,
            "labels": self.labels,
            "r": self.config.r,
            "base_model": self.base_model.name_or_path or type(self.base_model).__name__,
            "device": str(self.model.device),
            "dtype": self.model.dtype,
        }
        return represent(self, facts)

    def predict(self, inputs: Input | Sequence[Input], batch_size: int = 32, top_k: int | None = None) -> list[Any]:
        """Predict for one input or several.

        Texts are cut to the length that the adapter was trained with, and to what the model can read. For token
        classification they are read in parts of that length, so that every word gets a tag.

        Args:
            inputs: Texts, pairs of texts or, for question answering, pairs (question, context).
            batch_size: Number of inputs that are predicted at once.
            top_k: For text classification, the number of classes to return for each input. A number that is at least
                that of the classes gives them all. Default: the best class by itself, not in a list.

        Returns:
            One result per input. For text classification, `{"label": ..., "score": ...}`, or a list of these with
            `top_k`, the highest score first; the score is a probability or, for a regression, the value. For token
            classification, a list of entities. For question answering, `{"answer": ..., "score": ..., "start": ...,
            "end": ...}`. For an adapter without a head, a vector (see `Embedding`).

        Raises:
            AdapterError: There is no pipeline for the task, the model is in training mode, the logits are not finite,
                or the tokenizer does not fit the base model.
            ValueError: An input is neither a text nor a pair of texts, `batch_size` is not a number of inputs, or
                `top_k` is not a number of classes or the adapter chooses among no classes.
        """
        check_count("batch_size", batch_size)
        pipeline = self.pipeline()
        check_top_k(top_k, self.task.pipeline, self.config)
        several = check_inputs([inputs] if isinstance(inputs, (str, tuple)) else inputs, self.task.pipeline)
        keys = ("question", "context") if self.task.pipeline == "question-answering" else ("text", "text_pair")
        items: list[Any] = [item if isinstance(item, str) else dict(zip(keys, item, strict=True)) for item in several]
        options: dict[str, Any] = {}
        match self.task.pipeline:
            case "text-classification":
                options = cut_arguments(self.tokenizer, self.model, self.config)
                options |= {} if top_k is None else {"top_k": top_k}
                # As a batch of one, because tokenizers take a single pair whose second text is empty for one text.
                items = [
                    item if isinstance(item, str) else {key: [text] for key, text in item.items()} for item in items
                ]
            case "feature-extraction":
                items = list(several)
        if not can_pad(self.tokenizer, self.base_model):
            batch_size = 1
        with explain_prediction_errors(self.base_model, self.tokenizer):
            return list(pipeline(items, batch_size=batch_size, **options)) if items else []

    def pipeline(self, **options: Any) -> Pipeline | QuestionAnswering | Embedding:
        """Return a pipeline for this adapter, which stays valid when other adapters are loaded beside it.

        It is a pipeline of transformers, except for question answering, for which transformers 5 has none, and for
        embeddings.

        Args:
            options: Further arguments of the pipeline, such as `top_k` or `aggregation_strategy`.

        Raises:
            AdapterError: There is none for the task, or the model is in training mode.
        """
        if self.model.training:  # a pipeline would switch it to evaluation
            raise AdapterError(
                "A model must be in evaluation mode to predict; this one is in training mode. Call model.eval() first."
            )
        parts: dict[str, Any] = {"model": self._view(), "tokenizer": self.tokenizer}
        if not getattr(self.model, "hf_device_map", None):  # else accelerate has placed its modules
            parts["device"] = self.model.device
        # Quietly, because transformers logs a page about classes of models that it does not know, such as PeftModel.
        with set_verbosity(logging.CRITICAL):
            match self.task.pipeline:
                case "question-answering":
                    record = self.config.record
                    if record is not None:
                        options = {"max_length": record.max_length, "null_threshold": record.null_threshold} | options
                    return QuestionAnswering(self._view(), self.tokenizer, **options)
                case "feature-extraction":
                    cut = cut_arguments(self.tokenizer, self.model, self.config)
                    return Embedding(self._view(), self.tokenizer, **{"cut": cut, **options})
                case "token-classification":
                    options.setdefault("aggregation_strategy", "first" if self.tokenizer.is_fast else "simple")
                    length = cut_arguments(self.tokenizer, self.model, self.config).get("max_length")
                    if length and self.tokenizer.is_fast and options["aggregation_strategy"] != "none":
                        parts["tokenizer"] = copy.deepcopy(self.tokenizer)
                        parts["tokenizer"].model_max_length = length
                        # The parts of a text are padded to equal length. Any token will do, as padding is masked.
                        if self.tokenizer.pad_token_id is None:
                            parts["tokenizer"].pad_token = next(iter(self.tokenizer.all_special_tokens), None)
                        options.setdefault("stride", 0)
                    return transformers.pipeline(self.task.pipeline, pipeline_class=TagPipeline, **parts, **options)
                case "text-classification":
                    return transformers.pipeline(self.task.pipeline, **parts, **options)
        raise AdapterError(
            "Prediction is for text classification, token classification, question answering and embeddings; this "
            f"adapter's task is {self.task.pipeline}. Use its model and tokenizer."
        )

    def _view(self) -> PeftModel:
        """Return the model, with all modules shared, whose calls name this adapter and that has its labels."""
        view = copy.copy(self.model)
        view.config = copy.deepcopy(self.model.config)
        for key, value in label_arguments(self.config).items():
            setattr(view.config, key, value)
        view.forward = partial(_forward, self.model, self.name)  # type: ignore[method-assign]
        return view


def cut_arguments(tokenizer: PreTrainedTokenizerBase, model: nn.Module, config: HoulsbyConfig) -> dict[str, Any]:
    """Return the tokenizer's arguments that cut texts to the adapter's length; empty if no length is known."""
    recorded = config.record.max_length if config.record else None
    lengths = (recorded, tokenizer.model_max_length, count_positions(model))
    known = [int(length) for length in lengths if length and length < LARGE_INTEGER]
    return {"truncation": True, "max_length": min(known)} if known else {}


def check_top_k(top_k: object, pipeline: str, config: HoulsbyConfig) -> None:
    """Check the number of classes that are asked for.

    Raises:
        ValueError: It is neither None nor a whole number of at least 1, or the adapter chooses among no classes.
    """
    if top_k is None:
        return
    check_count("top_k", top_k)
    if pipeline != "text-classification" or config.kind_of_problem == "regression":
        raise ValueError(
            f"top_k is for text classification; this adapter's task is {config.kind_of_problem or pipeline}. Leave it "
            "out."
        )


def represent(value: object, facts: Mapping[str, Any]) -> str:
    """Return a `repr` of named facts; of a long tuple, the first elements and their number."""
    texts = []
    for name, fact in facts.items():
        text = repr(fact)
        if isinstance(fact, tuple) and len(fact) > _MOST_SHOWN:
            text = f"({', '.join(map(repr, fact[:_MOST_SHOWN]))}, ... {len(fact):,} in all)"
        texts.append(f"{name}={text}")
    return f"{type(value).__name__}({', '.join(texts)})"


def check_inputs(inputs: Any, pipeline: str) -> list[Input]:
    """Return the inputs of a prediction as a list.

    Args:
        inputs: What the user gave.
        pipeline: The name of the task's pipeline.

    Raises:
        ValueError: One of them is not of the kind that the task needs.
    """
    several = list(inputs) if isinstance(inputs, Iterable) and not isinstance(inputs, (Mapping, bytes)) else [inputs]
    rules = {"question-answering": "a pair (question, context)", "token-classification": "a text"}
    rule = rules.get(pipeline, "a text or a pair of texts")
    for item in several:
        is_pair = isinstance(item, (tuple, list)) and len(item) == 2 and all(isinstance(text, str) for text in item)
        if not ((is_pair and "pair" in rule) or (isinstance(item, str) and pipeline != "question-answering")):
            raise ValueError(f"Each input must be {rule}; got {shortened(repr(item))}.")
        try:
            "".join(item).encode()
        except UnicodeEncodeError:
            raise ValueError(f"Each input must be text that UTF-8 can hold; got {shortened(ascii(item))}.") from None
    return several


@contextmanager
def explain_prediction_errors(base: PreTrainedModel, *tokenizers: PreTrainedTokenizerBase) -> Iterator[None]:
    """Explain errors of a tokenizer that is malformed, or whose tokens or lengths the base model does not know.

    Raises:
        AdapterError: The block raised such an error. Others pass unchanged.
    """
    try:
        yield
    except BaseException as error:
        is_of_tokenizer = isinstance(error, RecursionError) or any(
            words in str(error) for words in ("must match", "have a padding token")
        )
        if not is_from_libraries(error) or (
            isinstance(error, (ValueError, OSError, RuntimeError)) and not is_of_tokenizer
        ):
            raise
        number, length = count_tokens(base), count_positions(base)
        known = "its tokens" if number is None else f"{number:,} tokens"
        names = ", ".join(dict.fromkeys(str(tokenizer.name_or_path) for tokenizer in tokenizers))
        raise AdapterError(
            f"The tokenizer of {names} must fit the base model {base.name_or_path}, which knows {known}"
            f"{f' and reads {length:,} at once' if length else ''}; predicting failed with "
            f"{shortened(f'{type(error).__name__}: {error}')}. Use the tokenizer that the adapter was trained with."
        ) from error


def _forward(model: PeftModel, name: str, *args: Any, **inputs: Any) -> Any:
    tensors = (value for value in (*args, *inputs.values()) if isinstance(value, torch.Tensor) and value.dim())
    rows = next((len(tensor) for tensor in tensors), 1)
    if "input_ids" in inputs:
        tokens = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        check_lengths(tokens.sum(-1).tolist(), name)
    outputs = model(*args, **inputs, adapter_names=[name] * rows)
    for key in _OUTPUTS:
        if key in outputs:
            check_logits(outputs[key], name, model.dtype)
    return outputs


def check_logits(logits: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    """Refuse to turn logits into a label or an answer if they are not finite.

    Raises:
        AdapterError: They are not.
    """
    if not logits.isfinite().all():
        raise AdapterError(
            f"The logits of an adapter must be finite; those of {name!r} are NaN or infinite on a base model in "
            f"{dtype}. Load it with dtype=torch.float32, or train it again."
        )
