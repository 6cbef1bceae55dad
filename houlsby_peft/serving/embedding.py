"""Embeddings of texts, for which transformers' pipeline of that name returns every token's vector instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..errors import check_count
from .padding import encode, stack


@dataclass
class Embedding:
    """Represents a text by the mean of its tokens' last hidden states, as sentence-transformers does by default.

    Reimers & Gurevych 2019 (arXiv 1908.10084), section 3, found the mean better than the vector of [CLS] and than the
    maximum. The vectors are not normalized: compare them by their cosine.

    Args:
        model: A model without a head.
        tokenizer: Its tokenizer.
        cut: The tokenizer's arguments that cut long texts (see `cut_arguments`).
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    cut: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, inputs: Sequence[str | tuple[str, str]], batch_size: int = 32) -> list[list[float]]:
        """Return a vector, as long as the hidden states are wide, for each text or pair of texts."""
        check_count("batch_size", batch_size)
        vectors = []
        for start in range(0, len(inputs), batch_size):
            rows = [encode(self.tokenizer, text, self.cut) for text in inputs[start : start + batch_size]]
            batch = stack(self.tokenizer, rows)
            device = next(self.model.parameters()).device
            with torch.inference_mode():
                hidden = self.model(**{name: value.to(device) for name, value in batch.items()}).last_hidden_state
            vectors += [
                own[mask.bool()].float().mean(0).tolist()
                for own, mask in zip(hidden, batch["attention_mask"], strict=True)
            ]
        return vectors
