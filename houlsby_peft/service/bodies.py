"""The bodies of requests: the service's own, and what those of all protocols have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from fastapi import Depends, HTTPException
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ..predict.questions import Input, Question
from .service import Service, service_of


def _check_encodable(text: str) -> str:
    text.encode()  # half of a surrogate pair is a ValueError
    return text


OfService = Annotated[Service, Depends(service_of)]
Text = Annotated[str, AfterValidator(_check_encodable)]
Texts = Text | Annotated[list[Text], Field(min_length=1)]


class Item(BaseModel):
    """An input: `task` or `tasks`, and either `text`, `text` and `text_pair`, or `question` and
    `context`. Without a task, it is for the only one; the tasks "*" are all that
    read such an input.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    task: str | None = Field(default=None, min_length=1)
    tasks: Literal["*"] | Annotated[list[str], Field(min_length=1)] | None = None
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
        if names not in forms or (self.task is not None and self.tasks is not None):
            raise ValueError(
                "a row must have either text, text and text_pair, or question and context, and "
                "task or tasks if there are several"
            )
        return self

    @property
    def input(self) -> Input:
        """The input of a `Predictor`."""
        if self.question is not None:
            return self.question, str(self.context)
        if self.text_pair is not None:
            return str(self.text), self.text_pair
        return str(self.text)

    def names(self, all_tasks: Iterable[str]) -> list[str]:
        """Return the tasks; an empty name stands for the only one."""
        if self.tasks is None:
            return [self.task or ""]
        return list(all_tasks) if self.tasks == "*" else list(dict.fromkeys(self.tasks))


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


async def ask(
    service: Service,
    inputs: Iterable[Input],
    task: str | None,
    pipeline: str | None = None,
    refuses_cut: bool = False,
) -> list[Question]:
    """Ask one task, by default the only one, for all classes of each input, or its other results.

    A task of another kind than the given pipeline gets the status of text-embeddings-inference.
    """
    name = await service.choose_task(task)
    questions = []
    for text in inputs:
        questions.append(Question(text, name, all_classes=True, refuses_cut=refuses_cut))
    answered = await service.predict(questions)
    kind = kind_of(answered)
    if pipeline not in (None, kind):
        raise HTTPException(424, f"This route is for {pipeline}; the task {name!r} is {kind}.")
    return answered


def kind_of(questions: Sequence[Question]) -> str:
    """Return the kind of the task that has answered questions."""
    facts = questions[0].facts
    return facts.pipeline if facts is not None else ""


def shape(question: Question, is_normalized: bool = True, dimensions: int | None = None) -> Any:
    """Return a result as other services do.

    Classes are a list, also the value of a regression. A vector is cut to its first dimensions, and
    has length 1 if it is to be normalized.
    """
    value = question.result
    kind = kind_of([question])
    if kind == "text-classification":
        return value if isinstance(value, list) else [value]
    if kind != "feature-extraction":
        return value
    if dimensions is not None and dimensions > len(value):
        raise HTTPException(
            422, f"dimensions must be at most {len(value)}, those of the model; got {dimensions}."
        )
    vector = value[:dimensions]
    length = sum(number * number for number in vector) ** 0.5
    if not is_normalized or not length:
        return vector
    return [number / length for number in vector]
