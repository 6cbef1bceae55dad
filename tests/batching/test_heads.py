"""Heads of several adapters at once, as on a GPU: the same as each head on its rows."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import get_peft_model
from torch import nn
from transformers import BertForTokenClassification, RobertaConfig, RobertaForSequenceClassification

from houlsby_peft import HoulsbyConfig
from houlsby_peft.batching.heads import head_key
from tiny_models import perturb, tiny_bert


NAMES = ["one", "two", "wide", "two", "one", "three"]


def roberta():
    return RobertaForSequenceClassification(
        RobertaConfig(
            vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16,
        )
    )  # fmt: skip


def tokens():
    return BertForTokenClassification(tiny_bert().config)


@pytest.mark.parametrize("build", [tiny_bert, roberta, tokens])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_gets_its_own_head(build, dtype, monkeypatch):
    """Two sizes of heads, and the base model's, which is in its dtype."""
    torch.manual_seed(0)
    model = get_peft_model(build().to(dtype), HoulsbyConfig(r=2), adapter_name="one")
    for name in ("two", "three"):
        model.add_adapter(name, HoulsbyConfig(r=2))
    model.add_adapter("wide", HoulsbyConfig(r=2, id2label=dict(enumerate("abcde"))))
    for seed, name in enumerate(("one", "two", "three", "wide")):
        model.set_adapter(name)
        perturb(model, seed)
    model.eval()
    ids = torch.randint(2, 90, (len(NAMES) + 1, 5))
    with torch.no_grad():
        in_turn = model(input_ids=ids, adapter_names=[*NAMES, "__base__"]).logits
        monkeypatch.setattr("houlsby_peft.batching.batch.saves_starts", lambda device: True)
        together = model(input_ids=ids, adapter_names=[*NAMES, "__base__"]).logits
    assert in_turn.dtype == together.dtype
    torch.testing.assert_close(together, in_turn, atol=1e-2, rtol=1e-2)
    assert not torch.equal(in_turn[0], in_turn[1])


def test_heads_with_other_weights_stay_apart():
    head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    assert head_key(head) == head_key(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    others = [
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)),
    ]
    assert len({head_key(other) for other in (head, *others)}) == 4
    assert head_key(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))) is None
    hooked = add_hook_to_module(copy.deepcopy(head), ModelHook())
    assert head_key(hooked) is None
    head[0].register_forward_hook(lambda *args: None)
    assert head_key(head) is None
