"""MAD-X's invertible adapter: the coupling of the embeddings, and the layers that apply it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from ..config import HoulsbyConfig
from .bottleneck import initialize, to_weight
from .layer import HoulsbyLayer


class InvertibleCoupling(nn.Module):
    """An invertible module for the embeddings of a language.

    MAD-X (Pfeiffer et al. 2020) uses it; it is a coupling of NICE (Dinh et al. 2015). Of hidden
    states (x1, x2), it makes y1 = x1 + F(x2) and y2 = x2 + G(y1). The inverse undoes this exactly,
    whatever F and G are. Both networks have two linear layers with an activation between them.

    Args:
        config: `activation`, `invertible_reduction_factor` (how much narrower the layer inside F or
            G is than its input), `init_std` and `init_weights` are read.
        width: Size d of the hidden states; x1 has d // 2 channels, x2 the rest.

    Shape:
        - Input: `(..., d)`, any floating dtype.
        - Output: the shape and dtype of the input. F and G compute in their weights' dtype.
    """

    def __init__(self, config: HoulsbyConfig, width: int) -> None:
        super().__init__()
        self.sizes = (width // 2, width - width // 2)
        self.F = _network(config, self.sizes[1], self.sizes[0])
        self.G = _network(config, self.sizes[0], self.sizes[1])
        if config.init_weights:
            initialize(self.F[0], self.F[2], config.init_std)
            initialize(self.G[0], self.G[2], config.init_std)

    def forward(self, hidden: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        """Transform hidden states; with `inverse`, undo the transformation."""
        # Not next(self.parameters()): the copies that DataParallel makes have none.
        first, second = to_weight(hidden, self.F[0].weight).split(self.sizes, dim=-1)
        if inverse:
            second = second - self.G(first)
            first = first - self.F(second)
        else:
            first = first + self.F(second)
            second = second + self.G(first)
        return torch.cat((first, second), dim=-1).to(hidden)


def _network(config: HoulsbyConfig, inputs: int, outputs: int) -> nn.Sequential:
    """Return F or G."""
    inner = max(1, int(inputs // config.invertible_reduction_factor))
    activation = ACT2FN[config.activation]
    return nn.Sequential(nn.Linear(inputs, inner), activation, nn.Linear(inner, outputs))


class HoulsbyEmbedding(HoulsbyLayer):
    """The last module of the embeddings, followed by the coupling of the first active adapter.

    Couplings do not compose: those of further active adapters are not used.
    """

    most_applied = 1
    is_inverse = False

    def run_adapter(
        self, adapter_name: str, hidden: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply the coupling of an adapter, or its inverse, to hidden states `(..., d)`."""
        coupling = self.module_of(adapter_name)
        if coupling is None:
            return hidden
        return coupling(hidden, inverse=self.is_inverse)  # type: ignore[no-any-return]


class HoulsbyOutputEmbedding(HoulsbyEmbedding):
    """Applies the inverse coupling before the output embedding of a language model head."""

    is_inverse = True

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.disable_adapters:
            hidden = self._adapt(hidden)
        return self.base_layer(hidden, *args, **kwargs)
