"""Precision, checkpointing, compilation, export, and quantized bases."""

from __future__ import annotations

import logging

import pytest
import torch
from packaging.version import Version
from peft import PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
)

from houlsby_peft import HoulsbyConfig, HoulsbyLayer
from tiny_models import perturb, tiny_bert


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VARIANTS = [
    {"share_layers": 3, "train_layer_norm": "all"},
    {"kind": "pfeiffer"},
    {"kind": "parallel"},
]


def adapted(fields=None, **changes):
    model = get_peft_model(
        tiny_bert(**{**NO_DROPOUT, **changes}), HoulsbyConfig(r=4, **(fields or {}))
    )
    perturb(model)
    return model.eval()


def gradients(model, ids, call=None):
    model.zero_grad()
    (model if call is None else call)(input_ids=ids, labels=ids[:, 0] % 3).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(computed, expected):
    assert computed.keys() == expected.keys()
    for name, gradient in computed.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_gradient_checkpointing_gives_the_same_gradients(fields, use_reentrant, token_ids):
    model = adapted(fields).train()
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
    model = adapted(VARIANTS[0], num_hidden_layers=1)
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
    model = adapted(VARIANTS[0], num_hidden_layers=2)
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
