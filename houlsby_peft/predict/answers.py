"""Extractive question answering, as BERT does it for SQuAD (Devlin et al. 2018, section 4.2):
windows and answers.

A long context is read in overlapping windows. recipes/squad.py trains and scores with the same
ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from .results import AnswerPrediction


# Longer questions are cut, as in BERT's own code.
QUESTION_TOKENS = 64


@dataclass
class Window:
    """A question with a part of its context.

    Attributes:
        inputs: The model's inputs.
        spans: The characters of each token of the context; None for other tokens.
        cls: The index of the token [CLS], whose logits are those of no answer.
    """

    inputs: dict[str, list[int]]
    spans: list[tuple[int, int] | None]
    cls: int


@dataclass(frozen=True)
class Windows:
    """How contexts are split into windows, and how answers are found in them.

    Args:
        tokenizer: A fast tokenizer; others do not tell where each token is in the text.
        max_length: The tokens of a window, with its question.
        stride: The tokens that consecutive windows share; fewer if there is little room beside a
            question.
        max_answer_length: The most tokens of an answer.
        null_threshold: No answer is given if that scores higher than the best one by more than
            this. None: there is always an answer.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    stride: int = 128
    max_answer_length: int = 30
    null_threshold: float | None = None

    def split(self, question: str, context: str) -> list[Window]:
        """Return all windows of a context."""
        question = self._cut_question(question.strip())
        room = self.max_length - len(self.tokenizer(question)["input_ids"]) - 2
        stride = self.stride
        if stride >= room:
            stride = max(0, room // 2)
        encoded = self.tokenizer(
            question,
            context,
            truncation="only_second",
            max_length=self.max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        names = [name for name in self.tokenizer.model_input_names if name in encoded]
        windows = []
        for number, offsets in enumerate(encoded["offset_mapping"]):
            inputs = {name: encoded[name][number] for name in names}
            spans: list[tuple[int, int] | None] = []
            for span, part in zip(offsets, encoded.sequence_ids(number), strict=True):
                spans.append(span if part == 1 else None)
            ids, cls = inputs["input_ids"], self.tokenizer.cls_token_id
            windows.append(Window(inputs, spans, ids.index(cls) if cls in ids else 0))
        return windows

    def _cut_question(self, question: str) -> str:
        tokens = self.tokenizer(
            question,
            add_special_tokens=False,
            truncation=True,
            max_length=QUESTION_TOKENS,
            return_offsets_mapping=True,
        )
        end = max((end for _, end in tokens["offset_mapping"]), default=0)
        return question[:end]

    def find_answer(
        self, context: str, windows: Sequence[Window], logits: Sequence[Sequence[torch.Tensor]]
    ) -> AnswerPrediction:
        """Return the answer, from the start and the end logits of each window, `(tokens,)` each.

        It is the span with the highest sum of both in any window. Its score is the product of both
        probabilities among all tokens of the context in all windows.
        """
        starts, ends = (_log_probabilities(windows, raw) for raw in zip(*logits, strict=True))
        candidates = []
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            first, last = self._best_span(start, end)
            candidates.append((float(start[first] + end[last]), number, first, last))
        log_score, number, first, last = max(candidates, key=lambda candidate: candidate[0])
        first_span, last_span = windows[number].spans[first], windows[number].spans[last]
        if self.null_threshold is not None:
            null, probability = _no_answer(windows, logits)
            best = float(logits[number][0][first] + logits[number][1][last])
            if first_span is None or null - best > self.null_threshold:
                return {"answer": "", "score": probability, "start": 0, "end": 0}
        if first_span is None or last_span is None:  # an empty context
            return {"answer": "", "score": 0.0, "start": 0, "end": 0}
        begin, finish = first_span[0], last_span[1]
        answer = context[begin:finish]
        return {"answer": answer, "score": math.exp(log_score), "start": begin, "end": finish}

    def _best_span(self, start: torch.Tensor, end: torch.Tensor) -> tuple[int, int]:
        """Return the first and the last token with the highest sum; `start` and `end` are
        `(tokens,)`.
        """
        tokens = torch.arange(len(start))
        length = tokens[None, :] - tokens[:, None]
        is_answer = (length >= 0) & (length < self.max_answer_length)
        sums = (start[:, None] + end[None, :]).masked_fill(~is_answer, -torch.inf)
        return divmod(int(sums.argmax()), len(start))


def _log_probabilities(
    windows: Sequence[Window], logits: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Return the log-probabilities of each window's tokens among all tokens of the context."""
    is_outside = torch.tensor([span is None for window in windows for span in window.spans])
    joined = torch.cat(tuple(logits)).masked_fill(is_outside, -torch.inf).log_softmax(0)
    parts: Sequence[torch.Tensor] = joined.split([len(window.spans) for window in windows])
    return parts


def _no_answer(
    windows: Sequence[Window], logits: Sequence[Sequence[torch.Tensor]]
) -> tuple[float, float]:
    """Return the lowest score of no answer in any window, and its probability there."""
    scores = []
    for window, (start, end) in zip(windows, logits, strict=True):
        score = float(start[window.cls] + end[window.cls])
        probability = float(start.softmax(0)[window.cls] * end.softmax(0)[window.cls])
        scores.append((score, probability))
    return min(scores)
