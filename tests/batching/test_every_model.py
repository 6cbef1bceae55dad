"""Every model type that can be built in a tiny size: the rows of a mixed batch are right, or the
batch is refused.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedConfig

from houlsby_peft import AdapterError, HoulsbyConfig
from tiny_models import perturb


BASE = "__base__"
# Values of a configuration's fields, whatever the model.
SIZES = {
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers "
    "num_decoder_layers depth num_attention_heads n_head n_heads num_heads "
    "encoder_attention_heads decoder_attention_heads num_key_value_heads "
    "type_vocab_size eos_token_id",
    0: "pad_token_id layerdrop encoder_layerdrop decoder_layerdrop",
    1: "bos_token_id decoder_start_token_id",
    4: "patch_size num_experts num_local_experts n_routed_experts",
    8: "head_dim d_kv",
    12: "moe_intermediate_size",
    16: "hidden_size d_model n_embd dim embed_dim image_size embedding_size projection_dim "
    "encoder_hidden_size",
    24: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim mlp_dim hidden_dim "
    "d_inner n_inner",
    60: "vocab_size src_vocab_size tgt_vocab_size",
    64: "max_position_embeddings n_positions",
}
SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}
GENERATOR = torch.Generator().manual_seed(0)
MOST_PARAMETERS = 30_000_000


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """A configuration of the same kind with small sizes."""
    changes: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            changes[name] = shrink(value).to_dict()
        elif name in SIZE_OF and isinstance(value, (int, float)) and not isinstance(value, bool):
            changes[name] = SIZE_OF[name]
    return type(config)(**changes)


def ids(rows, length=6):
    return torch.randint(3, 50, (rows, length), generator=GENERATOR)


def floats(*shape):
    return torch.randn(*shape, generator=GENERATOR)


# The first kind that a model runs on is used.
INPUTS = [
    lambda rows: {"input_ids": ids(rows)},
    lambda rows: {"input_ids": ids(rows), "decoder_input_ids": ids(rows, 4)},
    lambda rows: {"pixel_values": floats(rows, 3, 16, 16)},
    lambda rows: {"input_ids": ids(rows), "pixel_values": floats(rows, 3, 16, 16)},
    lambda rows: {"input_values": floats(rows, 1600)},
    lambda rows: {"input_features": floats(rows, 80, 16), "decoder_input_ids": ids(rows, 4)},
    lambda rows: {"input_features": floats(rows, 40, 80)},
    lambda rows: {"pixel_values": floats(rows, 4, 3, 16, 16)},
    lambda rows: {"pixel_values": floats(rows, 3, 64, 64)},
]


def outputs(model, batch, names):
    """The model's outputs of floating-point numbers by name, but for those that compare all rows
    with all others.
    """
    with torch.no_grad():
        result = model(**batch, adapter_names=list(names))
    numbers = {}
    for name, value in result.items():
        has_rows = torch.is_tensor(value) and value.is_floating_point() and value.dim() > 1
        if has_rows and not name.startswith("logits_per_"):
            numbers[name] = value
    return numbers


def is_close(computed, expected):
    return (computed - expected).norm() <= 1e-3 * expected.norm() + 1e-6


def find_wrong_rows(model, batch, names):
    """The rows of a mixed batch that differ from the same row alone, though they do not in a batch
    of one adapter.
    """
    mixed = outputs(model, batch, names)
    wrong = []
    for row, name in enumerate(names):
        alone = outputs(model, {key: value[row : row + 1] for key, value in batch.items()}, [name])
        for key, value in alone.items():
            if mixed[key].shape[0] == len(names) and mixed[key].shape[1:] == value.shape[1:]:
                plain = outputs(model, batch, [name] * len(names))[key]
                if is_close(plain[row], value[0]) and not is_close(mixed[key][row], value[0]):
                    wrong.append((row, name, key))
    return wrong


def adapted_model(model_type):
    """A tiny model with two adapters and its kind of inputs; None if it cannot be built, run or
    adapted.
    """
    try:
        config = shrink(CONFIG_MAPPING[model_type]())
        classes = MODEL_MAPPING[type(config)]
        model_class = classes[0] if isinstance(classes, tuple) else classes
        with torch.device("meta"):
            if sum(weight.numel() for weight in model_class(config).parameters()) > MOST_PARAMETERS:
                return None
        model = model_class(config).eval().requires_grad_(True)
        perturb(model, scale=0.1)
    except Exception:  # of transformers, for sizes that do not go together
        return None
    for make in INPUTS:
        try:
            with torch.no_grad():
                model(**make(2))
            break
        except Exception:
            continue
    else:
        return None
    try:
        model = get_peft_model(model, HoulsbyConfig(r=4, init_weights=False), adapter_name="one")
    except ValueError:
        return None
    perturb(model, seed=1)
    model.add_adapter("two", HoulsbyConfig(r=4, init_weights=False))
    model.set_adapter("two")
    perturb(model, seed=2)
    return model.eval(), make


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_model_type():
    draw, outcomes = random.Random(0), Counter()
    types = [name for name in CONFIG_MAPPING if CONFIG_MAPPING[name] in MODEL_MAPPING]
    for model_type in types:
        torch.manual_seed(0)
        built = adapted_model(model_type)
        if built is None:
            outcomes["not built"] += 1
            continue
        model, make = built
        # The length is a multiple of the rows, and once equal to it.
        for rows in (2, 3, 6):
            names = ["one", *draw.choices(["one", "two", BASE], k=rows - 2), "two"]
            try:
                assert find_wrong_rows(model, make(rows), names) == [], model_type
                outcomes["right"] += 1
            except AdapterError as error:
                outcomes["refused"] += 1
                print(model_type, rows, error)
    print(outcomes)
    assert outcomes["right"] > 300
