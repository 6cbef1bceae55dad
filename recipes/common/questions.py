"""SQuAD: questions and their contexts as windows of tokens, the answers that a model finds, and
their scores.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray

from common.data import check_columns, locate
from common.edge import RecipeError
from common.scores import check_finite
from houlsby_peft.serving.answers import Window, Windows


COLUMNS = ("id", "question", "context", "answers")
SCORES = ("f1", "exact_match")  # the first chooses the best epoch
ANSWERED = (
    "has_answer",
    "no_answer",
)  # in version 2.0 there are scores of each kind of questions, too


def training_windows(data: Dataset, windows: Windows) -> Dataset:
    """Return the windows with the tokens of the first answer, or of [CLS] if a window lacks a part
    of it.
    """

    def rows(example: dict[str, Any]) -> Iterator[dict[str, Any]]:
        answers = example["answers"]
        text = answers["text"][0] if answers["text"] else ""
        # Tokens leave out blanks, so that none would begin or end with those around an answer.
        begin = answers["answer_start"][0] + len(text) - len(text.lstrip()) if text else -1
        end = begin + len(text.strip())
        for window in windows.split(example["question"], example["context"]):
            spans = [
                (number, *span) for number, span in enumerate(window.spans) if span is not None
            ]
            inside = [span for span in spans if span[2] > begin and span[1] < end]
            whole = inside and inside[0][1] <= begin and inside[-1][2] >= end
            first, last = (inside[0][0], inside[-1][0]) if whole else (window.cls, window.cls)
            yield {**_inputs(window), "start_positions": first, "end_positions": last}

    return _expand(data, rows)


def evaluation_windows(data: Dataset, windows: Windows) -> Dataset:
    return _expand(data, lambda row: map(_inputs, windows.split(row["question"], row["context"])))


def find_answers(
    data: Dataset, windows: Windows, starts: NDArray[np.float32], ends: NDArray[np.float32]
) -> dict[str, str]:
    """Return the answer to each question, by its id, from the logits of (windows, tokens) of
    `evaluation_windows`.
    """
    rows, answers = zip(starts, ends, strict=True), {}
    for row in data:
        own = windows.split(row["question"], row["context"])
        logits = [
            [torch.from_numpy(values[: len(window.spans)]) for values in next(rows)]
            for window in own
        ]
        check_finite(torch.cat([values for pair in logits for values in pair]).numpy())
        answers[row["id"]] = windows.find_answer(row["context"], own, logits)["answer"]
    return answers


def check_questions(data: Dataset, name: str) -> None:
    """Raise RecipeError unless `data` has SQuAD's columns and every answer is in its context where
    it claims to be.
    """
    check_columns(data, name, (), COLUMNS)
    seen: set[str] = set()
    for row, (question, context, answers) in enumerate(
        zip(data["id"], data["context"], data["answers"], strict=True)
    ):
        wrong = f"the id {question!r} again" if question in seen else None
        for text, start in zip(answers["text"], answers["answer_start"], strict=True):
            there = context[start : start + len(text)] if start >= 0 else ""
            if not text.strip() or there != text:
                wrong = f"the answer {text[:50]!r} at character {start}, where its context has {there[:50]!r}"
        if wrong:
            raise RecipeError(
                f"{name}: {locate(data, row)} has {wrong}. Correct it, or leave the row out."
            )
        seen.add(question)


def _expand(
    data: Dataset, rows_of: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]
) -> Dataset:
    """Replace each row by one row or more."""

    def expand(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        examples = (
            dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)
        )
        rows = [row for example in examples for row in rows_of(example)]
        return {name: [row[name] for row in rows] for name in rows[0]}

    return data.map(
        expand, batched=True, remove_columns=data.column_names, desc="Splitting into windows"
    )


def _inputs(window: Window) -> dict[str, Any]:
    return {**window.inputs, "length": len(window.spans)}


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return lower case, without ASCII punctuation and articles, with single blanks (Rajpurkar et
    al. 2016, 6.1).
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, answer: str, empty_counts: bool = False) -> float:
    """Return the F1 of the two bags of normalized words.

    If either has no words it is 0, except with `empty_counts`, as in version 2.0, where it is 1 if
    both have none.
    """
    predicted, expected = normalize(prediction).split(), normalize(answer).split()
    if empty_counts and not (predicted and expected):
        return float(predicted == expected)
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0


def squad_scores(
    predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Return exact match and F1 as SQuAD's official scripts compute them, in percent over all
    questions.

    Each question is scored by its best-fitting answer. If any question has no answer, the rules are
    those of version 2.0: the empty text means no answer, answers that normalize to nothing are left
    out, and questions with and without an answer are also scored separately.
    """
    version_2 = not all(answers.values())
    scores = {}
    for question, texts in answers.items():
        golds = [text for text in texts if normalize(text)] or [""] if version_2 else texts
        found = predictions[question]
        scores[question] = {
            "f1": max(f1(found, gold, version_2) for gold in golds),
            "exact_match": float(normalize(found) in map(normalize, golds)),
        }
    groups = {"": list(scores)}
    if version_2:
        groups["has_answer_"] = [question for question, texts in answers.items() if texts]
        groups["no_answer_"] = [question for question, texts in answers.items() if not texts]
    return {
        f"{group}{name}": 100
        * sum(scores[question][name] for question in questions)
        / len(questions)
        for group, questions in groups.items()
        if questions
        for name in SCORES
    }
