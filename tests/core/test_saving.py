"""What is in the files; `test_contract.py` and `test_with_transformers.py` load them."""

from __future__ import annotations

from peft import get_peft_model
from safetensors.torch import load_file

from houlsby_peft import HoulsbyConfig
from tiny_models import tiny_bert


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
        get_peft_model(tiny_bert(), HoulsbyConfig(**fields)).save_pretrained(tmp_path / str(i))
        assert load_file(tmp_path / str(i) / "adapter_model.safetensors").keys() == keys
        # It would make transformers look for the base model's weights in the folder.
        assert not (tmp_path / str(i) / "config.json").exists()
