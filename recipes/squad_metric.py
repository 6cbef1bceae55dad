"""SQuAD's two scores, exact match and F1, as its official scripts for versions 1.1 and 2.0 compute them."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, without ASCII punctuation and articles, with single blanks (Rajpurkar et al. 2016, section 6.1)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 if both are the same when normalized, else 0."""
    return float(normalize(prediction) == normalize(answer))


def f1(prediction: str, answer: str, empty_counts: bool = False) -> float:
    """The F1 of the words of both, normalized, each as often as it occurs.

    Where either has no words, it is 0, but with `empty_counts`, as in version 2.0, 1 if both have none.
    """
    predicted, expected = normalize(prediction).split(), normalize(answer).split()
    if empty_counts and not (predicted and expected):
        return float(predicted == expected)
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0


def squad_scores(predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Percentages over all questions, each scored by the answer that fits best.

    If any question has no answer, the rules are those of version 2.0: no answer is the empty text, and questions with
    and without answer are scored apart as well.

    Args:
        predictions: The text predicted for each question, by its id; a missing one counts as wrong.
        answers: The texts that are right.
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
    """Version 2.0 leaves out answers that normalize to nothing, and takes the empty text where none is left."""
    return [text for text in texts if normalize(text)] or [""] if version_2 else texts
