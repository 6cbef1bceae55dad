"""Extractive question answering, for which transformers has no pipeline any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase


Example = dict[str, str]


@dataclass
class QuestionAnswering:
    """Finds the span of a context that answers a question, as BERT does for SQuAD (Devlin et al. 2018, section 4.2).

    A long context is read in windows that overlap; the answer is the span with the highest sum of start and end logit
    in any of them. Its score is the product of the two probabilities among all tokens of the context in all windows.

    Args:
        model: a model for question answering.
        tokenizer: its tokenizer, of the fast kind.
        max_length: tokens in a window, question included; default: 384, or as many as model and tokenizer take.
        stride: tokens that two windows share.
        max_answer_length: tokens in an answer.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    max_length: int | None = None
    stride: int = 128
    max_answer_length: int = 30

    def __call__(
        self, examples: Example | Sequence[Example], batch_size: int = 32
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Answer one example `{"question": ..., "context": ...}` or a list of them.

        Returns:
            For each `{"answer", "score", "start", "end"}`, where start and end count the context's characters.

        Raises:
            ValueError: A question leaves no room for its context.
        """
        several = [examples] if isinstance(examples, dict) else list(examples)
        windows = [(number, window) for number, example in enumerate(several) for window in self._windows(example)]
        read = [window for _, window in windows]
        scores = [pair for i in range(0, len(read), batch_size) for pair in self._scores(read[i : i + batch_size])]
        answers = []
        for number, example in enumerate(several):
            own = [(window, pair) for (of, window), pair in zip(windows, scores, strict=True) if of == number]
            answers.append(self._answer(example["context"], [w for w, _ in own], [pair for _, pair in own]))
        return answers[0] if isinstance(examples, dict) else answers

    def _windows(self, example: Example) -> Iterable[_Window]:
        positions = getattr(self.model.config, "max_position_embeddings", None) or 384
        longest = self.max_length or min(384, int(positions), int(self.tokenizer.model_max_length))
        room = longest - len(self.tokenizer(example["question"])["input_ids"]) - 2
        if room < 1:
            raise ValueError(f"A question must leave room for its context in {longest} tokens; cut it, or max_length.")
        tokens = self.tokenizer(
            example["question"],
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
            yield _Window(inputs, spans)

    def _scores(self, windows: Sequence[_Window]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The start and end logits of the tokens of each window."""
        batch = self.tokenizer.pad([window.inputs for window in windows], return_tensors="pt")
        with torch.inference_mode():
            outputs = self.model(**batch.to(next(self.model.parameters()).device))
        real = batch["attention_mask"].bool()  # padding may be on either side
        return [
            (start[mask].float(), end[mask].float())
            for start, end, mask in zip(outputs.start_logits, outputs.end_logits, real, strict=True)
        ]

    def _answer(
        self, context: str, windows: Sequence[_Window], scores: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> dict[str, Any]:
        start, end = (_log_probabilities(logits, windows) for logits in zip(*scores, strict=True))
        found = [_best_span(a, b, self.max_answer_length) for a, b in zip(start, end, strict=True)]
        number = max(range(len(found)), key=lambda number: found[number][0])
        score, first, last = found[number]
        begin, finish = windows[number].spans[first], windows[number].spans[last]
        if begin is None or finish is None:
            return {"answer": "", "score": 0.0, "start": 0, "end": 0}  # an empty context
        return {"answer": context[begin[0] : finish[1]], "score": score, "start": begin[0], "end": finish[1]}


@dataclass
class _Window:
    """A part of an example that the model reads at once; `spans` has the characters of the context's tokens."""

    inputs: dict[str, list[int]]
    spans: list[tuple[int, int] | None]


def _log_probabilities(logits: Sequence[torch.Tensor], windows: Sequence[_Window]) -> Sequence[torch.Tensor]:
    """Logits of the tokens of each window, to log-probabilities among the tokens of the context in all windows."""
    outside = [span is None for window in windows for span in window.spans]
    together = torch.cat(list(logits)).masked_fill(torch.tensor(outside, device=logits[0].device), -torch.inf)
    return torch.split(together.log_softmax(0), [len(window.spans) for window in windows])


def _best_span(start: torch.Tensor, end: torch.Tensor, longest: int) -> tuple[float, int, int]:
    """The probability of the best span of a window, its first token and its last."""
    tokens = torch.arange(len(start), device=start.device)
    length = tokens[None, :] - tokens[:, None]
    scores = (start[:, None] + end[None, :]).masked_fill((length < 0) | (length >= longest), -torch.inf)
    first, last = divmod(int(scores.argmax()), len(start))
    return float(scores[first, last].exp()), first, last
