"""The tuner layers: what an adapter does with the output of a sub-layer, and in place of a norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .bottleneck import Bottleneck
from .mixed_batch import MixedBatch, MixedNorm
from .offloading import copy_of
from .tuner_layer import HoulsbyTunerLayer


class HoulsbyLayer(HoulsbyTunerLayer):
    """A module whose output is a sub-layer's output, followed by the bottleneck of the active adapter(s).

    Houlsby et al. 2019, figure 2 (left). Several active adapters are applied one after the other, in the order given;
    an adapter without a bottleneck here leaves the output as it is. If the wrapped module returns a tuple, the first
    element is its output.

    Args:
        base_layer: the wrapped module.
        channel_dim: the dimension of the output that the bottleneck transforms, counted from the end: -1, but for a
            convolution over n dimensions -1 - n.
        reference: the module whose device the bottlenecks share, where the wrapped one has no weights.
    """

    adapter_layer_names = ("houlsby_adapter",)
    other_param_names = ("houlsby_owner",)
    _mixed: MixedBatch

    def __init__(self, base_layer: nn.Module, channel_dim: int = -1, reference: nn.Module | None = None) -> None:
        super().__init__(base_layer, reference)
        self._mixed = MixedBatch()
        self.channel_dim = channel_dim
        self.houlsby_adapter = nn.ModuleDict()
        # From adapter name to the layer that owns the shared bottleneck: a plain dict, so that the bottleneck is
        # registered once in the model.
        self.houlsby_owner: dict[str, HoulsbyLayer] = {}

    def update_layer(self, adapter_name: str, bottleneck: Bottleneck) -> None:
        """Add an adapter with a bottleneck that this layer owns, also in place of one of the same name."""
        self.houlsby_owner.pop(adapter_name, None)
        self.houlsby_adapter[adapter_name] = bottleneck

    def share_layer(self, adapter_name: str, owner: HoulsbyLayer) -> None:
        """Add an adapter that uses the bottleneck of another layer, its owner, also in place of one of its own."""
        if adapter_name in self.houlsby_adapter:
            del self.houlsby_adapter[adapter_name]
        self.houlsby_owner[adapter_name] = owner

    def bottleneck(self, adapter_name: str) -> Bottleneck | None:
        """The bottleneck that an adapter applies here, its own or a shared one; None if it has none here."""
        owner = self.houlsby_owner.get(adapter_name, self)
        return owner.houlsby_adapter[adapter_name] if adapter_name in owner.houlsby_adapter else None  # type: ignore[return-value]

    def forward(self, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any) -> Any:
        result = self.base_layer(*args, **kwargs)
        if self.disable_adapters:
            return result
        if isinstance(result, tuple):
            return (self._adapt(result[0], adapter_names), *result[1:])
        return self._adapt(result, adapter_names)

    def _adapt(self, hidden: torch.Tensor, adapter_names: Sequence[str] | None) -> torch.Tensor:
        if self.channel_dim != -1:
            hidden = hidden.movedim(self.channel_dim, -1)
        if adapter_names is not None:
            hidden = self._mixed(hidden, adapter_names, self.bottleneck)
        else:
            for name in self.active_adapters:
                bottleneck = self.bottleneck(name)
                if bottleneck is not None:
                    hidden = bottleneck(hidden)
        return hidden if self.channel_dim == -1 else hidden.movedim(-1, self.channel_dim)

    def _get_available_adapters(self) -> set[str]:
        return {*self.houlsby_adapter, *self.houlsby_owner}


class HoulsbyLayerNorm(HoulsbyTunerLayer):
    """A norm of the base model and a trained copy of it per adapter (Houlsby et al. 2019, section 2.1).

    Norms do not compose: of several active adapters, the last one that trains this norm gives the norm. When adapters
    are disabled, the base model's norm is used.
    """

    adapter_layer_names = ("houlsby_norm",)
    _mixed: MixedNorm

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self._mixed = MixedNorm()
        self.houlsby_norm = nn.ModuleDict()

    def update_layer(self, adapter_name: str) -> None:
        """Add an adapter, whose copy starts equal to the base model's norm."""
        self.houlsby_norm[adapter_name] = copy_of(self.base_layer)

    def norm(self, adapter_name: str) -> nn.Module | None:
        """The norm that an adapter trains here; None if it trains none here."""
        return self.houlsby_norm[adapter_name] if adapter_name in self.houlsby_norm else None

    def forward(self, hidden: torch.Tensor, *, adapter_names: Sequence[str] | None = None) -> torch.Tensor:
        if self.disable_adapters:
            return self.base_layer(hidden)  # type: ignore[no-any-return]
        if adapter_names is not None:
            return self._mixed(hidden, adapter_names, self.base_layer, self.norm)
        norm = next(self._active_norms(), self.base_layer)
        return apply_norm(norm, hidden, like=self.base_layer)

    def _active_norms(self) -> Iterator[nn.Module]:
        return (self.houlsby_norm[name] for name in reversed(self.active_adapters) if name in self.houlsby_norm)


def apply_norm(norm: nn.Module, hidden: torch.Tensor, like: nn.Module) -> torch.Tensor:
    """Apply a copied norm whose dtype may differ (float32) from the norm `like` that it replaces."""
    if norm.weight.dtype == like.weight.dtype:
        return norm(hidden)  # type: ignore[no-any-return]
    return norm(hidden.to(norm.weight.dtype)).to(hidden.dtype)  # type: ignore[no-any-return, arg-type]
