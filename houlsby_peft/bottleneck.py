"""The bottleneck module of Houlsby et al. 2019 (figure 2, right): start reading here."""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import ACT2FN


# Houlsby et al. 2019, section 3.6. With init_std=0, `down_proj` still starts with this standard deviation.
PAPER_INIT_STD = 1e-2


class Bottleneck(nn.Module):
    """Two projections around a non-linearity, added to their input: `h + up_proj(act(down_proj(h)))`.

    Houlsby et al. 2019, section 2.1 and figure 2. With width d and bottleneck size r it has 2rd + d + r parameters.

    Args:
        width: The size d of the last dimension of the hidden states.
        r: The bottleneck size, at least 1.
        activation: A key of transformers' `ACT2FN`.
        dropout: Dropout probability on the branch; the paper uses 0.
        init_std: Standard deviation of both projections, which start from a normal distribution truncated at two
            standard deviations, with zero biases (section 3.6: 1e-2). With 0, `up_proj` starts at zero and the module
            as the exact identity; `down_proj` then uses 1e-2, because two zero projections receive no gradient.
        init_weights: Whether to initialize as the paper does. False keeps PyTorch's default for linear layers, which
            is far from the identity.

    Shape:
        - Input: `(..., d)`, any floating dtype.
        - Output: the shape and dtype of the input; the branch is computed in the dtype of the weights.
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
        """Initialize both projections again from the truncated normal distribution, and set the biases to zero."""
        _truncated_normal_(self.down_proj.weight, init_std or PAPER_INIT_STD)
        _truncated_normal_(self.up_proj.weight, init_std)
        nn.init.zeros_(self.down_proj.bias)
        nn.init.zeros_(self.up_proj.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # The weights may be float32 on a base in half precision. A shared bottleneck may serve layers on several
        # devices; accelerate brings in weights that are on the meta device when the module is called.
        weight = self.down_proj.weight
        if isinstance(weight, torch.Tensor):
            own = hidden.to(device=None if weight.is_meta else weight.device, dtype=weight.dtype)
        else:  # a method, in the layers of torch.ao.quantization.quantize_dynamic, which expect float32
            own = hidden.float()
        branch = self.branch(own)
        return hidden + branch.to(hidden)

    def branch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `up_proj(act(down_proj(hidden)))`, without the skip connection. Variants override this method."""
        branch: torch.Tensor = self.dropout(self.up_proj(self.activation(self.down_proj(hidden))))
        return branch


def _truncated_normal_(weight: torch.Tensor, std: float) -> None:
    if std == 0:
        nn.init.zeros_(weight)
    else:
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
