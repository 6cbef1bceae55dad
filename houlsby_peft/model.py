"""`HoulsbyModel`: adds adapters to a base model, as PEFT asks of every tuner."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from .batching.batch import MixedBatch, hook_other_wrappers, run_mixed_batch
from .batching.rows import RowFinder
from .config import HoulsbyConfig
from .heads.head import HoulsbyHead, add_heads
from .heads.tasks import (
    find_adapter_with_head,
    label_facts,
    use_labels,
)
from .layer import Batch, HoulsbyLayer, HoulsbyLayerNorm, HoulsbyTunerLayer, batch_of
from .placement.places import is_norm
from .placement.plan import Plan
from .registration import PREFIX
from .residual import SkipConnection
from .weights import FILE_PREFIX, check_at_hand, check_tensors


class HoulsbyModel(BaseTuner):
    """Adds Houlsby bottleneck adapters to a model; made by `get_peft_model(model,
    HoulsbyConfig())`.

    Houlsby et al. 2019: the output of each sub-layer passes through a bottleneck before its skip
    connection. The bottlenecks, the norms of the adapted layers and the task head are trained;
    everything else is frozen. The weights of the base model are never touched, so it may be
    quantized or sharded in any way.

    Args:
        model: The base model, changed in place.
        peft_config: The `HoulsbyConfig`, or a dict of configurations by adapter name.
        adapter_name: Name of the adapter.
        low_cpu_mem_usage: Create the adapter's weights on the meta device, to be replaced by loaded ones.
        state_dict: Weights that are loaded later; see `inject_adapter`.
    """

    prefix = PREFIX
    tuner_layer_cls = HoulsbyTunerLayer

    def __init__(
        self,
        model: nn.Module,
        peft_config: HoulsbyConfig | dict[str, HoulsbyConfig],
        adapter_name: str,
        **kwargs: Any,
    ) -> None:
        # As when a notebook's cell with `get_peft_model` runs again, of which PEFT warns.
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        before = dict(getattr(base, "peft_config", {}))
        try:
            super().__init__(base, peft_config, adapter_name, **kwargs)  # type: ignore[arg-type]
        except Exception:
            if before:  # PEFT has entered the new one
                base.peft_config.clear()
                base.peft_config.update(before)
            raise

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Add an adapter to the model. PEFT calls this when an adapter is created, added or loaded.

        What can be refused is found out before the model is changed; if PEFT fails afterwards, the
        adapter is removed. The places come from the configuration and, for a saved adapter, from
        its record, not from `state_dict`, in which a shared bottleneck appears only at its owner.

        Raises:
            ValueError: There is nothing to adapt, or the name is taken.
        """
        config = self._own_adapters[adapter_name].for_adapter()
        self.peft_config[adapter_name] = config
        config.leave_out_heads_of_peft()
        plan = self._plan = Plan(model, config)
        plan.check(adapter_name)
        record = plan.new_record(adapter_name)
        self._batches: dict[int, Batch] = next(
            (layer.batches for layer in _tuner_layers(model)), {}
        )
        self._row_finder = RowFinder(model, self._batches)
        self._trained_before = {
            name for name, weight in model.named_parameters() if weight.requires_grad
        }
        active = [adapter_name] if adapter_name in self.active_adapters else []
        try:
            # Before PEFT wraps modules to save: it finds our wrappers and uses them.
            add_heads(model, plan.heads, adapter_name, active, self._batches)
            # PEFT would match the patterns of sizes, only to warn of some. Those of a file may take
            # forever.
            self.peft_config[adapter_name] = without = copy.copy(config)
            without.rank_pattern = {}
            super().inject_adapter(model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage)
            self.peft_config[adapter_name] = config
            # As PEFT does for its part: to activate the adapters in a layer also says which of its
            # weights train.
            training = (
                [(weight, weight.requires_grad) for weight in model.parameters()]
                if plan.couplings
                else []
            )
            # Not among the modules that PEFT looks for: it would warn of tied embeddings, whose
            # weights stay theirs.
            with init_empty_weights() if low_cpu_mem_usage else nullcontext():
                # The owner first: some models, such as XLM-R's, hold the output embedding before
                # the embeddings.
                for key in sorted(plan.couplings, key=lambda key: plan.owners[key] != key):
                    parent, _, name = key.rpartition(".")
                    parts = (model.get_submodule(key), name, model.get_submodule(parent))
                    self._create_and_replace(config, adapter_name, *parts, key)
            for weight, requires_grad in training:
                weight.requires_grad_(requires_grad)
        except Exception:
            self._remove(adapter_name)
            raise
        for name in plan.heads:
            if not name.endswith(
                tuple(config.modules_to_save or ())
            ):  # which PEFT has taken care of
                head: Any = model.get_submodule(name)
                head.modules_to_save[adapter_name].requires_grad_(
                    bool(active) and not config.inference_mode
                )
        hook_other_wrappers(model, self._batches)
        config.record = record
        # transformers disables the heads, but enables only the tuner layers.
        heads = [module for module in model.modules() if isinstance(module, HoulsbyHead)]
        for layer in _tuner_layers(model):
            layer.heads = heads

    def _remove(self, adapter_name: str) -> None:
        """Remove an adapter that could not be added or loaded, and with the only one all that
        adapters have added.
        """
        self.delete_adapter(adapter_name)
        if not self.peft_config:
            self.unload()
            for name, weight in self.model.named_parameters():
                weight.requires_grad_(name in self._trained_before)

    def _prepare_adapter_config(  # type: ignore[override]
        self, peft_config: HoulsbyConfig, model_config: dict[str, Any]
    ) -> HoulsbyConfig:
        return peft_config

    def _check_target_module_exists(  # type: ignore[override]
        self, peft_config: HoulsbyConfig, key: str
    ) -> Any:
        if self._plan.config.record is not peft_config.record:  # of another adapter
            self._plan = Plan(self.model, peft_config)
        return self._plan.match(key)

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
        plan, place = self._plan, self._plan.places[current_key]
        layer = target
        if not isinstance(layer, HoulsbyTunerLayer):
            layer = plan.new_layer(target, place, self._batches)
        if isinstance(layer, HoulsbyLayerNorm):
            layer.update_layer(adapter_name)
        elif isinstance(layer, HoulsbyLayer) and plan.owners[current_key] == current_key:
            layer.update_layer(adapter_name, plan.new_bottleneck(place))
        elif isinstance(layer, HoulsbyLayer):
            layer.share_layer(adapter_name, self.model.get_submodule(plan.owners[current_key]))
        if isinstance(layer, HoulsbyLayer) and place.entry is not None and layer.skip is None:
            # Its bottlenecks read the residual input of their sub-layer, and the norm after the
            # sum.
            norm_parent, _, norm = (place.norm or "").rpartition(".")
            layer.skip = SkipConnection(
                self.model.get_submodule(norm_parent) if norm else None, norm
            )
            entry_parent, _, name = place.entry.rpartition(".")
            start = entry = self.model.get_submodule(place.entry)
            if not isinstance(entry, HoulsbyTunerLayer):
                kind = HoulsbyLayerNorm if is_norm(start) else HoulsbyLayer
                entry = kind(start, batches=self._batches)
                entry.set_adapter(self.active_adapters)
                self._replace_module(self.model.get_submodule(entry_parent), name, entry, start)
            entry.readers.append(layer)
        layer.set_adapter(self.active_adapters, inference_mode=peft_config.inference_mode)
        if layer is not target:
            self._replace_module(parent, target_name, layer, target)

    def _replace_module(
        self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module
    ) -> None:
        # PEFT's own version looks for weights in the wrapped module, which a dropout does not have.
        setattr(parent, child_name, new_module)

    def _check_merge_allowed(self) -> None:
        raise ValueError(
            "Houlsby adapters cannot be merged into the base weights, because the bottleneck is non-linear. Keep the "
            "adapter loaded (it adds a few percent to the base model's time), or call unload() to restore the base "
            "model."
        )

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Cast an adapter to float32 or, if that is not wanted, to the base model's dtype, whatever
        the file's.
        """
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        for module in self.model.modules():
            if isinstance(module, HoulsbyHead):
                module.cast_adapter(adapter_name, autocast_adapter_dtype)
            elif isinstance(module, HoulsbyTunerLayer) and not autocast_adapter_dtype:
                module.cast_to_base(adapter_name)

    @property
    def _own_adapters(self) -> dict[str, HoulsbyConfig]:
        """The Houlsby adapters; the model may have adapters of other methods as well."""
        return {
            name: config
            for name, config in self.peft_config.items()
            if isinstance(config, HoulsbyConfig)
        }

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Set the active adapters; several are stacked in the order given.

        Raises:
            ValueError: An adapter is unknown.
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
        """Delete an adapter. If it was the only active one, another adapter becomes active, the
        same in all layers.
        """
        others = sorted(set(self._own_adapters) - {adapter_name})
        if self.active_adapters == [adapter_name] and others:
            warnings.warn(
                f"Adapter {adapter_name} was active which is now deleted. Setting active adapter to {others[0]}.",
                stacklevel=2,
            )
            self.set_adapter(others[0])
        super().delete_adapter(adapter_name)

    def add_weighted_adapter(
        self, adapters: list[str], weights: list[float], adapter_name: str
    ) -> None:
        """Add an adapter whose weights are a linear combination of other adapters' weights. It is
        not activated.

        Bottlenecks, norms and heads are combined. That is not the combination of the adapters'
        outputs, which are not linear in their weights.

        What only some of the adapters have, such as a head or the bottlenecks of a layer, is taken
        from them with their weights. An adapter that does not train a norm counts with the base
        model's norm. If the adapters share their bottlenecks in different ways, the new one shares
        none. Heads of different tasks do not combine well.

        Args:
            adapters: Names of adapters with the same options and shapes.
            weights: Their coefficients, which may be negative and need not sum to 1.
            adapter_name: Name of the new adapter.

        Raises:
            ValueError: The name is taken, the numbers of names and coefficients differ, the
                adapters differ in more than their places, or their combination is not finite.
            RuntimeError: Bottlenecks or heads at the same place have different shapes.
        """
        from .derive.combine import combine  # which stands above this module

        combine(self, adapters, weights, adapter_name)

    @classmethod
    def _get_adapter_state_dict(  # type: ignore[override]
        cls, model: nn.Module, config: HoulsbyConfig, adapter_name: str, *args: Any, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Return the weights to save, and record the base model's labels, which may have been
        renamed.
        """
        weights: dict[str, torch.Tensor] = super()._get_adapter_state_dict(
            model, config, adapter_name, *args, **kwargs
        )
        check_at_hand(weights)
        if (record := config.record) is not None and record.has_labels_of_base:
            base = model.get_base_model() if isinstance(model, PeftModel) else model
            facts = label_facts(config, base)
            facts["problem_type"] = facts["problem_type"] or record.problem_type
            config.record = replace(record, **facts)
        return weights

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        """Save `X.houlsby_adapter.NAME.down_proj.weight` as `X.houlsby_adapter.down_proj.weight`.

        Another method, such as LoRA, may have wrapped X afterwards, which makes it `X.base_layer`.
        """
        return re.sub(
            rf"(?:\.base_layer)*(\.{PREFIX}(?:adapter|norm))\.{re.escape(adapter_name)}\.",
            r"\1.",
            key,
        )

    @classmethod
    def _remap_adapter_state_dict_for_load(  # type: ignore[override]
        cls,
        model: nn.Module,
        config: HoulsbyConfig,
        adapter_name: str,
        state_dict: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Refuse weights that do not fit before any is copied. PEFT calls this with what is to be
        loaded.

        A loaded adapter whose weights are refused is removed from the model.
        """
        own = re.compile(
            rf"\.(?:{PREFIX}(?:adapter|norm)|modules_to_save)\.{re.escape(adapter_name)}\."
        )
        expected = {key: value for key, value in model.state_dict().items() if own.search(key)}
        known = {
            cls._remove_adapter_name_from_key(key, adapter_name).removeprefix(FILE_PREFIX)
            for key in expected
        }
        encoder = getattr(
            model.get_base_model() if isinstance(model, PeftModel) else model,
            "base_model_prefix",
            "",
        )

        def name_here(key: str) -> str:
            """Return a name in the file, which may be that of another class with the same encoder,
            as it is here.
            """
            name = key.removeprefix(FILE_PREFIX)
            others = (name, name.removeprefix(f"{encoder}."), f"{encoder}.{name}")
            return key.removesuffix(name) + next(
                (other for other in others if other in known), name
            )

        state_dict = {name_here(key): value for key, value in state_dict.items()}
        found = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        in_model = {re.sub(rf"(\.base_layer)+(?=\.{PREFIX})", "", key): key for key in expected}
        found = {in_model.get(key, key): value for key, value in found.items()}
        try:
            check_tensors(expected, found, f"adapter {adapter_name!r}")
        except ValueError:
            if config.awaits_weights and isinstance(model, PeftModel):
                model.base_model._remove(adapter_name)  # type: ignore[operator]
            raise
        config.awaits_weights, config.shapes_in_file = False, None
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base model. Most of PEFT's model classes name their inputs only here, not to the
        context below.
        """
        batch = batch_of(self._batches)
        if isinstance(batch, MixedBatch):
            batch.find_rows(self._row_finder, args, kwargs)
            batch.is_one_pass = True
        with self._use_labels(kwargs):
            return super().forward(*args, **kwargs)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Run mixed batches. PEFT enters this context around every forward pass and generation."""
        names = kwargs.pop("adapter_names", None)
        if names is None:
            with self._use_labels(kwargs):
                yield
            return
        with (
            run_mixed_batch(self._row_finder, names, self._own_adapters, args, kwargs),
            self._use_labels(kwargs),
        ):
            yield

    @contextmanager
    def _use_labels(self, kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Let the base model compute the loss of the active or the rows' adapter, if labels are
        given.

        Raises:
            ValueError: The rows of a mixed batch have different adapters.
        """
        if kwargs.get("labels") is None:
            yield
            return
        batch = batch_of(self._batches)
        if isinstance(batch, MixedBatch):
            if batch.only_name is None:
                raise ValueError(
                    "If labels are given, all rows must have the same adapter, because one loss is "
                    f"computed; got rows of {', '.join(dict.fromkeys(batch.names))}. Run the rows "
                    "of each adapter separately, or leave the labels out."
                )
            adapters = [batch.only_name]
        else:
            adapters = self.active_adapters
        name = find_adapter_with_head(self.peft_config, adapters)
        config = self._own_adapters.get(name) if name else None
        heads = config.record.heads if config and config.record else []
        # A tuner layer would not tell: `ablate` disables single layers and keeps the heads.
        is_of_base = any(self.model.get_submodule(key).disable_adapters for key in heads)
        with use_labels(self.model, None if is_of_base else config):
            yield


def _tuner_layers(model: nn.Module) -> Iterator[HoulsbyTunerLayer]:
    return (module for module in model.modules() if isinstance(module, HoulsbyTunerLayer))
