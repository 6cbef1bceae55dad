"""Norms that are called in other ways than most, and sub-layers that a forward pass leaves out."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertModel,
    BlipTextConfig,
    BlipTextModel,
    BlipVisionConfig,
    BlipVisionModel,
    GPT2Model,
    IBertConfig,
    IBertForSequenceClassification,
)

from architecture_rows import ROWS
from houlsby_peft import HoulsbyConfig, HoulsbyLayerNorm
from tiny_models import perturb


TEXT = {**ROWS["bert"].config, "num_labels": 3}
EVERY_POSITION = ("attention", "feed_forward", "cross_attention")


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


def test_a_norm_may_be_called_by_keyword():
    hidden = torch.randn(2, 4)
    layer = wrap(nn.LayerNorm(4), nn.LayerNorm(4))
    torch.testing.assert_close(layer(input=hidden), nn.functional.layer_norm(hidden, (4,)))


def test_a_float32_norm_in_a_bfloat16_model_returns_its_tuple_in_bfloat16():
    hidden = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    layer = wrap(Conditional(4).bfloat16(), Conditional(4))
    layer.norm("default").float()
    found, nothing = layer(hidden, hidden)
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


def blip_text():
    return BlipTextModel(BlipTextConfig(**TEXT, encoder_hidden_size=16, projection_dim=8), add_pooling_layer=False)


def blip_vision():
    return BlipVisionModel(BlipVisionConfig(**ROWS["vit"].config))


def bert():
    config = BertModel.config_class(**TEXT, is_decoder=True, add_cross_attention=True)
    return BertModel(config, add_pooling_layer=False)


def gpt2():
    return GPT2Model(GPT2Model.config_class(**ROWS["gpt2"].config, add_cross_attention=True))


def bart_decoder():
    return BartForCausalLM(BartConfig(**ROWS["bart"].config))


@pytest.mark.parametrize("share_layers", [0, 1])
@pytest.mark.parametrize("build", [blip_text, blip_vision, bert, gpt2, bart_decoder])
def test_every_weight_has_a_gradient_without_encoder_states(build, share_layers):
    """DistributedDataParallel waits for a gradient of every weight that trains."""
    torch.manual_seed(0)
    positions = EVERY_POSITION if build is not blip_vision else EVERY_POSITION[:2]
    config = HoulsbyConfig(r=4, positions=positions, share_layers=share_layers)
    model = get_peft_model(build(), config).train()
    batch = ROWS["vit" if build is blip_vision else "bert"].batch(2)
    output = model(**batch)[0]
    output.pow(2).mean().backward()
    trained = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    assert [name for name, gradient in trained.items() if gradient is None] == []
    crossing = {name for name in trained if any(word in name for word in ("cross", "encoder_attn"))}
    assert bool(crossing) == (build is not blip_vision)
    used = {name for name, gradient in trained.items() if gradient.any()}
    assert used == set(trained) - crossing


@pytest.mark.parametrize(("build", "width"), [(blip_text, 16), (bert, 16), (gpt2, 16), (bart_decoder, 16)])
def test_with_encoder_states_the_cross_attention_trains(build, width):
    """The gradients are those of a model whose layers know nothing of one another."""
    torch.manual_seed(0)
    model = get_peft_model(build().eval(), HoulsbyConfig(r=4, positions=EVERY_POSITION)).eval()
    batch = {**ROWS["bert"].batch(2), "encoder_hidden_states": torch.randn(2, 5, width)}
    found = []
    for optional in (True, False):
        if not optional:
            for module in model.modules():
                if hasattr(module, "optional"):
                    module.optional.clear()
        model.zero_grad()
        model(**batch)[0].pow(2).mean().backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad})
    assert all(gradient.any() for gradient in found[0].values())
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=0, atol=0)


def test_a_bottleneck_that_is_too_large_is_refused_at_once():
    with pytest.raises(ValueError, match=r"got r=100000000 at .*, whose width is 16\. Give an r of at most 1024"):
        get_peft_model(bert(), HoulsbyConfig(r=100_000_000))
    with pytest.raises(ValueError, match=r"got r=1025 at 'encoder.layer.0.output.dropout'"):
        get_peft_model(bert(), HoulsbyConfig(rank_pattern={"layer.0.output.dropout": 1025}))
    get_peft_model(bert(), HoulsbyConfig(r=1024))
