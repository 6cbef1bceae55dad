"""The table of the contract: models, configurations, and a forward pass written from an adapter's
file alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    IBertConfig,
    IBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.pytorch_utils import Conv1D


FILE_PREFIX = "base_model.model."
ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "tanh": torch.tanh}
VOCABULARY = 60
WIDE = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


class Plain(nn.Module):
    """Two modules with a non-linearity between them; any model that is not one of transformers'."""

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.lin0 = first
        self.norm = nn.LayerNorm(last.in_features)
        self.lin1 = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin0(x)
        return self.lin1(self.norm(F.relu(x.flatten(1))))


class Attention(nn.Module):
    """Self-attention of PyTorch, whose output is a tuple."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2, **kwargs)
        self.lin1 = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin1(x + self.mha(x, x, x)[0])


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, num_labels=3, **WIDE))


def ibert() -> nn.Module:
    return IBertForSequenceClassification(IBertConfig(vocab_size=VOCABULARY, num_labels=3, **WIDE))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **WIDE))


def t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_ff": 24, "d_kv": 8}
    return T5ForConditionalGeneration(
        T5Config(**sizes, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )


def bart() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_ffn_dim": 24, f"{part}_attention_heads": 2}
    return BartForConditionalGeneration(BartConfig(**sizes))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A model in eval mode, always with the same weights, far enough from zero to tell models
    apart.
    """
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = build().eval()
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
        return model


IDS = torch.randint(3, VOCABULARY, (6, 5), generator=torch.Generator().manual_seed(0))
FLOATS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def in_layers(stack: str, layers: int, *names: str) -> list[str]:
    """Modules of each layer of a list."""
    return [f"{stack}.{index}.{name}" for index in range(layers) for name in names]


BERT = in_layers("bert.encoder.layer", 4, "attention.output.dropout", "output.dropout")
GPT2 = in_layers("transformer.h", 4, "attn.resid_dropout", "mlp.dropout")
LLAMA = in_layers("model.layers", 4, "self_attn.o_proj", "mlp.down_proj")
T5 = [
    *in_layers("encoder.block", 2, "layer.0.dropout", "layer.1.dropout"),
    *in_layers("decoder.block", 2, "layer.0.dropout", "layer.1.dropout", "layer.2.dropout"),
]
BART = [
    *in_layers("model.encoder.layers", 2, "self_attn.out_proj", "fc2"),
    *in_layers("model.decoder.layers", 2, "self_attn.out_proj", "encoder_attn.out_proj", "fc2"),
]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        name: what the row is for.
        build: makes the base model.
        places: names of all modules that any of the row's adapters has a bottleneck at, in the
            model's order.
        first, second: fields of the configurations of two adapters that differ.
        inputs: what the model is called with.
        channel_dim: the dimension of a place's output that the bottleneck transforms.
        skip: for adapters that read the residual input of a sub-layer: from a place to the module
            that it enters, as which argument, and to the norm of the sum, if the model has one.
        ends: for adapters with an invertible module: the end of the embeddings, and the output
            embedding.
    """

    name: str
    build: Callable[[], nn.Module]
    places: list[str]
    first: dict[str, Any] = field(default_factory=dict)
    second: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, torch.Tensor] = field(default_factory=lambda: {"input_ids": IDS})
    channel_dim: int = -1
    skip: Callable[[str], tuple[str, int, str | None]] | None = None
    ends: tuple[str, str] | None = None

    def base(self) -> nn.Module:
        return seeded(self.build)


SMALL = {"r": 3, "activation": "relu", "layers_to_transform": [1, 2]}
PLAIN = {"target_modules": ["lin0"]}
WITH_DECODER = {"input_ids": IDS, "decoder_input_ids": IDS.flip(0)}


def bert_skip(place: str) -> tuple[str, int, str | None]:
    """BertSelfOutput and BertOutput are called with the output of what precedes them and the
    residual input.
    """
    parent = place.rpartition(".")[0]
    return parent, 1, f"{parent}.LayerNorm"


def gpt2_skip(place: str) -> tuple[str, int, str | None]:
    return place.replace("attn.resid_dropout", "ln_1").replace("mlp.dropout", "ln_2"), 0, None


def t5_skip(place: str) -> tuple[str, int, str | None]:
    return place.removesuffix(".dropout"), 0, None


def bart_skip(place: str) -> tuple[str, int, str | None]:
    """That of the feed-forward; no adapter of the row reads that of an attention."""
    layer = ".".join(place.split(".")[:4])
    return f"{layer}.fc1", 0, f"{layer}.final_layer_norm"


EVERY_POSITION = ("attention", "feed_forward", "cross_attention")
ROWS = [
    Row("bert", bert, BERT, {"r": 4}, SMALL),
    Row(
        "bert, shared in a layer", bert, BERT,
        {"r": 4, "share_layers": 1}, {"r": 4, "share_layers": 3},
    ),
    Row(
        "bert, 3-shared", bert, BERT,
        {"r": 4, "share_layers": 3}, {**SMALL, "train_layer_norm": "all"},
    ),
    Row(
        "bert, all norms", bert, BERT,
        {"r": 4, "train_layer_norm": "all"}, {"r": 4, "train_layer_norm": False},
    ),
    Row(
        "bert, no norms", bert, BERT,
        {"r": 4, "train_layer_norm": False},
        {"r": 4, "positions": ("attention",), "share_layers": 2},
    ),
    Row(
        "bert, one module trained whole", bert, BERT,
        {"r": 2, "modules_to_save": ["bert.pooler"]}, SMALL,
    ),
    Row(
        "bert, sizes by place", bert, BERT,
        {"r": 4, "rank_pattern": {"attention.output.dropout": 2}}, SMALL,
    ),
    # Its norms are called with a scaling factor as well, and return a tuple.
    Row(
        "ibert", ibert, [f"i{place}" for place in BERT],
        {"r": 4}, {**SMALL, "train_layer_norm": "all"},
    ),
    Row("gpt2", gpt2, GPT2, {"r": 4, "activation": "tanh"}, {"r": 4, "share_layers": 2}),
    Row("llama", llama, LLAMA, {"r": 4, "train_layer_norm": "all"}, SMALL),
    Row(
        "bert, inside the norm and parallel", bert, BERT,
        {"r": 4, "kind": "pfeiffer", "scaling": "channel"},
        {"r": 4, "kind": "parallel", "scaling": 2.0, "positions": ("attention", "feed_forward"),
         "share_layers": 1},
        skip=bert_skip,
    ),
    Row(
        "bert, gated and deep", bert, BERT,
        {"r": 4, "extension": "gated"}, {"r": 4, "extension": "deep", "train_layer_norm": False},
    ),
    Row(
        "bert, a norm in the bottleneck and a gate in parallel", bert, BERT,
        {"r": 4, "extension": "norm", "scaling": 2.0, "share_layers": 1},
        {"r": 4, "extension": "gated", "kind": "parallel", "scaling": "channel",
         "positions": ("attention", "feed_forward")},
        skip=bert_skip,
    ),
    Row(
        "gpt2, parallel with an invertible module", gpt2, GPT2,
        {"r": 4, "kind": "parallel", "scaling": "learned", "invertible": "nice",
         "activation": "tanh"},
        {"r": 4, "kind": "pfeiffer", "train_layer_norm": False}, skip=gpt2_skip,
        ends=("transformer.drop", "lm_head"),
    ),
    Row(
        "t5", t5, T5, {"r": 4, "positions": EVERY_POSITION},
        {"r": 2, "kind": "pfeiffer", "positions": EVERY_POSITION[:2], "share_layers": 2,
         "train_layer_norm": "all"},
        WITH_DECODER, skip=t5_skip,
    ),
    Row(
        "bart, inside the norm with an invertible module", bart, BART,
        {"r": 4, "kind": "pfeiffer", "invertible": "nice"}, {"r": 2}, WITH_DECODER, skip=bart_skip,
        ends=("model.encoder.layernorm_embedding", "lm_head"),
    ),
    Row(
        "linear", lambda: Plain(nn.Linear(8, 8), nn.Linear(8, 3)), ["lin0", "lin1"],
        {**PLAIN, "r": 2}, {"target_modules": ["lin0", "lin1"], "train_layer_norm": "all"},
        {"x": FLOATS},
    ),
    Row(
        "transformers' Conv1D", lambda: Plain(Conv1D(8, 8), nn.Linear(8, 3)), ["lin0"],
        {**PLAIN, "r": 2}, {**PLAIN, "train_layer_norm": "all"}, {"x": FLOATS},
    ),
    Row(
        "embedding", lambda: Plain(nn.Embedding(VOCABULARY, 4), nn.Linear(20, 3)), ["lin0"],
        {**PLAIN, "r": 2}, {**PLAIN, "modules_to_save": ["lin1"]}, {"x": IDS},
    ),
    Row(
        "convolution in 2d", lambda: Plain(nn.Conv2d(2, 5, 2), nn.Linear(5, 3)), ["lin0"],
        {**PLAIN, "r": 2}, {**PLAIN, "r": 3}, {"x": FLOATS.view(6, 2, 2, 2)}, channel_dim=-3,
    ),
    Row(
        "attention", lambda: Attention(batch_first=True), ["mha"],
        {"target_modules": ["mha"], "r": 2},
        {"target_modules": ["mha"], "r": 2, "activation": "relu"},
        {"x": FLOATS.view(6, 1, 8).repeat(1, 4, 1)},
    ),
]  # fmt: skip


def output(model: nn.Module, row: Row, **kwargs: Any) -> torch.Tensor:
    """What a model gives for a row's inputs."""
    with torch.no_grad():
        return output_with_gradient(model, row, **kwargs)


def output_with_gradient(model: nn.Module, row: Row, **kwargs: Any) -> torch.Tensor:
    """The same, so that it can be trained on."""
    result = model(**row.inputs, **kwargs)
    return result if isinstance(result, torch.Tensor) else result.logits


def reference(
    row: Row,
    adapters: Sequence[tuple[dict[str, torch.Tensor], dict[str, Any]]],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """What the base model must give with adapters one after the other, from their files' tensors
    alone.

    Args:
        row: the row of the table.
        adapters: the tensors of each adapter's file, and the fields of its configuration.
        dtype: of the base model.
    """
    base = row.base().to(dtype)
    modules = dict(base.named_modules())
    with torch.no_grad():
        for weights, _ in adapters:
            for key, tensor in weights.items():
                # Norms and heads replace the base's own; of several adapters the last one's are
                # used.
                name, _, parameter = (
                    key.removeprefix(FILE_PREFIX).replace(".houlsby_norm", "").rpartition(".")
                )
                if "houlsby_adapter" not in key:
                    getattr(modules[name], parameter).copy_(tensor)
    for place in row.places:
        entering: list[torch.Tensor] = []
        norm = None
        if row.skip is not None:
            entry, position, norm = row.skip(place)
            modules[entry].register_forward_pre_hook(
                lambda _, args, position=position, entering=entering: entering.append(
                    args[position]
                )
            )
        read = partial(_read, entering, modules[norm] if norm else lambda total: total)
        modules[place].register_forward_hook(_after(place, row, adapters, read))
    if row.ends is not None and adapters and adapters[0][1].get("invertible"):
        couple = partial(_couple, *adapters[0], f"{FILE_PREFIX}{row.ends[0]}.houlsby_adapter.")
        modules[row.ends[0]].register_forward_hook(lambda _, args, result: couple(result, 1))
        modules[row.ends[1]].register_forward_pre_hook(lambda _, args: (couple(args[0], -1),))
    return output(base, row)


def _read(
    entering: list[torch.Tensor], norm: Callable, kind: str, hidden: torch.Tensor
) -> torch.Tensor:
    """What a bottleneck reads, of the sub-layer's output and the residual input that has entered
    last.
    """
    if kind == "houlsby":
        return hidden
    return entering[-1] if kind == "parallel" else norm(hidden + entering[-1])


def _couple(
    weights: dict[str, torch.Tensor],
    fields: dict[str, Any],
    key: str,
    hidden: torch.Tensor,
    sign: int,
) -> torch.Tensor:
    """The coupling of NICE for a sign of 1, its inverse for -1."""

    def network(name: str, inputs: torch.Tensor) -> torch.Tensor:
        inner = inputs @ weights[f"{key}{name}.0.weight"].T + weights[f"{key}{name}.0.bias"]
        inner = ACTIVATIONS[fields.get("activation", "gelu")](inner)
        return inner @ weights[f"{key}{name}.2.weight"].T + weights[f"{key}{name}.2.bias"]

    half = hidden.shape[-1] // 2
    first, second = hidden[..., :half].float(), hidden[..., half:].float()
    if sign == 1:
        first = first + network("F", second)
        second = second + network("G", first)
    else:
        second = second - network("G", first)
        first = first - network("F", second)
    return torch.cat([first, second], -1).to(hidden.dtype)


def _after(
    place: str,
    row: Row,
    adapters: Sequence[tuple[dict[str, torch.Tensor], dict[str, Any]]],
    read: Callable,
) -> Callable:
    def hook(module: nn.Module, args: Any, result: Any) -> Any:
        hidden = (result[0] if isinstance(result, tuple) else result).movedim(row.channel_dim, -1)
        for weights, fields in adapters:
            owner = f"{FILE_PREFIX}{_owner(place, row.places, fields)}.houlsby_adapter."
            if not _is_adapted(place, fields) or f"{owner}down_proj.weight" not in weights:
                continue
            of_owner = {}
            for key, weight in weights.items():
                if key.startswith(owner):
                    of_owner[key.removeprefix(owner)] = weight
            inner = _branch(read(fields.get("kind", "houlsby"), hidden).float(), of_owner, fields)
            scaling = fields.get("scaling", 1.0)
            inner = inner * (of_owner["scaling"] if isinstance(scaling, str) else scaling)
            hidden = hidden + inner.to(hidden.dtype)
        hidden = hidden.movedim(-1, row.channel_dim)
        return (hidden, *result[1:]) if isinstance(result, tuple) else hidden

    return hook


def _branch(
    read: torch.Tensor, weights: dict[str, torch.Tensor], fields: dict[str, Any]
) -> torch.Tensor:
    """What a bottleneck adds, before its factor, with the extensions of section 3.6."""

    def linear(name: str, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    activation = ACTIVATIONS[fields.get("activation", "gelu")]
    extension = fields.get("extension")
    gate = torch.sigmoid(linear("gate", read)) if extension == "gated" else 1
    if extension == "norm":
        centered = read - read.mean(-1, keepdim=True)
        read = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        read = read * weights["norm.weight"] + weights["norm.bias"]
    inner = activation(linear("down_proj", read))
    if extension == "deep":
        inner = activation(linear("hidden_proj", inner))
    return gate * linear("up_proj", inner)


def _layer(place: str) -> tuple[str, int]:
    layer = re.match(r"(.*?)\.(\d+)\.", place)
    return (layer[1], int(layer[2])) if layer else ("", 0)


def _is_adapted(place: str, fields: dict[str, Any]) -> bool:
    cross = (".layer.1.dropout" in place and place.startswith("decoder")) or "encoder_attn" in place
    positions = fields.get("positions", ("attention", "feed_forward"))
    if fields.get("kind", "houlsby") != "houlsby" and "positions" not in fields:
        positions = ("feed_forward",)
    is_attention = "attention" in place or "attn." in place
    return (
        _layer(place)[1] in fields.get("layers_to_transform", range(99))
        and (not cross or "cross_attention" in positions)
        and (is_attention or positions != ("attention",))
        and (not is_attention or positions != ("feed_forward",))
    )


def _owner(place: str, places: list[str], fields: dict[str, Any]) -> str:
    share = fields.get("share_layers", 0)
    if not share:
        return place

    def group(name: str) -> tuple[str, int]:
        stack, layer = _layer(name)
        return stack, layer // share

    adapted = [name for name in places if _is_adapted(name, fields)]
    return adapted[[group(name) for name in adapted].index(group(place))]
