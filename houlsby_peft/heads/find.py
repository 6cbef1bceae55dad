"""Find the modules of a model that its base checkpoint lacks: the task head and, for some BERT models, the pooler."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Collection, Iterable, Mapping

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from ..config import HoulsbyConfig
from ..layer import base_modules, is_inside


logger = logging.getLogger(__name__)

# Classes of transformers whose head is new, because no pretraining task has it. The head of a language model is part
# of the checkpoint and stays frozen.
_CLASSES_WITH_NEW_HEADS = re.compile(
    r"For\w*(Classification|QuestionAnswering|MultipleChoice|Segmentation|XVector|CTC)"
)


def find_trained_modules(
    model: nn.Module, head: Iterable[str], new: Iterable[str], config: HoulsbyConfig, adapted: Collection[str]
) -> list[str]:
    """Return the full names of the modules that an adapter trains and saves as a whole.

    These are the modules that `config.modules_to_save` matches by PEFT's rule (the end of a module's name) and, unless
    it is an empty list, those that the base checkpoint lacks. For a saved adapter they are the recorded ones: one
    without a head, such as that of a language, leaves the head of the model to other adapters.
    """
    if config.modules_to_save == []:
        return []
    suffixes = tuple(config.modules_to_save or ())
    if config.is_loaded and config.record:
        names = config.record.heads
    else:
        head = [name for name in head if not any(is_inside(key, name) for key in adapted)]
        if head and (weights := [name for name, _ in model.named_parameters(recurse=False)]):
            warnings.warn(
                f"Only modules can be trained and saved beside an adapter; {', '.join(weights)} of "
                f"{type(model).__name__} keeps its initial values. For speech models, leave "
                "use_weighted_layer_sum=False.",
                stacklevel=1,
            )
        # Without a head, a module beside the layers may not contribute to the output.
        names = [*head, *(new if head else ())]
        if unexpected := [name for name in names if name not in head and not name.endswith(suffixes)]:
            logger.warning(
                "The base checkpoint has no weights for %s, which will be trained and saved with the adapter.",
                ", ".join(unexpected),
            )
    found: list[str] = []
    inside: tuple[str, ...] = ()
    for key, module in model.named_modules(remove_duplicate=False):
        if key.startswith(inside):
            continue
        if key in names or key.endswith(suffixes):
            found.append(key)
            inside += (f"{key}.",)
        elif isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            inside += (f"{key}.",)
    return found


def find_new_modules(model: nn.Module) -> list[str]:
    """Return the full names of the modules that the base checkpoint lacks: the task head and, if new, the pooler.

    Every method of fine-tuning has to train them.
    """
    head = find_head(model)
    return head + (find_new(model, dict(base_modules(model)))[0] if head else [])


def find_head(model: nn.Module, adapted: Iterable[str] = ()) -> list[str]:
    """Return the names of the task head's modules, which the base checkpoint lacks.

    They are the children of a model for classification, question answering, multiple choice, segmentation or speech
    recognition that have parameters of their own and contain no layers: BERT's `classifier`, DistilBERT's
    `pre_classifier` and `classifier`, BART's `classification_head`. Other models have no such head. The new
    cross-attention in a model joined from a pretrained encoder and a pretrained decoder cannot be recognized: train it
    with `modules_to_save=["crossattention"]`.

    Args:
        model: The base model.
        adapted: Names of modules in its layers, which distinguish the encoder from the head.
    """
    if not _CLASSES_WITH_NEW_HEADS.search(type(model).__name__):
        return []
    children = dict(model.named_children())
    encoders = {key.partition(".")[0] for key in adapted} | {getattr(model, "base_model_prefix", "")} & children.keys()
    # T5 for question answering keeps its embeddings beside the encoder and the decoder that use them.
    pretrained = {id(weight) for name in encoders for weight in model.get_submodule(name).parameters()}
    parts: dict[str, nn.Module] = {}
    for name, child in children.items():
        if name not in encoders:
            # A list is not called itself, so its elements are the modules to wrap.
            is_list = isinstance(child, nn.ModuleList)
            parts |= {f"{name}.{index}": each for index, each in child.named_children()} if is_list else {name: child}
    weights = {name: {id(weight) for weight in part.parameters()} for name, part in parts.items()}
    return [name for name, own in weights.items() if own and own.isdisjoint(pretrained)]


def find_new(
    model: nn.Module, modules: Mapping[str, nn.Module], adapted: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the names of the encoder's modules beside its layers, and of those outside of it, that are new.

    The checkpoint lacks them. Those of the encoder must be trained and saved like a head: frozen, they would stay
    random, and be different when the adapter is loaded. transformers marks the weights that it has loaded. Without
    such marks, as in a model that was made from its configuration, no module counts as new.

    Args:
        model: The base model.
        modules: Its modules by name.
        adapted: Names of modules in its layers.
    """
    if not any(map(_is_loaded, model.parameters())):
        return [], []
    encoder = getattr(model, "base_model_prefix", "")
    encoder = encoder if encoder in modules else ""
    new = [name for name, module in modules.items() if _is_new(module)]
    beside = [name for name in new if name.rpartition(".")[0] == encoder]
    outside = [name for name in new if encoder and not is_inside(name, encoder)]
    return [name for name in beside if not any(is_inside(key, name) for key in adapted)], outside


def _is_loaded(weight: torch.Tensor) -> bool:
    return getattr(weight, "_is_hf_initialized", False)


def _is_new(module: nn.Module) -> bool:
    """Return whether all weights of a module are known to be new. Offloaded and quantized ones lose the mark."""
    return any(True for _ in module.parameters()) and not any(
        _is_loaded(weight) or weight.is_meta or not weight.is_floating_point() or not weight.numel()
        or type(weight.data) is not torch.Tensor
        for weight in module.parameters()
    )  # fmt: skip
