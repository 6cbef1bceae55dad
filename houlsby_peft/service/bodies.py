"""The bodies of the service's own requests, and what all bodies have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ..predict.readers import Input
from .engine import Query


def _check_encodable(text: str) -> str:
    text.encode()  # half of a surrogate pair is a ValueError
    return text


Text = Annotated[str, AfterValidator(_check_encodable)]


class Item(BaseModel):
    """An input: `task` or `tasks`, and either `text`, `text` and `text_pair`, or `question` and
    `context`.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    task: str | None = None
    tasks: list[str] | None = Field(default=None, min_length=1)
    text: Text | None = None
    text_pair: Text | None = None
    question: Text | None = None
    context: Text | None = None
    top_k: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_texts(self) -> Item:
        names = set()
        for name in ("text", "text_pair", "question", "context"):
            if getattr(self, name) is not None:
                names.add(name)
        forms = {"text"}, {"text", "text_pair"}, {"question", "context"}
        if names not in forms or (self.task is None) is (self.tasks is None):
            raise ValueError(
                "a row must have task or tasks, and either text, text and text_pair, or question "
                "and context"
            )
        return self

    @property
    def names(self) -> list[str]:
        """The tasks."""
        if self.tasks is None:
            return [str(self.task)]
        return list(dict.fromkeys(self.tasks))

    @property
    def input(self) -> Input:
        """The input of a `Predictor`."""
        if self.question is not None:
            return self.question, str(self.context)
        if self.text_pair is not None:
            return str(self.text), self.text_pair
        return str(self.text)

    @property
    def queries(self) -> list[Query]:
        """What it asks of each task."""
        text = self.input
        return [Query(name, text, self.top_k) for name in self.names]


class Items(BaseModel):
    """The body of a request for predictions."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"example": {"inputs": [{"task": "reviews", "text": "Good soup."}]}},
    )

    inputs: list[Item] = Field(min_length=1)


class Predictions(BaseModel):
    """The answer: the predictions of the rows, in their order, as `TaskBank.predict` gives them."""

    predictions: list[Any]


class Source(BaseModel):
    """Where the adapter of a task is; see `TaskSource`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    source: str
    revision: str | None = None
    threshold: float | None = Field(default=None, ge=0, le=1)
