"""Small models that every test file uses; nothing is downloaded."""

from __future__ import annotations

import torch
from peft import PeftModel, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

from houlsby_peft import HoulsbyConfig


TINY_BERT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "num_labels": 3,
}


def tiny_bert(seed: int = 0, **changes: object) -> BertForSequenceClassification:
    """A BERT classifier of 4 layers and width 32 in eval mode; equal seeds give equal weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BertForSequenceClassification(BertConfig(**{**TINY_BERT, **changes})).eval()


def perturb(model: torch.nn.Module, seed: int = 1, scale: float = 0.2) -> None:
    """Add noise to the trainable weights, as training would: a fresh adapter is too near the
    identity to tell.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator)


def perturb_adapter(model: torch.nn.Module, name: str, seed: int) -> None:
    """The same for all weights of an adapter, whether or not it is active."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if f".{name}." in key:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)


def adapted(
    base: torch.nn.Module | None = None, name: str = "default", seed: int = 1, **options: object
) -> PeftModel:
    """A model, or the tiny BERT, in eval mode with an adapter that is far from the identity."""
    config = HoulsbyConfig(**{"r": 4, **options})
    model = get_peft_model(tiny_bert() if base is None else base, config, name)
    perturb(model, seed)
    return model.eval()
