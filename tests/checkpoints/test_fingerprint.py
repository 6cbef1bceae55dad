"""An adapter recognizes its base model: `load` refuses another one, PEFT and transformers warn about it."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, BertForMaskedLM

import houlsby_peft
from houlsby_peft import AdapterError, HoulsbyConfig
from houlsby_peft.checkpoints.fingerprint import compare_fingerprints, fingerprint, is_fingerprint
from houlsby_peft.placement.plan import Plan
from hub_models import make_adapter, make_base
from tiny_models import tiny_bert


@pytest.fixture
def adapter(tmp_path):
    base = tiny_bert()
    base.name_or_path = base.config._name_or_path = ""
    get_peft_model(base, HoulsbyConfig(r=4)).save_pretrained(tmp_path)
    return tmp_path


def assert_is_recognized(base, adapter):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PeftModel.from_pretrained(base, adapter)


def fingerprint_of(model, config=None):
    return Plan(model, config or HoulsbyConfig(r=4)).base


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_base_is_recognized_in_any_precision_and_with_any_head(adapter, dtype):
    base = tiny_bert().to(dtype)
    torch.nn.init.ones_(base.classifier.weight)
    assert_is_recognized(base, adapter)


def test_any_two_precisions_have_the_same_fingerprint():
    """Values of every size, also those that float16 can hardly hold."""
    base = tiny_bert()
    with torch.no_grad():
        for number, weight in enumerate(base.parameters()):
            weight.mul_(10.0 ** (number % 9 - 7))
    found = [fingerprint_of(tiny_bert().to(d)) for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
    assert not any(compare_fingerprints(one, other) for one in found for other in found)


def test_a_base_with_resized_embeddings_is_the_same_base(adapter, tmp_path):
    base = tiny_bert()
    base.resize_token_embeddings(120, mean_resizing=False)
    assert_is_recognized(base, adapter)
    base = tiny_bert()
    base.resize_token_embeddings(120, mean_resizing=False)
    get_peft_model(base, HoulsbyConfig(r=4)).save_pretrained(tmp_path / "resized", save_embedding_layers=False)
    for size in (99, 110):
        base = tiny_bert()
        base.resize_token_embeddings(size, mean_resizing=False)
        assert_is_recognized(base, tmp_path / "resized")


def test_every_weight_that_is_replaced_is_noticed_and_named():
    recorded = fingerprint_of(tiny_bert())
    base = tiny_bert()
    replaced = set()
    for name, module in base.bert.named_modules():
        if (weights := dict(module.named_parameters(recurse=False))) and name:
            for key, weight in weights.items():
                before = weight.detach().clone()
                nn.init.normal_(weight, std=0.02)
                place = ".".join(name.split(".")[:3]) if name.startswith("encoder") else name
                found = compare_fingerprints(recorded, fingerprint_of(base))
                assert found == [f"other weights in {place}"], f"{name}.{key}"
                weight.data.copy_(before)
                replaced.add(type(module).__name__)
    assert replaced == {"Embedding", "LayerNorm", "Linear"}
    assert compare_fingerprints(recorded, fingerprint_of(base)) == []
    for layer in base.bert.encoder.layer[1:]:
        layer.apply(base._init_weights)
    assert compare_fingerprints(recorded, fingerprint_of(base)) == [
        "other weights in encoder.layer.1, encoder.layer.2, encoder.layer.3"
    ]


def test_the_record_is_small():
    base = tiny_bert(num_hidden_layers=12)
    text = json.dumps(fingerprint_of(base), indent=2)
    assert 2000 < len(text) < 5000, "whatever the width, the file of BERT-base grows by as much"


def test_another_base_is_refused_by_load_and_warned_about_by_peft_and_transformers(tmp_path):
    folder = make_base(tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", folder, str(folder))

    def other_base():
        base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
        # A new module, which has no mark of transformers that it was loaded.
        base.bert.embeddings.word_embeddings = nn.Embedding(200, 32)
        nn.init.normal_(base.bert.encoder.layer[1].output.dense.weight)
        return base

    message = r"was trained on .* differs: other weights in embeddings\.word_embeddings, encoder\.layer\.1"
    first = houlsby_peft.load(adapter, base_model=AutoModelForSequenceClassification.from_pretrained(folder))
    before = {name: weight.clone() for name, weight in first.model.state_dict().items()}
    with pytest.raises(AdapterError, match=message):
        houlsby_peft.load(adapter, base_model=other_base())
    nn.init.normal_(first.base_model.bert.embeddings.LayerNorm.weight)
    with pytest.raises(AdapterError, match=r"differs: other weights in embeddings\.LayerNorm\. "):
        houlsby_peft.load(adapter, beside=first)
    assert first.model.state_dict().keys() == before.keys()
    with pytest.warns(UserWarning, match=message):
        model = PeftModel.from_pretrained(other_base(), adapter)
    with pytest.warns(UserWarning, match=message):
        model.load_adapter(adapter, "again")
    with pytest.warns(UserWarning, match=message):
        other_base().load_adapter(str(adapter))


@pytest.mark.parametrize("trained", [AutoModel, AutoModelForSequenceClassification, BertForMaskedLM], ids=str)
def test_a_base_of_another_task_class_is_the_same_base(trained, tmp_path):
    """Its checkpoint has neither pooler nor head, so that each class makes new ones, if it has any."""
    folder = make_base(tmp_path / "base")
    BertForMaskedLM.from_pretrained(folder).bert.save_pretrained(tmp_path / "encoder")
    recorded = Plan(trained.from_pretrained(tmp_path / "encoder"), HoulsbyConfig(r=4)).new_record().base
    for used in (AutoModel, AutoModelForSequenceClassification, AutoModelForMaskedLM):
        base = used.from_pretrained(tmp_path / "encoder")
        encoder = getattr(base, "bert", base)
        assert compare_fingerprints(recorded, fingerprint_of(base)) == []
        nn.init.normal_(encoder.encoder.layer[1].output.LayerNorm.bias)
        assert compare_fingerprints(recorded, fingerprint_of(base)) == ["other weights in encoder.layer.1"]


def test_other_weights_of_the_same_shape_are_warned_about_with_both_names(adapter):
    base = tiny_bert(seed=1)
    base.name_or_path = "somebody/another-bert"
    config = HoulsbyConfig.from_pretrained(adapter)
    config.base_model_name_or_path = "somebody/the-right-bert"
    config.save_pretrained(adapter)
    with pytest.warns(UserWarning, match="'somebody/the-right-bert'.*'somebody/another-bert'.*other weights"):
        PeftModel.from_pretrained(base, adapter)


def test_another_configuration_is_warned_about_with_both_values(adapter):
    with pytest.warns(UserWarning, match="intermediate_size 48, here 64"):
        PeftModel.from_pretrained(tiny_bert(intermediate_size=64), adapter)


def test_one_config_object_may_make_adapters_on_several_bases():
    config = HoulsbyConfig(r=4)
    get_peft_model(tiny_bert(), config)
    first = config.record.base
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        get_peft_model(tiny_bert(seed=1), config)
    assert config.record.base != first


class Packed(nn.Parameter):
    """Stands for a quantized weight, which may be stored in a dtype of numbers and in any shape."""


def quantized(linear):
    linear.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    return linear


def packed(linear):
    linear.weight = Packed(torch.ones(16, 1, dtype=torch.bfloat16), requires_grad=False)
    return linear


def sharded(linear):
    linear.weight.data = torch.empty(0)
    return linear


def test_weights_that_cannot_be_read_never_differ():
    def read(*modules):
        return fingerprint(nn.Module(), [(str(number), module) for number, module in enumerate(modules)], modules)

    ours = read(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    assert compare_fingerprints(ours, read(nn.Linear(8, 8), nn.Linear(8, 8))) == ["other weights in 0, 1"]
    for unreadable in (
        *(make(nn.Linear(8, 8, bias=False)) for make in (quantized, packed, sharded)),
        nn.Linear(8, 8, bias=False, device="meta"),
        nn.Linear(8, 8, bias=False).to(torch.float8_e4m3fn),
        nn.Dropout(),
    ):
        found = read(unreadable, unreadable)
        assert found["weights"] == [None, None]
        assert found["tensors"] == {}
        assert compare_fingerprints(ours, found) == compare_fingerprints(found, ours) == []


def test_fingerprints_of_earlier_versions_compare_the_weights_of_two_places():
    old = {key: value for key, value in fingerprint_of(tiny_bert()).items() if key != "tensors"}
    assert is_fingerprint(old)
    for dtype in (torch.float32, torch.float16):
        assert compare_fingerprints(old, fingerprint_of(tiny_bert().to(dtype))) == []
    assert compare_fingerprints(old, fingerprint_of(tiny_bert(seed=1))) == ["other weights"]


@pytest.mark.parametrize("tensors", [[], {"a": 1}, {"a": "x"}, {"a": "AAAA"}, {"a": "é"}, {"a": ["AAAAAAAAAAA="]}])
def test_values_that_no_version_writes_are_no_fingerprint(tensors):
    assert is_fingerprint({"config": {}, "weights": [], "tensors": {"a.*.b": "AAAAAAAAAAA=", "none": ""}})
    assert not is_fingerprint({"config": {}, "weights": [], "tensors": tensors})
