"""Norms that are called in other ways than most."""

from __future__ import annotations

import torch
from peft import get_peft_model
from torch import nn
from transformers import IBertConfig, IBertForSequenceClassification

from architecture_rows import ROWS
from houlsby_peft import HoulsbyConfig, HoulsbyLayerNorm
from tiny_models import perturb


TEXT = {**ROWS["bert"].config, "num_labels": 3}


class Conditional(nn.LayerNorm):
    """A norm with an argument of its own, which returns a tuple."""

    def forward(self, hidden, shift, *, scale=1.0):
        return super().forward(hidden) * scale + shift, None


def wrap(norm, trained):
    """A tuner layer around a norm, and the copy that its adapter trains."""
    layer = HoulsbyLayerNorm(norm)
    layer.update_layer("default")
    layer.set_adapter(["default"])
    layer.norm("default").load_state_dict(trained.state_dict())
    return layer


def test_a_norm_may_have_other_arguments_and_return_a_tuple():
    torch.manual_seed(0)
    hidden, shift = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    trained = Conditional(4)
    nn.init.normal_(trained.weight)
    layer = wrap(Conditional(4), trained)
    found, nothing = layer(hidden, shift, scale=2.0)
    assert nothing is None
    torch.testing.assert_close(found, 2 * nn.functional.layer_norm(hidden, (4,), trained.weight) + shift)
    layer.enable_adapters(False)
    torch.testing.assert_close(layer(hidden, shift=shift)[0], nn.functional.layer_norm(hidden, (4,)) + shift)
    # A float32 norm in a bfloat16 model.
    layer = wrap(Conditional(4).bfloat16(), trained)
    layer.norm("default").float()
    found, nothing = layer(hidden=hidden.bfloat16(), shift=shift.bfloat16())
    assert nothing is None
    assert found.dtype == torch.bfloat16


def test_ibert_trains_its_norms_and_mixes_adapters():
    torch.manual_seed(0)
    base = IBertForSequenceClassification(IBertConfig(**TEXT)).eval()
    ids = torch.randint(3, 50, (3, 6))
    model = get_peft_model(base, HoulsbyConfig(r=4, modules_to_save=[])).eval()
    model.add_adapter("other", HoulsbyConfig(r=4, modules_to_save=[]))
    alone = {}
    for seed, name in enumerate(("default", "other")):
        model.set_adapter(name)
        perturb(model, seed=seed)
        alone[name] = model(ids).logits
    names = ["default", "other", "default"]
    mixed = model(ids, adapter_names=names).logits
    torch.testing.assert_close(mixed, torch.stack([alone[name][row] for row, name in enumerate(names)]))
    model.train()(ids).logits.sum().backward()
    norms = [weight.grad for name, weight in model.named_parameters() if "houlsby_norm.other" in name]
    assert len(norms) == 2 * 2 * TEXT["num_hidden_layers"]
    assert all(gradient is not None and gradient.any() for gradient in norms)
