"""Heads that an adapter has for itself: with its own number of classes, or with a hidden layer."""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import HoulsbyConfig
from ..errors import check_kind
from ..offloading import device_of, dtype_of
from .find import find_head
from .wrapper import HoulsbyHead


class TwoLayerHead(nn.Module):
    """The head `out_proj(dropout(tanh(dense(x))))` of Mohebbi and Rajaei 2020, in place of one linear layer.

    Args:
        width: Size of the input and of the hidden layer.
        outputs: Number of classes, or 1 for a regression.
        dropout: Dropout probability after the hidden layer.
    """

    def __init__(self, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        # Not "classifier", the name of many heads: PEFT finds modules to save by the end of their names.
        self.out_proj = nn.Linear(width, outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Transform `(batch, width)` to `(batch, outputs)`."""
        hidden: torch.Tensor = self.dense(inputs).tanh()
        return self.out_proj(self.dropout(hidden))  # type: ignore[no-any-return]


class _HiddenLayer(nn.Module):
    """The first half of a `TwoLayerHead` where a ReLU follows: `tanh(dense(x)) + 1`, which no ReLU changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.dense(inputs).tanh()
        return hidden + 1


class _OutputLayer(nn.Module):
    """The second half: `out_proj(x - 1)`."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.out_proj = nn.Linear(width, outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out_proj(inputs - 1)  # type: ignore[no-any-return]


def has_two_layer_head(model: nn.Module) -> bool:
    """Return whether the head of a base model has been replaced by a `TwoLayerHead`."""
    heads = (child.original_module if isinstance(child, HoulsbyHead) else child for child in model.children())
    return any(isinstance(head, (TwoLayerHead, _HiddenLayer)) for head in heads)


def put_two_layer_head(model: PreTrainedModel) -> None:
    """Replace the linear head of a model by a newly initialized `TwoLayerHead`.

    DistilBERT's head has a hidden layer with a ReLU between two modules. Both are replaced, so that they compute what
    a `TwoLayerHead` computes.

    An adapter needs no such change of the base model: `HoulsbyConfig(two_layer_head=True)` gives it the head for
    itself. A model that already has a two-layer head is left unchanged.

    Raises:
        TypeError: `model` is not a model of transformers.
        ValueError: The model's head is not one linear layer.
    """
    check_kind("model", model, PreTrainedModel, "a model of transformers")
    if has_two_layer_head(model):
        return
    heads = {name: model.get_submodule(name) for name in find_head(model, ())}
    if list(heads) == ["pre_classifier", "classifier"] and model.config.model_type == "distilbert":
        _put_halves(model, *heads.values())  # type: ignore[arg-type]
        return
    linear = [(name, head) for name, head in heads.items() if isinstance(head, nn.Linear)]
    if len(heads) != 1 or len(linear) != 1:
        found = ", ".join(f"{name} ({type(head).__name__})" for name, head in heads.items())
        raise ValueError(
            f"Only a head that is one linear layer can get a hidden layer; {type(model).__name__} has "
            f"{found or 'no head'}. Keep its own head."
        )
    name, old = linear[0]
    own = getattr(model.config, "classifier_dropout", None)
    dropout = getattr(model.config, "hidden_dropout_prob", 0.0) if own is None else own
    head = TwoLayerHead(old.in_features, old.out_features, float(dropout)).to(old.weight.device, old.weight.dtype)
    if not old.weight.is_meta:
        head.apply(model._init_weights)
    setattr(model, name, head.train(old.training))


def _put_halves(model: PreTrainedModel, hidden: nn.Linear, output: nn.Linear) -> None:
    halves = {
        "pre_classifier": (hidden, _HiddenLayer(hidden.in_features)),
        "classifier": (output, _OutputLayer(output.in_features, output.out_features)),
    }
    for name, (old, new) in halves.items():
        new.to(old.weight.device, old.weight.dtype)
        if not old.weight.is_meta:
            new.apply(model._init_weights)
        setattr(model, name, new.train(old.training))


def needs_two_layer_head(model: nn.Module, config: HoulsbyConfig) -> bool:
    """Return whether an adapter's head has a hidden layer: a saved one as recorded, a new one also as the base's."""
    if config.is_loaded and config.record:
        return config.two_layer_head or config.record.two_layer_head
    return config.two_layer_head or has_two_layer_head(model)


def new_heads(model: nn.Module, config: HoulsbyConfig, names: Collection[str]) -> dict[str, nn.Module | None]:
    """Return an adapter's heads that differ in shape from the base model's, newly initialized.

    This is the one way to give an adapter a head of its own, whether it is new or loaded. The base model is not
    changed.

    Args:
        model: The base model.
        config: The adapter's configuration, which gives the labels and the kind of head.
        names: Full names of the modules that the adapter trains as a whole.

    Returns:
        The head by name; None for a module of which the adapter gets a copy.

    Raises:
        ValueError: The model has no head that can get these labels.
    """
    heads: dict[str, nn.Module | None] = dict.fromkeys(names)
    base_config = getattr(model, "config", None)
    two_layer = needs_two_layer_head(model, config)
    labels = config.labels or getattr(base_config, "id2label", None) or {}
    has_labels_of_base = not config.labels or len(labels) == getattr(base_config, "num_labels", None)
    if has_labels_of_base and two_layer == has_two_layer_head(model):
        return heads
    if not heads and config.is_loaded:  # on an encoder without the head, for its features
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
            heads[name] = new.apply(model._init_weights).train(old.training)
    return heads


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in module.state_dict().items()}
