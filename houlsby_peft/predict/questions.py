"""`Question`: an input for one task, on its way to the result, and its `Row`s in batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


# A text, a pair of texts or, for question answering, a question and the text that answers it.
Input = str | tuple[str, str]


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
        reader: The `Reader` that encodes and decodes for the adapter.
        inputs: The model's inputs without padding, each a list with a value per token.
        details: What the result needs to know of the tokens: their pieces, or their window.
        outputs: The model's outputs for it, once it has run.
    """

    reader: Any
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
