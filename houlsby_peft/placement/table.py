"""The table of architectures: where the output of each sub-layer meets the skip connection.

Houlsby et al. 2019 (figure 2, left) insert the adapter after the projection of a sub-layer and its
dropout, before the skip connection and the norm. `SubLayer.output` names the last module before the
skip connection: a dropout if the model has a module for it, else the projection. The table follows
three decisions:

- A dropout module that serves both sub-layers, or a functional dropout, cannot be wrapped, so the
  projection is. In training the dropout then comes after the adapter. In evaluation there is no
  difference.
- A norm between the projection and the skip connection (Gemma 2 to 4, OLMo 2) stays after the
  adapter, as the paper's norm does, because it is trained like every norm of the layer. A factor
  without a module stays after the adapter as well (BEiT's layer scale, the half of a Conformer's
  feed-forwards).
- Where attention and feed-forward run in parallel (Falcon, GPT-J, GPT-NeoX, Phi), they share a skip
  connection. Each output gets an adapter, and the sum of both meets the skip connection.

A hybrid has layers of several kinds. Each sub-layer that is an attention or a feed-forward gets an
adapter. A state-space model or a convolution in its place gets none.

To add an architecture, read its layer's `forward`. Add its `model_type` to the architecture with
this layer, or write a new one here and its case in `tests/support/architecture_cases.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, TypeAlias, TypeVar


@dataclass(frozen=True)
class SubLayer:
    """The end of one sub-layer. Names are relative to the layer.

    Args:
        output: The module whose output meets the skip connection; the adapter is applied to this
            output. An asterisk stands for every index of a list: `ffn.*.output.dense`.
        projection: A module of the layer whose weights determine width, device and dtype if
            `output` has no such weights (a dropout, a mixture of experts). None: `output` itself.
        entry: The module whose input is the residual input x of the sub-layer, which adapters of
            other kinds than Houlsby's read. None: not known, as where a norm is between the output
            and the sum, where sub-layers are parallel, or where the model flattens or transposes
            the hidden states.
        norm: The norm of the sum of the sub-layer's output and x; None in a pre-LN layer.
    """

    output: str
    projection: str | None = None
    entry: str | None = None
    norm: str | None = None

    @property
    def tells_width(self) -> str:
        """The module whose weights determine width, device and dtype."""
        return self.projection or self.output


# The sub-layers of each layer with their positions, by the name of the list of layers and the
# index in it.
Layers: TypeAlias = dict[tuple[str, int], list[tuple[str, SubLayer]]]
_Ends: TypeAlias = SubLayer | str | tuple[SubLayer | str, ...] | None
_Description = TypeVar("_Description")
CROSS = "cross_attention"


@dataclass(frozen=True)
class Stack:
    """A list of equal layers, or the layers of one kind in a list.

    A layer is of the first kind that fits it. A sub-layer may be the name of its output alone.

    Args:
        layers: The end of the list's name: `encoder.layer` matches `bert.encoder.layer`.
        attention: The attention of each of these layers, or several; None if they have none.
        feed_forward: The feed-forward of each of these layers, or several; None if they have none.
        cross_attention: The attention of a decoder to the encoder's output. Only some of the layers
            may have one.
        has: A further module that layers of this kind have, if the sub-layers do not tell them from
            other kinds.
    """

    layers: str
    attention: _Ends = None
    feed_forward: _Ends = None
    cross_attention: _Ends = None
    has: str | None = None

    @property
    def positions(self) -> list[tuple[str, SubLayer]]:
        """All sub-layers with their positions; most architectures have one of each in a layer."""
        positions = []
        for position, ends in (
            ("attention", self.attention),
            ("feed_forward", self.feed_forward),
            (CROSS, self.cross_attention),
        ):
            for end in ends if isinstance(ends, tuple) else (ends,):
                if isinstance(end, str):
                    end = SubLayer(end)
                if end is not None:
                    positions.append((position, end))
        return positions

    def find(self, layer: str, modules: Collection[str]) -> list[tuple[str, SubLayer]] | None:
        """Return the sub-layers of a layer, with their positions; None for another kind of layer.

        Args:
            layer: The layer's full name.
            modules: The names of all modules of the model.
        """

        def exists(name: str) -> bool:
            return f"{layer}.{name}" in modules

        if self.has and not exists(self.has):
            return None
        sub_layers = []
        for position, end in self.positions:
            if "*" in end.output:
                names = (end.output.replace("*", str(index)) for index in count())
                for name in takewhile(exists, names):
                    sub_layers.append((position, SubLayer(name)))
            elif exists(end.output) and exists(end.tells_width):
                sub_layers.append((position, end))
            elif position != CROSS:
                return None
        return sub_layers


def _layers(*stack: Any) -> tuple[Stack, ...]:
    """Return the one list of layers of an architecture."""
    return (Stack(*stack),)


def _dense(output: str, entry: str | None = None, norm: str | None = None) -> SubLayer:
    """Return a sub-layer that ends in BERT's modules `dense` and `dropout`."""
    return SubLayer(f"{output}.dropout", f"{output}.dense", entry, norm)


def _bert(entry: str = "query", attention: SubLayer | None = None) -> tuple[Stack, ...]:
    """Return BERT's layer; `entry` in `attention.self` reads the hidden states alone."""
    return _layers(
        "encoder.layer",
        attention
        or _dense("attention.output", f"attention.self.{entry}", "attention.output.LayerNorm"),
        _dense("output", "intermediate.dense", "output.LayerNorm"),
        _dense(
            "crossattention.output", "crossattention.self.query", "crossattention.output.LayerNorm"
        ),
    )


def _pre_ln_bert(attention: str | None, feed_forward: SubLayer | str) -> tuple[Stack, ...]:
    """Return BERT's layer with norms before the sub-layers."""
    return _layers(
        "encoder.layer",
        _dense("attention.output", attention),
        feed_forward,
        _dense("crossattention.output"),
    )


_ALBERT = _layers(
    "albert_layers",
    SubLayer(
        "attention.output_dropout", "attention.dense", "attention.query", "attention.LayerNorm"
    ),
    SubLayer("ffn_output", None, "ffn", "full_layer_layer_norm"),
)
_DISTILBERT = _layers(
    "transformer.layer",
    SubLayer("attention.out_lin", None, "attention.q_lin", "sa_layer_norm"),
    SubLayer("ffn.dropout", "ffn.lin2", "ffn.lin1", "output_layer_norm"),
)
# LiLT's layout has sub-layers beside the text's, of which the last layer's do not contribute to the
# output.
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
    "layers",
    SubLayer("attn.out_drop", "attn.Wo", "attn_norm"),
    SubLayer("mlp.Wo", None, "mlp_norm"),
)
_MPNET = SubLayer(
    "attention.dropout", "attention.attn.o", "attention.attn.q", "attention.LayerNorm"
)


def _rotary_bert(first: str, last: str) -> tuple[Stack, ...]:
    """Return BERT's layer as encoders with rotary positions have it, with a feed-forward between
    these two modules.
    """
    attention = SubLayer(
        "post_attention_dropout",
        "self_attn.o_proj",
        "self_attn.q_proj",
        "post_attention_layernorm",
    )
    feed_forward = SubLayer("post_mlp_dropout", last, first, "post_mlp_layernorm")
    return _layers("layers", attention, feed_forward)


def _t5(position: int, projection: str) -> SubLayer:
    layer = f"layer.{position}"
    return SubLayer(f"{layer}.dropout", f"{layer}.{projection}", f"{layer}.layer_norm")


_T5_DECODER = Stack(
    "decoder.block",
    _t5(0, "SelfAttention.o"),
    _t5(2, "DenseReluDense.wo"),
    _t5(1, "EncDecAttention.o"),
)
_T5 = (Stack("encoder.block", _t5(0, "SelfAttention.o"), _t5(1, "DenseReluDense.wo")), _T5_DECODER)
# The encoder's attention comes in two kinds, whose projections have different names.
_LONGT5 = (
    Stack(
        "encoder.block",
        SubLayer("layer.0.dropout", "layer.1.DenseReluDense.wo", "layer.0.layer_norm"),
        _t5(1, "DenseReluDense.wo"),
    ),
    _T5_DECODER,
)


def _bart(is_post_ln: bool) -> tuple[Stack, ...]:
    """Return the layers of BART or, with norms before the sub-layers, mBART."""

    def sub_layer(output: str, first: str, norm: str) -> SubLayer:
        return SubLayer(output, None, first, norm) if is_post_ln else SubLayer(output, None, norm)

    attention = sub_layer("self_attn.out_proj", "self_attn.q_proj", "self_attn_layer_norm")
    cross_attention = sub_layer(
        "encoder_attn.out_proj", "encoder_attn.q_proj", "encoder_attn_layer_norm"
    )
    feed_forward = sub_layer("fc2", "fc1", "final_layer_norm")
    return (
        Stack("encoder.layers", attention, feed_forward),
        Stack("decoder.layers", attention, feed_forward, cross_attention),
    )


_GPT2 = _layers(
    "h",
    SubLayer("attn.resid_dropout", "attn.c_proj", "ln_1"),
    SubLayer("mlp.dropout", "mlp.c_proj", "ln_2"),
    SubLayer("crossattention.resid_dropout", "crossattention.c_proj", "ln_cross_attn"),
)
_GPT_NEO = _layers(
    "h",
    SubLayer("attn.attention.resid_dropout", "attn.attention.out_proj", "ln_1"),
    SubLayer("mlp.dropout", "mlp.c_proj", "ln_2"),
)
_GPT_NEOX = _layers(
    "layers",
    SubLayer("post_attention_dropout", "attention.dense"),
    SubLayer("post_mlp_dropout", "mlp.dense_4h_to_h"),
)
_GPTJ = _layers(
    "h", SubLayer("attn.resid_dropout", "attn.out_proj"), SubLayer("mlp.dropout", "mlp.fc_out")
)


def _llama(feed_forward: str, projection: str | None = None) -> tuple[Stack, ...]:
    return _layers(
        "layers",
        SubLayer("self_attn.o_proj", None, "input_layernorm"),
        SubLayer(feed_forward, projection, "post_attention_layernorm"),
    )


_PHI3 = _layers(
    "layers",
    SubLayer("resid_attn_dropout", "self_attn.o_proj", "input_layernorm"),
    SubLayer("resid_mlp_dropout", "mlp.down_proj", "post_attention_layernorm"),
)
# A norm is between the output and the sum.
_GEMMA2 = _layers("layers", "self_attn.o_proj", "mlp.down_proj")
# A layer's experts run beside its feed-forward, and the sum of both meets the skip connection.
_GEMMA4 = (
    Stack("layers", "self_attn.o_proj", ("mlp.down_proj", SubLayer("experts", "mlp.down_proj"))),
    *_GEMMA2,
)
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
_FALCON_H1 = _layers(
    "layers", "self_attn.o_proj", SubLayer("feed_forward", "feed_forward.down_proj")
)
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
# The shared attention and feed-forward have no skip connection of their own: the linear layer after
# them meets the Mamba's.
_ZAMBA2 = (Stack("layers", None, "linear"), Stack("layers", has="mamba"))
# The layers of Granite 4 have an attention or a Mamba, and a feed-forward or, beside it, a mixture
# of experts.
_GRANITE_FEED_FORWARD = "shared_mlp.output_linear"
_GRANITE_MIXTURE = (SubLayer("block_sparse_moe", _GRANITE_FEED_FORWARD), _GRANITE_FEED_FORWARD)
_GRANITE_HYBRID = (
    Stack("layers", "self_attn.o_proj", _GRANITE_MIXTURE),
    Stack("layers", "self_attn.o_proj", _GRANITE_FEED_FORWARD),
    Stack("layers", None, _GRANITE_MIXTURE, has="mamba"),
    Stack("layers", None, _GRANITE_FEED_FORWARD, has="mamba"),
)
# A short convolution follows each sub-layer.
_INKLING = _layers(
    "layers", SubLayer("attn_sconv", "self_attn.o_proj"), SubLayer("mlp_sconv", "self_attn.o_proj")
)

# Conformers have a feed-forward on either side of the attention and the convolution.
_CONFORMER_ATTENTION = SubLayer("self_attn_dropout", "self_attn.linear_out")
_CONFORMER = _layers(
    "layers",
    _CONFORMER_ATTENTION,
    (
        SubLayer("ffn1.output_dropout", "ffn1.output_dense"),
        SubLayer("ffn2.output_dropout", "ffn2.output_dense"),
    ),
)
# Layers behind the encoder that shorten the sequence.
_SHORTENING = _layers(
    "adapter.layers", _CONFORMER_ATTENTION, SubLayer("ffn.output_dropout", "ffn.output_dense")
)
_PARAKEET = _layers(
    "layers", "self_attn.o_proj", ("feed_forward1.linear2", "feed_forward2.linear2")
)
_SEAMLESS_FEED_FORWARD = SubLayer("ffn_dropout", "ffn.fc2")
_SEAMLESS = (
    *_CONFORMER,
    *_SHORTENING,
    # The decoder's dropout serves both attentions.
    Stack(
        "layers",
        "self_attn.out_proj",
        _SEAMLESS_FEED_FORWARD,
        "cross_attention.out_proj",
        has="cross_attention",
    ),
    Stack("layers", SubLayer("attn_dropout", "self_attn.out_proj"), _SEAMLESS_FEED_FORWARD),
    # The second version's decoder of units has a convolution for a feed-forward.
    Stack("layers", "self_attn.out_proj", SubLayer("conv_dropout", "conv2")),
)

# Queries and texts have a feed-forward each.
_QFORMER = tuple(
    Stack("encoder.layer", _dense("attention.output"), ends, _dense("crossattention.output"))
    for ends in (
        (_dense("output_query"), _dense("output")),
        _dense("output_query"),
        _dense("output"),
    )
)
# Several feed-forwards follow the attention, all at the width of the layer's own bottleneck. Only
# without that bottleneck there are dropouts.
_MOBILEBERT = tuple(
    Stack("encoder.layer", attention, ("ffn.*.output.dense", feed_forward))
    for attention, feed_forward in (
        (_dense("attention.output"), _dense("output")),
        ("attention.output.dense", "output.dense"),
    )
)

_CLIP = _layers(
    "encoder.layers",
    SubLayer("self_attn.out_proj", None, "layer_norm1"),
    SubLayer("mlp.fc2", None, "layer_norm2"),
)
_VIT = _layers(
    "layers",
    SubLayer("attention.o_proj", None, "layernorm_before"),
    SubLayer("mlp.fc2", None, "layernorm_after"),
)
# The attention over time meets its skip connection after a further linear layer; some models attend
# to places only.
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


def _by_type(descriptions: Iterable[tuple[str, _Description]]) -> dict[str, _Description]:
    """Return the description of each model type; the given ones are of several, by their names."""
    by_type = {}
    for model_types, description in descriptions:
        for model_type in model_types.split():
            by_type[model_type] = description
    return by_type


# The lists of layers of each architecture, by the `model_type`s of transformers' configurations.
ARCHITECTURES: dict[str, tuple[Stack, ...]] = _by_type(
    [
        ("albert", _ALBERT),
        (
            "bert bert-generation big_bird camembert data2vec-text electra ernie rembert roberta "
            "roformer splinter xlm-roberta",
            _bert(),
        ),
        ("deberta", _bert("in_proj")),
        ("deberta-v2", _bert("value_proj")),
        ("distilbert", _DISTILBERT),
        ("eurobert ultrabert", _llama("mlp.down_proj")),
        ("esm", _pre_ln_bert("attention.LayerNorm", _dense("output", "LayerNorm"))),
        ("gte nomic_bert", _rotary_bert("mlp.up_proj", "mlp.down_proj")),
        ("ibert lilt", _LILT),
        ("jina_embeddings_v3", _rotary_bert("mlp.fc1", "mlp.fc2")),
        # It transposes the hidden states before its attention.
        ("longformer", _bert(attention=_dense("attention.output"))),
        ("lxmert", _LXMERT),
        ("megatron-bert", _pre_ln_bert("attention.ln", _dense("output", "ln"))),
        ("mobilebert", _MOBILEBERT),
        ("modernbert", _MODERNBERT),
        ("mpnet", _bert(attention=_MPNET)),
        (
            "roberta-prelayernorm",
            _pre_ln_bert("attention.LayerNorm", _dense("output", "intermediate.LayerNorm")),
        ),
        (
            "xlm-roberta-xl",
            _pre_ln_bert(
                "attention.self_attn_layer_norm", SubLayer("output.dense", None, "LayerNorm")
            ),
        ),
        # The dropout of the feed-forward serves the language's own adapter as well.
        ("xmod", _pre_ln_bert(None, "output.dense")),
        ("bart marian plbart", _bart(is_post_ln=True)),
        ("m2m_100 mbart pegasus whisper", _bart(is_post_ln=False)),
        ("mt5 t5 umt5", _T5),
        ("longt5", _LONGT5),
        ("bloom falcon", _layers("h", "self_attention.dense", "mlp.dense_4h_to_h")),
        ("gpt2 gpt_bigcode", _GPT2),
        ("gpt_neo", _GPT_NEO),
        ("gpt_neox", _GPT_NEOX),
        ("gptj", _GPTJ),
        ("gemma llama mistral qwen2 qwen3", _llama("mlp.down_proj")),
        ("gemma2 gemma3_text gemma3n_text olmo2", _GEMMA2),
        ("gemma4_text", _GEMMA4),
        # The output of a mixture of experts is the sum over the selected and the shared experts.
        ("mixtral qwen2_moe qwen3_moe", _llama("mlp", "self_attn.o_proj")),
        # It flattens the hidden states, and its layers come with norms before or after the
        # sub-layers.
        ("opt", _layers("decoder.layers", "self_attn.out_proj", "fc2")),
        ("phi", _layers("layers", "self_attn.dense", "mlp.fc2")),
        ("phi3", _PHI3),
        ("starcoder2", _llama("mlp.c_proj")),
        ("bamba jamba", _JAMBA),
        ("falcon_h1", _FALCON_H1),
        ("granitemoehybrid", _GRANITE_HYBRID),
        ("inkling_text", _INKLING),
        ("lfm2", _LFM2),
        ("nemotron_h", _NEMOTRON_H),
        ("zamba2", _ZAMBA2),
        ("beit", _layers("layers", "attention.o_proj", "mlp.fc2")),
        (
            "clip clip_text_model clip_vision_model siglip siglip_text_model siglip_vision_model",
            _CLIP,
        ),
        ("deit vit", _VIT),
        (
            "dinov2",
            _layers(
                "encoder.layer",
                SubLayer("layer_scale1", "norm1"),
                SubLayer("layer_scale2", "norm2"),
            ),
        ),
        ("florence_vision", _FLORENCE_VISION),
        ("gemma4_vision", _GEMMA4_VISION),
        (
            "blip_2_vision_model instructblip_vision_model instructblipvideo_vision_model",
            _layers("encoder.layers", "self_attn.projection", "mlp.fc2"),
        ),
        ("blip_2_qformer instructblip_qformer instructblipvideo_qformer", _QFORMER),
        ("timesformer", _TIMESFORMER),
        ("gemma4_audio", _GEMMA4_AUDIO),
        ("hubert wav2vec2 wavlm", _WAV2VEC2),
        ("lasr_encoder nemotron_asr_streaming_encoder parakeet_encoder", _PARAKEET),
        ("seamless_m4t seamless_m4t_v2", _SEAMLESS),
        ("wav2vec2-bert wav2vec2-conformer", _CONFORMER + _SHORTENING),
    ]
)
# The end of the embeddings, whose output enters the first layer; its names end the modules' full
# names. It is left out where it is not one module, as it is a function or serves the end of the
# encoder as well.
EMBEDDINGS: dict[str, SubLayer] = _by_type(
    [
        (
            "albert bert camembert distilbert electra ernie mpnet rembert roberta xlm-roberta",
            SubLayer("embeddings.dropout", "embeddings.LayerNorm"),
        ),
        ("modernbert", SubLayer("embeddings.drop", "embeddings.norm")),
        ("bart mbart", SubLayer("encoder.layernorm_embedding")),
        ("mt5 t5 umt5", SubLayer("encoder.embed_tokens")),
        ("gpt2", SubLayer("drop", "wte")),
        ("llama mistral qwen2 qwen3", SubLayer("embed_tokens")),
    ]
)
# DeBERTa's encoder applies this norm to its table of relative positions, which all rows of a batch
# share. It never trains, because the rows of a mixed batch cannot have different ones.
SHARED_NORMS: dict[str, str] = dict.fromkeys(("deberta", "deberta-v2"), "encoder.LayerNorm")
# The encoders that a ladder can read: each layer runs once, and each token may attend to all others
# that are no padding.
READABLE = {
    *("bert", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra"),
    *("ernie", "esm", "eurobert", "gte", "jina_embeddings_v3", "megatron-bert"),
    *("modernbert", "mpnet", "nomic_bert", "rembert", "roberta", "roberta-prelayernorm"),
    *("roformer", "splinter", "ultrabert", "xlm-roberta", "xlm-roberta-xl"),
}
