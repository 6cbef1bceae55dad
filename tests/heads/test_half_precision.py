"""Heads on a base model in half precision: weights in float32 as the rest of the adapter, and what
they return.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from tiny_models import adapted, tiny_bert


def half_bert(seed=0):
    return tiny_bert(seed).bfloat16().eval()


def dtypes(model, part):
    return {
        weight.dtype
        for name, weight in model.named_parameters()
        if part in name and "default" in name
    }


def test_a_head_computes_in_float32(token_ids):
    model = adapted(half_bert(), task_type="SEQ_CLS")
    wrapper = model.base_model.model.classifier
    pooled = []
    wrapper.register_forward_pre_hook(lambda _, args: pooled.append(args[0]))
    logits = model(token_ids).logits
    assert pooled[0].dtype == torch.bfloat16
    head = wrapper.modules_to_save["default"]
    assert head.weight.dtype == torch.float32
    # On a GPU, no squared error of labels in float32 could be computed otherwise.
    assert logits.dtype == torch.float32
    assert torch.equal(logits, F.linear(pooled[0].float(), head.weight, head.bias))
    with model.disable_adapter():
        assert torch.equal(model(token_ids).logits, half_bert()(token_ids).logits)


def test_a_head_of_several_modules_of_which_the_base_model_uses_its_own(token_ids):
    config = DistilBertConfig(vocab_size=99, dim=16, hidden_dim=32, n_layers=2, n_heads=2)
    torch.manual_seed(0)
    model = adapted(
        DistilBertForSequenceClassification(config).bfloat16().eval(), task_type="SEQ_CLS"
    )
    names = ["default", "__base__", "default", "__base__", "default"]
    mixed = model(token_ids, adapter_names=names).logits
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed[::2], model(token_ids).logits[::2], atol=0.02, rtol=0.02)
    with model.disable_adapter():
        torch.testing.assert_close(
            mixed[1::2], model(token_ids).logits[1::2].float(), atol=0.02, rtol=0.02
        )


def test_what_the_base_model_goes_on_with_has_its_dtype(token_ids):
    base = half_bert()
    model = adapted(base, modules_to_save=["bert.embeddings", "pooler"])
    assert dtypes(model, "embeddings") == dtypes(model, "pooler") == {torch.float32}
    pooled = []
    base.bert.pooler.register_forward_hook(lambda *call: pooled.append(call[-1].dtype))
    model(token_ids)
    assert pooled == [torch.bfloat16]
