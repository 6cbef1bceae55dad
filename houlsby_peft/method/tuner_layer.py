"""What all tuner layers have in common: the wrapped module, the model's state, calls from PEFT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import get_ident
from typing import Any, Protocol

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, _get_in_out_features
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from ..saved.record import BENEATH, AdapterRecord
from .modules import device_of, dtype_of, first_tensor


# What has sizes of other names than a linear layer's.
_WITH_OTHER_NAMES = (
    *(Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding),
    nn.MultiheadAttention,
)
# PEFT's name for rows of a mixed batch that use the base model alone.
BASE = "__base__"


class Batch(Protocol):
    """A batch whose rows have different adapters; `batching.MixedBatch` is one."""

    @property
    def names(self) -> Sequence[str]:
        """The adapter of each row; empty in a trial of the base model."""
        ...

    def apply(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a layer or head computes: each row by `run_adapter` of its own adapter."""
        ...


class ModelState:
    """What all tuner layers and heads of one model share.

    Attributes:
        batches: The mixed batch that each thread runs through the model.
        records: What is recorded of each adapter of the model, by the adapter's name.
        labels: The labels that each thread runs through the model, and the adapter whose loss they
            are for; see `heads/loss.py`.
        heads: The model's task heads and other modules that adapters train as a whole.
        hooks: What adapters have hooked on the base model, as long as there is one.
        slots: The adapters that are held for prediction alone, by form; see `batching/slots.py`.
    """

    def __init__(self) -> None:
        self.batches: dict[int, Batch] = {}
        self.records: dict[str, AdapterRecord] = {}
        self.labels: dict[int, tuple[str, Any]] = {}
        self.heads: list[Any] = []
        self.hooks: list[RemovableHandle] = []
        self.slots: list[Any] = []

    @property
    def thread(self) -> int:
        """The number of this thread.

        While a graph is captured, it is 0, because the number cannot be part of the graph. A mixed
        batch is no whole graph: some of its functions are in one, and others are not.
        """
        return 0 if torch.compiler.is_compiling() and not self.batches else get_ident()

    def unhook(self) -> None:
        """Take the hooks off the base model."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def note(self, adapter_name: str, **facts: Any) -> None:
        """Record further facts of an adapter."""
        self.records[adapter_name] = replace(self.records[adapter_name], **facts)

    def beneath(self, adapter_name: str) -> str | None:
        """Return the name of the adapter beneath a ladder; None if there is none."""
        record = self.records.get(adapter_name)
        return None if record is None or record.beneath is None else record.beneath_name


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


@contextmanager
def activate(batches: dict[int, Batch], batch: Batch) -> Iterator[None]:
    """Within this context, let the layers of a model compute a batch in this thread."""
    thread = get_ident()
    outer_batch = batches.get(thread)
    batches[thread] = batch
    try:
        yield
    finally:
        if outer_batch is None:
            del batches[thread]
        else:
            batches[thread] = outer_batch


class KeepsFrozen(nn.Module):
    """A wrapper that restores, when it is enabled, which weights trained before it was disabled.

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
        base = self.get_base_layer()
        if isinstance(base, _WITH_OTHER_NAMES):
            sizes: tuple[Any, Any] = _get_in_out_features(base)
            self.in_features, self.out_features = sizes
        # The layers whose bottlenecks may read what enters this one; see `residual.py`.
        self.residual_users: list[Any] = []
        # The index of the layer of the encoder that begins here, if a ladder reads its input.
        self.rung: int | None = None
        # Adapters that are held here for prediction alone; see `batching/slots.py`.
        self.slots: list[Any] = []
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
        """Enable or disable the adapters of this layer.

        transformers disables the model's heads itself, but enables only the tuner layers.
        """
        super().enable_adapters(enabled)
        if enabled:
            for head in self.state.heads:
                head.enable_adapters(True)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Set the active adapters of this layer, and train their weights unless in inference."""
        self._paused = []
        super().set_adapter(adapter_names, inference_mode=inference_mode)

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter, and what no other one needs. If it was the only active one, all layers
        activate the same other.
        """
        records = self.state.records
        records.pop(adapter_name, None)
        super().delete_adapter(adapter_name)
        needed = {record.beneath_name for record in records.values()}
        for attribute in (*self.adapter_layer_names, *self.other_param_names):
            modules = getattr(self, attribute)
            for name in list(modules):
                if name.startswith(BENEATH) and name not in needed:
                    del modules[name]
        if not records:
            self.state.unhook()

    def _all_available_adapter_names(self) -> list[str]:
        # PEFT activates the first one in place of a deleted adapter. transformers deletes layer by
        # layer, so the layers must agree, whichever adapters they have.
        return sorted(self.state.records)

    def is_in_slots(self, adapter_name: str) -> bool:
        """Return whether an adapter is held in slots here."""
        return any(adapter_name in slots.numbers for slots in self.slots)

    def has(self, adapter_name: str) -> bool:
        """Return whether an adapter has a bottleneck or norm here, in the same time however many
        others have one.
        """
        parts, *_ = self.adapter_layer_names
        return adapter_name in getattr(self, parts) or self.is_in_slots(adapter_name)

    def _get_available_adapters(self) -> set[str]:
        adapters: set[str] = super()._get_available_adapters()
        for slots in self.slots:
            adapters.update(slots.numbers)
        return adapters

    def tell_residual_users(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give what enters this module to the layers whose bottlenecks may read it."""
        for layer in self.residual_users:
            if not layer.disable_adapters:
                layer.hear(self.rung, first_tensor((*args, *kwargs.values())))

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
