"""The tuner layers: a module of the base model, wrapped, with the bottleneck or the norm of each
adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import get_ident
from typing import Any, Protocol

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from .modules import cast, copy_of, device_of, dtype_of
from .residual import SkipConnection


# PEFT's name for rows of a mixed batch that use the base model alone.
BASE = "__base__"


class Batch(Protocol):
    """A batch whose rows have different adapters, as layers and heads use it; `batching.MixedBatch`
    is one.
    """

    def apply(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a layer or head computes: each row by its own adapter, as its `run_adapter`
        does.
        """
        ...


def batch_of(batches: Mapping[int, Batch]) -> Batch | None:
    """Return the mixed batch that this thread runs through a model; None in an ordinary forward
    pass.
    """
    return batches.get(get_ident()) if batches else None


class HoulsbyTunerLayer(nn.Module, BaseTunerLayer):
    """Base class of the tuner layers: wrap a module, call it, and never touch its weights.

    Public attributes that a tuner layer lacks, such as `in_features`, are those of the wrapped
    module.

    Args:
        base_layer: The wrapped module of the base model.
        reference: The module whose device and dtype the adapters share. Default: the wrapped module.
        batches: The mixed batches that the model is running, by thread, shared by all layers of a model.
    """

    # PEFT's `disable_input_dtype_casting` sets it. The bottlenecks cast what they read in any case.
    cast_input_dtype_enabled = True

    def __init__(
        self,
        base_layer: nn.Module,
        reference: nn.Module | None = None,
        batches: dict[int, Batch] | None = None,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        # In a tuple, so that the module is not registered a second time.
        self.reference = (self.get_base_layer() if reference is None else reference,)
        self.batches = {} if batches is None else batches
        # The model's heads, which are enabled and disabled with the tuner layers. A plain list,
        # because the model registers them.
        self.heads: list[AuxiliaryTrainingWrapper] = []
        # The layers with bottlenecks that may read what enters this one; see `SkipConnection`.
        self.readers: list[HoulsbyLayer] = []
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
        """Enable or disable the adapters of this layer, and the model's heads with them."""
        super().enable_adapters(enabled)
        for head in self.heads:
            head.enable_adapters(enabled)

    def _tell_readers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give what enters this module to the layers whose bottlenecks may read it."""
        if not self.readers:
            return
        hidden = next(
            value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)
        )
        for layer in self.readers:
            if layer.skip is not None and not layer.disable_adapters:
                layer.skip.enter(hidden)

    def cast_to_base(self, adapter_name: str) -> None:
        """Cast an adapter's weights to the dtype of the base model."""
        for name in self.adapter_layer_names:
            if adapter_name in getattr(self, name):
                getattr(self, name)[adapter_name].to(dtype_of(self.reference[0]))

    def _move_adapter_to_device_of_base_layer(
        self, adapter_name: str, device: torch.device | None = None
    ) -> None:
        """Move an adapter after PEFT has loaded it; its dtype, which need not be the base model's,
        stays.
        """
        for name in self.adapter_layer_names:
            added = getattr(self, name)
            if adapter_name in added and not any(
                weight.is_meta for weight in added[adapter_name].parameters()
            ):
                added[adapter_name].to(device or device_of(self.reference[0]))


class HoulsbyLayer(HoulsbyTunerLayer):
    """A module whose output is a sub-layer's output, followed by the bottleneck of each active
    adapter.

    Houlsby et al. 2019, figure 2 (left). Active adapters are stacked in the order given. An adapter
    without a bottleneck here leaves the output unchanged. If the wrapped module returns a tuple,
    its first element is adapted. Adapters of every kind add to this output; those that read
    something else need the layer's `SkipConnection`.

    One layer owns a shared bottleneck and registers it; the other layers of its group refer to the
    owner. The bottleneck is thus saved, counted and optimized once.

    Args:
        base_layer: The wrapped module.
        reference: The module whose device and dtype the bottlenecks share. Default: the wrapped module.
        batches: See `HoulsbyTunerLayer`.
        channel_dim: The dimension of the output that the bottleneck transforms, counted from the
            end: -1, or -1 - n for a convolution over n dimensions.
    """

    adapter_layer_names = ("houlsby_adapter",)
    other_param_names = ("houlsby_owner",)
    # How many of the active adapters are applied, from the first on.
    most_applied: int | None = None

    def __init__(
        self,
        base_layer: nn.Module,
        reference: nn.Module | None = None,
        batches: dict[int, Batch] | None = None,
        channel_dim: int = -1,
    ) -> None:
        super().__init__(base_layer, reference, batches)
        self.channel_dim = channel_dim
        self.houlsby_adapter = nn.ModuleDict()
        # From an adapter's name to the layer that owns its shared bottleneck. A plain dict, so that
        # the bottleneck is registered only once in the model.
        self.houlsby_owner: dict[str, HoulsbyLayer] = {}
        # Only where an adapter has needed it.
        self.skip: SkipConnection | None = None

    def update_layer(self, adapter_name: str, bottleneck: nn.Module) -> None:
        """Give an adapter a bottleneck that this layer owns; an existing one of this name is
        replaced.
        """
        self.houlsby_owner.pop(adapter_name, None)
        self.houlsby_adapter[adapter_name] = bottleneck

    def share_layer(self, adapter_name: str, owner: HoulsbyLayer) -> None:
        """Give an adapter the bottleneck that another layer owns; an existing one of this name is
        replaced.
        """
        if adapter_name in self.houlsby_adapter:
            del self.houlsby_adapter[adapter_name]
        self.houlsby_owner[adapter_name] = owner

    def bottleneck(self, adapter_name: str) -> Any:
        """Return the bottleneck that an adapter applies here, owned or shared; None if it has none
        here.
        """
        owner = self.houlsby_owner.get(adapter_name, self)
        return (
            owner.houlsby_adapter[adapter_name] if adapter_name in owner.houlsby_adapter else None
        )

    def run_adapter(
        self, adapter_name: str, hidden: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply the bottleneck that an adapter has here, if it has one, to h, given x if it has
        entered.
        """
        bottleneck = self.bottleneck(adapter_name)
        if bottleneck is None:
            return hidden
        result: torch.Tensor
        if self.skip is None or bottleneck.kind == "houlsby":
            result = bottleneck(hidden)
        else:
            result = bottleneck(hidden, self.skip.read(bottleneck.kind, hidden, residual))
        return result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._tell_readers(args, kwargs)
        result = self.base_layer(*args, **kwargs)
        if self.disable_adapters:
            return result
        if isinstance(result, tuple):
            return (self._adapt(result[0]), *result[1:])
        return self._adapt(result)

    def _adapt(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.channel_dim != -1:
            hidden = hidden.movedim(self.channel_dim, -1)
        residual = None if self.skip is None else self.skip.leave()
        batch = batch_of(self.batches)
        if batch is not None:
            hidden = batch.apply(self, (hidden, residual), {})
        else:
            for name in self.active_adapters[: self.most_applied]:
                hidden = self.run_adapter(name, hidden, residual)
        return hidden if self.channel_dim == -1 else hidden.movedim(-1, self.channel_dim)

    def _get_available_adapters(self) -> set[str]:
        return {*self.houlsby_adapter, *self.houlsby_owner}


class HoulsbyLayerNorm(HoulsbyTunerLayer):
    """A norm of the base model and a trained copy of it per adapter (Houlsby et al. 2019, section
    2.1).

    Norms do not compose: of several active adapters, the last one that trains this norm is used.
    While adapters are disabled, the base model's norm is used.
    """

    adapter_layer_names = ("houlsby_norm",)

    def __init__(self, base_layer: nn.Module, batches: dict[int, Batch] | None = None) -> None:
        super().__init__(base_layer, batches=batches)
        self.houlsby_norm = nn.ModuleDict()

    def update_layer(self, adapter_name: str) -> None:
        """Give an adapter a copy of the base model's norm."""
        self.houlsby_norm[adapter_name] = copy_of(self.base_layer)

    def norm(self, adapter_name: str) -> nn.Module:
        """Return the norm that an adapter uses here: its trained copy or, if it has none, the base
        model's norm.
        """
        own = self.houlsby_norm
        return own[adapter_name] if adapter_name in own else self.base_layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._tell_readers(args, kwargs)
        if self.disable_adapters:
            return self.base_layer(*args, **kwargs)
        batch = batch_of(self.batches)
        if batch is not None:
            return batch.apply(self, args, kwargs)
        name = next(
            (name for name in reversed(self.active_adapters) if name in self.houlsby_norm), BASE
        )
        return self.run_adapter(name, *args, **kwargs)

    def run_adapter(self, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        """Apply the norm that an adapter uses here; the result has the dtype of the hidden states.

        The norm may be in float32 on a base model in half precision. I-BERT's also gets a scaling
        factor.
        """
        norm = self.norm(adapter_name)
        if norm.weight.dtype == self.base_layer.weight.dtype:
            return norm(*args, **kwargs)
        hidden = next(
            value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)
        )
        own_args, own_kwargs = cast((args, kwargs), norm.weight.dtype)  # type: ignore[arg-type]
        return cast(norm(*own_args, **own_kwargs), hidden.dtype)
