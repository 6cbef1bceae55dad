"""Precision, devices, checkpointing, compilation, export, and quantized bases."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from packaging.version import Version
from peft import PeftModel, get_peft_model
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
)

from houlsby_peft import HoulsbyConfig, HoulsbyLayer
from tiny_models import adapted, perturb, perturb_adapter, tiny_bert


VARIANTS = [
    {"share_layers": 3, "train_layer_norm": "all"},
    {"kind": "pfeiffer"},
    {"kind": "parallel"},
]


def without_dropout(**changes):
    return tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **changes)


def gradients(model, ids, call=None, autocast=False):
    model.zero_grad()
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        loss = (model if call is None else call)(input_ids=ids, labels=ids[:, 0] % 3).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(computed, expected):
    assert computed.keys() == expected.keys()
    for name, gradient in computed.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-5)


every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
every_precision = pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [(torch.float32, False, 1e-5), (torch.float32, True, 0.05), (torch.bfloat16, False, 0.05)],
    ids=["float32", "autocast", "base in bfloat16"],
)


def joined(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def assert_near(computed, expected, tolerance):
    """Compare with what float64 gives, relative to its norm."""
    assert (computed.cpu().double() - expected).norm() <= tolerance * expected.norm()


@every_device
@every_precision
def test_gradients_are_those_of_float64(device, dtype, autocast, tolerance, token_ids):
    model = adapted(tiny_bert().to(dtype), task_type="SEQ_CLS")
    expected = gradients(copy.deepcopy(model).double(), token_ids)
    computed = gradients(model.to(device), token_ids.to(device), autocast=autocast)
    assert_near(joined(computed), joined(expected), tolerance)


@every_device
def test_adapters_are_created_and_loaded_where_the_base_model_is(device, token_ids, tmp_path):
    model = get_peft_model(tiny_bert().to(device), HoulsbyConfig(r=4, task_type="SEQ_CLS"))
    assert {weight.device.type for weight in model.parameters()} == {device}
    saved = adapted(task_type="SEQ_CLS")
    saved.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_bert().to(device), tmp_path)
    assert {weight.device.type for weight in loaded.parameters()} == {device}
    expected = saved.double()(token_ids).logits
    assert_near(loaded(token_ids.to(device)).logits, expected, 1e-4)


@every_device
@every_precision
@torch.no_grad()
def test_rows_of_several_adapters(device, dtype, autocast, tolerance, token_ids):
    model = adapted(tiny_bert().to(dtype), "first")
    for seed, name in enumerate(("second", "third")):
        model.add_adapter(name, HoulsbyConfig(r=4))
        perturb_adapter(model, name, seed)
    names = ["third", "first", "__base__", "third", "second"]
    alone, expected = copy.deepcopy(model).double(), []
    for row, name in zip(token_ids, names, strict=True):
        expected.append(alone(row[None], adapter_names=[name]).logits)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        mixed = model.to(device)(token_ids.to(device), adapter_names=names).logits
    assert_near(mixed, torch.cat(expected), tolerance)


def test_a_head_computes_in_float32(token_ids):
    model = adapted(tiny_bert().bfloat16(), task_type="SEQ_CLS")
    wrapper = model.base_model.model.classifier
    pooled = []
    wrapper.register_forward_pre_hook(lambda _, args: pooled.append(args[0]))
    logits = model(token_ids).logits
    assert pooled[0].dtype == torch.bfloat16
    head = wrapper.modules_to_save["default"]
    assert head.weight.dtype == torch.float32
    # On a GPU, no squared error of labels in float32 could be computed otherwise.
    assert logits.dtype == torch.float32
    assert torch.equal(logits, F.linear(pooled[0].float(), head.weight, head.bias))
    with model.disable_adapter():
        assert torch.equal(model(token_ids).logits, tiny_bert().bfloat16()(token_ids).logits)


def test_what_the_base_model_goes_on_with_has_its_dtype(token_ids):
    base = tiny_bert().bfloat16()
    model = adapted(base, modules_to_save=["bert.embeddings", "pooler"])
    heads = [weight for name, weight in model.named_parameters() if "modules_to_save.d" in name]
    assert {weight.dtype for weight in heads} == {torch.float32}
    pooled = []
    base.bert.pooler.register_forward_hook(lambda *call: pooled.append(call[-1].dtype))
    model(token_ids)
    assert pooled == [torch.bfloat16]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_gradient_checkpointing_gives_the_same_gradients(fields, use_reentrant, token_ids):
    model = adapted(without_dropout(), **fields).train()
    expected = gradients(model, token_ids)
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": use_reentrant})
    calls = []
    layers = [module for module in model.modules() if isinstance(module, HoulsbyLayer)]
    layers[0].register_forward_hook(lambda *args: calls.append(1))
    assert_close(gradients(model, token_ids), expected)
    assert len(calls) == 2, "the layer must have run again in the backward pass"
    assert not any(layer.skip._inputs for layer in layers if layer.skip)


traced = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.7"),
    reason="PyTorch 2.6 cannot trace transformers 5's own models",
)


@traced
def test_compiled_without_a_graph_break(token_ids):
    torch._dynamo.reset()
    model = adapted(without_dropout(num_hidden_layers=1), **VARIANTS[0])
    model.add_adapter("beside", HoulsbyConfig(r=4, kind="pfeiffer"))
    model.base_model.set_adapter(["default", "beside"])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(token_ids).logits, model(token_ids).logits, atol=1e-5, rtol=1e-5
        )
    model.train()
    assert_close(gradients(model, token_ids, call=compiled), gradients(model, token_ids))


@traced
def test_exported_for_inference(token_ids):
    model = adapted(tiny_bert(num_hidden_layers=2), **VARIANTS[0])
    with torch.no_grad():
        exported = torch.export.export(model, (token_ids,)).module()
        torch.testing.assert_close(
            exported(token_ids.flip(0)).logits, model(token_ids.flip(0)).logits
        )


LLAMA = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
QUANTIZED = {
    "bitsandbytes 8 bit": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True)),
    "bitsandbytes 4 bit": (
        "bitsandbytes",
        lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    ),
    "torchao int8": ("torchao", lambda: TorchAoConfig(torchao_int8())),
}


def torchao_int8():
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.filterwarnings(
    "ignore"
)  # These packages warn of kernels for other machines, and of their own future.
def test_a_quantized_base(name, tmp_path, caplog):
    package, config = QUANTIZED[name]
    pytest.importorskip(
        package, reason=f"{package} is not installed: pip install 'houlsby-peft[quantized]'"
    )
    caplog.set_level(logging.ERROR)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(**LLAMA, num_attention_heads=2, num_key_value_heads=2)
    ).save_pretrained(tmp_path)
    ids = torch.randint(3, 64, (4, 6))

    def load():
        return AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=config(), device_map={"": "cpu"}
        )

    def logits(model, **kwargs):
        with torch.no_grad():
            return model(input_ids=ids, **kwargs).logits

    # Before anything else, as bitsandbytes' 4-bit layers cannot be trained through once they have
    # inferred on a CPU.
    model = get_peft_model(load(), HoulsbyConfig(r=4, task_type="CAUSAL_LM")).train()
    model(input_ids=ids, labels=ids).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {weight.dtype for weight in trained} == {torch.float32}
    assert all(weight.grad.any() for weight in trained)

    base = load()
    weight = base.model.layers[0].mlp.down_proj.weight
    assert weight.dtype in (torch.int8, torch.uint8) or type(weight.data) is not torch.Tensor
    expected = logits(base)
    model = get_peft_model(base, HoulsbyConfig(r=4, task_type="CAUSAL_LM")).eval()
    perturb(model)
    model.add_adapter("other", HoulsbyConfig(r=2, share_layers=1))
    adapted = logits(model)
    assert not torch.allclose(adapted, expected, atol=1e-2)
    mixed = logits(model, adapter_names=["default", "__base__", "default", "__base__"])
    torch.testing.assert_close(mixed[::2], adapted[::2], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mixed[1::2], expected[1::2], atol=1e-4, rtol=1e-4)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(load(), tmp_path / "adapter")
    assert torch.equal(logits(loaded), adapted)
    assert torch.equal(logits(loaded.unload()), expected)
