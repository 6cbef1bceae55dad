"""The adapted model against the paper: sizes, place, formula, what trains and what does not."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import get_peft_model
from transformers import BertConfig, BertForSequenceClassification

from houlsby_peft import HoulsbyConfig, HoulsbyLayer, HoulsbyLayerNorm
from model_states import state_of, trained_names
from tiny_models import adapted, tiny_bert


def count(model, part=""):
    return sum(model.get_parameter(name).numel() for name in trained_names(model) if part in name)


def on_bert_base(**options):
    with torch.device("meta"):
        base = BertForSequenceClassification(BertConfig())
    return get_peft_model(base, HoulsbyConfig(**options), low_cpu_mem_usage=True)


# Sizes on BERT-base with r=64, as the papers print or imply them.
@pytest.mark.parametrize(
    ("share_layers", "owners", "parameters"),
    [(0, 24, 2_379_264), (1, 12, 1_189_632), (3, 4, 396_544)],
)
def test_adapter_parameters_on_bert_base(share_layers, owners, parameters):
    model = on_bert_base(r=64, share_layers=share_layers)
    layers = [module for module in model.modules() if isinstance(module, HoulsbyLayer)]
    assert len(layers) == 24
    assert sum(len(layer.houlsby_adapter) for layer in layers) == owners
    assert count(model, "houlsby_adapter") == parameters
    assert count(model, "houlsby_norm") == 36_864
    assert count(model, "modules_to_save") == 768 * 2 + 2
    assert count(model) == parameters + 36_864 + 768 * 2 + 2


def test_all_25_norms_and_no_norms_on_bert_base():
    every = on_bert_base(train_layer_norm="all")
    assert sum(isinstance(module, HoulsbyLayerNorm) for module in every.modules()) == 25
    assert count(every, "houlsby_norm") == 38_400
    none = on_bert_base(train_layer_norm=False, modules_to_save=[])
    # Whritenour and Schoch 2019 print both numbers.
    assert none.get_nb_trainable_parameters() == (2_379_264, 111_863_042)


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
    untrained = copy.deepcopy(model.state_dict())
    weights = [model.get_parameter(name) for name in trained_names(model)]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.0)
    model.train()
    for step in range(20):
        optimizer.zero_grad()
        model(token_ids, labels=(token_ids[:, 0] + step) % 3).loss.backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        is_own = "houlsby_" in name or "modules_to_save.default" in name
        assert parameter.requires_grad == is_own, name
        assert (parameter.grad is not None) == is_own, name
        assert torch.equal(parameter, untrained[name]) != is_own, name


def test_a_fresh_adapter_is_near_the_base_and_exactly_it_with_init_std_0(token_ids):
    expected = tiny_bert()(token_ids).logits
    for init_std, tolerance in ((0.01, 1e-2), (0.0, 0.0)):
        model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, init_std=init_std)).eval()
        logits = model(token_ids).logits
        assert (logits - expected).abs().max() <= tolerance
    logits.square().sum().backward()
    for name, weight in model.named_parameters():
        assert "up_proj" not in name or weight.grad.any(), "it must learn"


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({"layers_to_transform": [1]}, ["1.attention.output.dropout", "1.output.dropout"]),
        ({"layers_to_transform": 3, "positions": "attention"}, ["3.attention.output.dropout"]),
        (
            {"exclude_modules": r".*layer\.[0-2]\..*"},
            ["3.attention.output.dropout", "3.output.dropout"],
        ),
        (
            {"target_modules": r".*layer\.\d\.output\.dense", "layers_to_transform": [0]},
            ["0.output.dense"],
        ),
        (
            {"target_modules": ["intermediate.dense"], "layers_to_transform": [2]},
            ["2.intermediate.dense"],
        ),
    ],
    ids=str,
)
def test_which_modules_are_adapted(options, ends):
    base = tiny_bert()
    get_peft_model(base, HoulsbyConfig(**options))
    assert names_of(base, HoulsbyLayer) == [f"bert.encoder.layer.{end}" for end in ends]
    layers = {name.split(".")[3] for name in names_of(base, HoulsbyLayerNorm)}
    assert layers == {end[0] for end in ends}


def names_of(model, kind):
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def test_rank_pattern_gives_places_their_own_size():
    config = HoulsbyConfig(
        r=4, rank_pattern={"attention.output.dropout": 2, r"layer\.3\.output\.dropout": 8}
    )
    base = tiny_bert()
    get_peft_model(base, config)
    sizes = []
    for name in names_of(base, HoulsbyLayer):
        sizes.append(base.get_submodule(name).module_of("default").down_proj.out_features)
    assert sizes == [2, 4, 2, 4, 2, 4, 2, 8]


# PEFT leaves out all keys with such a part when it saves the other adapter.
@pytest.mark.parametrize(
    "name", ["1", "bert", "base_model", "down_proj", "a.b", "__base__", "self", "train"]
)
def test_a_name_that_an_adapter_cannot_have_is_refused_and_leaves_the_model_as_it_was(name):
    model, config = get_peft_model(tiny_bert(), HoulsbyConfig(r=4)), HoulsbyConfig(r=4)
    untouched = state_of(model)
    with pytest.raises(ValueError, match="adapter_name"):
        model.add_adapter(name, config)
    assert config.saved is None
    assert list(model.base_model.records) == ["default"]
    assert state_of(model) == untouched


@pytest.mark.parametrize("call", ["merge_and_unload", "merge_adapter"])
def test_a_refused_merge_changes_nothing(call):
    """Trained tokens come first in the model, and could be merged."""
    model = adapted(trainable_token_indices=[1, 2])
    untouched = state_of(model)
    with pytest.raises(ValueError, match="merged"):
        getattr(model, call)()
    assert state_of(model) == untouched
    assert not any(getattr(module, "merged", False) for module in model.modules())
