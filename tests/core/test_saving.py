"""Files: what is in them, and that loading gives the same model in every way that users load."""

from __future__ import annotations

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from houlsby_peft import HoulsbyConfig
from tiny_models import perturb, tiny_bert


VARIANTS = [
    {},
    {"share_layers": 1},
    {"share_layers": 3},
    {"train_layer_norm": "all"},
    {"train_layer_norm": False, "positions": ("attention",)},
    {"layers_to_transform": [1, 3], "activation": "relu"},
    {"target_modules": ["intermediate.dense"], "rank_pattern": {r"layer\.2\.intermediate\.dense": 2}},
]


@pytest.fixture(scope="module")
def base_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    tiny_bert().save_pretrained(path)
    return str(path)


def load_base(base_path):
    return AutoModelForSequenceClassification.from_pretrained(base_path).eval()


@pytest.fixture(params=VARIANTS, ids=str)
def trained(request, base_path):
    model = get_peft_model(load_base(base_path), HoulsbyConfig(r=4, **request.param), adapter_name="mrpc").eval()
    perturb(model)
    return model


def test_every_way_of_loading_gives_the_same_logits_bit_for_bit(trained, base_path, tmp_path, token_ids):
    expected = trained(token_ids).logits
    trained.save_pretrained(tmp_path)
    path = str(tmp_path / "mrpc")
    loaded = {
        "same name": PeftModel.from_pretrained(load_base(base_path), path, adapter_name="mrpc"),
        "other name": PeftModel.from_pretrained(load_base(base_path), path, adapter_name="cola"),
        "low_cpu_mem_usage": PeftModel.from_pretrained(load_base(base_path), path, low_cpu_mem_usage=True),
        "AutoModel": AutoModelForSequenceClassification.from_pretrained(path, num_labels=3),
        "AutoPeftModel": AutoPeftModelForSequenceClassification.from_pretrained(path, num_labels=3),
    }
    for way, model in loaded.items():
        assert torch.equal(model.eval()(token_ids).logits, expected), way


def test_a_second_adapter_loads_beside_the_first(trained, tmp_path, token_ids):
    expected = trained(token_ids).logits
    trained.save_pretrained(tmp_path)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    trained.load_adapter(str(tmp_path / "mrpc"), "again")
    trained.set_adapter("again")
    assert torch.equal(trained(token_ids).logits, expected)


def saved_keys(model, path):
    model.save_pretrained(path)
    return set(load_file(path / "adapter_model.safetensors"))


def test_the_saved_keys_are_exactly_the_expected_set(tmp_path):
    weights = ["down_proj.weight", "down_proj.bias", "up_proj.weight", "up_proj.bias"]
    bert = "base_model.model.bert"
    own = {
        f"{bert}.encoder.layer.{i}.{place}.houlsby_adapter.{weight}"
        for i in range(4)
        for place in ("attention.output.dropout", "output.dropout")
        for weight in weights
    }
    norms = {
        f"{bert}.encoder.layer.{i}.{place}.houlsby_norm.{weight}"
        for i in range(4)
        for place in ("attention.output.LayerNorm", "output.LayerNorm")
        for weight in ("weight", "bias")
    }
    head = {"base_model.model.classifier.weight", "base_model.model.classifier.bias"}
    shared = {
        f"{bert}.encoder.layer.{i}.attention.output.dropout.houlsby_adapter.{weight}"
        for i in (0, 3)
        for weight in weights
    }
    embedding = {f"{bert}.embeddings.LayerNorm.houlsby_norm.{weight}" for weight in ("weight", "bias")}
    for i, (fields, keys) in enumerate(
        [
            ({}, own | norms | head),
            ({"share_layers": 3}, shared | norms | head),
            ({"train_layer_norm": "all"}, own | norms | head | embedding),
            ({"train_layer_norm": False, "modules_to_save": []}, own),
        ]
    ):
        assert saved_keys(get_peft_model(tiny_bert(), HoulsbyConfig(**fields)), tmp_path / str(i)) == keys


def test_an_adapter_named_like_the_beginning_of_a_part_is_saved_under_the_same_keys(tmp_path):
    # Whole parts are refused.
    expected = saved_keys(get_peft_model(tiny_bert(), HoulsbyConfig()), tmp_path)
    for name in ("out", "down_", "weigh"):
        model = get_peft_model(tiny_bert(), HoulsbyConfig(), adapter_name=name)
        model.save_pretrained(tmp_path)
        assert set(load_file(tmp_path / name / "adapter_model.safetensors")) == expected, name


def test_the_3_shared_file_of_bert_base_is_small(tmp_path):
    base = BertForSequenceClassification(BertConfig())
    model = get_peft_model(base, HoulsbyConfig(r=64, share_layers=3, train_layer_norm=False))
    model.save_pretrained(tmp_path)
    assert 396_544 * 4 < (tmp_path / "adapter_model.safetensors").stat().st_size < 1_650_000
    assert not (tmp_path / "config.json").exists()


def test_a_configuration_given_by_the_user_is_the_models_own_for_its_first_adapter():
    """As for PEFT's methods: what is changed in one of them is changed in the other."""
    config = HoulsbyConfig(r=4)
    assert get_peft_model(tiny_bert(), config).peft_config["default"] is config
    second = get_peft_model(tiny_bert(), config)
    assert second.peft_config["default"] == config
    assert second.peft_config["default"] is not config
