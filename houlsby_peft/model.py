"""`HoulsbyModel`: adds adapters to a base model, as PEFT asks of every tuner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import AuxiliaryTrainingWrapper, TrainableTokensWrapper
from torch import nn

from .batching.batch import MixedBatch, hook_other_wrappers, run_mixed_batch
from .batching.rows import RowFinder
from .beneath import add_beneath, describe, open_beneath, start_heads
from .config import SHAPE_OPTIONS, HoulsbyConfig
from .derive.differences import find_differences
from .errors import AdapterError
from .heads.head import HoulsbyHead, add_heads
from .heads.loss import hook_loss
from .heads.tasks import label_facts, warn_of_other_labels
from .method.ladder import Rungs
from .method.layer import HoulsbyLayer, HoulsbyLayerNorm
from .method.modules import base_model_of, hold_batch_norms, wrapped_modules
from .method.residual import SkipConnection
from .method.tuner_layer import HoulsbyTunerLayer, batch_of, state_of
from .placement.plan import Plan
from .placement.view import is_norm
from .registration import PREFIX
from .saved.naming import name_for_model, name_in_file, own_names
from .saved.record import AdapterRecord, Place, SavedState, full_name
from .saved.weights import check_at_hand, check_tensors
from .undo import Snapshot, parts_of


class HoulsbyModel(BaseTuner):
    """Adds Houlsby bottleneck adapters to a model; `get_peft_model` makes it.

    Houlsby et al. 2019: the output of each sub-layer passes through a bottleneck before its skip
    connection. The bottlenecks, the norms of the adapted layers and the task head are trained;
    everything else is frozen. The weights of the base model are never touched, so it may be
    quantized or sharded in any way.

    Args:
        model: The base model, changed in place.
        peft_config: The `HoulsbyConfig`, or a dict of configurations by adapter name.
        adapter_name: Name of the adapter.
        kwargs: `low_cpu_mem_usage` creates the adapter's weights on the meta device; see PEFT.
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
        # A notebook's cell that runs again passes a `PeftModel`. PEFT warns about it.
        base: Any = base_model_of(model)
        configs: dict[str, Any] = getattr(base, "peft_config", {})
        configs_before = dict(configs)
        try:
            super().__init__(base, peft_config, adapter_name, **kwargs)  # type: ignore[arg-type]
        except BaseException:
            if configs_before:  # PEFT has entered the new one
                configs.clear()
                configs.update(configs_before)
                base.peft_config = configs
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

        An adapter of this name, as of an earlier `get_peft_model` on the same base model, is
        replaced. If anything fails, the model is as it was before.

        The places come from the configuration and, for a saved adapter, from its record. If an
        adapter's `state_dict` is given, those of them that have weights in it.

        Raises:
            ValueError: There is nothing to adapt, or the name cannot be given.
        """
        config = self._own_adapters[adapter_name]
        config.leave_out_heads_of_peft()
        self._state = state_of(model)
        self._before = Snapshot(model, adapter_name, self._state.records)
        beneath = open_beneath(config)
        self._plan = plan = Plan(model, config)
        if state_dict is not None:
            plan.leave_out_others(state_dict)
        plan.check(adapter_name)
        facts_beneath = None if beneath is None else describe(beneath)
        record = replace(plan.new_record(), beneath=facts_beneath)
        if adapter_name in self._state.records:
            self._delete_earlier(adapter_name)
        self._state.records[adapter_name] = record
        self._rows: RowFinder | None = None  # of the model as it was before
        with self.adding(adapter_name):
            if beneath is not None:
                add_beneath(self, beneath, record.beneath_name)
                self._plan = plan
            # Before PEFT wraps modules to save: it finds our wrappers and uses them.
            is_active = adapter_name in self.active_adapters
            add_heads(model, plan.heads, adapter_name, is_active, self._state)
            with _without_rank_pattern(config) if config.loaded else nullcontext():
                super().inject_adapter(
                    model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage
                )
            # PEFT does not look for couplings: it would warn of tied embeddings, whose weights stay
            # as they are. The owner first: some models, such as XLM-R's, hold the output embedding
            # before it.
            couplings = sorted(plan.couplings, key=lambda key: plan.owners[key] != key)
            with torch.device("meta") if low_cpu_mem_usage else nullcontext():
                self.add_parts(plan, adapter_name, couplings)
            self._train_what_peft_leaves(plan, adapter_name)
            if beneath is not None:
                start_heads(plan, adapter_name, beneath)
        is_first = self._state.records.keys() <= {adapter_name, record.beneath_name}
        if config.loaded is not None and is_first and record.heads and record.id2label:
            warn_of_other_labels(getattr(model, "config", None), record)
        hook_other_wrappers(model, self._state.batches)
        self._hook()

    def _hook(self) -> None:
        """Hook what all adapters need on the base model, unless an earlier adapter has done it."""
        if not self._state.hooks:
            self._state.hooks += hold_batch_norms(self.model)
            self._state.hooks += hook_loss(self.model, self._state)

    def _train_what_peft_leaves(self, plan: Plan, adapter_name: str) -> None:
        """Train or freeze the heads of which PEFT does not know, and train the tokens of an adapter
        that is added anew.
        """
        config = self._own_adapters[adapter_name]
        trains = adapter_name in self.active_adapters and not config.inference_mode
        names_of_peft = tuple(config.modules_to_save or ())
        for name in plan.heads:
            if not name.endswith(names_of_peft):
                head: Any = self.model.get_submodule(name)
                head.modules_to_save[adapter_name].requires_grad_(trains)
        if trains and config.trainable_token_indices:
            for module in self.model.modules():
                if isinstance(module, TrainableTokensWrapper):
                    module.set_adapter(adapter_name)

    def add_parts(self, plan: Plan, adapter_name: str, places: Iterable[str]) -> None:
        """Add what an adapter has at some places of its plan. The other weights train as before."""
        self._plan = plan
        training = [(weight, weight.requires_grad) for weight in self.model.parameters()]
        for key in places:
            self._create_and_replace(plan.config, adapter_name, *self._locate(key), key)
        # `set_adapter` of a layer also changes which weights train.
        for weight, requires_grad in training:
            weight.requires_grad_(requires_grad)

    def _locate(self, key: str) -> tuple[nn.Module, str, nn.Module]:
        """Return a module by its full name, its name in the parent, and the parent."""
        parent_name, _, name = key.rpartition(".")
        parent = self.model.get_submodule(parent_name)
        return parent.get_submodule(name), name, parent

    def _delete_earlier(self, adapter_name: str) -> None:
        """Delete an adapter that is added anew: its norms, head and tokens would be used again."""
        for module in list(self.model.modules()):
            if isinstance(module, HoulsbyTunerLayer):
                module.set_adapter([])  # otherwise PEFT would warn that another one gets active
                module.delete_adapter(adapter_name)
            elif isinstance(module, AuxiliaryTrainingWrapper):
                module.delete_adapter(adapter_name, new_active_adapters=[])

    def train_adapter(self, adapter_name: str) -> None:
        """Set an adapter that goes on training to training mode, whatever the model's mode is.

        PEFT loads it so, and other methods' new layers are in this mode: they have dropout.
        """
        for _, part in parts_of(self.model, adapter_name):
            if isinstance(part, nn.Module):
                part.train()

    @contextmanager
    def adding(self, adapter_name: str) -> Iterator[None]:
        """Add or load an adapter whole: after any error inside, the model is as it was before."""
        try:
            yield
        except BaseException:
            if adapter_name in self.peft_config:  # what is inside may have taken it back
                self._take_back(adapter_name)
            raise

    def _take_back(self, adapter_name: str) -> None:
        """Remove the last added adapter, and undo all that it has changed."""
        super().delete_adapter(adapter_name)
        self._before.restore(self.model)
        if self._state.records:
            self._hook()
        if not self.peft_config:
            vars(self.model).pop("peft_config", None)

    def unload(self) -> nn.Module:
        """Restore the base model bit for bit, and return it."""
        for _, layer in wrapped_modules(self.model):
            if isinstance(layer, HoulsbyLayer) and layer.rungs is not None:
                layer.rungs.release()
        self._state.unhook()
        base: nn.Module = super().unload()
        return base

    def _prepare_adapter_config(  # type: ignore[override]
        self, peft_config: HoulsbyConfig, model_config: dict[str, Any]
    ) -> HoulsbyConfig:
        return peft_config

    def _check_target_module_exists(  # type: ignore[override]
        self, peft_config: HoulsbyConfig, key: str
    ) -> Any:
        if self._plan.config is not peft_config:
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
            layer = plan.new_layer(target, place, self._state)
        if isinstance(layer, HoulsbyLayerNorm):
            layer.update_layer(adapter_name)
        elif isinstance(layer, HoulsbyLayer) and plan.owners[current_key] == current_key:
            layer.update_layer(adapter_name, plan.new_bottleneck(place))
        elif isinstance(layer, HoulsbyLayer):
            owner: Any = self.model.get_submodule(plan.owners[current_key])
            layer.share_layer(adapter_name, owner)
        if isinstance(layer, HoulsbyLayer) and place.is_ladder:
            self._connect_rungs(layer, place)
        elif isinstance(layer, HoulsbyLayer) and place.entry is not None and layer.skip is None:
            self._connect(layer, place)
        layer.set_adapter(self.active_adapters, inference_mode=peft_config.inference_mode)
        if layer is not target:
            self._replace_module(parent, target_name, layer, target)

    def _connect(self, layer: HoulsbyLayer, place: Place) -> None:
        """Let the bottlenecks of a layer read the residual input, and the norm after the sum."""
        parent, _, norm = (place.norm or "").rpartition(".")
        module = self.model.get_submodule(parent) if norm else None
        layer.skip = SkipConnection(self._state, module, norm)
        self._wrap_entry(str(place.entry)).residual_users.append(layer)

    def _connect_rungs(self, layer: HoulsbyLayer, place: Place) -> None:
        """Let the ladders of a layer read what enters the layers of the encoder, and its mask."""
        if layer.rungs is None:
            first_layer = self.model.get_submodule(full_name(place.stack, 0))
            layer.rungs = Rungs(self._plan.encoder_around(place), first_layer, layer)
        for index, key in place.rungs.items():
            entry = self._wrap_entry(key)
            entry.rung = index
            if layer not in entry.residual_users:
                entry.residual_users.append(layer)

    def _wrap_entry(self, key: str) -> HoulsbyTunerLayer:
        """Return the tuner layer around a module whose input is read; a new one if it has none."""
        entry, name, parent = self._locate(key)
        if isinstance(entry, HoulsbyTunerLayer):
            return entry
        if is_norm(entry):
            wrapper: HoulsbyTunerLayer = HoulsbyLayerNorm(entry, self._state)
        else:
            wrapper = HoulsbyLayer(entry, state=self._state)
        wrapper.set_adapter(self.active_adapters)
        self._replace_module(parent, name, wrapper, entry)
        return wrapper

    def _replace_module(
        self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module
    ) -> None:
        # PEFT's own version looks for weights in the wrapped module, which a dropout does not have.
        setattr(parent, child_name, new_module)

    def _check_merge_allowed(self) -> None:
        raise ValueError(
            "Houlsby adapters cannot be merged into the base weights, because the bottleneck is "
            "non-linear. Keep the adapter loaded (it adds a few percent to the base model's time), "
            "or call unload() to restore the base model."
        )

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Cast an adapter to float32 or, if that is not wanted, to the base model's dtype."""
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        for module in self.model.modules():
            if isinstance(module, HoulsbyHead):
                module.cast_adapter(adapter_name, autocast_adapter_dtype)
            elif isinstance(module, HoulsbyTunerLayer) and not autocast_adapter_dtype:
                module.cast_to_base(adapter_name)

    @property
    def records(self) -> Mapping[str, AdapterRecord]:
        """What is recorded of each adapter, by the adapter's name."""
        return self._state.records

    def note(self, adapter_name: str, **facts: Any) -> None:
        """Record further facts of an adapter, by the fields of `AdapterRecord`."""
        self._state.note(adapter_name, **facts)

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
        names = {adapter_name} if isinstance(adapter_name, str) else set(adapter_name)
        if unknown := names - set(self.peft_config):
            raise ValueError(
                f"Active adapters must be among {', '.join(self.peft_config)}; got "
                f"{', '.join(sorted(unknown))}. Add or load the others first."
            )
        super().set_adapter(adapter_name, inference_mode=inference_mode)

    def check_same(self, adapter_name: str, config: HoulsbyConfig) -> dict[str, Any]:
        """Refuse to load a saved adapter over one whose options or labels differ.

        PEFT would load the weights alone, and compute and save them with the old options.

        Returns:
            What to note once the weights are loaded: the problem type, if nobody has stated one
            here and the training of the file has inferred it.
        """
        facts: dict[str, Any] = {}
        own = self._own_adapters[adapter_name]
        record = _renew_labels(self.model, own, adapter_name)
        in_file = config.saved.record if config.saved else AdapterRecord()
        differences = find_differences(own, record, config, in_file, SHAPE_OPTIONS)
        if in_file.id2label is not None and in_file.id2label != record.id2label:
            differences.append(f"id2label is {record.id2label} and {in_file.id2label}")
        is_stated = record.problem_type is not None and not record.is_problem_type_inferred
        if is_stated and in_file.problem_type not in (None, record.problem_type):
            differences.append(f"problem_type is {record.problem_type} and {in_file.problem_type}")
        elif in_file.problem_type is not None and not is_stated:
            facts = {"problem_type": in_file.problem_type, "is_problem_type_inferred": True}
        if differences:
            raise AdapterError(
                f"The model's adapter {adapter_name!r} and the saved one differ: {differences[0]}. "
                "This would stay, as PEFT would load the weights alone. Delete it first with "
                f"delete_adapter({adapter_name!r}), or load the saved one under another name."
            )
        return facts

    def unmerge_adapter(self) -> None:
        """Do nothing, because nothing can be merged."""

    def add_weighted_adapter(
        self,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        combination_type: str = "linear",
    ) -> None:
        """Add an adapter whose weights are a linear combination of other adapters' weights.

        The outputs are not combined, as they are not linear in the weights. Heads of different
        tasks do not combine well. The new adapter is not activated.

        Args:
            adapters: Names of adapters with equal options, places and sharing.
            weights: Their coefficients, which may be negative and need not sum to 1.
            adapter_name: Name of the new adapter.
            combination_type: "linear", the one that non-linear bottlenecks allow.

        Raises:
            ValueError: The name is taken, the numbers of names and coefficients differ, the
                adapters are not equal in this sense, or their combination is neither linear nor
                finite.
        """
        from .derive.combine import combine

        if combination_type != "linear":
            raise ValueError(f"combination_type must be 'linear'; got {combination_type!r}.")
        combine(self, adapters, weights, adapter_name)

    @classmethod
    def _get_adapter_state_dict(  # type: ignore[override]
        cls,
        model: nn.Module,
        config: HoulsbyConfig,
        adapter_name: str,
        state_dict: dict[str, torch.Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Return the weights to save, and give the configuration the record to save with them."""
        own = own_names(adapter_name)
        # With those of heads, which PEFT adds later.
        check_at_hand({key: weight for key, weight in state_dict.items() if own.search(key)})
        weights: dict[str, torch.Tensor] = super()._get_adapter_state_dict(
            model, config, adapter_name, state_dict, *args, **kwargs
        )
        # Not those of adapters beneath ladders.
        weights = {key: weight for key, weight in weights.items() if own.search(key)}
        record = _renew_labels(model, config, adapter_name)
        settings = config.saved.settings if config.saved else None
        config.saved = SavedState(record, settings)
        return weights

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return name_in_file(key, adapter_name)

    @classmethod
    def _remap_adapter_state_dict_for_load(  # type: ignore[override]
        cls,
        model: nn.Module,
        config: HoulsbyConfig,
        adapter_name: str,
        state_dict: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Name the weights of a file as in this model, and refuse those that do not fit."""
        own = own_names(adapter_name)
        expected = {key: value for key, value in model.state_dict().items() if own.search(key)}
        encoder = getattr(base_model_of(model), "base_model_prefix", "")
        weights = name_for_model(state_dict, expected, adapter_name, encoder)
        check_tensors(expected, weights, f"adapter {adapter_name!r}")
        return weights

    @property
    def _row_finder(self) -> RowFinder:
        """Finds the rows of mixed batches in the present modules of the model."""
        if self._rows is None:
            self._rows = RowFinder(self.model, self._state.batches)
        return self._rows

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base model.

        Most of PEFT's model classes name their inputs only here, not to the context below.
        """
        batch = batch_of(self._state.batches)
        if isinstance(batch, MixedBatch):
            batch.find_rows(self._row_finder, args, kwargs)
        return super().forward(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the base model.

        Raises:
            ValueError: Texts have several adapters each.
        """
        batch = batch_of(self._state.batches)
        if isinstance(batch, MixedBatch) and batch.fan_out is not None:
            batch.fan_out.refuse_generation()
        base: Any = self.model
        return base.generate(*args, **kwargs)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Run mixed batches. PEFT enters this context around every forward pass and generation."""
        names = kwargs.pop("adapter_names", None)
        if names is None:
            yield
            return
        # Those that a bank holds in slots have a record alone.
        adapters = {**self._own_adapters, **self.records}
        with run_mixed_batch(self._row_finder, names, adapters, args, kwargs):
            yield


def _renew_labels(model: nn.Module, config: HoulsbyConfig, adapter_name: str) -> AdapterRecord:
    """Return an adapter's record with the base model's labels as they are now, if it has no others:
    the user may have renamed them.
    """
    records = state_of(model).records
    record = records[adapter_name]
    if record.has_labels_of_base:
        base = base_model_of(model)
        facts = label_facts(config, getattr(base, "_orig_mod", base))  # of a compiled one
        facts["problem_type"] = facts["problem_type"] or record.problem_type
        record = records[adapter_name] = replace(record, **facts)
    return record


@contextmanager
def _without_rank_pattern(config: HoulsbyConfig) -> Iterator[None]:
    """Keep PEFT from matching patterns, for a mere warning: a stranger's may never finish."""
    patterns, config.rank_pattern = config.rank_pattern, {}
    try:
        yield
    finally:
        config.rank_pattern = patterns
