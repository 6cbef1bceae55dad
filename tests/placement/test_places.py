"""Models made of models, and what selects places: layers, positions, exclusions."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    CLIPVisionConfig,
    EncoderDecoderModel,
    GPT2LMHeadModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    VisionEncoderDecoderModel,
    ViTModel,
    XLNetConfig,
    XLNetModel,
)

from architecture_rows import LAYERS, ROWS
from houlsby_peft import HoulsbyConfig, HoulsbyLayer
from houlsby_peft.placement.places import find_places
from tiny_models import perturb


EVERY_POSITION = ("attention", "feed_forward", "cross_attention")


def tiny(name, model_class, **changes):
    return model_class(model_class.config_class(**{**ROWS[name].config, **changes})).eval()


def two_berts():
    decoder = {"is_decoder": True, "add_cross_attention": True}
    return EncoderDecoderModel(encoder=tiny("bert", BertModel), decoder=tiny("bert", BertLMHeadModel, **decoder))


def image_to_text():
    decoder = tiny("gpt2", GPT2LMHeadModel, add_cross_attention=True)
    return VisionEncoderDecoderModel(encoder=tiny("vit", ViTModel), decoder=decoder)


def image_and_text():
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**ROWS["clip_vision_model"].config),
        text_config=LlamaConfig(**{**ROWS["llama"].config, "hidden_size": 24}),
        image_token_id=49,
    )
    return LlavaForConditionalGeneration(config)


class Wrapper(nn.Module):
    """A model of another library that holds one of transformers."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(nn.ModuleDict({"auto_model": BertModel(BertConfig(**ROWS["bert"].config))}))


BERT_ENDS = ("attention.output.dropout", "output.dropout")
BERT_CROSS = "crossattention.output.dropout"
GPT2_ENDS = ("attn.resid_dropout", "mlp.dropout", "crossattention.resid_dropout")
COMPOSITES = {
    two_berts: {
        "encoder.encoder.layer": BERT_ENDS,
        "decoder.bert.encoder.layer": (*BERT_ENDS, BERT_CROSS),
    },
    image_to_text: {
        "encoder.layers": ("attention.o_proj", "mlp.fc2"),
        "decoder.transformer.h": GPT2_ENDS,
    },
    image_and_text: {
        "model.vision_tower.encoder.layers": ("self_attn.out_proj", "mlp.fc2"),
        "model.language_model.layers": ("self_attn.o_proj", "mlp.down_proj"),
    },
    Wrapper: {"parts.0.auto_model.encoder.layer": BERT_ENDS},
}


@pytest.mark.parametrize(("build", "stacks"), COMPOSITES.items())
def test_the_parts_of_a_model_are_found_by_their_own_type(build, stacks):
    base = build()
    expected = {f"{stack}.{index}.{end}" for stack, ends in stacks.items() for index in range(LAYERS) for end in ends}
    places = find_places(base, HoulsbyConfig(positions=EVERY_POSITION))
    assert {key for key, place in places.items() if not place.is_norm} == expected
    assert {place.stack for place in places.values()} == set(stacks)


@pytest.mark.parametrize("build", [two_berts, image_to_text, image_and_text])
def test_the_parts_of_a_model_share_no_bottleneck(build):
    model = get_peft_model(build(), HoulsbyConfig(r=4, share_layers=LAYERS))
    owners = [name for name, module in model.named_modules() if getattr(module, "houlsby_adapter", None)]
    stacks = COMPOSITES[build]
    assert len(owners) == len(stacks)
    assert all(f".{stack}." in owner for stack, owner in zip(stacks, owners, strict=True))


def test_an_encoder_decoder_of_two_models_runs():
    torch.manual_seed(0)
    base = two_berts().eval()
    batch = {"input_ids": torch.randint(3, 50, (2, 5)), "decoder_input_ids": torch.randint(3, 50, (2, 4))}
    before = base(**batch).logits
    model = get_peft_model(base, HoulsbyConfig(r=4, positions=EVERY_POSITION))
    perturb(model)
    assert not torch.allclose(model(**batch).logits, before, atol=1e-3)
    with model.disable_adapter():
        torch.testing.assert_close(model(**batch).logits, before)


def test_cross_attention_that_the_model_does_not_have():
    with pytest.raises(ValueError, match=r"positions must name a sub-layer .* a BertModel of this configuration"):
        get_peft_model(ROWS["bert"].model(), HoulsbyConfig(positions=("cross_attention",)))


def test_xlnet_is_refused_and_its_feed_forward_can_be_adapted():
    config = XLNetConfig(vocab_size=50, d_model=16, n_layer=2, n_head=2, d_inner=24, pad_token_id=0)
    base, ids = XLNetModel(config).eval(), torch.randint(3, 50, (2, 5))
    with pytest.raises(ValueError, match=r"no module's output meets .* target_modules=\['ff.layer_2'\]"):
        get_peft_model(base, HoulsbyConfig(r=4))
    before = base(ids).last_hidden_state
    model = get_peft_model(base, HoulsbyConfig(r=4, target_modules=["ff.layer_2"]))
    assert sum(isinstance(module, HoulsbyLayer) for module in model.modules()) == 2
    perturb(model)
    assert not torch.allclose(model(ids).last_hidden_state, before, atol=1e-3)


def test_layers_of_one_stack_only():
    base = ROWS["bart"].model()
    both = find_places(base, HoulsbyConfig(layers_to_transform=[1]))
    assert {(place.stack, place.layer) for place in both.values()} == {("encoder.layers", 1), ("decoder.layers", 1)}
    one = find_places(base, HoulsbyConfig(layers_to_transform=[1], layers_pattern="decoder.layers"))
    assert {(place.stack, place.layer) for place in one.values()} == {("decoder.layers", 1)}


def test_norms_of_queries_and_keys_train_with_all_norms_only():
    base = ROWS["olmo2"].model()
    norms = {key for key, place in find_places(base, HoulsbyConfig()).items() if place.is_norm}
    every = {key for key, place in find_places(base, HoulsbyConfig(train_layer_norm="all")).items() if place.is_norm}
    queries = {f"layers.{index}.self_attn.{name}_norm" for index in range(LAYERS) for name in "qk"}
    assert every - norms == queries | {"norm"}


def test_a_norm_of_no_row_never_trains():
    every = find_places(ROWS["deberta-v2:v3"].model(), HoulsbyConfig(train_layer_norm="all"))
    assert "encoder.conv.LayerNorm" in every
    assert "encoder.LayerNorm" not in every


def test_a_bottleneck_inside_a_wrapped_module_is_refused():
    with pytest.raises(ValueError, match=r"'layers.0.mlp.down_proj' is inside 'layers.0.mlp'"):
        get_peft_model(ROWS["llama"].model(), HoulsbyConfig(target_modules=["mlp", "mlp.down_proj"]))
    model = get_peft_model(ROWS["llama"].model(), HoulsbyConfig(target_modules=["mlp.down_proj"]))
    with pytest.raises(ValueError, match=r"'layers.0.mlp.down_proj' is inside 'layers.0.mlp'"):
        model.add_adapter("outer", HoulsbyConfig(target_modules=["mlp", "mlp.down_proj"]))
