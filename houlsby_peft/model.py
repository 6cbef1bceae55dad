"""`HoulsbyModel`: wraps the places of a base model, and what PEFT asks of every tuner."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, check_target_module_exists
from torch import nn

from .adapter_names import check_name
from .averaging import average, check_alike
from .config import HoulsbyConfig
from .fingerprint import differences, fingerprint, warn_of_wrong_base
from .head import HoulsbyHead, wrap_heads
from .layer import HoulsbyLayer, HoulsbyLayerNorm
from .loading import check_shapes
from .mixed_forward import MixedForward
from .new_modules import add_new_modules
from .places import Place
from .plan import Plan, modules_to_save
from .registration import PREFIX
from .sharded import refuse_shards
from .tasks import record_head
from .tuner_layer import NO_MERGE, HoulsbyTunerLayer


class HoulsbyModel(BaseTuner):
    """Adds Houlsby bottleneck adapters to a model; made by `get_peft_model(model, HoulsbyConfig())`.

    Houlsby et al. 2019: the output of each sub-layer passes through a bottleneck before its skip connection; these
    bottlenecks, the norms of the adapted layers and the task head are trained, everything else is frozen. The weights
    of the base model are never touched, so it may be quantized or sharded in any way.

    Args:
        model: the base model, changed in place.
        peft_config: the `HoulsbyConfig`, or a dict of them by adapter name.
        adapter_name: the name of the adapter.
        low_cpu_mem_usage: create the adapter's weights on the meta device, to be replaced by loaded ones.
        state_dict: weights that are loaded later; see `inject_adapter`.
    """

    prefix = PREFIX
    tuner_layer_cls = HoulsbyTunerLayer

    def __init__(
        self, model: nn.Module, peft_config: HoulsbyConfig | dict[str, HoulsbyConfig], adapter_name: str, **kwargs: Any
    ) -> None:
        with _unchanged_by_errors(getattr(model, "peft_config", {})):
            super().__init__(model, peft_config, adapter_name, **kwargs)  # type: ignore[arg-type]

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Wrap the places of an adapter; called by PEFT when an adapter is created, added or loaded.

        The places always come from the configuration, which says all that a `state_dict` could and, with shared
        bottlenecks, more: only the owner of a shared bottleneck appears in a file. Everything is checked before the
        model is changed.

        Raises:
            ValueError: there is nothing to adapt, or the weights to be loaded do not fit.
        """
        config: HoulsbyConfig = self.peft_config[adapter_name]  # type: ignore[assignment]
        self._plan = Plan(model, config)
        if add_new_modules(model, config, self._plan.bottlenecks):
            self._plan = Plan(model, config)
        self._plan.check_weights(model, state_dict)
        check_name(model, adapter_name)
        self._recognize_base(model, adapter_name, config)
        self._mixed_forward = MixedForward(model)
        # Before PEFT does, which finds our wrappers and uses them.
        active = [adapter_name] if adapter_name in self.active_adapters else []
        wrap_heads(model, modules_to_save(model, config), adapter_name, active, config.inference_mode)
        super().inject_adapter(model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage)
        # transformers disables heads together with tuner layers, but enables the tuner layers alone.
        first = next(module for module in model.modules() if isinstance(module, HoulsbyTunerLayer))
        first.heads = [module for module in model.modules() if isinstance(module, HoulsbyHead)]

    def _recognize_base(self, model: nn.Module, adapter_name: str, config: HoulsbyConfig) -> None:
        """Record the base and the labels of a new adapter; warn if a loaded one was trained on another base."""
        places = list(self._plan.bottlenecks.values())
        found = fingerprint(model, [self._plan.reference(place) for place in places[:1] + places[-1:]])
        if not config.was_trained_elsewhere:
            config.base_fingerprint = found
            record_head(config, model)
        elif reasons := differences(config.base_fingerprint or {}, found):
            warn_of_wrong_base(config.base_model_name_or_path, model, reasons, adapter_name)

    def _prepare_adapter_config(  # type: ignore[override]
        self, peft_config: HoulsbyConfig, model_config: dict[str, Any]
    ) -> HoulsbyConfig:
        return peft_config

    def _check_target_module_exists(  # type: ignore[override]
        self, peft_config: HoulsbyConfig, key: str
    ) -> Any:
        if self._plan.config is not peft_config:
            self._plan = Plan(self.model, peft_config)
        return check_target_module_exists(self._plan.names, key)

    def _create_and_replace(  # type: ignore[override]
        self,
        peft_config: HoulsbyConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        place = self._plan.places[current_key]
        layer = target if isinstance(target, HoulsbyTunerLayer) else self._plan.new_layer(target, place)
        if isinstance(layer, HoulsbyLayerNorm):
            layer.update_layer(adapter_name)
        elif isinstance(layer, HoulsbyLayer):
            self._add_bottleneck(adapter_name, layer, place)
        layer.set_adapter(self.active_adapters, inference_mode=peft_config.inference_mode)
        if layer is not target:
            self._replace_module(parent, target_name, layer, target)

    def _add_bottleneck(self, adapter_name: str, layer: HoulsbyLayer, place: Place) -> None:
        owner = self._plan.owners[place.key]
        if owner != place.key:
            layer.share_layer(adapter_name, self.model.get_submodule(owner))
            return
        layer.update_layer(adapter_name, self._plan.new_bottleneck(place))

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        # PEFT's own version looks for weights in the wrapped module, which a dropout does not have.
        setattr(parent, child_name, new_module)

    def _check_merge_allowed(self) -> None:
        raise ValueError(NO_MERGE)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """To float32 or, if that is not wanted, to the base model's dtype; a file may have brought another one."""
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        for module in self.model.modules():
            if isinstance(module, HoulsbyTunerLayer) and not autocast_adapter_dtype:
                module.cast_to_base(adapter_name)

    @property
    def _own_adapters(self) -> dict[str, HoulsbyConfig]:
        """The Houlsby adapters; the model may have adapters of other methods too."""
        return {name: config for name, config in self.peft_config.items() if isinstance(config, HoulsbyConfig)}

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Set the active adapter(s); several are applied one after the other, in the order given.

        Raises:
            ValueError: an adapter is unknown.
        """
        unknown = {adapter_name} if isinstance(adapter_name, str) else set(adapter_name)
        unknown -= set(self.peft_config)
        if unknown:
            raise ValueError(
                f"Only adapters of the model can be active, which are {', '.join(self.peft_config)}; got "
                f"{', '.join(sorted(unknown))}. Add or load the others first."
            )
        super().set_adapter(adapter_name, inference_mode=inference_mode)

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter. If it was the only active one, another adapter becomes active, the same in all layers."""
        others = sorted(set(self._own_adapters) - {adapter_name})
        if self.active_adapters == [adapter_name] and others:
            warnings.warn(
                f"Adapter {adapter_name} was active which is now deleted. Setting active adapter to {others[0]}.",
                stacklevel=2,
            )
            self.set_adapter(others[0])
        super().delete_adapter(adapter_name)

    def add_weighted_adapter(self, adapters: list[str], weights: list[float], adapter_name: str) -> None:
        """Add an adapter whose weights are a linear combination of other adapters' weights.

        The combination goes over all that adapters train: bottlenecks, norms, and heads, so that averaging heads of
        unlike tasks makes little sense. It is not the combination of what the adapters compute, which is not linear
        in their weights. The new adapter is not active yet.

        Args:
            adapters: names of adapters with the same shapes.
            weights: their coefficients, which may be negative and need not sum to 1.
            adapter_name: name of the new adapter.

        Raises:
            ValueError: the name is taken, the numbers of names and coefficients differ, or the adapters differ.
        """
        if adapter_name in self.peft_config:
            raise ValueError(f"An average must have a name of its own; there already is an adapter {adapter_name!r}.")
        if len(adapters) != len(weights):
            raise ValueError(f"Each adapter must have one weight; got {len(adapters)} and {len(weights)} of them.")
        check_alike(self.model, self._own_adapters, adapters)
        with _unchanged_by_errors(self.peft_config):
            self.peft_config[adapter_name] = replace(self.peft_config[adapters[0]])
            self.inject_adapter(self.model, adapter_name)
        average(self.model, adapters, weights, adapter_name)

    @classmethod
    def _get_adapter_state_dict(cls, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = super()._get_adapter_state_dict(*args, **kwargs)
        refuse_shards(weights)
        return weights

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        """`X.houlsby_adapter.NAME.down_proj.weight` is saved as `X.houlsby_adapter.down_proj.weight`."""
        return re.sub(rf"(\.{PREFIX}(?:adapter|norm))\.{re.escape(adapter_name)}\.", r"\1.", key)

    @classmethod
    def _remap_adapter_state_dict_for_load(  # type: ignore[override]
        cls, model: nn.Module, config: HoulsbyConfig, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Called by PEFT with what is to be loaded; refuses what does not fit before any weight is copied."""
        found = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        own = re.compile(rf"\.(?:{PREFIX}(?:adapter|norm)|modules_to_save)\.{re.escape(adapter_name)}\.")
        expected = {key: value.shape for key, value in model.state_dict().items() if own.search(key)}
        source = str(config.weights_file or "what is loaded")
        check_shapes(expected, {key: value.shape for key, value in found.items()}, source)
        return found

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Called by PEFT around every forward and generation."""
        names = kwargs.pop("adapter_names", None)
        if names is None:
            yield
            return
        self._mixed_forward.check(names, self._own_adapters, args, kwargs)
        with self._mixed_forward.adapters_of_rows(names):
            yield


@contextmanager
def _unchanged_by_errors(configs: dict[str, Any]) -> Iterator[None]:
    """Take out of a model's configurations what was entered for an adapter that could not be added: it would stand for
    an adapter, and be saved as one."""
    before = dict(configs)
    try:
        yield
    except Exception:
        configs.clear()
        configs.update(before)
        raise
