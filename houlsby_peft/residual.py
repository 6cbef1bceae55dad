"""What bottlenecks of the kinds "pfeiffer" and "parallel" read beside the sub-layer's output."""

from __future__ import annotations

from threading import get_ident

import torch
from torch import nn

from .errors import AdapterError


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
