"""The defaults of a configuration, what it refuses, and that it survives being copied and saved."""

from __future__ import annotations

import pytest
from peft import LoraConfig, PeftConfig, TaskType, get_peft_model

from edited_json import edited_json
from houlsby_peft import HoulsbyConfig
from model_states import trained_names
from tiny_models import tiny_bert


# The options, and a word of the rule.
REFUSED = [
    ({"r": 0}, "r must be"),
    ({"r": True}, "r"),
    ({"activation": "gellu"}, "activation"),
    ({"dropout": 1.0}, "dropout"),
    ({"share_layers": -1}, "share_layers"),
    ({"init_std": -0.01}, "init_std"),
    ({"init_weights": "gaussian"}, "init_weights"),
    ({"positions": ("ffn",)}, "positions"),
    ({"train_layer_norm": 1}, "train_layer_norm"),
    ({"layers_to_transform": [0, "1"]}, "layers_to_transform"),
    ({"rank_pattern": {"output": 0}}, "rank_pattern"),
    ({"rank_pattern": {"output": 8}, "share_layers": 1}, "rank_pattern"),
    ({"kind": "prefix"}, "kind"),
    ({"kind": "parallel", "target_modules": ["query"]}, "target_modules"),
    ({"invertible": "glow"}, "invertible"),
    ({"modules_to_save": "pooler"}, "modules_to_save"),
    ({"modules_to_save": [], "task_type": "SEQ_CLS"}, "modules_to_save"),
    ({"scaling": float("nan")}, "scaling"),
    ({"id2label": {1: "a", 2: "b"}}, "id2label"),
    ({"problem_type": "classification"}, "problem_type"),
    ({"kind": "ladder", "share_layers": 1}, "share_layers"),
    ({"kind": "ladder", "scaling": "learned"}, "scaling"),
    ({"kind": "ladder", "invertible": "nice"}, "invertible"),
    ({"kind": "ladder", "positions": ["attention"]}, "positions"),
    ({"kind": "ladder", "train_layer_norm": "all"}, "train_layer_norm"),
    ({"kind": "ladder", "trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"kind": "ladder", "target_modules": ["query"]}, "target_modules"),
    # Options of other methods, each with its counterpart.
    ({"lora_alpha": 1}, "scaling"),
    ({"lora_dropout": 1}, "dropout"),
    ({"bias": 1}, "leave it out"),
    ({"reduction_factor": 1}, "use r"),
    ({"layers": 1}, "layers_to_transform"),
    ({"unheard_of": 1}, "unheard_of"),
]


@pytest.mark.parametrize(("fields", "word"), REFUSED, ids=str)
def test_what_is_no_configuration_is_refused(fields, word):
    with pytest.raises((TypeError, ValueError), match=word):
        HoulsbyConfig(**fields)


def test_peft_trains_the_head_of_some_task_types_whatever_the_modules_to_save():
    """Why an empty list is refused with them; a user's own list stays the user's."""
    modules = ["bert.pooler"]
    config = HoulsbyConfig(task_type="SEQ_CLS", modules_to_save=modules)
    config.modules_to_save.clear()
    model = get_peft_model(tiny_bert(), config)
    assert any("classifier" in name for name in trained_names(model))
    assert modules == ["bert.pooler"]


def test_defaults_are_the_papers():
    config = HoulsbyConfig()
    assert (config.r, config.activation, config.init_std) == (64, "gelu", 0.01)
    assert (config.dropout, config.share_layers, config.train_layer_norm) == (0.0, 0, True)
    assert config.positions == ["attention", "feed_forward"]
    # Other kinds adapt what their papers adapt.
    assert HoulsbyConfig(kind="pfeiffer").positions == ["feed_forward"]
    assert HoulsbyConfig(kind="parallel").positions == ["feed_forward"]
    assert HoulsbyConfig(kind="pfeiffer", positions=("attention",)).positions == ["attention"]


def test_an_option_of_a_later_version_is_left_out(tmp_path):
    HoulsbyConfig(r=8).save_pretrained(tmp_path)
    with edited_json(tmp_path / "adapter_config.json") as fields:
        fields |= {"gated": True, "peft_version": "99.0"}
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


def test_the_configuration_of_another_method_is_read_as_peft_reads_it(tmp_path):
    LoraConfig(r=3).save_pretrained(tmp_path)
    assert HoulsbyConfig.from_pretrained(tmp_path) == LoraConfig.from_pretrained(tmp_path)
