"""The adapted model against the paper: sizes, place, formula, what trains and what does not."""

from __future__ import annotations

import math
import re

import pytest
import torch
from peft import get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
)

from houlsby_peft import HoulsbyConfig, HoulsbyLayer, HoulsbyLayerNorm
from tiny_models import perturb, tiny_bert


def count(model, part=""):
    return sum(
        p.numel() for name, p in model.named_parameters() if part in name and p.requires_grad
    )


# Sizes on BERT-base with r=64, as the papers print or imply them.
@pytest.mark.parametrize(
    ("share_layers", "owners", "parameters"),
    [(0, 24, 2_379_264), (1, 12, 1_189_632), (3, 4, 396_544)],
)
def test_adapter_parameters_on_bert_base(share_layers, owners, parameters):
    with torch.device("meta"):
        base = BertForSequenceClassification(BertConfig())
    model = get_peft_model(
        base, HoulsbyConfig(r=64, share_layers=share_layers), low_cpu_mem_usage=True
    )
    layers = [module for module in model.modules() if isinstance(module, HoulsbyLayer)]
    assert len(layers) == 24
    assert sum(len(layer.houlsby_adapter) for layer in layers) == owners
    assert count(model, "houlsby_adapter") == parameters
    assert count(model, "houlsby_norm") == 36_864
    assert count(model, "modules_to_save") == 768 * 2 + 2
    assert count(model) == parameters + 36_864 + 768 * 2 + 2


def test_all_25_norms_and_no_norms_on_bert_base():
    with torch.device("meta"):
        base = BertForSequenceClassification(BertConfig())
        other = BertForSequenceClassification(BertConfig())
    every = get_peft_model(base, HoulsbyConfig(train_layer_norm="all"), low_cpu_mem_usage=True)
    assert sum(isinstance(module, HoulsbyLayerNorm) for module in every.modules()) == 25
    assert count(every, "houlsby_norm") == 38_400
    none = get_peft_model(
        other, HoulsbyConfig(train_layer_norm=False, modules_to_save=[]), low_cpu_mem_usage=True
    )
    # Whritenour and Schoch 2019 print both numbers.
    assert none.get_nb_trainable_parameters() == (2_379_264, 111_863_042)


def layer_norm(norm, x):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    return (x - mean) / torch.sqrt(variance + norm.eps) * norm.weight + norm.bias


def written_out_layer(layer, hidden, heads, bottlenecks, norms):
    """One layer of BERT with adapters, after figure 2 of the paper, from the raw weights."""
    attention = layer.attention

    def split(x):
        return x.view(*x.shape[:2], heads, -1).transpose(1, 2)

    query, key, value = (
        split(hidden @ linear.weight.T + linear.bias)
        for linear in (attention.self.query, attention.self.key, attention.self.value)
    )
    scores = torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]), dim=-1)
    context = (scores @ value).transpose(1, 2).reshape(hidden.shape)
    dense = attention.output.dense
    projected = context @ dense.weight.T + dense.bias
    hidden = layer_norm(norms[0], adapted(bottlenecks[0], projected) + hidden)
    inner = hidden @ layer.intermediate.dense.weight.T + layer.intermediate.dense.bias
    inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    projected = inner @ layer.output.dense.weight.T + layer.output.dense.bias
    return layer_norm(norms[1], adapted(bottlenecks[1], projected) + hidden)


def adapted(bottleneck, x):
    inner = torch.tanh(x @ bottleneck.down_proj.weight.T + bottleneck.down_proj.bias)
    return x + inner @ bottleneck.up_proj.weight.T + bottleneck.up_proj.bias


@pytest.mark.parametrize(
    ("share_layers", "owner_of_layer"),
    [(0, None), (1, [0, 1, 2, 3]), (2, [0, 0, 2, 2]), (3, [0, 0, 0, 3])],
)
def test_forward_equals_the_papers_formula(share_layers, owner_of_layer, token_ids):
    config = HoulsbyConfig(r=5, activation="tanh", share_layers=share_layers)
    model = get_peft_model(tiny_bert(), config).eval()
    perturb(model)
    weights = dict(model.base_model.model.named_modules())
    bert = model.base_model.model.bert
    hidden = bert.embeddings(token_ids)
    for index, layer in enumerate(bert.encoder.layer):
        own = f"bert.encoder.layer.{index}"
        places = [f"{own}.attention.output.dropout", f"{own}.output.dropout"]
        if owner_of_layer:
            places = [f"bert.encoder.layer.{owner_of_layer[index]}.attention.output.dropout"] * 2
        bottlenecks = [weights[f"{place}.houlsby_adapter.default"] for place in places]
        norms = [
            weights[f"{own}.{name}LayerNorm.houlsby_norm.default"]
            for name in ("attention.output.", "output.")
        ]
        hidden = written_out_layer(layer, hidden, 4, bottlenecks, norms)
    pooled = torch.tanh(hidden[:, 0] @ bert.pooler.dense.weight.T + bert.pooler.dense.bias)
    head = weights["classifier.modules_to_save.default"]
    torch.testing.assert_close(
        model(token_ids).logits, pooled @ head.weight.T + head.bias, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"share_layers": 3, "train_layer_norm": "all"},
        {"train_layer_norm": False, "modules_to_save": ["pooler"], "layers_to_transform": [2, 3]},
    ],
    ids=str,
)
def test_training_moves_exactly_the_adapters_norms_and_modules_to_save(options, token_ids):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, **options))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
    )
    model.train()
    for step in range(20):
        optimizer.zero_grad()
        model(token_ids, labels=(token_ids[:, 0] + step) % 3).loss.backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        ours = any(
            part in name for part in ("houlsby_adapter", "houlsby_norm", "modules_to_save.default")
        )
        assert parameter.requires_grad == ours, name
        assert (parameter.grad is not None) == ours, name
        assert torch.equal(parameter, before[name]) != ours, name


def test_a_fresh_adapter_is_near_the_base_and_exactly_it_with_init_std_0(token_ids):
    expected = tiny_bert()(token_ids).logits
    for init_std, tolerance in ((0.01, 1e-2), (0.0, 0.0)):
        model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, init_std=init_std)).eval()
        logits = model(token_ids).logits
        assert (logits - expected).abs().max() <= tolerance
    logits.square().sum().backward()
    assert all(
        weight.grad.any() for name, weight in model.named_parameters() if "up_proj" in name
    ), "it must learn"


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (HoulsbyConfig(layers_to_transform=[1]), {"1.attention", "1.output"}),
        (HoulsbyConfig(layers_to_transform=3, positions="attention"), {"3.attention"}),
        (HoulsbyConfig(exclude_modules=r".*layer\.[0-2]\..*"), {"3.attention", "3.output"}),
        (
            HoulsbyConfig(target_modules=r".*layer\.\d\.output\.dense", layers_to_transform=[0]),
            {"0.output"},
        ),
        (
            HoulsbyConfig(target_modules=["intermediate.dense"], layers_to_transform=[2]),
            {"2.intermediate"},
        ),
    ],
)
def test_which_modules_are_adapted(config, keys):
    model = get_peft_model(tiny_bert(), config)
    found = {
        name.split("layer.")[1] for name, m in model.named_modules() if isinstance(m, HoulsbyLayer)
    }
    assert {".".join(name.split(".")[:2]) for name in found} == keys
    layers = {key[0] for key in keys}
    norms = {
        name.split("layer.")[1][0]
        for name, m in model.named_modules()
        if isinstance(m, HoulsbyLayerNorm)
    }
    assert norms == layers


def test_rank_pattern_gives_places_their_own_size():
    config = HoulsbyConfig(
        r=4, rank_pattern={"attention.output.dropout": 2, r"layer\.3\.output\.dropout": 8}
    )
    model = get_peft_model(tiny_bert(), config)
    sizes = {
        name.split("layer.")[1].removesuffix(".dropout"): module.houlsby_adapter[
            "default"
        ].down_proj.out_features
        for name, module in model.named_modules()
        if isinstance(module, HoulsbyLayer)
    }
    assert sizes == {
        f"{i}.{place}": 2 if "att" in place else 8 if i == 3 else 4
        for i in range(4)
        for place in ("attention.output", "output")
    }


# PEFT leaves out all keys with such a part when it saves the other adapter.
@pytest.mark.parametrize("name", ["1", "bert", "base_model", "down_proj", "a.b", "__base__"])
def test_a_name_that_an_adapter_cannot_have_is_refused_and_leaves_the_model_as_it_was(name):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4))
    before, config = list(model.state_dict()), HoulsbyConfig(r=4)
    with pytest.raises(ValueError, match=re.escape(name)):
        model.add_adapter(name, config)
    assert config.saved is None
    assert list(model.base_model.records) == ["default"]
    assert list(model.state_dict()) == before
    assert list(model.peft_config) == ["default"]


@pytest.mark.parametrize("call", ["merge_and_unload", "merge_adapter"])
def test_a_refused_merge_changes_nothing(call, token_ids):
    """Trained tokens come first in the model, and could be merged."""
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, trainable_token_indices=[1, 2])).eval()
    perturb(model)
    modules, logits = [name for name, _ in model.named_modules()], model(token_ids).logits
    with pytest.raises(ValueError, match="cannot be merged"):
        getattr(model, call)()
    assert [name for name, _ in model.named_modules()] == modules
    assert not any(getattr(module, "merged", False) for module in model.modules())
    assert torch.equal(model(token_ids).logits, logits)
