"""The tuner layers: a module of the base model, wrapped, with what each adapter adds to its output."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from .bottleneck import Bottleneck
from .mixed_batch import MixedBatch, MixedNorm, Stacks
from .offloading import copy_of, device_of


NO_MERGE = (
    "Houlsby adapters cannot be merged into the base weights, because the bottleneck is non-linear. Keep the adapter "
    "loaded (it costs a few percent of the base model's time), or call unload() to get the base model back."
)


# What modules call the sizes of their input and output.
_SIZES = [
    ("in_features", "out_features"),
    ("in_channels", "out_channels"),
    ("num_embeddings", "embedding_dim"),
    ("nx", "nf"),
    ("embed_dim", "embed_dim"),
]


class HoulsbyTunerLayer(nn.Module, BaseTunerLayer):
    """What both kinds of tuner layer share: they wrap a module, call it, and never touch its weights.

    Public attributes that a tuner layer does not have, such as a norm's `eps`, are the wrapped module's.

    Args:
        base_layer: the wrapped module of the base model.
        reference: the module of the base model whose device the adapters share; None: the wrapped module itself.

    Attributes:
        reference: that module, in a tuple, so that it is not registered twice.
        in_features, out_features: sizes of the wrapped module, as every PEFT layer tells; None if it tells none.
    """

    _mixed: Stacks

    def __init__(self, base_layer: nn.Module, reference: nn.Module | None = None) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.reference = (reference or self.get_base_layer(),)
        self.in_features, self.out_features = _sizes(self.get_base_layer())
        # Heads to enable and disable with this layer; a plain list, as they are registered elsewhere.
        self.heads: list[AuxiliaryTrainingWrapper] = []
        self._disable_adapters = False
        self._active_adapter: list[str] = []
        self.merged_adapters: list[str] = []

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer" or name.startswith("_"):
                raise
            return getattr(self.base_layer, name)

    def enable_adapters(self, enabled: bool) -> None:
        """Enable or disable the adapters of this layer, and of the heads that follow it."""
        super().enable_adapters(enabled)
        for head in self.heads:
            head.enable_adapters(enabled)

    def train(self, mode: bool = True) -> HoulsbyTunerLayer:
        # Mixed batches are for inference; whatever trains may change weights in ways that leave no trace.
        self._mixed.clear()
        return super().train(mode)

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter from this layer, with the weights that were stacked for mixed batches."""
        self._mixed.clear()
        super().delete_adapter(adapter_name)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused with an error that says why: a non-linear module has no equivalent weights."""
        raise ValueError(NO_MERGE)

    def unmerge(self) -> None:
        """Does nothing but warn, as for every PEFT layer that is not merged."""
        warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Moves after loading onto the meta device; keeps the adapter's dtype, which need not be the base's."""
        for name in self.adapter_layer_names:
            added = getattr(self, name)
            if adapter_name in added and not _on_meta(added[adapter_name]):
                added[adapter_name].to(device or device_of(self.reference[0]))


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
        """Add an adapter with a bottleneck that this layer owns."""
        self.houlsby_adapter[adapter_name] = bottleneck

    def share_layer(self, adapter_name: str, owner: HoulsbyLayer) -> None:
        """Add an adapter that uses the bottleneck of another layer, its owner."""
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


def _sizes(module: nn.Module) -> tuple[int | None, int | None]:
    for names in _SIZES:
        if all(hasattr(module, name) for name in names):
            return getattr(module, names[0]), getattr(module, names[1])
    weight = getattr(module, "weight", None)
    return (weight.shape[-1], weight.shape[-1]) if isinstance(weight, torch.Tensor) and weight.dim() else (None, None)


def _on_meta(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())
