"""`SkipConnection`: what the bottlenecks of each kind of adapter read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident

import torch
from torch import nn

from .errors import AdapterError


# Returns what a bottleneck of a kind reads, from the kind and the hidden states that it adds its branch to.
Read = Callable[[str, torch.Tensor], torch.Tensor]


class SkipConnection:
    """The skip connection around a sub-layer, for bottlenecks that read more than the sub-layer's output h.

    The residual input x enters before the sub-layer runs and meets h at its end, in h + x. A post-LN model normalizes
    this sum, a pre-LN model does not.

    Args:
        parent: The module that has the norm of h + x; None in a pre-LN model.
        norm: The norm's name there.
    """

    def __init__(self, parent: nn.Module | None = None, norm: str = "") -> None:
        self._parent = parent
        self._norm = norm
        # By thread, because several threads may run the model at a time.
        self._inputs: dict[int, torch.Tensor] = {}

    def enter(self, residual: torch.Tensor) -> None:
        """Keep x for the sub-layer that this thread runs next."""
        self._inputs[_thread()] = residual

    def leave(self) -> Read:
        """Return how bottlenecks read at the end of the sub-layer, and release x."""
        return partial(self._read, self._inputs.pop(_thread(), None))

    def _read(self, residual: torch.Tensor | None, kind: str, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a bottleneck reads.

        - "houlsby" (Houlsby et al. 2019): h.
        - "pfeiffer" (Pfeiffer et al. 2021): LN(h + x) in a post-LN model, h + x in a pre-LN model.
        - "parallel" (He et al. 2022): x, which is the input of the norm before the sub-layer in a pre-LN model.

        Args:
            residual: x, if it has entered.
            kind: The kind of the bottleneck, one of `KINDS`.
            hidden: h, with the branches of the adapters below.

        Raises:
            AdapterError: It reads x, which has not entered.
        """
        if kind == "houlsby":
            return hidden
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
        # Looked up here, because a tuner layer may have taken the norm's place. DataParallel's copies of a layer, on
        # other devices, read through the norm of the original.
        norm = getattr(self._parent, self._norm)
        normalized: torch.Tensor = norm(total.to(None if norm.weight.is_meta else norm.weight.device))
        return normalized.to(total.device)


def _thread() -> int:
    # While a graph is captured, there is one thread, whose number cannot be part of the graph.
    return 0 if torch.compiler.is_compiling() else get_ident()
