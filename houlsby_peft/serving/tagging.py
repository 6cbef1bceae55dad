"""Tags of words: the pipeline that predicts them, and the entities that they mark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import dropwhile
from typing import Any

from transformers import TokenClassificationPipeline
from transformers.pipelines.token_classification import AggregationStrategy


# Kind, first word and last word.
Entity = tuple[str, int, int]


class TagPipeline(TokenClassificationPipeline):
    """transformers' pipeline, with the words and entities of the recipe that trains taggers.

    It differs in three ways. With `aggregation_strategy="first"`, a word has the tag of its first piece also where a
    long text is cut within the word. Entities are those of `find_entities`, so also those of IOBES. Tags that mark no
    entities, such as parts of speech, are not merged: every word keeps its own.

    A word is what the tokenizer takes for one or, with a tokenizer that has no mark for the pieces within a word, such
    as RoBERTa's, what blanks separate.
    """

    def gather_pre_entities(  # type: ignore[override]
        self,
        sentence: str,
        input_ids: Any,
        scores: Any,
        offset_mapping: Any,
        special_tokens_mask: Any,
        aggregation_strategy: AggregationStrategy,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Return the pieces or, for words, those that are no blank, from the first one that begins a word.

        transformers gets the strategy "simple", with which it finds the same pieces and does not warn of tokenizers
        without a mark for pieces within a word.
        """
        given = (sentence, input_ids, scores, offset_mapping, special_tokens_mask, AggregationStrategy.SIMPLE)
        pieces: list[dict[str, Any]] = super().gather_pre_entities(*given, **kwargs)
        if aggregation_strategy in (AggregationStrategy.NONE, AggregationStrategy.SIMPLE) or offset_mapping is None:
            return pieces
        pieces = [piece for piece in pieces if sentence[piece["start"] : piece["end"]].strip()]
        return list(dropwhile(lambda piece: piece["is_subword"], pieces))

    def group_entities(self, entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the entities of tagged words or, if the tags mark none, the words."""
        tags = [entity["entity"] for entity in entities]
        found = [(tag, word, word) for word, tag in enumerate(tags)]
        if mark_entities((self.model.config.id2label or {}).values()):
            found = find_entities(tags)
        return [
            {**self.group_sub_entities(entities[begin : end + 1]), "entity_group": kind} for kind, begin, end in found
        ]


def mark_entities(tags: Iterable[str]) -> bool:
    """Return whether tags mark entities, such as B-PER, I-PER and O; otherwise each word's tag stands alone."""
    return all(tag == "O" or tag[:2] in ("B-", "I-", "E-", "S-") for tag in tags)


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence in their order, by the rules of CoNLL-2000's conlleval.

    An entity begins at B or S, and at I or E after O, after an end, or after another kind. This reads IOB1, IOB2 and
    IOBES.
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
