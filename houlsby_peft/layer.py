"""The tuner layers: wrapped modules of the base model, with the bottleneck or norm of adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from threading import get_ident
from typing import Any, Protocol

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from .errors import AdapterError
from .modules import cast, copy_of, device_of, dtype_of, hidden_states_of
from .record import AdapterRecord
from .residual import SkipConnection


# PEFT's name for rows of a mixed batch that use the base model alone.
BASE = "__base__"


class Batch(Protocol):
    """A batch whose rows have different adapters; `batching.MixedBatch` is one."""

    def apply(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a layer or head computes: each row by `run_adapter` of its own adapter."""
        ...


class ModelState:
    """What all tuner layers and heads of one model share.

    Attributes:
        batches: The mixed batch that each thread runs through the model.
        records: What is recorded of each adapter of the model, by the adapter's name.
        heads: The model's task heads and other modules that adapters train as a whole.
    """

    def __init__(self) -> None:
        self.batches: dict[int, Batch] = {}
        self.records: dict[str, AdapterRecord] = {}
        self.heads: list[Any] = []


def state_of(model: nn.Module) -> ModelState:
    """Return what the tuner layers of a model share; a new state if it has none."""
    for module in model.modules():
        if isinstance(module, HoulsbyTunerLayer):
            return module.state
    return ModelState()


def record_of(model: nn.Module, adapter_name: str) -> AdapterRecord:
    """Return what is recorded of an adapter in a model."""
    return state_of(model).records[adapter_name]


def batch_of(batches: Mapping[int, Batch]) -> Batch | None:
    """Return the mixed batch that this thread runs through a model; None in other passes."""
    return batches.get(get_ident()) if batches else None


class KeepsFrozen(nn.Module):
    """A wrapper whose weights train after `enable_adapters` if they did before it was disabled.

    PEFT's wrappers would also train what has been frozen.
    """

    adapter_layer_names: tuple[str, ...]
    _disable_adapters: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._paused: list[nn.Parameter] = []

    def enable_adapters(self, enabled: bool) -> None:
        """Enable or disable the adapters of this wrapper."""
        if not enabled and not self._disable_adapters:
            for name in self.adapter_layer_names:
                self._paused += [w for w in getattr(self, name).parameters() if w.requires_grad]
        for weight in self._paused:
            weight.requires_grad_(enabled)
        if enabled:
            self._paused = []
        self._disable_adapters = not enabled


class HoulsbyTunerLayer(KeepsFrozen, BaseTunerLayer):
    """Base class of the tuner layers: wrap a module, call it, and never touch its weights.

    Public attributes that a tuner layer lacks, such as `in_features`, are the wrapped module's.

    Args:
        base_layer: The wrapped module of the base model.
        reference: The module whose device and dtype the adapters share. Default: the wrapped one.
        state: What all layers of a model share.
    """

    # PEFT's `disable_input_dtype_casting` sets it. The bottlenecks cast what they read in any case.
    cast_input_dtype_enabled = True

    def __init__(
        self,
        base_layer: nn.Module,
        reference: nn.Module | None = None,
        state: ModelState | None = None,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        if reference is None:
            reference = self.get_base_layer()
        # In a tuple, so that the module is not registered a second time.
        self.reference = (reference,)
        self.state = state or ModelState()
        # The layers whose bottlenecks may read what enters this one; see `residual.py`.
        self.residual_users: list[HoulsbyLayer] = []
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
        """Enable or disable the adapters of this layer, and with them the model's heads.

        transformers disables heads itself, but enables only the tuner layers.
        """
        super().enable_adapters(enabled)
        for head in self.state.heads:
            head.enable_adapters(enabled)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Set the active adapters of this layer, and train their weights unless in inference."""
        self._paused = []
        super().set_adapter(adapter_names, inference_mode=inference_mode)

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter. If it was the only active one, all layers activate the same other."""
        self.state.records.pop(adapter_name, None)
        super().delete_adapter(adapter_name)

    def _all_available_adapter_names(self) -> list[str]:
        # PEFT activates the first one in place of a deleted adapter. transformers deletes layer by
        # layer, so the layers must agree, whichever adapters they have.
        return sorted(self.state.records)

    def _tell_residual_users(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give what enters this module to the layers whose bottlenecks may read it."""
        for layer in self.residual_users:
            if layer.skip is not None and not layer.disable_adapters:
                layer.skip.enter(hidden_states_of(args, kwargs))

    def cast_to_base(self, adapter_name: str) -> None:
        """Cast an adapter's weights to the dtype of the base model."""
        for name in self.adapter_layer_names:
            if adapter_name in getattr(self, name):
                getattr(self, name)[adapter_name].to(dtype_of(self.reference[0]))

    def _move_adapter_to_device_of_base_layer(
        self, adapter_name: str, device: torch.device | None = None
    ) -> None:
        """Move an adapter after PEFT has loaded it; its dtype stays."""
        for name in self.adapter_layer_names:
            modules = getattr(self, name)
            if adapter_name not in modules:
                continue
            if not any(weight.is_meta for weight in modules[adapter_name].parameters()):
                modules[adapter_name].to(device or device_of(self.reference[0]))


class HoulsbyLayer(HoulsbyTunerLayer):
    """A module whose output is a sub-layer's output, followed by the bottlenecks of adapters.

    Houlsby et al. 2019, figure 2 (left). Active adapters are stacked in the order given. An adapter
    without a bottleneck here leaves the output unchanged. If the wrapped module returns a tuple,
    the first element is adapted.

    One layer owns a shared bottleneck and registers it; the other layers of its group refer to the
    owner. The bottleneck is thus saved, counted and optimized once.

    Args:
        base_layer: The wrapped module.
        reference: The module whose device and dtype the bottlenecks share. Default: the wrapped
            module.
        state: What all layers of a model share.
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
        state: ModelState | None = None,
        channel_dim: int = -1,
    ) -> None:
        super().__init__(base_layer, reference, state)
        self.channel_dim = channel_dim
        self.houlsby_adapter = nn.ModuleDict()
        # From an adapter's name to the layer that owns its shared bottleneck. A plain dict, so that
        # the bottleneck is registered only once in the model.
        self.houlsby_owner: dict[str, HoulsbyLayer] = {}
        # Only where a bottleneck reads the residual input.
        self.skip: SkipConnection | None = None
        # How often each adapter, or stack of adapters, has run and not been recomputed.
        self._passes: Counter[tuple[str, ...]] = Counter()

    def update_layer(self, adapter_name: str, bottleneck: nn.Module) -> None:
        """Give an adapter a bottleneck that this layer owns."""
        self.houlsby_adapter[adapter_name] = bottleneck

    def share_layer(self, adapter_name: str, owner: HoulsbyLayer) -> None:
        """Give an adapter the bottleneck that another layer owns."""
        self.houlsby_owner[adapter_name] = owner

    def bottleneck(self, adapter_name: str) -> Any:
        """Return the bottleneck that an adapter applies here, owned or shared; None without one."""
        owner = self.houlsby_owner.get(adapter_name, self)
        if adapter_name not in owner.houlsby_adapter:
            return None
        return owner.houlsby_adapter[adapter_name]

    def run_adapter(
        self, adapter_name: str, hidden: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply the bottleneck that an adapter has here, if it has one.

        Args:
            adapter_name: The adapter.
            hidden: Output h of the sub-layer, `(..., d)`.
            residual: Residual input x of the sub-layer, `(..., d)`; None if it has not entered.

        Returns:
            `(..., d)`.
        """
        bottleneck = self.bottleneck(adapter_name)
        if bottleneck is None:
            return hidden
        read = None
        if self.skip is not None and bottleneck.kind != "houlsby":
            read = self.skip.read(bottleneck.kind, hidden, residual)
        return bottleneck(hidden, read)  # type: ignore[no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, and adapt its output `(batch, tokens, d)` or of another shape."""
        self._tell_residual_users(args, kwargs)
        result = self.base_layer(*args, **kwargs)
        if self.disable_adapters:
            return result
        if isinstance(result, tuple):
            return (self._adapt(result[0]), *result[1:])
        return self._adapt(result)

    def _adapt(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the active adapters, or in a mixed batch those of its rows."""
        if self.channel_dim != -1:
            hidden = hidden.movedim(self.channel_dim, -1)
        residual = None if self.skip is None else self.skip.leave()
        batch = batch_of(self.state.batches)
        if batch is not None:
            hidden = batch.apply(self, (hidden, residual), {})
        else:
            if self.training and not torch.compiler.is_compiling():
                self._count_pass()
            for name in self.active_adapters[: self.most_applied]:
                hidden = self.run_adapter(name, hidden, residual)
        if self.channel_dim != -1:
            hidden = hidden.movedim(-1, self.channel_dim)
        return hidden

    def _count_pass(self) -> None:
        """Refuse to recompute a pass of one adapter by another one: its gradients would be wrong.

        Gradient checkpointing runs layers again in the backward pass, by the adapter that is active
        then.
        """
        is_recomputed = torch._C._current_graph_task_id() != -1
        active = tuple(self.active_adapters)
        self._passes[active] += -1 if is_recomputed else 1
        if self._passes[active] < 0 and max(self._passes.values()) > 0:
            self._passes.clear()
            raise AdapterError(
                "With gradient checkpointing, the passes of two adapters cannot share a backward "
                "pass: both would be recomputed by the active one. Call backward() for each "
                "adapter while it is active; gradients add up."
            )

    def _get_available_adapters(self) -> set[str]:
        return {*self.houlsby_adapter, *self.houlsby_owner}


class HoulsbyLayerNorm(HoulsbyTunerLayer):
    """A norm of the base model and a trained copy of it per adapter (section 2.1 of the paper).

    Norms do not compose: of several active adapters, the last one that trains this norm is used.
    While adapters are disabled, the base model's norm is used.
    """

    adapter_layer_names = ("houlsby_norm",)

    def __init__(self, base_layer: nn.Module, state: ModelState | None = None) -> None:
        super().__init__(base_layer, state=state)
        self.houlsby_norm = nn.ModuleDict()

    def update_layer(self, adapter_name: str) -> None:
        """Give an adapter a copy of the base model's norm."""
        self.houlsby_norm[adapter_name] = copy_of(self.base_layer)

    def norm(self, adapter_name: str) -> nn.Module:
        """Return the norm that an adapter uses here: its copy or, without one, the base model's."""
        if adapter_name in self.houlsby_norm:
            return self.houlsby_norm[adapter_name]
        return self.base_layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Normalize hidden states `(..., d)` by the active adapter's norm, or the rows' norms."""
        self._tell_residual_users(args, kwargs)
        if self.disable_adapters:
            return self.base_layer(*args, **kwargs)
        batch = batch_of(self.state.batches)
        if batch is not None:
            return batch.apply(self, args, kwargs)
        for name in reversed(self.active_adapters):
            if name in self.houlsby_norm:
                return self.run_adapter(name, *args, **kwargs)
        return self.base_layer(*args, **kwargs)

    def run_adapter(self, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        """Apply the norm that an adapter uses here; the result has the dtype of the hidden states.

        The norm may be in float32 on a base model in half precision. I-BERT's norm also gets and
        returns a scaling factor.
        """
        norm = self.norm(adapter_name)
        if norm.weight.dtype == self.base_layer.weight.dtype:
            return norm(*args, **kwargs)
        hidden = hidden_states_of(args, kwargs)
        args, kwargs = cast((args, kwargs), norm.weight.dtype)  # type: ignore[arg-type]
        return cast(norm(*args, **kwargs), hidden.dtype)
