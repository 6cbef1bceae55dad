"""Weights that a distributed run has split over its processes: gathered to be copied, refused where they are saved."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


def gathered(module: nn.Module) -> AbstractContextManager[Any]:
    """A context in which a module's weights are whole, also where DeepSpeed's ZeRO-3 has split them while loading.

    For reading: changes are lost. Every process must enter it.
    """
    split = [parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")]
    if not split:
        return nullcontext()
    import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return deepspeed.zero.GatheredParameters(split)  # type: ignore[no-any-return]


def refuse_shards(weights: Mapping[str, torch.Tensor]) -> None:
    """Refuse to save weights of which this process has a part only.

    Raises:
        ValueError: a tensor is empty, as ZeRO-3 leaves it, or a `DTensor` of FSDP2.
    """
    for name, weight in weights.items():
        is_dtensor = hasattr(weight, "full_tensor")
        if is_dtensor or weight.numel() == 0:
            raise ValueError(
                "An adapter's weights must be gathered before they are saved; this process has only a part of "
                f"{name}, {'a DTensor (FSDP2)' if is_dtensor else 'which is empty (ZeRO-3)'}. On every process: "
                "weights = accelerator.get_state_dict(wrapped_model); then "
                "accelerator.unwrap_model(wrapped_model).save_pretrained(folder, state_dict=weights, "
                "is_main_process=accelerator.is_main_process). transformers' Trainer does so by itself."
            )
