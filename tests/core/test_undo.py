"""Whatever is refused or deleted leaves the model as it was, and what is added again is new."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BertModel

from houlsby_peft import HoulsbyConfig, HoulsbyLayer, HoulsbyModel
from houlsby_peft.heads.head import HoulsbyHead
from tiny_models import perturb, perturb_adapter, tiny_bert


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An adapter's folder, and the logits of its model."""
    folder = tmp_path_factory.mktemp("saved")
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4)).eval()
    perturb(model)
    model.save_pretrained(folder)
    return folder, model(IDS).logits


IDS = torch.arange(15).reshape(3, 5)


def without_weights(folder):
    (folder / "adapter_model.safetensors").unlink()


def with_tokens_that_the_file_lacks(folder):
    change_config(folder, trainable_token_indices=[1])


def with_damaged_weights(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def with_another_size(folder):
    change_config(folder, r=5)


def change_config(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def state(model):
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    return weights, trained, [type(module) for module in model.modules()]


def assert_same(before, after):
    assert before[1:] == after[1:]
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][name], weight) for name, weight in after[0].items())


@pytest.mark.parametrize(
    "damage",
    [
        without_weights,
        with_tokens_that_the_file_lacks,
        with_damaged_weights,
        with_another_size,
    ],
)
class TestWhatCannotBeLoadedLeavesNothing:
    @pytest.fixture
    def damaged(self, saved, damage, tmp_path):
        folder = shutil.copytree(saved[0], tmp_path / "damaged")
        damage(folder)
        return str(folder)

    def test_in_a_base_model(self, damaged):
        base = tiny_bert()
        before = state(base)
        with pytest.raises(Exception, match=r"."):
            PeftModel.from_pretrained(base, damaged)
        assert_same(before, state(base))
        assert not hasattr(base, "peft_config")

    def test_beside_another_adapter(self, damaged):
        model = get_peft_model(tiny_bert(), HoulsbyConfig(r=3)).eval()
        before, logits = state(model), model(IDS).logits
        for name in ("bad", "bad", "worse"):
            with pytest.raises(Exception, match=r"."):
                model.load_adapter(damaged, name)
        assert_same(before, state(model))
        assert list(model.peft_config) == list(model.base_model.records) == ["default"]
        assert model.active_adapters == ["default"]
        assert torch.equal(model(IDS).logits, logits)


def test_an_adapter_with_other_options_is_not_loaded_over_one(saved):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, activation="relu")).eval()
    before = state(model)
    with pytest.raises(ValueError, match=r"activation.*delete_adapter"):
        model.load_adapter(saved[0], "default")
    assert_same(before, state(model))
    model.delete_adapter("default")
    model.load_adapter(saved[0], "default")
    model.set_adapter("default")
    assert torch.equal(model(IDS).logits, saved[1])


def test_an_adapter_with_other_classes_is_not_loaded_over_one(saved):
    names = {0: "x", 1: "y", 2: "z"}
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, id2label=names))
    with pytest.raises(ValueError, match="labels"):
        model.load_adapter(saved[0], "default")


def test_a_checkpoint_is_loaded_over_its_own_adapter(saved):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4)).eval()
    model.load_adapter(saved[0], "default", is_trainable=True)  # as the Trainer does at the end
    assert torch.equal(model(IDS).logits, saved[1])


def test_options_given_to_from_pretrained_win(saved):
    config = HoulsbyConfig.from_pretrained(saved[0])
    config.scaling = 2.0
    model = PeftModel.from_pretrained(tiny_bert(), saved[0], config=config)
    assert model.peft_config["default"] is config
    branches = [layer.bottleneck("default").scaling for layer in layers_of(model)]
    assert set(branches) == {2.0}


def layers_of(model):
    return [module for module in model.modules() if hasattr(module, "houlsby_adapter")]


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:You are trying")
@pytest.mark.parametrize("options", [{}, {"trainable_token_indices": [1, 2]}])
def test_get_peft_model_on_one_base_makes_everything_anew(options):
    base, losses = tiny_bert(), []
    expected = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, init_std=0, **options))
    expected_loss = expected(IDS, labels=IDS[:, 0] % 3).loss
    for _ in range(3):
        model = get_peft_model(base, HoulsbyConfig(r=4, init_std=0, **options))
        losses.append(model(IDS, labels=IDS[:, 0] % 3).loss.item())
        perturb(model)
    assert losses == [expected_loss.item()] * 3


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:You are trying")
def test_a_base_that_still_holds_an_adapter_in_more_places_takes_one_of_its_name(tmp_path):
    fewer = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, layers_to_transform=[0])).eval()
    perturb(fewer)
    fewer.save_pretrained(tmp_path)
    base = tiny_bert()
    get_peft_model(base, HoulsbyConfig(r=4))
    loaded = PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(loaded(IDS).logits, fewer(IDS).logits)


def test_one_configuration_serves_adapters_of_several_models(tmp_path):
    config = HoulsbyConfig(r=4)
    models = {number: get_peft_model(tiny_bert(num_labels=number), config) for number in (2, 5)}
    for number, model in models.items():
        assert model.peft_config["default"] is config
        model.save_pretrained(tmp_path / str(number))
    for number in models:
        record = HoulsbyConfig.from_pretrained(tmp_path / str(number)).saved.record
        assert len(record.id2label) == number
    third = get_peft_model(tiny_bert(num_labels=4), config)
    assert len(third.base_model.records["default"].id2label) == 4


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


def test_disabling_leaves_a_frozen_adapter_frozen(saved):
    def count(model):
        return sum(weight.requires_grad for weight in model.parameters())

    frozen = PeftModel.from_pretrained(tiny_bert(), saved[0])
    trained = get_peft_model(tiny_bert(), HoulsbyConfig(r=4))
    before = count(trained)
    for model in (frozen, trained):
        with model.disable_adapter():
            assert count(model) == 0
    assert (count(frozen), count(trained)) == (0, before)
    trained.add_adapter("other", HoulsbyConfig(r=4))
    with trained.disable_adapter():
        trained.set_adapter("other")
    names = [name for name, weight in trained.named_parameters() if weight.requires_grad]
    assert names
    assert all(".other." in name for name in names)


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
    model = get_peft_model(base, HoulsbyConfig(r=2, target_modules=["dense", "out"]))
    perturb(model)
    model.train()
    trained = model(inputs)
    # The normalization is the running statistics' in training as well.
    assert torch.equal(trained, model.eval()(inputs))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(copy.deepcopy(untouched), tmp_path).eval()
    assert torch.equal(loaded(inputs), trained)
    unloaded = model.unload().train()
    assert torch.equal(unloaded(inputs), untouched.train()(inputs))


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:You are trying")
def test_an_adapter_that_cannot_be_replaced_stays(monkeypatch):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4)).eval()
    perturb(model)
    base = model.get_base_model()
    before, logits = state(model), model(IDS).logits

    def fail(*args, **kwargs):
        raise RuntimeError("in the middle")

    monkeypatch.setattr(HoulsbyModel, "add_parts", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        get_peft_model(base, HoulsbyConfig(r=3, share_layers=2))
    assert_same(before, state(model))
    assert torch.equal(model(IDS).logits, logits)
    assert model.peft_config["default"].r == 4
    assert list(model.base_model.records) == ["default"]


def test_a_failed_adapter_that_reads_the_residual_input_leaves_no_reader(tmp_path):
    parallel = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, kind="parallel"))
    parallel.save_pretrained(tmp_path)
    with_another_size(tmp_path)
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4))
    with pytest.raises(ValueError, match="fit"):
        model.load_adapter(tmp_path, "parallel")
    layers = [module for module in model.modules() if hasattr(module, "residual_users")]
    assert layers
    assert not any(layer.residual_users for layer in layers)


def test_a_parallel_adapter_whose_file_lacks_the_entry_is_refused(tmp_path):
    """Its bottlenecks would read the sub-layer's output."""
    get_peft_model(tiny_bert(), HoulsbyConfig(r=4, kind="parallel")).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    for place in config["recorded"]["places"]:
        place.pop("entry", None)
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="residual input"):
        PeftModel.from_pretrained(tiny_bert(), tmp_path)


def test_a_recorded_base_of_another_form_is_refused_in_plain_words(tmp_path):
    get_peft_model(tiny_bert(), HoulsbyConfig(r=4)).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    config["recorded"]["base"] = {"config": []}
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="fingerprint"):
        PeftModel.from_pretrained(tiny_bert(), tmp_path)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_a_head_of_ones_own_beside_another_method_is_refused():
    base = tiny_bert()
    base.add_adapter(LoraConfig(target_modules=["query"], modules_to_save=["classifier"]), "lora")
    with pytest.raises(ValueError, match="head of its own"):
        base.add_adapter(HoulsbyConfig(r=4, id2label={0: "a", 1: "b"}), "houlsby")


def test_a_changed_list_of_a_loaded_configuration_makes_a_new_adapter(tmp_path):
    config = HoulsbyConfig(r=4, target_modules=["output.dense"])
    get_peft_model(tiny_bert(), config).save_pretrained(tmp_path)
    loaded = HoulsbyConfig.from_pretrained(tmp_path)
    assert loaded.loaded is not None
    loaded.target_modules.append("query")
    assert loaded.loaded is None


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


def test_a_saved_pooler_is_loaded_into_another_class_with_the_same_encoder(tmp_path):
    base = tiny_bert()
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, HoulsbyConfig(r=4, modules_to_save=["pooler", "classifier"]))
    perturb(model.eval())
    model.save_pretrained(tmp_path / "adapter")
    encoder = BertModel.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(encoder, tmp_path / "adapter").eval()
    expected = model.get_base_model().bert(IDS).pooler_output
    assert torch.equal(loaded(IDS).pooler_output, expected)


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
