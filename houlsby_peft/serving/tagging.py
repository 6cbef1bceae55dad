"""Tags of words: the pipeline that predicts them, and the entities that they mark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import TokenClassificationPipeline
from transformers.pipelines.token_classification import AggregationStrategy


# Kind, first word and last word.
Entity = tuple[str, int, int]


class TagPipeline(TokenClassificationPipeline):
    """transformers' pipeline, with the words and entities of the recipe that trains taggers.

    It differs in three ways. The parts of a long text are read as one, so that words and entities may reach from one
    into the next. With `aggregation_strategy="first"`, a word has the tag of its first piece. Entities are those of
    `find_entities`, so also those of IOBES. Tags that mark no entities, such as parts of speech, are not merged: every
    word keeps its own.

    A word is what the tokenizer takes for one or, with a tokenizer that has no mark for the pieces within a word, such
    as RoBERTa's, what blanks and line breaks separate.
    """

    def postprocess(  # type: ignore[override]
        self, all_outputs: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """Return the entities of a text from the outputs for its parts."""
        if len(all_outputs) > 1:
            all_outputs = [_join(all_outputs)]
        found: list[dict[str, Any]] = super().postprocess(all_outputs, *args, **kwargs)
        return found

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
        """Return the pieces or, for words, those that are no blank, each with whether it is within a word.

        transformers compares the lengths of a piece and of its text, which differ for a whole word as well if the
        tokenizer normalizes it, and takes only a blank for the end of a word. It gets the strategy "simple", with
        which it finds the same pieces and does not warn of tokenizers without a mark for pieces within a word.
        """
        given = (sentence, input_ids, scores, offset_mapping, special_tokens_mask, AggregationStrategy.SIMPLE)
        pieces: list[dict[str, Any]] = super().gather_pre_entities(*given, **kwargs)
        if aggregation_strategy in (AggregationStrategy.NONE, AggregationStrategy.SIMPLE) or offset_mapping is None:
            return pieces
        pieces = [piece for piece in pieces if sentence[piece["start"] : piece["end"]].strip()]
        tokenizer: Any = self.tokenizer
        mark = getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None)
        end = 0
        for piece in pieces:
            # Byte-level pieces begin behind the blank before them, others with it.
            is_within = not any(map(str.isspace, sentence[end : piece["start"] + 1]))
            piece["is_subword"] = piece["word"].startswith(mark) if mark else is_within
            end = piece["end"]
        return pieces

    def group_entities(self, entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the entities of tagged words or, if the tags mark none, the words."""
        tags = [entity["entity"] for entity in entities]
        found = [(tag, word, word) for word, tag in enumerate(tags)]
        if mark_entities((self.model.config.id2label or {}).values()):
            found = find_entities(tags)
        return [
            {**self.group_sub_entities(entities[begin : end + 1]), "entity_group": kind} for kind, begin, end in found
        ]


def _join(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the outputs for the parts of a text as those for one part; shared pieces are those of the first part."""
    names = ("logits", "input_ids", "special_tokens_mask", "offset_mapping")
    found = []
    for part in parts:
        places, is_special = (part[name][0].tolist() for name in ("offset_mapping", "special_tokens_mask"))
        words = part.get("word_ids") or [0] * len(places)  # places are within words if the caller has split these
        found.append(([([words[row], *place], row) for row, place in enumerate(places) if not is_special[row]], part))
    kept: list[list[torch.Tensor]] = []
    word_ids: list[int] = []
    reached = [-1, -1, -1]
    for places, part in sorted(found, key=lambda each: each[0]):  # a tokenizer may begin with the end of the text
        own = [(place, row) for place, row in places if place > reached]
        kept.append([part[name][:, [row for _, row in own]] for name in names])
        word_ids += [word for (word, *_), _ in own]
        reached = max([reached, *(place for place, _ in own)])
    joined = {name: torch.cat([part[i] for part in kept], 1) for i, name in enumerate(names)}
    return {**parts[0], **joined, "word_ids": word_ids if parts[0].get("word_ids") else None}


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
