"""Extractive question answering, for which transformers 5 has no pipeline."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..errors import AdapterError, check_count
from .base_model import count_positions
from .padding import stack


Example = dict[str, str]
# Longer questions are cut, as in BERT's own code for SQuAD and in recipes/squad.py.
_QUESTION_TOKENS = 64
# A fast tokenizer keeps how it cuts texts, until a call asks for another way: here, several in turn.
_TOKENIZING = threading.Lock()


@dataclass
class QuestionAnswering:
    """Finds the span of a context that answers a question, as BERT does for SQuAD (Devlin et al. 2018, section 4.2).

    A long context is read in overlapping windows. The answer is the span with the highest sum of start and end logit
    in any of them. Its score is the product of both probabilities among all tokens of the context in all windows.

    Args:
        model: A model for question answering.
        tokenizer: Its tokenizer, a fast one.
        max_length: Tokens in a window, question included. Default: 384, or as many as model and tokenizer take.
        stride: Tokens that two windows share.
        max_answer_length: Tokens in an answer.
        null_threshold: Give no answer if that scores higher than the best answer by more than this (SQuAD 2.0; Devlin
            et al. 2018, section 4.3). None: always give an answer.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    max_length: int | None = None
    stride: int = 128
    max_answer_length: int = 30
    null_threshold: float | None = None

    def __post_init__(self) -> None:
        check_count("stride", self.stride, least=0)
        check_count("max_answer_length", self.max_answer_length)
        if self.max_length is not None:
            check_count("max_length", self.max_length)
        if not self.tokenizer.is_fast:
            raise AdapterError(
                "Question answering needs a fast tokenizer, which tells where each token is in the text; "
                f"{type(self.tokenizer).__name__} is none. Use a base model that has one."
            )

    def __call__(
        self, examples: Example | Sequence[Example], batch_size: int = 32
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Answer one example `{"question": ..., "context": ...}` or a list of them.

        Returns:
            For each `{"answer", "score", "start", "end"}`, where start and end count the context's characters. If no
            answer is given, `answer` is empty and `score` is the probability of none.

        Raises:
            ValueError: A question leaves no room for its context.
        """
        check_count("batch_size", batch_size)
        several = [examples] if isinstance(examples, dict) else list(examples)
        windows = [(number, window) for number, example in enumerate(several) for window in self.windows(example)]
        read = [window for _, window in windows]
        scores = [pair for i in range(0, len(read), batch_size) for pair in self._scores(read[i : i + batch_size])]
        answers = []
        for number, example in enumerate(several):
            own = [(window, pair) for (of, window), pair in zip(windows, scores, strict=True) if of == number]
            answers.append(self.answer(example["context"], [w for w, _ in own], [pair for _, pair in own]))
        return answers[0] if isinstance(examples, dict) else answers

    def windows(self, example: Example) -> Iterable[Window]:
        """Yield the windows in which the model reads an example.

        Raises:
            ValueError: The question leaves no room for its context.
        """
        positions = count_positions(self.model) or 384
        longest = min(self.max_length or 384, positions, int(self.tokenizer.model_max_length))
        with _TOKENIZING:
            question = self._cut(example["question"])
            room = longest - len(self.tokenizer(question)["input_ids"]) - 2
            if room < 1:
                raise ValueError(f"A question must leave room for its context in {longest} tokens. Raise max_length.")
            tokens = self.tokenizer(
                question,
                example["context"],
                truncation="only_second",
                max_length=longest,
                stride=min(self.stride, room // 2),
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
        for row, offsets in enumerate(tokens["offset_mapping"]):
            inputs = {name: tokens[name][row] for name in self.tokenizer.model_input_names if name in tokens}
            spans = [span if part == 1 else None for span, part in zip(offsets, tokens.sequence_ids(row), strict=True)]
            ids = inputs["input_ids"]
            yield Window(inputs, spans, ids.index(cls) if (cls := self.tokenizer.cls_token_id) in ids else 0)

    def _cut(self, question: str) -> str:
        tokens = self.tokenizer(
            question.strip(), add_special_tokens=False, truncation=True, max_length=_QUESTION_TOKENS,
            return_offsets_mapping=True,
        )  # fmt: skip
        return question.strip()[: max((end for _, end in tokens["offset_mapping"]), default=0)]

    def _scores(self, windows: Sequence[Window]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the start and end logits of the tokens of each window."""
        batch = stack(self.tokenizer, [window.inputs for window in windows])
        device = next(self.model.parameters()).device
        with torch.inference_mode():
            outputs = self.model(**{name: value.to(device) for name, value in batch.items()})
        real = batch["attention_mask"].bool()  # padding may be on either side
        return [
            (start[mask].float(), end[mask].float())
            for start, end, mask in zip(outputs.start_logits, outputs.end_logits, real, strict=True)
        ]

    def answer(
        self, context: str, windows: Sequence[Window], scores: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> dict[str, Any]:
        """Return the best answer to an example, as `__call__` gives it.

        Args:
            context: The example's context.
            windows: Its windows.
            scores: The start and end logits of each window's tokens, without padding.
        """
        start, end = (_log_probabilities(logits, windows) for logits in zip(*scores, strict=True))
        found = [_best_span(a, b, self.max_answer_length) for a, b in zip(start, end, strict=True)]
        number = max(range(len(found)), key=lambda number: found[number][0])
        score, first, last = found[number]
        begin, finish = windows[number].spans[first], windows[number].spans[last]
        if self.null_threshold is not None:
            null, probability = min(
                (
                    float(a[window.cls] + b[window.cls]),
                    float(a.softmax(0)[window.cls] * b.softmax(0)[window.cls]),
                )
                for window, (a, b) in zip(windows, scores, strict=True)
            )
            best = float(scores[number][0][first] + scores[number][1][last])
            if begin is None or null - best > self.null_threshold:
                return {"answer": "", "score": probability, "start": 0, "end": 0}
        if begin is None or finish is None:
            return {"answer": "", "score": 0.0, "start": 0, "end": 0}  # an empty context
        return {"answer": context[begin[0] : finish[1]], "score": score, "start": begin[0], "end": finish[1]}


@dataclass
class Window:
    """A part of an example that the model reads at once.

    Args:
        inputs: The model's inputs.
        spans: The characters of each token of the context; None for other tokens.
        cls: Index of the token [CLS], whose logits are those of no answer.
    """

    inputs: dict[str, list[int]]
    spans: list[tuple[int, int] | None]
    cls: int


def _log_probabilities(logits: Sequence[torch.Tensor], windows: Sequence[Window]) -> Sequence[torch.Tensor]:
    """Return the log-probability of each token of a window among the context's tokens in all windows."""
    outside = [span is None for window in windows for span in window.spans]
    together = torch.cat(list(logits)).masked_fill(torch.tensor(outside, device=logits[0].device), -torch.inf)
    return torch.split(together.log_softmax(0), [len(window.spans) for window in windows])


def _best_span(start: torch.Tensor, end: torch.Tensor, longest: int) -> tuple[float, int, int]:
    """Return the probability of the best span of a window, its first token and its last."""
    tokens = torch.arange(len(start), device=start.device)
    length = tokens[None, :] - tokens[:, None]
    scores = (start[:, None] + end[None, :]).masked_fill((length < 0) | (length >= longest), -torch.inf)
    first, last = divmod(int(scores.argmax()), len(start))
    return float(scores[first, last].exp()), first, last
