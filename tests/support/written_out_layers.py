"""The forward pass of layers that are no plain pair of sub-layers, written out from their code in
transformers.

Each function computes a layer's output from its input and from what the adapters of its sub-layers
give. Everything else is computed with the layer's own modules, in evaluation and without padding.
"""

from __future__ import annotations

import torch


def conformer(layer, hidden, branches):
    hidden = hidden + 0.5 * branches["feed_forward"]
    hidden = hidden + branches["attention"]
    hidden = hidden + layer.conv_module(hidden)
    return layer.final_layer_norm(hidden + 0.5 * branches["feed_forward 2"])


def shortening(layer, hidden, branches):
    """A layer behind the encoder, whose convolutions shorten the sequence."""
    residual = layer.residual_conv(layer.residual_layer_norm(hidden).transpose(1, 2))
    hidden = layer.activation(residual).transpose(1, 2) + branches["attention"]
    return hidden + branches["feed_forward"]


def parakeet(layer, hidden, branches):
    hidden = hidden + 0.5 * branches["feed_forward"]
    hidden = hidden + branches["attention"]
    hidden = hidden + layer.conv(layer.norm_conv(hidden))
    return layer.norm_out(hidden + 0.5 * branches["feed_forward 2"])


def lasr(layer, hidden, branches):
    hidden = 1.5 * hidden + 0.5 * branches["feed_forward"]
    hidden = hidden + branches["attention"]
    hidden = 2 * hidden + layer.conv(layer.norm_conv(hidden))
    return layer.norm_out(1.5 * hidden + 0.5 * branches["feed_forward 2"])


def gemma4(layer, hidden, branches):
    hidden = hidden + layer.post_attention_layernorm(branches["attention"])
    branch = branches["feed_forward"]
    if "feed_forward 2" in branches:
        experts = branches["feed_forward 2"].reshape(hidden.shape)
        experts = layer.post_feedforward_layernorm_2(experts)
        branch = layer.post_feedforward_layernorm_1(branch) + experts
    return (hidden + layer.post_feedforward_layernorm(branch)) * layer.layer_scalar


def gemma4_audio(layer, hidden, branches):
    factor = layer.feed_forward1.post_layer_scale
    hidden = hidden + factor * layer.feed_forward1.post_layer_norm(branches["feed_forward"])
    hidden = hidden + layer.norm_post_attn(branches["attention"])
    hidden = layer.lconv1d(hidden)
    second = layer.feed_forward2.post_layer_norm(branches["feed_forward 2"])
    return layer.norm_out(hidden + factor * second)


def jamba(layer, hidden, branches):
    mixed = branches.get("attention")
    if mixed is None:
        mixed = layer.mamba(layer.input_layernorm(hidden))
    return hidden + mixed + branches["feed_forward"]


def falcon_h1(layer, hidden, branches):
    mixed = layer.mamba(layer.input_layernorm(hidden)) * layer.ssm_out_multiplier
    attention = branches["attention"] * layer.attn_out_multiplier
    return hidden + mixed + attention + branches["feed_forward"]


def lfm2(layer, hidden, branches):
    mixed = branches.get("attention")
    if mixed is None:
        mixed = layer.conv(layer.operator_norm(hidden))
    return hidden + mixed + branches["feed_forward"]


def nemotron_h(layer, hidden, branches):
    (branch,) = branches.values() if branches else (layer.mixer(layer.norm(hidden)),)
    return hidden + branch


def zamba2(layer, hidden, branches):
    if not branches:
        return hidden + layer.mamba(layer.input_layernorm(hidden))
    return layer.mamba_decoder(hidden, transformer_hidden_states=branches["feed_forward"])


def seamless_decoder(layer, hidden, branches):
    return hidden + branches["attention"] + branches["cross_attention"] + branches["feed_forward"]


def qformer(layer, hidden, branches):
    """The first four tokens are queries, the others text."""
    hidden = layer.attention.output.LayerNorm(hidden + branches["attention"])
    queries, text = hidden[:, :4], hidden[:, 4:]
    if "cross_attention" in branches:
        queries = layer.crossattention.output.LayerNorm(queries + branches["cross_attention"])
    queries = layer.output_query.LayerNorm(queries + branches["feed_forward"])
    if "feed_forward 2" in branches:
        text = layer.output.LayerNorm(text + branches["feed_forward 2"])
    return torch.cat([queries, text], dim=1)


def mobilebert(layer, hidden, branches):
    inner = layer.bottleneck.input(hidden) if layer.use_bottleneck else hidden
    inner = layer.attention.output.LayerNorm(inner + branches["attention"])
    inner = layer.ffn[0].output.LayerNorm(inner + branches["feed_forward"])
    inner = layer.ffn[1].output.LayerNorm(inner + branches["feed_forward 2"])
    inner = layer.output.LayerNorm(inner + branches["feed_forward 3"])
    return layer.output.bottleneck(inner, hidden) if layer.use_bottleneck else inner


def ibert(layer, hidden, branches):
    hidden, _ = layer.attention.output.LayerNorm(hidden + branches["attention"])
    return layer.output.LayerNorm(hidden + branches["feed_forward"])[0]


def granite(layer, hidden, branches):
    mixed = branches.get("attention")
    if mixed is None:
        mixed = layer.mamba(layer.input_layernorm(hidden))
    hidden = hidden + 0.7 * mixed
    return hidden + 0.7 * sum(branches[name] for name in branches if name != "attention")


def xmod(layer, hidden, branches):
    hidden = layer.attention.output.LayerNorm(hidden + branches["attention"])
    languages = torch.zeros(len(hidden), dtype=torch.long)
    adapted = layer.output.lang_adapter(languages, hidden + branches["feed_forward"])
    return layer.output.LayerNorm(adapted)


def lxmert(layer, hidden, branches):
    """The text; the cross-attention, which runs twice, is recorded first for the text."""
    hidden = layer.visual_attention.output.LayerNorm(hidden + branches["cross_attention"])
    hidden = layer.lang_self_att.output.LayerNorm(hidden + branches["attention"])
    return layer.lang_output.LayerNorm(hidden + branches["feed_forward"])


def florence_vision(layer, hidden, branches):
    for block, number in ((layer.spatial_block, ""), (layer.channel_block, " 2")):
        hidden = hidden + block.conv1(hidden)
        size = hidden.shape
        hidden = hidden.flatten(2).transpose(1, 2) + branches[f"attention{number}"]
        hidden = hidden.transpose(1, 2).view(size)
        hidden = hidden + block.conv2(hidden)
        hidden = hidden.flatten(2).transpose(1, 2) + branches[f"feed_forward{number}"]
        hidden = hidden.transpose(1, 2).view(size)
    return hidden


def timesformer(layer, hidden, branches):
    """Two frames, whose class tokens are averaged."""
    class_tokens, patches = hidden[:, :1], hidden[:, 1:] + branches["attention"]
    over_places = branches["attention 2"].unflatten(0, (len(hidden), 2))
    places = over_places[:, :, 1:].transpose(1, 2).flatten(1, 2)
    mean = over_places[:, :, :1].mean(1)
    hidden = torch.cat([class_tokens + mean, patches + places], dim=1)
    return hidden + branches["feed_forward"]


def gemma3n(layer, hidden, branches):
    predictions = layer.altup.predict(hidden)
    active = predictions[0]
    laurel = layer.laurel(layer.input_layernorm(active))
    joined = (active + layer.post_attention_layernorm(branches["attention"]) + laurel) / 2**0.5
    joined = joined + layer.post_feedforward_layernorm(branches["feed_forward"])
    return layer.altup.correct(predictions, joined)[:1]
