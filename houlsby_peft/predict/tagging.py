"""Tags of words, and the entities that they mark: those with which recipes/token_classification.py
trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from .results import EntityPrediction


# Kind, first word and last word.
Entity = tuple[str, int, int]


@dataclass(frozen=True)
class Piece:
    """A token of a text, and the characters that it stands for."""

    token: str
    span: tuple[int, int]


# A piece with its tag and the score of the tag.
TaggedPiece = tuple[Piece, str, float]


@dataclass
class _Word:
    """A word: the characters that it stands for, and the tag and the score of its first piece."""

    start: int
    end: int
    tag: str
    score: float


def read_tags(
    text: str,
    parts: Iterable[Sequence[TaggedPiece]],
    tokenizer: PreTrainedTokenizerBase,
    tags: Iterable[str],
) -> list[EntityPrediction]:
    """Return the entities of a text or, if the tags mark none (such as parts of speech), its words.

    Args:
        text: The text.
        parts: The tagged pieces of each part in which the text was read.
        tokenizer: The tokenizer that has cut the text.
        tags: All tags that there are.
    """
    words = _join_pieces(text, parts, tokenizer)
    tags_of_words = [word.tag for word in words]
    if mark_entities(tags):
        entities = find_entities(tags_of_words)
    else:
        entities = []
        for number, tag in enumerate(tags_of_words):
            if tag != "O":
                entities.append((tag, number, number))
    predictions: list[EntityPrediction] = []
    for kind, first, last in entities:
        start, end = words[first].start, words[last].end
        score = fmean(word.score for word in words[first : last + 1])
        predictions.append(
            {
                "entity_group": kind,
                "score": score,
                "word": text[start:end],
                "start": start,
                "end": end,
            }
        )
    return predictions


def _join_pieces(
    text: str, parts: Iterable[Sequence[TaggedPiece]], tokenizer: PreTrainedTokenizerBase
) -> list[_Word]:
    """Return the words of a text.

    A word is what the tokenizer takes for one. Some tokenizers do not mark the pieces within a
    word, such as RoBERTa's: then it is what blanks and line breaks separate.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    mark = getattr(backend and backend.model, "continuing_subword_prefix", None)
    words: list[_Word] = []
    # A tokenizer may begin with the end of the text.
    in_order = sorted(parts, key=lambda part: part[0][0].span if part else (0, 0))
    for piece, tag, score in chain.from_iterable(in_order):
        start, end = piece.span
        if not text[start:end].strip():
            continue
        if mark:
            continues_word = piece.token.startswith(mark)
        else:
            # Byte-level pieces begin behind the blank before them, others with it.
            between = text[words[-1].end : start + 1] if words else ""
            continues_word = not any(map(str.isspace, between))
        if words and continues_word:
            words[-1].end = end
        else:
            words.append(_Word(start, end, tag, score))
    return words


def mark_entities(tags: Iterable[str]) -> bool:
    """Return whether tags mark entities, such as B-PER, I-PER and O; otherwise each word's tag
    stands alone.
    """
    return all(tag == "O" or tag[:2] in ("B-", "I-", "E-", "S-") for tag in tags)


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence in their order, by the rules of CoNLL-2000's conlleval.

    An entity begins at B or S, and at I or E after O, after an end, or after another kind. This
    reads IOB1, IOB2 and IOBES.
    """
    entities: list[Entity] = []
    open_kind: str | None = None
    begin = 0
    for word, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        begins = prefix in ("B", "S") or (prefix in ("I", "E") and kind != open_kind)
        if open_kind is not None and (begins or prefix == "O"):
            entities.append((open_kind, begin, word - 1))
            open_kind = None
        if begins:
            open_kind, begin = kind, word
        if prefix in ("E", "S") and open_kind is not None:
            entities.append((open_kind, begin, word))
            open_kind = None
    return entities
