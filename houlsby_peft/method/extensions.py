"""The extensions of the bottleneck that Houlsby et al. 2019 tried in section 3.6.

The paper found none of them to help, and recommends the plain bottleneck.
"""

from __future__ import annotations

import torch
from torch import nn

from ..config import HoulsbyConfig
from .bottleneck import Bottleneck


class NormedBottleneck(Bottleneck):
    """A bottleneck with a layer norm before the down projection; `norm` has 2d parameters more.

    See `Bottleneck` for arguments and shapes.
    """

    def __init__(self, config: HoulsbyConfig, width: int, r: int | None = None) -> None:
        super().__init__(config, width, r)
        self.norm = nn.LayerNorm(width)

    def branch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the branch of the normalized hidden states, `(..., d)`."""
        return super().branch(self.norm(hidden))


class DeepBottleneck(Bottleneck):
    """A bottleneck with a second hidden layer of size r; `hidden_proj` has r² + r parameters more.

    The hidden layer starts with PyTorch's initialization. The outer projections keep the module
    near the identity. See `Bottleneck` for arguments and shapes.
    """

    def __init__(self, config: HoulsbyConfig, width: int, r: int | None = None) -> None:
        super().__init__(config, width, r)
        r = self.down_proj.out_features
        self.hidden_proj = nn.Linear(r, r)

    def branch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `scaling * up_proj(act(hidden_proj(act(down_proj(hidden)))))`, `(..., d)`."""
        first = self.activation(self.down_proj(hidden))
        second = self.activation(self.hidden_proj(first))
        branch: torch.Tensor = self.dropout(self.up_proj(second)) * self.scaling
        return branch


class GatedBottleneck(Bottleneck):
    """A bottleneck whose branch is multiplied with a gate; `gate` has d + 1 parameters more.

    The gate is a number in (0, 1) per token: the sigmoid of a linear function of the hidden states
    that the branch reads. See `Bottleneck` for arguments and shapes.
    """

    def __init__(self, config: HoulsbyConfig, width: int, r: int | None = None) -> None:
        super().__init__(config, width, r)
        self.gate = nn.Linear(width, 1)

    def branch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `sigmoid(gate(hidden)) * branch`, `(..., d)`."""
        return super().branch(hidden) * torch.sigmoid(self.gate(hidden))


# The class of bottlenecks by `HoulsbyConfig.extension`.
BOTTLENECKS: dict[str | None, type[Bottleneck]] = {
    None: Bottleneck,
    "norm": NormedBottleneck,
    "deep": DeepBottleneck,
    "gated": GatedBottleneck,
}
