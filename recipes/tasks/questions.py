"""SQuAD: questions and their contexts as windows of tokens, the answers found, and their scores."""

import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import yaml
from datasets import Dataset, List, Value
from numpy.typing import NDArray

from data.data import check_columns, locate, rows_of
from houlsby_peft.predict.answers import Window, Windows
from run.edge import RecipeError
from tasks.scores import check_finite


Answers = dict[str, list[Any]]  # `text` and `answer_start`, with an entry for each answer

COLUMNS = ("id", "question", "context", "answers")
_ANSWERS = {"text": List(Value("string")), "answer_start": List(Value("int64"))}
SCORES = ("f1", "exact_match")  # the first chooses the best epoch
ANSWERED = ("has_answer", "no_answer")  # version 2.0 also scores each kind of question


def read_questions(data: Dataset, name: str) -> Dataset:
    """Return the split `name` with its answers in one form, each with `text` and `answer_start`.

    Raise RecipeError unless it has SQuAD's columns, and each answer is where it claims to be.
    """
    check_columns(data, name, (), COLUMNS)
    ids: set[str] = set()
    read_answers = []
    for row, (id_, context, value) in enumerate(rows_of(data, ["id", "context", "answers"])):
        try:
            answers = _read_answers(value, context)
            mistake = _find_mistake(context, answers)
        except (KeyError, TypeError, ValueError, yaml.YAMLError):
            mistake = f"no answers with text and answer_start, but {str(value)[:50]!r}"
        if id_ in ids:
            mistake = f"the id {id_!r} again"
        if mistake:
            raise RecipeError(
                f"{name}: {locate(data, row)} has {mistake}. Correct it, or leave the row out."
            )
        ids.add(id_)
        read_answers.append(answers)
    return data.remove_columns("answers").add_column("answers", read_answers, feature=_ANSWERS)


def _read_answers(value: Any, context: str) -> Answers:
    """Return the answers of a row, which are the Hub's lists of texts and starts, or other forms.

    These are SQuAD's own list of answers, an object with a single one, each also as text in a
    table, or texts, of which the first in the context is meant. Nothing is no answer.
    """
    if isinstance(value, str) and value.strip()[:1] in ("{", "["):
        value = yaml.safe_load(value)  # Python's form and JSON's
    if isinstance(value, dict) and isinstance(value["text"], list):
        return value
    listed = [value] if isinstance(value, (str, dict)) else value or []
    answers: Answers = {"text": [], "answer_start": []}
    for answer in listed:
        if isinstance(answer, str):
            answer = {"text": answer, "answer_start": context.find(answer)}
        answers["text"].append(answer["text"])
        answers["answer_start"].append(int(answer["answer_start"]))
    return answers


def _find_mistake(context: str, answers: Answers) -> str | None:
    """Return which answer is empty or not where it claims to be."""
    for text, start in zip(answers["text"], answers["answer_start"], strict=True):
        text_there = context[start : start + len(text)] if start >= 0 else ""
        if not text.strip() or text_there != text:
            return (
                f"the answer {text[:50]!r} at character {start}, where its context has "
                f"{text_there[:50]!r}"
            )
    return None


def training_windows(data: Dataset, windows: Windows) -> Dataset:
    """Return the windows with the positions of the first answer's tokens.

    They are those of [CLS] in windows that lack a part of it.
    """

    def split_row(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        begin, end = _first_answer(row["answers"])
        for window in windows.split(row["question"], row["context"]):
            first, last = _answer_tokens(window, begin, end)
            yield {**_inputs_of(window), "start_positions": first, "end_positions": last}

    return _expand(data, split_row)


def _first_answer(answers: Answers) -> tuple[int, int]:
    """Return the characters of the first answer, without the blanks around it, which no token has.

    They are (-1, -1) without an answer.
    """
    if not answers["text"]:
        return -1, -1
    text = answers["text"][0]
    begin = answers["answer_start"][0] + len(text) - len(text.lstrip())
    return begin, begin + len(text.strip())


def _answer_tokens(window: Window, begin: int, end: int) -> tuple[int, int]:
    """Return the first and the last token of an answer, or [CLS] twice without a part of it."""
    tokens = []
    for token, span in enumerate(window.spans):
        if span is not None and span[1] > begin and span[0] < end:
            tokens.append((token, *span))
    if tokens:
        (first, first_begin, _), (last, _, last_end) = tokens[0], tokens[-1]
        if first_begin <= begin and last_end >= end:
            return first, last
    return window.cls, window.cls


def evaluation_windows(data: Dataset, windows: Windows) -> Dataset:
    """Return the windows of each question, in the order of the questions."""
    return _expand(
        data, lambda row: map(_inputs_of, windows.split(row["question"], row["context"]))
    )


def find_answers(
    data: Dataset, windows: Windows, starts: NDArray[np.float32], ends: NDArray[np.float32]
) -> dict[str, str]:
    """Return the answer to each question, by its id.

    `starts` and `ends` are the logits of evaluation_windows, (windows, tokens).
    """
    answers = {}
    number = 0
    for row in data:
        question_windows = windows.split(row["question"], row["context"])
        logits = []
        for window in question_windows:
            length = len(window.spans)
            pair = np.stack([starts[number, :length], ends[number, :length]])
            check_finite(pair)
            logits.append(torch.from_numpy(pair).unbind())
            number += 1
        answer = windows.find_answer(row["context"], question_windows, logits)
        answers[row["id"]] = answer["answer"]
    return answers


def _expand(
    data: Dataset, split_row: Callable[[Mapping[str, Any]], Iterable[dict[str, Any]]]
) -> Dataset:
    """Replace each row by one row or more."""

    def expand(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = defaultdict(list)
        for values in zip(*batch.values(), strict=True):
            for window in split_row(dict(zip(batch, values, strict=True))):
                for name, value in window.items():
                    columns[name].append(value)
        return columns

    return data.map(
        expand, batched=True, remove_columns=data.column_names, desc="Splitting into windows"
    )


def _inputs_of(window: Window) -> dict[str, Any]:
    return {**window.inputs, "length": len(window.spans)}


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return lower case, without ASCII punctuation and articles, with single blanks.

    See Rajpurkar et al. 2016, section 6.1.
    """
    words = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(words.split())


def f1(prediction: str, answer: str, empty_counts: bool = False) -> float:
    """Return the F1 of the two bags of normalized words.

    It is 0 if either has no words. With `empty_counts`, as in version 2.0, it is 1 if both have
    none.
    """
    predicted, expected = normalize(prediction).split(), normalize(answer).split()
    if empty_counts and not (predicted or expected):
        return 1.0
    common_words = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common_words / max(1, len(predicted) + len(expected))


def squad_scores(
    predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Return exact match and F1 as SQuAD's official scripts compute them, in percent.

    If any question has no answer, the rules are those of version 2.0: the empty text means no
    answer, and questions with and without an answer are also scored separately.
    """
    is_version_2 = not all(answers.values())
    scores = {}
    for question, texts in answers.items():
        scores[question] = _score_answer(predictions[question], texts, is_version_2)
    questions = {"": list(answers)}
    if is_version_2:
        questions["has_answer_"] = [question for question, texts in answers.items() if texts]
        questions["no_answer_"] = [question for question, texts in answers.items() if not texts]
    means = {}
    for prefix, of_kind in questions.items():
        for name in SCORES:
            if of_kind:
                total = sum(scores[question][name] for question in of_kind)
                means[f"{prefix}{name}"] = 100 * total / len(of_kind)
    return means


def _score_answer(prediction: str, answers: Sequence[str], is_version_2: bool) -> dict[str, float]:
    """Return the scores of a prediction by the answer that fits best.

    By version 2.0, answers that normalize to nothing are left out.
    """
    if is_version_2:
        answers = list(filter(normalize, answers)) or [""]
    return {
        "f1": max(f1(prediction, answer, is_version_2) for answer in answers),
        "exact_match": float(normalize(prediction) in map(normalize, answers)),
    }
