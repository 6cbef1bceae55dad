"""The bottleneck of Houlsby et al. 2019 (figure 2), what other kinds read, MAD-X's coupling: start
reading here.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any, Literal

import torch
from torch import nn
from transformers.activations import ACT2FN

from .config import PAPER_INIT_STD, HoulsbyConfig
from .errors import AdapterError


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
            _initialize(self.down_proj, self.up_proj, init_std)

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
        branch = self.branch(_to_weight(hidden if read is None else read, self.down_proj.weight))
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


class SkipConnection:
    """The skip connection around a sub-layer, for bottlenecks that read more than the sub-layer's
    output h.

    The residual input x enters before the sub-layer runs and meets h at its end, in h + x. A
    post-LN model normalizes this sum with a norm, which is a child of `parent`; a pre-LN model does
    not.
    """

    def __init__(self, parent: nn.Module | None = None, norm: str = "") -> None:
        self._parent = parent
        self._norm = norm
        # By thread, because several threads may run the model at a time.
        self._inputs: dict[int, torch.Tensor] = {}

    def enter(self, residual: torch.Tensor) -> None:
        """Keep x for the sub-layer that this thread runs next."""
        self._inputs[_thread()] = residual

    def leave(self) -> torch.Tensor | None:
        """Return x at the end of the sub-layer, and release it."""
        return self._inputs.pop(_thread(), None)

    def read(self, kind: str, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return what a bottleneck of a kind other than "houlsby" reads.

        - "houlsby" (Houlsby et al. 2019): h.
        - "pfeiffer" (Pfeiffer et al. 2021): LN(h + x) in a post-LN model, h + x in a pre-LN model.
        - "parallel" (He et al. 2022): x, which is the input of the norm before the sub-layer in a
          pre-LN model.

        h has the branches of the adapters below; x is None if it has not entered.
        """
        if residual is None:
            raise AdapterError(
                f"An adapter of kind {kind!r} reads the input of a sub-layer, so the whole sub-layer must run; only "
                "its end was called. Call the model as a whole."
            )
        if kind == "parallel":
            return residual
        total = hidden + residual
        if self._parent is None:
            return total
        # Looked up here, because a tuner layer may have taken the norm's place. DataParallel's
        # copies of a layer, on other devices, read through the norm of the original.
        norm = getattr(self._parent, self._norm)
        normalized: torch.Tensor = norm(
            total.to(None if norm.weight.is_meta else norm.weight.device)
        )
        return normalized.to(total.device)


def _thread() -> int:
    # While a graph is captured, there is one thread, whose number cannot be part of the graph.
    return 0 if torch.compiler.is_compiling() else get_ident()


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
            _initialize(self.F[0], self.F[2], init_std)
            _initialize(self.G[0], self.G[2], init_std)

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
        first, second = _to_weight(hidden, self.F[0].weight).split(self.sizes, dim=-1)
        if inverse:
            second = second - self.G(first)
            first = first - self.F(second)
        else:
            first = first + self.F(second)
            second = second + self.G(first)
        return torch.cat((first, second), dim=-1).to(hidden)


def _to_weight(hidden: torch.Tensor, weight: Any) -> torch.Tensor:
    """Move hidden states to the device and the dtype of a weight.

    The weights may be float32 on a base in half precision. A shared module may serve layers on
    several devices; accelerate brings in weights that are on the meta device when the module is
    called.
    """
    if not isinstance(weight, torch.Tensor):
        # A method, in the layers of torch.ao.quantization.quantize_dynamic, which expect float32.
        return hidden.float()
    return hidden.to(device=None if weight.is_meta else weight.device, dtype=weight.dtype)


def _initialize(down: Any, up: Any, init_std: float) -> None:
    for weight, std in ((down.weight, init_std or PAPER_INIT_STD), (up.weight, init_std)):
        if std == 0:
            nn.init.zeros_(weight)
        else:
            nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
    nn.init.zeros_(down.bias)
    nn.init.zeros_(up.bias)
