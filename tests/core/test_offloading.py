"""Base models whose weights accelerate keeps on the CPU or on disk, on the meta device, or places
by a map.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook
from peft import PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from torch import nn
from transformers import BertForSequenceClassification

from contract_models import IDS, llama
from houlsby_peft import HoulsbyConfig, init_from, prune
from houlsby_peft.method.bottleneck import Bottleneck
from houlsby_peft.method.modules import device_of
from model_states import trained_names
from tiny_models import adapted, perturb, tiny_bert


CPU = torch.device("cpu")
ON_DISK = {
    "bert.embeddings": "cpu",
    "bert.encoder.layer.0": "cpu",
    "bert.encoder.layer.1": "disk",
    "bert.encoder.layer.2": "disk",
    "bert.encoder.layer.3": "cpu",
    "bert.pooler": "cpu",
    "classifier": "cpu",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    tiny_bert().save_pretrained(path / "base")
    model = adapted(load(path), share_layers=2)
    model.save_pretrained(path / "adapter")
    return path


def load(path, **kwargs):
    return BertForSequenceClassification.from_pretrained(path / "base", **kwargs).eval()


def expected(saved, token_ids):
    return PeftModel.from_pretrained(load(saved), saved / "adapter")(token_ids).logits


def quantize(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def test_an_adapter_on_an_offloaded_base(saved, token_ids):
    base = load(saved)
    cpu_offload(base, execution_device=CPU)
    assert all(parameter.is_meta for parameter in base.parameters())
    model = PeftModel.from_pretrained(base, saved / "adapter", is_trainable=True).eval()
    in_memory = {name for name, weight in model.named_parameters() if not weight.is_meta}
    assert in_memory == trained_names(model)
    assert torch.equal(model(token_ids).logits, expected(saved, token_ids))
    model(token_ids).logits.sum().backward()
    assert all(model.get_parameter(name).grad is not None for name in in_memory)


def test_offloading_a_model_with_an_adapter(saved, token_ids):
    model = PeftModel.from_pretrained(load(saved), saved / "adapter")
    cpu_offload(model, execution_device=CPU)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(token_ids).logits, expected(saved, token_ids))


# Both announce the end of torch.ao's quantization.
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor, torch.quantize_per_channel:UserWarning"
)
@pytest.mark.parametrize(("change", "word"), [(cpu_offload, "offloaded"), (quantize, "quantized")])
def test_adapters_that_are_not_at_hand_are_neither_saved_nor_changed(change, word, saved, tmp_path):
    """Sums of offloaded weights would be lost, and PyTorch only warns that nothing is copied."""
    model = PeftModel.from_pretrained(load(saved), saved / "adapter")
    model = change(model) or model
    calls = [partial(model.save_pretrained, tmp_path), partial(prune, model, [0], "small")]
    if change is cpu_offload:
        calls.append(partial(model.add_weighted_adapter, ["default"], [0.5], "half"))
        calls.append(partial(init_from, model, saved / "adapter"))
    for call in calls:
        with pytest.raises(ValueError, match=word):
            call()
    assert list(model.peft_config) == ["default"]
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.parametrize("build", [tiny_bert, llama])
def test_a_mixed_batch(build, with_adapters):
    names = ["one", "no norms", "upper", "__base__", "one", "two"]
    model = build().eval()
    if not with_adapters:
        cpu_offload(model, execution_device=CPU)
    model = get_peft_model(model, HoulsbyConfig(r=4), "one")
    model.add_adapter("two", HoulsbyConfig(r=4))
    model.add_adapter("no norms", HoulsbyConfig(r=4, train_layer_norm=False))
    model.add_adapter("upper", HoulsbyConfig(r=4, layers_to_transform=[1]))
    for seed, name in enumerate(model.peft_config):
        model.set_adapter(name)
        perturb(model, seed)
    if with_adapters:
        cpu_offload(model, execution_device=CPU)
    mixed = model.eval()(IDS, adapter_names=names).logits
    for row, name in enumerate(names[:3]):
        model.set_adapter(name)
        torch.testing.assert_close(mixed[row], model(IDS).logits[row], atol=1e-5, rtol=1e-5)
    with model.disable_adapter():
        torch.testing.assert_close(mixed[3], model(IDS).logits[3], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings(
    "ignore:The PEFT config's `base_model_name_or_path` was renamed:UserWarning"
)
def test_a_base_with_layers_on_disk(saved, tmp_path, token_ids):
    """PEFT cannot load an adapter with one that has no hooks yet, but onto one with an adapter."""
    base = load(saved, device_map=ON_DISK, offload_folder=tmp_path)
    assert any(parameter.is_meta for parameter in base.parameters())
    model = get_peft_model(base, HoulsbyConfig.from_pretrained(saved / "adapter"))
    set_peft_model_state_dict(model, load_peft_weights(saved / "adapter", device="cpu"))
    assert torch.equal(model.eval()(token_ids).logits, expected(saved, token_ids))
    model.load_adapter(saved / "adapter", "again")
    model.set_adapter("again")
    assert torch.equal(model(token_ids).logits, expected(saved, token_ids))


def test_a_base_on_the_meta_device_is_filled_later(saved, token_ids):
    with torch.device("meta"):
        base = tiny_bert()
    model = get_peft_model(base, HoulsbyConfig(r=4, share_layers=2), low_cpu_mem_usage=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    full = PeftModel.from_pretrained(load(saved), saved / "adapter")
    # Tables of positions are no weights and are not in the state dict.
    buffers = dict(full.named_buffers())
    for name, _ in list(model.named_buffers()):
        parent, _, key = name.rpartition(".")
        model.get_submodule(parent)._buffers[key] = buffers[name]
    model.load_state_dict(full.state_dict(), assign=True)
    assert torch.equal(model.eval()(token_ids).logits, expected(saved, token_ids))


def test_the_device_of_weights_that_are_quantized_or_elsewhere():
    quantized = nn.Module()
    quantized.register_buffer("qweight", torch.zeros(4, dtype=torch.int32))
    assert device_of(quantized) == CPU
    quantized._hf_hook = AlignDevicesHook(execution_device="cuda:1")
    assert device_of(quantized) == torch.device("cuda:1")
    assert device_of(nn.Dropout()) is None
    assert device_of(nn.Linear(2, 2, device="meta")) is None


@pytest.mark.cuda
def test_a_shared_bottleneck_serves_a_layer_on_another_device():
    bottleneck = Bottleneck(HoulsbyConfig(r=2, init_weights=False), 8)
    hidden = torch.randn(3, 8)
    expected = bottleneck(hidden)
    torch.testing.assert_close(bottleneck.to("cuda")(hidden), expected)
