"""Models with adapters can be quantized to 8-bit integers, by torch.ao and torchao, and used as
before.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from peft import get_peft_model

import houlsby_peft
from houlsby_peft import HoulsbyConfig
from hub_models import TEXTS, make_adapter
from tiny_models import perturb, tiny_bert


# Both announce the end of torch.ao's eager quantization, for which torchao is the successor.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization is deprecated:DeprecationWarning",
    "ignore:torch.quantize_per_tensor, torch.quantize_per_channel:UserWarning",
)
NAMES = ["first", "second", "__base__", "second", "first"]


def with_torch_ao(model, inplace=False):
    return torch.ao.quantization.quantize_dynamic(
        model, {torch.nn.Linear}, dtype=torch.qint8, inplace=inplace
    )


def with_torchao(model, inplace=False):
    pytest.importorskip("torchao", reason="the extra quantized is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        model = model if inplace else copy.deepcopy(model)
        quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


@pytest.fixture(scope="module")
def model():
    """Two adapters, one of which shares its bottlenecks and has a head of its own."""
    shared = HoulsbyConfig(r=4, share_layers=2, id2label=dict(enumerate("abcd")))
    model = get_peft_model(tiny_bert(), shared, adapter_name="first")
    perturb(model)
    model.add_adapter("second", HoulsbyConfig(r=4, activation="relu"))
    model.set_adapter("second")
    perturb(model, seed=2)
    model.set_adapter("first")
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize(
    "quantize", [with_torch_ao, pytest.param(with_torchao, marks=pytest.mark.slow)]
)
def test_every_linear_layer_is_quantized_and_the_outputs_stay_close(model, token_ids, quantize):
    quantized = quantize(model)
    for module in quantized.modules():
        assert type(module) is not torch.nn.Linear or type(module.weight.data) is not torch.Tensor
    for options in ({}, {"adapter_names": ["second"] * 5}, {"adapter_names": NAMES}):
        expected = model(input_ids=token_ids, **options).logits
        logits = quantized(input_ids=token_ids, **options).logits
        assert logits.isinf().equal(expected.isinf())  # the padding of heads with fewer labels
        difference = (logits - expected).nan_to_num(nan=0).abs().max()
        assert 0 < difference < 0.1 * expected[expected.isfinite()].abs().max()
    # Each row is what its adapter gives alone.
    mixed = quantized(input_ids=token_ids, adapter_names=NAMES).logits
    alone = quantized(input_ids=token_ids, adapter_names=["second"] * 5).logits
    assert torch.allclose(mixed[[1, 3], :3], alone[[1, 3], :3], atol=2e-2)


def test_a_loaded_adapter_predicts_after_quantization_in_place(base, tmp_path):
    adapter = houlsby_peft.load(make_adapter(tmp_path / "adapter", base, str(base)))
    texts = [text for text, _ in TEXTS]
    in_full = [result["score"] for result in adapter.predict(texts)]
    with_torch_ao(adapter.model, inplace=True)
    quantized = [result["score"] for result in adapter.predict(texts)]
    assert quantized != in_full
    assert quantized == pytest.approx(in_full, abs=0.1)
