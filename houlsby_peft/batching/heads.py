"""The heads of several adapters as one module, whose linear layers have a weight for each row.

A GPU then starts a few operations for all rows, not some for each adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from ..kernels.plain import has_hooks
from ..method.tuner_layer import HoulsbyTunerLayer
from .stack import Choice, LinearOfRows


def head_key(head: nn.Module) -> tuple[object, ...] | None:
    """Return what heads have in common that differ in the values of their linear layers alone; None
    for a head with other weights.
    """
    facts: list[object] = []
    for name, module in head.named_modules():
        facts += [name, type(module)]
        if isinstance(module, (HoulsbyTunerLayer, AuxiliaryTrainingWrapper)) or has_hooks(module):
            return None
        if "forward" in vars(module):  # as accelerate sets it, with this module inside
            return None
        if not module._parameters and not module._buffers:
            continue
        if type(module) is not nn.Linear:
            return None
        weight = module.weight
        if type(weight) is not nn.Parameter or weight.is_meta:
            return None
        facts += [weight.shape, weight.dtype, module.bias is None]
    return tuple(facts)


def head_of_rows(heads: Sequence[Any], choice: Choice) -> Any:
    """Return a head that computes each row by its own.

    Args:
        heads: Several heads, with the same `head_key`.
        choice: The head of each row.
    """
    first = heads[0]
    if type(first) is nn.Linear:
        weight = choice.take(torch.stack([head.weight for head in heads]))
        if first.bias is None:
            return LinearOfRows(weight, weight.new_zeros(weight.shape[:2]))
        return LinearOfRows(weight, choice.take(torch.stack([head.bias for head in heads])))
    made = copy.copy(first)
    made._modules = {}
    for name in first._modules:
        made._modules[name] = head_of_rows([head._modules[name] for head in heads], choice)
    return made
