"""An adapter with a head of its own: other labels than the base model's, a hidden layer, the base unchanged."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import BertModel, RobertaConfig, RobertaForSequenceClassification

from houlsby_peft import HoulsbyConfig, TwoLayerHead
from tiny_models import perturb, tiny_bert


def labels(number: int) -> dict[int, str]:
    return dict(enumerate("abcdefgh"[:number]))


def tiny_roberta(**changes) -> RobertaForSequenceClassification:
    torch.manual_seed(0)
    options = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return RobertaForSequenceClassification(RobertaConfig(**options, intermediate_size=16, **changes)).eval()


@pytest.mark.parametrize("make", [tiny_bert, tiny_roberta])
def test_adapters_with_other_numbers_of_labels_on_one_base_model(make, token_ids, tmp_path):
    base = make(num_labels=2)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    with torch.no_grad():
        expected_of_base = base(token_ids).logits
    model = get_peft_model(base, HoulsbyConfig(r=4), adapter_name="two").eval()
    perturb(model, seed=1)
    model.add_adapter("five", HoulsbyConfig(r=4, id2label=labels(5)))
    model.set_adapter("five")
    perturb(model, seed=2)
    model.add_adapter("one", HoulsbyConfig(r=4, id2label={0: "score"}))
    alone = {}
    for name, outputs in {"two": 2, "five": 5, "one": 1}.items():
        model.set_adapter(name)
        alone[name] = model(token_ids).logits
        assert alone[name].shape == (5, outputs)
        heads = {key for key, weight in model.named_parameters() if weight.requires_grad and "modules_to_save" in key}
        assert heads
        assert all(f".{name}." in key for key in heads)
    mixed = model(token_ids, adapter_names=["five", "two", "one", "__base__", "five"]).logits
    torch.testing.assert_close(mixed[[0, 4]], alone["five"][[0, 4]], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixed[1, :2], alone["two"][1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixed[2, :1], alone["one"][2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixed[3, :2], expected_of_base[3], atol=1e-5, rtol=1e-5)

    # The base model is as before, with adapters disabled and after unload.
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(token_ids).logits, expected_of_base)
    model.save_pretrained(tmp_path)
    restored = model.unload()
    assert {name: tuple(weight.shape) for name, weight in restored.state_dict().items()} == {
        name: tuple(weight.shape) for name, weight in before.items()
    }
    assert all(torch.equal(weight, before[name]) for name, weight in restored.state_dict().items())

    # Each loads on a base model with another number of labels, alone and beside another.
    loaded = PeftModel.from_pretrained(make(num_labels=3), tmp_path / "five", adapter_name="task_1")
    assert loaded.peft_config["task_1"].labels == labels(5)
    loaded.load_adapter(tmp_path / "one", "task_2")
    for folder, name in (("five", "task_1"), ("one", "task_2")):
        file = load_file(tmp_path / folder / "adapter_model.safetensors")
        own = {key: value for key, value in loaded.state_dict().items() if f"modules_to_save.{name}." in key}
        assert own
        for key, value in own.items():
            assert torch.equal(value, file[key.replace(f"modules_to_save.{name}.", "")])


def test_a_new_head_is_initialized_as_the_models_own():
    model = get_peft_model(tiny_bert(initializer_range=0.02), HoulsbyConfig(r=4, id2label=labels(8)))
    head = model.base_model.model.classifier.modules_to_save["default"]
    assert head.bias.eq(0).all()
    assert 0.01 < head.weight.std() < 0.03
    assert head.weight.requires_grad


def test_a_hidden_layer_for_one_adapter_alone(token_ids):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, two_layer_head=True), adapter_name="deep")
    model.add_adapter("plain", HoulsbyConfig(r=4))
    copies = model.base_model.model.classifier.modules_to_save
    assert isinstance(copies["deep"], TwoLayerHead)
    assert isinstance(copies["plain"], torch.nn.Linear)
    assert model.peft_config["deep"].record.two_layer_head
    assert not model.peft_config["plain"].record.two_layer_head
    assert isinstance(model.unload().classifier, torch.nn.Linear)


def test_a_model_without_a_head_cannot_give_one():
    config = tiny_bert().config
    with pytest.raises(ValueError, match="BertModel has no head that is trained"):
        get_peft_model(BertModel(config), HoulsbyConfig(r=4, id2label=labels(5)))
    model = BertModel(config)
    with pytest.raises(ValueError, match="BertModel has no head that is trained"):
        get_peft_model(model, HoulsbyConfig(r=4, two_layer_head=True))
    assert not hasattr(model, "peft_config") or not model.peft_config
