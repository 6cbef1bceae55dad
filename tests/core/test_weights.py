"""Weights that do not fit, or cannot be right: refused on every path, and nothing of them stays."""

from __future__ import annotations

import shutil

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

import houlsby_peft
from edited_json import edited_json
from houlsby_peft import AdapterError, HoulsbyConfig, TaskBank
from hub_models import TEXTS, make_adapter
from model_states import assert_same_tensors, state_of, tensors_of
from tiny_models import perturb, tiny_bert


FILE = "adapter_model.safetensors"
UP = "base_model.model.bert.encoder.layer.0.attention.output.dropout.houlsby_adapter.up_proj.weight"
HEAD = "base_model.model.classifier.weight"
TEXT = TEXTS[0][0]


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    """The folder of an adapter with everything that an adapter can have."""
    options = {"trainable_token_indices": [7, 9], "invertible": "nice", "train_layer_norm": "all"}
    return make_adapter(tmp_path_factory.mktemp("saved"), base, str(base), **options)


def tensors(change):
    def edit(folder):
        weights = load_file(folder / FILE)
        change(weights)
        save_file(weights, folder / FILE, metadata={"format": "pt"})

    return edit


def becomes(key, change):
    return tensors(lambda weights: weights.update({key: change(weights[key])}))


def config(**fields):
    def edit(folder):
        with edited_json(folder / "adapter_config.json") as content:
            content |= fields

    return edit


def pickle_it(folder):
    torch.save(load_file(folder / FILE), folder / "adapter_model.bin")
    (folder / FILE).unlink()


def rename(weights):
    weights[f"{UP}s"] = weights.pop(UP)


def grow(weights):
    weights[UP.replace("up_proj", "more_proj")] = torch.zeros(32, 4)


def leave_tokens_out(weights):
    for key in [key for key in weights if "trainable_tokens" in key]:
        del weights[key]


# What is done to the folder, and a word of the error.
BROKEN = {
    "no weights": (lambda folder: (folder / FILE).unlink(), "broken"),
    "cut off": (
        lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-100]),
        "incomplete",
    ),
    "pickled": (pickle_it, "any code"),
    "another shape": (becomes(UP, lambda _: torch.zeros(3, 5)), r"\(3, 5\)"),
    "a tensor less": (tensors(lambda weights: weights.pop(UP)), "lacks"),
    "no head": (tensors(lambda weights: weights.pop(HEAD)), "lacks"),
    "a tensor more": (tensors(grow), "no place"),
    "another name": (tensors(rename), "lacks .* has"),
    "another size configured": (config(r=2), "shape"),
    "NaN": (becomes(UP, lambda tensor: tensor.fill_(torch.nan)), "finite"),
    "NaN in the head": (becomes(HEAD, lambda tensor: tensor.fill_(torch.nan)), "finite"),
    "whole numbers": (becomes(UP, lambda tensor: tensor.int()), "floating-point"),
    "whole numbers in the head": (becomes(HEAD, lambda tensor: tensor.long()), "floating-point"),
    "no trained tokens": (tensors(leave_tokens_out), "token"),
    "a token that there is not": (config(trainable_token_indices=[7, 9999]), "9,?999"),
    "a token below all": (config(trainable_token_indices=[7, -900]), "-900"),
    "more tokens than saved": (config(trainable_token_indices=[7, 9, 11]), "token"),
    "embeddings that there are not": (config(trainable_token_indices={"nowhere": [7]}), "nowhere"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_loaded_is_refused_on_every_path_and_leaves_nothing(
    case, saved, base, tmp_path
):
    change, word = BROKEN[case]
    folder = shutil.copytree(saved, tmp_path / "broken")
    change(folder)
    bare = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3).train()
    bare.bert.pooler.requires_grad_(False)
    running = houlsby_peft.load(saved)
    for model, load in (
        (bare, lambda: PeftModel.from_pretrained(bare, str(folder))),
        (bare, lambda: houlsby_peft.load(folder, base_model=bare)),
        (running.model, lambda: running.model.load_adapter(str(folder), "broken")),
        (running.model, lambda: houlsby_peft.load(folder, beside=running)),
    ):
        untouched = state_of(model)
        for _ in range(2):
            with pytest.raises(Exception, match=word):
                load()
            assert state_of(model) == untouched


def test_weights_that_are_set_are_checked_before_any_is_copied(saved, base, tmp_path):
    """Also those that are loaded for an adapter that is in use, which stays."""
    bare = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    model = PeftModel.from_pretrained(bare, saved)
    untouched = state_of(model)
    weights = {name: weight + 1 for name, weight in tensors_of(model).items()}
    folder = shutil.copytree(saved, tmp_path / "changed")
    for changed in (
        weights | {HEAD: weights[HEAD].clone().fill_(torch.nan)},
        weights | {UP: torch.zeros(3, 5)},
        {key: weight for key, weight in weights.items() if key != UP},
    ):
        with pytest.raises(AdapterError):
            set_peft_model_state_dict(model, changed)
        assert state_of(model) == untouched
        save_file(changed, folder / FILE)
        with pytest.raises(AdapterError):
            model.load_adapter(folder, "default")
        assert state_of(model) == untouched


def test_init_from_refuses_weights_that_are_not_finite(saved, tmp_path):
    first = houlsby_peft.load(saved)
    untouched = state_of(first.model)
    broken = shutil.copytree(saved, tmp_path / "broken")
    BROKEN["NaN"][0](broken)
    with pytest.raises(AdapterError, match="finite"):
        houlsby_peft.init_from(first.model, broken)
    assert state_of(first.model) == untouched


def test_what_half_precision_cannot_hold_is_refused_where_it_is_used(tmp_path):
    get_peft_model(tiny_bert(), HoulsbyConfig(r=4)).save_pretrained(tmp_path)
    becomes(UP, lambda tensor: tensor.fill_(1e5))(tmp_path)
    with pytest.raises(AdapterError, match="float16"):
        PeftModel.from_pretrained(tiny_bert().half(), tmp_path, autocast_adapter_dtype=False)
    PeftModel.from_pretrained(tiny_bert().half(), tmp_path)  # the adapter is in float32


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_a_base_in_half_precision_does_not_round_an_adapter_unless_asked_to(
    autocast, low_cpu_mem_usage, tmp_path
):
    """PEFT moves an adapter to its module's device and dtype, here those of linear layers."""
    config = HoulsbyConfig(r=4, target_modules=["attention.output.dense"])
    model = get_peft_model(tiny_bert(), config)
    perturb(model)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / FILE)
    if not autocast:
        expected = {key: weight.bfloat16() for key, weight in expected.items()}
    options = {"autocast_adapter_dtype": autocast, "low_cpu_mem_usage": low_cpu_mem_usage}
    model = PeftModel.from_pretrained(tiny_bert().bfloat16(), tmp_path, **options)
    model.load_adapter(tmp_path, "again", **options)
    for name in ("default", "again"):
        assert_same_tensors(get_peft_model_state_dict(model, adapter_name=name), expected)


def test_a_label_is_never_made_of_nan(base, tmp_path):
    """Large weights may make outputs infinite together, although each could be right."""
    bad = make_adapter(tmp_path / "bad", base, str(base), train_layer_norm=False)
    good = make_adapter(tmp_path / "good", base, str(base))
    weights = load_file(bad / FILE)
    for key, tensor in weights.items():
        if "houlsby" in key:
            tensor.fill_(1e19)
    save_file(weights, bad / FILE, metadata={"format": "pt"})
    with pytest.raises(AdapterError, match="finite"):
        houlsby_peft.load(bad).predict(TEXT)
    bank = TaskBank({"bad": bad, "good": good})
    with pytest.raises(AdapterError, match="bad"):
        bank.predict([("good", TEXT), ("bad", TEXT)])
    [answer] = bank.predict([("good", TEXT)])
    [expected] = houlsby_peft.load(good).predict(TEXT)
    assert answer["label"] == expected["label"]


@pytest.mark.parametrize(
    ("part", "value"), [("houlsby_adapter", float("inf")), ("modules_to_save", float("nan"))]
)
def test_weights_that_are_not_finite_are_not_saved(part, value, tmp_path):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=2))
    [weight, *_] = [weight for name, weight in model.named_parameters() if part in name]
    with torch.no_grad():
        weight.view(-1)[0] = value
    with pytest.raises(ValueError, match="finite"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))
