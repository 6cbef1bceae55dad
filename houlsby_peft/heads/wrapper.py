"""`HoulsbyHead`: a task head with a trained copy per adapter, selected per row in a mixed batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import get_ident
from typing import Any

from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from ..layer import BASE, Batch, cast
from ..offloading import adapter_dtype, copy_of, device_of, dtype_of


class HoulsbyHead(ModulesToSaveWrapper):
    """A head with a trained copy per adapter.

    It differs from PEFT's `ModulesToSaveWrapper` in five ways. Heads of several layers work in a mixed batch. Of
    several active adapters, the last one's head is used instead of raising an error. An adapter's head may have
    another number of outputs than the base model's. Like the rest of the adapter, its weights are float32 on a base
    model in half precision; what it returns has the base model's dtype. `unload` restores the base model's head.
    """

    # The mixed batches that the model is running, by thread; see `HoulsbyTunerLayer`.
    batches: Mapping[int, Batch] = {}

    def update(self, adapter_name: str, tied_module: nn.Module | None = None, **kwargs: Any) -> None:
        if adapter_name not in self.modules_to_save and tied_module is None:
            self.modules_to_save[adapter_name] = copy_of(self.original_module)
        super().update(adapter_name, tied_module, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch = self.batches.get(get_ident()) if self.batches else None
        if batch is None or self.disable_adapters:
            return super().forward(*args, **kwargs)
        return batch.run(self, args, kwargs)

    def run_adapter(self, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        """Apply the head that an adapter uses, in the dtype of its weights; the result has the base model's dtype."""
        head = self.head(adapter_name)
        own, of_base = dtype_of(head), dtype_of(self.original_module)
        if own is None or of_base is None or own == of_base:
            return head(*args, **kwargs)
        own_args, own_kwargs = cast((args, kwargs), own)
        return cast(head(*own_args, **own_kwargs), of_base)

    def _forward_wrapped(self, *args: Any, **kwargs: Any) -> Any:
        return self.run_adapter(next(iter(self.active_adapters), BASE), *args, **kwargs)

    def head(self, adapter_name: str) -> nn.Module:
        """Return the head that an adapter uses: its own copy or, without one, the base model's."""
        return self.modules_to_save[adapter_name] if adapter_name in self.modules_to_save else self.original_module

    def check_set_adapter(self, adapter_name: str | list[str]) -> str | None:
        names = [adapter_name] if isinstance(adapter_name, str) else adapter_name
        return next((name for name in reversed(names) if name in self.modules_to_save), None)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        name = self.check_set_adapter(adapter_names)
        super().set_adapter([] if name is None else name, inference_mode=inference_mode)

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        name = self.check_set_adapter(new_active_adapters or [])
        super().delete_adapter(adapter_name, [] if name is None else [name])

    def unload_and_optionally_merge_module(self, *args: Any, **kwargs: Any) -> nn.Module:
        return self.original_module  # type: ignore[no-any-return]

    def cast_adapter(self, adapter_name: str, autocast_adapter_dtype: bool) -> None:
        """Cast an adapter's head to the base model's dtype or, if that is half precision, to float32 if wanted."""
        dtype = dtype_of(self.original_module)
        if dtype is not None and adapter_name in self.modules_to_save:
            self.modules_to_save[adapter_name].to(adapter_dtype(dtype, autocast_adapter_dtype))

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str) -> None:
        """Move a head that PEFT has loaded in place of one on the meta device; its dtype is that of the file."""
        if adapter_name in self.modules_to_save:
            self.modules_to_save[adapter_name].to(device_of(self.original_module))


def add_heads(
    model: nn.Module,
    heads: Mapping[str, nn.Module | None],
    adapter_name: str,
    active_adapters: list[str],
    batches: Mapping[int, Batch],
) -> None:
    """Give an adapter its heads: by full name its own module, or None for a copy of the base model's."""
    for name, own in heads.items():
        wrapper = model.get_submodule(name)
        if isinstance(wrapper, AuxiliaryTrainingWrapper):
            wrapper.update(adapter_name)
        else:
            parent, _, child_name = name.rpartition(".")
            wrapper = HoulsbyHead(wrapper, adapter_name)
            wrapper.set_adapter(active_adapters)
            setattr(model.get_submodule(parent), child_name, wrapper)
        if isinstance(wrapper, HoulsbyHead):
            wrapper.batches = batches
            if own is not None:
                # PEFT sets what trains for the active adapter's head, and leaves those of other adapters as they are.
                wrapper.modules_to_save[adapter_name] = own.requires_grad_(adapter_name in active_adapters)


def train_heads(model: nn.Module, names: Iterable[str], adapter_name: str, is_trained: bool) -> None:
    """Let the heads of an adapter train, or freeze them. PEFT takes care of those that `modules_to_save` names."""
    for name in names:
        wrapper = model.get_submodule(name)
        assert isinstance(wrapper, ModulesToSaveWrapper)
        wrapper.modules_to_save[adapter_name].requires_grad_(is_trained)
