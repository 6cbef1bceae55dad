"""The tiny base models of the AdapterHub golden set, equal in every version of torch and
transformers.

Their weights follow from the weights' names by a formula, so neither files nor a random generator
are needed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import nn
from transformers import AutoConfig


WIDTH, LAYERS, VOCABULARY = 16, 2, 40
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 20}
_BERT = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, **_TEXT}
_BERT["intermediate_size"] = 24
_ENDS = {"pad_token_id": 1, "eos_token_id": 2}
# The configurations by the names that the golden folders begin with.
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **_BERT},
    "roberta": {"model_type": "roberta", **_BERT, "pad_token_id": 1},
    "xlmr": {"model_type": "xlm-roberta", **_BERT, "pad_token_id": 1},
    "distilbert": {
        "model_type": "distilbert", "dim": WIDTH, "n_layers": LAYERS, "n_heads": 2,
        "hidden_dim": 24, **_TEXT,
    },
    "bart": {
        "model_type": "bart", "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24, **_TEXT, **_ENDS, "bos_token_id": 0, "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2, "n_inner": 24,
        "vocab_size": VOCABULARY, "n_positions": 20, **_ENDS, "bos_token_id": 0,
    },
    "t5": {
        "model_type": "t5", "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": LAYERS,
        "num_decoder_layers": LAYERS, "num_heads": 2, "vocab_size": VOCABULARY, **_ENDS,
        "decoder_start_token_id": 1,
    },
}  # fmt: skip


def tiny_config(model: str, **changes: Any) -> Any:
    """Return the configuration of a tiny base model."""
    fields = {**CONFIGS[model], **changes}
    return AutoConfig.for_model(**fields)


def tiny_base(model: str, class_name: str = "AutoModel", **changes: Any) -> Any:
    """Return a tiny base model in float32 and evaluation mode.

    Args:
        model: A key of `CONFIGS`.
        class_name: A class of transformers; an auto class or one of the model's own.
        changes: Changed fields of the configuration, such as `num_labels`.
    """
    config, cls = tiny_config(model, **changes), getattr(transformers, class_name)
    return fill(cls.from_config(config) if class_name.startswith("Auto") else cls(config)).eval()


def fill(module: nn.Module, scale: float = 0.35) -> Any:
    """Set every weight to values that follow from its name, without the prefix of the base model,
    and its shape.
    """
    encoder = getattr(module, "base_model", module)
    # The encoder first: a head may share its embeddings under a name of its own.
    named = [*encoder.named_parameters(), *module.named_parameters()]
    seen: set[nn.Parameter] = set()
    with torch.no_grad():
        for name, weight in named:
            if weight not in seen:
                weight.copy_(values_for(name, weight, scale))
            seen.add(weight)
    return module


def values_for(name: str, like: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the values of a weight: a wave whose phase and length depend on the name. Norms stay
    near 1.
    """
    number = zlib.crc32(name.encode())
    steps = torch.arange(like.numel(), dtype=torch.float64)
    wave = torch.sin(steps * (1.0 + number % 97 / 37) + number % 89) + torch.cos(
        steps * math.sqrt(2 + number % 13)
    )
    is_norm_weight = like.dim() == 1 and name.endswith("weight")
    return (is_norm_weight + scale * wave).reshape(like.shape)


def inputs(model: str) -> dict[str, torch.Tensor]:
    """Return two texts of unlike length, padded, as the tiny models read them."""
    ids = torch.tensor([[0, 5, 17, 8, 2, 1, 1], [0, 11, 3, 29, 7, 33, 2]])
    batch = {"input_ids": ids, "attention_mask": (ids != 1).long()}
    if model == "t5":
        batch["decoder_input_ids"] = torch.tensor([[1, 6, 9], [1, 20, 4]])
    return batch


@contextmanager
def whole_float64() -> Iterator[None]:
    """Let a model in float64 compute all in it: T5 casts parts to float32, where versions of
    transformers differ.
    """
    original = torch.Tensor.to

    def keep(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_cast = self.dtype == torch.float64 and torch.float32 in (*args, *kwargs.values())
        return self if is_cast else original(self, *args, **kwargs)

    with (
        patch.object(torch.Tensor, "to", keep),
        patch.object(torch.Tensor, "float", lambda self: self.double()),
    ):
        yield
