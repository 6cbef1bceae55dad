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
        frozen_norms: Norms that never train. Their input is shared by all rows of a batch, so that the rows of a mixed
            batch cannot have different norms.
    """

    name: str
    stacks: tuple[Stack, ...]
    note: str = ""
    frozen_norms: tuple[str, ...] = ()


# The layers of architectures, each as attention, feed-forward and, where there is one, cross-attention.
_ALBERT = (Stack("albert_layers", SubLayer("attention.output_dropout", "attention.dense"), SubLayer("ffn_output")),)
_BERT = (
    Stack(
        "encoder.layer",
        SubLayer("attention.output.dropout", "attention.output.dense"),
        SubLayer("output.dropout", "output.dense"),
        SubLayer("crossattention.output.dropout", "crossattention.output.dense"),
    ),
)
_XLM_ROBERTA_XL = (replace(_BERT[0], feed_forward=SubLayer("output.dense")),)
_DISTILBERT = (Stack("transformer.layer", SubLayer("attention.out_lin"), SubLayer("ffn.dropout", "ffn.lin2")),)
# The attention's dropout follows its projection, the feed-forward's comes before its projection.
_MODERNBERT = (Stack("layers", SubLayer("attn.out_drop", "attn.Wo"), SubLayer("mlp.Wo")),)
_MPNET = (
    Stack(
        "encoder.layer", SubLayer("attention.dropout", "attention.attn.o"), SubLayer("output.dropout", "output.dense")
    ),
)

_T5_DECODER = Stack(
    "decoder.block",
    SubLayer("layer.0.dropout", "layer.0.SelfAttention.o"),
    SubLayer("layer.2.dropout", "layer.2.DenseReluDense.wo"),
    SubLayer("layer.1.dropout", "layer.1.EncDecAttention.o"),
)
_T5_FEED_FORWARD = SubLayer("layer.1.dropout", "layer.1.DenseReluDense.wo")
_T5 = (
    Stack("encoder.block", SubLayer("layer.0.dropout", "layer.0.SelfAttention.o"), _T5_FEED_FORWARD),
    _T5_DECODER,
)
# The encoder's attention comes in two kinds, whose projections have different names.
_LONGT5 = (
    Stack("encoder.block", SubLayer("layer.0.dropout", "layer.1.DenseReluDense.wo"), _T5_FEED_FORWARD),
    _T5_DECODER,
)
_OPT = (Stack("decoder.layers", SubLayer("self_attn.out_proj"), SubLayer("fc2")),)
_BART = (
    Stack("encoder.layers", SubLayer("self_attn.out_proj"), SubLayer("fc2")),
    replace(_OPT[0], cross_attention=SubLayer("encoder_attn.out_proj")),
)

_GPT2 = (
    Stack(
        "h",
        SubLayer("attn.resid_dropout", "attn.c_proj"),
        SubLayer("mlp.dropout", "mlp.c_proj"),
        SubLayer("crossattention.resid_dropout", "crossattention.c_proj"),
    ),
)
_GPT_NEO = (
    Stack(
        "h", SubLayer("attn.attention.resid_dropout", "attn.attention.out_proj"), SubLayer("mlp.dropout", "mlp.c_proj")
    ),
)
_GPT_NEOX = (
    Stack(
        "layers",
        SubLayer("post_attention_dropout", "attention.dense"),
        SubLayer("post_mlp_dropout", "mlp.dense_4h_to_h"),
    ),
)
_GPTJ = (Stack("h", SubLayer("attn.resid_dropout", "attn.out_proj"), SubLayer("mlp.dropout", "mlp.fc_out")),)
_BLOOM = (Stack("h", SubLayer("self_attention.dense"), SubLayer("mlp.dense_4h_to_h")),)
_LLAMA = (Stack("layers", SubLayer("self_attn.o_proj"), SubLayer("mlp.down_proj")),)
# The output of a mixture of experts is the sum over the selected and the shared experts: one adapter follows it.
_MIXTURE = (Stack("layers", SubLayer("self_attn.o_proj"), SubLayer("mlp", "self_attn.o_proj")),)
_PHI = (Stack("layers", SubLayer("self_attn.dense"), SubLayer("mlp.fc2")),)
_PHI3 = (
    Stack(
        "layers",
        SubLayer("resid_attn_dropout", "self_attn.o_proj"),
        SubLayer("resid_mlp_dropout", "mlp.down_proj"),
    ),
)
_STARCODER2 = (Stack("layers", SubLayer("self_attn.o_proj"), SubLayer("mlp.c_proj")),)

_CLIP = (Stack("encoder.layers", SubLayer("self_attn.out_proj"), SubLayer("mlp.fc2")),)
_DINOV2 = (Stack("encoder.layer", SubLayer("layer_scale1", "norm1"), SubLayer("layer_scale2", "norm2")),)
# One dropout of the layer serves both sub-layers.
_VIT = (Stack("layers", SubLayer("attention.o_proj"), SubLayer("mlp.fc2")),)
_WAV2VEC2 = (
    Stack(
        "encoder.layers",
        SubLayer("dropout", "attention.out_proj"),
        SubLayer("feed_forward.output_dropout", "feed_forward.output_dense"),
    ),
)

_ONE_LAYER = "one physical layer; all layers share its bottlenecks and norms, as they share its weights"
_EXPERTS = "the adapter follows the whole mixture of experts"
_NORM_AFTER = "the adapter comes before the norm that follows each sub-layer"
_PARALLEL = "attention and feed-forward are parallel, and each has its adapter"
_MAYBE_PARALLEL = "attention and feed-forward may be parallel, and each has its adapter"
_TOWERS = "both towers are adapted"
# DeBERTa's encoder applies its norm to the table of relative positions.
_DEBERTA_NORM = ("encoder.LayerNorm",)

# Keys are the `model_type` of transformers' configurations.
ARCHITECTURES: dict[str, Architecture] = {
    "albert": Architecture("ALBERT", _ALBERT, _ONE_LAYER),
    "bart": Architecture("BART", _BART),
    "beit": Architecture("BEiT", _VIT, "the adapter comes before the layer scale"),
    "bert": Architecture("BERT", _BERT),
    "bert-generation": Architecture("BERT Generation", _BERT),
    "big_bird": Architecture("BigBird", _BERT),
    "bloom": Architecture("BLOOM", _BLOOM),
    "camembert": Architecture("CamemBERT", _BERT),
    "clip": Architecture("CLIP", _CLIP, _TOWERS),
    "clip_text_model": Architecture("CLIP", _CLIP, _TOWERS),
    "clip_vision_model": Architecture("CLIP", _CLIP, _TOWERS),
    "deberta": Architecture("DeBERTa", _BERT, frozen_norms=_DEBERTA_NORM),
    "deberta-v2": Architecture("DeBERTa-v2, DeBERTa-v3", _BERT, frozen_norms=_DEBERTA_NORM),
    "deit": Architecture("DeiT", _VIT),
    "dinov2": Architecture("DINOv2", _DINOV2, "the adapter comes after the layer scale"),
    "distilbert": Architecture("DistilBERT", _DISTILBERT),
    "electra": Architecture("ELECTRA", _BERT),
    "ernie": Architecture("ERNIE", _BERT),
    "esm": Architecture("ESM", _BERT),
    "falcon": Architecture("Falcon", _BLOOM, _MAYBE_PARALLEL),
    "gemma": Architecture("Gemma", _LLAMA),
    "gemma2": Architecture("Gemma 2", _LLAMA, _NORM_AFTER),
    "gemma3_text": Architecture("Gemma 3", _LLAMA, _NORM_AFTER),
    "gpt2": Architecture("GPT-2", _GPT2),
    "gpt_bigcode": Architecture("GPT-BigCode, StarCoder", _GPT2),
    "gpt_neo": Architecture("GPT-Neo", _GPT_NEO),
    "gpt_neox": Architecture("GPT-NeoX, Pythia", _GPT_NEOX, _MAYBE_PARALLEL),
    "gptj": Architecture("GPT-J", _GPTJ, _PARALLEL),
    "hubert": Architecture("HuBERT", _WAV2VEC2),
    "llama": Architecture("Llama", _LLAMA),
    "longformer": Architecture("Longformer", _BERT),
    "longt5": Architecture("LongT5", _LONGT5),
    "m2m_100": Architecture("M2M100, NLLB", _BART),
    "marian": Architecture("Marian", _BART),
    "mbart": Architecture("mBART", _BART),
    "megatron-bert": Architecture("Megatron-BERT", _BERT),
    "mistral": Architecture("Mistral", _LLAMA),
    "mixtral": Architecture("Mixtral", _MIXTURE, _EXPERTS),
    "modernbert": Architecture("ModernBERT", _MODERNBERT),
    "mpnet": Architecture("MPNet", _MPNET),
    "mt5": Architecture("mT5", _T5),
    "olmo2": Architecture("OLMo 2", _LLAMA, _NORM_AFTER),
    "opt": Architecture("OPT", _OPT),
    "pegasus": Architecture("Pegasus", _BART),
    "phi": Architecture("Phi", _PHI, _PARALLEL),
    "phi3": Architecture("Phi-3", _PHI3),
    "plbart": Architecture("PLBART", _BART),
    "qwen2": Architecture("Qwen2, Qwen2.5", _LLAMA),
    "qwen2_moe": Architecture("Qwen2-MoE", _MIXTURE, _EXPERTS),
    "qwen3": Architecture("Qwen3", _LLAMA),
    "qwen3_moe": Architecture("Qwen3-MoE", _MIXTURE, _EXPERTS),
    "rembert": Architecture("RemBERT", _BERT),
    "roberta": Architecture("RoBERTa", _BERT),
    "roberta-prelayernorm": Architecture("RoBERTa-PreLayerNorm", _BERT),
    "siglip": Architecture("SigLIP", _CLIP, _TOWERS),
    "siglip_text_model": Architecture("SigLIP", _CLIP, _TOWERS),
    "siglip_vision_model": Architecture("SigLIP", _CLIP, _TOWERS),
    "starcoder2": Architecture("StarCoder 2", _STARCODER2),
    "t5": Architecture("T5, Flan-T5, ByT5", _T5),
    "umt5": Architecture("UMT5", _T5),
    "vit": Architecture("ViT", _VIT),
    "wav2vec2": Architecture("wav2vec 2.0", _WAV2VEC2),
    "wavlm": Architecture("WavLM", _WAV2VEC2),
    "whisper": Architecture("Whisper", _BART),
    "xlm-roberta": Architecture("XLM-RoBERTa", _BERT),
    "xlm-roberta-xl": Architecture("XLM-RoBERTa-XL", _XLM_ROBERTA_XL),
}

# Architectures without a module to wrap, and what to do instead.
UNSUPPORTED: dict[str, str] = {
    "xlnet": (
        "XLNet's attention ends in a bare weight and a dropout that it also applies to the attention probabilities, "
        "so no module's output meets the skip connection. The feed-forward's can be adapted alone, with "
        "target_modules=['ff.layer_2']."
    ),
}
