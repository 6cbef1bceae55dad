"""The task head: found in the model, trained and saved with the adapter, chosen per row in a mixed batch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from .adapter_rows import BASE, row_names, select_rows
from .base_modules import base_modules
from .offloading import copy_of, device_of, dtype_of


# Classes of transformers whose head is new, because no pretraining task has it. Heads of language models are part of
# the checkpoint and stay frozen.
_FRESH_HEAD = re.compile(r"For\w*(Classification|QuestionAnswering|MultipleChoice|Segmentation|XVector|CTC)")


def find_head(model: nn.Module, adapted: Iterable[str]) -> list[str]:
    """Names of the modules of a task model that its checkpoint does not have, and that must be trained.

    These are the children of a model for classification, question answering, multiple choice, segmentation or speech
    recognition that have parameters of their own and hold none of the adapted modules: BERT's `classifier`,
    DistilBERT's `pre_classifier` and `classifier`, BART's `classification_head`. Other models have no such head. What
    is new in a model joined from a pretrained encoder and a pretrained decoder, its cross-attention, cannot be told
    from the model: train it with `modules_to_save=["crossattention"]`.

    Args:
        model: the base model.
        adapted: names of the modules that get a bottleneck, which tell the encoder from the head.

    Raises:
        ValueError: a head has a name that PEFT would also find elsewhere in the model.
    """
    if not _FRESH_HEAD.search(type(model).__name__):
        return []
    children = dict(model.named_children())
    encoders = {key.partition(".")[0] for key in adapted} | {getattr(model, "base_model_prefix", "")} & children.keys()
    # T5 for question answering holds its embeddings beside the encoder and the decoder that use them.
    pretrained = {id(weight) for name in encoders for weight in model.get_submodule(name).parameters()}
    heads = [
        name
        for name, child in children.items()
        if name not in encoders
        and (own := {id(weight) for weight in child.parameters()})
        and own.isdisjoint(pretrained)
    ]
    _check_names(model, heads)
    weights = [name for name, _ in model.named_parameters(recurse=False)]
    if weights:
        warnings.warn(
            f"Only modules can be trained and saved beside an adapter; {', '.join(weights)} of {type(model).__name__} "
            "stays as it was initialized. For speech models, leave use_weighted_layer_sum=False.",
            stacklevel=1,
        )
    return heads


def _check_names(model: nn.Module, heads: list[str]) -> None:
    inside = tuple(f"{head}." for head in heads)
    others = [name for name, _ in base_modules(model) if not f"{name}.".startswith(inside)]
    for head in heads:
        other = next((name for name in others if name.endswith(head)), None)
        if other is not None:
            raise ValueError(
                "PEFT finds the modules to train by the end of their name, so no other name may end like that of a "
                f"head; in {type(model).__name__}, {other!r} ends like {head!r}. Use a class with another head, or "
                "modules_to_save=[] to train no head."
            )


class HoulsbyHead(ModulesToSaveWrapper):
    """A head with a trained copy per adapter.

    It differs from PEFT's `ModulesToSaveWrapper` in three ways: heads of several layers work in a mixed batch, of
    several active adapters the last one's head is used instead of an error, and `unload` gives the base model's head.
    """

    def update(self, adapter_name: str, tied_module: nn.Module | None = None, **kwargs: Any) -> None:
        if adapter_name not in self.modules_to_save and tied_module is None:
            self.modules_to_save[adapter_name] = copy_of(self.original_module)
        super().update(adapter_name, tied_module, **kwargs)

    def forward(self, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any) -> Any:
        if adapter_names is None or self.disable_adapters:
            return super().forward(*args, **kwargs)
        return self._mixed_forward(args, kwargs, adapter_names)

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

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str) -> None:
        """Called by PEFT after weights have taken the place of ones on the meta device, in the dtype of the file."""
        if adapter_name in self.modules_to_save:
            head = self.original_module
            self.modules_to_save[adapter_name].to(device=device_of(head), dtype=dtype_of(head))

    def _mixed_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], adapter_names: Sequence[str]) -> Any:
        # One head after the other, as heads may be any modules; this is once per forward, not once per layer.
        inputs = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        names = row_names(inputs, adapter_names)
        rows_of = {name: [row for row, other in enumerate(names) if other == name] for name in dict.fromkeys(names)}
        outputs = {}
        for name, rows in rows_of.items():
            known = name != BASE and name in self.modules_to_save
            head = self.modules_to_save[name] if known else self.original_module
            index = torch.tensor(rows, device=inputs.device)
            own_args, own_kwargs = select_rows((args, kwargs), index, len(names))
            outputs[name] = head(*own_args, **own_kwargs)
            if not isinstance(outputs[name], torch.Tensor) or outputs[name].shape[:1] != (len(rows),):
                raise TypeError(
                    "Mixed batching is only supported for modules that return one tensor with a row per example; "
                    f"{type(head).__name__} in modules_to_save does not. Run the rows of each adapter by themselves."
                )
        return _scatter(outputs, rows_of, len(names))


def wrap_heads(
    model: nn.Module, names: Iterable[str], adapter_name: str, active: list[str], inference_mode: bool
) -> None:
    """Wrap the heads of a model that are not wrapped yet.

    Args:
        model: the base model, changed in place.
        names: full names of its heads.
        adapter_name: the adapter that trains them.
        active: the active adapters.
        inference_mode: keep the copies frozen.
    """
    for name in names:
        head = model.get_submodule(name)
        if not isinstance(head, AuxiliaryTrainingWrapper):
            wrapper = HoulsbyHead(head, adapter_name)
            wrapper.set_adapter(active, inference_mode=inference_mode)
            parent, _, child_name = name.rpartition(".")
            setattr(model.get_submodule(parent), child_name, wrapper)


def _scatter(outputs: dict[str, torch.Tensor], rows_of: dict[str, list[int]], rows: int) -> torch.Tensor:
    """Put the heads' outputs back in the order of the rows.

    Heads with fewer labels than the widest are filled up with -inf, which no softmax or argmax ever chooses.
    """
    some = next(iter(outputs.values()))
    width = max(output.shape[-1] for output in outputs.values())
    result = some.new_full((rows, *some.shape[1:-1], width), float("-inf"))
    for name, output in outputs.items():
        result[torch.tensor(rows_of[name], device=some.device), ..., : output.shape[-1]] = output
    return result
