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
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, TypeAlias


@dataclass(frozen=True)
class SubLayer:
    """The end of one sub-layer. Names are relative to the layer.

    Args:
        output: The module whose output meets the skip connection; the adapter is applied to this output. An asterisk
            stands for every index of a list: `ffn.*.output.dense`.
        projection: A module of the layer whose weights determine width, device and dtype if `output` has no such
            weights (a dropout, a mixture of experts). None: `output` itself.
        late_dropout: Whether a dropout follows the adapter in training, because it cannot be wrapped.
        entry: The module whose input is the residual input x of the sub-layer, which adapters of other kinds than
            Houlsby's read. None: not known, as where a norm is between the output and the sum, where sub-layers are
            parallel, or where the model flattens or transposes the hidden states.
        norm: The norm of the sum of the sub-layer's output and x; None in a pre-LN layer.
    """

    output: str
    projection: str | None = None
    late_dropout: bool = False
    entry: str | None = None
    norm: str | None = None

    @property
    def tells_width(self) -> str:
        """The module whose weights determine width, device and dtype."""
        return self.projection or self.output


_Ends: TypeAlias = SubLayer | str | tuple[SubLayer | str, ...] | None
CROSS = "cross_attention"


@dataclass(frozen=True)
class Stack:
    """A list of equal layers, or the layers of one kind in a list: a layer is of the first kind that fits it.

    A sub-layer may be the name of its output alone.

    Args:
        layers: The end of the list's name: `encoder.layer` matches `bert.encoder.layer`.
        attention: The attention that every layer has, or several; None if these layers have none.
        feed_forward: The feed-forward that every layer has, or several; None if these layers have none.
        cross_attention: The attention of a decoder to the encoder's output; None if no layer has one.
        has: A further module that layers of this kind have, if the sub-layers do not tell them from other kinds.
    """

    layers: str
    attention: _Ends = None
    feed_forward: _Ends = None
    cross_attention: _Ends = None
    has: str | None = None

    @property
    def positions(self) -> list[tuple[str, SubLayer]]:
        """All sub-layers with their positions; most architectures have one of each in a layer."""
        each = ("attention", self.attention), ("feed_forward", self.feed_forward), (CROSS, self.cross_attention)
        return [
            (position, end if isinstance(end, SubLayer) else SubLayer(end))
            for position, ends in each
            for end in (ends if isinstance(ends, tuple) else (ends,))
            if end is not None
        ]

    def find(self, exists: Callable[[str], bool]) -> list[tuple[str, SubLayer]] | None:
        """Return the sub-layers of a layer with their positions; None if the layer is of another kind.

        Args:
            exists: Whether the layer has a module of this name.
        """
        found = []
        for position, end in self.positions:
            if "*" in end.output:
                names = (end.output.replace("*", str(index)) for index in count())
                found += [(position, SubLayer(name)) for name in takewhile(exists, names)]
            elif exists(end.output) and exists(end.tells_width):
                found.append((position, end))
            elif position != CROSS:
                return None
        return None if self.has and not exists(self.has) else found


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Args:
        name: The architecture's usual name.
        stacks: Its lists of layers; a model may have only some of them (an encoder without the decoder).
        note: What a user must know, for the printed list.
        frozen_norms: Norms that never train. Their input is shared by all rows of a batch, so that the rows of a mixed
            batch cannot have different norms.
        embeddings: The end of the embeddings, whose output enters the first layer; its names end the modules' full
            names. None where it is not one module, as it is a function or serves the end of the encoder as well.
        has_entries: Whether the entries in `stacks` hold for this model, which may share its layer with others.
    """

    name: str
    stacks: tuple[Stack, ...]
    note: str = ""
    frozen_norms: tuple[str, ...] = ()
    embeddings: SubLayer | None = None
    has_entries: bool = True


def _layers(*stack: Any, **more: Any) -> tuple[Stack, ...]:
    """Return the one list of layers of an architecture."""
    return (Stack(*stack, **more),)


def _dense(output: str, entry: str | None = None, norm: str | None = None) -> SubLayer:
    """Return a sub-layer that ends in BERT's modules `dense` and `dropout`."""
    return SubLayer(f"{output}.dropout", f"{output}.dense", entry=entry, norm=norm)


def _late(output: str, entry: str | None = None, norm: str | None = None) -> SubLayer:
    """Return a sub-layer that ends in a projection, whose dropout follows the adapter in training."""
    return SubLayer(output, late_dropout=True, entry=entry, norm=norm)


def _bert(
    entry: str = "query", attention: Any = None, feed_forward: Any = None, cross: Any = None
) -> tuple[Stack, ...]:
    """Return BERT's layer, or parts of it; in `attention.self`, the module `entry` reads the hidden states alone."""
    return _layers(
        "encoder.layer",
        attention or _dense("attention.output", f"attention.self.{entry}", "attention.output.LayerNorm"),
        feed_forward or _dense("output", "intermediate.dense", "output.LayerNorm"),
        cross or _dense("crossattention.output", "crossattention.self.query", "crossattention.output.LayerNorm"),
    )


def _pre_ln_bert(attention: str | None, feed_forward: SubLayer) -> tuple[Stack, ...]:
    """Return BERT's layer with norms before the sub-layers."""
    return _bert("", _dense("attention.output", attention), feed_forward, _dense("crossattention.output"))


_ALBERT = _layers(
    "albert_layers",
    SubLayer("attention.output_dropout", "attention.dense", entry="attention.query", norm="attention.LayerNorm"),
    SubLayer("ffn_output", entry="ffn", norm="full_layer_layer_norm"),
)
_BERT = _bert()
_DISTILBERT = _layers(
    "transformer.layer",
    SubLayer("attention.out_lin", entry="attention.q_lin", norm="sa_layer_norm"),
    SubLayer("ffn.dropout", "ffn.lin2", entry="ffn.lin1", norm="output_layer_norm"),
)
# It transposes the hidden states before its attention.
_LONGFORMER = _bert(attention=_dense("attention.output"))
# The layout has sub-layers beside the text's, of which the last layer's do not contribute to the output.
_LILT = _layers("encoder.layer", _dense("attention.output"), _dense("output"))
_LXMERT = (
    *_LILT,
    Stack("encoder.r_layers", _dense("attention.output"), _dense("output")),
    # The cross-attention runs once for the words and once for the image.
    Stack(
        "encoder.x_layers",
        (_dense("lang_self_att.output"), _dense("visn_self_att.output")),
        (_dense("lang_output"), _dense("visn_output")),
        _dense("visual_attention.output"),
    ),
)
# The attention's dropout follows its projection, the feed-forward's comes before its projection.
_MODERNBERT = _layers(
    "layers", SubLayer("attn.out_drop", "attn.Wo", entry="attn_norm"), SubLayer("mlp.Wo", entry="mlp_norm")
)
_MPNET = _bert(
    attention=SubLayer("attention.dropout", "attention.attn.o", entry="attention.attn.q", norm="attention.LayerNorm")
)
# The dropout of the feed-forward serves the language's own adapter as well.
_XMOD = _pre_ln_bert(None, _late("output.dense"))


def _t5(position: int, projection: str) -> SubLayer:
    layer = f"layer.{position}"
    return SubLayer(f"{layer}.dropout", f"{layer}.{projection}", entry=f"{layer}.layer_norm")


_T5_DECODER = Stack(
    "decoder.block", _t5(0, "SelfAttention.o"), _t5(2, "DenseReluDense.wo"), _t5(1, "EncDecAttention.o")
)
_T5 = (Stack("encoder.block", _t5(0, "SelfAttention.o"), _t5(1, "DenseReluDense.wo")), _T5_DECODER)
# The encoder's attention comes in two kinds, whose projections have different names.
_LONGT5 = (
    Stack(
        "encoder.block",
        SubLayer("layer.0.dropout", "layer.1.DenseReluDense.wo", entry="layer.0.layer_norm"),
        _t5(1, "DenseReluDense.wo"),
    ),
    _T5_DECODER,
)


def _bart(is_post_ln: bool) -> tuple[Stack, ...]:
    """Return the layers of BART or, with norms before the sub-layers, mBART."""
    attention, cross_attention, feed_forward = (
        _late(output, *((first, norm) if is_post_ln else (norm,)))
        for output, first, norm in (
            ("self_attn.out_proj", "self_attn.q_proj", "self_attn_layer_norm"),
            ("encoder_attn.out_proj", "encoder_attn.q_proj", "encoder_attn_layer_norm"),
            ("fc2", "fc1", "final_layer_norm"),
        )
    )
    return (
        Stack("encoder.layers", attention, feed_forward),
        Stack("decoder.layers", attention, feed_forward, cross_attention),
    )


_BART, _MBART = _bart(is_post_ln=True), _bart(is_post_ln=False)
# It flattens the hidden states, and its layers come with norms before or after the sub-layers.
_OPT = _layers("decoder.layers", _late("self_attn.out_proj"), _late("fc2"))

_GPT2 = _layers(
    "h",
    SubLayer("attn.resid_dropout", "attn.c_proj", entry="ln_1"),
    SubLayer("mlp.dropout", "mlp.c_proj", entry="ln_2"),
    SubLayer("crossattention.resid_dropout", "crossattention.c_proj", entry="ln_cross_attn"),
)
_GPT_NEO = _layers(
    "h",
    SubLayer("attn.attention.resid_dropout", "attn.attention.out_proj", entry="ln_1"),
    SubLayer("mlp.dropout", "mlp.c_proj", entry="ln_2"),
)
_GPT_NEOX = _layers(
    "layers",
    SubLayer("post_attention_dropout", "attention.dense"),
    SubLayer("post_mlp_dropout", "mlp.dense_4h_to_h"),
)
_GPTJ = _layers("h", SubLayer("attn.resid_dropout", "attn.out_proj"), SubLayer("mlp.dropout", "mlp.fc_out"))
_BLOOM = _layers("h", _late("self_attention.dense"), _late("mlp.dense_4h_to_h"))


def _llama(feed_forward: str, projection: str | None = None, late_dropout: bool = False) -> tuple[Stack, ...]:
    return _layers(
        "layers",
        SubLayer("self_attn.o_proj", None, late_dropout, entry="input_layernorm"),
        SubLayer(feed_forward, projection, late_dropout, entry="post_attention_layernorm"),
    )


_LLAMA = _llama("mlp.down_proj")
# The output of a mixture of experts is the sum over the selected and the shared experts: one adapter follows it.
_MIXTURE = _llama("mlp", "self_attn.o_proj")
_STARCODER2 = _llama("mlp.c_proj", late_dropout=True)
_PHI = _layers("layers", _late("self_attn.dense"), _late("mlp.fc2"))
_PHI3 = _layers(
    "layers",
    SubLayer("resid_attn_dropout", "self_attn.o_proj", entry="input_layernorm"),
    SubLayer("resid_mlp_dropout", "mlp.down_proj", entry="post_attention_layernorm"),
)

# A layer's experts run beside its feed-forward, and the sum of both meets the skip connection.
_GEMMA4 = (Stack("layers", "self_attn.o_proj", ("mlp.down_proj", SubLayer("experts", "mlp.down_proj"))), *_LLAMA)
# The linear layers are inside modules that clip their outputs.
_GEMMA4_VISION = _layers(
    "encoder.layers",
    SubLayer("self_attn.o_proj", "self_attn.o_proj.linear"),
    SubLayer("mlp.down_proj", "mlp.down_proj.linear"),
)
_GEMMA4_AUDIO = _layers(
    "layers",
    SubLayer("self_attn.post", "self_attn.post.linear"),
    (
        SubLayer("feed_forward1.ffw_layer_2", "feed_forward1.ffw_layer_2.linear"),
        SubLayer("feed_forward2.ffw_layer_2", "feed_forward2.ffw_layer_2.linear"),
    ),
)

# Hybrids. The feed-forward may be a mixture of experts, which has no weight that tells its width.
_JAMBA_FEED_FORWARD = SubLayer("feed_forward", "pre_ff_layernorm")
_JAMBA = (
    Stack("layers", "self_attn.o_proj", _JAMBA_FEED_FORWARD),
    Stack("layers", None, _JAMBA_FEED_FORWARD, has="mamba"),
)
_FALCON_H1 = _layers("layers", "self_attn.o_proj", SubLayer("feed_forward", "feed_forward.down_proj"))
# Attention or convolution.
_LFM2 = (
    Stack("layers", "self_attn.out_proj", "feed_forward.w2"),
    Stack("layers", None, "feed_forward.w2", has="conv"),
)
# Each layer is an attention, a feed-forward, a mixture of experts, or a state-space model.
_NEMOTRON_H = (
    Stack("layers", "mixer.o_proj"),
    Stack("layers", None, "mixer.down_proj"),
    Stack("layers", None, SubLayer("mixer", "mixer.shared_experts.down_proj")),
    Stack("layers", has="mixer.conv1d"),
)
# The shared attention and feed-forward have no skip connection of their own: the linear layer after them meets the
# Mamba's.
_ZAMBA2 = (Stack("layers", None, "linear"), Stack("layers", has="mamba"))
# The layers of Granite 4 have an attention or a Mamba, and a feed-forward or, beside it, a mixture of experts.
_GRANITE_FEED_FORWARD = "shared_mlp.output_linear"
_GRANITE_HYBRID = tuple(
    Stack("layers", attention, feed_forward, has=None if attention else "mamba")
    for attention in ("self_attn.o_proj", None)
    for feed_forward in (
        (SubLayer("block_sparse_moe", _GRANITE_FEED_FORWARD), _GRANITE_FEED_FORWARD),
        _GRANITE_FEED_FORWARD,
    )
)
# A short convolution follows each sub-layer.
_INKLING = _layers("layers", SubLayer("attn_sconv", "self_attn.o_proj"), SubLayer("mlp_sconv", "self_attn.o_proj"))

# Conformers have a feed-forward on either side of the attention and the convolution.
_CONFORMER_ATTENTION = SubLayer("self_attn_dropout", "self_attn.linear_out")
_CONFORMER = _layers(
    "layers",
    _CONFORMER_ATTENTION,
    (SubLayer("ffn1.output_dropout", "ffn1.output_dense"), SubLayer("ffn2.output_dropout", "ffn2.output_dense")),
)
# Layers behind the encoder that shorten the sequence.
_SHORTENING = _layers("adapter.layers", _CONFORMER_ATTENTION, SubLayer("ffn.output_dropout", "ffn.output_dense"))
_PARAKEET = _layers("layers", "self_attn.o_proj", ("feed_forward1.linear2", "feed_forward2.linear2"))
_SEAMLESS_FEED_FORWARD = SubLayer("ffn_dropout", "ffn.fc2")
_SEAMLESS = (
    *_CONFORMER,
    *_SHORTENING,
    # The decoder's dropout serves both attentions.
    Stack(
        "layers",
        _late("self_attn.out_proj"),
        _SEAMLESS_FEED_FORWARD,
        _late("cross_attention.out_proj"),
        has="cross_attention",
    ),
    Stack("layers", SubLayer("attn_dropout", "self_attn.out_proj"), _SEAMLESS_FEED_FORWARD),
)
# The decoder of units has a convolution for a feed-forward.
_SEAMLESS2 = (*_SEAMLESS, Stack("layers", "self_attn.out_proj", SubLayer("conv_dropout", "conv2")))

# Queries and texts have a feed-forward each.
_QFORMER = tuple(
    Stack("encoder.layer", _dense("attention.output"), ends, _dense("crossattention.output"))
    for ends in ((_dense("output_query"), _dense("output")), _dense("output_query"), _dense("output"))
)
_BLIP2_VISION = _layers("encoder.layers", "self_attn.projection", "mlp.fc2")

# Several feed-forwards follow the attention, all at the width of the layer's own bottleneck. Only without that
# bottleneck there are dropouts.
_MOBILEBERT = tuple(
    Stack("encoder.layer", attention, ("ffn.*.output.dense", feed_forward))
    for attention, feed_forward in (
        (_dense("attention.output"), _dense("output")),
        ("attention.output.dense", "output.dense"),
    )
)

_CLIP = _layers(
    "encoder.layers", SubLayer("self_attn.out_proj", entry="layer_norm1"), SubLayer("mlp.fc2", entry="layer_norm2")
)
_DINOV2 = _layers("encoder.layer", SubLayer("layer_scale1", "norm1"), SubLayer("layer_scale2", "norm2"))
# One dropout of the layer serves both sub-layers.
_VIT = _layers("layers", _late("attention.o_proj", "layernorm_before"), _late("mlp.fc2", "layernorm_after"))
# The attention over time meets its skip connection after a further linear layer; some models attend to places only.
_TIMESFORMER = tuple(
    Stack("encoder.layer", attention, _dense("output"))
    for attention in (("temporal_dense", _dense("attention.output")), _dense("attention.output"))
)
# Each layer attends to windows, then to channels.
_FLORENCE_VISION = tuple(
    Stack(
        f"blocks.{stage}",
        (
            SubLayer("spatial_block.window_attn", "spatial_block.window_attn.proj"),
            "channel_block.channel_attn.proj",
        ),
        ("spatial_block.ffn.fc2", "channel_block.ffn.fc2"),
    )
    for stage in range(4)
)
_WAV2VEC2 = _layers(
    "encoder.layers",
    SubLayer("dropout", "attention.out_proj"),
    SubLayer("feed_forward.output_dropout", "feed_forward.output_dense"),
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

_BERT_EMBEDDINGS = SubLayer("embeddings.dropout", "embeddings.LayerNorm")

# Keys are the `model_type` of transformers' configurations.
ARCHITECTURES: dict[str, Architecture] = {
    "albert": Architecture("ALBERT", _ALBERT, _ONE_LAYER, embeddings=_BERT_EMBEDDINGS),
    "bamba": Architecture("Bamba", _JAMBA, _ATTENTION_IN_SOME),
    "bart": Architecture("BART", _BART, embeddings=SubLayer("encoder.layernorm_embedding")),
    "beit": Architecture("BEiT", _VIT, "the adapter comes before the layer scale", has_entries=False),
    "bert": Architecture("BERT", _BERT, embeddings=_BERT_EMBEDDINGS),
    "bert-generation": Architecture("BERT Generation", _BERT),
    "big_bird": Architecture("BigBird", _BERT),
    "blip_2_qformer": Architecture("BLIP-2", _QFORMER),
    "blip_2_vision_model": Architecture("BLIP-2", _BLIP2_VISION),
    "bloom": Architecture("BLOOM", _BLOOM),
    "camembert": Architecture("CamemBERT", _BERT, embeddings=_BERT_EMBEDDINGS),
    "clip": Architecture("CLIP", _CLIP, _TOWERS),
    "clip_text_model": Architecture("CLIP", _CLIP, _TOWERS),
    "clip_vision_model": Architecture("CLIP", _CLIP, _TOWERS),
    "deberta": Architecture("DeBERTa", _bert("in_proj"), frozen_norms=_DEBERTA_NORM),
    "deberta-v2": Architecture("DeBERTa-v2, DeBERTa-v3", _bert("value_proj"), frozen_norms=_DEBERTA_NORM),
    "deit": Architecture("DeiT", _VIT),
    "dinov2": Architecture("DINOv2", _DINOV2, "the adapter comes after the layer scale"),
    "distilbert": Architecture("DistilBERT", _DISTILBERT, embeddings=_BERT_EMBEDDINGS),
    "electra": Architecture("ELECTRA", _BERT, embeddings=_BERT_EMBEDDINGS),
    "ernie": Architecture("ERNIE", _BERT, embeddings=_BERT_EMBEDDINGS),
    "esm": Architecture("ESM", _pre_ln_bert("attention.LayerNorm", _dense("output", "LayerNorm"))),
    "falcon": Architecture("Falcon", _BLOOM, _MAYBE_PARALLEL),
    "falcon_h1": Architecture("Falcon-H1", _FALCON_H1, "the state-space model beside the attention has no adapter"),
    "florence_vision": Architecture(
        "Florence-2", _FLORENCE_VISION, "each layer of the image tower has two attentions and two feed-forwards"
    ),
    "gemma": Architecture("Gemma", _LLAMA),
    "gemma2": Architecture("Gemma 2", _LLAMA, _NORM_AFTER, has_entries=False),
    "gemma3_text": Architecture("Gemma 3", _LLAMA, _NORM_AFTER, has_entries=False),
    "gemma3n_text": Architecture("Gemma 3n", _LLAMA, _NORM_AFTER, has_entries=False),
    "gemma4_audio": Architecture("Gemma 4", _GEMMA4_AUDIO, _NORM_AFTER),
    "gemma4_text": Architecture("Gemma 4", _GEMMA4, _NORM_AFTER, has_entries=False),
    "gemma4_vision": Architecture("Gemma 4", _GEMMA4_VISION, _NORM_AFTER),
    "gpt2": Architecture("GPT-2", _GPT2, embeddings=SubLayer("drop", "wte")),
    "gpt_bigcode": Architecture("GPT-BigCode, StarCoder", _GPT2),
    "gpt_neo": Architecture("GPT-Neo", _GPT_NEO),
    "gpt_neox": Architecture("GPT-NeoX, Pythia", _GPT_NEOX, _MAYBE_PARALLEL),
    "gptj": Architecture("GPT-J", _GPTJ, _PARALLEL),
    "granitemoehybrid": Architecture("Granite 4", _GRANITE_HYBRID, _ATTENTION_IN_SOME),
    "hubert": Architecture("HuBERT", _WAV2VEC2),
    "ibert": Architecture("I-BERT", _BERT, has_entries=False),
    "inkling_text": Architecture("Inkling", _INKLING, "the adapter follows the convolution after each sub-layer"),
    "instructblip_qformer": Architecture("InstructBLIP", _QFORMER),
    "instructblip_vision_model": Architecture("InstructBLIP", _BLIP2_VISION),
    "instructblipvideo_qformer": Architecture("InstructBLIP", _QFORMER),
    "instructblipvideo_vision_model": Architecture("InstructBLIP", _BLIP2_VISION),
    "jamba": Architecture("Jamba", _JAMBA, _ATTENTION_IN_SOME),
    "lasr_encoder": Architecture("LASR", _PARAKEET, _CONFORMER_NOTE),
    "lfm2": Architecture("LFM2", _LFM2, _ATTENTION_IN_SOME),
    "lilt": Architecture("LiLT", _LILT, "the text has adapters, the layout has none"),
    "llama": Architecture("Llama", _LLAMA, embeddings=SubLayer("embed_tokens")),
    "longformer": Architecture("Longformer", _LONGFORMER),
    "longt5": Architecture("LongT5", _LONGT5),
    "lxmert": Architecture("LXMERT", _LXMERT, "both parts of the layers that join text and image are adapted"),
    "m2m_100": Architecture("M2M100, NLLB", _MBART),
    "marian": Architecture("Marian", _BART),
    "mbart": Architecture("mBART", _MBART, embeddings=SubLayer("encoder.layernorm_embedding")),
    "megatron-bert": Architecture("Megatron-BERT", _pre_ln_bert("attention.ln", _dense("output", "ln"))),
    "mistral": Architecture("Mistral", _LLAMA, embeddings=SubLayer("embed_tokens")),
    "mixtral": Architecture("Mixtral", _MIXTURE, _EXPERTS),
    "mobilebert": Architecture(
        "MobileBERT", _MOBILEBERT, "the attention and all feed-forwards of a layer have adapters"
    ),
    "modernbert": Architecture("ModernBERT", _MODERNBERT, embeddings=SubLayer("embeddings.drop", "embeddings.norm")),
    "mpnet": Architecture("MPNet", _MPNET, embeddings=_BERT_EMBEDDINGS),
    "mt5": Architecture("mT5", _T5, embeddings=SubLayer("encoder.embed_tokens")),
    "nemotron_asr_streaming_encoder": Architecture("Nemotron ASR", _PARAKEET, _CONFORMER_NOTE),
    "nemotron_h": Architecture("Nemotron-H", _NEMOTRON_H, "layers that are a state-space model have no adapter"),
    "olmo2": Architecture("OLMo 2", _LLAMA, _NORM_AFTER, has_entries=False),
    "opt": Architecture("OPT", _OPT),
    "parakeet_encoder": Architecture("Parakeet", _PARAKEET, _CONFORMER_NOTE),
    "pegasus": Architecture("Pegasus", _MBART),
    "phi": Architecture("Phi", _PHI, _PARALLEL),
    "phi3": Architecture("Phi-3", _PHI3),
    "plbart": Architecture("PLBART", _BART),
    "qwen2": Architecture("Qwen2, Qwen2.5", _LLAMA, embeddings=SubLayer("embed_tokens")),
    "qwen2_moe": Architecture("Qwen2-MoE", _MIXTURE, _EXPERTS),
    "qwen3": Architecture("Qwen3", _LLAMA, embeddings=SubLayer("embed_tokens")),
    "qwen3_moe": Architecture("Qwen3-MoE", _MIXTURE, _EXPERTS),
    "rembert": Architecture("RemBERT", _BERT, embeddings=_BERT_EMBEDDINGS),
    "roberta": Architecture("RoBERTa", _BERT, embeddings=_BERT_EMBEDDINGS),
    "roberta-prelayernorm": Architecture(
        "RoBERTa-PreLayerNorm", _pre_ln_bert("attention.LayerNorm", _dense("output", "intermediate.LayerNorm"))
    ),
    "seamless_m4t": Architecture("SeamlessM4T", _SEAMLESS, _CONFORMER_NOTE),
    "seamless_m4t_v2": Architecture("SeamlessM4T v2", _SEAMLESS2, _CONFORMER_NOTE),
    "siglip": Architecture("SigLIP", _CLIP, _TOWERS),
    "siglip_text_model": Architecture("SigLIP", _CLIP, _TOWERS),
    "siglip_vision_model": Architecture("SigLIP", _CLIP, _TOWERS),
    "starcoder2": Architecture("StarCoder 2", _STARCODER2),
    "t5": Architecture("T5, Flan-T5, ByT5", _T5, embeddings=SubLayer("encoder.embed_tokens")),
    "timesformer": Architecture(
        "TimeSformer", _TIMESFORMER, "the attentions over time and over places have an adapter each"
    ),
    "umt5": Architecture("UMT5", _T5, embeddings=SubLayer("encoder.embed_tokens")),
    "vit": Architecture("ViT", _VIT),
    "wav2vec2": Architecture("wav2vec 2.0", _WAV2VEC2),
    "wav2vec2-bert": Architecture("wav2vec2-BERT", _CONFORMER + _SHORTENING, _CONFORMER_NOTE),
    "wav2vec2-conformer": Architecture("wav2vec2-Conformer", _CONFORMER, _CONFORMER_NOTE),
    "wavlm": Architecture("WavLM", _WAV2VEC2),
    "whisper": Architecture("Whisper", _MBART),
    "xlm-roberta": Architecture("XLM-RoBERTa", _BERT, embeddings=_BERT_EMBEDDINGS),
    "xlm-roberta-xl": Architecture(
        "XLM-RoBERTa-XL", _pre_ln_bert("attention.self_attn_layer_norm", SubLayer("output.dense", entry="LayerNorm"))
    ),
    "xmod": Architecture("X-MOD", _XMOD, "the adapter comes before the language's own adapter"),
    "zamba2": Architecture("Zamba2", _ZAMBA2, "one adapter follows the shared attention and feed-forward"),
}

_LISTS_OF_PARTS = (
    "{} keeps the parts of its layers in a list each, so no list has layers with attention and feed-forward. Name the "
    "ends of both, with target_modules=['out_lin', 'lin2']; train_layer_norm='all' trains the norms."
)
# Architectures that are refused, and what to do instead.
UNSUPPORTED: dict[str, str] = {
    "flaubert": _LISTS_OF_PARTS.format("FlauBERT"),
    "reformer": (
        "Reformer's reversible layers compute gradients only if their input needs one, so adapters on a frozen model "
        "do not train. Call model.enable_input_require_grads() first, and name the ends of the sub-layers, with "
        "target_modules=['attention.output.dense', 'feed_forward.output.dense']."
    ),
    "squeezebert": (
        "SqueezeBERT's layers are convolutions, which the inference does not know. Name their ends, with "
        "target_modules=['post_attention.conv1d', 'output.conv1d']."
    ),
    "xlm": _LISTS_OF_PARTS.format("XLM"),
    "xlnet": (
        "XLNet's attention ends in a bare weight and a dropout that it also applies to the attention probabilities, "
        "so no module's output meets the skip connection. The feed-forward's can be adapted alone, with "
        "target_modules=['ff.layer_2']."
    ),
}
