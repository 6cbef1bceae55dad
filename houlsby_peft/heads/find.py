"""Find the modules of a model that its base checkpoint lacks: the task head and, for some BERT models, the pooler."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from ..config import HoulsbyConfig
from ..layer import base_module, base_modules, is_inside


logger = logging.getLogger(__name__)

# Classes of transformers whose head is new, because no pretraining task has it. The head of a language model is part
# of the checkpoint and stays frozen.
_CLASSES_WITH_NEW_HEADS = re.compile(
    r"For\w*(Classification|QuestionAnswering|MultipleChoice|Segmentation|XVector|CTC)"
)


def find_trained_modules(model: nn.Module, config: HoulsbyConfig, adapted: Collection[str]) -> list[str]:
    """Return the full names of the modules that an adapter trains and saves as a whole.

    These are the modules that `config.modules_to_save` matches by PEFT's rule (the end of a module's name) and, unless
    it is an empty list, those that the base checkpoint lacks. For a saved adapter they are the recorded ones.

    Args:
        model: The base model.
        config: The adapter's configuration.
        adapted: Names of the modules that get a bottleneck.
    """
    if config.modules_to_save == []:
        return []
    suffixes = tuple(config.modules_to_save or ())
    names: Collection[str] = ()
    record = config.record if config.is_loaded else None
    # Without recorded places, a file of an earlier version, which recorded no heads. With them, an adapter without a
    # head, such as that of a language, leaves the head of the model to other adapters.
    if record is not None and (record.heads or record.places is not None):
        names = record.heads
    else:
        heads = find_head(model, adapted)
        if heads and (weights := [name for name, _ in model.named_parameters(recurse=False)]):
            warnings.warn(
                f"Only modules can be trained and saved beside an adapter; {', '.join(weights)} of "
                f"{type(model).__name__} keeps its initial values. For speech models, leave "
                "use_weighted_layer_sum=False.",
                stacklevel=1,
            )
        new = [] if config.is_loaded else find_new(model, heads, adapted)
        if unexpected := [name for name in new if not (suffixes and name.endswith(suffixes))]:
            logger.warning(
                "The base checkpoint has no weights for %s, which will be trained and saved with the adapter.",
                ", ".join(unexpected),
            )
        names = [*heads, *new]
    found: list[str] = []
    inside: tuple[str, ...] = ()
    for key, module in model.named_modules(remove_duplicate=False):
        if key.startswith(inside):
            continue
        if key in names or (suffixes and key.endswith(suffixes)):
            found.append(key)
            inside += (f"{key}.",)
        elif isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            inside += (f"{key}.",)
    return found


def find_new_modules(model: nn.Module) -> list[str]:
    """Return the full names of the modules that the base checkpoint lacks: the task head and, if new, the pooler.

    Every method of fine-tuning has to train them.
    """
    heads = find_head(model, ())
    return heads + find_new(model, heads, ())


def find_head(model: nn.Module, adapted: Iterable[str]) -> list[str]:
    """Return the names of the task head's modules, which the base checkpoint lacks.

    They are the children of a model for classification, question answering, multiple choice, segmentation or speech
    recognition that have parameters of their own and contain no adapted module: BERT's `classifier`, DistilBERT's
    `pre_classifier` and `classifier`, BART's `classification_head`. Other models have no such head. The new
    cross-attention in a model joined from a pretrained encoder and a pretrained decoder cannot be recognized: train it
    with `modules_to_save=["crossattention"]`.

    Args:
        model: The base model.
        adapted: Names of the modules that get a bottleneck, which distinguish the encoder from the head.
    """
    if not _CLASSES_WITH_NEW_HEADS.search(type(model).__name__):
        return []
    children = dict(model.named_children())
    encoders = {key.partition(".")[0] for key in adapted} | {getattr(model, "base_model_prefix", "")} & children.keys()
    # T5 for question answering keeps its embeddings beside the encoder and the decoder that use them.
    pretrained = {id(weight) for name in encoders for weight in model.get_submodule(name).parameters()}
    # A list is not called itself, so its elements are the modules to wrap.
    parts = {
        **{name: child for name, child in children.items() if not isinstance(child, nn.ModuleList)},
        **{
            f"{name}.{index}": element
            for name, child in children.items()
            if isinstance(child, nn.ModuleList) and name not in encoders
            for index, element in enumerate(child)
        },
    }
    return [
        name
        for name, child in parts.items()
        if name not in encoders
        and (own := {id(weight) for weight in child.parameters()})
        and own.isdisjoint(pretrained)
    ]


def find_last_heads(model: nn.Module, adapted: Iterable[str]) -> list[str]:
    """Return the names of those modules of the task head whose outputs the model returns as they are.

    Other models go on computing with the outputs: MaskFormer multiplies them by the pixels' embeddings, and XLNet for
    questions by the hidden states.

    Args:
        model: The base model.
        adapted: Names of the modules that get a bottleneck.
    """
    heads = find_head(model, adapted)
    is_classifier = type(model).__name__.endswith("Classification")
    return heads if is_classifier or heads in (["classifier"], ["qa_outputs"], ["lm_head"]) else []


def find_new(model: nn.Module, heads: Sequence[str], adapted: Iterable[str]) -> list[str]:
    """Return the full names of the encoder's modules beside its layers that the checkpoint lacks.

    They must be trained and saved like a head: frozen, they would stay random, and be different when the adapter is
    loaded. transformers marks the weights that it has loaded. Without such marks, as in a model that was made from its
    configuration, no module counts as new.

    Args:
        model: The base model.
        heads: Names of its heads. Without a head, a module beside the layers may not contribute to the output.
        adapted: Names of the modules that get a bottleneck.
    """
    return list(_find_new_in_encoder(model, list(adapted))) if heads else []


def find_not_loaded(model: nn.Module, adapted: Iterable[str]) -> list[str]:
    """Return the names of the modules beside a model's layers that are another one each time that it is loaded.

    These are those of `find_new`, also in a model without a head, and new modules outside of the encoder, such as the
    head of a language model that its checkpoint lacks.

    Args:
        model: The base model.
        adapted: Names of the modules that get a bottleneck.
    """
    return [*_find_new_in_encoder(model, list(adapted)), *(name for name, _ in _find_new_outside(model))]


def find_left_random(model: nn.Module, trained: Collection[str]) -> list[str]:
    """Return the names of the outermost new modules outside the encoder that an adapter does not train.

    Output embeddings are left out: they are also new where the vocabulary has been resized, and PEFT saves those.

    Args:
        model: The base model.
        trained: Names of the modules that the adapter trains as a whole.
    """
    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    found: list[str] = []
    for name, module in _find_new_outside(model):
        is_known = any(is_inside(name, other) for other in (*found, *trained))
        if not is_known and (output is None or module is not base_module(output)):
            found.append(name)
    return found


def _find_new_in_encoder(model: nn.Module, adapted: Collection[str]) -> Iterator[str]:
    encoder = getattr(model, "base_model", None)
    if not isinstance(encoder, nn.Module) or not any(map(_is_loaded, model.parameters())):
        return
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is encoder)
    for name, child in encoder.named_children():
        if _is_new(child) and not any(is_inside(key, prefix + name) for key in adapted):
            yield prefix + name


def _find_new_outside(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    outer = f"{getattr(model, 'base_model_prefix', '')}."
    if outer[:-1] in dict(model.named_children()) and any(map(_is_loaded, model.parameters())):
        for name, module in base_modules(model):
            if not f"{name}.".startswith(outer) and _is_new(module):
                yield name, module


def _is_loaded(weight: torch.Tensor) -> bool:
    return getattr(weight, "_is_hf_initialized", False)


def _is_new(module: nn.Module) -> bool:
    """Return whether all weights of a module are known to be new. Offloaded and quantized ones lose the mark."""
    weights = list(module.parameters())
    return bool(weights) and not any(
        _is_loaded(weight) or weight.is_meta or not weight.is_floating_point() or not weight.numel()
        or type(weight.data) is not torch.Tensor
        for weight in weights
    )  # fmt: skip
