"""The table of architectures: where the output of each sub-layer meets the skip connection.

Houlsby et al. 2019 (figure 2, left) insert the adapter after the projection of a sub-layer and its dropout, before
the skip connection and the norm. `SubLayer.output` names the last module before the skip connection: a dropout if the
model has a module for it, else the projection. The rows follow three decisions:

- A dropout module that serves both sub-layers, or a functional dropout, cannot be wrapped, so the projection is. In
  training the dropout then comes after the adapter; in evaluation there is no difference.
- A norm between the projection and the skip connection (Gemma 2 and 3, OLMo 2) stays after the adapter, as the
  paper's norm does, because it is trained like every norm of the layer. So does a factor without a module (BEiT's
  layer scale).
- Where attention and feed-forward run in parallel (Falcon, GPT-J, GPT-NeoX, Phi), they share a skip connection: each
  output gets an adapter, and the sum of both meets the skip connection.

To add an architecture, read its layer's `forward`, write a row here and one in `tests/support/architecture_rows.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class SubLayer:
    """The end of one sub-layer. Names are relative to the layer.

    Args:
        output: The module whose output meets the skip connection; the adapter is applied to this output.
        projection: A module of the layer whose weights determine width, device and dtype if `output` has no such
            weights (a dropout, a mixture of experts). None: `output` itself.
    """

    output: str
    projection: str | None = None

    @property
    def tells_width(self) -> str:
        """The module whose weights determine width, device and dtype."""
        return self.projection or self.output


@dataclass(frozen=True)
class Stack:
    """A list of equal layers.

    Args:
        layers: The end of the list's name: `encoder.layer` matches `bert.encoder.layer`.
        attention, feed_forward: The sub-layers that every layer has.
        cross_attention: The attention of a decoder to the encoder's output; None if no layer has one.
    """

    layers: str
    attention: SubLayer
    feed_forward: SubLayer
    cross_attention: SubLayer | None = None


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Args:
        name: The architecture's usual name.
        stacks: Its lists of layers; a model may have only some of them (an encoder without the decoder).
        note: What a user must know, for the printed list.
        frozen_norms: Norms that never train, because their input belongs to no row of the batch, so that the rows of
            a mixed batch cannot have different norms.
    """

    name: str
    stacks: tuple[Stack, ...]
    note: str = ""
    frozen_norms: tuple[str, ...] = ()


_BERT = (
    Stack(
        "encoder.layer",
        attention=SubLayer("attention.output.dropout", "attention.output.dense"),
        feed_forward=SubLayer("output.dropout", "output.dense"),
        cross_attention=SubLayer("crossattention.output.dropout", "crossattention.output.dense"),
    ),
)

_T5 = (
    Stack(
        "encoder.block",
        attention=SubLayer("layer.0.dropout", "layer.0.SelfAttention.o"),
        feed_forward=SubLayer("layer.1.dropout", "layer.1.DenseReluDense.wo"),
    ),
    Stack(
        "decoder.block",
        attention=SubLayer("layer.0.dropout", "layer.0.SelfAttention.o"),
        feed_forward=SubLayer("layer.2.dropout", "layer.2.DenseReluDense.wo"),
        cross_attention=SubLayer("layer.1.dropout", "layer.1.EncDecAttention.o"),
    ),
)

_BART_DECODER = Stack(
    "decoder.layers",
    attention=SubLayer("self_attn.out_proj"),
    feed_forward=SubLayer("fc2"),
    cross_attention=SubLayer("encoder_attn.out_proj"),
)
_BART = (
    Stack("encoder.layers", attention=SubLayer("self_attn.out_proj"), feed_forward=SubLayer("fc2")),
    _BART_DECODER,
)

_GPT2 = (
    Stack(
        "h",
        attention=SubLayer("attn.resid_dropout", "attn.c_proj"),
        feed_forward=SubLayer("mlp.dropout", "mlp.c_proj"),
        cross_attention=SubLayer("crossattention.resid_dropout", "crossattention.c_proj"),
    ),
)

_BLOOM = (Stack("h", attention=SubLayer("self_attention.dense"), feed_forward=SubLayer("mlp.dense_4h_to_h")),)

_LLAMA = (Stack("layers", attention=SubLayer("self_attn.o_proj"), feed_forward=SubLayer("mlp.down_proj")),)

# The output of a mixture of experts is the sum over the selected and the shared experts: one adapter follows it.
_MIXTURE = (Stack("layers", attention=SubLayer("self_attn.o_proj"), feed_forward=SubLayer("mlp", "self_attn.o_proj")),)

_CLIP = (Stack("encoder.layers", attention=SubLayer("self_attn.out_proj"), feed_forward=SubLayer("mlp.fc2")),)

# One dropout of the layer serves both sub-layers.
_VIT = (Stack("layers", attention=SubLayer("attention.o_proj"), feed_forward=SubLayer("mlp.fc2")),)

_WAV2VEC2 = (
    Stack(
        "encoder.layers",
        attention=SubLayer("dropout", "attention.out_proj"),
        feed_forward=SubLayer("feed_forward.output_dropout", "feed_forward.output_dense"),
    ),
)

_MIXTURE_NOTE = "the adapter follows the whole mixture of experts"

# Keys are the `model_type` of transformers' configurations.
ARCHITECTURES: dict[str, Architecture] = {
    "albert": Architecture(
        "ALBERT",
        (
            Stack(
                "albert_layers",
                attention=SubLayer("attention.output_dropout", "attention.dense"),
                feed_forward=SubLayer("ffn_output"),
            ),
        ),
        "one physical layer; all layers share its bottlenecks and norms, as they share its weights",
    ),
    "bart": Architecture("BART", _BART),
    "beit": Architecture("BEiT", _VIT, "the adapter comes before the layer scale"),
    "bert": Architecture("BERT", _BERT),
    "bert-generation": Architecture("BERT Generation", _BERT),
    "big_bird": Architecture("BigBird", _BERT),
    "bloom": Architecture("BLOOM", _BLOOM),
    "camembert": Architecture("CamemBERT", _BERT),
    "clip": Architecture("CLIP", _CLIP, "both towers are adapted"),
    "clip_text_model": Architecture("CLIP", _CLIP, "both towers are adapted"),
    "clip_vision_model": Architecture("CLIP", _CLIP, "both towers are adapted"),
    "deberta": Architecture("DeBERTa", _BERT, frozen_norms=("encoder.LayerNorm",)),
    # The encoder's norm is applied to the table of relative positions.
    "deberta-v2": Architecture("DeBERTa-v2, DeBERTa-v3", _BERT, frozen_norms=("encoder.LayerNorm",)),
    "deit": Architecture("DeiT", _VIT),
    "dinov2": Architecture(
        "DINOv2",
        (Stack("encoder.layer", SubLayer("layer_scale1", "norm1"), SubLayer("layer_scale2", "norm2")),),
        "the adapter comes after the layer scale",
    ),
    "distilbert": Architecture(
        "DistilBERT",
        (
            Stack(
                "transformer.layer",
                attention=SubLayer("attention.out_lin"),
                feed_forward=SubLayer("ffn.dropout", "ffn.lin2"),
            ),
        ),
    ),
    "electra": Architecture("ELECTRA", _BERT),
    "ernie": Architecture("ERNIE", _BERT),
    "esm": Architecture("ESM", _BERT),
    "falcon": Architecture("Falcon", _BLOOM, "attention and feed-forward may be parallel, and each has its adapter"),
    "gemma": Architecture("Gemma", _LLAMA),
    "gemma2": Architecture("Gemma 2", _LLAMA, "the adapter comes before the norm that follows each sub-layer"),
    "gemma3_text": Architecture("Gemma 3", _LLAMA, "the adapter comes before the norm that follows each sub-layer"),
    "gpt2": Architecture("GPT-2", _GPT2),
    "gpt_bigcode": Architecture("GPT-BigCode, StarCoder", _GPT2),
    "gpt_neo": Architecture(
        "GPT-Neo",
        (
            Stack(
                "h",
                attention=SubLayer("attn.attention.resid_dropout", "attn.attention.out_proj"),
                feed_forward=SubLayer("mlp.dropout", "mlp.c_proj"),
            ),
        ),
    ),
    "gpt_neox": Architecture(
        "GPT-NeoX, Pythia",
        (
            Stack(
                "layers",
                attention=SubLayer("post_attention_dropout", "attention.dense"),
                feed_forward=SubLayer("post_mlp_dropout", "mlp.dense_4h_to_h"),
            ),
        ),
        "attention and feed-forward may be parallel, and each has its adapter",
    ),
    "gptj": Architecture(
        "GPT-J",
        (
            Stack(
                "h",
                attention=SubLayer("attn.resid_dropout", "attn.out_proj"),
                feed_forward=SubLayer("mlp.dropout", "mlp.fc_out"),
            ),
        ),
        "attention and feed-forward are parallel, and each has its adapter",
    ),
    "hubert": Architecture("HuBERT", _WAV2VEC2),
    "llama": Architecture("Llama", _LLAMA),
    "longformer": Architecture("Longformer", _BERT),
    "longt5": Architecture(
        "LongT5",
        # The encoder's attention comes in two kinds, whose projections have different names.
        (
            Stack(
                "encoder.block",
                attention=SubLayer("layer.0.dropout", "layer.1.DenseReluDense.wo"),
                feed_forward=SubLayer("layer.1.dropout", "layer.1.DenseReluDense.wo"),
            ),
            *_T5[1:],
        ),
    ),
    "m2m_100": Architecture("M2M100, NLLB", _BART),
    "marian": Architecture("Marian", _BART),
    "mbart": Architecture("mBART", _BART),
    "megatron-bert": Architecture("Megatron-BERT", _BERT),
    "mistral": Architecture("Mistral", _LLAMA),
    "mixtral": Architecture("Mixtral", _MIXTURE, _MIXTURE_NOTE),
    "modernbert": Architecture(
        "ModernBERT",
        # The attention's dropout follows its projection, the feed-forward's comes before its projection.
        (Stack("layers", attention=SubLayer("attn.out_drop", "attn.Wo"), feed_forward=SubLayer("mlp.Wo")),),
    ),
    "mpnet": Architecture(
        "MPNet",
        (
            Stack(
                "encoder.layer",
                attention=SubLayer("attention.dropout", "attention.attn.o"),
                feed_forward=SubLayer("output.dropout", "output.dense"),
            ),
        ),
    ),
    "mt5": Architecture("mT5", _T5),
    "olmo2": Architecture("OLMo 2", _LLAMA, "the adapter comes before the norm that follows each sub-layer"),
    "opt": Architecture("OPT", (replace(_BART_DECODER, cross_attention=None),)),
    "pegasus": Architecture("Pegasus", _BART),
    "phi": Architecture(
        "Phi",
        (Stack("layers", attention=SubLayer("self_attn.dense"), feed_forward=SubLayer("mlp.fc2")),),
        "attention and feed-forward are parallel, and each has its adapter",
    ),
    "phi3": Architecture(
        "Phi-3",
        (
            Stack(
                "layers",
                attention=SubLayer("resid_attn_dropout", "self_attn.o_proj"),
                feed_forward=SubLayer("resid_mlp_dropout", "mlp.down_proj"),
            ),
        ),
    ),
    "plbart": Architecture("PLBART", _BART),
    "qwen2": Architecture("Qwen2, Qwen2.5", _LLAMA),
    "qwen2_moe": Architecture("Qwen2-MoE", _MIXTURE, _MIXTURE_NOTE),
    "qwen3": Architecture("Qwen3", _LLAMA),
    "qwen3_moe": Architecture("Qwen3-MoE", _MIXTURE, _MIXTURE_NOTE),
    "rembert": Architecture("RemBERT", _BERT),
    "roberta": Architecture("RoBERTa", _BERT),
    "roberta-prelayernorm": Architecture("RoBERTa-PreLayerNorm", _BERT),
    "siglip": Architecture("SigLIP", _CLIP, "both towers are adapted"),
    "siglip_text_model": Architecture("SigLIP", _CLIP, "both towers are adapted"),
    "siglip_vision_model": Architecture("SigLIP", _CLIP, "both towers are adapted"),
    "starcoder2": Architecture(
        "StarCoder 2",
        (Stack("layers", attention=SubLayer("self_attn.o_proj"), feed_forward=SubLayer("mlp.c_proj")),),
    ),
    "t5": Architecture("T5, Flan-T5, ByT5", _T5),
    "umt5": Architecture("UMT5", _T5),
    "vit": Architecture("ViT", _VIT),
    "wav2vec2": Architecture("wav2vec 2.0", _WAV2VEC2),
    "wavlm": Architecture("WavLM", _WAV2VEC2),
    "whisper": Architecture("Whisper", _BART),
    "xlm-roberta": Architecture("XLM-RoBERTa", _BERT),
    "xlm-roberta-xl": Architecture(
        "XLM-RoBERTa-XL",
        (
            Stack(
                "encoder.layer",
                attention=SubLayer("attention.output.dropout", "attention.output.dense"),
                feed_forward=SubLayer("output.dense"),
                cross_attention=SubLayer("crossattention.output.dropout", "crossattention.output.dense"),
            ),
        ),
    ),
}

# Architectures without a module to wrap, and what to do instead.
UNSUPPORTED: dict[str, str] = {
    "xlnet": (
        "XLNet's attention ends in a bare weight and a dropout that it also applies to the attention probabilities, "
        "so no module's output meets the skip connection. The feed-forward's can be adapted alone, with "
        "target_modules=['ff.layer_2']."
    ),
}
