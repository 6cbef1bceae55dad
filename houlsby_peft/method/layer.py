"""The layers that apply adapters: the end of a sub-layer with bottlenecks, and the trained norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kernels import door
from .ladder import Ladder, Rungs, add_branches
from .modules import cast, copy_of, first_tensor
from .residual import SkipConnection
from .tuner_layer import HoulsbyTunerLayer, ModelState, batch_of


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

    adapter_layer_names = ("houlsby_adapter", "houlsby_ladder")
    other_param_names = ("houlsby_owner",)
    # At most this many active adapters are applied, the first ones. None: all of them.
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
        # Only at the end of an encoder.
        self.houlsby_ladder = nn.ModuleDict()
        # From an adapter's name to the layer that owns its shared bottleneck. A plain dict, so that
        # the bottleneck is registered only once in the model.
        self.houlsby_owner: dict[str, HoulsbyLayer] = {}
        # Only where a bottleneck reads the residual input.
        self.skip: SkipConnection | None = None
        # Only where there are ladders: what they read.
        self.rungs: Rungs | None = None

    def update_layer(self, adapter_name: str, bottleneck: nn.Module) -> None:
        """Give an adapter a bottleneck that this layer owns, or a ladder."""
        is_ladder = isinstance(bottleneck, Ladder)
        modules = self.houlsby_ladder if is_ladder else self.houlsby_adapter
        modules[adapter_name] = bottleneck

    def share_layer(self, adapter_name: str, owner: HoulsbyLayer) -> None:
        """Give an adapter the bottleneck that another layer owns."""
        self.houlsby_owner[adapter_name] = owner

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Set the active adapters of this layer, and whether the encoder needs its dropout."""
        super().set_adapter(adapter_names, inference_mode)
        if self.rungs is not None and self.houlsby_ladder:
            self.rungs.hold()

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter, and release the encoder with the last ladder."""
        super().delete_adapter(adapter_name)
        if self.rungs is not None and not self.houlsby_ladder:
            self.rungs.release()

    def module_of(self, adapter_name: str) -> Any:
        """Return the bottleneck that an adapter applies here, owned, shared or that of the adapter
        beneath it; None without one.
        """
        bottlenecks = self.houlsby_owner.get(adapter_name, self).houlsby_adapter
        if adapter_name in bottlenecks:
            return bottlenecks[adapter_name]
        beneath = self.state.beneath(adapter_name)
        return None if beneath is None else self.module_of(beneath)

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
        bottleneck = self.module_of(adapter_name)
        if bottleneck is None:
            return hidden
        read = None
        if self.skip is not None and bottleneck.kind != "houlsby":
            read = self.skip.read(bottleneck.kind, hidden, residual)
        return bottleneck(hidden, read)  # type: ignore[no-any-return]

    def hear(self, rung: int | None, hidden: torch.Tensor) -> None:
        """Keep what has entered another layer, for the bottlenecks or ladders here that read it."""
        if self.rungs is not None and rung is not None:
            if self.active_ladders():
                self.rungs.enter(rung, hidden)
        elif self.skip is not None:
            self.skip.enter(hidden)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, and adapt its output `(batch, tokens, d)` or of another shape."""
        self.tell_residual_users(args, kwargs)
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
            for name in self.active_adapters[: self.most_applied]:
                hidden = self.run_adapter(name, hidden, residual)
        if self.rungs is not None:
            hidden = self._climb(self.rungs, hidden)
        if self.channel_dim != -1:
            hidden = hidden.movedim(-1, self.channel_dim)
        return hidden

    def active_ladders(self) -> dict[str, nn.Module]:
        """Return the ladders here of the active adapters or, in a mixed batch, of its rows."""
        batch = batch_of(self.state.batches)
        names = self.active_adapters if batch is None else dict.fromkeys(batch.names)
        return {name: self.houlsby_ladder[name] for name in names if name in self.houlsby_ladder}

    def _climb(self, rungs: Rungs, hidden: torch.Tensor) -> torch.Tensor:
        """Add the branches of the active ladders, or in a mixed batch of those of its rows."""
        ladders = self.active_ladders()
        if not ladders:
            return hidden
        readings = rungs.leave()
        batch: Any = batch_of(self.state.batches)
        if batch is not None and (len(set(batch.names)) > 1 or not readings.have(len(hidden))):
            return add_branches(hidden, ladders, batch.names, readings, batch.fan_out)
        for ladder in ladders.values():
            hidden = hidden + ladder(readings).to(hidden)
        return hidden

    def has(self, adapter_name: str) -> bool:
        """Return whether an adapter has a bottleneck here, or uses one that another layer owns."""
        return super().has(adapter_name) or adapter_name in self.houlsby_owner

    def _get_available_adapters(self) -> set[str]:
        return {*super()._get_available_adapters(), *self.houlsby_owner}


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
        """Give an adapter a copy of the norm that it would use without one."""
        self.houlsby_norm[adapter_name] = copy_of(self.module_of(adapter_name))

    def module_of(self, adapter_name: str) -> nn.Module:
        """Return the norm that an adapter applies here: its copy or, without one, that of the
        adapter beneath it or the base model's.
        """
        norms = self.houlsby_norm
        if adapter_name in norms:
            return norms[adapter_name]
        beneath = self.state.beneath(adapter_name)
        return self.base_layer if beneath is None else self.module_of(beneath)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Normalize hidden states `(..., d)` by the active adapter's norm, or the rows' norms."""
        self.tell_residual_users(args, kwargs)
        if self.disable_adapters:
            return self.base_layer(*args, **kwargs)
        batch = batch_of(self.state.batches)
        if batch is not None:
            return batch.apply(self, args, kwargs)
        base = norm = self.base_layer
        for name in self.active_adapters:
            own = self.module_of(name)
            norm = norm if own is base else own
        return self._normalize(norm, args, kwargs)

    def run_adapter(self, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        """Apply the norm that an adapter uses here."""
        return self._normalize(self.module_of(adapter_name), args, kwargs)

    def _normalize(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply a norm; the result has the dtype of the hidden states.

        The norm may be in float32 on a base model in half precision. I-BERT's norm also gets and
        returns a scaling factor.
        """
        if norm.weight.dtype == self.base_layer.weight.dtype:
            return norm(*args, **kwargs)
        normalized = door.normalize(norm, args, kwargs)
        if normalized is not None:
            return normalized
        hidden = first_tensor((*args, *kwargs.values()))
        args, kwargs = cast((args, kwargs), norm.weight.dtype)  # type: ignore[arg-type]
        return cast(norm(*args, **kwargs), hidden.dtype)
