"""Tiny models of every architecture in the table, and what is known of each from its own code.

Read the model's layer in transformers and write down here, without looking at the table: the
projection that ends each sub-layer, how many norms the layers have, how the sub-layers' outputs
meet the skip connections, and whether a dropout module stands between. A model that shares its
layers with another one in `houlsby_peft/placement/table.py` shares its case here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import written_out_layers as written_out
from houlsby_peft.placement.table import ARCHITECTURES, READABLE


LAYERS = 2


@dataclass(frozen=True)
class ArchitectureCase:
    """One architecture.

    Args:
        model_class: the class in transformers.
        options: of its configuration, beside the tiny `SIZES`.
        ends: the projection that ends each sub-layer, by the name of its list of layers and
            position; a second feed-forward is "feed_forward 2". A tuple has them for each layer of
            a list.
        norms: norms in all layers together.
        skip: "pre": output = input + outputs of the sub-layers, also where they are parallel;
            "parallel": the same, where a dropout is applied to the sum of these outputs; "post": a
            norm after each skip; "branch": a module on each output before its skip (a norm);
            "factor": a weight there.
        after: the norms, modules or weights of `skip`, by position, as named in the layer.
        dropout: positions with a dropout module of their own between projection and skip; by the
            name of the list of layers, where the lists differ.
        inputs: which inputs the model takes, a name in `_INPUTS`.
        layer: the layer's forward pass, instead of `skip` and `after`; by the name of the list of
            layers, where the lists differ.
    """

    model_class: str
    options: dict[str, Any]
    ends: dict[str, dict[str, str] | tuple[dict[str, str], ...]]
    norms: int = 2 * LAYERS
    skip: str = "pre"
    after: dict[str, str] = field(default_factory=dict)
    dropout: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    inputs: str = "text"
    layer: Callable[..., torch.Tensor] | dict[str, Callable[..., torch.Tensor]] | None = None

    def layers(
        self, base: torch.nn.Module
    ) -> Iterator[tuple[str, torch.nn.Module, dict[str, str]]]:
        """Name and module of every layer, and position and projection of each sub-layer in it."""
        for stack, ends in self.ends.items():
            for index, layer in enumerate(base.get_submodule(stack)):
                yield f"{stack}.{index}", layer, ends[index] if isinstance(ends, tuple) else ends

    def of_layer(self, by_stack: Any, name: str) -> Any:
        """What applies to a layer of `dropout` or `layer`."""
        return by_stack.get(name.rpartition(".")[0]) if isinstance(by_stack, dict) else by_stack

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of the configuration."""
        return {**SIZES, **self.options}

    def model(self, **changes: Any) -> transformers.PreTrainedModel:
        """The tiny model in eval mode with weights drawn from a fixed seed, large enough to tell
        things apart.
        """
        model_class = getattr(transformers, self.model_class)
        return build(model_class, model_class.config_class(**{**self.config, **changes}))

    def batch(self, rows: int = 3) -> dict[str, torch.Tensor]:
        return make_inputs(self.inputs, rows)


def build(model_class: type, config: Any) -> transformers.PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn(parameter.shape)
    return model


# Shapes of a case's inputs; what is called ids has token numbers.
_INPUTS: dict[str, dict[str, tuple[int, ...]]] = {
    "text": {"input_ids": (6,)},
    "text_to_text": {"input_ids": (6,), "decoder_input_ids": (4,)},
    "decoder": {"input_ids": (6,), "encoder_hidden_states": (5, 16)},
    "image": {"pixel_values": (3, 8, 8)},
    "image_alone": {"hidden_states": (3, 8, 8)},
    "text_and_image": {"input_ids": (6,), "pixel_values": (3, 8, 8)},
    "text_and_regions": {"input_ids": (6,), "visual_feats": (5, 8), "visual_pos": (5, 4)},
    "patches": {"pixel_values": (16, 48)},
    "video": {"pixel_values": (2, 3, 8, 8)},
    "queries": {"query_embeds": (4, 16), "encoder_hidden_states": (5, 16)},
    "queries_and_text": {
        "input_ids": (6,),
        "query_embeds": (4, 16),
        "encoder_hidden_states": (5, 16),
    },
    "speech": {"input_values": (80,)},
    "speech_to_text": {"input_features": (4, 16), "decoder_input_ids": (4,)},
    "mel": {"input_features": (16, 8)},
    "mel_to_text": {"input_features": (16, 8), "decoder_input_ids": (4,)},
}


def make_inputs(kind: str, rows: int) -> dict[str, torch.Tensor]:
    """A batch of inputs, always the same."""
    generator = torch.Generator().manual_seed(0)
    batch = {}
    for name, shape in _INPUTS[kind].items():
        if name.endswith("ids"):
            batch[name] = torch.randint(3, 50, (rows, *shape), generator=generator)
        else:
            batch[name] = torch.randn(rows, *shape, generator=generator)
    if kind == "patches":
        grid = torch.cartesian_prod(torch.arange(4), torch.arange(4))
        batch["pixel_position_ids"] = grid.expand(rows, 16, 2)
    return batch


# Tiny sizes by all names that configurations have for them. A configuration ignores what it has no
# use for.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim"), 16),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "d_ff", "n_inner", "ffn_dim"), 24),
    **dict.fromkeys(
        ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "n_layers"), LAYERS
    ),
    **dict.fromkeys(
        ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads"),
        2,
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "speech_encoder_intermediate_size"), 24),
    **dict.fromkeys(
        ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "speech_encoder_layerdrop"), 0.0
    ),
    "n_heads": 2,
    "d_kv": 6,
    "vocab_size": 50,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_size": 8,
    "patch_size": 4,
    "conv_depthwise_kernel_size": 3,
    "feature_projection_input_dim": 8,
    "apply_spec_augment": False,
}
_SPEECH = {
    "conv_dim": (8, 8),
    "conv_stride": (4, 2),
    "conv_kernel": (4, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


def _ends(attention: str, feed_forward: str, cross_attention: str = "") -> dict[str, str]:
    """The modules of a layer, by position."""
    modules = {"attention": attention, "feed_forward": feed_forward}
    return modules | ({"cross_attention": cross_attention} if cross_attention else {})


_GROUPED = {"num_key_value_heads": 1}
_EXPERTS = {
    **dict.fromkeys(("num_local_experts", "num_experts"), 3),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 12),
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
}


def _bert(
    name: str,
    skip: str = "post",
    dropout: tuple[str, ...] = ("attention", "feed_forward"),
    **changes: Any,
) -> ArchitectureCase:
    """A model with BERT's layer; RoBERTa and others copied it."""
    cross = (
        {"cross_attention": "crossattention.output.dense"}
        if changes.get("add_cross_attention")
        else {}
    )
    after = _ends(
        "attention.output.LayerNorm", "output.LayerNorm", "crossattention.output.LayerNorm"
    )
    return ArchitectureCase(
        name,
        {**changes},
        {
            "encoder.layer": {
                "attention": "attention.output.dense",
                "feed_forward": "output.dense",
                **cross,
            }
        },
        norms=2 * LAYERS + len(cross) * LAYERS,
        skip=skip,
        after=after if skip == "post" else {},
        dropout=(*dropout, *cross),
        inputs="decoder" if cross else "text",
    )


def _gpt2(name: str, **changes: Any) -> ArchitectureCase:
    cross = (
        {"cross_attention": "crossattention.c_proj"} if changes.get("add_cross_attention") else {}
    )
    return ArchitectureCase(
        name,
        {**changes},
        {"h": {"attention": "attn.c_proj", "feed_forward": "mlp.c_proj", **cross}},
        norms=2 * LAYERS + len(cross) * LAYERS,
        dropout=("attention", "feed_forward", *cross),
        inputs="decoder" if cross else "text",
    )


def _falcon(norms_per_layer: int, **changes: Any) -> ArchitectureCase:
    ends = _ends("self_attention.dense", "mlp.dense_4h_to_h")
    skip = "pre" if changes.get("parallel_attn") is False else "parallel"
    config = {"alibi": False, **changes}
    return ArchitectureCase(
        "FalconModel", config, {"h": ends}, norms=norms_per_layer * LAYERS, skip=skip
    )


def _gpt_neox(**changes: Any) -> ArchitectureCase:
    return ArchitectureCase(
        "GPTNeoXModel",
        {**changes},
        {"layers": _ends("attention.dense", "mlp.dense_4h_to_h")},
        dropout=("attention", "feed_forward"),
    )


def _llama(
    name: str, norms_per_layer: int = 2, mlp: str = "mlp.down_proj", **changes: Any
) -> ArchitectureCase:
    sandwich = _ends("post_attention_layernorm", "post_feedforward_layernorm")
    has_branch_norms = norms_per_layer == 4 or name == "Olmo2Model"
    return ArchitectureCase(
        name,
        {**_GROUPED, **changes},
        {"layers": _ends("self_attn.o_proj", mlp)},
        norms=norms_per_layer * LAYERS,
        skip="branch" if has_branch_norms else "pre",
        after=sandwich if has_branch_norms else {},
    )


def _rotary_bert(name: str, mlp: str) -> ArchitectureCase:
    return ArchitectureCase(
        name,
        {},
        {"layers": {"attention": "self_attn.o_proj", "feed_forward": mlp}},
        skip="post",
        after={"attention": "post_attention_layernorm", "feed_forward": "post_mlp_layernorm"},
        dropout=("attention", "feed_forward"),
    )


def _bart(name: str, skip: str, inputs: str = "text_to_text", **changes: Any) -> ArchitectureCase:
    ends = _ends("self_attn.out_proj", "fc2")
    after = _ends("self_attn_layer_norm", "final_layer_norm", "encoder_attn_layer_norm")
    return ArchitectureCase(
        name,
        {**changes},
        {
            "encoder.layers": ends,
            "decoder.layers": {**ends, "cross_attention": "encoder_attn.out_proj"},
        },
        norms=5 * LAYERS,
        skip=skip,
        after=after if skip == "post" else {},
        inputs=inputs,
    )


def _t5(
    name: str, attention: str = "SelfAttention", norms: int = 5 * LAYERS, **changes: Any
) -> ArchitectureCase:
    encoder = _ends(f"layer.0.{attention}.o", "layer.1.DenseReluDense.wo")
    decoder = _ends(
        "layer.0.SelfAttention.o", "layer.2.DenseReluDense.wo", "layer.1.EncDecAttention.o"
    )
    return ArchitectureCase(
        name,
        {**changes},
        {"encoder.block": encoder, "decoder.block": decoder},
        norms=norms,
        dropout=("attention", "feed_forward", "cross_attention"),
        inputs="text_to_text",
    )


def _vit(name: str, skip: str = "pre", **changes: Any) -> ArchitectureCase:
    return ArchitectureCase(
        name,
        {**changes},
        {"layers": _ends("attention.o_proj", "mlp.fc2")},
        skip=skip,
        after=_ends("lambda_1", "lambda_2") if skip == "factor" else {},
        inputs="image",
    )


def _clip(
    name: str, config: dict[str, Any], towers: tuple[str, ...], inputs: str
) -> ArchitectureCase:
    ends = _ends("self_attn.out_proj", "mlp.fc2")
    return ArchitectureCase(
        name,
        config,
        {f"{tower}encoder.layers": ends for tower in towers},
        norms=2 * LAYERS * len(towers),
        inputs=inputs,
    )


def _wav2vec2(
    name: str, skip: str = "post", attention: str = "attention.out_proj", **changes: Any
) -> ArchitectureCase:
    return ArchitectureCase(
        name,
        {**_SPEECH, **changes},
        {"encoder.layers": _ends(attention, "feed_forward.output_dense")},
        skip=skip,
        after=_ends("layer_norm", "final_layer_norm") if skip == "post" else {},
        dropout=("attention", "feed_forward"),
        inputs="speech",
    )


_MAMBA = {
    "mamba_d_state": 4,
    "mamba_d_conv": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_chunk_size": 4,
    "num_logits_to_keep": None,
}
_CONFORMER_ENDS = {
    "attention": "self_attn.linear_out",
    "feed_forward": "ffn1.output_dense",
    "feed_forward 2": "ffn2.output_dense",
}
_SHORTENING_ENDS = _ends("self_attn.linear_out", "ffn.output_dense")
_CONFORMER_DROPOUT = ("attention", "feed_forward", "feed_forward 2")
_WAV2VEC2_BERT: dict[str, Any] = {
    "norms": 6 * LAYERS,
    "dropout": _CONFORMER_DROPOUT,
    "inputs": "mel",
    "layer": written_out.conformer,
}
_SEAMLESS = {
    **dict.fromkeys(("speech_encoder_layers", "t2u_encoder_layers", "t2u_decoder_layers"), LAYERS),
    **dict.fromkeys(("t2u_encoder_ffn_dim", "t2u_decoder_ffn_dim"), 24),
    "speech_encoder_attention_heads": 2,
    "t2u_encoder_attention_heads": 2,
    "t2u_decoder_attention_heads": 2,
    "t2u_vocab_size": 50,
    "adaptor_kernel_size": 4,
    "adaptor_stride": 4,
    "num_adapter_layers": 1,
}
_PARAKEET = {
    "num_key_value_heads": 2,
    "num_mel_bins": 8,
    "conv_kernel_size": 3,
    "subsampling_factor": 4,
    "subsampling_conv_channels": 4,
    "subsampling_conv_kernel_size": 3,
}
_MOBILEBERT = {
    "hidden_size": 24,
    "embedding_size": 24,
    "intra_bottleneck_size": 16,
    "trigram_input": False,
    "num_feedforward_networks": 3,
}
_GEMMA4 = {
    **_GROUPED,
    "head_dim": 6,
    "global_head_dim": 8,
    "sliding_window": 4,
    "hidden_size_per_layer_input": 0,
}


def _qformer(name: str, crossing: int, text: bool = True, **changes: Any) -> ArchitectureCase:
    """A model of queries, and text in InstructBLIP. Of every `crossing` layers, the first attends
    to the image.
    """
    ends = _ends("attention.output.dense", "output_query.dense")
    if text:
        ends |= {"feed_forward 2": "output.dense"}
    crosses = {**ends, "cross_attention": "crossattention.output.dense"}
    layers = tuple(ends if index % crossing else crosses for index in range(LAYERS))
    return ArchitectureCase(
        name,
        {"encoder_hidden_size": 16, "cross_attention_frequency": crossing, **changes},
        {"encoder.layer": layers},
        norms=sum(map(len, layers)),
        dropout=("attention", "feed_forward", "feed_forward 2", "cross_attention"),
        inputs="queries_and_text" if text else "queries",
        layer=written_out.qformer,
    )


def _blip_vision(name: str) -> ArchitectureCase:
    ends = _ends("self_attn.projection", "mlp.fc2")
    return ArchitectureCase(name, {}, {"encoder.layers": ends}, inputs="image")


def _parakeet(
    name: str, layer: Callable[..., torch.Tensor] = written_out.parakeet, norms: int = 5 * LAYERS
) -> ArchitectureCase:
    ends = _ends("self_attn.o_proj", "feed_forward1.linear2")
    return ArchitectureCase(
        name,
        _PARAKEET,
        {"layers": {**ends, "feed_forward 2": "feed_forward2.linear2"}},
        norms=norms,
        inputs="mel",
        layer=layer,
    )


def _seamless(name: str, conformer_norms: int) -> ArchitectureCase:
    decoder = {
        "attention": "self_attn.out_proj",
        "cross_attention": "cross_attention.out_proj",
        "feed_forward": "ffn.fc2",
    }
    stacks = (
        "speech_encoder.encoder.layers",
        "speech_encoder.adapter.layers",
        "text_decoder.layers",
    )
    layers = (written_out.conformer, written_out.shortening, written_out.seamless_decoder)
    dropout = (_CONFORMER_DROPOUT, ("attention", "feed_forward"), ("feed_forward",))
    return ArchitectureCase(
        name,
        _SEAMLESS,
        dict(zip(stacks, (_CONFORMER_ENDS, _SHORTENING_ENDS, decoder), strict=True)),
        norms=conformer_norms * LAYERS + 3 + 3 * LAYERS,
        dropout=dict(zip(stacks, dropout, strict=True)),
        inputs="mel_to_text",
        layer=dict(zip(stacks, layers, strict=True)),
    )


def _mobilebert(norms: int, dropout: tuple[str, ...] = (), **changes: Any) -> ArchitectureCase:
    ends = _ends("attention.output.dense", "ffn.0.output.dense")
    return ArchitectureCase(
        "MobileBertModel",
        {**_MOBILEBERT, **changes},
        {
            "encoder.layer": {
                **ends,
                "feed_forward 2": "ffn.1.output.dense",
                "feed_forward 3": "output.dense",
            }
        },
        norms=norms * LAYERS,
        dropout=dropout,
        layer=written_out.mobilebert,
    )


def _gemma4(norms: int, *ends: str, **changes: Any) -> ArchitectureCase:
    feed_forwards = {f"feed_forward {number}": end for number, end in enumerate(ends, start=2)}
    return ArchitectureCase(
        "Gemma4TextModel",
        {**_GEMMA4, **changes},
        {
            "layers": {
                "attention": "self_attn.o_proj",
                "feed_forward": "mlp.down_proj",
                **feed_forwards,
            }
        },
        norms=norms * LAYERS,
        layer=written_out.gemma4,
    )


_LXMERT_ENDS = _ends("attention.output.dense", "output.dense")
_FLORENCE_ENDS = {
    "attention": "spatial_block.window_attn",
    "feed_forward": "spatial_block.ffn.fc2",
    "attention 2": "channel_block.channel_attn.proj",
    "feed_forward 2": "channel_block.ffn.fc2",
}
_DIVIDED = {
    "attention": "temporal_dense",
    "attention 2": "attention.output.dense",
    "feed_forward": "output.dense",
}


def _timesformer(
    ends: dict[str, str], norms: int, layer: Callable[..., torch.Tensor] | None, **changes: Any
) -> ArchitectureCase:
    return ArchitectureCase(
        "TimesformerModel",
        {"num_frames": 2, "drop_path_rate": 0, **changes},
        {"encoder.layer": ends},
        norms=norms * LAYERS,
        dropout=("attention 2", "feed_forward") if layer else ("attention", "feed_forward"),
        inputs="video",
        layer=layer,
    )


def _granite(experts: int) -> ArchitectureCase:
    ends = {
        "feed_forward": "shared_mlp.output_linear",
        **({"feed_forward 2": "block_sparse_moe"} if experts else {}),
    }
    return ArchitectureCase(
        "GraniteMoeHybridModel",
        {
            **_GROUPED,
            **_MAMBA,
            "num_local_experts": experts,
            "shared_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
            "residual_multiplier": 0.7,
        },
        {"layers": (ends, {"attention": "self_attn.o_proj", **ends})},
        layer=written_out.granite,
    )


_CLIP_TOWERS = {"text_config": SIZES, "vision_config": SIZES}
_BOTH_TOWERS = ("text_model.", "vision_model.")
_WHISPER = {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 20}

# Keys are a `model_type` of the table, with a variant after a colon where a configuration changes
# the layer. Those of models that copy the layer of another one are added at the end.
CASES: dict[str, ArchitectureCase] = {
    "albert": ArchitectureCase(
        "AlbertModel", {"embedding_size": 8},
        {"encoder.albert_layer_groups.0.albert_layers": _ends("attention.dense", "ffn_output")},
        norms=2, skip="post", after=_ends("attention.LayerNorm", "full_layer_layer_norm"),
        dropout=("attention",),
    ),
    "bamba": ArchitectureCase(
        "BambaModel", {**_GROUPED, **_MAMBA, "attn_layer_indices": [1]},
        {"layers": ({"feed_forward": "feed_forward.down_proj"},
                    _ends("self_attn.o_proj", "feed_forward.down_proj"))},
        layer=written_out.jamba,
    ),
    "bart": _bart("BartModel", "post"),
    "beit": _vit("BeitModel", skip="factor"),
    "bert": _bert("BertModel"),
    "bert:cross": _bert("BertModel", is_decoder=True, add_cross_attention=True),
    "big_bird": _bert("BigBirdModel", attention_type="original_full", sep_token_id=2),
    "blip_2_qformer": _qformer("Blip2QFormerModel", 2, text=False),
    "blip_2_vision_model": _blip_vision("Blip2VisionModel"),
    "bloom": ArchitectureCase(
        "BloomModel", {}, {"h": _ends("self_attention.dense", "mlp.dense_4h_to_h")},
    ),
    "clip": _clip("CLIPModel", _CLIP_TOWERS, _BOTH_TOWERS, "text_and_image"),
    "clip_text_model": _clip("CLIPTextModel", {}, ("",), "text"),
    "clip_vision_model": _clip("CLIPVisionModel", {}, ("",), "image"),
    "siglip_text_model": _clip("SiglipTextModel", {}, ("",), "text"),
    "siglip_vision_model": _clip("SiglipVisionModel", {}, ("",), "image"),
    "deberta": _bert("DebertaModel", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "deberta-v2": _bert("DebertaV2Model"),
    "deberta-v2:v3": _bert(
        "DebertaV2Model", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4,
        norm_rel_ebd="layer_norm", share_att_key=True, conv_kernel_size=3,
    ),
    "dinov2": ArchitectureCase(
        "Dinov2Model", {"mlp_ratio": 2}, {"encoder.layer": _ends("layer_scale1", "layer_scale2")},
        inputs="image",
    ),
    "distilbert": ArchitectureCase(
        "DistilBertModel", {}, {"transformer.layer": _ends("attention.out_lin", "ffn.lin2")},
        skip="post", after=_ends("sa_layer_norm", "output_layer_norm"), dropout=("feed_forward",),
    ),
    "esm": _bert("EsmModel", skip="pre", mask_token_id=3),
    "falcon": _falcon(1, parallel_attn=True),
    "falcon:sequential": _falcon(2, parallel_attn=False),
    "falcon:two norms": _falcon(2, new_decoder_architecture=True, num_kv_heads=1),
    "falcon_h1": ArchitectureCase(
        "FalconH1Model",
        {**_GROUPED, **_MAMBA, "mamba_d_ssm": 32, "attention_out_multiplier": 0.7,
         "mlp_multipliers": [0.9, 0.8]},
        {"layers": _ends("self_attn.o_proj", "feed_forward")}, layer=written_out.falcon_h1,
    ),
    "florence_vision": ArchitectureCase(
        "Florence2VisionBackbone",
        {"depths": (1, 1, 1, 1), "embed_dim": (8, 16, 16, 16), "num_heads": (2, 2, 2, 2),
         "num_groups": (2, 2, 2, 2), "patch_size": (3, 3, 3, 3), "patch_stride": (1, 1, 1, 1),
         "patch_padding": (1, 1, 1, 1), "window_size": 3, "drop_path_rate": 0},
        {f"blocks.{stage}": _FLORENCE_ENDS for stage in range(4)}, norms=16, inputs="image_alone",
        layer=written_out.florence_vision,
    ),
    "gemma2": _llama("Gemma2Model", norms_per_layer=4, head_dim=6),
    "gemma3n_text": ArchitectureCase(
        "Gemma3nTextModel",
        {**_GROUPED, "head_dim": 6, "sliding_window": 4,
         "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
         "laurel_rank": 4, "altup_num_inputs": 2, "hidden_size_per_layer_input": 4,
         "vocab_size_per_layer_input": 50, "activation_sparsity_pattern": [0.0, 0.0]},
        {"layers": _ends("self_attn.o_proj", "mlp.down_proj")}, norms=7 * LAYERS,
        layer=written_out.gemma3n,
    ),
    "gemma4_audio": ArchitectureCase(
        "Gemma4AudioModel",
        {"subsampling_conv_channels": [8, 8], "attention_chunk_size": 4,
         "attention_context_left": 5, "output_proj_dims": 16},
        {"layers": {"attention": "self_attn.post", "feed_forward": "feed_forward1.ffw_layer_2",
                    "feed_forward 2": "feed_forward2.ffw_layer_2"}},
        norms=9 * LAYERS, inputs="mel", layer=written_out.gemma4_audio,
    ),
    "gemma4_text": _gemma4(4),
    "gemma4_text:experts": _gemma4(
        7, "experts", enable_moe_block=True, num_experts=3, top_k_experts=2,
        moe_intermediate_size=12,
    ),
    "gemma4_vision": ArchitectureCase(
        "Gemma4VisionModel",
        {"num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2,
         "position_embedding_size": 8},
        {"encoder.layers": _ends("self_attn.o_proj", "mlp.down_proj")}, norms=4 * LAYERS,
        skip="branch", after=_ends("post_attention_layernorm", "post_feedforward_layernorm"),
        inputs="patches",
    ),
    "gpt2": _gpt2("GPT2Model"),
    "gpt2:cross": _gpt2("GPT2Model", add_cross_attention=True),
    "gpt_neo": ArchitectureCase(
        "GPTNeoModel", {"attention_types": [[["global", "local"], 1]], "window_size": 4},
        {"h": _ends("attn.attention.out_proj", "mlp.c_proj")},
        dropout=("attention", "feed_forward"),
    ),
    "gpt_neox": _gpt_neox(),
    "gpt_neox:sequential": _gpt_neox(use_parallel_residual=False),
    "gptj": ArchitectureCase(
        "GPTJModel", {"rotary_dim": 4}, {"h": _ends("attn.out_proj", "mlp.fc_out")}, norms=LAYERS,
        dropout=("attention", "feed_forward"),
    ),
    "granitemoehybrid": _granite(3),
    "granitemoehybrid:dense": _granite(0),
    "ibert": ArchitectureCase(
        "IBertModel", {}, {"encoder.layer": _ends("attention.output.dense", "output.dense")},
        dropout=("attention", "feed_forward"), layer=written_out.ibert,
    ),
    "inkling_text": ArchitectureCase(
        "InklingTextModel",
        {**_GROUPED, "head_dim": 8, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1,
         "swa_head_dim": 8, "d_rel": 4, "rel_extent": 8, "moe_intermediate_size": 12,
         "n_routed_experts": 3, "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"],
         "layer_types": ["hybrid_sliding", "hybrid"]},
        {"layers": _ends("attn_sconv", "mlp_sconv")},
    ),
    "instructblip_qformer": _qformer("InstructBlipQFormerModel", 2),
    "instructblip_vision_model": _blip_vision("InstructBlipVisionModel"),
    "instructblipvideo_qformer": _qformer("InstructBlipVideoQFormerModel", 1),
    "instructblipvideo_vision_model": _blip_vision("InstructBlipVideoVisionModel"),
    "jamba": ArchitectureCase(
        "JambaModel",
        {**_GROUPED, "num_experts": 3, "attn_layer_period": 2, "attn_layer_offset": 1,
         "mamba_d_state": 4, "mamba_dt_rank": 3},
        {"layers": ({"feed_forward": "feed_forward"}, _ends("self_attn.o_proj", "feed_forward"))},
        layer=written_out.jamba,
    ),
    "jina_embeddings_v3": _rotary_bert("JinaEmbeddingsV3Model", "mlp.fc2"),
    "lasr_encoder": _parakeet("LasrEncoder", written_out.lasr),
    "lfm2": ArchitectureCase(
        "Lfm2Model", {**_GROUPED, "layer_types": ["conv", "full_attention"]},
        {"layers": ({"feed_forward": "feed_forward.w2"},
                    _ends("self_attn.out_proj", "feed_forward.w2"))},
        layer=written_out.lfm2,
    ),
    "lilt": _bert(
        "LiltModel", hidden_size=24, intermediate_size=32, channel_shrink_ratio=2,
        max_2d_position_embeddings=64,
    ),
    "llama": _llama("LlamaModel"),
    "longformer": _bert("LongformerModel", attention_window=4, sep_token_id=2),
    "longt5": _t5("LongT5Model", attention="LocalSelfAttention", local_radius=3),
    # One more norm in the encoder, of the global tokens.
    "longt5:global": _t5(
        "LongT5Model", attention="TransientGlobalSelfAttention", norms=6 * LAYERS, local_radius=3,
        global_block_size=2, encoder_attention_type="transient-global",
    ),
    "lxmert": ArchitectureCase(
        "LxmertModel",
        {"num_hidden_layers": {"vision": 1, "cross_encoder": 1, "language": 1}, "l_layers": 1,
         "r_layers": 1, "x_layers": 1, "visual_feat_dim": 8},
        {"encoder.layer": _LXMERT_ENDS, "encoder.r_layers": _LXMERT_ENDS,
         "encoder.x_layers": {
             "attention": "lang_self_att.output.dense", "attention 2": "visn_self_att.output.dense",
             "feed_forward": "lang_output.dense", "feed_forward 2": "visn_output.dense",
             "cross_attention": "visual_attention.output.dense"}},
        norms=9, skip="post", after=_ends("attention.output.LayerNorm", "output.LayerNorm"),
        dropout=("attention", "attention 2", "feed_forward", "feed_forward 2", "cross_attention"),
        inputs="text_and_regions", layer={"encoder.x_layers": written_out.lxmert},
    ),
    "m2m_100": _bart("M2M100Model", "pre"),
    "megatron-bert": _bert("MegatronBertModel", skip="pre"),
    "mixtral": _llama("MixtralModel", mlp="mlp", **_EXPERTS),
    "mobilebert": _mobilebert(norms=7),
    "mobilebert:no bottleneck": _mobilebert(
        4, ("attention", "feed_forward 3"), use_bottleneck=False, hidden_size=16,
        intra_bottleneck_size=16,
    ),
    "mobilebert:layer norms": _mobilebert(7, normalization_type="layer_norm"),
    # The first layer has no norm before its attention.
    "modernbert": ArchitectureCase(
        "ModernBertModel",
        {"cls_token_id": 1, "sep_token_id": 2, "attention_dropout": 0.1, "local_attention": 4,
         "global_attn_every_n_layers": 2},
        {"layers": _ends("attn.Wo", "mlp.Wo")}, norms=2 * LAYERS - 1, dropout=("attention",),
    ),
    "mpnet": ArchitectureCase(
        "MPNetModel", {}, {"encoder.layer": _ends("attention.attn.o", "output.dense")}, skip="post",
        after=_ends("attention.LayerNorm", "output.LayerNorm"),
        dropout=("attention", "feed_forward"),
    ),
    "nemotron_asr_streaming_encoder": _parakeet("NemotronAsrStreamingEncoder", norms=6 * LAYERS),
    "nemotron_h": ArchitectureCase(
        "NemotronHModel",
        {**_GROUPED, "head_dim": 6,
         "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
         "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 4, "n_groups": 2,
         "chunk_size": 4, "n_routed_experts": 3, "moe_intermediate_size": 12,
         "moe_shared_expert_intermediate_size": 12},
        {"layers": ({}, {"attention": "mixer.o_proj"}, {"feed_forward": "mixer.down_proj"},
                    {"feed_forward": "mixer"})},
        norms=3, layer=written_out.nemotron_h,
    ),
    "nomic_bert": _rotary_bert("NomicBertModel", "mlp.down_proj"),
    "olmo2": _llama("Olmo2Model"),
    "opt": ArchitectureCase(
        "OPTModel", {"ffn_dim": 24, "word_embed_proj_dim": 16},
        {"decoder.layers": _ends("self_attn.out_proj", "fc2")},
    ),
    "opt:post": ArchitectureCase(
        "OPTModel", {"ffn_dim": 24, "word_embed_proj_dim": 8, "do_layer_norm_before": False},
        {"decoder.layers": _ends("self_attn.out_proj", "fc2")}, skip="post",
        after=_ends("self_attn_layer_norm", "final_layer_norm"),
    ),
    "parakeet_encoder": _parakeet("ParakeetEncoder"),
    "phi": ArchitectureCase(
        "PhiModel", _GROUPED, {"layers": _ends("self_attn.dense", "mlp.fc2")}, norms=LAYERS,
    ),
    "phi3": ArchitectureCase(
        "Phi3Model", _GROUPED, {"layers": _ends("self_attn.o_proj", "mlp.down_proj")},
        dropout=("attention", "feed_forward"),
    ),
    "roberta-prelayernorm": _bert("RobertaPreLayerNormModel", skip="pre"),
    "seamless_m4t": _seamless("SeamlessM4TForSpeechToText", 5),
    "seamless_m4t_v2": _seamless("SeamlessM4Tv2ForSpeechToText", 6),
    "starcoder2": _llama("Starcoder2Model", mlp="mlp.c_proj"),
    "t5": _t5("T5Model"),
    "t5:gated": _t5("T5Model", feed_forward_proj="gated-gelu"),
    "timesformer": _timesformer(_DIVIDED, 3, written_out.timesformer),
    "timesformer:places": _timesformer(
        _ends("attention.output.dense", "output.dense"), 2, None, attention_type="space_only",
    ),
    "vit": _vit("ViTModel"),
    "wav2vec2": _wav2vec2("Wav2Vec2Model"),
    "wav2vec2:stable": _wav2vec2(
        "Wav2Vec2Model", skip="pre", do_stable_layer_norm=True, feat_extract_norm="layer",
    ),
    "wav2vec2-bert": ArchitectureCase(
        "Wav2Vec2BertModel", {}, {"encoder.layers": _CONFORMER_ENDS}, **_WAV2VEC2_BERT,
    ),
    "wav2vec2-bert:adapter": ArchitectureCase(
        "Wav2Vec2BertModel", {"add_adapter": True, "output_hidden_size": 24},
        {"encoder.layers": _CONFORMER_ENDS, "adapter.layers": _SHORTENING_ENDS},
        **{**_WAV2VEC2_BERT, "norms": 6 * LAYERS + 3,
           "layer": {"encoder.layers": written_out.conformer,
                     "adapter.layers": written_out.shortening}},
    ),
    "wav2vec2-conformer": ArchitectureCase(
        "Wav2Vec2ConformerModel", _SPEECH, {"encoder.layers": _CONFORMER_ENDS}, norms=5 * LAYERS,
        dropout=_CONFORMER_DROPOUT, inputs="speech", layer=written_out.conformer,
    ),
    # The attention reads the weights of its projection without calling it.
    "wavlm": _wav2vec2("WavLMModel", attention="attention"),
    "whisper": _bart("WhisperModel", "pre", inputs="speech_to_text", **_WHISPER),
    "xlm-roberta-xl": _bert("XLMRobertaXLModel", skip="pre", dropout=("attention",)),
    "xmod": ArchitectureCase(
        "XmodModel", {"languages": ("en_XX",), "default_language": "en_XX"},
        {"encoder.layer": _LXMERT_ENDS}, dropout=("attention",), layer=written_out.xmod,
    ),
    "zamba2": ArchitectureCase(
        "Zamba2Model",
        {"num_hidden_layers": 4,
         "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
         "mamba_d_state": 4, "mamba_d_conv": 2, "n_mamba_heads": 4, "chunk_size": 4},
        {"layers": ({}, {"feed_forward": "linear"}) * 2}, norms=6, layer=written_out.zamba2,
    ),
}  # fmt: skip
for model_type, stacks in ARCHITECTURES.items():
    if model_type not in CASES:
        copied = next(
            case for name, case in CASES.items() if ARCHITECTURES[name.partition(":")[0]] == stacks
        )
        if model_type in MODEL_MAPPING_NAMES:
            CASES[model_type] = replace(copied, model_class=MODEL_MAPPING_NAMES[model_type])
# Earlier versions of transformers have fewer of them.
IN_TRANSFORMERS = set(dir(transformers))
CASES = {name: case for name, case in CASES.items() if case.model_class in IN_TRANSFORMERS}
# The encoders that ladders read; the one with cross-attention is a decoder.
OF_LADDERS = [name for name in CASES if name.partition(":")[0] in READABLE and name != "bert:cross"]
