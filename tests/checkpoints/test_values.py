"""Weights that cannot be right, and files that do not fit: refused on every path, and nothing of them stays."""

from __future__ import annotations

import shutil

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

import houlsby_peft
from houlsby_peft import AdapterError, HoulsbyConfig, TaskBank
from houlsby_peft.checkpoints.weights import check_values
from hub_models import TEXTS, make_adapter, make_base
from tiny_models import tiny_bert


FILE = "adapter_model.safetensors"
UP = "base_model.model.bert.encoder.layer.0.attention.output.dropout.houlsby_adapter.up_proj.weight"
HEAD = "base_model.model.classifier.weight"
# What a weight becomes, and what the error says.
VALUES = {
    "NaN": (lambda weight: weight.fill_(torch.nan), "must hold finite numbers, got NaN or infinity"),
    "float64": (lambda weight: weight.double().fill_(1e300), r"numbers up to 1\.84e\+19, .* got 1e\+300"),
    "overflow": (lambda weight: weight.fill_(-3e38), r"numbers up to 1\.84e\+19, .* got -3e\+38"),
    "whole": (lambda weight: weight.int(), "floating-point numbers of at least 16 bits, got torch.int32"),
    "bool": (lambda weight: weight.bool(), "got torch.bool"),
    "float8": (lambda weight: weight.to(torch.float8_e4m3fn), "got torch.float8_e4m3fn"),
    "complex": (lambda weight: weight.to(torch.complex64), "got torch.complex64"),
}


def change_file(folder, change):
    weights = load_file(folder / FILE)
    change(weights)
    save_file(weights, folder / FILE)


def state(model):
    """Everything that an adapter could leave behind."""
    return (
        [(name, type(module)) for name, module in model.named_modules()],
        [(name, weight.requires_grad) for name, weight in model.named_parameters()],
        list(getattr(model, "peft_config", {})),
        list(getattr(getattr(model, "model", model), "houlsby_records", {})),
    )


def with_peft(folder, **options):
    base = tiny_bert()
    return base, lambda: PeftModel.from_pretrained(base, folder, **options)


def beside_another(folder, **options):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4), adapter_name="there")
    return model, lambda: model.load_adapter(folder, "refused", **options)


def with_transformers(folder, **options):
    base = tiny_bert()
    return base, lambda: base.load_adapter(str(folder), **options)


PATHS = (with_peft, beside_another, with_transformers)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    get_peft_model(tiny_bert(), HoulsbyConfig(r=4, task_type="SEQ_CLS")).save_pretrained(folder)
    return folder


def assert_refused(path, folder, message, **options):
    model, load = path(folder, **options)
    before = state(model)
    with pytest.raises(ValueError, match=message):
        load()
    assert state(model) == before, path.__name__


@pytest.mark.parametrize("key", [UP, HEAD], ids=["bottleneck", "head"])
@pytest.mark.parametrize("case", VALUES)
def test_weights_that_cannot_be_right_are_refused_by_peft_and_transformers(case, key, saved, tmp_path):
    change, message = VALUES[case]
    folder = shutil.copytree(saved, tmp_path / "changed")
    change_file(folder, lambda weights: weights.update({key: change(weights[key])}))
    for path in PATHS:
        assert_refused(path, folder, message)


def test_what_half_precision_cannot_hold_is_refused_where_it_is_used(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "changed")
    change_file(folder, lambda weights: weights[UP].fill_(1e5))
    message = r"numbers up to 6\.55e\+04, as it is used in torch\.float16, got 1e\+05. Load the base model in float32"
    with pytest.raises(AdapterError, match=message):
        PeftModel.from_pretrained(tiny_bert().half(), folder, autocast_adapter_dtype=False)
    with pytest.raises(AdapterError, match=message):
        tiny_bert().half().load_adapter(folder)  # transformers' own, which casts nothing
    PeftModel.from_pretrained(tiny_bert().half(), folder)  # the adapter is in float32
    change_file(folder, lambda weights: (weights[UP].fill_(0), weights[HEAD].fill_(1e5)))
    with pytest.raises(AdapterError, match=r"classifier\.\S*weight' must hold numbers up to 6\.55e\+04"):
        PeftModel.from_pretrained(tiny_bert().half(), folder, autocast_adapter_dtype=False)
    PeftModel.from_pretrained(tiny_bert().half(), folder)


@pytest.mark.parametrize("key", [UP, HEAD], ids=["bottleneck", "head"])
def test_a_name_that_does_not_fit_leaves_nothing_behind(key, saved, tmp_path):
    """PEFT may map names, so that it notices only after it has added the adapter."""
    folder = shutil.copytree(saved, tmp_path / "changed")
    change_file(folder, lambda weights: weights.update({f"{key[:-4]}t": weights.pop(key)}))
    for path in PATHS:
        assert_refused(path, folder, "it lacks .*; it has")


def test_a_folder_without_weights_leaves_nothing_behind(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "changed")
    (folder / FILE).unlink()
    HoulsbyConfig(r=4).save_pretrained(tmp_path / "settings")
    for path in PATHS:
        for trainable in (True, False):
            for each in (folder, tmp_path / "settings"):
                assert_refused(path, each, f"adapter_config.json but no {FILE}", is_trainable=trainable)
    # Settings alone make a new adapter.
    get_peft_model(tiny_bert(), HoulsbyConfig.from_pretrained(tmp_path / "settings"))


@pytest.mark.parametrize("case", VALUES)
def test_weights_that_are_set_are_checked_before_any_is_copied(case, saved):
    change, message = VALUES[case]
    model = PeftModel.from_pretrained(tiny_bert(), saved)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights = {name: weight + 1 for name, weight in get_peft_model_state_dict(model).items()}
    with pytest.raises(ValueError, match=message):
        set_peft_model_state_dict(model, weights | {HEAD: change(weights[HEAD])})
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_init_from_and_averages_refuse_them(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "changed")
    change_file(folder, lambda weights: weights[UP].fill_(torch.inf))
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, task_type="SEQ_CLS"))
    model.add_adapter("other", HoulsbyConfig(r=4, task_type="SEQ_CLS"))
    before = state(model)
    with pytest.raises(AdapterError, match="must hold finite numbers"):
        houlsby_peft.init_from(model, folder)
    for weights, message in {
        (0.5, float("nan")): "coefficients of adapters must be finite numbers",
        (1e30, 1.0): r"The average of default, other: .* must hold numbers up to",
    }.items():
        with pytest.raises(ValueError, match=message):
            model.add_weighted_adapter(["default", "other"], list(weights), "mean")
        assert state(model) == before
    model.base_model.model.classifier.modules_to_save["other"].weight.data.fill_(torch.nan)
    with pytest.raises(AdapterError, match=r"classifier.* must hold finite numbers"):
        model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "mean")
    assert state(model) == before


def test_counts_of_a_head_are_whole_numbers():
    count = nn.BatchNorm1d(2).num_batches_tracked
    check_values("file", "count", torch.ones((), dtype=torch.int64), count)
    for wrong in (torch.ones(()), torch.ones((), dtype=torch.bool)):
        with pytest.raises(AdapterError, match="must hold whole numbers"):
            check_values("file", "count", wrong, count)


@pytest.mark.parametrize(
    "tokens",
    [[99], [-1], [1, 1], [], ["1"], [1.0], [True], 5, {"bert.embeddings.word_embeddings": [10**30]}, {"nowhere": [1]}],
    ids=str,
)
def test_tokens_that_the_model_does_not_have_are_refused(tokens):
    base = tiny_bert()
    before = state(base)
    with pytest.raises(ValueError, match=r"trainable_token_indices must be a list of different tokens of the model"):
        get_peft_model(base, HoulsbyConfig(r=4, trainable_token_indices=tokens))
    assert state(base) == before


def test_a_file_without_the_trained_tokens_is_refused(tmp_path):
    options = {"r": 4, "trainable_token_indices": [3, 5]}
    get_peft_model(tiny_bert(), HoulsbyConfig(**options)).save_pretrained(tmp_path)
    assert PeftModel.from_pretrained(tiny_bert(), tmp_path).active_adapters == ["default"]
    change_file(tmp_path, lambda weights: [weights.pop(key) for key in list(weights) if "token_adapter" in key])
    for path in PATHS:
        assert_refused(path, tmp_path, r"it lacks .*word_embeddings\.token_adapter\.trainable_tokens_delta")


def test_a_label_is_never_made_of_nan(tmp_path):
    """Large weights may make outputs infinite together, although each could be right."""
    base = make_base(tmp_path / "base")
    folder = make_adapter(tmp_path / "adapter", base, str(base), train_layer_norm=False)
    change_file(folder, lambda weights: [weight.fill_(1e19) for key, weight in weights.items() if "houlsby" in key])
    good = make_adapter(tmp_path / "good", base, str(base))
    text = TEXTS[0][0]
    with pytest.raises(AdapterError, match="The logits of an adapter must be finite; those of 'default' are NaN"):
        houlsby_peft.load(folder).predict(text)
    bank = TaskBank({"bad": folder, "good": good})
    with pytest.raises(AdapterError, match="those of 'bad' are NaN or infinite"):
        bank.predict([("good", text), ("bad", text)])
    assert bank.predict([("good", text)])[0]["label"] == houlsby_peft.load(good).predict(text)[0]["label"]


def test_loading_beside_another_adapter_leaves_nothing_of_a_refused_one(tmp_path):
    base = make_base(tmp_path / "base")
    good = make_adapter(tmp_path / "good", base, str(base))
    bad = shutil.copytree(good, tmp_path / "bad")
    first = houlsby_peft.load(good)
    before = state(first.model), first.predict(TEXTS[0][0])
    for key in (UP, HEAD):
        for change, message in VALUES.values():
            shutil.copy(good / FILE, bad / FILE)
            change_file(bad, lambda weights, key=key, change=change: weights.update({key: change(weights[key])}))
            with pytest.raises(AdapterError, match=f"{message.split(',')[0]}"):
                houlsby_peft.load(bad, beside=first)
    shutil.copy(good / FILE, bad / FILE)
    change_file(bad, lambda weights: weights.update({f"{UP[:-4]}t": weights.pop(UP)}))
    with pytest.raises(AdapterError, match="it lacks"):
        houlsby_peft.load(bad, beside=first)
    assert (state(first.model), first.predict(TEXTS[0][0])) == before
