"""What lies before and after a forward pass: from an input to rows of the model, and from its outputs to a result.

There is one class per kind of task. The forward pass itself is left to the caller, so that it can hold rows of many
adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from transformers.pipelines.token_classification import AggregationStrategy

from .padding import encode
from .predictor import Input, Predictor, check_inputs, check_logits, check_top_k, cut_arguments
from .question_answering import QuestionAnswering
from .tagging import TagPipeline


@dataclass
class Row:
    """A row of the model's inputs.

    Args:
        inputs: The inputs, without padding.
        more: What the result needs to know of the row's tokens.
    """

    inputs: dict[str, list[int]]
    more: Any = field(default=None, repr=False)


class Reader:
    """Reads the inputs of one adapter and computes its results.

    Args:
        predictor: The adapter.
        task: What the bank calls its task.

    Attributes:
        outputs: The names of the model's outputs that results are computed from.
        is_per_token: Whether these have a value per token.
        example: An input of the kind that the task needs.
    """

    outputs: ClassVar[tuple[str, ...]] = ("logits",)
    is_per_token: ClassVar[bool] = False
    example: ClassVar[Input] = "An example."

    def __init__(self, predictor: Predictor, task: str) -> None:
        self.name = predictor.name
        self.task = task
        self.config = predictor.config
        self.tokenizer = predictor.tokenizer
        self.pipeline = predictor.task.pipeline
        self.dtype = predictor.model.dtype
        self.labels = self.config.labels or predictor.model.config.id2label
        self.cut = cut_arguments(self.tokenizer, predictor.model, self.config)

    def check(self, text: Input, top_k: int | None, threshold: float | None) -> None:
        """Check a request.

        Raises:
            ValueError: The input is not of the kind that the task needs, or the task has no classes for `top_k` or for
                a threshold.
        """
        check_inputs([text], self.pipeline)
        check_top_k(top_k, self.pipeline, self.config)
        kind = self.config.kind_of_problem
        if threshold is not None and (self.pipeline != "text-classification" or kind == "regression"):
            raise ValueError(
                f"A threshold is for text classification; the adapter's task is {kind or self.pipeline}. Leave it out."
            )

    def encode(self, text: Input) -> list[Row]:
        """Return an input as rows of the model."""
        return [Row(encode(self.tokenizer, text, self.cut))]

    def decode(
        self,
        text: Input,
        rows: Sequence[Row],
        values: Sequence[tuple[torch.Tensor, ...]],
        top_k: int | None,
        threshold: float | None,
    ) -> Any:
        """Return the result for an input, as `Predictor.predict` does.

        Args:
            text: The input.
            rows: Its rows, from `encode`.
            values: The outputs of the model, in float32 on the CPU, for each row: those of `outputs`. If they are per
                token, padding has been removed.
            top_k, threshold: See `TaskBank`.

        Raises:
            AdapterError: The outputs are not finite.
        """
        raise NotImplementedError


class ClassReader(Reader):
    """Reads inputs of text classification and of regression."""

    def decode(
        self,
        text: Input,
        rows: Sequence[Row],
        values: Sequence[tuple[torch.Tensor, ...]],
        top_k: int | None,
        threshold: float | None,
    ) -> Any:
        """Return the best class of a row, or several, by transformers' rules."""
        logits = values[0][0][: len(self.labels)]  # heads narrower than the widest were filled up
        check_logits(logits, self.task, self.dtype)
        is_multi_label = self.config.kind_of_problem == "multi_label_classification"
        if self.config.kind_of_problem == "regression":
            scores = logits
        elif is_multi_label or len(self.labels) == 1:
            scores = logits.sigmoid()
        else:
            scores = logits.softmax(-1)
        if top_k is None and (threshold is None or not is_multi_label):
            best = int(scores.argmax())
            score = scores[best].item()
            return {"label": self.labels[best] if threshold is None or score >= threshold else None, "score": score}
        best_first = scores.argsort(descending=True, stable=True)[:top_k].tolist()
        found = [(self.labels[number], scores[number].item()) for number in best_first]
        return [{"label": label, "score": score} for label, score in found if threshold is None or score >= threshold]


class TokenReader(Reader):
    """Reads texts whose words get tags, in parts of the length of training."""

    is_per_token = True

    def __init__(self, predictor: Predictor, task: str) -> None:
        super().__init__(predictor, task)
        # Without an aggregation, for which it would copy the tokenizer.
        self._pipeline = cast(TagPipeline, predictor.pipeline(aggregation_strategy="none"))

    def encode(self, text: Input) -> list[Row]:
        """Return a text as one row for each part of it."""
        is_fast = self.tokenizer.is_fast
        windows = {"return_overflowing_tokens": True, "stride": 0} if is_fast and self.cut else {}
        encoded = self.tokenizer(
            [text], return_special_tokens_mask=True, return_offsets_mapping=is_fast, **self.cut, **windows
        )
        names = [name for name in self.tokenizer.model_input_names if name in encoded]
        return [
            Row(
                {name: encoded[name][number] for name in names},
                (encoded["special_tokens_mask"][number], encoded["offset_mapping"][number] if is_fast else None),
            )
            for number in range(len(encoded["input_ids"]))
        ]

    def decode(
        self,
        text: Input,
        rows: Sequence[Row],
        values: Sequence[tuple[torch.Tensor, ...]],
        top_k: int | None,
        threshold: float | None,
    ) -> Any:
        """Return the entities, as the adapter's pipeline aggregates them."""
        parts = []
        for row, (logits,) in zip(rows, values, strict=True):
            logits = logits[:, : len(self.labels)]
            check_logits(logits, self.task, self.dtype)
            special, offsets = row.more
            parts.append(
                {
                    "logits": logits[None],
                    "input_ids": torch.tensor([row.inputs["input_ids"]]),
                    "special_tokens_mask": torch.tensor([special]),
                    "offset_mapping": None if offsets is None else torch.tensor([offsets]),
                    "sentence": text,
                }
            )
        return self._pipeline.postprocess(parts, aggregation_strategy=AggregationStrategy.FIRST)


class AnswerReader(Reader):
    """Reads questions and the texts that answer them, in overlapping windows."""

    outputs = ("start_logits", "end_logits")
    is_per_token = True
    example = ("What is it?", "It is an example.")

    def __init__(self, predictor: Predictor, task: str) -> None:
        super().__init__(predictor, task)
        self._pipeline = cast(QuestionAnswering, predictor.pipeline())

    def encode(self, text: Input) -> list[Row]:
        """Return a question and its context as one row for each window of the context."""
        windows = self._pipeline.windows({"question": text[0], "context": text[1]})
        return [Row(window.inputs, window) for window in windows]

    def decode(
        self,
        text: Input,
        rows: Sequence[Row],
        values: Sequence[tuple[torch.Tensor, ...]],
        top_k: int | None,
        threshold: float | None,
    ) -> Any:
        """Return the best answer in any window."""
        for value in values:
            for logits in value:
                check_logits(logits, self.task, self.dtype)
        pairs = [(start, end) for start, end in values]
        return self._pipeline.answer(text[1], [row.more for row in rows], pairs)


class VectorReader(Reader):
    """Reads texts for their embeddings."""

    outputs = ("last_hidden_state",)
    is_per_token = True

    def decode(
        self,
        text: Input,
        rows: Sequence[Row],
        values: Sequence[tuple[torch.Tensor, ...]],
        top_k: int | None,
        threshold: float | None,
    ) -> Any:
        """Return the mean of the tokens' hidden states."""
        check_logits(values[0][0], self.task, self.dtype)
        return values[0][0].mean(0).tolist()


# By the name of the task's pipeline.
READERS: dict[str, type[Reader]] = {
    "text-classification": ClassReader,
    "token-classification": TokenReader,
    "question-answering": AnswerReader,
    "feature-extraction": VectorReader,
}
