"""MAD-X's invertible adapter: the coupling of the embeddings, and the layers that apply it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from ..config import PAPER_INIT_STD, HoulsbyConfig
from .bottleneck import initialize, to_weight
from .layer import HoulsbyLayer


class InvertibleCoupling(nn.Module):
    """An invertible module for the embeddings of a language.

    MAD-X (Pfeiffer et al. 2020) uses it; it is a coupling of NICE (Dinh et al. 2015). Of hidden
    states (x1, x2), it makes y1 = x1 + F(x2) and y2 = x2 + G(y1). The inverse undoes this exactly,
    whatever F and G are. Both networks have two linear layers with an activation between them.

    Args:
        width: Size d of the hidden states; x1 has d // 2 channels, x2 the rest.
        activation: A key of transformers' `ACT2FN`.
        reduction_factor: How much narrower the layer inside F or G is than its input.
        init_std, init_weights: See `Bottleneck`.

    Shape:
        - Input: `(..., d)`, any floating dtype.
        - Output: the shape and dtype of the input. F and G compute in their weights' dtype.
    """

    def __init__(
        self,
        width: int,
        activation: str = "gelu",
        reduction_factor: float = 2.0,
        init_std: float = PAPER_INIT_STD,
        init_weights: bool = True,
    ) -> None:
        super().__init__()
        self.sizes = (width // 2, width - width // 2)

        self.F = _network(self.sizes[1], self.sizes[0], activation, reduction_factor)
        self.G = _network(self.sizes[0], self.sizes[1], activation, reduction_factor)
        if init_weights:
            initialize(self.F[0], self.F[2], init_std)
            initialize(self.G[0], self.G[2], init_std)

    @classmethod
    def from_config(cls, config: HoulsbyConfig, width: int) -> InvertibleCoupling:
        """Return a new coupling with the options of a configuration."""
        factor = config.invertible_reduction_factor
        return cls(width, config.activation, factor, config.init_std, config.init_weights)

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


def _network(inputs: int, outputs: int, activation: str, reduction_factor: float) -> nn.Sequential:
    """Return F or G."""
    inner = max(1, int(inputs // reduction_factor))
    return nn.Sequential(nn.Linear(inputs, inner), ACT2FN[activation], nn.Linear(inner, outputs))


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
