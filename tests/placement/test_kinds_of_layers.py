"""Lists whose layers differ, models with a list for each part of a layer, and composites of such models."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers
from peft import get_peft_model

from architecture_rows import ROWS
from houlsby_peft import HoulsbyConfig
from houlsby_peft.layer import base_modules
from houlsby_peft.placement import inference
from houlsby_peft.placement.place import fold_places, unfold_places
from houlsby_peft.placement.places import find_places


TEXT = ROWS["llama"].config


def config_of(name, **changes):
    return getattr(transformers, ROWS[name].model_class).config_class(**{**ROWS[name].config, **changes})


def instruct_blip():
    config = transformers.InstructBlipConfig(
        vision_config=config_of("instructblip_vision_model").to_dict(),
        qformer_config=config_of("instructblip_qformer").to_dict(),
        text_config=config_of("opt").to_dict(),
        image_token_index=49,
    )
    return transformers.InstructBlipForConditionalGeneration(config)


def gemma4():
    config = transformers.Gemma4Config(
        text_config=config_of("gemma4_text"),
        vision_config=config_of("gemma4_vision"),
        audio_config=config_of("gemma4_audio"),
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def parakeet():
    config = transformers.ParakeetCTCConfig(encoder_config=config_of("parakeet_encoder").to_dict(), vocab_size=10)
    return transformers.ParakeetForCTC(config)


def seamless(name):
    return getattr(transformers, f"{name}Model")(config_of("seamless_m4t_v2" if "v2" in name else "seamless_m4t"))


CONFORMER = ("self_attn_dropout", "ffn1.output_dropout", "ffn2.output_dropout")
SHORTENING = ("self_attn_dropout", "ffn.output_dropout")
ENCODER, DECODER = ("attn_dropout", "ffn_dropout"), ("self_attn.out_proj", "ffn_dropout")
SEAMLESS = {
    "speech_encoder.encoder.layers": CONFORMER,
    "speech_encoder.adapter.layers": SHORTENING,
    "text_encoder.layers": ENCODER,
    "text_decoder.layers": DECODER,
    "t2u_model.model.encoder.layers": ENCODER,
    "t2u_model.model.decoder.layers": DECODER,
}
COMPOSITES = {
    "InstructBLIP": (
        instruct_blip,
        {
            "vision_model.encoder.layers": ("self_attn.projection", "mlp.fc2"),
            "qformer.encoder.layer": ("attention.output.dropout", "output_query.dropout", "output.dropout"),
            "language_model.decoder.layers": ("self_attn.out_proj", "fc2"),
        },
    ),
    "Gemma 4": (
        gemma4,
        {
            "language_model.layers": ("self_attn.o_proj", "mlp.down_proj"),
            "vision_tower.encoder.layers": ("self_attn.o_proj", "mlp.down_proj"),
            "audio_tower.layers": ("self_attn.post", "feed_forward1.ffw_layer_2", "feed_forward2.ffw_layer_2"),
        },
    ),
    "Parakeet": (
        parakeet,
        {"encoder.layers": ("self_attn.o_proj", "feed_forward1.linear2", "feed_forward2.linear2")},
    ),
    "SeamlessM4T": (lambda: seamless("SeamlessM4T"), SEAMLESS),
    "SeamlessM4T v2": (
        lambda: seamless("SeamlessM4Tv2"),
        {**SEAMLESS, "t2u_model.model.decoder.layers": ("self_attn.out_proj", "conv_dropout")},
    ),
}


@pytest.mark.parametrize(("build", "stacks"), COMPOSITES.values(), ids=COMPOSITES)
def test_every_part_of_a_composite_is_adapted(build, stacks):
    with torch.device("meta"):
        base = build()
    found = find_places(base, HoulsbyConfig(modules_to_save=[]))
    ends: dict[str, set[str]] = {}
    for place in found.values():
        if not place.is_norm:
            ends.setdefault(place.stack, set()).add(place.relative(place.key))
    assert {stack.removeprefix("model.").replace(".model.dec", ".dec"): each for stack, each in ends.items()} == {
        stack.replace(".model.dec", ".dec"): set(each) for stack, each in stacks.items()
    }
    adapted = {(place.stack, place.layer) for place in found.values() if not place.is_norm}
    layers = {(stack, index) for stack in ends for index in range(len(base.get_submodule(stack)))}
    assert adapted == layers


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("jamba", ["These layers have no attention, and so no adapter there: layers.0."]),
        (
            "nemotron_h",
            [
                "These layers have no attention and no feed-forward, and so no adapter there: layers.0.",
                "These layers have no feed-forward, and so no adapter there: layers.1.",
                "These layers have no attention, and so no adapter there: layers.2-3.",
            ],
        ),
        ("zamba2", ["These layers have no attention and no feed-forward, and so no adapter there: layers.0,2."]),
        ("falcon_h1", []),
    ],
)
def test_the_log_names_layers_without_an_adapter(name, messages, caplog):
    inference.log_once.cache_clear()
    base = ROWS[name].model()
    with caplog.at_level(logging.WARNING, inference.logger.name):
        for _ in range(2):
            find_places(base, HoulsbyConfig())
    assert [record.getMessage() for record in caplog.records] == messages


def test_layers_that_have_nothing_to_adapt_cannot_be_asked_for_alone():
    with pytest.raises(ValueError, match=r"which are 1-3 here; got \[0\]\. None adapts"):
        get_peft_model(ROWS["nemotron_h"].model(), HoulsbyConfig(layers_to_transform=[0]))


def test_a_list_for_each_part_of_the_layers():
    base = transformers.XLMModel(config_of("xlm", n_layers=12))
    found = find_places(base, HoulsbyConfig(layers_to_transform=[1, 11]))
    parts = ("attentions.{}.out_lin", "layer_norm1.{}", "ffns.{}", "layer_norm2.{}")
    assert set(found) == {part.format(layer) for part in parts for layer in (1, 11)}
    rows = fold_places(found.values())
    assert {(row["stack"], row["layers"], row["module"]) for row in rows} == {
        ("*", "1,11", part.format("#").replace(".#", "")) for part in parts
    }
    assert set(unfold_places(rows)) == set(found.values())


def test_the_parts_of_a_layer_share_a_bottleneck():
    base = transformers.XLMForSequenceClassification(config_of("xlm"))
    model = get_peft_model(base, HoulsbyConfig(r=4, share_layers=1))
    owners = [name for name, module in base.named_modules() if getattr(module, "houlsby_adapter", None)]
    assert owners == [f"transformer.attentions.{layer}.out_lin" for layer in range(2)]
    model(**ROWS["xlm"].batch()).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_a_name_that_ends_like_a_place_is_no_place():
    base = ROWS["gemma4_text:experts"].model()
    model = get_peft_model(base, HoulsbyConfig(r=4, train_layer_norm="all"))
    wrapped = {name for name, module in model.get_base_model().named_modules() if hasattr(module, "houlsby_norm")}
    assert "norm" in wrapped
    assert not any(name.endswith("router.norm") for name in wrapped)
    assert "layers.0.router.norm" in dict(base_modules(base))
