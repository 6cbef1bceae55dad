"""What predictions consist of, for annotations: `found: list[ClassPrediction] =
adapter.predict(texts)`.
"""

from __future__ import annotations

from typing import TypedDict


class ClassPrediction(TypedDict):
    """A class of a text and its probability; of a regression, the score is the value.

    The label is None if no class reaches the task's threshold.
    """

    label: str | None
    score: float


class EntityPrediction(TypedDict):
    """An entity of a text or, if the tags mark none, a word: its kind, and where it stands in the
    text.
    """

    entity_group: str
    score: float
    word: str
    start: int
    end: int


class AnswerPrediction(TypedDict):
    """The part of a context that answers a question; empty if none does."""

    answer: str
    score: float
    start: int
    end: int
