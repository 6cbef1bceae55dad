"""What adding an adapter changes in a model, to restore it if anything fails."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from .method.tuner_layer import HoulsbyTunerLayer
from .saved.record import AdapterRecord


_WRAPPERS = (HoulsbyTunerLayer, AuxiliaryTrainingWrapper)


def parts_of(model: nn.Module, adapter_name: str) -> list[tuple[Any, Any]]:
    """Return what an adapter has in a model's wrappers, each part with its mapping by name."""
    mappings: list[Any] = []
    for module in model.modules():
        if isinstance(module, _WRAPPERS):
            for attribute in (*module.adapter_layer_names, *module.other_param_names):
                mappings.append(attrgetter(attribute)(module))
    return [(mapping, mapping[adapter_name]) for mapping in mappings if adapter_name in mapping]


def take_modules(model: nn.Module, adapter_name: str) -> None:
    """Take an adapter's modules out of a model, where PEFT goes on knowing its name.

    PEFT needs an adapter in a model, also where all that predict are held in slots.
    """
    for module in model.modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            module.set_adapter([])
    for mapping, _ in parts_of(model, adapter_name):
        del mapping[adapter_name]


class Snapshot:
    """A model before an adapter is added: its wrappers, and which weights and adapters are active.

    An earlier adapter of the same name, which will be replaced, is kept with the one beneath it.
    """

    def __init__(
        self, model: nn.Module, adapter_name: str, records: dict[str, AdapterRecord]
    ) -> None:
        self._earlier: dict[str, list[tuple[Any, Any]]] = {}
        if adapter_name in records:
            record = records[adapter_name]
            self._earlier[record.beneath_name] = parts_of(model, record.beneath_name)
            self._earlier[adapter_name] = [(records, record), *parts_of(model, adapter_name)]
        self._trained = {weight for weight in model.parameters() if weight.requires_grad}
        # The active adapters of each wrapper.
        self._active: dict[nn.Module, list[str]] = {}
        for module in model.modules():
            if isinstance(module, _WRAPPERS):
                self._active[module] = list(module.active_adapters)

    def restore(self, model: nn.Module) -> None:
        """Take out the wrappers that are new, which hold no adapter, and undo all other changes."""
        self._take_out_wrappers(model)
        self._put_back_parts(model)
        self._activate()
        for weight in model.parameters():
            weight.requires_grad_(weight in self._trained)

    def _take_out_wrappers(self, model: nn.Module) -> None:
        for key, module in reversed(list(model.named_modules())):  # the inner ones first
            if not isinstance(module, _WRAPPERS) or module in self._active:
                continue
            parent, _, name = key.rpartition(".")
            is_layer = isinstance(module, HoulsbyTunerLayer)
            attribute = "base_layer" if is_layer else "original_module"
            setattr(model.get_submodule(parent), name, getattr(module, attribute))
        for wrapper in self._active:
            if isinstance(wrapper, HoulsbyTunerLayer):
                users = wrapper.residual_users
                wrapper.residual_users = [layer for layer in users if layer in self._active]

    def _put_back_parts(self, model: nn.Module) -> None:
        for name, parts in self._earlier.items():
            for mapping, part in parts:
                mapping[name] = part
        for module in model.modules():
            # Such a wrapper also has a set of names, without which it activates no adapter.
            if isinstance(module, ModulesToSaveWrapper):
                module._adapters.update(module.modules_to_save)

    def _activate(self) -> None:
        for wrapper, active in self._active.items():
            if list(wrapper.active_adapters) != active:  # type: ignore[arg-type]
                wrapper.set_adapter(active)  # type: ignore[operator]
