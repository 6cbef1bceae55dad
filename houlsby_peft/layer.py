"""The tuner layers: a module of the base model, wrapped, with the bottleneck or the norm of each adapter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, Protocol

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from .bottleneck import Bottleneck
from .offloading import copy_of, device_of, dtype_of
from .skip import Read, SkipConnection


NO_MERGE = (
    "Houlsby adapters cannot be merged into the base weights, because the bottleneck is non-linear. Keep the adapter "
    "loaded (it adds a few percent to the base model's time), or call unload() to restore the base model."
)

# The names under which modules keep the sizes of their input and output.
_SIZE_ATTRIBUTES = [
    ("in_features", "out_features"),
    ("in_channels", "out_channels"),
    ("num_embeddings", "embedding_dim"),
    ("nx", "nf"),
    ("embed_dim", "embed_dim"),
]


class Batch(Protocol):
    """A batch whose rows have different adapters, as layers and heads use it; `batching.MixedBatch` is one."""

    def adapt(self, layer: HoulsbyLayer, hidden: torch.Tensor, read: Read | None = None) -> torch.Tensor:
        """Apply to each row its adapter's bottleneck."""
        ...

    def normalize(self, layer: HoulsbyLayerNorm, *args: Any, **kwargs: Any) -> Any:
        """Apply to each row its adapter's norm."""
        ...

    def run_heads(self, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply to each row its adapter's head."""
        ...


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of the base model, as `named_modules` does on a model without adapters.

    The model itself is left out. Adapters, of which a model may have hundreds, are not visited.
    """
    return ((name, base) for name, _, base in _walk("", model, set()))


def wrapped_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the wrappers that adapters have put around modules of the base model, by the names of these modules."""
    return ((name, module) for name, module, base in _walk("", model, set()) if module is not base)


def layers_around(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the tuner layers around a module of the base model, from the outermost on, also those of other methods."""
    while isinstance(module, BaseTunerLayer):
        yield module
        module = module.base_layer  # type: ignore[assignment]


def is_inside(name: str, outer: str) -> bool:
    """Return whether a module is another module, or inside it, by their names."""
    return f"{name}.".startswith(f"{outer}.")


def base_module(module: nn.Module) -> nn.Module:
    """Return the module of the base model inside all wrappers that adapters have put around it."""
    base: nn.Module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    # An invertible module is around PEFT's wrapper of an embedding with trained tokens.
    return base_module(base.original_module) if isinstance(base, AuxiliaryTrainingWrapper) else base


def _walk(name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    base = base_module(module)
    if base in seen:
        return
    seen.add(base)
    if name:
        yield name, module, base
    for child_name, child in base.named_children():
        yield from _walk(f"{name}.{child_name}" if name else child_name, child, seen)


class HoulsbyTunerLayer(nn.Module, BaseTunerLayer):
    """Base class of the tuner layers: wrap a module, call it, and never touch its weights.

    Public attributes that a tuner layer lacks, such as a norm's `eps`, are read from the wrapped module.

    Args:
        base_layer: The wrapped module of the base model.
        reference: The module whose device and dtype the adapters share. Default: the wrapped module.
        batches: The mixed batches that the model is running, by thread, shared by all layers of a model.

    Attributes:
        in_features, out_features: Sizes of the wrapped module, as in every PEFT layer; None if it has none.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        reference: nn.Module | None = None,
        batches: dict[int, Batch] | None = None,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        wrapped = self.get_base_layer()
        # In a tuple, so that the module is not registered a second time.
        self.reference = (wrapped if reference is None else reference,)
        self.batches = {} if batches is None else batches
        self.in_features, self.out_features = self._sizes(wrapped)
        # The heads to enable and disable with this layer, in a plain list because they are registered elsewhere.
        self.heads: list[AuxiliaryTrainingWrapper] = []
        # Names the base model's classes after those of the active adapters.
        self.name_classes: Callable[[list[str]], None] | None = None
        # The layers that a forward pass may leave out although it calls this one; see `_reach_optional`.
        self.optional: list[HoulsbyTunerLayer] = []
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

    @property
    def mixed_batch(self) -> Batch | None:
        """The mixed batch that this thread runs through the model; None in an ordinary forward pass."""
        return self.batches.get(get_ident()) if self.batches else None

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Set the active adapters of this layer, and name the classes of the base model after theirs."""
        super().set_adapter(adapter_names, inference_mode=inference_mode)
        if self.name_classes is not None:
            self.name_classes(self.active_adapters)

    def enable_adapters(self, enabled: bool) -> None:
        """Enable or disable the adapters of this layer, and the trained heads that belong to it."""
        super().enable_adapters(enabled)
        for head in self.heads:
            head.enable_adapters(enabled)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise a ValueError: a non-linear module has no equivalent weights to merge."""
        raise ValueError(NO_MERGE)

    def unmerge(self) -> None:
        """Warn that there is nothing to do, as every PEFT layer that is not merged does."""
        warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)

    def _tell_readers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give what enters this module to the layers whose bottlenecks may read it."""
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        for layer in self.readers:
            if layer.skip is not None and not layer.disable_adapters:
                layer.skip.enter(hidden)

    def _reach_optional(self, hidden: torch.Tensor) -> torch.Tensor:
        """Give the active adapters' weights in optional layers a gradient of zero, to which theirs is added.

        A decoder without encoder states never calls its cross-attention. The weights there would train without a
        gradient, for which DistributedDataParallel waits in vain.
        """
        if not self.optional or not torch.is_grad_enabled():
            return hidden
        weights = [
            weight
            for layer in self.optional
            for container in (getattr(layer, name) for name in layer.adapter_layer_names)
            for name in self.active_adapters
            if name in container
            for weight in container[name].parameters()
            # DeepSpeed does not wait for gradients of the weights that it has sharded.
            if weight.requires_grad and not hasattr(weight, "ds_id")
        ]
        return _WithZeroGradients.apply(hidden, *weights) if weights else hidden

    def cast_to_base(self, adapter_name: str) -> None:
        """Cast an adapter's weights to the dtype of the base model."""
        for name in self.adapter_layer_names:
            if adapter_name in getattr(self, name):
                getattr(self, name)[adapter_name].to(dtype_of(self.reference[0]))

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move an adapter after PEFT has loaded it; its dtype, which need not be the base model's, stays."""
        for name in self.adapter_layer_names:
            added = getattr(self, name)
            if adapter_name in added and not any(weight.is_meta for weight in added[adapter_name].parameters()):
                added[adapter_name].to(device or device_of(self.reference[0]))

    @staticmethod
    def _sizes(module: nn.Module) -> tuple[int | None, int | None]:
        for names in _SIZE_ATTRIBUTES:
            if all(hasattr(module, name) for name in names):
                return getattr(module, names[0]), getattr(module, names[1])
        weight = getattr(module, "weight", None)
        return (weight.shape[-1],) * 2 if isinstance(weight, torch.Tensor) and weight.dim() else (None, None)


class HoulsbyLayer(HoulsbyTunerLayer):
    """A module whose output is a sub-layer's output, followed by the bottleneck of each active adapter.

    Houlsby et al. 2019, figure 2 (left). Active adapters are stacked in the order given. An adapter without a
    bottleneck here leaves the output unchanged. If the wrapped module returns a tuple, its first element is adapted.
    Adapters of every kind add to this output; those that read something else need the layer's `SkipConnection`.

    One layer owns a shared bottleneck and registers it; the other layers of its group refer to the owner. The
    bottleneck is thus saved, counted and optimized once.

    Args:
        base_layer: The wrapped module.
        reference: The module whose device and dtype the bottlenecks share. Default: the wrapped module.
        batches: See `HoulsbyTunerLayer`.
        channel_dim: The dimension of the output that the bottleneck transforms, counted from the end: -1, or -1 - n
            for a convolution over n dimensions.
    """

    adapter_layer_names = ("houlsby_adapter",)
    other_param_names = ("houlsby_owner",)

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
        # From an adapter's name to the layer that owns its shared bottleneck. A plain dict, so that the bottleneck is
        # registered only once in the model.
        self.houlsby_owner: dict[str, HoulsbyLayer] = {}
        # Only where an adapter has needed it.
        self.skip: SkipConnection | None = None

    def update_layer(self, adapter_name: str, bottleneck: nn.Module) -> None:
        """Give an adapter a bottleneck that this layer owns; an existing one of this name is replaced."""
        self.houlsby_owner.pop(adapter_name, None)
        self.houlsby_adapter[adapter_name] = bottleneck

    def share_layer(self, adapter_name: str, owner: HoulsbyLayer) -> None:
        """Give an adapter the bottleneck that another layer owns; an existing one of this name is replaced."""
        if adapter_name in self.houlsby_adapter:
            del self.houlsby_adapter[adapter_name]
        self.houlsby_owner[adapter_name] = owner

    def bottleneck(self, adapter_name: str) -> Bottleneck | None:
        """Return the bottleneck that an adapter applies here, owned or shared; None if it has none here."""
        owner = self.houlsby_owner.get(adapter_name, self)
        return owner.houlsby_adapter[adapter_name] if adapter_name in owner.houlsby_adapter else None  # type: ignore[return-value]

    def run_bottleneck(self, adapter_name: str, hidden: torch.Tensor, read: Read | None = None) -> torch.Tensor:
        """Apply the bottleneck that an adapter has here, if it has one.

        Args:
            adapter_name: The adapter.
            hidden: Hidden states of the shape `(..., width)`.
            read: Returns what bottlenecks of a kind read. None: all of them read the hidden states.
        """
        bottleneck: Any = self.bottleneck(adapter_name)
        if bottleneck is not None and read is not None:
            hidden = bottleneck(hidden, read(bottleneck.kind, hidden))
        elif bottleneck is not None:
            hidden = bottleneck(hidden)
        return hidden

    @property
    def applied_adapters(self) -> list[str]:
        """The adapters that an ordinary forward pass applies here, in their order."""
        names: list[str] = self.active_adapters
        return names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.readers:
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
        read = None if self.skip is None else self.skip.leave()
        batch = self.mixed_batch
        if batch is not None:
            hidden = batch.adapt(self, hidden, read)
        else:
            for name in self.applied_adapters:
                hidden = self.run_bottleneck(name, hidden, read)
            hidden = self._reach_optional(hidden)
        return hidden if self.channel_dim == -1 else hidden.movedim(-1, self.channel_dim)

    def _get_available_adapters(self) -> set[str]:
        return {*self.houlsby_adapter, *self.houlsby_owner}


class HoulsbyLayerNorm(HoulsbyTunerLayer):
    """A norm of the base model and a trained copy of it per adapter (Houlsby et al. 2019, section 2.1).

    Norms do not compose: of several active adapters, the last one that trains this norm is used. While adapters are
    disabled, the base model's norm is used.
    """

    adapter_layer_names = ("houlsby_norm",)

    def __init__(self, base_layer: nn.Module, batches: dict[int, Batch] | None = None) -> None:
        super().__init__(base_layer, batches=batches)
        self.houlsby_norm = nn.ModuleDict()

    def update_layer(self, adapter_name: str) -> None:
        """Give an adapter a copy of the base model's norm."""
        self.houlsby_norm[adapter_name] = copy_of(self.base_layer)

    def norm(self, adapter_name: str) -> nn.Module | None:
        """Return the norm that an adapter trains here; None if it trains none here."""
        return self.houlsby_norm[adapter_name] if adapter_name in self.houlsby_norm else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.readers:
            self._tell_readers(args, kwargs)
        if self.disable_adapters:
            return self.base_layer(*args, **kwargs)
        batch = self.mixed_batch
        if batch is not None:
            return batch.normalize(self, *args, **kwargs)
        result = self.apply_norm(next(self._active_norms(), self.base_layer), *args, **kwargs)
        if isinstance(result, tuple):
            return (self._reach_optional(result[0]), *result[1:])
        return self._reach_optional(result)

    def apply_norm(self, norm: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Apply a norm whose dtype (float32) may differ from that of the norm that it replaces.

        Args:
            norm: The norm.
            args, kwargs: What the model calls its norm with; besides the hidden states, I-BERT gives a scaling factor.

        Returns:
            What the norm returns, in the dtype of the hidden states.
        """
        dtype = norm.weight.dtype
        if dtype == self.base_layer.weight.dtype:
            return norm(*args, **kwargs)
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        own_args, own_kwargs = cast((args, kwargs), dtype)  # type: ignore[arg-type]
        return cast(norm(*own_args, **own_kwargs), hidden.dtype)

    def _active_norms(self) -> Iterator[nn.Module]:
        return (self.houlsby_norm[name] for name in reversed(self.active_adapters) if name in self.houlsby_norm)


class _WithZeroGradients(torch.autograd.Function):
    """The identity of its first input; in the backward pass, the gradients of the others are zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.weights = inputs[1:]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (gradient, *map(torch.zeros_like, ctx.weights))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors inside arguments or results."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(cast(item, dtype) for item in value)
    if type(value) is dict:
        return {key: cast(item, dtype) for key, item in value.items()}
    return value
