"""`HoulsbyHead`: a head of the base model, and the trained head of each adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from ..method.modules import cast, copy_of, device_of, dtype_of
from ..method.tuner_layer import BASE, Batch, KeepsFrozen, ModelState, batch_of
from ..registration import LOADS_BY_PEFT
from .finding import find_head


class HoulsbyHead(KeepsFrozen, ModulesToSaveWrapper):
    """A head with a trained copy per adapter.

    It differs from PEFT's `ModulesToSaveWrapper` in five ways. Heads of several layers work in a
    mixed batch. Of several active adapters, the last one's head is used instead of raising an
    error. An adapter's head may have another number of outputs than the base model's. Like the rest
    of the adapter, its weights are float32 on a base model in half precision, and so are a task's
    outputs. `unload` restores the base model's head.
    """

    # The mixed batches that the model is running, by thread; see `HoulsbyTunerLayer`.
    batches: Mapping[int, Batch] = {}
    # Whether a loss reads the output. On a GPU, a loss of float32 labels needs float32 outputs.
    is_last = False

    def update(
        self, adapter_name: str, tied_module: nn.Module | None = None, **kwargs: Any
    ) -> None:
        if adapter_name not in self.modules_to_save and tied_module is None:
            self.modules_to_save[adapter_name] = copy_of(self.original_module)
        super().update(adapter_name, tied_module, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch = batch_of(self.batches)
        if batch is None or self.disable_adapters:
            return super().forward(*args, **kwargs)
        return batch.apply(self, args, kwargs)

    def run_adapter(self, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        """Apply the head that an adapter uses."""
        return self.run_head(self.head(adapter_name), *args, **kwargs)

    def run_head(self, head: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Apply a head in the dtype of its weights."""
        dtype, dtype_of_base = dtype_of(head), dtype_of(self.original_module)
        if dtype is None or dtype_of_base is None:
            return head(*args, **kwargs)
        if dtype == dtype_of_base and not self.is_last:
            return head(*args, **kwargs)
        cast_args, cast_kwargs = cast((args, kwargs), dtype)
        output = head(*cast_args, **cast_kwargs)
        return output if self.is_last else cast(output, dtype_of_base)

    def _forward_wrapped(self, *args: Any, **kwargs: Any) -> Any:
        name = self.active_adapters[0] if self.active_adapters else BASE
        return self.run_adapter(name, *args, **kwargs)

    def head(self, adapter_name: str) -> nn.Module:
        """Return the head that an adapter uses: its own copy or, without one, the base model's."""
        if adapter_name in self.modules_to_save:
            return self.modules_to_save[adapter_name]
        return self.original_module  # type: ignore[no-any-return]

    def check_set_adapter(self, adapter_name: str | list[str]) -> str | None:
        names = [adapter_name] if isinstance(adapter_name, str) else adapter_name
        for name in reversed(names):
            if name in self.modules_to_save:
                return name
        return None

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        self._paused = []
        name = self.check_set_adapter(adapter_names)
        super().set_adapter([] if name is None else name, inference_mode=inference_mode)

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        name = self.check_set_adapter(new_active_adapters or [])
        super().delete_adapter(adapter_name, [] if name is None else [name])
        # PEFT passes over heads that the deleted adapter has not trained.
        if name is not None and name not in self.active_adapters:
            self.set_adapter(name)

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        if LOADS_BY_PEFT.get():
            # `HoulsbyModel` translates these names as well: those of another class with the same
            # encoder are others, which PEFT would not find.
            return {}
        return super().adapter_state_dict_load_map(adapter_name)  # type: ignore[no-any-return]

    def unload_and_optionally_merge_module(self, *args: Any, **kwargs: Any) -> nn.Module:
        return self.original_module  # type: ignore[no-any-return]

    def cast_adapter(self, adapter_name: str, autocast_adapter_dtype: bool) -> None:
        """Cast an adapter's head to the base model's dtype, or from half precision to float32."""
        dtype = dtype_of(self.original_module)
        if autocast_adapter_dtype and dtype in (torch.float16, torch.bfloat16):
            dtype = torch.float32
        if adapter_name in self.modules_to_save:
            self.modules_to_save[adapter_name].to(dtype)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str) -> None:
        """Move a head that PEFT has loaded in place of one on the meta device.

        Its dtype is the file's.
        """
        if adapter_name in self.modules_to_save:
            self.modules_to_save[adapter_name].to(device_of(self.original_module))


def add_heads(
    model: nn.Module,
    heads: Mapping[str, nn.Module | None],
    adapter_name: str,
    is_active: bool,
    state: ModelState,
) -> None:
    """Give an adapter its heads: by full name its own module, or None for a copy of the base
    model's. The state of the model gets all heads.
    """
    for name, own_head in heads.items():
        wrapper = model.get_submodule(name)
        if isinstance(wrapper, AuxiliaryTrainingWrapper):
            if own_head is not None and not isinstance(wrapper, HoulsbyHead):
                raise ValueError(
                    f"An adapter cannot have a head of its own in place of {name!r}, which an "
                    "adapter of another method trains. Add the Houlsby adapter first."
                )
            wrapper.update(adapter_name)
        else:
            parent, _, child_name = name.rpartition(".")
            wrapper = HoulsbyHead(wrapper, adapter_name)
            wrapper.is_last = name in find_head(model)
            wrapper.set_adapter([adapter_name] if is_active else [])
            setattr(model.get_submodule(parent), child_name, wrapper)
        if isinstance(wrapper, HoulsbyHead):
            wrapper.batches = state.batches
            if own_head is not None:
                # PEFT sets what trains for the active adapter's head, and leaves those of other
                # adapters as they are.
                own_head.requires_grad_(is_active)
                wrapper.modules_to_save[adapter_name] = own_head
    state.heads = [module for module in model.modules() if isinstance(module, HoulsbyHead)]
