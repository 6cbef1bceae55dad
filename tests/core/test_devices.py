"""Adapters on the CPU and on a GPU compute what they compute in float64, in training and in mixed
batches.
"""

from __future__ import annotations

import copy

import pytest
import torch
from peft import PeftModel, get_peft_model

from houlsby_peft import HoulsbyConfig
from tiny_models import perturb, tiny_bert


every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
every_precision = pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [(torch.float32, False, 1e-5), (torch.float32, True, 0.05), (torch.bfloat16, False, 0.05)],
    ids=["float32", "autocast", "base in bfloat16"],
)
NAMES = ("first", "second", "third")
LABELS = torch.tensor([0, 1, 2, 0, 1])


def adapted(dtype: torch.dtype = torch.float32, adapters: int = 1) -> PeftModel:
    model = get_peft_model(
        tiny_bert().to(dtype), HoulsbyConfig(r=4, task_type="SEQ_CLS"), adapter_name=NAMES[0]
    )
    for name in NAMES[1:adapters]:
        model.add_adapter(name, HoulsbyConfig(r=4, task_type="SEQ_CLS"))
    for seed, name in enumerate(NAMES[:adapters]):
        model.set_adapter(name)
        perturb(model, seed=seed)
    return model.eval()


def gradients(model: PeftModel, ids: torch.Tensor, autocast: bool = False) -> torch.Tensor:
    """Return all gradients as one vector in float64 on the CPU."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        loss = model(ids, labels=LABELS.to(ids.device)).loss
    loss.backward()
    trained = [weight.grad for weight in model.parameters() if weight.requires_grad]
    return torch.cat([gradient.flatten().cpu().double() for gradient in trained])


@every_device
@every_precision
def test_gradients(device, dtype, autocast, tolerance, token_ids):
    model = adapted(dtype)
    expected = gradients(copy.deepcopy(model).double(), token_ids)
    computed = gradients(model.to(device), token_ids.to(device), autocast)
    assert (computed - expected).norm() <= tolerance * expected.norm()


@every_device
def test_adapters_are_created_and_loaded_where_the_base_model_is(device, token_ids, tmp_path):
    model = get_peft_model(tiny_bert().to(device), HoulsbyConfig(r=4, task_type="SEQ_CLS"))
    assert {weight.device.type for weight in model.parameters()} == {device}
    saved = adapted()
    saved.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_bert().to(device), tmp_path / NAMES[0])
    assert {weight.device.type for weight in loaded.parameters()} == {device}
    expected = saved.double()(token_ids).logits
    torch.testing.assert_close(
        loaded(token_ids.to(device)).logits.cpu().double(), expected, atol=1e-4, rtol=1e-4
    )


@every_device
@every_precision
@torch.no_grad()
def test_rows_of_several_adapters(device, dtype, autocast, tolerance, token_ids):
    model = adapted(dtype, adapters=3)
    names = ["third", "first", "__base__", "third", "second"]
    alone, expected = copy.deepcopy(model).double(), []
    for row, name in zip(token_ids, names, strict=True):
        expected.append(alone(row[None], adapter_names=[name]).logits)
    expected = torch.cat(expected)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        mixed = model.to(device)(token_ids.to(device), adapter_names=names).logits
    assert (mixed.cpu().double() - expected).norm() <= tolerance * expected.norm()
