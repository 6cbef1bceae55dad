"""New heads: with an adapter's own number of outputs, or with a hidden layer."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import HoulsbyConfig
from ..method.modules import device_of, dtype_of
from .finding import find_head
from .head import HoulsbyHead
from .tasks import labels_of_base


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
