"""Tags of words, and the entities that they mark: those with which recipes/token_classification.py
trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


def read_tags(
    text: str,
    parts: Iterable[Sequence[tuple[Piece, str, float]]],
    tokenizer: PreTrainedTokenizerBase,
    tags: Iterable[str],
) -> list[EntityPrediction]:
    """Return the entities of a text or, if the tags mark none (such as parts of speech), its words.

    A word has the tag of its first piece. It is what the tokenizer takes for a word or, with a
    tokenizer that does not mark the pieces within a word, such as RoBERTa's, what blanks and line
    breaks separate. `parts` are the pieces of each part in which the text was read, with the tag
    and the score of each; `tags` are all that there are.
    """
    # A tokenizer may begin with the end of the text.
    in_order = sorted(parts, key=lambda part: part[0][0].span if part else (0, 0))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    mark = getattr(backend and backend.model, "continuing_subword_prefix", None)
    words: list[tuple[list[Piece], str, float]] = []
    end = 0
    for piece, tag, score in (item for part in in_order for item in part):
        begin = piece.span[0]
        if not text[begin : piece.span[1]].strip():
            continue
        # Byte-level pieces begin behind the blank before them, others with it.
        is_within = (
            piece.token.startswith(mark)
            if mark
            else not any(map(str.isspace, text[end : begin + 1]))
        )
        if words and is_within:
            words[-1][0].append(piece)
        else:
            words.append(([piece], tag, score))
        end = piece.span[1]
    own = [tag for _, tag, _ in words]
    found = (
        find_entities(own)
        if mark_entities(tags)
        else [(tag, word, word) for word, tag in enumerate(own)]
    )
    results: list[EntityPrediction] = []
    for kind, first, last in found:
        if kind == "O":
            continue
        start, stop = words[first][0][0].span[0], words[last][0][-1].span[1]
        score = fmean(score for _, _, score in words[first : last + 1])
        results.append(
            {
                "entity_group": kind,
                "score": score,
                "word": text[start:stop],
                "start": start,
                "end": stop,
            }
        )
    return results


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
    found = []
    kind, begin, open_ = "", 0, False
    for word, tag in enumerate([*tags, "O"]):
        prefix, _, new = tag.partition("-")
        begins = prefix in ("B", "S") or (prefix in ("I", "E") and not (open_ and new == kind))
        if open_ and (begins or prefix == "O"):
            found.append((kind, begin, word - 1))
            open_ = False
        if begins:
            kind, begin, open_ = new, word, True
        if prefix in ("E", "S") and open_:
            found.append((kind, begin, word))
            open_ = False
    return found
