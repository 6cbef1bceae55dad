"""MAD-X's invertible adapter: the coupling of the embeddings, and the layers that apply it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from .bottleneck import initialize, to_weight
from .config import PAPER_INIT_STD, HoulsbyConfig
from .layer import HoulsbyLayer


class InvertibleCoupling(nn.Module):
    """An invertible module for the embeddings of a language (MAD-X, Pfeiffer et al. 2020; NICE,
    Dinh et al. 2015).

    Of hidden states (x1, x2), it makes y1 = x1 + F(x2) and y2 = x2 + G(y1). The inverse undoes this
    exactly, whatever the networks F and G are. Both have two linear layers with an activation
    between them.

    Args:
        width: The size d of the hidden states; x1 has d // 2 channels, x2 the rest.
        activation: A key of transformers' `ACT2FN`.
        reduction_factor: By how much the layer inside F or G is narrower than its input.
        init_std, init_weights: See `Bottleneck`.

    Shape:
        - Input: `(..., d)`, any floating dtype.
        - Output: the shape and dtype of the input; F and G compute in the dtype of their weights.
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

        def network(inputs: int, outputs: int) -> nn.Sequential:
            inner = max(1, int(inputs // reduction_factor))
            return nn.Sequential(
                nn.Linear(inputs, inner), ACT2FN[activation], nn.Linear(inner, outputs)
            )

        self.F = network(self.sizes[1], self.sizes[0])
        self.G = network(*self.sizes)
        if init_weights:
            initialize(self.F[0], self.F[2], init_std)
            initialize(self.G[0], self.G[2], init_std)

    @classmethod
    def from_config(cls, config: HoulsbyConfig, width: int) -> InvertibleCoupling:
        """Return a new coupling with the options of a configuration."""
        factor = config.invertible_reduction_factor
        return cls(width, config.activation, factor, config.init_std, config.init_weights)

    def forward(self, hidden: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        """Return the transformed hidden states or, with `inverse`, those that the transformed ones
        come from.
        """
        # Not next(self.parameters()): the copies that DataParallel makes have none.
        first, second = to_weight(hidden, self.F[0].weight).split(self.sizes, dim=-1)
        if inverse:
            second = second - self.G(first)
            first = first - self.F(second)
        else:
            first = first + self.F(second)
            second = second + self.G(first)
        return torch.cat((first, second), dim=-1).to(hidden)


class HoulsbyEmbedding(HoulsbyLayer):
    """The end of the embeddings, followed by the coupling of the first active adapter (MAD-X).

    Couplings do not compose: of several active adapters, only the first one's is used, if it has
        one.
    """

    most_applied = 1
    is_inverse = False

    def run_adapter(
        self, adapter_name: str, hidden: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply the coupling of an adapter, or its inverse, if it has one."""
        coupling = self.bottleneck(adapter_name)
        result: torch.Tensor = (
            hidden if coupling is None else coupling(hidden, inverse=self.is_inverse)
        )
        return result


class HoulsbyOutputEmbedding(HoulsbyEmbedding):
    """The output embedding of a language model head, preceded by the inverse of the coupling after
    the embeddings.
    """

    is_inverse = True

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(
            hidden if self.disable_adapters else self._adapt(hidden), *args, **kwargs
        )
