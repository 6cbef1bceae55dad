"""`Plan`: what a configuration means in one model, found before the model is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer, _ExcludedModule
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from ..bottleneck import Bottleneck
from ..checkpoints.fingerprint import compare_fingerprints, fingerprint, report_other_base
from ..config import HoulsbyConfig
from ..coupling import HoulsbyEmbedding, HoulsbyOutputEmbedding, InvertibleCoupling
from ..errors import AdapterError
from ..heads.head import find_new, find_trained_modules, needs_two_layer_head, new_heads
from ..heads.tasks import find_task_type, label_facts
from ..layer import HoulsbyLayer, HoulsbyLayerNorm, HoulsbyTunerLayer, ModelState
from ..modules import base_module, device_of, dtype_of, is_inside, layers_around, wrapped_modules
from ..record import AdapterRecord, Place, fold_places
from ..weights import FILE_PREFIX, first_of
from .inference import log_once
from .places import View, find_places, is_included, output_width, recorded_places


class Plan:
    """What a configuration means in one model: places, owners of the bottlenecks, and heads.

    Making a plan changes neither the model nor the configuration.

    Attributes:
        view: The view of the model.
        places: All places by module name, in the model's order.
        bottlenecks: Those that get a bottleneck.
        ends: Those of the invertible module and its inverse: the end of the embeddings, then the output embedding.
        widths: The width of the output at each bottleneck and end.
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
        # The owner comes first: in XLM-R, the output embedding precedes the encoder.
        ends = sorted(
            (place for place in self.places.values() if place.is_coupling),
            key=lambda place: place.position,
        )
        self.couplings = {place.key: place for place in ends}
        self.widths = {
            key: output_width(key, self.reference(place))
            for key, place in {**self.bottlenecks, **self.couplings}.items()
        }
        self.owners = _find_owners(self.bottlenecks, self.widths, config.share_layers)
        self.owners |= dict.fromkeys(self.couplings, next(iter(self.couplings), ""))
        if problem := next(_find_problems(model, self.places), None):
            raise ValueError(f"An adapter cannot wrap {problem}")

    @cached_property
    def base(self) -> dict[str, Any]:
        """The fingerprint of the base model.

        For a new adapter, it lacks the task head, and what the checkpoint lacks, such as an unused
        pooler: these are other ones each time that the model is loaded.
        """
        model, modules = self.view.model, self.view.modules
        without: list[str] = []
        if self.config.loaded is None:
            suffixes = tuple(self.config.modules_to_save or ())
            without += [name for name in modules if suffixes and name.endswith(suffixes)]
            without += [*self.view.head, *chain(*self.new)]
        return fingerprint(model, modules.items(), without)

    @cached_property
    def new(self) -> tuple[list[str], list[str]]:
        """The modules that the base checkpoint lacks, in the encoder and outside of it; see
        `find_new`.
        """
        return find_new(self.view.model, self.view.modules, self.bottlenecks)

    @cached_property
    def heads(self) -> dict[str, nn.Module | None]:
        """The modules that train as a whole, each with the adapter's own module or None for a copy
        of the base's.
        """
        names = find_trained_modules(
            self.view.model, self.view.head, self.new[0], self.config, self.bottlenecks
        )
        self._check_apart(names)
        if self.config.loaded is None and self.config.modules_to_save != []:
            # Output embeddings are also new where the vocabulary has been resized, and PEFT saves
            # those.
            known = [*names, *filter(None, [self.view.output_embedding])]
            left = [
                name
                for name in self.new[1]
                if not any(is_inside(name, other) for other in known)
                and is_included(name, self.config)
            ]
            if outermost := [name for name in left if name.rpartition(".")[0] not in left]:
                log_once(
                    f"The base checkpoint has no weights for {', '.join(outermost)} of "
                    f"{type(self.view.model).__name__}. They stay random, because the adapter neither trains nor "
                    "saves them: name them in modules_to_save."
                )
        return new_heads(self.view.model, self.config, names)

    def reference(self, place: Place) -> nn.Module:
        """Return the module of the base model that determines width, device and dtype."""
        return self.view.modules[place.projection]

    def match(self, key: str) -> bool | _ExcludedModule:
        """Return whether PEFT is to adapt a module, by its full name, and whether it is excluded,
        as PEFT tells it.
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
        # Convolutions have their channels before their spatial dimensions.
        spatial = (
            len(base.kernel_size) if isinstance(base, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) else 0
        )
        return _class_of(place)(target, self.reference(place), state, channel_dim=-1 - spatial)  # type: ignore[call-arg]

    def new_bottleneck(self, place: Place) -> Bottleneck | InvertibleCoupling:
        """Return a new bottleneck for its owner, on the base model's device and, unless quantized,
        in its dtype.

        For the end of the embeddings, it is an invertible module. It is on the meta device if that
        is the default device, as it is while PEFT adds an adapter to be loaded.
        """
        config, width, reference = self.config, self.widths[place.key], self.reference(place)
        bottleneck: Bottleneck | InvertibleCoupling
        if place.is_coupling:
            bottleneck = InvertibleCoupling.from_config(config, width)
        else:
            bottleneck = Bottleneck.from_config(config, width, place.r or config.r)
        bottleneck.train(reference.training)
        if any(parameter.is_meta for parameter in bottleneck.parameters()):
            return bottleneck
        return bottleneck.to(device=device_of(reference), dtype=dtype_of(reference))

    def check(self, adapter_name: str) -> None:
        """Refuse what the model cannot take, before it is changed: a name, or weights without a
        head.
        """
        with torch.device("meta"):
            first = [
                next(iter(places.values()))
                for places in (self.bottlenecks, self.couplings)
                if places
            ]
            owned = [self.new_bottleneck(place) for place in first]
        names = [name for module in owned for name in module.state_dict()]
        names += [
            name
            for base in self.view.modules.values()
            for name, _ in base.named_parameters(recurse=False)
        ]
        names += [*self.view.modules, FILE_PREFIX]
        names.append("base_layer.original_module.modules_to_save.houlsby_adapter.houlsby_norm")
        problem = None
        if adapter_name in {part for name in names for part in name.split(".")}:
            # PEFT leaves out the weights whose names have such a part when it saves another
            # adapter.
            problem = "part of the names of the model's modules"
        for module in self.view.model.modules():
            # Trained tokens belong to the adapter that names them.
            is_other = isinstance(module, BaseTunerLayer) and not isinstance(
                module, (HoulsbyTunerLayer, TrainableTokensLayer)
            )
            if is_other and adapter_name in module._get_available_adapters():  # type: ignore[operator]
                problem = f"that of an adapter of another method, {type(module).__module__}"
        if problem:
            raise ValueError(
                f"The name of an adapter must be unique in the model; {adapter_name!r} is {problem}. Give another "
                f"adapter_name, such as {'task_' + adapter_name!r}."
            )
        saved = self.config.loaded.shapes if self.config.loaded else None
        if saved is None:
            return
        for head in self.heads:
            # The names before that of the head may be mapped while the file is loaded.
            ends = [f".{head.rpartition('.')[2]}.{name}" for name in self.head(head).state_dict()]
            missing = [end[1:] for end in ends if not any(name.endswith(end) for name in saved)]
            if missing:
                # PEFT would fail after it has changed the model.
                raise AdapterError(
                    f"The weights of a saved adapter must include its head; its file lacks {first_of(missing)}."
                )

    def head(self, name: str) -> nn.Module:
        """Return a head as the adapter has it: its own, or the base model's."""
        head = self.heads[name] or self.view.model.get_submodule(name)
        return head.original_module if isinstance(head, AuxiliaryTrainingWrapper) else head

    def new_record(self, adapter_name: str = "default") -> AdapterRecord:
        """Return the record of the adapter that this plan adds; a saved one keeps what its file
        says of it.

        A saved adapter of another base model is reported.
        """
        facts: dict[str, Any] = {
            "places": fold_places(self.places.values(), self.view.encoder),
            "heads": list(self.heads),
            "two_layer_head": bool(self.heads)
            and needs_two_layer_head(self.view.model, self.config),
            "task_type": find_task_type(self.view.model, self.heads, self.view.modules),
        }
        saved = self.config.loaded
        if saved is None or not self.is_recorded:
            return AdapterRecord(
                base=self.base, **facts, **label_facts(self.config, self.view.model)
            )
        record = saved.record
        if differences := compare_fingerprints(record.base, self.base):
            report_other_base(
                self.config.base_model_name_or_path, self.view.model, differences, adapter_name
            )
        facts["two_layer_head"] = self.config.two_layer_head or record.two_layer_head
        return replace(record, **facts)

    def _check_apart(self, heads: Collection[str]) -> None:
        """Refuse to train as a whole what holds a place of another adapter, or the other way round.

        A copy of the module would hold the other adapter's weights, and neither adapter could be
        saved.
        """
        for key, wrapper in wrapped_modules(self.view.model):
            if isinstance(wrapper, ModulesToSaveWrapper):
                clash = next(((key, name) for name in self.places if is_inside(name, key)), None)
            else:
                clash = next(((name, key) for name in heads if is_inside(key, name)), None)
            if clash:
                raise ValueError(
                    "A module that one adapter trains as a whole cannot hold what another adapter of the same model "
                    f"adapts; {clash[0]!r} is trained as a whole, and {clash[1]!r} is adapted. Give both adapters the "
                    "same modules_to_save, or add them to two models. unload() removes what deleted adapters leave."
                )


def _find_owners(
    places: Mapping[str, Place], widths: Mapping[str, int], share_layers: int
) -> dict[str, str]:
    """Return the owner of the bottleneck of each place; an owner maps to itself.

    Houlsby et al. 2019 give each position a separate bottleneck. Mohebbi and Rajaei 2020 share one
    within a layer, or across three consecutive layers of a stack ("3-shared"), counted from the
    stack's layer 0 whichever layers are adapted. Stacks (the encoder, the decoder) never share with
    each other, nor do positions of different width. Modules outside any list of layers count as one
    layer.
    """
    if share_layers == 0:
        return {key: key for key in places}
    first_of_group: dict[tuple[str, int, int], str] = {}
    return {
        key: first_of_group.setdefault(
            (place.stack, (place.layer or 0) // share_layers, widths[key]), key
        )
        for key, place in places.items()
    }


def _class_of(place: Place) -> type[HoulsbyTunerLayer]:
    """Return the class of the tuner layer at a place."""
    ends = {"embeddings": HoulsbyEmbedding, "output_embedding": HoulsbyOutputEmbedding}
    return HoulsbyLayerNorm if place.is_norm else ends.get(place.position, HoulsbyLayer)


def _find_problems(model: nn.Module, places: Mapping[str, Place]) -> Iterator[str]:
    """Yield which modules cannot be wrapped, with the reason and what to do instead.

    They would not be called, or only by one of their parents, or be saved under names that no other
    model has.
    """
    holders: dict[nn.Module | None, list[str]] = {}
    for outer, parent in model.named_modules():
        for name, child in parent._modules.items():
            holders.setdefault(child, []).append(f"{outer}.{name}".strip("."))
    for key, place in places.items():
        outer, module = "", model
        for part in key.split("."):
            if isinstance(module, nn.MultiheadAttention):
                yield (
                    f"{key!r}: nn.MultiheadAttention never calls its parts. Name the attention itself in "
                    f"target_modules: {outer!r}."
                )
            if (
                isinstance(module, nn.TransformerEncoderLayer)
                and torch.backends.mha.get_fastpath_enabled()
            ):
                yield (
                    f"{key!r}: in evaluation, the fast path of nn.TransformerEncoderLayer does not call it. Switch it "
                    "off in every process that uses the adapter: torch.backends.mha.set_fastpath_enabled(False)."
                )
            is_wrapped = isinstance(module, BaseTunerLayer) or (
                outer in places and places[outer].is_bottleneck
            )
            if place.is_bottleneck and is_wrapped:
                yield (
                    f"{key!r}: it is inside {outer!r}, which has a bottleneck. Leave one of the two out of "
                    "target_modules, or name it in exclude_modules."
                )
            outer, module = f"{outer}.{part}".strip("."), module.get_submodule(part)
        if isinstance(module, HoulsbyTunerLayer) and type(module) is not _class_of(place):
            yield (
                f"{key!r}: it already is a {type(module).__name__} for another adapter, and a module holds either a "
                "bottleneck or a trained norm. Give both adapters the same target_modules there."
            )
        if (around := [*layers_around(module)]) and not any(
            isinstance(layer, HoulsbyTunerLayer) for layer in around
        ):
            yield (
                f"{key!r}: it is a layer of another method, {type(module).__module__}, whose weights would be saved "
                "under names that no other model has. Add this adapter before that of the other method."
            )
        if len(names := holders[module]) > 1:
            yield (
                f"{names[0]!r}: it is also {names[1]!r}, which would stay without the adapter. Leave it out with "
                f"exclude_modules={names[:1]}, or name modules inside it in target_modules."
            )
