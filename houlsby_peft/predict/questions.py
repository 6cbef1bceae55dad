"""`Question`: an input for one task, on its way to the result, and the `Reader` that makes rows of
batches of it, and its result of what the model says of them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from .base_model import count_positions, count_tokens


# A text, a pair of texts or, for question answering, a question and the text that answers it.
Input = str | tuple[str, str]
# A fast tokenizer keeps how it cuts texts until a call asks for another way, and threads may share
# it.
_TOKENIZING = threading.Lock()


@dataclass(frozen=True)
class TaskFacts:
    """What is known of a task.

    Attributes:
        pipeline: Its kind, as transformers calls its pipeline.
        labels: The names of its classes by number.
        base_model: The name of the base model.
        max_tokens: The tokens that longer texts are cut to, or read in parts of.
        dtype: The dtype of the base model.
        fingerprint: What identifies the adapter's files: the first 16 digits of their SHA-256.
    """

    pipeline: str
    labels: tuple[str, ...]
    base_model: str
    max_tokens: int | None
    dtype: str
    fingerprint: str


@dataclass(eq=False)
class Row:
    """A text for one adapter, or a part or window of a longer text, as the model reads it.

    Attributes:
        reader: What encodes and decodes for the adapter.
        inputs: The model's inputs without padding, each a list with a value per token.
        details: What the result needs to know of the tokens: their pieces, or their window.
        outputs: The model's outputs for it, once it has run.
    """

    reader: Reader
    inputs: dict[str, list[int]]
    details: Any = None
    outputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """The number of tokens of the text."""
        return len(self.inputs["input_ids"])


@dataclass(eq=False)
class Question:
    """An input for one task, and in the end its result.

    Attributes:
        text: The input.
        task: The name of the task in its bank.
        top_k: As for `TaskBank.predict`.
        of_all: Whether all tasks are asked, of which those that read other inputs are left out.
        all_classes: Whether a task with classes returns all of them, whatever its threshold.
        refuses_cut: Whether a text that is longer than the model reads is refused, not cut.
        threshold: The least score of a class, as a task of the bank has it.
        bank_task: The task with the adapter that it has now, until there is a result.
        rows: The rows that have to run, until there is a result.
        result: As `TaskBank.predict` returns it, or the error for which there is none; None before.
        tokens: The tokens that the model has read.
        facts: What is known of the task that has given the result.
    """

    text: Input
    task: str = ""
    top_k: int | None = None
    of_all: bool = False
    all_classes: bool = False
    refuses_cut: bool = False
    threshold: float | None = None
    bank_task: Any = None
    rows: list[Row] = field(default_factory=list)
    result: Any = None
    tokens: int = 0
    facts: TaskFacts | None = None

    @property
    def characters(self) -> int:
        """The number of characters of the input."""
        return len(self.text) if isinstance(self.text, str) else sum(map(len, self.text))

    @property
    def is_left_out(self) -> bool:
        """Whether the task was asked with all others, and reads inputs of another kind."""
        return self.of_all and isinstance(self.result, OtherKindError)

    @property
    def error(self) -> Exception | None:
        """The error for which there is no result."""
        return self.result if isinstance(self.result, Exception) and not self.is_left_out else None

    def close(self, result: Any) -> None:
        """Set the result, and let go of what was needed for it."""
        self.result = result
        self.bank_task, self.rows = None, []


class EmptyInputError(ValueError):
    """An input has no text."""


class OtherKindError(ValueError):
    """An input is of a kind that the task does not read, as a text for a task of pairs."""


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
