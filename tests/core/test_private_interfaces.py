"""Overrides of PEFT's internal methods whose effect no other test sees; docs/architecture.md lists all of them."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from houlsby_peft import HoulsbyConfig
from tiny_models import perturb, tiny_bert


@pytest.mark.parametrize("call", ["merge_and_unload", "merge_adapter"])
def test_a_refused_merge_changes_nothing(call, token_ids):
    """Trained tokens come first in the model, and could be merged."""
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, trainable_token_indices=[1, 2])).eval()
    perturb(model)
    modules, logits = [name for name, _ in model.named_modules()], model(token_ids).logits
    with pytest.raises(ValueError, match="cannot be merged"):
        getattr(model, call)()
    assert [name for name, _ in model.named_modules()] == modules
    assert not any(getattr(module, "merged", False) for module in model.modules())
    assert torch.equal(model(token_ids).logits, logits)


@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_a_base_model_in_half_precision_does_not_round_a_loaded_adapter(low_cpu_mem_usage, tmp_path):
    """PEFT moves each adapter to its module's device, and to its dtype unless that is overridden."""
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, target_modules=["attention.output.dense"]))
    perturb(model)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    base = tiny_bert().to(torch.bfloat16)
    loaded = PeftModel.from_pretrained(base, tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    found = get_peft_model_state_dict(loaded)
    assert found.keys() == saved.keys()
    for key, tensor in saved.items():
        if ".houlsby_" in key:
            assert torch.equal(found[key], tensor), key
