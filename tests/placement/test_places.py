"""Models made of models, lists whose layers differ, and what selects places: layers, positions,
exclusions.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
import transformers
from peft import NoMatchingPeftModuleError, get_peft_model
from torch import nn
from transformers import BertConfig, BertLMHeadModel, BertModel, GPT2LMHeadModel, ViTModel

from architecture_cases import CASES, LAYERS
from houlsby_peft import HoulsbyConfig, HoulsbyLayer
from houlsby_peft.method.modules import base_modules
from houlsby_peft.placement.places import find_places
from houlsby_peft.saved.record import fold_places, unfold_places
from tiny_models import perturb, tiny_bert


EVERY_POSITION = ("attention", "feed_forward", "cross_attention")
PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def config_of(name, **changes):
    return getattr(transformers, CASES[name].model_class).config_class(
        **{**CASES[name].config, **changes}
    )


def tiny(name, model_class, **changes):
    return model_class(config_of(name, **changes)).eval()


def two_berts():
    decoder = {"is_decoder": True, "add_cross_attention": True}
    return transformers.EncoderDecoderModel(
        encoder=tiny("bert", BertModel), decoder=tiny("bert", BertLMHeadModel, **decoder)
    )


def image_to_text():
    decoder = tiny("gpt2", GPT2LMHeadModel, add_cross_attention=True)
    return transformers.VisionEncoderDecoderModel(encoder=tiny("vit", ViTModel), decoder=decoder)


def image_and_text():
    config = transformers.LlavaConfig(
        vision_config=config_of("clip_vision_model"),
        text_config=config_of("llama", hidden_size=24),
        image_token_id=49,
    )
    return transformers.LlavaForConditionalGeneration(config)


def instruct_blip():
    config = transformers.InstructBlipConfig(
        vision_config=config_of("instructblip_vision_model").to_dict(),
        qformer_config=config_of("instructblip_qformer").to_dict(),
        text_config=config_of("opt").to_dict(),
        image_token_index=49,
    )
    return transformers.InstructBlipForConditionalGeneration(config)


def seamless():
    return transformers.SeamlessM4Tv2Model(config_of("seamless_m4t_v2"))


def wrapper():
    """A model of another library that holds one of transformers."""
    model = nn.Module()
    model.parts = nn.Sequential(
        nn.ModuleDict({"auto_model": BertModel(BertConfig(**CASES["bert"].config))})
    )
    return model


BERT = ("attention.output.dropout", "output.dropout")
ENCODER = ("attn_dropout", "ffn_dropout")
DECODER = ("self_attn.out_proj", "ffn_dropout", "cross_attention.out_proj")
COMPOSITES = {
    two_berts: {
        "encoder.encoder.layer": BERT,
        "decoder.bert.encoder.layer": (*BERT, "crossattention.output.dropout"),
    },
    image_to_text: {
        "encoder.layers": ("attention.o_proj", "mlp.fc2"),
        "decoder.transformer.h": (
            "attn.resid_dropout",
            "mlp.dropout",
            "crossattention.resid_dropout",
        ),
    },
    image_and_text: {
        "model.vision_tower.encoder.layers": ("self_attn.out_proj", "mlp.fc2"),
        "model.language_model.layers": ("self_attn.o_proj", "mlp.down_proj"),
    },
    wrapper: {"parts.0.auto_model.encoder.layer": BERT},
    instruct_blip: {
        "vision_model.encoder.layers": ("self_attn.projection", "mlp.fc2"),
        "qformer.encoder.layer": (*BERT, "crossattention.output.dropout", "output_query.dropout"),
        "language_model.model.decoder.layers": ("self_attn.out_proj", "fc2"),
    },
    seamless: {
        "speech_encoder.encoder.layers": (
            "self_attn_dropout",
            "ffn1.output_dropout",
            "ffn2.output_dropout",
        ),
        "speech_encoder.adapter.layers": ("self_attn_dropout", "ffn.output_dropout"),
        "text_encoder.layers": ENCODER,
        "text_decoder.layers": DECODER,
        "t2u_model.model.encoder.layers": ENCODER,
        "t2u_model.model.decoder.layers": ("self_attn.out_proj", "conv_dropout"),
    },
}


@pytest.mark.parametrize(("build", "stacks"), COMPOSITES.items())
def test_every_part_of_a_model_is_found_by_its_own_type(build, stacks):
    with torch.device("meta"):
        base = build()
    places = find_places(base, HoulsbyConfig(positions=EVERY_POSITION, modules_to_save=[]))
    ends, layers = {stack: set() for stack in stacks}, {stack: set() for stack in stacks}
    for place in places.values():
        layers[place.stack].add(place.layer)
        if not place.is_norm:
            ends[place.stack].add(place.relative(place.key))
    for stack, ends_of_stack in stacks.items():
        assert ends[stack] == set(ends_of_stack)
        assert layers[stack] == set(range(len(base.get_submodule(stack))))


@pytest.mark.parametrize("build", [two_berts, image_and_text])
def test_the_parts_of_a_model_share_no_bottleneck(build):
    model = get_peft_model(build(), HoulsbyConfig(r=4, share_layers=LAYERS))
    owners = [
        name for name, module in model.named_modules() if getattr(module, "houlsby_adapter", None)
    ]
    for stack, owner in zip(COMPOSITES[build], owners, strict=True):
        assert f".{stack}." in owner


def test_layers_that_have_nothing_to_adapt_cannot_be_asked_for_alone():
    with pytest.raises(NoMatchingPeftModuleError, match="layers_to_transform"):
        get_peft_model(CASES["nemotron_h"].model(), HoulsbyConfig(layers_to_transform=[0]))


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("bert", {"layers_to_transform": [99]}, r"\[99\].*encoder\.layer\.0-1"),
        ("bert", {"layers_to_transform": [0, 2]}, r"\[2\]"),
        ("bert", {"layers_to_transform": [-1, 1]}, r"\[-1\]"),
        ("bart", {"layers_to_transform": [99]}, r"encoder\.layers\.0-1, decoder\.layers\.0-1"),
        ("bert", {"positions": ("cross_attention",)}, "cross_attention"),
    ],
)
def test_what_the_model_does_not_have_is_refused(name, options, word):
    with pytest.raises(ValueError, match=word):
        find_places(CASES[name].model(), HoulsbyConfig(**options))


def test_a_layer_without_a_sub_layer_to_adapt_may_be_named():
    everything = find_places(CASES["nemotron_h"].model(), HoulsbyConfig())
    named = find_places(CASES["nemotron_h"].model(), HoulsbyConfig(layers_to_transform=range(3)))
    assert named
    assert named.keys() <= everything.keys()


@pytest.mark.parametrize(
    ("option", "pattern"),
    [
        ("target_modules", "("),
        ("exclude_modules", "(" * 5000),
        ("layers_pattern", ["encoder", "(?i)layer"]),
        ("rank_pattern", {"*": 2}),
    ],
)
def test_a_pattern_that_is_no_regular_expression_changes_nothing(option, pattern):
    model = tiny_bert()
    names = dict(model.named_modules()).keys()
    with pytest.raises((re.error, RecursionError)):
        get_peft_model(model, HoulsbyConfig(r=2, **{option: pattern}))
    assert dict(model.named_modules()).keys() == names


def test_a_whole_pattern_may_begin_with_flags():
    places = find_places(tiny_bert(), HoulsbyConfig(target_modules=r"(?i).*OUTPUT\.dense"))
    assert sum(place.is_bottleneck for place in places.values()) == 8


def test_layers_of_one_stack_only():
    base = CASES["bart"].model()

    def layers(**options):
        places = find_places(base, HoulsbyConfig(**options))
        return {(place.stack, place.layer) for place in places.values()}

    in_decoder = {"layers_pattern": "decoder.layers"}
    assert layers(layers_to_transform=[1]) == {("encoder.layers", 1), ("decoder.layers", 1)}
    assert layers(layers_to_transform=[1], **in_decoder) == {("decoder.layers", 1)}
    assert layers(**in_decoder) == {("decoder.layers", 0), ("decoder.layers", 1)}


# Tiny sizes by all names that the configurations of these models have for them.
UNSUPPORTED = {
    "hidden_size": 16, "attn_layers": ["local"] * 2, "feed_forward_size": 24,
    "attention_head_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 24, "embedding_size": 16, "local_attn_chunk_length": 4,
    "axial_pos_embds": False,
}  # fmt: skip
OF_XL = {"emb_dim": 16, "n_layers": 2, "n_heads": 2, "d_model": 16, "n_layer": 2, "n_head": 2}


@pytest.mark.parametrize(
    ("name", "sizes", "bottlenecks"),
    [
        ("Reformer", UNSUPPORTED, 4),
        ("SqueezeBERT", UNSUPPORTED, 4),
        ("XLM", OF_XL, 4),
        ("XLNet", OF_XL | {"d_inner": 24}, 2),
    ],
)
def test_the_remedy_for_an_architecture_that_is_not_supported_works(name, sizes, bottlenecks):
    prefix = name.replace("BERT", "Bert")
    config = getattr(transformers, f"{prefix}Config")(vocab_size=50, **sizes)
    base, ids = getattr(transformers, f"{prefix}Model")(config), torch.randint(3, 50, (2, 8))
    with pytest.raises(ValueError, match="target_modules"):
        get_peft_model(base, HoulsbyConfig(r=4))
    items = PAGE.read_text().split("\n- ")
    [advice, *_] = [item for item in items if re.match(rf"(\w+ and )?{name}\b", item)]
    remedy = ast.literal_eval(re.search(r"`target_modules=(\[.*?\])`", advice)[1])
    if name == "Reformer":
        with pytest.raises(ValueError, match="enable_input_require_grads"):
            get_peft_model(base, HoulsbyConfig(r=4, target_modules=remedy))
        base.enable_input_require_grads()
    model = get_peft_model(base, HoulsbyConfig(r=4, target_modules=remedy))
    perturb(model)
    model(ids)[0].pow(2).sum().backward()
    assert sum(isinstance(module, HoulsbyLayer) for module in model.modules()) == bottlenecks
    assert all(weight.grad.any() for weight in model.parameters() if weight.requires_grad)


def norms_of(model, train_layer_norm):
    places = find_places(model, HoulsbyConfig(train_layer_norm=train_layer_norm))
    return {key for key, place in places.items() if place.is_norm}


def test_norms_of_queries_and_keys_train_with_all_norms_only():
    base = CASES["olmo2"].model()
    queries = {f"layers.{index}.self_attn.{name}_norm" for index in range(LAYERS) for name in "qk"}
    assert norms_of(base, "all") - norms_of(base, True) == queries | {"norm"}


def test_a_norm_that_all_rows_of_a_batch_share_never_trains():
    norms = norms_of(CASES["deberta-v2:v3"].model(), "all")
    assert "encoder.conv.LayerNorm" in norms
    assert "encoder.LayerNorm" not in norms


def test_a_name_that_ends_like_a_place_is_no_place():
    base = CASES["gemma4_text:experts"].model()
    model = get_peft_model(base, HoulsbyConfig(r=4, train_layer_norm="all"))
    modules = model.get_base_model().named_modules()
    wrapped = [name for name, module in modules if hasattr(module, "houlsby_norm")]
    assert "norm" in wrapped
    assert not any(name.endswith("router.norm") for name in wrapped)
    assert "layers.0.router.norm" in dict(base_modules(base))


def test_a_bottleneck_inside_a_wrapped_module_is_refused():
    inner, outer = "mlp.shared_expert.down_proj", "mlp"
    base = CASES["qwen2_moe"].model()
    with pytest.raises(ValueError, match="inside"):
        get_peft_model(base, HoulsbyConfig(target_modules=[outer, inner]))
    model = get_peft_model(base, HoulsbyConfig(target_modules=[outer]))
    with pytest.raises(ValueError, match="inside"):
        model.add_adapter("inner", HoulsbyConfig(target_modules=[inner]))


@pytest.mark.parametrize("norms", [True, "all"])
def test_recorded_places_fit_every_class_of_the_architecture(norms):
    """Names begin inside the encoder; a norm of the head begins with a dot."""
    masked = transformers.BertForMaskedLM(BertConfig(**CASES["bert"].config))
    rows = fold_places(find_places(masked, HoulsbyConfig(train_layer_norm=norms)).values(), "bert")
    outside = [row["module"] for row in rows if row["module"].startswith(".")]
    assert outside == ([".cls.predictions.transform.LayerNorm"] if norms == "all" else [])
    for base, encoder in ((CASES["bert"].model(), ""), (tiny_bert(), "bert")):
        keys = find_places(base, HoulsbyConfig(train_layer_norm=norms)).keys()
        of_two_layers = {key for key in keys if not re.search(r"layer\.[23]\.", key)}
        unfolded = {place.key for place in unfold_places(rows, encoder)}
        assert {key for key in unfolded if "predictions" not in key} == of_two_layers
