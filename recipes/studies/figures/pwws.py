"""Probability weighted word saliency: an attack that reindices words by synonyms (Ren et al. 2019,
ACL, P19-1103).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS


# Function words, which WordNet has as other words ("in" is an inch, "a" an ampere, "it" a trade).
# scikit-learn's list also contains some content words.
CONTENT_WORDS = """amount bill bottom call cry describe detail empty fill find fire found front full interest mill move
name part please serious show side sincere system thick thin top"""
FUNCTION_WORDS = ENGLISH_STOP_WORDS.difference(CONTENT_WORDS.split())
Probabilities = Callable[[Sequence[str]], NDArray[np.floating]]


@dataclass(frozen=True)
class Attack:
    """The result of the attack on a text, with the numbers of its words and of texts that the model
    has scored.
    """

    text: str  # with all replacements up to the one that changed the prediction, if any did
    success: bool
    replaced: int
    words: int
    queries: int


def pwws(
    text: str,
    label: int,
    probabilities: Probabilities,
    synonyms: Callable[[str], Sequence[str]],
    unknown: str,
) -> Attack:
    """Attack a text that the model classifies correctly.

    Each word gets the substitute that lowers the label's probability most, by ΔP. The substitutes
    are then inserted, one after the other, by descending ΔP times the softmax over the words of
    their saliency, which is the decrease of the probability if the word is unknown. The attack
    succeeds as soon as the predicted label changes.

    Unlike the paper's attack, it does not replace named entities, and uses no tagger; see WordNet.
    """
    pieces = re.split(r"([^\W\d_]+(?:'[^\W\d_]+)*)", text)  # every second piece is a word
    indices = range(1, len(pieces), 2)
    substitutes = {
        index: [_like(pieces[index], word) for word in synonyms(pieces[index])]
        for index in indices
        if len(pieces[index]) > 1 and pieces[index].lower() not in FUNCTION_WORDS
    }
    candidates = [(index, word) for index, words in substitutes.items() for word in words]
    if not candidates:
        return Attack(text, False, 0, len(indices), 0)

    asked = [
        text,
        *(_put(pieces, {index: unknown}) for index in indices),
        *(_put(pieces, dict([c])) for c in candidates),
    ]
    original, *others = probabilities(asked)[:, label]
    saliency = original - np.array(others[: len(indices)])
    weight = dict(zip(indices, np.exp(saliency) / np.exp(saliency).sum(), strict=True))
    best: dict[int, tuple[float, str]] = {}  # by word: ΔP and the substitute
    for (index, word), probability in zip(candidates, others[len(indices) :], strict=True):
        if index not in best or original - probability > best[index][0]:
            best[index] = (original - probability, word)

    order = sorted(best, key=lambda index: -weight[index] * best[index][0])
    chosen = [
        {index: best[index][1] for index in order[:number]} for number in range(1, len(order) + 1)
    ]
    texts = [_put(pieces, replacements) for replacements in chosen]
    changed = np.flatnonzero(probabilities(texts).argmax(-1) != label)
    number = int(changed[0]) + 1 if len(changed) else len(order)
    return Attack(texts[number - 1], bool(len(changed)), number, len(indices), len(asked) + number)


def _put(pieces: Sequence[str], replacements: dict[int, str]) -> str:
    return "".join(replacements.get(index, piece) for index, piece in enumerate(pieces))


def _like(word: str, substitute: str) -> str:
    """Return the substitute, capitalized as the word."""
    if word.isupper() and len(word) > 1:
        return substitute.upper()
    return substitute.capitalize() if word[0].isupper() else substitute
