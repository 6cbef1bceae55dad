"""A slower learning rate for the up projections of bottlenecks."""

from __future__ import annotations

import torch
from torch import nn

from houlsby_peft import AdapterError, Bottleneck


def slow_up_projections(
    optimizer: torch.optim.Optimizer, model: nn.Module, ratio: float = 0.1
) -> None:
    """Let up projections learn at a share of the rate of all other weights.

    With Adam, a weight moves by about the learning rate in each step, whatever its gradient. An
    up projection sums r such weights, and a down projection feeds it, so that at a high rate, what
    a bottleneck adds outgrows what it reads: all texts then look alike to the head, and the run
    never learns. With slow up projections, runs learn at about three times the usual rate.

    It is called once, before the first step and before a schedule of the rate is made.

    Args:
        optimizer: An optimizer of the model's weights. Each of its groups is split in two.
        model: The model with adapters.
        ratio: The share, above 0. 1 changes nothing.

    Raises:
        AdapterError: The model has no bottlenecks, as with a ladder.
    """
    slow: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, Bottleneck):
            slow.update(module.up_proj.parameters())
    if not slow:
        raise AdapterError(
            "There are no up projections to slow down: the model has no bottlenecks."
        )
    groups = []
    for group in optimizer.param_groups:
        others = [weight for weight in group["params"] if weight not in slow]
        up = [weight for weight in group["params"] if weight in slow]
        groups.append({**group, "params": others})
        groups.append({**group, "params": up, "lr": ratio * group["lr"]})
    optimizer.param_groups[:] = [group for group in groups if group["params"]]
