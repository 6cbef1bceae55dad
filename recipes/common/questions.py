"""SQuAD: questions and long contexts as windows of tokens, answers from the outputs for windows, and their scores."""

import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import BatchEncoding, PreTrainedTokenizerBase

from common.data import columns_of, locate
from common.edge import RecipeError
from common.scores import check_finite


COLUMNS = ("id", "question", "context", "answers")
SCORES = ("f1", "exact_match")  # the first chooses the best epoch
ANSWERED = ("has_answer", "no_answer")  # in version 2.0 there are scores of each kind of questions, too
QUESTION_TOKENS = 64  # longer questions are truncated, as in BERT's own code


@dataclass(frozen=True)
class Windows:
    """How a context is split into overlapping windows of tokens, and how an answer is found in them.

    Windows share `stride` tokens. In each, `n_best` starts and ends are tried. There is no answer if that scores
    higher than the best one by more than `null_threshold`; None: always give an answer.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    stride: int
    n_best: int
    max_answer_length: int
    null_threshold: float | None

    def __post_init__(self) -> None:
        if not self.tokenizer.is_fast:
            raise RecipeError(
                "Questions need a fast tokenizer, which tells where each token is in the context; "
                f"{type(self.tokenizer).__name__} is none. Choose another --model_name."
            )
        least = self.stride + QUESTION_TOKENS + self.tokenizer.num_special_tokens_to_add(pair=True) + 1
        most = self.tokenizer.model_max_length
        if not least <= self.max_length <= most:
            raise RecipeError(
                f"--max_length must be from {least} (--stride {self.stride}, a question of {QUESTION_TOKENS} tokens, "
                f"special tokens and one of context) to the encoder's {most}, got {self.max_length}."
            )

    def training(self, data: Dataset) -> Dataset:
        """Return the windows with the tokens of the first answer, or of [CLS] if a window lacks a part of it."""
        return _expand(data, self._training_rows)

    def _training_rows(self, example: dict[str, Any]) -> Iterator[dict[str, Any]]:
        answers = example["answers"]
        text = answers["text"][0] if answers["text"] else ""
        # Tokens leave out blanks, so that none would begin or end with those around an answer.
        begin = answers["answer_start"][0] + len(text) - len(text.lstrip()) if text else -1
        end = begin + len(text.strip())
        for row in self._rows(example):
            starts, ends = np.array(row.pop("starts")), np.array(row.pop("ends"))
            inside = np.flatnonzero((starts >= 0) & (ends > begin) & (starts < end))
            whole = inside.size and starts[inside[0]] <= begin and ends[inside[-1]] >= end
            first, last = (inside[0], inside[-1]) if whole else (row["cls"], row["cls"])
            yield {**row, "start_positions": int(first), "end_positions": int(last)}

    def evaluation(self, data: Dataset) -> Dataset:
        """Return the windows with the question's `id` and the characters of each token of the context."""
        return _expand(data, lambda example: ({**row, "id": example["id"]} for row in self._rows(example)))

    def _rows(self, example: dict[str, Any]) -> Iterator[dict[str, Any]]:
        tokens = self.tokenizer(
            self._cut(example["question"]),
            example["context"],
            truncation="only_second",
            max_length=self.max_length,
            stride=self.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for row, ids in enumerate(tokens["input_ids"]):
            inputs = {name: tokens[name][row] for name in self.tokenizer.model_input_names if name in tokens}
            starts, ends = _characters(tokens, row)
            cls = ids.index(self.tokenizer.cls_token_id) if self.tokenizer.cls_token_id in ids else 0
            yield {**inputs, "starts": starts, "ends": ends, "cls": cls, "length": len(ids)}

    def _cut(self, question: str) -> str:
        tokens = self.tokenizer(
            question.strip(), add_special_tokens=False, truncation=True, max_length=QUESTION_TOKENS,
            return_offsets_mapping=True,
        )  # fmt: skip
        return question.strip()[: max((end for _, end in tokens["offset_mapping"]), default=0)]

    def answers(
        self, data: Dataset, windows: Dataset, start_logits: NDArray[np.float32], end_logits: NDArray[np.float32]
    ) -> dict[str, str]:
        """Return the best answer to each question, by its id, from logits of (windows, tokens).

        It is the span with the highest sum of start and end logit in any window. "No answer" has the score of [CLS] in
        the window where that is lowest.
        """
        spans: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
        null = dict.fromkeys(data["id"], np.inf)
        for window, start, end in zip(windows, start_logits, end_logits, strict=True):
            length, name = window["length"], window["id"]
            check_finite(start[:length] + end[:length])
            spans[name] += self._best_spans(window, start[:length], end[:length])
            null[name] = min(null[name], start[window["cls"]] + end[window["cls"]])
        texts = {}
        for name, context in zip(data["id"], data["context"], strict=True):
            score, begin, finish = max(spans[name], default=(-np.inf, 0, 0))
            none = self.null_threshold is not None and null[name] - score > self.null_threshold
            texts[name] = "" if none else context[begin:finish]
        return texts

    def _best_spans(
        self, window: dict[str, Any], start: NDArray[np.float32], end: NDArray[np.float32]
    ) -> list[tuple[float, int, int]]:
        of_context = np.flatnonzero(np.array(window["starts"]) >= 0)
        firsts = of_context[np.argsort(-start[of_context], kind="stable")[: self.n_best]]
        lasts = of_context[np.argsort(-end[of_context], kind="stable")[: self.n_best]]
        scores = start[firsts][:, None] + end[lasts]
        length = lasts - firsts[:, None] + 1
        scores = np.where((length >= 1) & (length <= self.max_answer_length), scores, -np.inf)
        if not np.isfinite(scores).any():
            return []
        row, column = np.unravel_index(scores.argmax(), scores.shape)
        return [(float(scores[row, column]), window["starts"][firsts[row]], window["ends"][lasts[column]])]


def check_questions(data: Dataset, name: str) -> None:
    """Raise RecipeError unless `data` has SQuAD's columns and every answer is in its context where it claims to be."""
    if missing := [column for column in COLUMNS if column not in data.column_names]:
        raise RecipeError(f"{name} lacks the column {missing[0]!r}; it has {', '.join(columns_of(data))}.")
    seen: set[str] = set()
    for row, (question, context, answers) in enumerate(zip(data["id"], data["context"], data["answers"], strict=True)):
        texts, starts = answers["text"], answers["answer_start"]
        wrong = None
        if question in seen:
            wrong = f"the id {question!r} again"
        elif len(texts) != len(starts):
            wrong = f"{len(texts)} answers and {len(starts)} starts"
        else:
            for text, start in zip(texts, starts, strict=True):
                there = context[start : start + len(text)] if start >= 0 else ""
                if not text.strip() or there != text:
                    wrong = f"the answer {text[:50]!r} at character {start}, where its context has {there[:50]!r}"
        if wrong:
            raise RecipeError(f"{name}: {locate(data, row)} has {wrong}. Correct it, or leave the row out.")
        seen.add(question)


def _expand(data: Dataset, rows_of: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]) -> Dataset:
    """Replace each row by one row or more."""

    def expand(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        examples = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
        rows = [row for example in examples for row in rows_of(example)]
        return {name: [row[name] for row in rows] for name in rows[0]}

    return data.map(expand, batched=True, remove_columns=data.column_names, desc="Splitting into windows")


def _characters(tokens: BatchEncoding, row: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return where each token begins and ends in the context; -1 for the question's and special tokens."""
    spans = [
        span if part == 1 else (-1, -1)
        for span, part in zip(tokens["offset_mapping"][row], tokens.sequence_ids(row), strict=True)
    ]
    return [start for start, _ in spans], [end for _, end in spans]


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return lower case, without ASCII punctuation and articles, with single blanks (Rajpurkar et al. 2016, 6.1)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """Return 1 if both are equal when normalized, else 0."""
    return float(normalize(prediction) == normalize(answer))


def f1(prediction: str, answer: str, empty_counts: bool = False) -> float:
    """Return the F1 of the two bags of normalized words.

    If either has no words it is 0, except with `empty_counts`, as in version 2.0, where it is 1 if both have none.
    """
    predicted, expected = normalize(prediction).split(), normalize(answer).split()
    if empty_counts and not (predicted and expected):
        return float(predicted == expected)
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0


def squad_scores(predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return exact match and F1 as SQuAD's official scripts compute them, in percent over all questions.

    Each question is scored by its best-fitting answer; a missing prediction counts as wrong. If any question has no
    answer, the rules are those of version 2.0: the empty text means no answer, and questions with and without an
    answer are also scored separately.
    """
    version_2 = not all(answers.values())
    golds = {question: _gold(texts, version_2) for question, texts in answers.items()}

    def score(of_pair: Callable[[str, str], float]) -> dict[str, float]:
        return {
            question: max(of_pair(predictions[question], gold) for gold in texts) if question in predictions else 0.0
            for question, texts in golds.items()
        }

    scores = {"f1": score(lambda a, b: f1(a, b, version_2)), "exact_match": score(exact_match)}
    groups = {"": list(golds)}
    if version_2:
        groups["has_answer_"] = [question for question, texts in answers.items() if texts]
        groups["no_answer_"] = [question for question, texts in answers.items() if not texts]
    return {
        f"{group}{name}": 100 * sum(values[question] for question in questions) / len(questions)
        for group, questions in groups.items()
        if questions
        for name, values in scores.items()
    }


def _gold(texts: Sequence[str], version_2: bool) -> Sequence[str]:
    """Return the texts to compare with: version 2.0 leaves out answers that normalize to nothing, and uses the empty
    text if none is left."""
    return [text for text in texts if normalize(text)] or [""] if version_2 else texts
