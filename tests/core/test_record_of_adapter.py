"""The user's settings are apart from the record of an adapter: copies, several models, loading,
recorded places.
"""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import BartConfig, BartForSequenceClassification

from houlsby_peft import HoulsbyConfig, HoulsbyLayer, ablate, prune
from houlsby_peft.placement import view
from houlsby_peft.placement.places import find_places
from houlsby_peft.placement.table import ARCHITECTURES, Stack, SubLayer
from houlsby_peft.saved.adapter import SavedAdapter
from tiny_models import perturb, tiny_bert


COPIES = {
    "replace": replace,
    "deepcopy": copy.deepcopy,
    "to_dict": lambda config: HoulsbyConfig(**config.to_dict()),
    "the same": lambda config: config,
}


def bert_of(*labels, **changes):
    return tiny_bert(
        num_labels=len(labels), id2label=dict(enumerate(labels)), label2id=None, **changes
    )


def tiny_bart(**changes) -> BartForSequenceClassification:
    options = {
        "vocab_size": 99,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
    }
    options |= {
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "eos_token_id": 2,
    }
    return BartForSequenceClassification(BartConfig(**options, **changes))


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_used_configuration_is_clean_for_any_other_model(make, tmp_path):
    """Neither the first model's labels, head nor base model reach the second one; the first one
    keeps its own.
    """
    config = HoulsbyConfig(r=4)
    first = get_peft_model(bert_of("no", "yes"), config)
    second_config = make(config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PEFT config's `base_model_name_or_path` was renamed")
        second = get_peft_model(tiny_bart(id2label={0: "a", 1: "b", 2: "c"}), second_config)
    assert second.base_model.records["default"].heads == ["classification_head"]
    first.save_pretrained(tmp_path / "first")
    second.save_pretrained(tmp_path / "second")
    of_first, of_second = (
        json.loads((tmp_path / name / "adapter_config.json").read_text())
        for name in ("first", "second")
    )
    assert of_first["recorded"]["id2label"] == {"0": "no", "1": "yes"}
    assert of_second["recorded"]["id2label"] == {"0": "a", "1": "b", "2": "c"}
    assert of_first["recorded"]["base"]["config"]["model_type"] == "bert"
    assert of_second["recorded"]["base"]["config"]["model_type"] == "bart"
    assert of_first["modules_to_save"] is None is of_second["modules_to_save"]


def test_labels_keep_their_order(tmp_path):
    """JSON's keys are sorted as text, which puts class 10 before class 2."""
    names = [f"topic {number}" for number in range(12)]
    config = HoulsbyConfig(r=4, id2label=dict(enumerate(names)))
    get_peft_model(bert_of(*names), config).save_pretrained(tmp_path)
    assert list(HoulsbyConfig.from_pretrained(tmp_path).saved.record.id2label.values()) == names
    assert list(SavedAdapter.open(tmp_path).record.id2label.values()) == names


@pytest.fixture
def saved(tmp_path):
    """The folder of an adapter of tiny_bert with labels, r=4, and its logits for IDS."""
    model = get_peft_model(bert_of("no", "yes"), HoulsbyConfig(r=4, share_layers=3)).eval()
    perturb(model)
    model.save_pretrained(tmp_path)
    return tmp_path, model(IDS).logits


IDS = torch.arange(12).reshape(2, 6)


@pytest.mark.parametrize(
    "change", [lambda c: replace(c, r=2), lambda c: setattr(c, "r", 2)], ids=["replace", "set"]
)
def test_a_loaded_configuration_with_another_size_makes_a_new_adapter(saved, change):
    config = HoulsbyConfig.from_pretrained(saved[0])
    config = change(config) or config
    assert config.loaded is None
    model = get_peft_model(bert_of("no", "yes", seed=5), config)
    down = (
        next(module for module in model.modules() if isinstance(module, HoulsbyLayer))
        .bottleneck("default")
        .down_proj
    )
    assert down.out_features == 2
    base_in_file = HoulsbyConfig.from_pretrained(saved[0]).saved.record.base
    assert model.base_model.records["default"].base != base_in_file


def test_a_loaded_configuration_that_is_used_for_loading_keeps_its_record(saved):
    config = HoulsbyConfig.from_pretrained(saved[0])
    model = PeftModel.from_pretrained(bert_of("x", "y"), saved[0], config=config)
    assert model.peft_config["default"] is config
    assert model.base_model.records["default"].id2label == {0: "no", 1: "yes"}
    torch.testing.assert_close(model(IDS).logits, saved[1])


def test_a_copied_or_pickled_model_saves_the_same_record(saved, tmp_path):
    loaded = PeftModel.from_pretrained(bert_of("x", "y"), saved[0])
    for number, model in enumerate(
        (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded)))
    ):
        model.save_pretrained(tmp_path / str(number))
        fields = json.loads((tmp_path / str(number) / "adapter_config.json").read_text())
        assert (
            fields["recorded"]
            == json.loads((saved[0] / "adapter_config.json").read_text())["recorded"]
        )


ROW = {"position": "norm", "stack": "s", "layers": "0-3", "module": "m", "projection": "m"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("places", [{"position": "norm", "stack": "s"}]),
        *(
            ("places", [ROW | change])
            for change in ({"layers": "0-99999999"}, {"layers": "-1"}, {"r": "9" * 40})
        ),
        ("places", [ROW | {"layers": ",".join(["0-9999"] * 99)}]),
        ("heads", [1]),
        ("id2label", {"0": 1}),
    ],
)
def test_a_record_that_this_package_does_not_write_is_refused(field, value):
    with pytest.raises((TypeError, ValueError, KeyError)):
        HoulsbyConfig(recorded={"places": [ROW], field: value})


def test_a_saved_adapter_keeps_its_places_when_the_table_changes(monkeypatch, tmp_path):
    """Inferred places move when their architecture gets a row; a saved adapter stays where it was
    trained.
    """
    monkeypatch.setattr(
        view, "ARCHITECTURES", {k: v for k, v in ARCHITECTURES.items() if k != "bert"}
    )
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, train_layer_norm="all")).eval()
    perturb(model)
    model.save_pretrained(tmp_path)
    inferred = {place.key for place in find_places(tiny_bert(), HoulsbyConfig()).values()}
    assert any(key.endswith("output.dense") for key in inferred)

    monkeypatch.undo()
    assert not any(
        key.endswith("output.dense") for key in find_places(tiny_bert(), HoulsbyConfig())
    )
    loaded = PeftModel.from_pretrained(tiny_bert(), tmp_path)
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)

    # The same where another row names other modules.
    other = (Stack("encoder.layer", SubLayer("attention.output"), SubLayer("output")),)
    monkeypatch.setitem(ARCHITECTURES, "bert", other)
    loaded = PeftModel.from_pretrained(tiny_bert(), tmp_path)
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)

    # And what is made from it, also in a copy of the model.
    loaded = copy.deepcopy(loaded)
    loaded.add_weighted_adapter(["default"], [1.0], "joined")
    loaded.set_adapter("joined")
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    with ablate(model, [0, 2]), ablate(loaded, [0, 2]):
        expected = model(IDS).logits
        torch.testing.assert_close(loaded(IDS).logits, expected)
    prune(loaded, [0], "small", "joined")
    prune(loaded, [2], "smaller", "small")
    loaded.save_pretrained(tmp_path, selected_adapters=["smaller"])
    again = PeftModel.from_pretrained(tiny_bert(), tmp_path / "smaller")
    torch.testing.assert_close(again(IDS).logits, expected)
