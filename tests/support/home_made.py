"""A transformer that no library knows, so that the places of its adapters are always inferred."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(16, 48)
        self.to_out = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.to_qkv(hidden).chunk(3, dim=-1)
        return self.to_out(nn.functional.scaled_dot_product_attention(query, key, value))


class Layer(nn.Module):
    def __init__(self, feed_forwards: int = 1) -> None:
        super().__init__()
        self.attention = Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(1 + feed_forwards))
        for index in range(feed_forwards):
            net = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
            self.add_module(f"net{index}", net)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norms[0](hidden))
        for index, norm in enumerate(self.norms[1:]):
            hidden = hidden + self.get_submodule(f"net{index}")(norm(hidden))
        return hidden


class HomeMade(nn.Module):
    """An encoder of 3 layers and width 16 with a classifier of 2 classes, for token numbers under
    99.
    """

    def __init__(self, **options: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(99, 16)
        self.blocks = nn.Sequential(*(Layer(**options) for _ in range(3)))
        self.classifier = nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.blocks(self.embedding(ids)).mean(dim=1))
