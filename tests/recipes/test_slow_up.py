"""Up projections that learn at a share of the rate."""

import pytest
import torch
from peft import get_peft_model

from houlsby_peft import AdapterError, HoulsbyConfig
from run.slow_up import slow_up_projections
from tiny_models import tiny_bert


def test_a_first_step_moves_up_projections_by_their_share():
    """Adam's first step moves each weight by the learning rate. Layers share bottlenecks."""
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, share_layers=3))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-15, weight_decay=0.0)
    slow_up_projections(optimizer, model, 0.2)
    model(input_ids=torch.arange(5, 15).view(2, 5), labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()

    moved = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            moved[name] = (weight - before[name]).abs().max().item()
    up = {name for name in moved if "up_proj" in name}
    assert len(up) == 4  # weights and biases of layers 0 to 2, and of layer 3
    for name, distance in moved.items():
        expected = 2e-3 if name in up else 1e-2
        assert abs(distance - expected) < 1e-2 * expected, name


def test_a_model_without_bottlenecks():
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, kind="ladder"))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(AdapterError, match="no bottlenecks"):
        slow_up_projections(optimizer, model)
