"""The way to the operations: the method asks here, and knows nothing of what is behind.

None is the answer where an operation may not stand for the modules, or is no faster. All operations
compute the plain formula, so a bottleneck with a branch of its own must not ask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import bottleneck as _bottleneck
from . import layer_norm as _layer_norm


def adapt(bottleneck: nn.Module, hidden: torch.Tensor) -> torch.Tensor | None:
    """Return hidden states `(..., d)` with the branch of a bottleneck, or None."""
    if _bottleneck.can_run(bottleneck, hidden):
        return _bottleneck.run(bottleneck, hidden)
    return None


def normalize(
    norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return hidden states `(..., d)` as a norm in another dtype makes them, or None."""
    if _layer_norm.can_run(norm, args, kwargs):
        return _layer_norm.run(norm, *args)
    return None
