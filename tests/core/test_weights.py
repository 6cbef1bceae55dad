"""Weights that do not fit, or cannot be right: refused on every path, and nothing of them stays."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

import houlsby_peft
from houlsby_peft import AdapterError, HoulsbyConfig, TaskBank
from hub_models import TEXTS, make_adapter
from tiny_models import perturb, tiny_bert


FILE = "adapter_model.safetensors"
UP = "base_model.model.bert.encoder.layer.0.attention.output.dropout.houlsby_adapter.up_proj.weight"
HEAD = "base_model.model.classifier.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, share_layers=1, task_type="SEQ_CLS"))
    perturb(model)
    model.save_pretrained(folder)
    return folder


def weights(change):
    def edit(folder):
        tensors = load_file(folder / FILE)
        change(tensors)
        save_file(tensors, folder / FILE)

    return edit


def config(**fields):
    def edit(folder):
        changed = HoulsbyConfig.from_pretrained(folder)
        vars(changed).update(fields)
        changed.save_pretrained(folder)

    return edit


def pickle_it(folder):
    torch.save(load_file(folder / FILE), folder / "adapter_model.bin")
    (folder / FILE).unlink()


def of_a_lora(folder):
    get_peft_model(tiny_bert(), LoraConfig(target_modules=["query"])).save_pretrained(
        folder / "lora"
    )
    shutil.copy(folder / "lora" / FILE, folder)


def becomes(key, change):
    return weights(lambda tensors: tensors.update({key: change(tensors[key])}))


BROKEN = {
    "cut off": (
        lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-100]),
        "incomplete",
    ),
    "pickled": (pickle_it, "has only adapter_model.bin, a pickled file, which can run any code"),
    "another shape": (
        becomes(UP, lambda _: torch.zeros(3, 5)),
        r"has the shape \(3, 5\), the model needs \(32, 4\)",
    ),
    "a tensor less": (weights(lambda tensors: tensors.pop(UP)), r"it lacks .*up_proj\.weight\. "),
    "no head": (weights(lambda tensors: tensors.pop(HEAD)), "its file lacks classifier.weight"),
    "a tensor more": (
        weights(
            lambda tensors: tensors.update(
                {UP.replace("attention.output", "output"): torch.zeros(32, 4)}
            )
        ),
        "it has .*up_proj.weight, which this model and configuration have no place for",
    ),
    "another name": (
        weights(lambda tensors: tensors.update({f"{UP}s": tensors.pop(UP)})),
        "it lacks .*; it has ",
    ),
    "another size configured": (config(r=2), r"has the shape \(4, 32\), the model needs \(2, 32\)"),
    "NaN": (
        becomes(UP, lambda tensor: tensor.fill_(torch.nan)),
        r"must hold finite numbers of torch\.float32",
    ),
    "NaN in the head": (
        becomes(HEAD, lambda tensor: tensor.fill_(torch.nan)),
        "must hold finite numbers",
    ),
    "whole numbers": (
        becomes(UP, lambda tensor: tensor.int()),
        r"floating-point numbers .* got torch\.int32",
    ),
    "whole numbers in the head": (becomes(HEAD, lambda tensor: tensor.long()), r"got torch\.int64"),
}


def structure(model):
    return [(name, type(module)) for name, module in model.named_modules()]


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_does_not_fit_is_refused_by_peft_and_leaves_nothing(name, saved, tmp_path):
    change, message = BROKEN[name]
    folder = shutil.copytree(saved, tmp_path / "broken")
    change(folder)

    base = tiny_bert()
    base.bert.embeddings.requires_grad_(False)
    trains = [weight.requires_grad for weight in base.parameters()]
    before = structure(base), {key: weight.clone() for key, weight in base.state_dict().items()}
    with pytest.raises((ValueError, SafetensorError), match=message):
        PeftModel.from_pretrained(base, folder)
    assert structure(base) == before[0]
    assert not hasattr(base, "peft_config")
    assert [weight.requires_grad for weight in base.parameters()] == trains
    assert all(torch.equal(weight, before[1][key]) for key, weight in base.state_dict().items())

    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4), adapter_name="there")
    before = structure(model), {key: weight.clone() for key, weight in model.state_dict().items()}
    trains = [weight.requires_grad for weight in model.parameters()]
    with pytest.raises((ValueError, SafetensorError), match=message):
        model.load_adapter(folder, "broken")
    assert (list(model.peft_config), model.active_adapters) == (["there"], ["there"])
    assert structure(model) == before[0]
    assert all(torch.equal(weight, before[1][key]) for key, weight in model.state_dict().items())
    assert [weight.requires_grad for weight in model.parameters()] == trains


def test_weights_that_are_set_are_checked_before_any_is_copied(saved, tmp_path):
    """Also those that are loaded for an adapter that is in use, which stays."""
    model = PeftModel.from_pretrained(tiny_bert(), saved)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    others = {name: weight + 1 for name, weight in get_peft_model_state_dict(model).items()}
    for changed in (
        {**others, HEAD: others[HEAD].clone().fill_(torch.nan)},
        {**others, UP: torch.zeros(3, 5)},
        {key: weight for key, weight in others.items() if key != UP},
    ):
        with pytest.raises(AdapterError, match=r"classifier|up_proj"):
            set_peft_model_state_dict(model, changed)
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
        save_file(changed, shutil.copytree(saved, tmp_path, dirs_exist_ok=True) / FILE)
        with pytest.raises(AdapterError, match=r"classifier|up_proj"):
            model.load_adapter(tmp_path, "default")
        assert model.state_dict().keys() == before.keys()
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_what_half_precision_cannot_hold_is_refused_where_it_is_used(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "changed")
    becomes(UP, lambda tensor: tensor.fill_(1e5))(folder)
    with pytest.raises(
        AdapterError, match=r"finite numbers of torch\.float16, got 1e\+05.* load it in float32"
    ):
        PeftModel.from_pretrained(tiny_bert().half(), folder, autocast_adapter_dtype=False)
    PeftModel.from_pretrained(tiny_bert().half(), folder)  # the adapter is in float32


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
    saved = load_file(tmp_path / FILE)
    options = {"autocast_adapter_dtype": autocast, "low_cpu_mem_usage": low_cpu_mem_usage}
    model = PeftModel.from_pretrained(tiny_bert().bfloat16(), tmp_path, **options)
    model.load_adapter(tmp_path, "again", **options)
    for name in ("default", "again"):
        found = get_peft_model_state_dict(model, adapter_name=name)
        for key in saved:
            assert torch.equal(found[key], saved[key] if autocast else saved[key].bfloat16()), key


def test_init_from_and_load_refuse_them_too(base, tmp_path):
    good = make_adapter(tmp_path / "good", base, str(base))
    first = houlsby_peft.load(good)
    before = structure(first.model), first.predict(TEXTS[0][0])
    for name in ("NaN", "NaN in the head", "no head", "another name", "whole numbers"):
        bad = shutil.copytree(good, tmp_path / name)
        BROKEN[name][0](bad)
        with pytest.raises(AdapterError, match=rf"^{re.escape(str(bad))}: .*{BROKEN[name][1]}"):
            houlsby_peft.load(bad, beside=first)
        given = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
        of_given = structure(given)
        with pytest.raises(AdapterError, match=BROKEN[name][1]):
            houlsby_peft.load(bad, base_model=given)
        assert structure(given) == of_given
        assert all(weight.requires_grad for weight in given.parameters())
    assert (structure(first.model), first.predict(TEXTS[0][0])) == before
    with pytest.raises(AdapterError, match="must hold finite numbers"):
        houlsby_peft.init_from(first.model, tmp_path / "NaN")
    assert first.predict(TEXTS[0][0]) == before[1]


def test_a_label_is_never_made_of_nan(base, tmp_path):
    """Large weights may make outputs infinite together, although each could be right."""
    folder = make_adapter(tmp_path / "adapter", base, str(base), train_layer_norm=False)
    weights(
        lambda tensors: [tensor.fill_(1e19) for key, tensor in tensors.items() if "houlsby" in key]
    )(folder)
    good = make_adapter(tmp_path / "good", base, str(base))
    text = TEXTS[0][0]
    with pytest.raises(
        AdapterError, match="The outputs of an adapter must be finite; those of 'default' are NaN"
    ):
        houlsby_peft.load(folder).predict(text)
    bank = TaskBank({"bad": folder, "good": good})
    with pytest.raises(AdapterError, match="those of 'bad' are NaN or infinite"):
        bank.predict([("good", text), ("bad", text)])
    assert (
        bank.predict([("good", text)])[0]["label"]
        == houlsby_peft.load(good).predict(text)[0]["label"]
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_saved(value, tmp_path):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=2))
    with torch.no_grad():
        next(weight for weight in model.parameters() if weight.requires_grad).view(-1)[0] = value
    with pytest.raises(ValueError, match="must be finite to be saved"):
        model.save_pretrained(tmp_path)
