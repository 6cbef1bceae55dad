"""The variants of the adapter that Houlsby et al. 2019 tried without gain (section 3.6)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from houlsby_peft import Bottleneck, HoulsbyConfig


class _TokenBatchNorm(nn.BatchNorm1d):
    """A batch norm over all tokens of a batch, including padding."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.flatten(0, -2)).view_as(hidden)


def with_inside(inside: Callable[[int, nn.Module], Sequence[nn.Module]]) -> type[Bottleneck]:
    """Return a bottleneck with these modules between its projections, given their width and the
    activation.
    """

    class Changed(Bottleneck):
        def __init__(self, width: int, r: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(width, r, *args, **kwargs)
            self.activation = nn.Sequential(*inside(r, self.activation))

    return Changed


class GatedBottleneck(Bottleneck):
    """A parallel bottleneck whose output multiplies the sub-layer's: `h * (1 +
    up_proj(act(down_proj(x))))`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Saved with the weights, which alone would load as those of a parallel adapter, and predict
        # something else.
        self.register_buffer("gated", torch.zeros(1))

    def forward(self, hidden: torch.Tensor, read: torch.Tensor | None = None) -> torch.Tensor:
        read = hidden if read is None else read
        return hidden * (1 + self.branch(read.to(self.down_proj.weight.dtype)).to(hidden.dtype))


BOTH = ("attention", "feed_forward")
# What differs in the configuration, and the class of the bottlenecks.
VARIANTS: dict[str, tuple[dict[str, Any], type[Bottleneck]]] = {
    "paper": ({}, Bottleneck),
    "layer_norm": ({}, with_inside(lambda r, activation: [nn.LayerNorm(r), activation])),
    "batch_norm": ({}, with_inside(lambda r, activation: [_TokenBatchNorm(r), activation])),
    # The second layer has PyTorch's initialization: the outer projections keep the branch small.
    "two_layers": (
        {},
        with_inside(lambda r, activation: [activation, nn.Linear(r, r), activation]),
    ),
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
