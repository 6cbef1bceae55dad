"""A checkpoint without a pooler: the new one is trained, saved and loaded with the adapter, and
nothing else is.
"""

from __future__ import annotations

import logging

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import houlsby_peft
from contract_models import WIDE
from houlsby_peft import HoulsbyConfig, find_new_modules
from model_states import trained_names
from run.arguments import MethodArguments
from run.model import apply_method
from tiny_models import perturb, tiny_bert


def load(path, **kwargs):
    return AutoModelForSequenceClassification.from_pretrained(path, **kwargs)


@pytest.fixture(scope="module")
def without_pooler(tmp_path_factory):
    """What remains of a BERT whose checkpoint has the weights of its masked-word model."""
    folder = tmp_path_factory.mktemp("without")
    bert = tiny_bert().bert
    encoder = BertModel(bert.config, add_pooling_layer=False)
    encoder.load_state_dict(bert.state_dict(), strict=False)
    encoder.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def with_pooler(tmp_path_factory):
    folder = tmp_path_factory.mktemp("with")
    tiny_bert().bert.save_pretrained(folder)
    return folder


def test_a_new_pooler_comes_with_the_adapter(without_pooler, token_ids, tmp_path):
    base = load(without_pooler)
    config = HoulsbyConfig(r=4, task_type="SEQ_CLS")
    model = get_peft_model(base, config).eval()
    assert model.base_model.records["default"].heads.count("bert.pooler") == 1
    perturb(model)
    expected = model(token_ids).logits
    model.save_pretrained(tmp_path)
    # Each load draws another random pooler for the base.
    assert not torch.equal(
        load(without_pooler).bert.pooler.dense.weight, base.bert.pooler.original_module.dense.weight
    )
    loaded = PeftModel.from_pretrained(load(without_pooler), tmp_path).eval()
    assert torch.equal(loaded(token_ids).logits, expected)
    predictor = houlsby_peft.load(tmp_path, base_model=str(without_pooler))
    assert torch.equal(predictor.model.eval()(token_ids).logits, expected)
    prefix = "base_model.model.bert.pooler"
    trained = {name for name in trained_names(model) if name.startswith(prefix)}
    assert trained == {
        f"{prefix}.modules_to_save.default.dense.{kind}" for kind in ("weight", "bias")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_found_in_any_precision_and_after_a_move(without_pooler, dtype):
    assert find_new_modules(load(without_pooler, dtype=dtype)) == ["classifier", "bert.pooler"]
    assert find_new_modules(load(without_pooler).to(dtype)) == ["classifier", "bert.pooler"]


def test_one_that_is_asked_for_is_trained_once(without_pooler):
    config = HoulsbyConfig(r=4, modules_to_save=["pooler"])
    model = get_peft_model(load(without_pooler), config)
    assert model.base_model.records["default"].heads == ["bert.pooler", "classifier"]


def test_none_is_trained_where_none_is_new(with_pooler, without_pooler):
    offloaded = load(without_pooler)
    offloaded.bert.pooler.to("meta")
    bare = BertModel.from_pretrained(with_pooler)
    for base in (load(with_pooler), tiny_bert(), bare, offloaded):
        model = get_peft_model(base, HoulsbyConfig(r=4))
        assert not any("pooler" in name for name in model.base_model.records["default"].heads)
    model = get_peft_model(load(without_pooler), HoulsbyConfig(r=4, modules_to_save=[]))
    assert model.base_model.records["default"].heads == []


def test_a_new_pooler_of_an_encoder_without_a_head(without_pooler, token_ids, tmp_path):
    model = get_peft_model(BertModel.from_pretrained(without_pooler), HoulsbyConfig(r=4)).eval()
    assert model.base_model.records["default"].heads == ["pooler"]
    perturb(model)
    expected = model(token_ids).pooler_output
    model.save_pretrained(tmp_path)
    base = BertModel.from_pretrained(without_pooler)
    assert not torch.equal(
        base.pooler.dense.weight, model.get_base_model().pooler.original_module.dense.weight
    )
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(loaded(token_ids).pooler_output, expected)


def test_a_pooler_is_no_head_that_could_have_labels(without_pooler):
    with pytest.raises(ValueError, match="no head"):
        get_peft_model(
            BertModel.from_pretrained(without_pooler),
            HoulsbyConfig(r=4, id2label=dict(enumerate("abcd"))),
        )


def test_an_adapter_that_was_trained_elsewhere_says_itself_what_it_has(
    with_pooler, without_pooler, tmp_path
):
    get_peft_model(load(with_pooler), HoulsbyConfig(r=4)).save_pretrained(tmp_path)
    # The adapter does not bring the pooler, which is random here.
    with pytest.warns(UserWarning, match=r"other weights in pooler\.dense"):
        loaded = PeftModel.from_pretrained(load(without_pooler), tmp_path)
    assert loaded.base_model.records["default"].heads == ["classifier"]


TRANSFORM = "cls.predictions.transform"


@pytest.mark.parametrize(
    ("fields", "is_named", "trains"),
    [
        ({}, True, False),
        ({"modules_to_save": [TRANSFORM]}, False, True),
        ({"modules_to_save": []}, False, False),
        ({"exclude_modules": r"(?!bert\.).*"}, False, False),
    ],
    ids=str,
)
def test_a_new_head_of_a_language_model_is_named_as_it_does_not_train(
    fields, is_named, trains, without_pooler, caplog
):
    """Its output layer is tied to the embeddings, which the checkpoint has."""
    logging.Logger.warning_once.cache_clear()
    base = BertForMaskedLM.from_pretrained(without_pooler)
    model = get_peft_model(base, HoulsbyConfig(r=4, **fields))
    assert (f"no weights for {TRANSFORM}" in caplog.text) == is_named
    assert ("They stay random" in caplog.text) == is_named
    assert any("cls" in name for name in trained_names(model)) == trains


def test_resized_embeddings_are_not_new(tmp_path, caplog):
    logging.Logger.warning_once.cache_clear()
    config = LlamaConfig(**WIDE, num_key_value_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    model.resize_token_embeddings(70)
    get_peft_model(model, HoulsbyConfig(r=4))
    assert "They stay random" not in caplog.text


def test_the_recipes_other_methods_train_it_too(without_pooler):
    for method in ("lora", "linear", "layer_norm"):
        model = apply_method(load(without_pooler), MethodArguments(method=method), HoulsbyConfig())
        assert any("pooler" in name for name in trained_names(model)), method
