"""An adapter knows its base again, and warns on another one."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import PeftModel, get_peft_model

from houlsby_peft import HoulsbyConfig
from houlsby_peft.checkpoints.fingerprint import compare_fingerprints, fingerprint
from tiny_models import tiny_bert


@pytest.fixture
def adapter(tmp_path):
    base = tiny_bert()
    base.name_or_path = base.config._name_or_path = ""
    get_peft_model(base, HoulsbyConfig(r=4)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_base_is_recognized_in_any_precision_and_with_any_head(adapter, dtype):
    base = tiny_bert().to(dtype)
    torch.nn.init.ones_(base.classifier.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PeftModel.from_pretrained(base, adapter)


def test_a_base_with_resized_embeddings_is_the_same_base(adapter):
    base = tiny_bert()
    base.resize_token_embeddings(120, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PeftModel.from_pretrained(base, adapter)


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


def test_weights_that_cannot_be_read_never_differ():
    linear = torch.nn.Linear(8, 8)
    read = fingerprint(torch.nn.Module(), [linear])
    quantized = torch.nn.Linear(8, 8)
    quantized.weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    for unreadable in (quantized, torch.nn.Linear(8, 8, device="meta"), torch.nn.Dropout()):
        found = fingerprint(torch.nn.Module(), [unreadable])
        assert found["weights"] == [None]
        assert compare_fingerprints(read, found) == compare_fingerprints(found, read) == []
    assert compare_fingerprints(read, fingerprint(torch.nn.Module(), [torch.nn.Linear(8, 8)])) == ["other weights"]
