"""The bottleneck of Houlsby et al. 2019 (figure 2), what other kinds read, MAD-X's coupling: start
reading here.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from transformers.activations import ACT2FN

from .config import PAPER_INIT_STD, HoulsbyConfig


class Bottleneck(nn.Module):
    """Two projections around a non-linearity, added to their input: `h +
    up_proj(act(down_proj(h)))`.

    Houlsby et al. 2019, section 2.1 and figure 2. With width d and bottleneck size r it has 2rd + d
    + r parameters. Other kinds of adapters read something else and add to the same output of the
    sub-layer.

    Args:
        width: The size d of the last dimension of the hidden states.
        r: The bottleneck size, at least 1.
        activation: A key of transformers' `ACT2FN`.
        dropout: Dropout probability on the branch; the paper uses 0.
        init_std: Standard deviation of both projections, which start from a normal distribution
            truncated at two standard deviations, with zero biases (section 3.6: 1e-2). With 0,
            `up_proj` starts at zero and the module as the exact identity; `down_proj` then uses
            1e-2, because two zero projections receive no gradient.
        init_weights: Whether to initialize as the paper does. False keeps PyTorch's default for
            linear layers, which is far from the identity.
        kind: One of `KINDS`: what `read` is in a model.
        scaling: Factor on the branch. "learned": a parameter of the shape (1,); "channel": of (d,). Both start at 1.

    Shape:
        - Input: `(..., d)`, any floating dtype.
        - Output: the shape and dtype of the input; the branch is computed in the dtype of the
          weights.
    """

    def __init__(
        self,
        width: int,
        r: int,
        activation: str = "gelu",
        dropout: float = 0.0,
        init_std: float = PAPER_INIT_STD,
        init_weights: bool = True,
        kind: str = "houlsby",
        scaling: float | Literal["learned", "channel"] = 1.0,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.down_proj = nn.Linear(width, r)
        self.activation_name = activation
        self.activation: nn.Module = ACT2FN[activation]
        self.up_proj = nn.Linear(r, width)
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        sizes = {"learned": 1, "channel": width}
        self.scaling = (
            nn.Parameter(torch.ones(sizes[scaling])) if isinstance(scaling, str) else float(scaling)
        )
        if init_weights:
            initialize(self.down_proj, self.up_proj, init_std)

    @classmethod
    def from_config(cls, config: HoulsbyConfig, width: int, r: int) -> Bottleneck:
        """Return a new bottleneck of a size r with the options of a configuration."""
        return cls(
            width,
            r,
            config.activation,
            config.dropout,
            config.init_std,
            config.init_weights,
            config.kind,
            config.scaling,
        )

    def forward(self, hidden: torch.Tensor, read: torch.Tensor | None = None) -> torch.Tensor:
        """Add the branch to the hidden states.

        Args:
            hidden: Hidden states.
            read: What the branch is computed from, of the same shape. None: the hidden states.
        """
        branch = self.branch(to_weight(hidden if read is None else read, self.down_proj.weight))
        return hidden + branch.to(hidden)

    def branch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `scaling * up_proj(act(down_proj(hidden)))`, without the skip connection. Variants
        override this.
        """
        branch: torch.Tensor = self.dropout(self.up_proj(self.activation(self.down_proj(hidden))))
        return (
            branch
            if isinstance(self.scaling, float) and self.scaling == 1
            else branch * self.scaling
        )


def to_weight(hidden: torch.Tensor, weight: Any) -> torch.Tensor:
    """Move hidden states to the device and the dtype of a weight.

    The weights may be float32 on a base in half precision. A shared module may serve layers on
    several devices; accelerate brings in weights that are on the meta device when the module is
    called.
    """
    if not isinstance(weight, torch.Tensor):
        # A method, in the layers of torch.ao.quantization.quantize_dynamic, which expect float32.
        return hidden.float()
    return hidden.to(device=None if weight.is_meta else weight.device, dtype=weight.dtype)


def initialize(down: Any, up: Any, init_std: float) -> None:
    for weight, std in ((down.weight, init_std or PAPER_INIT_STD), (up.weight, init_std)):
        if std == 0:
            nn.init.zeros_(weight)
        else:
            nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
    nn.init.zeros_(down.bias)
    nn.init.zeros_(up.bias)
