"""Run a forward pass or a generation on rows of different adapters: check the request, and tell the layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from operator import attrgetter, is_
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from peft.utils import AuxiliaryTrainingWrapper, TrainableTokensWrapper
from torch import nn

from ..errors import AdapterError
from ..heads.wrapper import HoulsbyHead
from ..layer import Batch, HoulsbyTunerLayer
from .batch import BASE, MixedBatch, rows_of, wrong_length_message
from .rows import FoundLayouts, Trial, first_tensor


_version = attrgetter("_version")


class _StackedWeights:
    """Weights that a batch has stacked, and what they were then.

    Args:
        modules: The modules that hold them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        weights = [
            (module._parameters, key, weight)
            for module in modules
            for key, weight in module._parameters.items()
            if weight is not None
        ]
        self._holders = [holder for holder, _, _ in weights]
        self._keys = [key for _, key, _ in weights]
        self._weights = [weight for _, _, weight in weights]
        # Inference tensors do not count the writes in place.
        self._counted = [weight for weight in self._weights if not weight.is_inference()]
        self._state = self._read()

    def are_unchanged(self) -> bool:
        """Return whether the modules hold the same weights, and these the same values at the same address."""
        now = map(dict.get, self._holders, self._keys)
        return all(map(is_, now, self._weights)) and self._read() == self._state

    def _read(self) -> tuple[list[int], list[int]]:
        # Only C functions: 64 adapters have ten thousand weights, and a loop in Python would take twice the time.
        return list(map(torch.Tensor.data_ptr, self._weights)), list(map(_version, self._counted))


class _LastBatch:
    """The last mixed batch of a model, to be used again while the weights of its adapters stay the same.

    All weights are checked once per forward pass or generation: a check in each layer would cost more than the
    products there. The check notices weights that are replaced, moved or written in place. Like autograd, it does not
    notice a write through `.data`; a forward pass in training mode therefore drops the batch. There is no check if
    the model's owner has said that the weights stay the same.
    """

    def __init__(self, model: nn.Module) -> None:
        self._is_fixed = model in _FIXED
        # A model with many adapters has thousands of modules, so it is searched once.
        layers = [module for module in model.modules() if isinstance(module, HoulsbyTunerLayer)]
        self._containers = [getattr(layer, name) for layer in layers for name in layer.adapter_layer_names]
        # PyTorch's own modules say so if they expect the sequence in the first dimension.
        self.is_batch_first = all(getattr(module, "batch_first", True) for module in model.modules())
        self.layouts = FoundLayouts()
        # The batch and the weights that it has stacked, in one tuple, which threads replace as a whole.
        self._last: tuple[MixedBatch, _StackedWeights] = (MixedBatch(()), _StackedWeights(()))

    def reuse(self, names: Sequence[str]) -> MixedBatch:
        """Return the last batch if it has these names and unchanged weights, else a new one."""
        batch, stacked = self._last
        if batch.names == tuple(names) and (self._is_fixed or stacked.are_unchanged()):
            return batch
        if len(set(names)) == 1:  # which stacks nothing
            return MixedBatch(names)
        batch = MixedBatch(names, previous=batch)
        adapters = (
            container[name] for container in self._containers for name in dict.fromkeys(names) if name in container
        )
        modules = () if self._is_fixed else (module for adapter in adapters for module in adapter.modules())
        self._last = (batch, _StackedWeights(modules))
        return batch


# Kept beside the models, not in them, so that copies and files of a model do not carry stacked weights.
_LAST: WeakKeyDictionary[nn.Module, _LastBatch] = WeakKeyDictionary()
_FIXED: WeakSet[nn.Module] = WeakSet()
_HOOKED: WeakSet[nn.Module] = WeakSet()


def _last_batch(model: nn.Module) -> _LastBatch:
    return _LAST.get(model) or _LAST.setdefault(model, _LastBatch(model))


@contextmanager
def run_mixed_batch(
    model: nn.Module,
    names: Sequence[str],
    known: Collection[str],
    batches: dict[int, Batch],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Iterator[None]:
    """Within this context and thread, apply to each row its own adapter.

    Args:
        model: The base model with adapters.
        names: The adapter of each row, or "__base__".
        known: The adapters of the model.
        batches: The mixed batches that the model is running, by thread, which its layers read.
        args, kwargs: What the model is called with.

    Raises:
        ValueError: The model is in training mode, an adapter is unknown, or there is not one name per row.
        AdapterError: It is unknown which hidden states belong to which row.
    """
    if model.training:
        raise ValueError("Cannot pass `adapter_names` when the model is in training mode; call model.eval() first.")
    if unknown := sorted(set(names) - {BASE} - set(known)):
        raise ValueError(
            f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}. Loaded are {', '.join(known)}; rows "
            f"of the base model are named {BASE!r}."
        )
    last = _last_batch(model)
    if not last.is_batch_first and len(set(names)) > 1:
        raise AdapterError(
            "Mixed batches need hidden states whose first dimension is the rows of the batch; "
            f"{type(model).__name__} has the sequence there. Run the rows of each adapter separately, or build its "
            "modules with batch_first=True."
        )
    thread = get_ident()
    before = batches.get(thread)
    # A copy shares what was stacked. Its rows are this thread's.
    batches[thread] = copy(last.reuse(names))
    try:
        find_rows(model, batches, args, kwargs)
        yield
    finally:
        if before is None:
            del batches[thread]
        else:
            batches[thread] = before


def find_rows(model: nn.Module, batches: dict[int, Batch], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell this thread's mixed batch, if there is one, where the layers have its rows.

    Args:
        model: The base model with adapters.
        batches: The mixed batches that the model is running, by thread.
        args, kwargs: What the model or its `generate` is called with.

    Raises:
        ValueError: There is not one name per row.
    """
    batch = batches.get(get_ident())
    if not isinstance(batch, MixedBatch):
        return
    number = len(batch.names)
    inputs = first_tensor((*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *kwargs.values()))
    if inputs is not None and len(inputs) != number:
        raise ValueError(wrong_length_message(number, len(inputs)))
    if inputs is not None and batch.only_name is None:
        batch.rows = _last_batch(model).layouts.rows(model, batches, number, args, kwargs)


def forget_batches(model: nn.Module) -> None:
    """Drop the stacked weights of a model; called when adapters are added, deleted or trained."""
    _LAST.pop(model, None)


def fix_weights(model: nn.Module) -> None:
    """Say that no weight of an adapter changes while the model has it, so that no batch needs to check this."""
    _FIXED.add(model)
    forget_batches(model)


def hook_other_wrappers(model: nn.Module, batches: dict[int, Batch]) -> None:
    """Let the wrappers that PEFT has added itself, for trained tokens and other methods, follow mixed batches."""
    for module in model.modules():
        if not isinstance(module, AuxiliaryTrainingWrapper) or isinstance(module, HoulsbyHead) or module in _HOOKED:
            continue
        _HOOKED.add(module)
        if isinstance(module, TrainableTokensWrapper):
            module.__class__ = _TokensWrapper  # PEFT has made it
            module.register_forward_hook(partial(_embed_rows, batches=batches))
        else:
            module.register_forward_pre_hook(partial(_pass_names, batches=batches), with_kwargs=True)


class _TokensWrapper(TrainableTokensWrapper):
    """PEFT's wrapper with two differences.

    It neither loads nor saves an adapter without trained tokens beside one that has some. When an adapter is deleted,
    the tokens of the last active adapter that has some are used, or none. PEFT's wrapper activates those of any other
    adapter, and raises an error halfway if several adapters stay active.
    """

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        names = [name for name in new_active_adapters or [] if name != adapter_name and self._has_tokens(name)]
        if self.active_adapters != names[-1:]:
            self.set_adapter(names[-1:])
        active = self._active_adapter
        # Without other names, PEFT's version activates nothing: to activate tokens again would also let them train.
        super().delete_adapter(adapter_name, None)
        self._active_adapter = active

    def adapter_state_dict(  # type: ignore[override]
        self, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return super().adapter_state_dict(adapter_name, state_dict) if self._has_tokens(adapter_name) else {}

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        return super().adapter_state_dict_load_map(adapter_name) if self._has_tokens(adapter_name) else {}

    def _has_tokens(self, adapter_name: str) -> bool:
        return adapter_name in self.token_adapter.trainable_tokens_delta


def _embed_rows(
    module: TrainableTokensWrapper, args: Any, output: torch.Tensor, batches: dict[int, Batch]
) -> torch.Tensor:
    """Embed each row with its own adapter. PEFT's mixed batch wants all adapters to train tokens."""
    batch = batches.get(get_ident())
    if isinstance(batch, Trial):
        batch.record(module, args[0])
    if not isinstance(batch, MixedBatch) or module.disable_adapters:
        return output
    names = _names_of_rows(batch, module, args[0])
    result: torch.Tensor = module.original_module(*args)
    for name in module._get_available_adapters() & set(names):
        own = rows_of(name, names, result.device)
        result = result.index_copy(0, own, module.token_adapter.forward_adapters(args[0][own], [name]))
    return result


def _pass_names(module: nn.Module, args: Any, kwargs: dict[str, Any], batches: dict[int, Batch]) -> Any:
    batch = batches.get(get_ident())
    if isinstance(batch, Trial) and args:
        batch.record(module, args[0])
    if not isinstance(batch, MixedBatch):
        return args, kwargs
    # PEFT's wrappers want a name for each row of their input, which beam search has repeated.
    names = _names_of_rows(batch, module, args[0]) if args else batch.names
    return args, {**kwargs, "adapter_names": names}


def _names_of_rows(batch: MixedBatch, module: nn.Module, inputs: torch.Tensor) -> tuple[str, ...]:
    return batch.names_of_rows(module, inputs) if batch.only_name is None else (batch.only_name,) * len(inputs)
