"""What a configuration accepts, refuses and survives."""

from __future__ import annotations

import json

import pytest
from peft import PeftConfig, PeftType, TaskType, get_peft_config, get_peft_model
from transformers import BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification

from houlsby_peft import HoulsbyConfig
from tiny_models import tiny_bert


@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ({"r": 0}, "r", "at least 1"),
        ({"r": -8}, "r", "-8"),
        ({"r": 2.5}, "r", "2.5"),
        ({"r": True}, "r", "whole number"),
        ({"r": "64"}, "r", "'64'"),
        ({"activation": "gellu"}, "activation", "'gellu'"),
        ({"activation": ""}, "activation", "gelu"),
        ({"dropout": 1.0}, "dropout", "[0, 1)"),
        ({"dropout": -0.1}, "dropout", "-0.1"),
        ({"dropout": None}, "dropout", "None"),
        ({"share_layers": -1}, "share_layers", "-1"),
        ({"share_layers": 1.5}, "share_layers", "whole number"),
        ({"init_std": -0.01}, "init_std", "-0.01"),
        ({"train_layer_norm": "some"}, "train_layer_norm", "'all'"),
        ({"train_layer_norm": 1}, "train_layer_norm", "got 1"),
        ({"positions": ()}, "positions", "()"),
        ({"positions": ("ffn",)}, "positions", "feed_forward"),
        ({"positions": 3}, "positions", "(3,)"),
        ({"rank_pattern": {"output": 0}}, "rank_pattern", "at least 1"),
        ({"rank_pattern": {"output": 8}, "share_layers": 1}, "rank_pattern", "share_layers=0"),
        ({"layers_to_transform": -1}, "layers_to_transform", "-1"),
        ({"layers_to_transform": []}, "layers_to_transform", "None adapts all"),
        ({"layers_to_transform": [0, "1"]}, "layers_to_transform", "counted from 0"),
        ({"layers_pattern": "layer"}, "layers_pattern", "layers_to_transform"),
        ({"modules_to_save": [], "task_type": "SEQ_CLS"}, "modules_to_save", "SEQ_CLS"),
        ({"modules_to_save": [], "task_type": "TOKEN_CLS"}, "modules_to_save", "Leave task_type out"),
        ({"modules_to_save": [], "task_type": "QUESTION_ANS"}, "modules_to_save", "[]"),
    ],
)
def test_error_names_field_rule_value_and_remedy(fields, name, said):
    with pytest.raises(ValueError, match=rf"^HoulsbyConfig\.{name} must be .*; got .*\. .*\.$") as error:
        HoulsbyConfig(**fields)
    assert said in str(error.value)


@pytest.mark.parametrize("task_type", ["SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS"])
def test_peft_trains_the_head_of_these_task_types_whatever_the_modules_to_save(task_type):
    """Why an empty list is refused with them; a user's own list stays the user's."""
    given = ["bert.pooler"]
    config = HoulsbyConfig(task_type=task_type, modules_to_save=given)
    classes = {"SEQ_CLS": BertForSequenceClassification, "TOKEN_CLS": BertForTokenClassification}
    base = classes.get(task_type, BertForQuestionAnswering)(tiny_bert().config)
    config.modules_to_save.clear()
    model = get_peft_model(base, config)
    head = "qa_outputs" if task_type == "QUESTION_ANS" else "classifier"
    assert any(head in name for name, weight in model.named_parameters() if weight.requires_grad)
    assert given == ["bert.pooler"]


def test_unknown_activation_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"gelu.*relu.*tanh"):
        HoulsbyConfig(activation="nope")


def test_defaults_are_the_papers():
    config = HoulsbyConfig()
    assert (config.r, config.activation, config.dropout, config.share_layers) == (64, "gelu", 0.0, 0)
    assert (config.init_std, config.train_layer_norm) == (0.01, True)
    assert config.positions == ("attention", "feed_forward")


def test_a_single_position_may_be_written_bare_and_sets_get_a_stable_order():
    assert HoulsbyConfig(positions="attention").positions == ("attention",)
    assert HoulsbyConfig(target_modules={"b", "a"}).target_modules == ["a", "b"]
    assert HoulsbyConfig(layers_to_transform=range(2)).layers_to_transform == [0, 1]


FULL = {
    "r": 8,
    "activation": "relu",
    "dropout": 0.1,
    "share_layers": 3,
    "init_std": 1e-3,
    "train_layer_norm": "all",
    "positions": ("feed_forward",),
    "target_modules": ["output.dropout"],
    "exclude_modules": r".*\.3\..*",
    "layers_to_transform": [0, 1],
    "layers_pattern": "layer",
    "modules_to_save": ["pooler"],
    "task_type": TaskType.SEQ_CLS,
}


@pytest.mark.parametrize("fields", [{}, FULL])
def test_survives_json(tmp_path, fields):
    config = HoulsbyConfig(**fields)
    config.save_pretrained(tmp_path)
    assert HoulsbyConfig.from_pretrained(tmp_path) == config
    assert PeftConfig.from_pretrained(tmp_path) == config
    assert get_peft_config(json.loads((tmp_path / "adapter_config.json").read_text())) == config
    assert PeftConfig.from_pretrained(tmp_path).peft_type is PeftType("HOULSBY")


def test_unknown_keys_of_a_newer_version_are_ignored_with_a_warning(tmp_path):
    HoulsbyConfig(r=8).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "field_of_the_future": 1}))
    with pytest.warns(UserWarning, match="field_of_the_future"):
        assert PeftConfig.from_pretrained(tmp_path).r == 8


def test_an_invalid_file_is_refused_with_the_same_error(tmp_path):
    HoulsbyConfig(r=8).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "r": 0}))
    with pytest.raises(ValueError, match=r"HoulsbyConfig\.r must be"):
        PeftConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(("name", "said"), [("shared_layers", "Did you mean share_layers"), ("lora_alpha", "help")])
def test_an_unknown_option_is_refused_and_one_of_a_later_version_left_out(name, said, tmp_path):
    with pytest.raises(TypeError, match=said):
        HoulsbyConfig(**{name: 3})
    HoulsbyConfig(r=8).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: 3, "peft_version": "99.0"}))
    with pytest.warns(UserWarning, match=name):
        assert PeftConfig.from_pretrained(str(tmp_path)).r == 8
