"""Which modules of a model an adapter trains as a whole: the head and what the checkpoint lacks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from ..config import HoulsbyConfig
from ..method.modules import base_modules, is_inside
from .tasks import task_kind_of_class


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
