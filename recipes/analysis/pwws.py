"""Probability weighted word saliency: an attack that replaces words by synonyms (Ren et al. 2019, ACL, P19-1103)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS


# Words of the grammar, which have entries in WordNet as other words ("in" is an inch, "a" an ampere, "it" a trade).
# scikit-learn's list also has some words with a meaning of their own.
CONTENT_WORDS = """amount bill bottom call cry describe detail empty fill find fire found front full interest mill move
name part please serious show side sincere system thick thin top"""
FUNCTION_WORDS = ENGLISH_STOP_WORDS.difference(CONTENT_WORDS.split())
Probabilities = Callable[[Sequence[str]], NDArray[np.floating]]


@dataclass(frozen=True)
class Attack:
    """What became of one text.

    Attributes:
        text: The text with the replacements, up to the one that changed the prediction, or with all of them.
        success: Whether the prediction has changed.
        replaced: Number of replaced words.
        words: Number of words.
        queries: How many texts the model was asked about.
    """

    text: str
    success: bool
    replaced: int
    words: int
    queries: int


def pwws(
    text: str, label: int, probabilities: Probabilities, synonyms: Callable[[str], Sequence[str]], unknown: str
) -> Attack:
    """Attacks a text that the model gives its right label.

    Every word gets the substitute that lowers the label's probability most, by ΔP. Then the substitutes are put in,
    one after the other, in the order of ΔP times the softmax over the text's words of their saliency, which is how
    much the probability falls if the word is unknown. The attack succeeds as soon as the predicted label changes.

    Unlike the paper's, it does not replace named entities by others, and has no tagger: see WordNet.

    Args:
        text: The text.
        label: Its label, which the model predicts.
        probabilities: From texts to the probabilities of the labels, (texts, labels).
        synonyms: From a word to its possible substitutes.
        unknown: What stands for an unknown word.
    """
    pieces = re.split(r"([^\W\d_]+(?:'[^\W\d_]+)*)", text)  # a word at every second place
    places = range(1, len(pieces), 2)
    substitutes = {
        place: [_like(pieces[place], word) for word in synonyms(pieces[place])]
        for place in places
        if len(pieces[place]) > 1 and pieces[place].lower() not in FUNCTION_WORDS
    }
    candidates = [(place, word) for place, words in substitutes.items() for word in words]
    if not candidates:
        return Attack(text, False, 0, len(places), 0)

    asked = [
        text,
        *(_put(pieces, {place: unknown}) for place in places),
        *(_put(pieces, dict([c])) for c in candidates),
    ]
    original, *others = probabilities(asked)[:, label]
    saliency = original - np.array(others[: len(places)])
    weight = dict(zip(places, np.exp(saliency) / np.exp(saliency).sum(), strict=True))
    best: dict[int, tuple[float, str]] = {}  # by place: ΔP and the substitute
    for (place, word), probability in zip(candidates, others[len(places) :], strict=True):
        if place not in best or original - probability > best[place][0]:
            best[place] = (original - probability, word)

    order = sorted(best, key=lambda place: -weight[place] * best[place][0])
    chosen = [{place: best[place][1] for place in order[:number]} for number in range(1, len(order) + 1)]
    texts = [_put(pieces, replacements) for replacements in chosen]
    changed = np.flatnonzero(probabilities(texts).argmax(-1) != label)
    number = int(changed[0]) + 1 if len(changed) else len(order)
    return Attack(texts[number - 1], bool(len(changed)), number, len(places), len(asked) + number)


def _put(pieces: Sequence[str], replacements: dict[int, str]) -> str:
    return "".join(replacements.get(place, piece) for place, piece in enumerate(pieces))


def _like(word: str, substitute: str) -> str:
    """The substitute with the word's capitals."""
    if word.isupper() and len(word) > 1:
        return substitute.upper()
    return substitute.capitalize() if word[0].isupper() else substitute
