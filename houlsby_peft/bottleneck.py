"""The bottleneck module of Houlsby et al. 2019 (figure 2, right): start reading here."""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import ACT2FN


# Std of the projections that an exact-identity start (init_std=0) leaves random: the paper's value (section 3.6).
PAPER_INIT_STD = 1e-2


class Bottleneck(nn.Module):
    """Two projections around a non-linearity, added to their input: `h + up_proj(act(down_proj(h)))`.

    Houlsby et al. 2019, section 2.1 and figure 2. With width d and bottleneck size r it has 2rd + d + r parameters.

    Args:
        width: d, the size of the last dimension of the hidden states.
        r: the bottleneck size, at least 1.
        activation: a key of transformers' `ACT2FN`.
        dropout: probability of zeroing elements of the residual branch in training; the paper uses 0.
        init_std: standard deviation of both projections, drawn from a normal distribution truncated at two standard
            deviations, biases zero (section 3.6: 1e-2). 0 makes `up_proj` zero, so that the module starts as the
            exact identity; `down_proj` is then drawn with 1e-2, as two zero projections would never get a gradient.
        init_weights: False leaves PyTorch's default initialization of linear layers, which is far from the identity.

    Shape:
        - Input: `(..., d)`, any floating dtype.
        - Output: same shape and dtype as the input; computed in the dtype of the weights.
    """

    def __init__(
        self,
        width: int,
        r: int,
        activation: str = "gelu",
        dropout: float = 0.0,
        init_std: float = PAPER_INIT_STD,
        init_weights: bool = True,
    ) -> None:
        super().__init__()
        self.down_proj = nn.Linear(width, r)
        self.activation_name = activation
        self.activation: nn.Module = ACT2FN[activation]
        self.up_proj = nn.Linear(r, width)
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        if init_weights:
            self.reset_parameters(init_std)

    def reset_parameters(self, init_std: float = PAPER_INIT_STD) -> None:
        """Draw both projections anew from the truncated normal distribution of the class docstring."""
        _truncated_normal_(self.down_proj.weight, init_std or PAPER_INIT_STD)
        _truncated_normal_(self.up_proj.weight, init_std)
        nn.init.zeros_(self.down_proj.bias)
        nn.init.zeros_(self.up_proj.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # The weights may be float32 on a base in half precision; the branch is small, so it is computed in full. A
        # shared one may serve layers on several devices; what is on the meta device is brought in when it is called.
        weight = self.down_proj.weight
        wide = hidden.to(device=None if weight.is_meta else weight.device, dtype=weight.dtype)
        branch: torch.Tensor = self.down_proj(wide)
        branch = self.dropout(self.up_proj(self.activation(branch)))
        return hidden + branch.to(hidden)


def _truncated_normal_(weight: torch.Tensor, std: float) -> None:
    if std == 0:
        nn.init.zeros_(weight)
    else:
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
