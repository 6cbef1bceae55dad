"""`Form`: where the weights of a saved adapter go, for all adapters of the same form.

PEFT adds the first adapter of a form to the model, and checks it. A further one has files that
differ in values alone, so these are copied into a slot, without another look at the model.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from ..batching.slots import slots_for
from ..batching.stack import Stack, is_torch_norm, stacking_key
from ..heads.head import HoulsbyHead
from ..method.layer import HoulsbyLayer, HoulsbyLayerNorm
from ..method.tuner_layer import HoulsbyTunerLayer, state_of
from ..saved.adapter import SavedAdapter
from ..saved.naming import name_in_file, translate


class Form:
    """What the adapters of one form have in common in one model.

    Args:
        model: The model.
        name: The first adapter of the form, which PEFT has added.
        key: What stands for the form.
    """

    def __init__(self, model: PeftModel, name: str, key: Hashable) -> None:
        self.key = key
        self.model = model
        self.record = state_of(model).records[name]
        self._encoder = getattr(model.get_base_model(), "base_model_prefix", "")
        modules: dict[Any, Any] = {}
        # By the name in a file: the stack of a weight, and the weight's name there.
        self._places: dict[str, tuple[Stack, str]] = {}
        # By the name of a head: where it is, and the head of an adapter.
        self._heads: dict[str, tuple[HoulsbyHead, nn.Module]] = {}
        names_of_layers: dict[Any, str] = {}
        for module_name, module in model.named_modules():
            if isinstance(module, HoulsbyTunerLayer) and name in module._get_available_adapters():
                modules[module] = module.module_of(name)
                names_of_layers[module] = module_name
            elif isinstance(module, HoulsbyHead) and name in module.modules_to_save:
                self._heads[module_name] = module, module.modules_to_save[name]
        # Adapters that differ in their heads alone are of two forms, in the same slots.
        self.slots = slots_for(modules, state_of(model).slots)
        for layer, stack in self.slots.stacks.items():
            for attribute in layer.adapter_layer_names:
                if name in getattr(layer, attribute):  # not where the bottleneck is another one's
                    prefix = f"{names_of_layers[layer]}.{attribute}"
                    for weight in stack.weights:
                        saved_name = name_in_file(f"{prefix}.{name}.{weight}", name)
                        self._places[saved_name] = stack, weight
        self._names = list(self._places)
        for head_name, (_, head) in self._heads.items():
            self._names += [f"{head_name}.{part}" for part in head.state_dict()]

    def fits(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Return whether each weight of a file has its place, and each place its weight."""
        return translate(weights, self._names, self._encoder).keys() == set(self._names)

    def hold(self, name: str, saved: SavedAdapter, weights: Mapping[str, torch.Tensor]) -> None:
        """Hold an adapter of this form under a name that is new to the model."""
        weights = translate(weights, self._names, self._encoder)
        for head_name, (wrapper, head) in self._heads.items():
            own = copy.deepcopy(head)
            own.load_state_dict({part: weights[f"{head_name}.{part}"] for part in own.state_dict()})
            wrapper.modules_to_save[name] = own
        self.slots.put(name, [(*place, weights[key]) for key, place in self._places.items()])
        facts = ("places", "heads", "base", "two_layer_head", "task_type")
        common = {fact: getattr(self.record, fact) for fact in facts}
        state_of(self.model).records[name] = replace(saved.record, **common)

    def drop(self, name: str) -> None:
        """Let an adapter go, or what has been held of it."""
        self.slots.drop(name)
        for wrapper, _ in self._heads.values():
            if name in wrapper.modules_to_save:
                del wrapper.modules_to_save[name]
        state_of(self.model).records.pop(name, None)


def form_key(saved: SavedAdapter, weights: Mapping[str, torch.Tensor]) -> Hashable:
    """Return what adapters of one form have in common in their files.

    Everything that decides where the weights go, and whether the adapter fits the base model.
    """
    record, config = saved.record, saved.config
    shapes = [(name, weight.shape, weight.dtype) for name, weight in weights.items()]
    facts = (record.places, record.heads, record.base, record.two_layer_head, record.task_type)
    return (
        frozenset(shapes),
        repr(facts),
        len(record.id2label or ()),
        repr(config.shape_options()),
        config.loaded is None,
    )


def can_hold(model: PeftModel, name: str) -> bool:
    """Return whether an adapter of a model can be held in slots.

    It needs plain bottlenecks, norms and heads of its own, and nothing else, with weights of one
    dtype on one device.
    """
    kinds: set[tuple[Any, Any]] = set()
    wrappers: list[Any] = []
    for module in model.modules():
        if isinstance(module, (HoulsbyTunerLayer, AuxiliaryTrainingWrapper)):
            wrappers.append(module)
    for wrapper in wrappers:
        if name not in wrapper._get_available_adapters() or isinstance(wrapper, HoulsbyHead):
            continue
        if not _can_hold_part(wrapper, name):
            return False
        for weight in wrapper.module_of(name).parameters():
            kinds.add((weight.dtype, weight.device))
    return len(kinds) == 1


def _can_hold_part(layer: Any, name: str) -> bool:
    """Return whether slots can hold what an adapter has at a layer."""
    if isinstance(layer, HoulsbyLayerNorm):
        return is_torch_norm(layer.module_of(name))
    if type(layer) is not HoulsbyLayer or name in layer.houlsby_ladder:
        return False
    return stacking_key(layer.module_of(name)) is not None
