"""`HoulsbyModel`: adds adapters to a base model, as PEFT asks of every tuner."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from threading import get_ident
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, check_target_module_exists
from torch import nn

from accelerate import init_empty_weights  # type: ignore[import-untyped]

from .averaging import average, check_alike, check_average, find_joined_options, join
from .batching import MixedBatch, find_rows, forget_batches, hook_other_wrappers, run_mixed_batch
from .checkpoints.fingerprint import report_other_base
from .checkpoints.weights import check_tensors
from .config import HoulsbyConfig
from .heads.find import find_last_heads
from .heads.tasks import find_adapter_of_rows, find_adapter_with_head, label_facts, name_classes, use_labels
from .heads.wrapper import HoulsbyHead, add_heads, train_heads
from .layer import NO_MERGE, Batch, HoulsbyLayer, HoulsbyLayerNorm, HoulsbyTunerLayer
from .offloading import check_at_hand
from .placement.checks import check_is_base, check_name, log_other_methods
from .placement.place import Place
from .placement.places import is_norm
from .placement.plan import Plan
from .registration import PREFIX
from .skip import SkipConnection


# The attribute of a base model that undoes the addition of an adapter whose weights are yet to be checked.
_RESTORE = "houlsby_restore"


class HoulsbyModel(BaseTuner):
    """Adds Houlsby bottleneck adapters to a model; made by `get_peft_model(model, HoulsbyConfig())`.

    Houlsby et al. 2019: the output of each sub-layer passes through a bottleneck before its skip connection. The
    bottlenecks, the norms of the adapted layers and the task head are trained; everything else is frozen. The weights
    of the base model are never touched, so it may be quantized or sharded in any way.

    Args:
        model: The base model, changed in place.
        peft_config: The `HoulsbyConfig`, or a dict of configurations by adapter name.
        adapter_name: Name of the adapter.
        low_cpu_mem_usage: Create the adapter's weights on the meta device, to be replaced by loaded ones.
        state_dict: Weights that are loaded later; see `inject_adapter`.
    """

    prefix = PREFIX
    tuner_layer_cls = HoulsbyTunerLayer
    _has_run_batches = False
    _may_map_names = True

    def __init__(
        self, model: nn.Module, peft_config: HoulsbyConfig | dict[str, HoulsbyConfig], adapter_name: str, **kwargs: Any
    ) -> None:
        # A `PeftModel` gives a dict. Otherwise transformers may load the weights, without calling this class again.
        self._may_map_names = isinstance(peft_config, dict)
        with _restore_configs(getattr(model, "peft_config", {})):
            super().__init__(model, peft_config, adapter_name, **kwargs)  # type: ignore[arg-type]

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Add an adapter to the model. PEFT calls this when an adapter is created, added or loaded.

        Everything is found and checked before the model or the configuration is changed; if PEFT fails nevertheless,
        the changes are undone. The places come from the configuration and, for a saved adapter, from its record, not
        from `state_dict`, in which a shared bottleneck appears only at its owner.

        Raises:
            ValueError: There is nothing to adapt, the name is taken, or the weights to be loaded do not fit.
        """
        config: HoulsbyConfig = self.peft_config[adapter_name]  # type: ignore[assignment]
        check_is_base(model)
        config.leave_out_heads_of_peft()
        plan = Plan(model, config)
        # Where transformers loads the weights, nothing casts the adapter to float32.
        is_cast = autocast_adapter_dtype and self._may_map_names
        names_fit = plan.check_weights(state_dict, is_cast, self._may_map_names)
        check_name(model, adapter_name)
        log_other_methods(model, plan.places)

        record = plan.new_record()
        if config.is_loaded and (loaded := config.record):
            if differences := plan.base_differences():
                report_other_base(config.base_model_name_or_path, model, differences, adapter_name)
            two_layer_head = config.two_layer_head or loaded.two_layer_head
            record = replace(
                loaded,
                places=record.places,
                heads=record.heads,
                two_layer_head=two_layer_head,
                task_type=record.task_type,
            )
        self._plan = plan
        self._batches: dict[int, Batch] = next((layer.batches for layer in _tuner_layers(model)), {})
        forget_batches(model)
        active = [adapter_name] if adapter_name in self.active_adapters else []
        restore = _remember_model(model, adapter_name)
        try:
            # Before PEFT wraps modules to save: it finds our wrappers and uses them.
            task_heads = find_last_heads(model, plan.bottlenecks)
            add_heads(model, plan.heads, task_heads, adapter_name, active, self._batches)
            super().inject_adapter(model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage)
            # As PEFT does for its part: to activate the adapters in a layer also says which of its weights train.
            training = [(weight, weight.requires_grad) for weight in model.parameters()] if plan.ends else []
            # Not among the modules that PEFT looks for: it would warn of tied embeddings, whose weights stay theirs.
            with init_empty_weights() if low_cpu_mem_usage else nullcontext():
                # The owner first: some models, such as XLM-R's, hold the output embedding before the embeddings.
                for key in sorted(plan.ends, key=lambda key: plan.owners[key] != key):
                    parent, _, name = key.rpartition(".")
                    parts = (model.get_submodule(key), name, model.get_submodule(parent))
                    self._create_and_replace(config, adapter_name, *parts, key)
            for weight, requires_grad in training:
                weight.requires_grad_(requires_grad)
        except Exception:
            restore()
            raise
        found = [name for name in plan.heads if not name.endswith(tuple(config.modules_to_save or ()))]
        train_heads(model, found, adapter_name, is_trained=bool(active) and not config.inference_mode)
        hook_other_wrappers(model, self._batches)
        for key, others in plan.optional.items():
            layer = model.get_submodule(key)
            layer.optional += [other for other in map(model.get_submodule, others) if other not in layer.optional]  # type: ignore[operator]
        # Kept with the model as well, because several adapters may have been added with one configuration.
        # One dict for good: whoever takes adapters out of the model and puts them in again holds on to it.
        records = model.__dict__.setdefault("houlsby_records", {})
        records[adapter_name] = config.record = record
        _connect_heads(model)
        name_classes(getattr(model, "config", None), records, self.active_adapters)
        if not names_fit:
            # They are checked only after PEFT has mapped them.
            model.__dict__[_RESTORE] = (adapter_name, restore)

    def _prepare_adapter_config(  # type: ignore[override]
        self, peft_config: HoulsbyConfig, model_config: dict[str, Any]
    ) -> HoulsbyConfig:
        return peft_config

    def _check_target_module_exists(  # type: ignore[override]
        self, peft_config: HoulsbyConfig, key: str
    ) -> Any:
        if self._plan.config is not peft_config:
            self._plan = Plan(self.model, peft_config)
        found = check_target_module_exists(self._plan.names, key)
        # PEFT's matcher takes the ends of names, and the final `norm` must not match a router's `norm`.
        return key in self._plan.places if found else found

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
            self._connect_skip(layer, place)
        layer.set_adapter(self.active_adapters, inference_mode=peft_config.inference_mode)
        if layer is not target:
            self._replace_module(parent, target_name, layer, target)

    def _connect_skip(self, layer: HoulsbyLayer, place: Place) -> None:
        """Let the bottlenecks of a layer read the residual input of their sub-layer, and the norm after the sum."""
        assert place.entry is not None
        if place.norm is None:
            layer.skip = SkipConnection()
        else:
            parent, _, name = place.norm.rpartition(".")
            layer.skip = SkipConnection(self.model.get_submodule(parent), name)
        entry = self.model.get_submodule(place.entry)
        if not isinstance(entry, HoulsbyTunerLayer):
            parent, _, name = place.entry.rpartition(".")
            target = entry
            entry = (
                HoulsbyLayerNorm(target, self._batches)
                if is_norm(target)
                else HoulsbyLayer(target, batches=self._batches)
            )
            entry.set_adapter(self.active_adapters)
            self._replace_module(self.model.get_submodule(parent), name, entry, target)
        entry.readers.append(layer)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        # PEFT's own version looks for weights in the wrapped module, which a dropout does not have.
        setattr(parent, child_name, new_module)

    def _check_merge_allowed(self) -> None:
        raise ValueError(NO_MERGE)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Cast an adapter to float32 or, if that is not wanted, to the base model's dtype, whatever the file's."""
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        for module in self.model.modules():
            if isinstance(module, HoulsbyHead):
                module.cast_adapter(adapter_name, autocast_adapter_dtype)
            elif isinstance(module, HoulsbyTunerLayer) and not autocast_adapter_dtype:
                module.cast_to_base(adapter_name)

    @property
    def _own_adapters(self) -> dict[str, HoulsbyConfig]:
        """The Houlsby adapters; the model may have adapters of other methods as well."""
        return {name: config for name, config in self.peft_config.items() if isinstance(config, HoulsbyConfig)}

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
        """Delete an adapter. If it was the only active one, another adapter becomes active, the same in all layers."""
        forget_batches(self.model)
        others = sorted(set(self._own_adapters) - {adapter_name})
        if self.active_adapters == [adapter_name] and others:
            warnings.warn(
                f"Adapter {adapter_name} was active which is now deleted. Setting active adapter to {others[0]}.",
                stacklevel=2,
            )
            self.set_adapter(others[0])
        super().delete_adapter(adapter_name)
        self.model.houlsby_records.pop(adapter_name, None)

    def unload(self) -> nn.Module:
        """Remove all adapters, and the names that the base model's classes have from one. Return the base model."""
        name_classes(getattr(self.model, "config", None), {}, [])
        return super().unload()

    def add_weighted_adapter(
        self, adapters: list[str], weights: list[float], adapter_name: str, combination_type: str = "linear"
    ) -> None:
        """Add an adapter that combines other adapters. The new adapter is not activated.

        - "linear": its weights are a linear combination of the others' weights: of bottlenecks, norms and heads. It is
          not the combination of the adapters' outputs, which are not linear in their weights.
        - "cat": its bottlenecks are the others' side by side, whose sizes add up. For the same input, each bottleneck
          adds exactly the weighted sum of what the others add. Norms and heads are averaged, so they are approximate.
          The model's output differs as well, because each later layer reads changed hidden states.

        Combining heads of different tasks makes little sense.

        Args:
            adapters: Names of adapters with the same shapes; with "cat", with bottlenecks of any size and sharing.
            weights: Their coefficients, which may be negative and need not sum to 1.
            adapter_name: Name of the new adapter.
            combination_type: "linear" or "cat".

        Raises:
            ValueError: The name is taken, the numbers of names and coefficients differ, the adapters differ, their
                combination is not finite, or the type of combination is unknown.
        """
        if combination_type not in ("linear", "cat"):
            raise ValueError(f"combination_type must be 'linear' or 'cat'; got {combination_type!r}.")
        if adapter_name in self.peft_config:
            raise ValueError(
                f"The name of a new adapter must be unused; there already is an adapter {adapter_name!r}."
            )
        if len(adapters) != len(weights):
            raise ValueError(f"Each adapter must have one weight; got {len(adapters)} and {len(weights)} of them.")
        changes: dict[str, Any] = {}
        if combination_type == "cat":
            changes = find_joined_options(self.model, self._own_adapters, adapters, weights)
        else:
            check_alike(self.model, self._own_adapters, adapters)
            check_average(self.model, adapters, weights)
        with _restore_configs(self.peft_config):
            first, record = self._own_adapters[adapters[0]], self.model.houlsby_records[adapters[0]]
            self.peft_config[adapter_name] = first.derived(record, **changes)
            self.inject_adapter(self.model, adapter_name)
        if combination_type == "cat":
            join(self.model, self._own_adapters[adapters[0]], adapters, weights, adapter_name)
        else:
            average(self.model, adapters, weights, adapter_name)

    @classmethod
    def _get_adapter_state_dict(  # type: ignore[override]
        cls, model: nn.Module, config: HoulsbyConfig, adapter_name: str, *args: Any, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Return the weights to save, and give the configuration, which PEFT saves next, this adapter's record."""
        weights: dict[str, torch.Tensor] = super()._get_adapter_state_dict(
            model, config, adapter_name, *args, **kwargs
        )
        check_at_hand(weights)
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        record = getattr(base, "houlsby_records", {}).get(adapter_name, config.record)
        if record is not None and record.has_labels_of_base:
            vars(record).update(label_facts(config, base))
        config.record = record
        return weights

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        """Save `X.houlsby_adapter.NAME.down_proj.weight` as `X.houlsby_adapter.down_proj.weight`.

        Another method, such as LoRA, may have wrapped X afterwards, which makes it `X.base_layer`.
        """
        return re.sub(rf"(?:\.base_layer)*(\.{PREFIX}(?:adapter|norm))\.{re.escape(adapter_name)}\.", r"\1.", key)

    @classmethod
    def _remap_adapter_state_dict_for_load(  # type: ignore[override]
        cls, model: nn.Module, config: HoulsbyConfig, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Refuse weights that do not fit before any is copied. PEFT calls this with what is to be loaded."""
        found = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        added, restore = base.__dict__.pop(_RESTORE, (None, None))
        own = re.compile(rf"\.(?:{PREFIX}(?:adapter|norm)|modules_to_save)\.{re.escape(adapter_name)}\.")
        expected = {key: value for key, value in model.state_dict().items() if own.search(key)}
        in_model = {re.sub(rf"(\.base_layer)+(?=\.{PREFIX})", "", key): key for key in expected}
        found = {in_model.get(key, key): value for key, value in found.items()}
        source = config.record.source.weights if config.record and config.record.source else None
        try:
            check_tensors(expected, found, str(source or "what is loaded"))
        except ValueError:
            if restore is not None and added == adapter_name:
                restore()
                base.peft_config.pop(adapter_name, None)
            raise
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base model. Most of PEFT's model classes name their inputs only here, not to the context below."""
        if self._batches:
            find_rows(self.model, self._batches, args, kwargs)
        with self._use_labels(kwargs):
            return super().forward(*args, **kwargs)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Run mixed batches. PEFT enters this context around every forward pass and generation."""
        names = kwargs.pop("adapter_names", None)
        if names is None:
            # Training may write weights in ways that leave no trace.
            if self._has_run_batches and self.training:
                self._has_run_batches = False
                forget_batches(self.model)
            with self._use_labels(kwargs):
                yield
            return
        self._has_run_batches = True
        with (
            run_mixed_batch(self.model, names, self._own_adapters, self._batches, args, kwargs),
            self._use_labels(kwargs),
        ):
            yield

    @contextmanager
    def _use_labels(self, kwargs: Mapping[str, Any]) -> Iterator[None]:
        """If labels are given, let the base model compute the loss for those of the active or the rows' adapter.

        Raises:
            ValueError: The rows of a mixed batch have adapters whose losses differ.
        """
        name = None
        if kwargs.get("labels") is not None:
            records = self.model.houlsby_records
            batch = self._batches.get(get_ident()) if self._batches else None
            if isinstance(batch, MixedBatch):
                name = find_adapter_of_rows(self.model, self._own_adapters, records, batch.names, kwargs["labels"])
            else:
                name = find_adapter_with_head(records, self.active_adapters)
        # A tuner layer would not tell: `ablate` disables single layers and keeps the heads.
        if name is None or any(self.model.get_submodule(key).disable_adapters for key in records[name].heads):
            yield
            return
        with use_labels(self.model, self._own_adapters[name], records[name]):
            yield


def _tuner_layers(model: nn.Module) -> Iterator[HoulsbyTunerLayer]:
    return (module for module in model.modules() if isinstance(module, HoulsbyTunerLayer))


@contextmanager
def _restore_configs(configs: dict[str, Any]) -> Iterator[None]:
    """Restore a model's configurations if an adapter cannot be added: an entry would count as an adapter."""
    before = dict(configs)
    try:
        yield
    except Exception:
        configs.clear()
        configs.update(before)
        raise


def _connect_heads(model: nn.Module) -> None:
    """Let the first tuner layer switch the heads and the names of the classes, of which transformers knows nothing.

    It disables heads, but enables only the tuner layers.
    """
    for layer in islice(_tuner_layers(model), 1):
        layer.heads = [module for module in model.modules() if isinstance(module, HoulsbyHead)]
        layer.name_classes = partial(name_classes, getattr(model, "config", None), vars(model)["houlsby_records"])


def _remember_model(model: nn.Module, adapter_name: str) -> Callable[[], None]:
    """Return a function that restores a model's modules, what trains and the names, if an adapter cannot be added."""
    config = getattr(model, "config", None)
    names = {key: getattr(config, key) for key in ("id2label", "label2id") if hasattr(config, key)}
    training = [(weight, weight.requires_grad) for weight in model.parameters()]
    modules = {key: module for key, module in model.named_modules() if key}
    containers = [
        getattr(module, name)
        for module in modules.values()
        if isinstance(module, (HoulsbyTunerLayer, HoulsbyHead))
        for name in (*module.adapter_layer_names, *module.other_param_names)
    ]
    is_new = not any(adapter_name in container for container in containers)
    layers = {module: (list(module.readers), getattr(module, "skip", None)) for module in _tuner_layers(model)}

    def restore() -> None:
        for key, module in modules.items():
            parent, _, name = key.rpartition(".")
            owner = modules[parent] if parent else model
            if getattr(owner, name, None) is not module:
                setattr(owner, name, module)
        for container in containers:
            if is_new and adapter_name in container:
                del container[adapter_name]
        for layer, (readers, skip) in layers.items():
            layer.readers = readers
            if isinstance(layer, HoulsbyLayer):
                layer.skip = skip
        for weight, requires_grad in training:
            weight.requires_grad_(requires_grad)
        if is_new:
            model.__dict__.get("houlsby_records", {}).pop(adapter_name, None)
        for key, value in names.items():
            setattr(config, key, value)
        _connect_heads(model)

    return restore
