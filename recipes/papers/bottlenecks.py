"""The variants of the adapter that Houlsby et al. 2019 tried without gain (section 3.6)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from houlsby_peft import Bottleneck, HoulsbyConfig


class LayerNormBottleneck(Bottleneck):
    """A layer norm before the activation."""

    def __init__(self, width: int, r: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(width, r, *args, **kwargs)
        self.activation = nn.Sequential(nn.LayerNorm(r), self.activation)


class BatchNormBottleneck(Bottleneck):
    """A batch norm before the activation, over all tokens of a batch, including padding."""

    def __init__(self, width: int, r: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(width, r, *args, **kwargs)
        self.activation = nn.Sequential(_TokenBatchNorm(r), self.activation)


class _TokenBatchNorm(nn.BatchNorm1d):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.flatten(0, -2)).view_as(hidden)


class TwoLayerBottleneck(Bottleneck):
    """A second layer of the bottleneck's width, with its own activation."""

    def __init__(self, width: int, r: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(width, r, *args, **kwargs)
        # The layer has PyTorch's initialization: the outer projections keep the branch small.
        self.activation = nn.Sequential(self.activation, nn.Linear(r, r), self.activation)


class GatedBottleneck(Bottleneck):
    """A parallel bottleneck whose output multiplies the sub-layer's: `h * (1 + up_proj(act(down_proj(x))))`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Saved with the weights, which alone would load as those of a parallel adapter, and predict something else.
        self.register_buffer("gated", torch.zeros(1))

    def forward(self, hidden: torch.Tensor, read: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply the hidden states."""
        read = hidden if read is None else read
        return hidden * (1 + self.branch(read.to(self.down_proj.weight.dtype)).to(hidden.dtype))


BOTH = ("attention", "feed_forward")
# What differs in the configuration, and the class of the bottlenecks.
VARIANTS: dict[str, tuple[dict[str, Any], type[Bottleneck]]] = {
    "paper": ({}, Bottleneck),
    "layer_norm": ({}, LayerNormBottleneck),
    "batch_norm": ({}, BatchNormBottleneck),
    "two_layers": ({}, TwoLayerBottleneck),
    "tanh": ({"activation": "tanh"}, Bottleneck),
    "relu": ({"activation": "relu"}, Bottleneck),
    "swish": ({"activation": "swish"}, Bottleneck),
    "attention_only": ({"positions": ("attention",)}, Bottleneck),
    "parallel": ({"kind": "parallel", "positions": BOTH}, Bottleneck),
    "parallel_gated": ({"kind": "parallel", "positions": BOTH}, GatedBottleneck),
}


@contextmanager
def made_of(bottleneck: type[Bottleneck]) -> Iterator[None]:
    """Let the library, which makes all bottlenecks by `from_config`, make those of another class."""
    make = Bottleneck.from_config.__func__

    def from_config(config: HoulsbyConfig, width: int, r: int) -> Bottleneck:
        return make(bottleneck, config, width, r)

    with patch.object(Bottleneck, "from_config", staticmethod(from_config)):
        yield
