"""What bottlenecks of the kinds "pfeiffer" and "parallel" read: a sub-layer's residual input."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import AdapterError
from .tuner_layer import ModelState


class SkipConnection:
    """The skip connection around a sub-layer: its residual input x meets the output h in h + x.

    Args:
        state: What all layers of the model share.
        parent: The module that holds the norm of h + x in a post-LN model. None: a pre-LN model,
            which does not normalize this sum.
        norm: The norm's name in `parent`.
    """

    def __init__(self, state: ModelState, parent: nn.Module | None = None, norm: str = "") -> None:
        self._state = state
        self._parent = parent
        self._norm = norm
        # By thread, because several threads may run the model at a time.
        self._inputs: dict[int, torch.Tensor] = {}

    def enter(self, residual: torch.Tensor) -> None:
        """Keep x for the sub-layer that this thread runs next."""
        self._inputs[self._state.thread] = residual

    def leave(self) -> torch.Tensor | None:
        """Return x at the end of the sub-layer, and release it."""
        return self._inputs.pop(self._state.thread, None)

    def read(self, kind: str, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return what the branch of a bottleneck is computed from, `(..., d)`.

        - "pfeiffer" (Pfeiffer et al. 2021): LN(h + x) in a post-LN model, h + x in a pre-LN model.
        - "parallel" (He et al. 2022): x. In a pre-LN model, x enters the norm before the sub-layer.

        Args:
            kind: One of these two kinds.
            hidden: h, with the branches of the adapters below this one.
            residual: x; None if it has not entered.

        Raises:
            AdapterError: x has not entered, because only a part of the model was called.
        """
        if residual is None:
            raise AdapterError(
                f"An adapter of kind {kind!r} reads the input of a sub-layer, so the whole "
                "sub-layer must run; only its end was called. Call the model as a whole."
            )
        if kind == "parallel":
            return residual
        total = hidden + residual
        return total if self._parent is None else self._normalize(total)

    def _normalize(self, total: torch.Tensor) -> torch.Tensor:
        # Looked up here, because a tuner layer may have taken the norm's place. DataParallel's
        # copies of a layer, on other devices, use the norm of the original.
        norm = getattr(self._parent, self._norm)
        device = None if norm.weight.is_meta else norm.weight.device
        normalized: torch.Tensor = norm(total.to(device))
        return normalized.to(total.device)
