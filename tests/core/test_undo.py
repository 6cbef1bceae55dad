"""Whatever is refused or deleted leaves the model as it was, and what is added again is new."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from edited_json import edited_json
from houlsby_peft import HoulsbyConfig, HoulsbyLayer, HoulsbyModel
from houlsby_peft.heads.head import HoulsbyHead
from model_states import state_of, trained_names
from tiny_models import adapted, perturb, perturb_adapter, tiny_bert


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An adapter's folder, and the logits of its model."""
    folder = tmp_path_factory.mktemp("saved")
    model = adapted()
    model.save_pretrained(folder)
    return folder, model(IDS).logits


IDS = torch.arange(15).reshape(3, 5)


@pytest.mark.parametrize(
    ("options", "word"),
    [({"activation": "relu"}, "activation"), ({"id2label": {0: "x", 1: "y", 2: "z"}}, "id2label")],
)
def test_an_adapter_with_other_options_is_not_loaded_over_one(options, word, saved):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, **options)).eval()
    untouched = state_of(model)
    with pytest.raises(ValueError, match=word):
        model.load_adapter(saved[0], "default")
    assert state_of(model) == untouched
    model.delete_adapter("default")
    model.load_adapter(saved[0], "default")
    model.set_adapter("default")
    assert torch.equal(model(IDS).logits, saved[1])


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:You are trying")
def test_a_base_that_still_holds_an_adapter_in_more_places_takes_one_of_its_name(tmp_path):
    fewer = adapted(layers_to_transform=[0])
    fewer.save_pretrained(tmp_path)
    base = tiny_bert()
    get_peft_model(base, HoulsbyConfig(r=4))
    loaded = PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(loaded(IDS).logits, fewer(IDS).logits)


@pytest.mark.filterwarnings("ignore:Adapter second was active", "ignore:Already found")
def test_all_layers_follow_when_transformers_deletes_the_active_adapter():
    model = tiny_bert()
    for name, layers in {"first": [0, 1], "third": [2, 3], "second": [0, 1, 2, 3]}.items():
        model.add_adapter(HoulsbyConfig(r=4, layers_to_transform=layers), name)
        perturb_adapter(model, name, seed=3)
    alone = copy.deepcopy(model)
    model.set_adapter("second")
    model.delete_adapter("second")
    assert model.active_adapters() == ["first"]
    alone.set_adapter("first")
    assert torch.equal(model(IDS).logits, alone(IDS).logits)


class Normalized(torch.nn.Module):
    """A model with a batch norm."""

    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.out = torch.nn.Linear(6, 6)

    def forward(self, hidden):
        return self.out(self.norm(self.dense(hidden)))


def test_a_frozen_batch_norm_keeps_its_statistics(tmp_path):
    torch.manual_seed(0)
    base, inputs = Normalized(), torch.randn(8, 6)
    untouched = copy.deepcopy(base)
    model = adapted(base, r=2, target_modules=["dense", "out"])
    model.train()
    trained = model(inputs)
    # The normalization is the running statistics' in training as well.
    assert torch.equal(trained, model.eval()(inputs))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(copy.deepcopy(untouched), tmp_path).eval()
    assert torch.equal(loaded(inputs), trained)
    copied = copy.deepcopy(model)
    copied.delete_adapter("default")
    copied = copied.base_model.model
    assert torch.equal(model.train()(inputs), trained)
    expected = untouched.train()(inputs)
    assert torch.equal(copied.train()(inputs), expected)
    assert torch.equal(model.unload().train()(inputs), expected)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:You are trying")
def test_an_adapter_that_cannot_be_replaced_stays(monkeypatch):
    model = adapted()
    base = model.get_base_model()
    untouched, logits = state_of(model), model(IDS).logits

    def fail(*args, **kwargs):
        raise RuntimeError("in the middle")

    monkeypatch.setattr(HoulsbyModel, "add_parts", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        get_peft_model(base, HoulsbyConfig(r=3, share_layers=2))
    assert state_of(model) == untouched
    assert torch.equal(model(IDS).logits, logits)
    assert model.peft_config["default"].r == 4
    assert list(model.base_model.records) == ["default"]


def test_a_failed_adapter_that_reads_the_residual_input_leaves_no_reader(tmp_path):
    parallel = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, kind="parallel"))
    parallel.save_pretrained(tmp_path)
    with edited_json(tmp_path / "adapter_config.json") as config:
        config["r"] = 5
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4))
    with pytest.raises(ValueError, match="fit"):
        model.load_adapter(tmp_path, "parallel")
    layers = [module for module in model.modules() if hasattr(module, "residual_users")]
    assert layers
    assert not any(layer.residual_users for layer in layers)


def test_disabling_leaves_a_frozen_adapter_frozen(saved):
    frozen = PeftModel.from_pretrained(tiny_bert(), saved[0])
    with frozen.disable_adapter():
        assert not trained_names(frozen)
    assert not trained_names(frozen)


def test_an_adapter_that_is_set_while_all_are_disabled_trains_afterwards():
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4))
    names = trained_names(model)
    model.add_adapter("other", HoulsbyConfig(r=4))
    with model.disable_adapter():
        assert not trained_names(model)
        model.set_adapter("other")
    assert trained_names(model) == {name.replace(".default.", ".other.") for name in names}


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_a_head_of_ones_own_beside_another_method_is_refused():
    base = tiny_bert()
    base.add_adapter(LoraConfig(target_modules=["query"], modules_to_save=["classifier"]), "lora")
    with pytest.raises(ValueError, match="head of its own"):
        base.add_adapter(HoulsbyConfig(r=4, id2label={0: "a", 1: "b"}), "houlsby")


@pytest.mark.filterwarnings("ignore:Adapter second was active which is now deleted")
def test_another_adapter_and_its_head_take_the_place_of_a_deleted_one():
    """The deleted adapter has not trained the pooler, which the other one has."""
    model = get_peft_model(
        tiny_bert(), HoulsbyConfig(r=4, modules_to_save=["pooler", "classifier"]), "first"
    )
    model.add_adapter("second", HoulsbyConfig(r=4, modules_to_save=["classifier"]))
    perturb(model.eval())
    for name in ("first", "second"):
        model.set_adapter(name)
        perturb(model, seed=len(name))
    model.set_adapter("first")
    expected = model(IDS).logits
    model.set_adapter("second")
    assert not torch.allclose(model(IDS).logits, expected)
    model.delete_adapter("second")
    assert model.active_adapters == ["first"]
    assert torch.equal(model(IDS).logits, expected)


def test_a_layer_that_is_disabled_leaves_the_heads_enabled():
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4)).eval()
    layer = next(module for module in model.modules() if isinstance(module, HoulsbyLayer))
    layer.enable_adapters(False)
    heads = [module for module in model.modules() if isinstance(module, HoulsbyHead)]
    assert heads
    assert not any(head.disable_adapters for head in heads)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_compiled_base_model_saves_the_same_adapter(tmp_path):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4))
    model.save_pretrained(tmp_path / "plain")
    model.base_model.model = torch.compile(model.base_model.model)
    model.save_pretrained(tmp_path / "compiled")
    plain, compiled = (
        (tmp_path / name / "adapter_config.json").read_text() for name in ("plain", "compiled")
    )
    assert json.loads(plain)["recorded"] == json.loads(compiled)["recorded"]


def test_an_adapter_that_goes_on_training_has_dropout(tmp_path):
    """It is loaded into a model in evaluation mode, as LoRA's layers are."""
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, dropout=0.5))
    model.save_pretrained(tmp_path)
    model.eval()
    for name, is_trainable in (("goes_on", True), ("predicts", False)):
        model.load_adapter(tmp_path, name, is_trainable=is_trainable)
        layers = [module for module in model.modules() if isinstance(module, HoulsbyLayer)]
        assert {layer.houlsby_adapter[name].training for layer in layers} == {is_trainable}
        model.eval()
