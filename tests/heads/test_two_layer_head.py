"""The head with a hidden layer: its size, its formula, and that a saved adapter gets it back."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

import houlsby_peft
from houlsby_peft import HoulsbyConfig
from houlsby_peft.heads.new_heads import put_two_layer_head
from hub_models import LABELS, make_adapter, save_adapter
from tiny_models import perturb, tiny_bert


TEXTS = ["The soup was late and cold.", "Is the menu in town?"]


def test_the_size_that_mohebbi_and_rajaei_report_for_bert_base():
    """3,006,720 without the last layer, which here has 2 classes: 768 x 2 weights and 2 biases."""
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig())
        put_two_layer_head(model)
        model = get_peft_model(model, HoulsbyConfig(task_type="SEQ_CLS", two_layer_head=True))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert sum(weight.numel() for weight in trained.values()) == 3_008_258
    last = [weight.numel() for name, weight in trained.items() if ".out_proj." in name]
    assert sum(last) == 768 * 2 + 2
    assert 3_008_258 - sum(last) == 3_006_720


def test_its_formula_and_its_first_weights():
    model = tiny_bert(hidden_dropout_prob=0.25)
    put_two_layer_head(model)
    head = model.classifier
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    hidden = torch.tanh(x @ head.dense.weight.T + head.dense.bias)
    expected = hidden @ head.out_proj.weight.T + head.out_proj.bias
    torch.testing.assert_close(head(x), expected)
    assert head.dropout.p == 0.25
    assert not head.training
    assert head.dense.bias.abs().max() == 0
    assert head.dense.weight.std().item() == pytest.approx(model.config.initializer_range, rel=0.1)
    put_two_layer_head(model)
    assert model.classifier is head


def test_a_head_that_is_not_one_linear_layer_stays():
    with torch.device("meta"):
        model = RobertaForSequenceClassification(RobertaConfig(num_hidden_layers=1))
    with pytest.raises(ValueError, match="RobertaClassificationHead"):
        put_two_layer_head(model)


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    """The folders of a base model and of an adapter with such a head, and the logits that it gives
    for TEXTS.
    """
    folder, head = tmp_path_factory.mktemp("adapter"), {"num_labels": 3}
    options = {"task_type": "SEQ_CLS", "id2label": dict(enumerate(LABELS)), "two_layer_head": True}
    model = save_adapter(folder, base, head=head, **options)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(folder)
    return base, folder, logits(model, tokenizer)


def logits(model, tokenizer):
    with torch.no_grad():
        return model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits


@pytest.mark.parametrize("names", [["linear", "two_layer"], ["two_layer", "linear"]], ids=str)
def test_heads_of_both_kinds_on_one_base_model(saved, tmp_path, names):
    base, folder, expected = saved
    linear = make_adapter(tmp_path / "linear", base, str(base))
    AutoTokenizer.from_pretrained(base).save_pretrained(linear)
    folders = {"linear": linear, "two_layer": folder}
    alone = houlsby_peft.load(linear)
    expected = {"linear": logits(alone.model, alone.tokenizer), "two_layer": expected}
    first = houlsby_peft.load(folders[names[0]])
    second = houlsby_peft.load(folders[names[1]], beside=first)
    for name, adapter in zip(names, (first, second), strict=True):
        adapter.model.set_adapter(adapter.name)
        assert torch.equal(logits(adapter.model, adapter.tokenizer), expected[name]), name
    assert type(first.model.unload().classifier) is torch.nn.Linear, "the base model's own"


def test_it_is_recorded_where_the_configuration_does_not_tell(saved, tmp_path):
    base, _, _ = saved
    config = HoulsbyConfig(task_type="SEQ_CLS", r=4)
    plain = get_peft_model(AutoModelForSequenceClassification.from_pretrained(base), config)
    assert not plain.peft_config["default"].two_layer_head
    model = AutoModelForSequenceClassification.from_pretrained(base)
    put_two_layer_head(model)
    model = get_peft_model(model, config).eval()
    perturb(model)
    model.save_pretrained(tmp_path)
    loaded = houlsby_peft.load(tmp_path)
    assert torch.equal(logits(loaded.model, loaded.tokenizer), logits(model, loaded.tokenizer))


@pytest.mark.parametrize("labels", [2, 3])
def test_peft_alone_loads_it_whatever_the_base_models_head(saved, labels):
    base, folder, expected = saved
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    model = PeftModel.from_pretrained(model, folder).eval()
    assert torch.equal(logits(model, AutoTokenizer.from_pretrained(base)), expected)
