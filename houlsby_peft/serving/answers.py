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
        stride: The tokens that consecutive windows share; fewer if there is little room beside a question.
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
        question = question.strip()
        cut = {"truncation": True, "max_length": QUESTION_TOKENS, "return_offsets_mapping": True}
        tokens = self.tokenizer(question, add_special_tokens=False, **cut)
        question = question[: max((end for _, end in tokens["offset_mapping"]), default=0)]
        room = self.max_length - len(self.tokenizer(question)["input_ids"]) - 2
        encoded = self.tokenizer(
            question,
            context,
            truncation="only_second",
            max_length=self.max_length,
            stride=self.stride if self.stride < room else max(0, room // 2),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        windows = []
        for number, offsets in enumerate(encoded["offset_mapping"]):
            inputs = {
                name: encoded[name][number]
                for name in self.tokenizer.model_input_names
                if name in encoded
            }
            parts = encoded.sequence_ids(number)
            spans = [span if part == 1 else None for span, part in zip(offsets, parts, strict=True)]
            ids, cls = inputs["input_ids"], self.tokenizer.cls_token_id
            windows.append(Window(inputs, spans, ids.index(cls) if cls in ids else 0))
        return windows

    def find_answer(
        self, context: str, windows: Sequence[Window], logits: Sequence[Sequence[torch.Tensor]]
    ) -> AnswerPrediction:
        """Return the answer, from the start and the end logits of the tokens of each window.

        It is the span with the highest sum of both in any window. Its score is the product of both
        probabilities among all tokens of the context in all windows.
        """
        outside = torch.tensor([span is None for window in windows for span in window.spans])
        starts, ends = (
            torch.cat(values)
            .masked_fill(outside, -torch.inf)
            .log_softmax(0)
            .split([len(w.spans) for w in windows])
            for values in zip(*logits, strict=True)
        )
        found = []
        for window, start, end, raw in zip(windows, starts, ends, logits, strict=True):
            tokens = torch.arange(len(start))
            length = tokens[None, :] - tokens[:, None]
            is_answer = (length >= 0) & (length < self.max_answer_length)
            sums = (start[:, None] + end[None, :]).masked_fill(~is_answer, -torch.inf)
            first, last = divmod(int(sums.argmax()), len(start))
            best = float(raw[0][first] + raw[1][last])
            found.append((float(sums[first, last]), best, window.spans[first], window.spans[last]))
        score, best, begin, finish = max(found, key=lambda span: span[0])
        nothing: AnswerPrediction = {"answer": "", "score": 0.0, "start": 0, "end": 0}
        if self.null_threshold is not None:
            null, probability = min(
                (
                    float(start[window.cls] + end[window.cls]),
                    float(start.softmax(0)[window.cls] * end.softmax(0)[window.cls]),
                )
                for window, (start, end) in zip(windows, logits, strict=True)
            )
            if begin is None or null - best > self.null_threshold:
                return {**nothing, "score": probability}
        if begin is None or finish is None:
            return nothing  # an empty context
        answer = context[begin[0] : finish[1]]
        return {"answer": answer, "score": math.exp(score), "start": begin[0], "end": finish[1]}
