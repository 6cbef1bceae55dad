"""The defaults of a configuration, and what it refuses."""

from __future__ import annotations

import json

import pytest
from peft import PeftConfig, get_peft_model

from houlsby_peft import HoulsbyConfig
from tiny_models import tiny_bert


@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ({"r": 0}, "r", "at least 1"),
        ({"r": True}, "r", "whole number"),
        ({"activation": "gellu"}, "activation", "gelu, "),
        ({"dropout": 1.0}, "dropout", "[0, 1)"),
        ({"share_layers": -1}, "share_layers", "-1"),
        ({"init_std": -0.01}, "init_std", "-0.01"),
        ({"train_layer_norm": 1}, "train_layer_norm", "'all'"),
        ({"positions": ("ffn",)}, "positions", "feed_forward"),
        ({"rank_pattern": {"output": 0}}, "rank_pattern", "at least 1"),
        ({"rank_pattern": {"output": 8}, "share_layers": 1}, "rank_pattern", "share_layers=0"),
        ({"layers_to_transform": []}, "layers_to_transform", "None adapts all"),
        ({"layers_to_transform": [0, "1"]}, "layers_to_transform", "counted from 0"),
        ({"layers_pattern": "layer"}, "layers_pattern", "layers_to_transform"),
        ({"target_modules": ["query"], "kind": "parallel"}, "target_modules", "Select sub-layers with positions"),
        ({"modules_to_save": [], "task_type": "SEQ_CLS"}, "modules_to_save", "Leave task_type out"),
    ],
)
def test_error_names_field_rule_value_and_remedy(fields, name, said):
    with pytest.raises(ValueError, match=rf"^HoulsbyConfig\.{name} must be .*; got .*\. .*\.$") as error:
        HoulsbyConfig(**fields)
    assert said in str(error.value)


def test_peft_trains_the_head_of_some_task_types_whatever_the_modules_to_save():
    """Why an empty list is refused with them; a user's own list stays the user's."""
    given = ["bert.pooler"]
    config = HoulsbyConfig(task_type="SEQ_CLS", modules_to_save=given)
    config.modules_to_save.clear()
    model = get_peft_model(tiny_bert(), config)
    assert any("classifier" in name for name, weight in model.named_parameters() if weight.requires_grad)
    assert given == ["bert.pooler"]


def test_defaults_are_the_papers():
    config = HoulsbyConfig()
    assert (config.r, config.activation, config.dropout, config.share_layers) == (64, "gelu", 0.0, 0)
    assert (config.init_std, config.train_layer_norm) == (0.01, True)
    assert config.positions == ("attention", "feed_forward")
    # Other kinds adapt what their papers adapt.
    assert HoulsbyConfig(kind="pfeiffer").positions == HoulsbyConfig(kind="parallel").positions == ("feed_forward",)
    assert HoulsbyConfig(kind="pfeiffer", positions=("attention",)).positions == ("attention",)


@pytest.mark.parametrize(("name", "said"), [("shared_layers", "Did you mean share_layers"), ("lora_alpha", "help")])
def test_an_unknown_option_is_refused_and_one_of_a_later_version_left_out(name, said, tmp_path):
    with pytest.raises(TypeError, match=said):
        HoulsbyConfig(**{name: 3})
    HoulsbyConfig(r=8).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: 3, "peft_version": "99.0"}))
    with pytest.warns(UserWarning, match=name):
        assert PeftConfig.from_pretrained(str(tmp_path)).r == 8
