"""The bottleneck of Houlsby et al. 2019, figure 2: start reading here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from ..config import PAPER_INIT_STD, HoulsbyConfig
from ..kernels import door


class Bottleneck(nn.Module):
    """Two projections around a non-linearity, with a skip connection: `h + branch(h)`.

    The branch is `scaling * up_proj(act(down_proj(h)))` (Houlsby et al. 2019, section 2.1 and
    figure 2). A bottleneck of width d and size r has 2rd + d + r parameters. Adapters of other
    kinds compute the branch from something else than h; see `residual.py`.

    Args:
        config: `activation`, `dropout`, `init_std`, `init_weights`, `kind` and `scaling` are read.
        width: Size d of the last dimension of the hidden states.
        r: Size of the bottleneck. Default: the configuration's.

    Shape:
        - Input: `(..., d)`, any floating dtype.
        - Output: the shape and dtype of the input. The branch is computed in the weights' dtype, or
          in the dtype of the input where one operation computes all of it; see `kernels/`.
    """

    def __init__(self, config: HoulsbyConfig, width: int, r: int | None = None) -> None:
        super().__init__()
        r = r or config.r
        self.kind = config.kind
        self.down_proj = nn.Linear(width, r)
        self.activation_name = config.activation
        self.activation: nn.Module = ACT2FN[config.activation]
        self.up_proj = nn.Linear(r, width)
        self.dropout = nn.Dropout(config.dropout) if config.dropout > 0 else nn.Identity()
        self.scaling: float | nn.Parameter
        if config.scaling == "learned":
            self.scaling = nn.Parameter(torch.ones(1))
        elif config.scaling == "channel":
            self.scaling = nn.Parameter(torch.ones(width))
        else:
            self.scaling = float(config.scaling)
        if config.init_weights:
            initialize(self.down_proj, self.up_proj, config.init_std)

    def forward(self, hidden: torch.Tensor, read: torch.Tensor | None = None) -> torch.Tensor:
        """Add the branch to the hidden states.

        Args:
            hidden: Hidden states, `(..., d)`.
            read: What the branch is computed from, of the same shape. Default: the hidden states.
        """
        if read is None:
            # The operation computes the plain formula.
            if type(self) is Bottleneck:
                adapted = door.adapt(self, hidden)
                if adapted is not None:
                    return adapted
            read = hidden
        branch = self.branch(to_weight(read, self.down_proj.weight))
        return hidden + branch.to(hidden)

    def branch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `scaling * up_proj(act(down_proj(hidden)))`, `(..., d)`; variants override it."""
        branch: torch.Tensor = self.dropout(self.up_proj(self.activation(self.down_proj(hidden))))
        if isinstance(self.scaling, float) and self.scaling == 1:
            return branch
        return branch * self.scaling


def to_weight(hidden: torch.Tensor, weight: Any) -> torch.Tensor:
    """Move hidden states to the device and the dtype of a weight.

    The weights may be float32 on a base model in half precision. A shared bottleneck may serve
    layers on several devices. Weights on the meta device are brought in by accelerate.
    """
    if not isinstance(weight, torch.Tensor):
        # A method, in the layers of torch.ao.quantization.quantize_dynamic, which expect float32.
        return hidden.float()
    device = None if weight.is_meta else weight.device
    return hidden.to(device=device, dtype=weight.dtype)


def initialize(down_proj: Any, up_proj: Any, init_std: float) -> None:
    """Draw two projections from a normal distribution truncated at two standard deviations.

    With 0, the up projection is zero and the module the identity. The down projection then has the
    paper's deviation, because two zero projections receive no gradient.
    """
    draw(down_proj, init_std or PAPER_INIT_STD)
    draw(up_proj, init_std)


def draw(projection: Any, std: float) -> None:
    """Draw a projection from such a distribution, with biases of zero; std=0 draws zeros."""
    if std > 0:
        nn.init.trunc_normal_(projection.weight, std=std, a=-2 * std, b=2 * std)
    else:
        nn.init.zeros_(projection.weight)
    nn.init.zeros_(projection.bias)
