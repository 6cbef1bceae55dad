"""Rows of tokens as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase


def can_pad(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PeftModel) -> bool:
    """Return whether texts may be padded for a model, with adapters or without.

    Decoders, whose head is called `score`, classify a text by its last token other than the pad token in their
    configuration.
    """
    known = getattr(model.config.get_text_config(), "pad_token_id", None)
    return tokenizer.pad_token_id is not None and (tokenizer.pad_token_id == known or not hasattr(model, "score"))


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str | tuple[str, str], cut: Mapping[str, Any]
) -> dict[str, list[int]]:
    """Return a text or a pair of texts as a row of the model's inputs, cut by these arguments of the tokenizer."""
    # As a batch of one, because tokenizers take a single pair whose second text is empty for one text.
    encoded = tokenizer(*([part] for part in ((text,) if isinstance(text, str) else text)), **cut)
    return {name: values[0] for name, values in encoded.items()}


def stack(tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return rows as one tensor for each of the model's inputs. Rows of equal length need no pad token."""
    if len({len(row["input_ids"]) for row in rows}) == 1:
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    return dict(DataCollatorWithPadding(tokenizer)(list(rows)))


def check_lengths(lengths: Iterable[int], name: str) -> None:
    """Refuse texts without a token, for which a model has no output.

    Args:
        lengths: The number of tokens of each text.
        name: The name of the adapter or task.

    Raises:
        ValueError: A text has none.
    """
    if not all(lengths):
        raise ValueError(
            f"Each text must have at least one token; the tokenizer of {name!r} found none. Leave out empty texts."
        )
