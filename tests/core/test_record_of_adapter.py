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

from edited_json import edited_json
from houlsby_peft import HoulsbyConfig, HoulsbyLayer, ablate, prune
from houlsby_peft.placement.places import find_places
from houlsby_peft.placement.table import ARCHITECTURES, Stack, SubLayer
from houlsby_peft.saved.adapter import SavedAdapter
from tiny_models import adapted, tiny_bert


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


def tiny_bart(*labels) -> BartForSequenceClassification:
    sizes = {"vocab_size": 99, "d_model": 16, "eos_token_id": 2}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 16}
    return BartForSequenceClassification(BartConfig(**sizes, id2label=dict(enumerate(labels))))


def fields_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


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
        second = get_peft_model(tiny_bart("a", "b", "c"), second_config)
    assert second.base_model.records["default"].heads == ["classification_head"]
    for model, labels, model_type in (
        (first, {"0": "no", "1": "yes"}, "bert"),
        (second, {"0": "a", "1": "b", "2": "c"}, "bart"),
    ):
        model.save_pretrained(tmp_path / model_type)
        fields = fields_of(tmp_path / model_type)
        assert fields["recorded"]["id2label"] == labels
        assert fields["recorded"]["base"]["config"]["model_type"] == model_type
        assert fields["modules_to_save"] is None


def test_labels_are_saved_once_for_any_locale_and_keep_their_order(tmp_path):
    """PEFT reads the file in the encoding of the system. A push sorts JSON's keys as text, which
    puts class 10 before class 2.
    """
    names = [f"Größe {number}" for number in range(12)]
    config = HoulsbyConfig(r=4, id2label=dict(enumerate(names)))
    get_peft_model(bert_of(*names), config).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    assert path.read_text(encoding="ascii").count(json.dumps("Größe 11")) == 1
    path.write_text(json.dumps(fields_of(tmp_path), sort_keys=True))
    assert list(HoulsbyConfig.from_pretrained(tmp_path).saved.record.id2label.values()) == names
    assert list(SavedAdapter.open(tmp_path).record.id2label.values()) == names


@pytest.fixture
def saved(tmp_path):
    """The folder of an adapter of tiny_bert with labels, r=4, and its logits for IDS."""
    model = adapted(bert_of("no", "yes"), share_layers=3)
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
    with_a_list = HoulsbyConfig.from_pretrained(saved[0])
    with_a_list.positions.remove("attention")
    assert with_a_list.loaded is None
    model = get_peft_model(bert_of("no", "yes", seed=5), config)
    down = (
        next(module for module in model.modules() if isinstance(module, HoulsbyLayer))
        .module_of("default")
        .down_proj
    )
    assert down.out_features == 2
    base_in_file = HoulsbyConfig.from_pretrained(saved[0]).saved.record.base
    assert model.base_model.records["default"].base != base_in_file


def test_a_loaded_configuration_that_is_used_for_loading_keeps_its_record_and_options(saved):
    config = HoulsbyConfig.from_pretrained(saved[0])
    model = PeftModel.from_pretrained(bert_of("x", "y"), saved[0], config=config)
    assert model.peft_config["default"] is config
    assert model.base_model.records["default"].id2label == {0: "no", 1: "yes"}
    torch.testing.assert_close(model(IDS).logits, saved[1])
    changed = HoulsbyConfig.from_pretrained(saved[0])
    changed.scaling = 2.0
    model = PeftModel.from_pretrained(bert_of("x", "y"), saved[0], config=changed)
    layers = [module for module in model.modules() if isinstance(module, HoulsbyLayer)]
    assert {layer.module_of("default").scaling for layer in layers} == {2.0}


def test_a_copied_or_pickled_model_saves_the_same_record(saved, tmp_path):
    loaded = PeftModel.from_pretrained(bert_of("x", "y"), saved[0])
    for model in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        model.save_pretrained(tmp_path / "again")
        assert fields_of(tmp_path / "again")["recorded"] == fields_of(saved[0])["recorded"]


def change_places(**changes):
    def edit(record):
        for place in record["places"]:
            place.update(changes)

    return edit


def without(part):
    def edit(record):
        for place in record["places"]:
            place.pop(part, None)

    return edit


# The options of an adapter, what its file says instead, and a word of the error.
REFUSED = {
    "places without a module": ({}, without("module"), "places"),
    "more layers than any model": ({}, change_places(layers="0-99999999"), "places"),
    "many lists of layers": ({}, change_places(layers=",".join(["0-9999"] * 99)), "places"),
    "a layer below all": ({}, change_places(layers="-1"), "places"),
    "a size larger than any": ({}, change_places(r="9" * 40), "places"),
    "heads that are numbers": ({}, lambda record: record.update(heads=[1]), "heads"),
    "labels that are numbers": ({}, lambda record: record.update(id2label={"0": 1}), "id2label"),
    "another base model's form": (
        {},
        lambda record: record.update(base={"config": []}),
        "fingerprint",
    ),
    # The bottlenecks would read the sub-layer's output.
    "no entry for parallel": ({"kind": "parallel"}, without("entry"), "residual input"),
    "no layers that a ladder reads": ({"kind": "ladder"}, without("reads"), "layers"),
    "a ladder without layers": ({"kind": "ladder"}, change_places(reads=""), "no layer"),
    "a ladder of too many": ({"kind": "ladder"}, change_places(reads="0-99999999"), "or more"),
    "a ladder of other layers": ({"kind": "ladder"}, change_places(reads="0-1"), "layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_record_that_this_package_does_not_write_is_refused(case, tmp_path):
    options, change, word = REFUSED[case]
    get_peft_model(tiny_bert(), HoulsbyConfig(r=4, **options)).save_pretrained(tmp_path)
    with edited_json(tmp_path / "adapter_config.json") as fields:
        change(fields["recorded"])
    with pytest.raises((TypeError, ValueError), match=word):
        PeftModel.from_pretrained(tiny_bert(), tmp_path)


def test_a_saved_adapter_keeps_its_places_when_the_table_changes(monkeypatch, tmp_path):
    """Inferred places move when their architecture gets a row; a saved adapter stays where it was
    trained.
    """
    monkeypatch.delitem(ARCHITECTURES, "bert")
    model = adapted(train_layer_norm="all")
    model.save_pretrained(tmp_path)
    inferred = find_places(tiny_bert(), HoulsbyConfig()).keys()

    monkeypatch.undo()
    assert inferred != find_places(tiny_bert(), HoulsbyConfig()).keys()
    loaded = PeftModel.from_pretrained(tiny_bert(), tmp_path)
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)

    # The same where another row names other modules.
    row = (Stack("encoder.layer", SubLayer("attention.output"), SubLayer("output")),)
    monkeypatch.setitem(ARCHITECTURES, "bert", row)
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
