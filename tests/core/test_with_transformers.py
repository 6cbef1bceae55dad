"""What transformers does with adapters by itself, `Trainer`, tasks, and other methods beside."""

from __future__ import annotations

import pytest
import torch
import transformers
from peft import (
    AutoPeftModelForCausalLM,
    AutoPeftModelForFeatureExtraction,
    AutoPeftModelForQuestionAnswering,
    AutoPeftModelForSeq2SeqLM,
    AutoPeftModelForSequenceClassification,
    AutoPeftModelForTokenClassification,
    LoraConfig,
    PeftModel,
    get_peft_model,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from transformers import BertConfig

from contract_models import IDS, gpt2, t5
from houlsby_peft import HoulsbyConfig, ablate
from model_states import tensors_of, trained_names
from tiny_models import TINY_BERT, adapted, perturb_adapter, tiny_bert


# PEFT says this whenever a model gets a second adapter by way of transformers.
second_adapter = pytest.mark.filterwarnings(
    "ignore:Already found a `peft_config` attribute:UserWarning"
)


def tiny(class_name):
    return lambda: getattr(transformers, class_name)(BertConfig(**{**TINY_BERT, "num_labels": 2}))


TASKS = {
    "SEQ_CLS": (tiny("BertForSequenceClassification"), AutoPeftModelForSequenceClassification),
    "TOKEN_CLS": (tiny("BertForTokenClassification"), AutoPeftModelForTokenClassification),
    "QUESTION_ANS": (tiny("BertForQuestionAnswering"), AutoPeftModelForQuestionAnswering),
    "FEATURE_EXTRACTION": (tiny("BertModel"), AutoPeftModelForFeatureExtraction),
    "CAUSAL_LM": (gpt2, AutoPeftModelForCausalLM),
    "SEQ_2_SEQ_LM": (t5, AutoPeftModelForSeq2SeqLM),
}


@pytest.mark.parametrize("task", TASKS)
def test_every_task_type_of_peft(task, tmp_path):
    build, auto_class = TASKS[task]
    build().save_pretrained(tmp_path / "base")
    base = auto_class._target_class.from_pretrained(tmp_path / "base")
    model = adapted(base, task_type=task)
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if task == "SEQ_2_SEQ_LM" else {})
    expected = model(**inputs)[0]
    if task != "SEQ_2_SEQ_LM":
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(IDS))[0], expected)
    model.save_pretrained(tmp_path / "adapter")
    loaded = auto_class.from_pretrained(tmp_path / "adapter")
    assert type(loaded) is type(model)
    assert torch.equal(loaded.eval()(**inputs)[0], expected)


@second_adapter
def test_adapters_by_way_of_transformers(tmp_path, token_ids):
    model = tiny_bert()
    base = model(token_ids).logits
    model.add_adapter(HoulsbyConfig(r=4), "one")
    perturb_adapter(model, "one", seed=1)
    logits_of_one = model.eval()(token_ids).logits
    model.add_adapter(HoulsbyConfig(r=2, share_layers=1), "two")
    perturb_adapter(model, "two", seed=2)
    logits_of_two = model.eval()(token_ids).logits
    assert model.active_adapters() == ["two"]
    model.disable_adapters()
    assert torch.equal(model(token_ids).logits, base)
    model.enable_adapters()
    assert torch.equal(model(token_ids).logits, logits_of_two)
    assert "classifier.modules_to_save.two.weight" in trained_names(model)
    model.set_adapter("one")
    assert torch.equal(model(token_ids).logits, logits_of_one)
    model.save_pretrained(tmp_path)
    model.set_adapter(["one", "two"])
    assert not torch.allclose(model(token_ids).logits, logits_of_one, atol=1e-3)
    assert not torch.allclose(model(token_ids).logits, logits_of_two, atol=1e-3)
    model.delete_adapter("one")
    model.set_adapter("two")
    assert torch.equal(model(token_ids).logits, logits_of_two)

    loaded = tiny_bert()
    loaded.load_adapter(tmp_path, "renamed")
    loaded.set_adapter("renamed")
    assert torch.equal(loaded.eval()(token_ids).logits, logits_of_one)
    by_peft = PeftModel.from_pretrained(tiny_bert(), tmp_path)
    assert torch.equal(by_peft(token_ids).logits, logits_of_one)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    keys = loaded.get_adapter_state_dict("renamed").keys()
    assert {f"base_model.model.{key}" for key in keys} == saved.keys()


LORA = {"target_modules": ["query", "attention.output.dense"], "init_lora_weights": False}


@second_adapter
@pytest.mark.parametrize("lora_first", [True, False])
def test_a_lora_beside(lora_first, token_ids):
    """Both active: LoRA in the projections, the bottleneck after them, added in either order."""
    model = tiny_bert()
    configs = [(LoraConfig(**LORA), "low_rank"), (HoulsbyConfig(r=4), "mine")]
    for config, name in configs if lora_first else configs[::-1]:
        model.add_adapter(config, name)
    perturb_adapter(model, "mine", seed=1)
    model.eval().set_adapter(["low_rank", "mine"])
    logits = model(token_ids).logits

    merged = tiny_bert()
    with torch.no_grad():
        for name, module in model.named_modules():
            if hasattr(module, "lora_A"):
                weight = merged.get_submodule(name).weight
                weight += module.get_delta_weight("low_rank")
    alone = get_peft_model(merged, HoulsbyConfig(r=4), "mine").eval()
    weights = {}
    for key, value in model.state_dict().items():
        if ".mine." in key:
            weights[f"base_model.model.{key}"] = value
    assert not alone.load_state_dict(weights, strict=False).unexpected_keys
    torch.testing.assert_close(logits, alone(token_ids).logits, atol=1e-5, rtol=1e-5)

    for name in ("low_rank", "mine"):
        keys = model.get_adapter_state_dict(name).keys()
        assert keys
        assert all(("lora" in key) == (name == "low_rank") for key in keys)


@pytest.mark.filterwarnings("ignore:Already found")
def test_a_bottleneck_after_a_lora_in_the_same_module_is_refused(token_ids):
    """The file of the LoRA would have names that no other model has, and the order would change
    what both compute.
    """
    model = tiny_bert()
    model.add_adapter(
        LoraConfig(target_modules=["output.dense"], init_lora_weights=False), "low_rank"
    )
    expected = model.eval()(token_ids).logits
    with pytest.raises(ValueError, match="before"):
        model.add_adapter(HoulsbyConfig(r=4, target_modules=["output.dense"]), "mine")
    assert torch.equal(model(token_ids).logits, expected)


@second_adapter
@pytest.mark.parametrize("share_layers", [0, 3])
def test_a_lora_around_bottlenecks_of_the_same_modules(share_layers, tmp_path, token_ids):
    """As in Llama, whose bottlenecks follow the projections. The file has the adapter alone."""
    targets = ["attention.output.dense", "output.dense"]
    model = tiny_bert()
    model.add_adapter(HoulsbyConfig(r=4, target_modules=targets, share_layers=share_layers), "mine")
    model.add_adapter(LoraConfig(target_modules=targets, init_lora_weights=False), "low_rank")
    perturb_adapter(model, "mine", seed=1)
    model.eval().set_adapter(["mine", "low_rank"])
    with_lora = model(token_ids).logits
    model.set_adapter("mine")
    expected = model(token_ids).logits
    model.save_pretrained(tmp_path)
    alone = tiny_bert()
    alone.load_adapter(tmp_path)
    assert torch.equal(alone.eval()(token_ids).logits, expected)
    assert torch.equal(PeftModel.from_pretrained(tiny_bert(), tmp_path)(token_ids).logits, expected)

    saved = load_file(tmp_path / "adapter_model.safetensors")
    weights = {key.removeprefix("base_model.model."): tensor for key, tensor in saved.items()}
    perturb_adapter(model, "mine", seed=2)
    assert not torch.equal(model(token_ids).logits, expected)
    set_peft_model_state_dict(model, weights, adapter_name="mine")
    assert torch.equal(model(token_ids).logits, expected)
    with ablate(model, range(4)), ablate(alone, range(4)):
        assert torch.equal(model(token_ids).logits, alone(token_ids).logits)
        assert not torch.equal(model(token_ids).logits, expected)
    model.set_adapter(["mine", "low_rank"])
    assert torch.equal(model(token_ids).logits, with_lora)


# PEFT says that the model has been adapted before.
@pytest.mark.filterwarnings(
    "ignore:You are trying to modify a model with PEFT for a second time:UserWarning"
)
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
def test_adapters_of_other_methods_need_other_names(token_ids):
    lora = get_peft_model(tiny_bert(), LoraConfig(**LORA))
    with pytest.raises(ValueError, match="lora"):
        get_peft_model(lora.base_model.model, HoulsbyConfig(r=4))
    assert list(lora.peft_config) == ["default"]
    assert isinstance(lora.peft_config["default"], LoraConfig)
    model = get_peft_model(lora.base_model.model, HoulsbyConfig(r=4), adapter_name="mine").eval()
    with pytest.raises(ValueError, match="non-existing"):
        model(token_ids, adapter_names=["default"] * 5)
    model.add_adapter("second", HoulsbyConfig(r=4))
    with pytest.warns(UserWarning, match="Setting active adapter to second"):
        model.delete_adapter("mine")
    with pytest.raises(ValueError, match="third"):
        model.base_model.set_adapter(["second", "third"])


@pytest.mark.parametrize("build", [tiny_bert, gpt2], ids=["bert", "gpt2"])
def test_trained_tokens(build, tmp_path):
    fields = {"r": 4, "trainable_token_indices": [3, 5]}

    def base():
        torch.manual_seed(0)
        return build().eval()

    model = get_peft_model(base(), HoulsbyConfig(**fields), adapter_name="one")
    model.add_adapter("two", HoulsbyConfig(**fields))
    perturb_adapter(model, "one", seed=1)
    perturb_adapter(model, "two", seed=2)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "trainable_tokens_delta" in key:
                parameter += 1.0 + key.endswith("two")
    model.eval()
    model.set_adapter("two")
    expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(), tmp_path / "two")
    assert torch.equal(loaded(IDS).logits, expected)
    model.add_weighted_adapter(["one", "two"], [2.0, -1.0], "mean")
    of_one, of_two, mean = (
        tensors_of(model, "one"),
        tensors_of(model, "two"),
        tensors_of(model, "mean"),
    )
    assert any("token" in key for key in mean)
    for key, tensor in mean.items():
        torch.testing.assert_close(tensor, 2 * of_one[key] - of_two[key], atol=1e-6, rtol=0)
