"""The defaults of a configuration, what it refuses, and that it survives being copied and saved."""

from __future__ import annotations

import json

import numpy as np
import pytest
from peft import PeftConfig, TaskType, get_peft_model

from houlsby_peft import HoulsbyConfig
from tiny_models import tiny_bert


@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ({"r": 0}, "r", "at least 1"),
        ({"activation": "gellu"}, "activation", "'gelu'"),
        ({"dropout": 1.0}, "dropout", "[0, 1)"),
        ({"share_layers": -1}, "share_layers", "-1"),
        ({"init_std": -0.01}, "init_std", "-0.01"),
        ({"positions": ("ffn",)}, "positions", "feed_forward"),
        ({"rank_pattern": {"output": 0}}, "rank_pattern", "at least 1"),
        ({"rank_pattern": {"output": 8}, "share_layers": 1}, "rank_pattern", "share_layers=0"),
        (
            {"target_modules": ["query"], "kind": "parallel"},
            "target_modules",
            "select sub-layers with positions",
        ),
        ({"modules_to_save": [], "task_type": "SEQ_CLS"}, "modules_to_save", "leave task_type out"),
        ({"scaling": float("nan")}, "scaling", "learned"),
        ({"id2label": {1: "a", 2: "b"}}, "id2label", "from 0 on"),
    ],
)
def test_error_names_field_rule_and_value(fields, name, said):
    with pytest.raises(ValueError, match=rf"^HoulsbyConfig\.{name} must be .*; got .*\.$") as error:
        HoulsbyConfig(**fields)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("r", True), ("train_layer_norm", 1), ("layers_to_transform", [0, "1"]),
        ("modules_to_save", "pooler"), ("kind", "prefix"), ("invertible", "glow"),
        ("problem_type", "classification"), ("init_weights", "gaussian"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(name, value):
    with pytest.raises(TypeError, match=f"HoulsbyConfig.{name}"):
        HoulsbyConfig(**{name: value})


def test_peft_trains_the_head_of_some_task_types_whatever_the_modules_to_save():
    """Why an empty list is refused with them; a user's own list stays the user's."""
    given = ["bert.pooler"]
    config = HoulsbyConfig(task_type="SEQ_CLS", modules_to_save=given)
    config.modules_to_save.clear()
    model = get_peft_model(tiny_bert(), config)
    assert any(
        "classifier" in name for name, weight in model.named_parameters() if weight.requires_grad
    )
    assert given == ["bert.pooler"]


def test_defaults_are_the_papers():
    config = HoulsbyConfig()
    assert (config.r, config.activation, config.dropout, config.share_layers) == (
        64,
        "gelu",
        0.0,
        0,
    )
    assert (config.init_std, config.train_layer_norm) == (0.01, True)
    assert config.positions == ("attention", "feed_forward")
    # Other kinds adapt what their papers adapt.
    assert (
        HoulsbyConfig(kind="pfeiffer").positions
        == HoulsbyConfig(kind="parallel").positions
        == ("feed_forward",)
    )
    assert HoulsbyConfig(kind="pfeiffer", positions=("attention",)).positions == ("attention",)


def test_an_option_of_a_later_version_is_left_out(tmp_path):
    HoulsbyConfig(r=8).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "gated": True, "peft_version": "99.0"})
    )
    with pytest.warns(UserWarning, match="gated"):
        assert PeftConfig.from_pretrained(str(tmp_path)).r == 8


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 3, "activation": "tanh", "dropout": 0.25, "share_layers": 3, "init_std": 0.5,
         "init_weights": False},
        {"kind": "parallel", "scaling": "channel", "invertible": "nice", "train_layer_norm": "all",
         "extension": "gated"},
        {"positions": ("attention",), "layers_to_transform": [0, 7],
         "layers_pattern": ["layer", "block"], "exclude_modules": "embeddings.norm",
         "rank_pattern": {"output": 8}, "modules_to_save": ["pooler"]},
        {"target_modules": ["query", "output.dense"], "layers_to_transform": 3,
         "trainable_token_indices": [1, 5]},
        {"id2label": {0: "a\u2028\U0001f600", 1: ""}, "problem_type": "multi_label_classification",
         "two_layer_head": True, "task_type": TaskType.SEQ_CLS, "revision": "v1",
         "trainable_token_indices": {"embed.tokens": [2]}},
    ],
)  # fmt: skip
def test_a_configuration_survives_copying_and_its_file(fields, tmp_path):
    config = HoulsbyConfig(**fields)
    assert HoulsbyConfig(**config.to_dict()) == config
    config.save_pretrained(tmp_path)
    assert HoulsbyConfig.from_pretrained(tmp_path) == config
    assert PeftConfig.from_pretrained(tmp_path) == config


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("lora_alpha", "scaling"),
        ("lora_dropout", "dropout"),
        ("bias", "leave it out"),
        ("reduction_factor", "use r"),
        ("layers", "layers_to_transform"),
    ],
)
def test_an_option_of_another_method_is_answered_with_its_counterpart(name, remedy):
    with pytest.raises(TypeError, match=f"'{name}'.*{remedy}"):
        HoulsbyConfig(**{name: 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'unheard_of'"):
        HoulsbyConfig(unheard_of=1)


def test_numpy_arrays_and_numbers_are_taken():
    config = HoulsbyConfig(
        r=np.int64(4), layers_to_transform=np.array([0, 2]), dropout=np.float32(0.5)
    )
    assert (config.r, config.layers_to_transform, config.dropout) == (4, [0, 2], 0.5)
    json.dumps(config.to_dict())
