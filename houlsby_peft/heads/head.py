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
from ..modules import base_modules, cast, copy_of, device_of, dtype_of, is_inside
from ..tuner_layer import BASE, Batch, KeepsFrozen, batch_of
from .tasks import labels_of_base, task_kind_of_class


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
    detected = _detect_trained_modules(model, head, new, config, adapted)
    trained: list[str] = []
    # What was visited last and is trained or wrapped as a whole. Modules inside it follow it.
    outer: str | None = None
    for key, module in model.named_modules(remove_duplicate=False):
        if outer is not None and is_inside(key, outer):
            if outer in trained and key.endswith(suffixes):
                raise ValueError(
                    "modules_to_save must not match inside another match; "
                    f"{list(suffixes)} matches {key!r}, which is inside {outer!r}. "
                    "Give the whole name of the latter."
                )
        elif key in detected or key.endswith(suffixes):
            trained.append(key)
            outer = key
        elif isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            outer = key
    return trained


def _detect_trained_modules(
    model: nn.Module,
    head: Iterable[str],
    new: Iterable[str],
    config: HoulsbyConfig,
    adapted: Collection[str],
) -> list[str]:
    """Return the names of the modules that an adapter trains without being asked."""
    if config.loaded is not None:
        return config.loaded.record.heads
    new_head = [name for name in head if not _holds_any(name, adapted)]
    kind = task_kind_of_class(type(model).__name__)
    is_encoder = kind is not None and kind.pipeline == "feature-extraction"
    if new_head or is_encoder:
        return [*new_head, *new]
    # A module beside the layers of a language model may not contribute to its output.
    return []


def _holds_any(name: str, keys: Iterable[str]) -> bool:
    """Return whether one of these modules is a module, or inside it, by their names."""
    return any(is_inside(key, name) for key in keys)


def find_new_modules(model: nn.Module) -> list[str]:
    """Return the full names of the modules that the base checkpoint lacks: the task head and, if
    new, the pooler.

    Every method of fine-tuning has to train them.
    """
    head = find_head(model)
    if not head:
        return []
    in_encoder, _ = find_new(model, dict(base_modules(model)))
    return head + in_encoder


def find_head(model: nn.Module, adapted: Iterable[str] = ()) -> list[str]:
    """Return the names of the task head's modules, which the base checkpoint lacks.

    They are the children of a model for classification, question answering, multiple choice,
    segmentation or speech recognition that have parameters of their own and contain no layers:
    BERT's `classifier`, DistilBERT's `pre_classifier` and `classifier`, BART's
    `classification_head`. Other models have no such head. The names of adapted modules distinguish
    the encoder from the head.

    The new cross-attention in a model joined from a pretrained encoder and a pretrained decoder
    cannot be recognized: train it with `modules_to_save=["crossattention"]`.
    """
    if not _CLASSES_WITH_NEW_HEADS.search(type(model).__name__):
        return []
    encoders = {key.partition(".")[0] for key in adapted}
    encoders.add(getattr(model, "base_model_prefix", ""))
    # T5 for question answering keeps its embeddings beside the encoder and the decoder that use
    # them.
    pretrained: set[int] = set()
    candidates: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        if name in encoders:
            pretrained.update(map(id, child.parameters()))
        elif isinstance(child, nn.ModuleList):
            # A list is not called itself, so its elements are the modules to wrap.
            for index, element in child.named_children():
                candidates[f"{name}.{index}"] = element
        else:
            candidates[name] = child
    head = []
    for name, module in candidates.items():
        weights = set(map(id, module.parameters()))
        if weights and weights.isdisjoint(pretrained):
            head.append(name)
    return head


def find_new(
    model: nn.Module, modules: Mapping[str, nn.Module], adapted: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the names of the modules that the checkpoint lacks: beside the encoder's layers, and
    outside of the encoder.

    Those of the encoder must be trained and saved like a head: frozen, they would stay random, and
    be different when the adapter is loaded. transformers marks the weights that it has loaded.
    Without such marks, as in a model that was made from its configuration, no module counts as new.
    """
    if not any(map(_is_marked, model.parameters())):
        return [], []
    encoder = getattr(model, "base_model_prefix", "")
    if encoder not in modules:
        encoder = ""
    in_encoder, outside = [], []
    for name, module in modules.items():
        if not _is_new(module):
            continue
        if name.rpartition(".")[0] == encoder:
            if not _holds_any(name, adapted):
                in_encoder.append(name)
        elif encoder and not is_inside(name, encoder):
            outside.append(name)
    return in_encoder, outside


def _is_new(module: nn.Module) -> bool:
    """Return whether the checkpoint has had none of a module's weights."""
    weights = list(module.parameters())
    return bool(weights) and not any(map(_may_be_loaded, weights))


def _may_be_loaded(weight: torch.Tensor) -> bool:
    # Offloaded and quantized weights lose the mark.
    is_plain = type(weight.data) is torch.Tensor and weight.is_floating_point()
    return _is_marked(weight) or weight.is_meta or not is_plain or not weight.numel()


def _is_marked(weight: torch.Tensor) -> bool:
    """Return whether transformers has marked a weight as loaded."""
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
        """Apply the head that an adapter uses, in the dtype of its weights."""
        head = self.head(adapter_name)
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
    active_adapters: list[str],
    batches: Mapping[int, Batch],
) -> None:
    """Give an adapter its heads: by full name its own module, or None for a copy of the base
    model's.
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
            wrapper.set_adapter(active_adapters)
            setattr(model.get_submodule(parent), child_name, wrapper)
        if isinstance(wrapper, HoulsbyHead):
            wrapper.batches = batches
            if own_head is not None:
                # PEFT sets what trains for the active adapter's head, and leaves those of other
                # adapters as they are.
                own_head.requires_grad_(adapter_name in active_adapters)
                wrapper.modules_to_save[adapter_name] = own_head


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
    return any(isinstance(_head_of_base(child), TwoLayerHead) for child in model.children())


def _head_of_base(module: nn.Module) -> nn.Module:
    return module.original_module if isinstance(module, HoulsbyHead) else module


def put_two_layer_head(model: PreTrainedModel) -> None:
    """Replace the linear head of a model by a newly initialized `TwoLayerHead`.

    An adapter needs no such change of the base model: `HoulsbyConfig(two_layer_head=True)` gives it
    the head for itself. A model that already has a two-layer head is left unchanged.

    Raises:
        ValueError: The model's head is not one linear layer.
    """
    names = find_head(model)
    modules = [model.get_submodule(name) for name in names]
    if len(modules) == 1 and isinstance(modules[0], TwoLayerHead):
        return
    if len(modules) != 1 or not isinstance(modules[0], nn.Linear):
        heads = zip(names, modules, strict=True)
        shown = ", ".join(f"{name} ({type(module).__name__})" for name, module in heads)
        raise ValueError(
            "Only a head that is one linear layer can get a hidden layer; "
            f"{type(model).__name__} has {shown or 'no head'}. Keep its own head."
        )
    linear = modules[0]
    dropout: float | None = getattr(model.config, "classifier_dropout", None)
    if dropout is None:
        dropout = float(getattr(model.config, "hidden_dropout_prob", 0.0))
    head = TwoLayerHead(linear.in_features, linear.out_features, dropout)
    head.to(linear.weight.device, linear.weight.dtype)
    if not linear.weight.is_meta:
        head.apply(model._init_weights)
    setattr(model, names[0], head.train(linear.training))


def needs_two_layer_head(model: nn.Module, config: HoulsbyConfig) -> bool:
    """Return whether an adapter's head has a hidden layer.

    A saved one has it as recorded, a new one as the user or the base model has it.
    """
    if config.two_layer_head:
        return True
    if config.loaded is not None:
        return config.loaded.record.two_layer_head
    return has_two_layer_head(model)


def new_heads(
    model: nn.Module, config: HoulsbyConfig, names: Collection[str]
) -> dict[str, nn.Module | None]:
    """Return an adapter's heads by name: its own, newly initialized, or None for a copy of the base
    model's.

    An adapter has a head of its own where the shapes of its weights differ. This is the one way to
    give it one, for new and for loaded adapters. The base model is not changed.
    """
    copies: dict[str, nn.Module | None] = dict.fromkeys(names)
    labels_of_model = labels_of_base(getattr(model, "config", None))
    labels = config.id2label or labels_of_model
    if config.id2label is None and config.loaded is not None:
        labels = config.loaded.record.id2label or labels_of_model
    two_layer = needs_two_layer_head(model, config)
    is_as_base = len(labels) == len(labels_of_model) and two_layer == has_two_layer_head(model)
    # A saved adapter on an encoder, without its head, for features.
    is_headless = config.loaded is not None and not names
    if is_as_base or is_headless:
        return copies
    own_heads = {}
    if isinstance(model, PreTrainedModel) and names:
        own_heads = _new_own_heads(model, labels, two_layer, names)
    if not own_heads:
        raise ValueError(
            "HoulsbyConfig.id2label and two_layer_head give an adapter a head of its own, in a "
            f"task model of transformers; {type(model).__name__} has no head that is trained. "
            "Leave both out."
        )
    return copies | own_heads


def _new_own_heads(
    model: PreTrainedModel, labels: Mapping[int, str], two_layer: bool, names: Iterable[str]
) -> dict[str, nn.Module | None]:
    """Return those heads of these names that have other shapes with an adapter's labels."""
    config = copy.deepcopy(model.config)
    config.id2label = dict(labels)
    config.label2id = {name: number for number, name in labels.items()}
    with torch.device("meta"):
        blank = type(model)(config)
        if two_layer:
            put_two_layer_head(blank)
    heads: dict[str, nn.Module | None] = {}
    for name in names:
        head, head_of_base = blank.get_submodule(name), _head_of_base(model.get_submodule(name))
        if _shapes(head) != _shapes(head_of_base):
            head = head.to_empty(device=device_of(head_of_base) or "cpu")
            heads[name] = _initialized(head.to(dtype_of(head_of_base)), model)
            head.train(head_of_base.training)
    return heads


def _initialized(head: nn.Module, model: PreTrainedModel) -> nn.Module:
    for module in head.modules():
        # transformers does not initialize them.
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.reset_running_stats()
    return head.apply(model._init_weights)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in module.state_dict().items()}
