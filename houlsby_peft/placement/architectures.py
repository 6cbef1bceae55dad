"""The table of architectures: where the output of each sub-layer meets the skip connection.

Houlsby et al. 2019 (figure 2, left) insert the adapter after the projection of a sub-layer and its dropout, before
the skip connection and the norm. `SubLayer.output` names the last module before the skip connection: a dropout if the
model has a module for it, else the projection. The rows follow three decisions:

- A dropout module that serves both sub-layers, or a functional dropout, cannot be wrapped, so the projection is. In
  training the dropout then comes after the adapter (`late_dropout`); in evaluation there is no difference.
- A norm between the projection and the skip connection (Gemma 2 to 4, OLMo 2) stays after the adapter, as the
  paper's norm does, because it is trained like every norm of the layer. So does a factor without a module (BEiT's
  layer scale, the half of a Conformer's feed-forwards).
- Where attention and feed-forward run in parallel (Falcon, GPT-J, GPT-NeoX, Phi), they share a skip connection: each
  output gets an adapter, and the sum of both meets the skip connection.

A hybrid has layers of several kinds. Each sub-layer that is an attention or a feed-forward gets an adapter; a
state-space model or a convolution in its place gets none.

To add an architecture, read its layer's `forward`, write a row here and one in `tests/support/architecture_rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, takewhile


@dataclass(frozen=True)
class SubLayer:
    """The end of one sub-layer. Names are relative to the layer.

    Args:
        output: The module whose output meets the skip connection; the adapter is applied to this output. An asterisk
            stands for every index of a list: `ffn.*.output.dense`.
        projection: A module of the layer whose weights determine width, device and dtype if `output` has no such
            weights (a dropout, a mixture of experts). None: `output` itself.
        late_dropout: Whether a dropout follows the adapter in training, because it cannot be wrapped.
    """

    output: str
    projection: str | None = None
    late_dropout: bool = False

    @property
    def tells_width(self) -> str:
        """The module whose weights determine width, device and dtype."""
        return self.projection or self.output


@dataclass(frozen=True)
class Stack:
    """A list of equal layers, or the layers of one kind in a list: a layer is of the first kind that fits it.

    Args:
        layers: The end of the list's name: `encoder.layer` matches `bert.encoder.layer`. An asterisk: the model has
            one list for each part of its layers, and the names of modules begin with the name of such a list (XLM).
        attention: The attention that every layer has; None if these layers have none.
        feed_forward: The feed-forward that every layer has, or several; None if these layers have none.
        cross_attention: The attention of a decoder to the encoder's output; None if no layer has one.
        has: A further module that layers of this kind have, if the sub-layers do not tell them from other kinds.
    """

    layers: str
    attention: SubLayer | None = None
    feed_forward: SubLayer | tuple[SubLayer, ...] | None = None
    cross_attention: SubLayer | None = None
    has: str | None = None

    @property
    def positions(self) -> list[tuple[str, SubLayer]]:
        """All sub-layers with their positions; most architectures have one feed-forward in each layer."""
        several = self.feed_forward if isinstance(self.feed_forward, tuple) else (self.feed_forward,)
        ends = [
            ("attention", self.attention),
            *(("feed_forward", end) for end in several),
            ("cross_attention", self.cross_attention),
        ]
        return [(position, end) for position, end in ends if end is not None]

    def find(self, exists: Callable[[str], bool]) -> list[tuple[str, SubLayer]] | None:
        """Return the sub-layers of a layer with their positions; None if the layer is of another kind.

        Args:
            exists: Whether the layer has a module of this name.
        """
        found = [(position, each) for position, end in self.positions for each in _indexed(end, exists)]
        present = [(position, end) for position, end in found if exists(end.output) and exists(end.tells_width)]
        lacks = any(position != "cross_attention" for position, _ in set(found) - set(present))
        return None if lacks or (self.has and not exists(self.has)) else present


def _indexed(end: SubLayer, exists: Callable[[str], bool]) -> list[SubLayer]:
    """Return a sub-layer, or one for each index that an asterisk stands for."""
    if "*" not in end.output:
        return [end]
    each = (replace(end, output=end.output.replace("*", str(index))) for index in count())
    return list(takewhile(lambda single: exists(single.output), each))


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
_OPT = (
    Stack("decoder.layers", SubLayer("self_attn.out_proj", late_dropout=True), SubLayer("fc2", late_dropout=True)),
)
_BART = (
    replace(_OPT[0], layers="encoder.layers"),
    replace(_OPT[0], cross_attention=SubLayer("encoder_attn.out_proj", late_dropout=True)),
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
_BLOOM = (
    Stack("h", SubLayer("self_attention.dense", late_dropout=True), SubLayer("mlp.dense_4h_to_h", late_dropout=True)),
)
_LLAMA = (Stack("layers", SubLayer("self_attn.o_proj"), SubLayer("mlp.down_proj")),)
# The output of a mixture of experts is the sum over the selected and the shared experts: one adapter follows it.
_MIXTURE = (Stack("layers", SubLayer("self_attn.o_proj"), SubLayer("mlp", "self_attn.o_proj")),)
_PHI = (Stack("layers", SubLayer("self_attn.dense", late_dropout=True), SubLayer("mlp.fc2", late_dropout=True)),)
_PHI3 = (
    Stack(
        "layers",
        SubLayer("resid_attn_dropout", "self_attn.o_proj"),
        SubLayer("resid_mlp_dropout", "mlp.down_proj"),
    ),
)
_STARCODER2 = (
    Stack("layers", SubLayer("self_attn.o_proj", late_dropout=True), SubLayer("mlp.c_proj", late_dropout=True)),
)

# A layer's experts run beside its feed-forward, and the sum of both meets the skip connection.
_GEMMA4 = (
    replace(_LLAMA[0], feed_forward=(SubLayer("mlp.down_proj"), SubLayer("experts", "mlp.down_proj"))),
    *_LLAMA,
)
# The linear layers are inside modules that clip their outputs.
_GEMMA4_VISION = (
    Stack(
        "encoder.layers",
        SubLayer("self_attn.o_proj", "self_attn.o_proj.linear"),
        SubLayer("mlp.down_proj", "mlp.down_proj.linear"),
    ),
)
_GEMMA4_AUDIO = (
    Stack(
        "layers",
        SubLayer("self_attn.post", "self_attn.post.linear"),
        (
            SubLayer("feed_forward1.ffw_layer_2", "feed_forward1.ffw_layer_2.linear"),
            SubLayer("feed_forward2.ffw_layer_2", "feed_forward2.ffw_layer_2.linear"),
        ),
    ),
)

# Hybrids. The feed-forward may be a mixture of experts, which has no weight that tells its width.
_JAMBA_FEED_FORWARD = SubLayer("feed_forward", "pre_ff_layernorm")
_JAMBA = (
    Stack("layers", SubLayer("self_attn.o_proj"), _JAMBA_FEED_FORWARD),
    Stack("layers", None, _JAMBA_FEED_FORWARD, has="mamba"),
)
_FALCON_H1 = (Stack("layers", SubLayer("self_attn.o_proj"), SubLayer("feed_forward", "feed_forward.down_proj")),)
# Attention or convolution.
_LFM2 = (
    Stack("layers", SubLayer("self_attn.out_proj"), SubLayer("feed_forward.w2")),
    Stack("layers", None, SubLayer("feed_forward.w2"), has="conv"),
)
# Each layer is an attention, a feed-forward, a mixture of experts, or a state-space model.
_NEMOTRON_H = (
    Stack("layers", SubLayer("mixer.o_proj")),
    Stack("layers", None, SubLayer("mixer.down_proj")),
    Stack("layers", None, SubLayer("mixer", "mixer.shared_experts.down_proj")),
    Stack("layers", has="mixer.conv1d"),
)
# Attention and feed-forward have no skip connection of their own; after the linear layer, both meet the Mamba's.
_ZAMBA2 = (
    Stack("layers", SubLayer("shared_transformer.self_attn.o_proj"), SubLayer("linear")),
    Stack("layers", has="mamba"),
)

# Conformers have a feed-forward on either side of the attention and the convolution.
_CONFORMER = (
    Stack(
        "layers",
        SubLayer("self_attn_dropout", "self_attn.linear_out"),
        (SubLayer("ffn1.output_dropout", "ffn1.output_dense"), SubLayer("ffn2.output_dropout", "ffn2.output_dense")),
    ),
)
# Layers behind the encoder that shorten the sequence.
_CONFORMER_ADAPTER = Stack(
    "adapter.layers",
    SubLayer("self_attn_dropout", "self_attn.linear_out"),
    SubLayer("ffn.output_dropout", "ffn.output_dense"),
)
_PARAKEET = (
    Stack(
        "layers",
        SubLayer("self_attn.o_proj"),
        (SubLayer("feed_forward1.linear2"), SubLayer("feed_forward2.linear2")),
    ),
)
_SEAMLESS_FEED_FORWARD = SubLayer("ffn_dropout", "ffn.fc2")
_SEAMLESS = (
    *_CONFORMER,
    _CONFORMER_ADAPTER,
    # The decoder's dropout serves both attentions.
    Stack(
        "layers",
        SubLayer("self_attn.out_proj", late_dropout=True),
        _SEAMLESS_FEED_FORWARD,
        SubLayer("cross_attention.out_proj", late_dropout=True),
        has="cross_attention",
    ),
    Stack("layers", SubLayer("attn_dropout", "self_attn.out_proj"), _SEAMLESS_FEED_FORWARD),
)
# The decoder of units has a convolution for a feed-forward.
_SEAMLESS2 = (*_SEAMLESS, Stack("layers", SubLayer("self_attn.out_proj"), SubLayer("conv_dropout", "conv2")))

# Queries and texts have a feed-forward each.
_QFORMER_QUERY, _QFORMER_TEXT = (
    SubLayer(f"{output}.dropout", f"{output}.dense") for output in ("output_query", "output")
)
_QFORMER = tuple(
    replace(_BERT[0], feed_forward=ends)
    for ends in ((_QFORMER_QUERY, _QFORMER_TEXT), (_QFORMER_QUERY,), (_QFORMER_TEXT,))
)
_BLIP2_VISION = (Stack("encoder.layers", SubLayer("self_attn.projection"), SubLayer("mlp.fc2")),)

# Several feed-forwards follow the attention, all at the width of the layer's own bottleneck. Only without that
# bottleneck there are dropouts.
_MOBILEBERT = tuple(
    Stack("encoder.layer", attention, (SubLayer("ffn.*.output.dense"), feed_forward))
    for attention, feed_forward in (
        (_BERT[0].attention, SubLayer("output.dropout", "output.dense")),
        (SubLayer("attention.output.dense"), SubLayer("output.dense")),
    )
)
# The feed-forward's module includes its dropout.
_XLM = (Stack("*", SubLayer("attentions.out_lin", late_dropout=True), SubLayer("ffns", "ffns.lin2")),)

_CLIP = (Stack("encoder.layers", SubLayer("self_attn.out_proj"), SubLayer("mlp.fc2")),)
_DINOV2 = (Stack("encoder.layer", SubLayer("layer_scale1", "norm1"), SubLayer("layer_scale2", "norm2")),)
# One dropout of the layer serves both sub-layers.
_VIT = (Stack("layers", SubLayer("attention.o_proj", late_dropout=True), SubLayer("mlp.fc2", late_dropout=True)),)
_WAV2VEC2 = (
    Stack(
        "encoder.layers",
        SubLayer("dropout", "attention.out_proj"),
        SubLayer("feed_forward.output_dropout", "feed_forward.output_dense"),
    ),
)

_CONFORMER_NOTE = "each layer has two feed-forwards, each with its adapter"
# A state-space model or a convolution gets no adapter.
_ATTENTION_IN_SOME = "all feed-forwards have adapters, and the attention in the layers that have one"
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
    "bamba": Architecture("Bamba", _JAMBA, _ATTENTION_IN_SOME),
    "bart": Architecture("BART", _BART),
    "beit": Architecture("BEiT", _VIT, "the adapter comes before the layer scale"),
    "bert": Architecture("BERT", _BERT),
    "bert-generation": Architecture("BERT Generation", _BERT),
    "big_bird": Architecture("BigBird", _BERT),
    "blip_2_qformer": Architecture("BLIP-2", _QFORMER),
    "blip_2_vision_model": Architecture("BLIP-2", _BLIP2_VISION),
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
    "falcon_h1": Architecture("Falcon-H1", _FALCON_H1, "the state-space model beside the attention has no adapter"),
    "flaubert": Architecture("FlauBERT", _XLM),
    "gemma": Architecture("Gemma", _LLAMA),
    "gemma2": Architecture("Gemma 2", _LLAMA, _NORM_AFTER),
    "gemma3_text": Architecture("Gemma 3", _LLAMA, _NORM_AFTER),
    "gemma4_audio": Architecture("Gemma 4", _GEMMA4_AUDIO, _NORM_AFTER),
    "gemma4_text": Architecture("Gemma 4", _GEMMA4, _NORM_AFTER),
    "gemma4_vision": Architecture("Gemma 4", _GEMMA4_VISION, _NORM_AFTER),
    "gpt2": Architecture("GPT-2", _GPT2),
    "gpt_bigcode": Architecture("GPT-BigCode, StarCoder", _GPT2),
    "gpt_neo": Architecture("GPT-Neo", _GPT_NEO),
    "gpt_neox": Architecture("GPT-NeoX, Pythia", _GPT_NEOX, _MAYBE_PARALLEL),
    "gptj": Architecture("GPT-J", _GPTJ, _PARALLEL),
    "hubert": Architecture("HuBERT", _WAV2VEC2),
    "ibert": Architecture("I-BERT", _BERT),
    "instructblip_qformer": Architecture("InstructBLIP", _QFORMER),
    "instructblip_vision_model": Architecture("InstructBLIP", _BLIP2_VISION),
    "instructblipvideo_qformer": Architecture("InstructBLIP", _QFORMER),
    "instructblipvideo_vision_model": Architecture("InstructBLIP", _BLIP2_VISION),
    "jamba": Architecture("Jamba", _JAMBA, _ATTENTION_IN_SOME),
    "lasr_encoder": Architecture("LASR", _PARAKEET, _CONFORMER_NOTE),
    "lfm2": Architecture("LFM2", _LFM2, _ATTENTION_IN_SOME),
    "llama": Architecture("Llama", _LLAMA),
    "longformer": Architecture("Longformer", _BERT),
    "longt5": Architecture("LongT5", _LONGT5),
    "m2m_100": Architecture("M2M100, NLLB", _BART),
    "marian": Architecture("Marian", _BART),
    "mbart": Architecture("mBART", _BART),
    "megatron-bert": Architecture("Megatron-BERT", _BERT),
    "mistral": Architecture("Mistral", _LLAMA),
    "mixtral": Architecture("Mixtral", _MIXTURE, _EXPERTS),
    "mobilebert": Architecture(
        "MobileBERT", _MOBILEBERT, "the attention and all feed-forwards of a layer have adapters"
    ),
    "modernbert": Architecture("ModernBERT", _MODERNBERT),
    "mpnet": Architecture("MPNet", _MPNET),
    "mt5": Architecture("mT5", _T5),
    "nemotron_asr_streaming_encoder": Architecture("Nemotron ASR", _PARAKEET, _CONFORMER_NOTE),
    "nemotron_h": Architecture("Nemotron-H", _NEMOTRON_H, "layers that are a state-space model have no adapter"),
    "olmo2": Architecture("OLMo 2", _LLAMA, _NORM_AFTER),
    "opt": Architecture("OPT", _OPT),
    "parakeet_encoder": Architecture("Parakeet", _PARAKEET, _CONFORMER_NOTE),
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
    "seamless_m4t": Architecture("SeamlessM4T", _SEAMLESS, _CONFORMER_NOTE),
    "seamless_m4t_v2": Architecture("SeamlessM4T v2", _SEAMLESS2, _CONFORMER_NOTE),
    "siglip": Architecture("SigLIP", _CLIP, _TOWERS),
    "siglip_text_model": Architecture("SigLIP", _CLIP, _TOWERS),
    "siglip_vision_model": Architecture("SigLIP", _CLIP, _TOWERS),
    "starcoder2": Architecture("StarCoder 2", _STARCODER2),
    "t5": Architecture("T5, Flan-T5, ByT5", _T5),
    "umt5": Architecture("UMT5", _T5),
    "vit": Architecture("ViT", _VIT),
    "wav2vec2": Architecture("wav2vec 2.0", _WAV2VEC2),
    "wav2vec2-bert": Architecture("wav2vec2-BERT", (*_CONFORMER, _CONFORMER_ADAPTER), _CONFORMER_NOTE),
    "wav2vec2-conformer": Architecture("wav2vec2-Conformer", _CONFORMER, _CONFORMER_NOTE),
    "wavlm": Architecture("WavLM", _WAV2VEC2),
    "whisper": Architecture("Whisper", _BART),
    "xlm": Architecture("XLM", _XLM),
    "xlm-roberta": Architecture("XLM-RoBERTa", _BERT),
    "xlm-roberta-xl": Architecture("XLM-RoBERTa-XL", _XLM_ROBERTA_XL),
    "zamba2": Architecture("Zamba2", _ZAMBA2, "layers that are a state-space model have no adapter"),
}

# Architectures without a module to wrap, and what to do instead.
UNSUPPORTED: dict[str, str] = {
    "xlnet": (
        "XLNet's attention ends in a bare weight and a dropout that it also applies to the attention probabilities, "
        "so no module's output meets the skip connection. The feed-forward's can be adapted alone, with "
        "target_modules=['ff.layer_2']."
    ),
}
