"""Files: what is in them, and that loading gives the same model in every way that users load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import perturb, tiny_bert
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from houlsby_peft import HoulsbyConfig


GOLDEN = Path(__file__).parents[1] / "data" / "golden_adapter"
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


def deterministic_base():
    """A BERT whose weights come from a formula, so that no version of a random generator matters."""
    model = tiny_bert(num_hidden_layers=4)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float64) * 0.7 + index
            parameter.copy_((torch.sin(values) * 0.2 + (parameter.dim() == 1)).reshape(parameter.shape))
    return model.eval()


@pytest.mark.parametrize("name", ["own", "shared"])
def test_adapters_of_version_0_1_still_load_and_give_the_recorded_logits(name, token_ids):
    model = PeftModel.from_pretrained(deterministic_base(), GOLDEN / name, adapter_name="old").eval()
    recorded = torch.tensor(json.loads((GOLDEN / name / "logits.json").read_text()))
    torch.testing.assert_close(model(token_ids).logits, recorded, atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    # Writes the golden adapters; only ever run when a new kind of adapter is added, never to make a test pass.
    ids = torch.randint(0, 99, (5, 7), generator=torch.Generator().manual_seed(0))
    for name, fields in {"own": {"train_layer_norm": "all"}, "shared": {"share_layers": 3}}.items():
        if not (GOLDEN / name).exists():
            model = get_peft_model(deterministic_base(), HoulsbyConfig(r=2, **fields)).eval()
            perturb(model)
            model.save_pretrained(GOLDEN / name)
            (GOLDEN / name / "README.md").unlink()
            (GOLDEN / name / "logits.json").write_text(json.dumps(model(ids).logits.tolist()))


def test_a_configuration_given_by_the_user_is_the_models_own(base_path, tmp_path):
    """As for PEFT's methods: what is changed in one of them is changed in the other."""
    config = HoulsbyConfig(r=4)
    model = get_peft_model(load_base(base_path), config)
    model.save_pretrained(tmp_path)
    assert model.peft_config["default"] is config
    loaded = PeftModel.from_pretrained(load_base(base_path), tmp_path, config=config)
    assert loaded.peft_config["default"] is config
    assert config.inference_mode
