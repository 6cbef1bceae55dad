"""The tables of what adapters other than Houlsby's need: the skip connections, and the ends of the embeddings.

Read the `forward` of the model's layer in transformers. In a post-LN layer, the residual input x of a sub-layer enters
its first projection, and a norm follows the sum with the sub-layer's output: `LN(h + x)`. In a pre-LN layer, x enters
the norm before the sub-layer. An architecture where this is not so is left out: its norm is between the sub-layer and
the sum (Gemma 2 to 4, OLMo 2), its sub-layers run in parallel (GPT-J, Phi), it flattens the hidden states (OPT) or
transposes them (Longformer's attention).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Skip:
    """The skip connection around a sub-layer. Names are relative to the layer.

    Args:
        entry: The module whose input is the residual input x of the sub-layer.
        norm: The norm of the sum of the sub-layer's output and x; None in a pre-LN layer.
    """

    entry: str
    norm: str | None = None


@dataclass(frozen=True)
class Embeddings:
    """The end of the embeddings, whose output enters the first layer. Names end the modules' full names.

    Args:
        output: The module.
        projection: The module that determines width, device and dtype. None: the same.
    """

    output: str
    projection: str | None = None


_BERT = {
    "attention.output.dropout": Skip("attention.self.query", "attention.output.LayerNorm"),
    "crossattention.output.dropout": Skip("crossattention.self.query", "crossattention.output.LayerNorm"),
    "output.dropout": Skip("intermediate.dense", "output.LayerNorm"),
}
_BART = {
    "self_attn.out_proj": Skip("self_attn.q_proj", "self_attn_layer_norm"),
    "encoder_attn.out_proj": Skip("encoder_attn.q_proj", "encoder_attn_layer_norm"),
    "fc2": Skip("fc1", "final_layer_norm"),
}
_MBART = {
    "self_attn.out_proj": Skip("self_attn_layer_norm"),
    "encoder_attn.out_proj": Skip("encoder_attn_layer_norm"),
    "fc2": Skip("final_layer_norm"),
}
_GPT2 = {
    "attn.resid_dropout": Skip("ln_1"),
    "attn.attention.resid_dropout": Skip("ln_1"),
    "crossattention.resid_dropout": Skip("ln_cross_attn"),
    "mlp.dropout": Skip("ln_2"),
}
# Encoder layers have two sub-layers, decoder layers three.
_T5 = {f"layer.{index}.dropout": Skip(f"layer.{index}.layer_norm") for index in range(3)}
_LLAMA = {
    "self_attn.o_proj": Skip("input_layernorm"),
    "resid_attn_dropout": Skip("input_layernorm"),
    **{
        output: Skip("post_attention_layernorm")
        for output in ("mlp", "mlp.down_proj", "mlp.c_proj", "resid_mlp_dropout")
    },
}
_CLIP = {"self_attn.out_proj": Skip("layer_norm1"), "mlp.fc2": Skip("layer_norm2")}
_VIT = {"attention.o_proj": Skip("layernorm_before"), "mlp.fc2": Skip("layernorm_after")}


def _pre_ln_bert(attention: str, feed_forward: str) -> dict[str, Skip]:
    return {
        "attention.output.dropout": Skip(attention),
        **dict.fromkeys(("output.dropout", "output.dense"), Skip(feed_forward)),
    }


# By the architecture's `model_type` and the output of the sub-layer, as `ARCHITECTURES` names it.
SKIPS: dict[str, Mapping[str, Skip]] = {
    "albert": {
        "attention.output_dropout": Skip("attention.query", "attention.LayerNorm"),
        "ffn_output": Skip("ffn", "full_layer_layer_norm"),
    },
    "deberta": {
        **_BERT,
        "attention.output.dropout": Skip("attention.self.in_proj", "attention.output.LayerNorm"),
    },
    # The projections of queries and keys may project the relative positions as well.
    "deberta-v2": {
        **_BERT,
        "attention.output.dropout": Skip("attention.self.value_proj", "attention.output.LayerNorm"),
    },
    "distilbert": {
        "attention.out_lin": Skip("attention.q_lin", "sa_layer_norm"),
        "ffn.dropout": Skip("ffn.lin1", "output_layer_norm"),
    },
    "esm": _pre_ln_bert("attention.LayerNorm", "LayerNorm"),
    "longformer": {"output.dropout": _BERT["output.dropout"]},
    "megatron-bert": _pre_ln_bert("attention.ln", "ln"),
    "modernbert": {"attn.out_drop": Skip("attn_norm"), "mlp.Wo": Skip("mlp_norm")},
    "mpnet": {
        "attention.dropout": Skip("attention.attn.q", "attention.LayerNorm"),
        "output.dropout": _BERT["output.dropout"],
    },
    "roberta-prelayernorm": _pre_ln_bert("attention.LayerNorm", "intermediate.LayerNorm"),
    "xlm-roberta-xl": _pre_ln_bert("attention.self_attn_layer_norm", "LayerNorm"),
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "electra", "ernie", "rembert", "roberta", "xlm-roberta"),
        _BERT,
    ),
    **dict.fromkeys(("bart", "marian", "plbart"), _BART),
    **dict.fromkeys(("m2m_100", "mbart", "pegasus", "whisper"), _MBART),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo"), _GPT2),
    **dict.fromkeys(("longt5", "mt5", "t5", "umt5"), _T5),
    **dict.fromkeys(
        ("gemma", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"),
        _LLAMA,
    ),
    **dict.fromkeys(
        ("clip", "clip_text_model", "clip_vision_model", "siglip", "siglip_text_model", "siglip_vision_model"), _CLIP
    ),
    **dict.fromkeys(("deit", "vit"), _VIT),
}

# By the architecture's `model_type`. BART's and T5's dropout is a function, or serves the end of the encoder as well.
EMBEDDINGS: dict[str, Embeddings] = {
    "modernbert": Embeddings("embeddings.drop", "embeddings.norm"),
    "gpt2": Embeddings("drop", "wte"),
    **dict.fromkeys(
        (
            "albert",
            "bert",
            "camembert",
            "distilbert",
            "electra",
            "ernie",
            "mpnet",
            "rembert",
            "roberta",
            "xlm-roberta",
        ),
        Embeddings("embeddings.dropout", "embeddings.LayerNorm"),
    ),
    **dict.fromkeys(("bart", "mbart"), Embeddings("encoder.layernorm_embedding")),
    **dict.fromkeys(("mt5", "t5", "umt5"), Embeddings("encoder.embed_tokens")),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), Embeddings("embed_tokens")),
}
