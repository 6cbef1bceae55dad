"""What both kinds of tuner layer share: they wrap a module, call it, and never touch its weights."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from .mixed_batch import StackedWeights
from .offloading import device_of, dtype_of


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
    """A module of the base model, wrapped, with what each adapter has there.

    Public attributes that a tuner layer does not have, such as a norm's `eps`, are the wrapped module's.

    Args:
        base_layer: the wrapped module of the base model.
        reference: the module of the base model whose device the adapters share; None: the wrapped module itself.

    Attributes:
        reference: that module, in a tuple, so that it is not registered twice.
        in_features, out_features: sizes of the wrapped module, as every PEFT layer tells; None if it tells none.
    """

    _mixed: StackedWeights

    def __init__(self, base_layer: nn.Module, reference: nn.Module | None = None) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.reference = (self.get_base_layer() if reference is None else reference,)
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

    def cast_to_base(self, adapter_name: str) -> None:
        """Give an adapter's weights the dtype of the base model here."""
        for name in self.adapter_layer_names:
            if adapter_name in getattr(self, name):
                getattr(self, name)[adapter_name].to(dtype_of(self.reference[0]))

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Moves after loading onto the meta device; keeps the adapter's dtype, which need not be the base's."""
        for name in self.adapter_layer_names:
            added = getattr(self, name)
            if adapter_name in added and not _on_meta(added[adapter_name]):
                added[adapter_name].to(device or device_of(self.reference[0]))


def _sizes(module: nn.Module) -> tuple[int | None, int | None]:
    for names in _SIZES:
        if all(hasattr(module, name) for name in names):
            return getattr(module, names[0]), getattr(module, names[1])
    weight = getattr(module, "weight", None)
    return (weight.shape[-1], weight.shape[-1]) if isinstance(weight, torch.Tensor) and weight.dim() else (None, None)


def _on_meta(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())
