"""`Reader`: makes rows of batches of a question, and its result of the model's outputs for them; a
class for each kind of task.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import LARGE_INTEGER

from ..errors import AdapterError, shortened
from ..heads.tasks import TaskKind
from ..method.tuner_layer import record_of
from ..saved.downloads import find_repo
from ..saved.record import AdapterRecord
from .answers import Windows
from .base_model import count_positions, count_tokens
from .questions import EmptyInputError, Input, OtherKindError, Question, Row, TaskFacts
from .results import AnswerPrediction, ClassPrediction, EntityPrediction
from .tagging import Piece, read_tags


# A fast tokenizer keeps how it cuts texts until a call asks for another way, and threads may share
# it.
_TOKENIZING = threading.Lock()
# Tokens of a window of a context, unless the training has recorded a number.
_WINDOW = 384


class Reader(ABC):
    """Encodes the inputs of one adapter, and decodes the model's outputs for them.

    Attributes:
        called: The name of the adapter in errors.
        outputs: The names of the model's outputs that results are computed from.
        is_per_token: Whether these have a value per token.
        needs_spans: Whether the tokenizer must tell where each token is in the text.
        kinds: The kinds of inputs that the task reads, and what they are.
        example: An input of one of these kinds.
        can_pad: Whether texts may be padded. Decoders, whose head is called `score`, classify a
            text by its last token other than the pad token in their configuration.
        fills_up: Whether batches are filled up to one of a few sizes, as for graphs.
        fingerprint: What identifies the adapter's files; empty if it was not loaded by a bank.
        needs_both: Whether both texts of a pair must have content.
    """

    outputs: ClassVar[tuple[str, ...]] = ("logits",)
    is_per_token: ClassVar[bool] = False
    needs_spans: ClassVar[bool] = False
    kinds: ClassVar[dict[type, str]] = {str: "a text", tuple: "a pair of texts"}
    example: Input = "An example."
    fills_up = False
    fingerprint = ""
    needs_both: ClassVar[bool] = False

    def __init__(
        self,
        model: PeftModel,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        task: TaskKind,
        called: str | None = None,
    ) -> None:
        self.model = model
        self.name = name
        self.tokenizer = tokenizer
        self.task = task
        self.called = called or name
        self.record = record_of(model, name)
        self.labels: dict[int, str] = self.record.id2label or model.config.id2label
        self._trained_on = self.record.text_columns
        if self._trained_on and len(self._trained_on) == 2:
            self.example = "An example.", "Another one."
        self.cut = cut_arguments(tokenizer, model, self.record)
        padding = tokenizer.pad_token_id
        padding_of_model = getattr(model.config.get_text_config(), "pad_token_id", None)
        has_score = hasattr(model, "score")
        self.can_pad = padding is not None and (padding == padding_of_model or not has_score)
        self._tokens = count_tokens(model.get_base_model())  # type: ignore[arg-type]

    @property
    def has_classes(self) -> bool:
        """Whether texts are classified."""
        is_regression = self.record.problem_type == "regression"
        return self.task.pipeline == "text-classification" and not is_regression

    @cached_property
    def facts(self) -> TaskFacts:
        """What is known of the task."""
        return TaskFacts(
            pipeline=self.task.pipeline,
            labels=tuple(name for _, name in sorted(self.labels.items())),
            base_model=_name_of_base(self.model),
            max_tokens=self.cut.get("max_length"),
            dtype=str(self.model.dtype).removeprefix("torch."),
            fingerprint=self.fingerprint,
        )

    def read(self, question: Question) -> None:
        """Check a question and give it the rows that have to run."""
        self._check_input(question.text)
        self._check_options(question)
        with _TOKENIZING:
            rows = self._encode_safely(question.text)
            if question.refuses_cut:
                self._check_length(question.text)
        for row in rows:
            self._check_tokens(row.inputs["input_ids"])
        question.rows = rows
        question.tokens = sum(row.tokens for row in rows)
        question.facts = self.facts

    def answer(self, question: Question) -> Any:
        """Return the result of a question whose rows have run."""
        if not all(value.isfinite().all() for row in question.rows for value in row.outputs):
            raise AdapterError(
                f"The outputs of an adapter must be finite; those of {self.called!r} are "
                f"NaN or infinite on a base model in {self.model.dtype}. Load it with "
                "dtype=torch.float32, or train it again."
            )
        return self.decode(question)

    def has_text(self, text: Input) -> bool:
        """Return whether a text has more than blanks; of a pair, one of the texts, or each if the
        task needs both.
        """
        texts = [text] if isinstance(text, str) else text
        is_enough = all if self.needs_both else any
        return is_enough(map(str.strip, texts))

    def _encode_safely(self, text: Input) -> list[Row]:
        """Encode an input; a panic of the tokenizer, which is no `Exception`, becomes an error."""
        try:
            return self.encode(text)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError(
                f"The tokenizer of {self.called!r} cannot read {shortened(repr(text))}: "
                f"{shortened(str(error))}."
            ) from error

    def _check_input(self, text: Input) -> None:
        is_pair = _is_pair(text)
        kind = tuple if is_pair else str
        if kind not in self.kinds or not (is_pair or isinstance(text, str)):
            rule = " or ".join(self.kinds.values())
            raise OtherKindError(f"Each input must be {rule}; got {shortened(repr(text))}.")
        "".join(text).encode()  # half of a surrogate pair is a ValueError, not the tokenizer's own
        if not self.has_text(text):
            raise EmptyInputError(
                f"Each input must have a text to read; got {shortened(repr(text))} for "
                f"{self.called!r}. Leave out empty texts."
            )
        if self._trained_on is not None and is_pair != (len(self._trained_on) == 2):
            kinds = ("single texts", "pairs of texts")
            raise OtherKindError(
                f"The adapter {self.called!r} reads {kinds[not is_pair]}, as it was trained on "
                f"{' and '.join(map(repr, self._trained_on))}; got one of the {kinds[is_pair]}."
            )

    def _check_options(self, question: Question) -> None:
        kind = self.record.problem_type or self.task.pipeline
        top_k = question.top_k
        for name, value in (("top_k", top_k), ("A threshold", question.threshold)):
            if value is not None and not self.has_classes:
                raise ValueError(
                    f"{name} is for text classification; the task of {self.called!r} is {kind}. "
                    "Leave it out."
                )
        if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
            raise ValueError(f"top_k must be a number of classes, at least 1; got {top_k!r}.")

    def _check_tokens(self, ids: Sequence[int]) -> None:
        if not ids:
            raise ValueError(
                f"Each text must have at least one token; the tokenizer of {self.called!r} found "
                "none. Leave out empty texts."
            )
        if self._tokens is not None and max(ids) >= self._tokens:
            raise AdapterError(
                f"The tokenizer of {self.called!r} must fit the base model, which knows "
                f"{self._tokens:,} tokens; it gave the number {max(ids):,}. Use the tokenizer that "
                "the adapter was trained with."
            )

    def _check_length(self, text: Input) -> None:
        """Refuse a text that is cut; those that are read in parts are not."""
        most = self.cut.get("max_length")
        if most is None or self.needs_spans:
            return
        texts = (text,) if isinstance(text, str) else text
        tokens = len(self.tokenizer(*texts, verbose=False)["input_ids"])
        if tokens > most:
            raise ValueError(f"Each text must have at most {most:,} tokens; got {tokens:,}.")

    def encode(self, text: Input) -> list[Row]:
        """Return an input as the model reads it. One thread at a time may use a tokenizer."""
        # As a batch of one, because tokenizers take a single pair whose second text is empty for
        # one text.
        batch = [[text]] if isinstance(text, str) else [[text[0]], [text[1]]]
        encoded = self.tokenizer(*batch, **self.cut)
        return [Row(self, {name: values[0] for name, values in encoded.items()})]

    @abstractmethod
    def decode(self, question: Question) -> Any:
        """Return the result of a question, as `Predictor.predict` describes it.

        The outputs of each row are those of the model that the attribute `outputs` names, finite
        and in float32 on the CPU: `(tokens, ...)` without padding if they are per token, else
        `(classes,)`.
        """


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


def _name_of_base(model: PeftModel) -> str:
    """Return the base model's name on the Hub or, if it is not known, that of its folder."""
    names = [config.base_model_name_or_path for config in model.peft_config.values()]
    name = str(names[0] if names and names[0] else model.get_base_model().name_or_path)
    repo = find_repo(name)
    if repo is not None:
        name, _ = repo
    return Path(name).name if Path(name).is_absolute() else name


def _is_pair(text: object) -> bool:
    if not isinstance(text, (tuple, list)) or len(text) != 2:
        return False
    return all(isinstance(part, str) for part in text)


def cut_arguments(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PeftModel, record: AdapterRecord
) -> dict[str, Any]:
    """Return the tokenizer's arguments that cut texts to the adapter's length; empty if no length
    is known.
    """
    lengths = []
    for length in (record.max_length, tokenizer.model_max_length, count_positions(model)):
        if length and length < LARGE_INTEGER:
            lengths.append(int(length))
    if not lengths:
        return {}
    return {"truncation": True, "max_length": min(lengths)}
