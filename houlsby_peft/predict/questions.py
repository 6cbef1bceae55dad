"""`Question`: an input for one task, on its way to the result, and the rows of batches it needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import shortened


if TYPE_CHECKING:
    from .held_adapters import BankTask
    from .readers import Reader


# A text, a pair of texts or, for question answering, a question and the text that answers it.
Input = str | tuple[str, str]
# Stands for an example of the kind that a task reads.
EXAMPLE: Any = object()


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
    all_classes: bool = False
    refuses_cut: bool = False
    threshold: float | None = None
    bank_task: BankTask | None = None
    rows: list[Row] = field(default_factory=list)
    result: Any = None
    tokens: int = 0
    facts: TaskFacts | None = None

    @property
    def characters(self) -> int:
        """The number of characters of the input."""
        return len(self.text) if isinstance(self.text, str) else sum(map(len, self.text))

    def close(self, result: Any) -> None:
        """Set the result, and let go of what was needed for it."""
        self.result = result
        self.bank_task, self.rows = None, []


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


def check_requests(requests: Sequence[object], limits: Sequence[object]) -> None:
    """Refuse requests that are not pairs, which would be read as others or fail without a word."""
    for request in requests:
        if not isinstance(request, (tuple, list)) or len(request) != 2:
            raise ValueError(
                "Each request must be a pair of a task, or a list of tasks, and an input; got "
                f"{shortened(repr(request))}. For one text: bank.ask(text)."
            )
    if len(limits) != len(requests):
        raise ValueError(
            f"top_k must be one number, or one for each of the {len(requests)} requests; got "
            f"{len(limits)}."
        )


def as_names(tasks: str | Iterable[str]) -> list[str]:
    """Return the names of tasks, or of one."""
    return [tasks] if isinstance(tasks, str) else list(tasks)


def group_results(
    requests: Iterable[tuple[str | Sequence[str], Input]], results: Iterable[Any]
) -> list[Any]:
    """Return one result per request: for a list of tasks, a dict with the result of each."""
    remaining = iter(results)
    answers: list[Any] = []
    for tasks, _ in requests:
        if isinstance(tasks, str):
            answers.append(next(remaining))
        else:
            answers.append({task: next(remaining) for task in tasks})
    return answers
