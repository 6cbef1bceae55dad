"""The readers of each kind of task: from an input to rows, and from the outputs to the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from .answers import Windows
from .base_model import count_positions
from .questions import Input, Question, Reader, Row
from .results import AnswerPrediction, ClassPrediction, EntityPrediction
from .tagging import Piece, read_tags


# Tokens of a window of a context, unless the training has recorded a number.
_WINDOW = 384


class ClassReader(Reader):
    """Text classification and regression."""

    def decode(self, question: Question) -> ClassPrediction | list[ClassPrediction]:
        """Return the best class or, for `top_k` or several labels per text, a list of classes, the
        best first.
        """
        [row] = question.rows
        scores = self._scores(row.outputs[0])
        if question.top_k is None and self.record.problem_type != "multi_label_classification":
            best = int(scores.argmax())
            score = scores[best].item()
            is_chosen = question.threshold is None or score >= question.threshold
            return {"label": self.labels[best] if is_chosen else None, "score": score}
        thresholds = self._thresholds(question)
        predictions: list[ClassPrediction] = []
        best_first = scores.argsort(descending=True, stable=True)
        for number in best_first[: question.top_k].tolist():
            score = scores[number].item()
            if score >= thresholds[number]:
                predictions.append({"label": self.labels[number], "score": score})
        return predictions

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of the classes, or the value of a regression: `(classes,)`."""
        if self.record.problem_type == "regression":
            return logits
        is_multi_label = self.record.problem_type == "multi_label_classification"
        if is_multi_label or len(self.labels) == 1:
            return logits.sigmoid()
        return logits.softmax(-1)

    def _thresholds(self, question: Question) -> Sequence[float]:
        """Return the least score of each class in a list of classes."""
        if question.threshold is not None:
            return [question.threshold] * len(self.labels)
        if question.top_k is not None:
            return [-torch.inf] * len(self.labels)
        return self.record.thresholds or [0.5] * len(self.labels)


class TokenReader(Reader):
    """Token classification: texts are read in parts of the length of training, so that every word
    gets a tag.
    """

    is_per_token = True
    needs_spans = True
    kinds: ClassVar[dict[type, str]] = {str: "a text"}

    def encode(self, text: Input) -> list[Row]:
        """Return a text in parts, each with its pieces; None for special tokens."""
        encoded = self.tokenizer(
            [text],
            return_special_tokens_mask=True,
            return_offsets_mapping=True,
            return_overflowing_tokens=True,
            **self.cut,
        )
        names = [name for name in self.tokenizer.model_input_names if name in encoded]
        rows = []
        for number, ids in enumerate(encoded["input_ids"]):
            pieces: list[Piece | None] = []
            tokens = self.tokenizer.convert_ids_to_tokens(ids)
            spans, is_special = encoded["offset_mapping"], encoded["special_tokens_mask"]
            for token, span, special in zip(tokens, spans[number], is_special[number], strict=True):
                pieces.append(None if special else Piece(token, span))
            rows.append(Row(self, {name: encoded[name][number] for name in names}, pieces))
        return rows

    def decode(self, question: Question) -> list[EntityPrediction]:
        """Return the entities, or the words with their tags."""
        tagged_parts = []
        for row in question.rows:
            scores, classes = row.outputs[0].softmax(-1).max(-1)
            tagged = []
            for piece, number, score in zip(
                row.details, classes.tolist(), scores.tolist(), strict=True
            ):
                if piece is not None:
                    tagged.append((piece, self.labels[number], score))
            tagged_parts.append(tagged)
        return read_tags(str(question.text), tagged_parts, self.tokenizer, self.labels.values())


class AnswerReader(Reader):
    """Extractive question answering; `Predictor.predict` describes the options."""

    outputs = ("start_logits", "end_logits")
    is_per_token = True
    needs_spans = True
    needs_both = True
    kinds: ClassVar[dict[type, str]] = {tuple: "a pair (question, context)"}
    example = ("What is it?", "It is an example.")

    def __init__(
        self,
        *args: Any,
        max_length: int | None = None,
        null_threshold: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args)
        if null_threshold is None:
            null_threshold = self.record.null_threshold
        longest = min(
            max_length or self.record.max_length or _WINDOW,
            count_positions(self.model) or _WINDOW,
            self.tokenizer.model_max_length,
        )
        self._windows = Windows(
            self.tokenizer, int(longest), null_threshold=null_threshold, **options
        )

    def encode(self, text: Input) -> list[Row]:
        """Return a question with each window of its context."""
        return [Row(self, window.inputs, window) for window in self._windows.split(*text)]

    def decode(self, question: Question) -> AnswerPrediction:
        """Return the best answer in any window."""
        windows = [row.details for row in question.rows]
        outputs = [row.outputs for row in question.rows]
        return self._windows.find_answer(question.text[1], windows, outputs)


class VectorReader(Reader):
    """Embeddings: the mean of a text's last hidden states, as sentence-transformers computes it by
    default.

    Reimers & Gurevych 2019 (arXiv 1908.10084), section 3, found the mean better than the vector of
    [CLS] and than the maximum. The vectors are not normalized: compare them by their cosine.
    """

    outputs = ("last_hidden_state",)
    is_per_token = True

    def decode(self, question: Question) -> list[float]:
        """Return the mean of the tokens' hidden states."""
        [row] = question.rows
        return row.outputs[0].mean(0).tolist()


# By the name of the task's pipeline.
READERS: dict[str, type[Reader]] = {
    "text-classification": ClassReader,
    "token-classification": TokenReader,
    "question-answering": AnswerReader,
    "feature-extraction": VectorReader,
}
