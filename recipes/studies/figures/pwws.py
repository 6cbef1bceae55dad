"""Probability weighted word saliency (PWWS): an attack that replaces words by synonyms.

Ren et al. 2019, ACL, P19-1103.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS


# scikit-learn's list of function words also contains some content words.
CONTENT_WORDS = """amount bill bottom call cry describe detail empty fill find fire found front full
interest mill move name part please serious show side sincere system thick thin top"""
# WordNet has function words as other words ("in" is an inch, "a" an ampere, "it" a trade).
FUNCTION_WORDS = ENGLISH_STOP_WORDS.difference(CONTENT_WORDS.split())

Probabilities = Callable[[Sequence[str]], NDArray[np.floating]]  # [texts, labels]
Synonyms = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Attack:
    """The result of the attack on a text."""

    text: str  # with all replacements up to the one that changed the prediction, if any did
    success: bool
    replaced: int
    words: int
    queries: int  # texts that the model has scored


def pwws(
    text: str, label: int, probabilities: Probabilities, synonyms: Synonyms, unknown: str
) -> Attack:
    """Attack a text that the model classifies correctly.

    Each word gets the substitute that lowers the label's probability most, by ΔP. The substitutes
    are then inserted, one after the other, by descending ΔP times the softmax over the words of
    their saliency. A word's saliency is the decrease of the probability if the word is unknown. The
    attack succeeds as soon as the predicted label changes.

    Unlike the paper's attack, it does not replace named entities, and uses no tagger; see WordNet.
    """
    pieces = re.split(r"([^\W\d_]+(?:'[^\W\d_]+)*)", text)
    words = range(1, len(pieces), 2)  # the indices of the words: every second piece
    candidates = _candidates(pieces, words, synonyms)
    if not candidates:
        return Attack(text, False, 0, len(words), 0)

    texts = [text]
    texts += [_put(pieces, {index: unknown}) for index in words]
    texts += [_put(pieces, {index: substitute}) for index, substitute in candidates]
    original, *changed = probabilities(texts)[:, label]
    saliency = np.exp(original - np.array(changed[: len(words)]))
    weights = dict(zip(words, saliency / saliency.sum(), strict=True))
    substitutes = pd.DataFrame(candidates, columns=["index", "word"])
    substitutes["fall"] = original - np.array(changed[len(words) :])
    best = substitutes.loc[substitutes.groupby("index")["fall"].idxmax()]
    rank = best["index"].map(weights) * best["fall"]
    order = best.loc[rank.sort_values(ascending=False, kind="stable").index]
    attempts: list[str] = []
    replacements: dict[int, str] = {}
    for index, word in zip(order["index"], order["word"], strict=True):
        replacements[index] = word
        attempts.append(_put(pieces, replacements))
    wrong = np.flatnonzero(probabilities(attempts).argmax(-1) != label)
    success = len(wrong) > 0
    replaced = int(wrong[0]) + 1 if success else len(order)
    return Attack(attempts[replaced - 1], success, replaced, len(words), len(texts) + replaced)


def _candidates(
    pieces: Sequence[str], words: Sequence[int], synonyms: Synonyms
) -> list[tuple[int, str]]:
    """Return the substitutes of each content word, with the index of the word."""
    candidates = []
    for index in words:
        word = pieces[index]
        if len(word) > 1 and word.lower() not in FUNCTION_WORDS:
            candidates += [(index, _like(word, synonym)) for synonym in synonyms(word)]
    return candidates


def _put(pieces: Sequence[str], replacements: Mapping[int, str]) -> str:
    """Return the text with some of its pieces replaced."""
    return "".join(replacements.get(index, piece) for index, piece in enumerate(pieces))


def _like(word: str, substitute: str) -> str:
    """Return the substitute, capitalized as the word."""
    if word.isupper() and len(word) > 1:
        return substitute.upper()
    return substitute.capitalize() if word[0].isupper() else substitute
