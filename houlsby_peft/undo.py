"""What adding an adapter changes in a model, to restore it if anything fails."""

from __future__ import annotations

from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from .tuner_layer import HoulsbyTunerLayer


_WRAPPERS = (HoulsbyTunerLayer, AuxiliaryTrainingWrapper)


class Snapshot:
    """A model's wrappers of modules, and which of its weights train."""

    def __init__(self, model: nn.Module) -> None:
        self._wrappers = {module for module in model.modules() if isinstance(module, _WRAPPERS)}
        self._trained = {weight for weight in model.parameters() if weight.requires_grad}

    def restore(self, model: nn.Module) -> None:
        """Take out the wrappers that are new, which hold no adapter, and freeze what was frozen."""
        for key, module in reversed(list(model.named_modules())):  # the inner ones first
            if not isinstance(module, _WRAPPERS) or module in self._wrappers:
                continue
            parent, _, name = key.rpartition(".")
            attribute = "base_layer" if isinstance(module, HoulsbyTunerLayer) else "original_module"
            setattr(model.get_submodule(parent), name, getattr(module, attribute))
        for weight in model.parameters():
            weight.requires_grad_(weight in self._trained)
