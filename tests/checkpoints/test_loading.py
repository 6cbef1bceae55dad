"""Files that do not fit, are broken, or are not safetensors; loading them must change nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from peft import (
    AutoPeftModelForSequenceClassification,
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file, save_file

from houlsby_peft import HoulsbyConfig
from tiny_models import perturb, tiny_bert


WEIGHTS = "adapter_model.safetensors"
FIRST = "base_model.model.bert.encoder.layer.0.attention.output.dropout.houlsby_adapter"
SECOND = FIRST.replace("attention.output", "output")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base model, an adapter that shares a bottleneck in each layer, and a LoRA."""
    path = tmp_path_factory.mktemp("saved")
    tiny_bert().save_pretrained(path / "base")
    base = type(tiny_bert()).from_pretrained(path / "base")
    model = get_peft_model(base, HoulsbyConfig(r=4, share_layers=1, task_type="SEQ_CLS"))
    perturb(model)
    model.save_pretrained(path / "good")
    get_peft_model(tiny_bert(), LoraConfig(target_modules=["query"])).save_pretrained(path / "lora")
    return path


def edit_weights(change):
    def edit(path):
        weights = load_file(path / WEIGHTS)
        change(weights)
        save_file(weights, path / WEIGHTS)

    return edit


def cut(path):
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-100])


def overwrite(path):
    (path / WEIGHTS).write_bytes(b"x" * 1000)


def pickle_it(path):
    torch.save(load_file(path / WEIGHTS), path / "adapter_model.bin")
    (path / WEIGHTS).unlink()


def edit_config(**fields):
    def edit(path):
        file = path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return edit


def of_a_lora(path):
    shutil.copy(path.parent / "lora" / WEIGHTS, path)


BROKEN = {
    "cut off": (cut, rf"{WEIGHTS} \([\d,]+ bytes\) cannot be read: .*Download or save it again"),
    "no safetensors": (overwrite, rf"{WEIGHTS} \(1,000 bytes\) cannot be read"),
    "no file of weights": (lambda path: (path / WEIGHTS).unlink(), rf"holds adapter_config.json but no {WEIGHTS}"),
    "tokens of a module that is not there": (
        edit_config(trainable_token_indices={"no_such_module": [1]}),
        "not found|no_such_module",
    ),
    "tokens of a module that is trained as a whole": (
        edit_config(trainable_token_indices={"classifier": [1]}, modules_to_save=["classifier"]),
        "already marked to be trained fully",
    ),
    "pickled": (pickle_it, "has only adapter_model.bin, a pickled file, which can run any code"),
    "another shape": (
        edit_weights(lambda weights: weights.update({f"{FIRST}.up_proj.weight": torch.zeros(3, 5)})),
        rf"{WEIGHTS} do not: {FIRST}.up_proj.weight has the shape \(3, 5\), the model needs \(32, 4\)",
    ),
    "a tensor less": (
        edit_weights(lambda weights: weights.pop(f"{FIRST}.up_proj.bias")),
        rf"{WEIGHTS} do not: it lacks {FIRST}.up_proj.bias\. ",
    ),
    "no head": (
        edit_weights(lambda weights: [weights.pop(key) for key in list(weights) if "classifier" in key]),
        r"it lacks base_model\.model\.classifier\.weight, base_model\.model\.classifier\.bias\. ",
    ),
    "a tensor more": (
        edit_weights(lambda weights: weights.update({f"{SECOND}.up_proj.bias": torch.zeros(32)})),
        rf"it has {SECOND}.up_proj.bias, which this model and configuration have no place for",
    ),
    "of a LoRA": (of_a_lora, r"it lacks .* and 31 more; it has .*query\.lora_A\.weight"),
    "less sharing configured": (edit_config(share_layers=0), rf"it lacks {SECOND}.down_proj.weight, .* and 13 more"),
    "more sharing configured": (edit_config(share_layers=3), r"it has .*layer\.1\.attention.* and 5 more, which this"),
    "another size configured": (edit_config(r=2), r"weight has the shape \(4, 32\), the model needs \(2, 32\)"),
}  # fmt: skip


def structure(model):
    return [(name, type(module)) for name, module in model.named_modules()]


def contents(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_unchanged(model, before):
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(name, saved, tmp_path):
    change, message = BROKEN[name]
    path = shutil.copytree(saved / "good", tmp_path / "broken")
    shutil.copytree(saved / "lora", tmp_path / "lora")
    change(path)

    base = tiny_bert()
    modules, weights = structure(base), contents(base)
    gradients = [parameter.requires_grad for parameter in base.parameters()]
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(base, path)
    assert structure(base) == modules
    assert [parameter.requires_grad for parameter in base.parameters()] == gradients
    assert_unchanged(base, weights)

    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4), adapter_name="there")
    modules, weights = structure(model), contents(model)
    with pytest.raises(ValueError, match=message):
        model.load_adapter(path, "broken")
    assert list(model.peft_config) == ["there"]
    assert model.active_adapters == ["there"]
    assert structure(model) == modules
    assert_unchanged(model, weights)

    with pytest.raises(ValueError, match=message):
        AutoPeftModelForSequenceClassification.from_pretrained(path, num_labels=3)


def test_tensors_that_do_not_fit_leave_the_adapter_there_as_it_was(saved):
    model = PeftModel.from_pretrained(tiny_bert(), saved / "good")
    before, weights = contents(model), get_peft_model_state_dict(model)
    for key, value in ((f"{FIRST}.up_proj.weight", torch.zeros(3, 5)), (f"{FIRST}.up_proj.bias", None)):
        wrong = {name: tensor + 1 for name, tensor in weights.items()} | ({} if value is None else {key: value})
        if value is None:
            del wrong[key]
        with pytest.raises(ValueError, match=re.escape(key.removesuffix(key.rpartition("houlsby_adapter")[2]))):
            set_peft_model_state_dict(model, wrong)
        assert_unchanged(model, before)


@pytest.mark.parametrize("share_layers", [0, 3])
def test_injecting_from_a_state_dict_that_disagrees_with_the_configuration_is_an_error(saved, share_layers):
    weights = load_file(saved / "good" / WEIGHTS)
    base = tiny_bert()
    modules = structure(base)
    with pytest.raises(ValueError, match=r"given state_dict do not: it (lacks|has) .*houlsby_adapter"):
        inject_adapter_in_model(HoulsbyConfig(r=4, share_layers=share_layers), base, state_dict=weights)
    assert structure(base) == modules


def test_a_file_with_a_resized_embedding_loads(saved, tmp_path, token_ids):
    """PEFT saves embeddings that were resized beside the adapter; they are no concern of ours."""
    model = PeftModel.from_pretrained(tiny_bert(), saved / "good").eval()
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    assert "base_model.model.bert.embeddings.word_embeddings.weight" in load_file(tmp_path / WEIGHTS)
    again = PeftModel.from_pretrained(tiny_bert(), tmp_path).eval()
    assert torch.equal(again(token_ids).logits, model(token_ids).logits)


def test_names_are_mapped_while_loading(saved, tmp_path, token_ids):
    path = shutil.copytree(saved / "good", tmp_path / "renamed")
    weights = load_file(path / WEIGHTS)
    save_file({key.replace("bert.encoder.layer", "old.blocks"): weights[key] for key in weights}, path / WEIGHTS)
    mapping = {r"^old\.blocks": "bert.encoder.layer"}
    expected = PeftModel.from_pretrained(tiny_bert(), saved / "good")(token_ids).logits
    model = PeftModel.from_pretrained(tiny_bert(), path, key_mapping=mapping)
    assert torch.equal(model(token_ids).logits, expected)
    model.load_adapter(path, "again", key_mapping=mapping)
    with pytest.raises(ValueError, match=r"it lacks .*; it has .*old\.blocks\.0"):
        PeftModel.from_pretrained(tiny_bert(), path)


def test_pickled_weights_are_not_written_either(tmp_path):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4))
    with pytest.raises(ValueError, match="without safe_serialization=False"):
        model.save_pretrained(tmp_path, safe_serialization=False)
    model.save_pretrained(tmp_path)
    assert PeftModel.from_pretrained(tiny_bert(), tmp_path).active_adapters == ["default"]
    # Beside the weights of an earlier save, which would be loaded. An older pickled file does no harm.
    with pytest.raises(ValueError, match=r"beside .* an earlier save, .* without safe_serialization=False"):
        model.save_pretrained(tmp_path, safe_serialization=False)
    os.utime(tmp_path / "adapter_model.bin", (1, 1))
    model.save_pretrained(tmp_path)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_the_dtype_of_a_loaded_adapter(saved, autocast, low_cpu_mem_usage, token_ids):
    base = tiny_bert().to(torch.bfloat16)
    options = {"autocast_adapter_dtype": autocast, "low_cpu_mem_usage": low_cpu_mem_usage}
    model = PeftModel.from_pretrained(base, saved / "good", **options)
    expected = torch.float32 if autocast else torch.bfloat16
    assert {p.dtype for name, p in model.named_parameters() if "houlsby_adapter" in name} == {expected}
    model.load_adapter(saved / "good", "again", **options)
    assert {p.dtype for name, p in model.named_parameters() if "houlsby_adapter.again" in name} == {expected}
    assert model(token_ids).logits.dtype == expected, "the head has the dtype of the bottlenecks"


def test_hot_swapping_is_refused_clearly(saved):
    model = PeftModel.from_pretrained(tiny_bert(), saved / "good")
    before = contents(model)
    with pytest.raises(ValueError, match="Hotswapping only supports LORA but HOULSBY was passed"):
        hotswap_adapter(model, saved / "good", adapter_name="default", torch_device="cpu")
    assert_unchanged(model, before)


# PEFT says that the base has another name, which is what this is about.
@pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path` was renamed:UserWarning")
def test_a_configuration_of_a_saved_adapter_makes_new_ones_if_copied(saved):
    config = HoulsbyConfig.from_pretrained(saved / "good")
    wider = tiny_bert(hidden_size=48)
    with pytest.raises(ValueError, match=r"use dataclasses\.replace\(config, ") as error:
        get_peft_model(wider, config)
    advice = re.search(r"dataclasses\.(replace\(.*\))\.$", str(error.value))
    model = get_peft_model(wider, eval(advice[1], {"replace": replace, "config": config}))
    new = get_peft_model(tiny_bert(hidden_size=48), HoulsbyConfig(r=4, share_layers=1, task_type="SEQ_CLS"))
    assert model.get_nb_trainable_parameters() == new.get_nb_trainable_parameters()
    assert model.peft_config["default"].labels == new.peft_config["default"].labels
    assert model.peft_config["default"].record.base == new.peft_config["default"].record.base
