"""An adapter's heads: found where the base checkpoint lacks them, held one per adapter, and made
where they differ.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from ..config import HoulsbyConfig
from ..layer import BASE, Batch, KeepsFrozen, batch_of
from ..modules import base_modules, cast, copy_of, device_of, dtype_of, is_inside
from .tasks import labels_of_base


# Classes of transformers whose head is new, because no pretraining task has it. The head of a
# language model is part of the checkpoint and stays frozen.
_CLASSES_WITH_NEW_HEADS = re.compile(
    r"For\w*(Classification|QuestionAnswering|MultipleChoice|Segmentation|XVector|CTC)"
)


def find_trained_modules(
    model: nn.Module,
    head: Iterable[str],
    new: Iterable[str],
    config: HoulsbyConfig,
    adapted: Collection[str],
) -> list[str]:
    """Return the full names of the modules that an adapter trains and saves as a whole.

    These are the modules that `config.modules_to_save` matches by PEFT's rule (the end of a
    module's name) and, unless it is an empty list, those that the base checkpoint lacks. For a
    saved adapter they are the recorded ones: one without a head, such as that of a language, leaves
    the head of the model to other adapters.
    """
    if config.modules_to_save == []:
        return []
    suffixes = tuple(config.modules_to_save or ())
    if config.loaded is not None:
        names = config.loaded.record.heads
    else:
        head = [name for name in head if not any(is_inside(key, name) for key in adapted)]
        # Without a head, a module beside the layers may not contribute to the output.
        names = [*head, *(new if head else ())]
    found: list[str] = []
    inside: tuple[str, ...] = ()
    for key, module in model.named_modules(remove_duplicate=False):
        if key.startswith(inside):
            if key.endswith(suffixes) and key.startswith(tuple(f"{name}." for name in found)):
                rule = f"modules_to_save must not match inside another match; {list(suffixes)} matches {key!r}, which"
                raise ValueError(
                    f"{rule} is inside {found[-1]!r}. Give the whole name of the latter."
                )
            continue
        if key in names or key.endswith(suffixes):
            found.append(key)
            inside += (f"{key}.",)
        elif isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            inside += (f"{key}.",)
    return found


def find_new_modules(model: nn.Module) -> list[str]:
    """Return the full names of the modules that the base checkpoint lacks: the task head and, if
        new, the pooler.

    Every method of fine-tuning has to train them.
    """
    head = find_head(model)
    return head + (find_new(model, dict(base_modules(model)))[0] if head else [])


def find_head(model: nn.Module, adapted: Iterable[str] = ()) -> list[str]:
    """Return the names of the task head's modules, which the base checkpoint lacks.

    They are the children of a model for classification, question answering, multiple choice,
    segmentation or speech recognition that have parameters of their own and contain no layers:
    BERT's `classifier`, DistilBERT's `pre_classifier` and `classifier`, BART's
    `classification_head`. Other models have no such head. The new cross-attention in a model joined
    from a pretrained encoder and a pretrained decoder cannot be recognized: train it with
    `modules_to_save=["crossattention"]`. The names of modules in layers distinguish the encoder
    from the head.
    """
    if not _CLASSES_WITH_NEW_HEADS.search(type(model).__name__):
        return []
    children = dict(model.named_children())
    encoders = {key.partition(".")[0] for key in adapted} | {
        getattr(model, "base_model_prefix", "")
    } & children.keys()
    # T5 for question answering keeps its embeddings beside the encoder and the decoder that use
    # them.
    pretrained = {
        id(weight) for name in encoders for weight in model.get_submodule(name).parameters()
    }
    parts: dict[str, nn.Module] = {}
    for name, child in children.items():
        if name not in encoders:
            # A list is not called itself, so its elements are the modules to wrap.
            is_list = isinstance(child, nn.ModuleList)
            parts |= (
                {f"{name}.{index}": each for index, each in child.named_children()}
                if is_list
                else {name: child}
            )
    weights = {name: {id(weight) for weight in part.parameters()} for name, part in parts.items()}
    return [name for name, own in weights.items() if own and own.isdisjoint(pretrained)]


def find_new(
    model: nn.Module, modules: Mapping[str, nn.Module], adapted: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the names of the encoder's modules beside its layers, and of those outside of it, that
    are new.

    The checkpoint lacks them. Those of the encoder must be trained and saved like a head: frozen,
    they would stay random, and be different when the adapter is loaded. transformers marks the
    weights that it has loaded. Without such marks, as in a model that was made from its
    configuration, no module counts as new.
    """
    if not any(map(_is_loaded, model.parameters())):
        return [], []
    encoder = getattr(model, "base_model_prefix", "")
    encoder = encoder if encoder in modules else ""
    new = []
    for name, module in modules.items():
        weights = list(module.parameters())
        # Offloaded and quantized weights lose the mark.
        if weights and not any(
            _is_loaded(weight) or weight.is_meta or not weight.is_floating_point() or not weight.numel()
            or type(weight.data) is not torch.Tensor
            for weight in weights
        ):  # fmt: skip
            new.append(name)
    beside = [name for name in new if name.rpartition(".")[0] == encoder]
    outside = [name for name in new if encoder and not is_inside(name, encoder)]
    return [name for name in beside if not any(is_inside(key, name) for key in adapted)], outside


def _is_loaded(weight: torch.Tensor) -> bool:
    return getattr(weight, "_is_hf_initialized", False)


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
    is_last = False  # A loss reads what it returns. A GPU computes none of labels in float32 and other outputs.

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
        """Apply the head that an adapter uses, in the dtype of its weights."""
        head = self.head(adapter_name)
        own, of_base = dtype_of(head), dtype_of(self.original_module)
        if own is None or of_base is None or (own == of_base and not self.is_last):
            return head(*args, **kwargs)
        own_args, own_kwargs = cast((args, kwargs), own)
        result = head(*own_args, **own_kwargs)
        return result if self.is_last else cast(result, of_base)

    def _forward_wrapped(self, *args: Any, **kwargs: Any) -> Any:
        return self.run_adapter(next(iter(self.active_adapters), BASE), *args, **kwargs)

    def head(self, adapter_name: str) -> nn.Module:
        """Return the head that an adapter uses: its own copy or, without one, the base model's."""
        return (
            self.modules_to_save[adapter_name]
            if adapter_name in self.modules_to_save
            else self.original_module
        )

    def check_set_adapter(self, adapter_name: str | list[str]) -> str | None:
        names = [adapter_name] if isinstance(adapter_name, str) else adapter_name
        return next((name for name in reversed(names) if name in self.modules_to_save), None)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        self._paused = []
        name = self.check_set_adapter(adapter_names)
        super().set_adapter([] if name is None else name, inference_mode=inference_mode)

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        name = self.check_set_adapter(new_active_adapters or [])
        super().delete_adapter(adapter_name, [] if name is None else [name])

    def unload_and_optionally_merge_module(self, *args: Any, **kwargs: Any) -> nn.Module:
        return self.original_module  # type: ignore[no-any-return]

    def cast_adapter(self, adapter_name: str, autocast_adapter_dtype: bool) -> None:
        """Cast an adapter's head to the base model's dtype or, if that is half precision, to
        float32 if wanted.
        """
        dtype = dtype_of(self.original_module)
        if autocast_adapter_dtype and dtype in (torch.float16, torch.bfloat16):
            dtype = torch.float32
        if adapter_name in self.modules_to_save:
            self.modules_to_save[adapter_name].to(dtype)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str) -> None:
        """Move a head that PEFT has loaded in place of one on the meta device; its dtype is that of
        the file.
        """
        if adapter_name in self.modules_to_save:
            self.modules_to_save[adapter_name].to(device_of(self.original_module))


def add_heads(
    model: nn.Module,
    heads: Mapping[str, nn.Module | None],
    adapter_name: str,
    active_adapters: list[str],
    batches: Mapping[int, Batch],
) -> None:
    """Give an adapter its heads: by full name its own module, or None for a copy of the base
    model's.
    """
    for name, own in heads.items():
        wrapper = model.get_submodule(name)
        if isinstance(wrapper, AuxiliaryTrainingWrapper):
            wrapper.update(adapter_name)
        else:
            parent, _, child_name = name.rpartition(".")
            wrapper = HoulsbyHead(wrapper, adapter_name)
            wrapper.is_last = name in find_head(model)
            wrapper.set_adapter(active_adapters)
            setattr(model.get_submodule(parent), child_name, wrapper)
        if isinstance(wrapper, HoulsbyHead):
            wrapper.batches = batches
            if own is not None:
                # PEFT sets what trains for the active adapter's head, and leaves those of other
                # adapters as they are.
                wrapper.modules_to_save[adapter_name] = own.requires_grad_(
                    adapter_name in active_adapters
                )


class TwoLayerHead(nn.Module):
    """The head `out_proj(dropout(tanh(dense(x))))` of Mohebbi and Rajaei 2020, in place of one
    linear layer.

    Args:
        width: Size of the input and of the hidden layer.
        outputs: Number of classes, or 1 for a regression.
        dropout: Dropout probability after the hidden layer.
    """

    def __init__(self, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        # Not "classifier", the name of many heads: PEFT finds modules to save by the end of their
        # names.
        self.out_proj = nn.Linear(width, outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Transform `(batch, width)` to `(batch, outputs)`."""
        hidden: torch.Tensor = self.dense(inputs).tanh()
        return self.out_proj(self.dropout(hidden))  # type: ignore[no-any-return]


def has_two_layer_head(model: nn.Module) -> bool:
    """Return whether the head of a base model has been replaced by a `TwoLayerHead`."""
    heads = (
        child.original_module if isinstance(child, HoulsbyHead) else child
        for child in model.children()
    )
    return any(isinstance(head, TwoLayerHead) for head in heads)


def put_two_layer_head(model: PreTrainedModel) -> None:
    """Replace the linear head of a model by a newly initialized `TwoLayerHead`.

    An adapter needs no such change of the base model: `HoulsbyConfig(two_layer_head=True)` gives it
    the head for itself. A model that already has a two-layer head is left unchanged.

    Raises:
        ValueError: The model's head is not one linear layer.
    """
    heads = {name: model.get_submodule(name) for name in find_head(model)}
    name, old = next(iter(heads.items()), ("", None))
    if isinstance(old, TwoLayerHead):
        return
    if len(heads) != 1 or not isinstance(old, nn.Linear):
        found = ", ".join(f"{name} ({type(head).__name__})" for name, head in heads.items())
        raise ValueError(
            f"Only a head that is one linear layer can get a hidden layer; {type(model).__name__} has "
            f"{found or 'no head'}. Keep its own head."
        )
    own = getattr(model.config, "classifier_dropout", None)
    dropout = getattr(model.config, "hidden_dropout_prob", 0.0) if own is None else own
    head = TwoLayerHead(old.in_features, old.out_features, float(dropout)).to(
        old.weight.device, old.weight.dtype
    )
    if not old.weight.is_meta:
        head.apply(model._init_weights)
    setattr(model, name, head.train(old.training))


def needs_two_layer_head(model: nn.Module, config: HoulsbyConfig) -> bool:
    """Return whether an adapter's head has a hidden layer: a saved one as recorded, a new one also
    as the base's.
    """
    if config.two_layer_head or config.loaded is None:
        return config.two_layer_head or has_two_layer_head(model)
    return config.loaded.record.two_layer_head


def new_heads(
    model: nn.Module, config: HoulsbyConfig, names: Collection[str]
) -> dict[str, nn.Module | None]:
    """Return an adapter's heads by name: its own, newly initialized, or None for a copy of the base
    model's.

    An adapter has a head of its own where the shapes of its weights differ. This is the one way to
    give it one, for new and for loaded adapters. The base model is not changed.
    """
    heads: dict[str, nn.Module | None] = dict.fromkeys(names)
    known = getattr(model, "config", None)
    two_layer = needs_two_layer_head(model, config)
    of_file = config.loaded.record.id2label if config.loaded else None
    labels = config.id2label or of_file or labels_of_base(known)
    is_as_base = len(labels) == len(labels_of_base(known)) and two_layer == has_two_layer_head(
        model
    )
    if is_as_base or (
        not heads and config.loaded
    ):  # on an encoder without the head, for its features
        return heads
    if not isinstance(model, PreTrainedModel) or not heads:
        raise ValueError(
            "HoulsbyConfig.id2label and two_layer_head give an adapter a head of its own, in a task model of "
            f"transformers; {type(model).__name__} has no head that is trained. Leave both out."
        )
    blank_config = copy.deepcopy(model.config)
    blank_config.id2label = dict(labels)
    blank_config.label2id = {name: number for number, name in labels.items()}
    with torch.device("meta"):
        blank = type(model)(blank_config)
        if two_layer:
            put_two_layer_head(blank)
    for name in heads:
        wrapper = model.get_submodule(name)
        old = wrapper.original_module if isinstance(wrapper, HoulsbyHead) else wrapper
        new = blank.get_submodule(name)
        if _shapes(new) != _shapes(old):
            new = new.to_empty(device=device_of(old) or "cpu").to(dtype_of(old))
            for part in new.modules():
                if isinstance(
                    part, nn.modules.batchnorm._NormBase
                ):  # which transformers leaves as they are
                    part.reset_running_stats()
            heads[name] = new.apply(model._init_weights).train(old.training)
    return heads


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in module.state_dict().items()}
