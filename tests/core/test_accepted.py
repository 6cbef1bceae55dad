"""Legitimate uses that an adapter of this method must not refuse, and what a failed one leaves
behind: nothing.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from peft import (
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from transformers import AutoModelForSequenceClassification, pipeline

import houlsby_peft
from houlsby_peft import HoulsbyConfig, HoulsbyLayer
from model_states import trained_names
from tiny_models import adapted, perturb, tiny_bert


def test_values_of_numpy_and_of_json_are_pythons(tmp_path):
    config = HoulsbyConfig(
        r=np.int64(8),
        dropout=np.float32(0.5),
        layers_to_transform=np.arange(12),
        rank_pattern={"output": np.int32(4)},
        id2label={np.int64(1): "b", np.int64(0): "a"},
    )
    assert (config.r, config.dropout, config.rank_pattern) == (8, 0.5, {"output": 4})
    assert config.layers_to_transform == list(range(12))
    config.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_bytes(
        b"\xef\xbb\xbf" + json.dumps({**json.loads(file.read_text()), "r": 8.0}).encode()
    )
    assert HoulsbyConfig.from_pretrained(tmp_path) == config
    assert HoulsbyConfig(layers_to_transform=range(2)).layers_to_transform == [0, 1]
    assert HoulsbyConfig(layers_to_transform={10, 9}).layers_to_transform == [9, 10]
    assert HoulsbyConfig(target_modules={"b", "a"}).target_modules == ["a", "b"]
    assert HoulsbyConfig(positions=("feed_forward", "attention")) == HoulsbyConfig()
    assert HoulsbyConfig(positions="attention").positions == ["attention"]


def test_an_adapters_name_may_be_part_of_the_methods_names():
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4), "out")
    for name in ("down_", "weigh"):
        model.add_adapter(name, HoulsbyConfig(r=4))
    keys = get_peft_model_state_dict(model, adapter_name="out").keys()
    for name in ("down_", "weigh"):
        assert get_peft_model_state_dict(model, adapter_name=name).keys() == keys


def test_pickled_weights_are_written_and_never_read(tmp_path):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4))
    with pytest.warns(UserWarning, match="card is not written"):
        model.save_pretrained(tmp_path, safe_serialization=False)
    with pytest.raises(ValueError, match="safe_serialization"):
        PeftModel.from_pretrained(tiny_bert(), tmp_path)


run_again = pytest.mark.filterwarnings(
    "ignore:Already found a `peft_config` attribute in the model",
    "ignore:You are trying to modify a model with PEFT for a second time",
)


@run_again
@pytest.mark.parametrize(
    ("first", "second"), [({}, {"share_layers": 1}), ({"share_layers": 3}, {})], ids=str
)
def test_a_cell_that_runs_again_makes_the_adapter_again(first, second, token_ids):
    """The file is that of an adapter on the base model."""
    model = adapted(**first)
    again = get_peft_model(model, HoulsbyConfig(r=4, **second)).eval()
    assert list(again.peft_config) == ["default"]
    fresh = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, **second)).eval()
    assert again.get_nb_trainable_parameters() == fresh.get_nb_trainable_parameters()
    perturb(again)
    set_peft_model_state_dict(fresh, get_peft_model_state_dict(again))
    assert torch.equal(fresh(token_ids).logits, again(token_ids).logits)


@run_again
def test_a_cell_that_runs_again_starts_its_tokens_again(token_ids):
    config = HoulsbyConfig(r=4, init_std=0, trainable_token_indices=[1, 2])
    model = get_peft_model(tiny_bert(), config)
    expected, trained = model(token_ids).logits, trained_names(model)
    perturb(model)
    assert not torch.equal(model(token_ids).logits, expected)
    again = get_peft_model(model, config)
    assert torch.equal(again(token_ids).logits, expected)
    assert trained_names(again) == trained


@pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"),
    reason="transformers compiles no model with a torch before 2.7",
)
def test_a_compiled_model_gets_an_adapter_by_its_tensors(token_ids):
    source = adapted(tiny_bert(num_hidden_layers=1))
    weights = {
        key.removeprefix("base_model.model."): value
        for key, value in get_peft_model_state_dict(source).items()
    }
    compiled = torch.compile(tiny_bert(num_hidden_layers=1), backend="eager")
    keys_of_compiled = {f"_orig_mod.{key}": value for key, value in weights.items()}
    model = inject_adapter_in_model(HoulsbyConfig(r=4), compiled, state_dict=keys_of_compiled)
    set_peft_model_state_dict(model._orig_mod, weights)
    torch.testing.assert_close(model.eval()(token_ids).logits, source(token_ids).logits)


def test_weights_of_some_layers_give_an_adapter_in_these_alone(token_ids):
    """They share a bottleneck, whose weights are at the first of its places."""
    options = {"r": 4, "share_layers": 2, "init_weights": False}
    upper = HoulsbyConfig(**options, layers_to_transform=[2, 3])
    source = get_peft_model(tiny_bert(num_hidden_layers=4), upper).eval()
    perturb(source)
    weights = {
        key.removeprefix("base_model.model."): value
        for key, value in get_peft_model_state_dict(source).items()
    }
    base = tiny_bert(num_hidden_layers=4)
    model = inject_adapter_in_model(HoulsbyConfig(**options), base, state_dict=weights)
    adapted = [name for name, part in model.named_modules() if isinstance(part, HoulsbyLayer)]
    ends = ("attention.output.dropout", "output.dropout")
    assert adapted == [f"bert.encoder.layer.{index}.{end}" for index in (2, 3) for end in ends]
    set_peft_model_state_dict(model, weights)
    torch.testing.assert_close(model.eval()(token_ids).logits, source(token_ids).logits)


def test_a_pipeline_predicts_the_adapters_classes(base, tmp_path):
    """The adapter has three, the base model two."""
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    labels = {0: "no", 1: "maybe", 2: "yes"}
    config = HoulsbyConfig(
        r=4, share_layers=3, train_layer_norm="all", id2label=labels, task_type="SEQ_CLS"
    )
    adapted = get_peft_model(model, config).eval()
    perturb(adapted)
    adapted.save_pretrained(tmp_path)
    by_transformers = pipeline(
        "text-classification",
        model=str(tmp_path),
        tokenizer=str(base),
        model_kwargs={"id2label": labels},  # transformers does not take them from an adapter
    )
    by_us = houlsby_peft.load(tmp_path, base_model=str(base)).pipeline()
    expected = by_transformers("one two", top_k=None)
    assert {answer["label"] for answer in expected} == {"no", "maybe", "yes"}
    for answer, expected_answer in zip(by_us("one two", top_k=None), expected, strict=True):
        assert answer == pytest.approx(expected_answer, abs=1e-6)


def test_an_adapter_of_a_task_model_fits_its_encoder_and_back(tmp_path, token_ids):
    """The names in the file begin with that of the encoder, or without it."""

    def outputs(model):
        encoder = getattr(model.get_base_model(), "bert", model)
        return encoder(token_ids).to_tuple()

    for trained_on, loaded_on in ((tiny_bert(), tiny_bert().bert), (tiny_bert().bert, tiny_bert())):
        model = adapted(trained_on, modules_to_save=["pooler"])
        folder = tmp_path / type(trained_on).__name__
        model.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(loaded_on, folder).eval()
        for output, expected in zip(outputs(loaded), outputs(model), strict=True):
            assert torch.equal(output, expected)
