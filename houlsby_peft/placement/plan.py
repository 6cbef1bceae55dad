"""`Plan`: what a configuration means in one model, found before the model is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

import torch
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer, _ExcludedModule
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from transformers.utils import logging

from ..config import HoulsbyConfig
from ..errors import AdapterError, shortened
from ..heads.finding import find_new, find_trained_modules
from ..heads.new_heads import needs_two_layer_head, new_heads
from ..heads.tasks import find_task_type, label_facts
from ..method.bottleneck import Bottleneck
from ..method.coupling import HoulsbyEmbedding, HoulsbyOutputEmbedding, InvertibleCoupling
from ..method.extensions import BOTTLENECKS
from ..method.ladder import Ladder
from ..method.layer import HoulsbyLayer, HoulsbyLayerNorm
from ..method.modules import (
    base_module,
    device_of,
    dtype_of,
    is_in_any,
    is_inside,
    layers_around,
    wrapped_modules,
)
from ..method.tuner_layer import BASE, HoulsbyTunerLayer, ModelState
from ..registration import PREFIX
from ..saved.fingerprint import compare_fingerprints, fingerprint, report_other_base
from ..saved.naming import FILE_PREFIX
from ..saved.record import AdapterRecord, Place, fold_places
from ..saved.weights import first_of
from .places import find_places, recorded_places
from .selection import is_included
from .view import View, output_width


logger = logging.get_logger(__name__)

# What the names in a compiled model begin with.
_COMPILED = "_orig_mod."
# The parts of names that adapters add to those of a model.
_NAMES_OF_WRAPPERS = (
    *("base_layer", "original_module", "modules_to_save"),
    *("houlsby_adapter", "houlsby_ladder", "houlsby_norm"),
)


class Plan:
    """What a configuration means in one model: places, owners of the bottlenecks, and heads.

    Making a plan changes neither the model nor the configuration.

    Attributes:
        view: The view of the model.
        places: All places by module name, in the model's order.
        bottlenecks: The places that get a bottleneck.
        couplings: The places of the invertible module and its inverse: the end of the embeddings,
            then the output embedding.
        widths: The width of the output at each bottleneck and coupling.
        owners: The name of the place that owns the bottleneck of each place. Shared or not, a
            bottleneck is registered only at its owner, the first place that uses it. The end of the
            embeddings owns the invertible module.
    """

    def __init__(self, model: nn.Module, config: HoulsbyConfig) -> None:
        self.view = View(model)
        self.config = config
        self.is_recorded = recorded_places(config) is not None
        self.places = find_places(self.view, config)
        self.bottlenecks = {key: place for key, place in self.places.items() if place.is_bottleneck}
        couplings = [place for place in self.places.values() if place.is_coupling]
        # In XLM-R, the output embedding precedes the embeddings, which own the invertible module.
        couplings.sort(key=lambda place: place.position)
        self.couplings = {place.key: place for place in couplings}
        self.widths: dict[str, int] = {}
        for key, place in {**self.bottlenecks, **self.couplings}.items():
            self.widths[key] = output_width(key, self.reference(place))
        self.owners = _find_owners(self.bottlenecks, self.widths, config.share_layers)
        if self.couplings:
            embeddings, *_ = self.couplings
            self.owners |= dict.fromkeys(self.couplings, embeddings)
        _check_places(model, self.places)

    @cached_property
    def base(self) -> dict[str, Any]:
        """The fingerprint of the base model.

        For a new adapter, it lacks the task head, and what the checkpoint lacks, such as an unused
        pooler. These have other weights each time that the model is loaded.
        """
        model, modules = self.view.model, self.view.modules
        without: list[str] = []
        if self.config.loaded is None:
            suffixes = tuple(self.config.modules_to_save or ())
            without += [name for name in modules if name.endswith(suffixes)]
            without += [*self.view.head, *chain(*self.lacking)]
        return fingerprint(model, modules.items(), without)

    @cached_property
    def lacking(self) -> tuple[list[str], list[str]]:
        """The modules that the base checkpoint lacks, in the encoder and outside of it."""
        return find_new(self.view.model, self.view.modules, self.bottlenecks)

    @cached_property
    def heads(self) -> dict[str, nn.Module | None]:
        """The modules that train as a whole.

        Each has the adapter's own module, or None for a copy of the base model's.
        """
        names = find_trained_modules(
            self.view.model, self.view.head, self.lacking[0], self.config, self.bottlenecks
        )
        self._check_apart(names)
        self._log_random(names)
        return new_heads(self.view.model, self.config, names)

    def leave_out_others(self, weights: Collection[str]) -> None:
        """Leave out the places of which an adapter's weights, by name, have none.

        A shared bottleneck has them at its owner alone.
        """
        named = set()
        for name in weights:
            key = name.rpartition(f".{PREFIX}")[0]
            named.add(key.removeprefix(FILE_PREFIX).removeprefix(_COMPILED))
        for key in list(self.places):
            if self.owners.get(key, key).removeprefix(_COMPILED) not in named:
                for by_key in (self.places, self.bottlenecks, self.couplings, self.widths):
                    by_key.pop(key, None)

    def reference(self, place: Place) -> nn.Module:
        """Return the module of the base model that determines width, device and dtype."""
        return self.view.modules[place.projection]

    def encoder_around(self, place: Place) -> nn.Module:
        """Return the innermost transformers model around a place."""
        around = [name for name in self.view.types if not name or is_inside(place.key, name)]
        return self.view.model.get_submodule(max(around, key=len))

    def match(self, key: str) -> bool | _ExcludedModule:
        """Return whether PEFT is to adapt a module, by its full name.

        Like PEFT, tell excluded modules from others.
        """
        if key in self.places:
            return key not in self.couplings
        # No pattern of a saved adapter is matched. PEFT only asks whether any module is excluded.
        is_excluded = self.config.exclude_modules and (
            self.is_recorded or not is_included(key, self.config)
        )
        return _ExcludedModule() if is_excluded else False

    def new_layer(self, target: nn.Module, place: Place, state: ModelState) -> HoulsbyTunerLayer:
        """Return a tuner layer that wraps a module, without any adapter yet."""
        if place.is_norm:
            return HoulsbyLayerNorm(target, state)
        base = base_module(target)
        channel_dim = -1
        if isinstance(base, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            # Channels come before the spatial dimensions.
            channel_dim -= len(base.kernel_size)
        return _class_of(place)(target, self.reference(place), state, channel_dim=channel_dim)  # type: ignore[call-arg]

    def new_bottleneck(self, place: Place) -> Bottleneck | InvertibleCoupling | Ladder:
        """Return a new bottleneck for its owner; an invertible module for the embeddings' end, and
        a ladder for the encoder's.

        It is on the base model's device and, unless that is quantized, in its dtype. It is on the
        meta device if that is the default device, as while PEFT adds an adapter to be loaded.
        """
        config, width, reference = self.config, self.widths[place.key], self.reference(place)
        bottleneck: Bottleneck | InvertibleCoupling | Ladder
        if place.is_coupling:
            bottleneck = InvertibleCoupling(config, width)
        elif place.is_ladder:
            bottleneck = Ladder(config, width, place.rungs, place.r)
        else:
            bottleneck = BOTTLENECKS[config.extension](config, width, place.r)
        bottleneck.train(reference.training)
        if any(parameter.is_meta for parameter in bottleneck.parameters()):
            return bottleneck
        return bottleneck.to(device=device_of(reference), dtype=dtype_of(reference))

    def check(self, adapter_name: str) -> None:
        """Refuse what the model cannot take, before it is changed. Report a saved adapter of
        another base model.

        Raises:
            ValueError: The model cannot have an adapter of this name.
            AdapterError: The file of a saved adapter lacks its head, or it is of another base model
                and `refuse_other_bases` applies.
        """
        if problem := self._find_problem_of_adapter_name(adapter_name):
            raise ValueError(
                "The name of an adapter must have no dots and be unique in the model; got "
                f"{adapter_name!r}, which {problem}. Give another adapter_name, such as "
                f"{'task_' + adapter_name.replace('.', '_')!r}."
            )
        self._check_heads_in_file()
        if self.is_recorded:
            self.report_other_base()

    def head(self, name: str) -> nn.Module:
        """Return a head as the adapter has it: its own, or the base model's."""
        head = self.heads[name] or self.view.model.get_submodule(name)
        return head.original_module if isinstance(head, AuxiliaryTrainingWrapper) else head

    def new_record(self) -> AdapterRecord:
        """Return the record of the adapter that this plan adds.

        A saved adapter keeps what its file says of it.
        """
        model, heads = self.view.model, self.heads
        facts: dict[str, Any] = {
            "places": fold_places(self.places.values(), self.view.encoder),
            "heads": list(heads),
            "two_layer_head": bool(heads) and needs_two_layer_head(model, self.config),
            "task_type": find_task_type(model, heads, self.view.modules),
        }
        saved = self.config.loaded
        if saved is None or not self.is_recorded:
            return AdapterRecord(base=self.base, **facts, **label_facts(self.config, model))
        record = saved.record
        facts["two_layer_head"] = self.config.two_layer_head or record.two_layer_head
        return replace(record, **facts)

    def report_other_base(self) -> None:
        """Report a saved adapter that was trained on another base model than this one."""
        recorded = self.config.loaded.record.base if self.config.loaded else None
        if differences := compare_fingerprints(recorded, self.base):
            model = self.view.model
            name = getattr(model, "name_or_path", None) or type(model).__name__
            report_other_base(self.config.base_model_name_or_path, name, differences)

    def _find_problem_of_adapter_name(self, adapter_name: str) -> str | None:
        """Return why the model cannot have an adapter of this name; None if it can."""
        if "." in adapter_name:
            return "has a dot"
        if adapter_name == BASE:
            return "means the base model in a mixed batch"
        # Where a layer keeps the modules of its adapters.
        if hasattr(nn.ModuleDict(), adapter_name):
            return "is an attribute of torch.nn.ModuleDict"
        # When PEFT saves another adapter, it leaves out the weights with this name in theirs.
        names = [FILE_PREFIX, *_NAMES_OF_WRAPPERS, *self.view.modules]
        for module in self.view.modules.values():
            names += dict(module.named_parameters(recurse=False))
        with torch.device("meta"):
            for places in (self.bottlenecks, self.couplings):
                for place in islice(places.values(), 1):
                    names += self.new_bottleneck(place).state_dict()
        if adapter_name in ".".join(names).split("."):
            return "is part of the names of the model's modules"
        for module in self.view.model.modules():
            # Trained tokens belong to the adapter that names them.
            is_own = isinstance(module, (HoulsbyTunerLayer, TrainableTokensLayer))
            if is_own or not isinstance(module, BaseTunerLayer):
                continue
            if adapter_name in module._get_available_adapters():
                return f"is the name of an adapter of another method, {type(module).__module__}"
        return None

    def _check_heads_in_file(self) -> None:
        """Refuse a saved adapter without the weights of its head.

        PEFT would fail after it has changed the model.
        """
        saved = self.config.loaded
        if saved is None or saved.shapes is None:
            return
        for head in self.heads:
            missing = []
            for name in self.head(head).state_dict():
                # The names before that of the head may be mapped while the file is loaded.
                suffix = f"{head.rpartition('.')[2]}.{name}"
                if not any(key.endswith(f".{suffix}") for key in saved.shapes):
                    missing.append(suffix)
            if missing:
                raise AdapterError(
                    "The weights of a saved adapter must include the head of its base model; its "
                    f"file lacks {first_of(missing)}. Load it on the base model that it was "
                    f"trained on, {shortened(str(self.config.base_model_name_or_path))!r}."
                )

    def _log_random(self, heads: Collection[str]) -> None:
        """Log which modules outside the encoder stay random, because only the adapter could save
        them.
        """
        if self.config.loaded is not None or self.config.modules_to_save == []:
            return
        saved = list(heads)
        if self.view.output_embedding is not None:
            # PEFT saves it where the vocabulary has been resized, which also makes it new.
            saved.append(self.view.output_embedding)
        random_modules: list[str] = []
        for name in self.lacking[1]:
            is_saved = is_in_any(name, saved) or is_in_any(name, random_modules)
            if not is_saved and is_included(name, self.config):
                random_modules.append(name)
        if random_modules:
            logger.warning_once(
                f"The base checkpoint has no weights for {', '.join(random_modules)} of "
                f"{type(self.view.model).__name__}. They stay random, because the adapter neither "
                "trains nor saves them: name them in modules_to_save."
            )

    def _check_apart(self, heads: Collection[str]) -> None:
        """Refuse that one adapter trains a module as a whole and another one adapts a part of it.

        A copy of the module would hold the other adapter's weights, and neither adapter could be
        saved.
        """
        overlaps: list[tuple[str, str]] = []
        for key, wrapper in wrapped_modules(self.view.model):
            if isinstance(wrapper, ModulesToSaveWrapper):
                overlaps += [(key, place) for place in self.places if is_inside(place, key)]
            else:
                overlaps += [(head, key) for head in heads if is_inside(key, head)]
        if overlaps:
            whole, part = overlaps[0]
            raise ValueError(
                "A module that one adapter trains as a whole cannot hold what another adapter of "
                f"the same model adapts; {whole!r} is trained as a whole, and {part!r} is adapted. "
                "Give both adapters the same modules_to_save, or add them to two models. unload() "
                "removes what deleted adapters leave."
            )


def _find_owners(
    places: Mapping[str, Place], widths: Mapping[str, int], share_layers: int
) -> dict[str, str]:
    """Return the owner of the bottleneck of each place; an owner maps to itself.

    Houlsby et al. 2019 give each position a separate bottleneck. Mohebbi and Rajaei 2020 share one
    within a layer, or across three consecutive layers of a stack ("3-shared"). Groups are counted
    from the stack's layer 0, whichever layers are adapted. Stacks (the encoder, the decoder) never
    share with each other, nor do positions of different width. Modules outside any list of layers
    count as one layer.
    """
    if share_layers == 0:
        return {key: key for key in places}
    owners = {}
    first_of_group: dict[tuple[str, int, int], str] = {}
    for key, place in places.items():
        group = place.stack, (place.layer or 0) // share_layers, widths[key]
        owners[key] = first_of_group.setdefault(group, key)
    return owners


def _class_of(place: Place) -> type[HoulsbyTunerLayer]:
    """Return the class of the tuner layer at a place."""
    couplings = {"embeddings": HoulsbyEmbedding, "output_embedding": HoulsbyOutputEmbedding}
    return HoulsbyLayerNorm if place.is_norm else couplings.get(place.position, HoulsbyLayer)


def _check_places(model: nn.Module, places: Mapping[str, Place]) -> None:
    """Refuse places that cannot be wrapped, with the reason and what to do instead.

    They would not be called, or only by one of their parents, or be saved under names that no other
    model has.
    """
    names: dict[nn.Module | None, list[str]] = {}
    for outer, parent in model.named_modules():
        for name, child in parent._modules.items():
            names.setdefault(child, []).append(f"{outer}.{name}".strip("."))
    for key, place in places.items():
        module = model.get_submodule(key)
        problem = _find_problem_around(model, place, places) or _find_problem_at(module, place)
        if problem is None and len(names[module]) > 1:
            alias, *_ = [name for name in names[module] if name != key]
            problem = (
                f"it is also {alias!r}, which would stay without the adapter. Leave it "
                f"out with exclude_modules={[key]}, or name modules inside it in target_modules."
            )
        if problem:
            raise ValueError(f"An adapter cannot wrap {key!r}: {problem}")


def _find_problem_around(model: nn.Module, place: Place, places: Mapping[str, Place]) -> str | None:
    """Return why a place cannot be inside the modules around it; None if it can."""
    outer, module = "", model
    for part in place.key.split("."):
        if isinstance(module, nn.MultiheadAttention):
            return (
                "nn.MultiheadAttention never calls its parts. Name the attention itself in "
                f"target_modules: {outer!r}."
            )
        is_fast = torch.backends.mha.get_fastpath_enabled()
        if isinstance(module, nn.TransformerEncoderLayer) and is_fast:
            return (
                "in evaluation, the fast path of nn.TransformerEncoderLayer does not call it. "
                "Switch it off in every process that uses the adapter: "
                "torch.backends.mha.set_fastpath_enabled(False)."
            )
        gets_bottleneck = outer in places and places[outer].is_bottleneck
        if place.is_bottleneck and (gets_bottleneck or isinstance(module, BaseTunerLayer)):
            return (
                f"it is inside {outer!r}, which has a bottleneck. Leave one of the two out of "
                "target_modules, or name it in exclude_modules."
            )
        outer, module = f"{outer}.{part}".strip("."), module.get_submodule(part)
    return None


def _find_problem_at(module: nn.Module, place: Place) -> str | None:
    """Return why the adapters at a place allow no further one; None if they do."""
    if isinstance(module, HoulsbyTunerLayer) and type(module) is not _class_of(place):
        return (
            f"it already is a {type(module).__name__} for another adapter, and a module holds "
            "either a bottleneck or a trained norm. Give both adapters the same target_modules "
            "there."
        )
    layers = list(layers_around(module))
    if layers and not any(isinstance(layer, HoulsbyTunerLayer) for layer in layers):
        return (
            f"it is a layer of another method, {type(module).__module__}, whose weights would be "
            "saved under names that no other model has. Add this adapter before that of the other "
            "method."
        )
    return None
