"""A classification head with a hidden layer, after Mohebbi and Rajaei 2020."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from .head import HoulsbyHead, find_head


class TwoLayerHead(nn.Module):
    """`out_proj(dropout(tanh(dense(x))))`, in place of a head that is one linear layer.

    Args:
        width: of the input and of the hidden layer.
        outputs: number of classes, or 1 for a regression.
        dropout: probability, after the hidden layer.
    """

    def __init__(self, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        # Not "classifier", the name of heads, inside of which PEFT would find another one.
        self.out_proj = nn.Linear(width, outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """From (batch, width) to (batch, outputs)."""
        hidden: torch.Tensor = self.dense(inputs).tanh()
        return self.out_proj(self.dropout(hidden))  # type: ignore[no-any-return]


def has_two_layer_head(model: nn.Module) -> bool:
    """Whether the head of a model, or the one under its adapters, has been replaced."""
    heads = (child.original_module if isinstance(child, HoulsbyHead) else child for child in model.children())
    return any(isinstance(head, TwoLayerHead) for head in heads)


def put_two_layer_head(model: PreTrainedModel) -> None:
    """Replace the linear head of a model by a fresh one of two layers; one that has two layers already stays.

    To be done before adapters are added. With `HoulsbyConfig(two_layer_head=True)`, `houlsby_peft.load` does it again
    for a saved adapter; PEFT and transformers alone cannot load it.

    Raises:
        ValueError: The model's head is not one linear layer.
    """
    if has_two_layer_head(model):
        return
    heads = {name: model.get_submodule(name) for name in find_head(model, ())}
    linear = [(name, head) for name, head in heads.items() if isinstance(head, nn.Linear)]
    if len(heads) != 1 or len(linear) != 1:
        found = ", ".join(f"{name} ({type(head).__name__})" for name, head in heads.items())
        raise ValueError(
            f"A second layer can be given to a head that is one linear layer; {type(model).__name__} has "
            f"{found or 'no head'}. Use its own."
        )
    name, old = linear[0]
    own = getattr(model.config, "classifier_dropout", None)
    dropout = getattr(model.config, "hidden_dropout_prob", 0.0) if own is None else own
    head = TwoLayerHead(old.in_features, old.out_features, float(dropout)).to(old.weight.device, old.weight.dtype)
    if not old.weight.is_meta:
        head.apply(model._init_weights)
    setattr(model, name, head.train(old.training))
