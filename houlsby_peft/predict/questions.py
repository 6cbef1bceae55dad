"""What a `TaskBank` is asked: requests, each of which is a question to one task or to several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import shortened
from .held_adapters import BankTask
from .readers import EncodedInput, Input, Reader, Row


# Stands for an example of the kind that a task reads.
EXAMPLE: Any = object()


@dataclass(eq=False)
class Question:
    """An input for one task, on its way to the result.

    Attributes:
        task: The task, or the error of finding it.
        text: The input.
        top_k: As for `TaskBank.predict`.
        all_classes: Whether a task with classes returns all of them, whatever its threshold.
        encoded: The encoded input, or why it cannot be answered; None before `TaskBank.encode`.
        rows: The rows of batches that `TaskBank.run` has to predict.
    """

    task: BankTask | Exception
    text: Input
    top_k: int | None = None
    all_classes: bool = False
    encoded: EncodedInput | Exception | None = None
    rows: list[Row] = field(default_factory=list)


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


def read_question(
    question: Question, readers: Mapping[BankTask, Reader | Exception]
) -> EncodedInput | Exception:
    """Return the checked input of a question, or why its adapter cannot be used."""
    task = question.task
    if isinstance(task, Exception):
        return task
    reader = readers[task]
    if isinstance(reader, Exception):
        return reader
    text = reader.example if question.text is EXAMPLE else question.text
    if question.all_classes:
        top_k = len(reader.labels) if reader.has_classes else None
        return reader.read(text, top_k)
    return reader.read(text, question.top_k, task.source.threshold)


def group_results(
    requests: Iterable[tuple[str | Sequence[str], Input]], results: Sequence[Any]
) -> list[Any]:
    """Return one result per request: for a list of tasks, a dict with the result of each."""
    answers: list[Any] = []
    start = 0
    for tasks, _ in requests:
        if isinstance(tasks, str):
            answers.append(results[start])
            start += 1
        else:
            end = start + len(tasks)
            answers.append(dict(zip(tasks, results[start:end], strict=True)))
            start = end
    return answers
