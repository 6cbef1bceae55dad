"""Adapters that version 0.1 has saved: every later version must load them and compute the recorded
logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

import houlsby_peft
from home_made import HomeMade
from houlsby_peft import HoulsbyConfig
from model_states import assert_same_tensors
from tiny_models import perturb, tiny_bert


GOLDEN = Path(__file__).parents[1] / "data" / "golden_adapter"
NAMES = {0: "complaint", 1: "praise", 2: "question"}


def bert_with_two_layer_head() -> nn.Module:
    model = tiny_bert()
    houlsby_peft.put_two_layer_head(model)
    return model


# The folder of each adapter: what builds its base model, and the fields of its configuration but
# for r=2.
ADAPTERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "own": (tiny_bert, {"train_layer_norm": "all"}),
    "shared": (tiny_bert, {"share_layers": 3}),
    "shared_in_layer": (tiny_bert, {"share_layers": 1, "activation": "relu"}),
    "no_norms": (tiny_bert, {"train_layer_norm": False, "share_layers": 3}),
    "some_layers": (
        tiny_bert,
        {"layers_to_transform": [1, 3], "rank_pattern": {"attention.output.dropout": 3}},
    ),
    "two_layer_head": (
        bert_with_two_layer_head,
        {
            "two_layer_head": True,
            "task_type": "SEQ_CLS",
            "share_layers": 3,
            "train_layer_norm": False,
        },
    ),
    "regression": (
        lambda: tiny_bert(num_labels=1, id2label={0: "similarity"}),
        {"share_layers": 1},
    ),
    "classes": (lambda: tiny_bert(id2label=NAMES), {"share_layers": 1, "task_type": "SEQ_CLS"}),
    "pfeiffer": (tiny_bert, {"kind": "pfeiffer", "scaling": "learned", "train_layer_norm": False}),
    "language": (
        tiny_bert,
        {"kind": "parallel", "scaling": 4.0, "invertible": "nice", "positions": ["attention"]},
    ),
    "ladder": (tiny_bert, {"kind": "ladder", "layers_to_transform": [1, 3]}),
    "gated": (tiny_bert, {"extension": "gated", "train_layer_norm": False}),
    # No row of the table of architectures describes this model.
    "inferred": (HomeMade, {"modules_to_save": ["classifier"]}),
}
HEADS = {
    "regression": ({0: "similarity"}, "regression", False),
    "classes": (NAMES, None, False),
    "two_layer_head": ({0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}, None, True),
}


def base_of(name: str) -> nn.Module:
    """Build a base model whose weights come from a formula, so that no version of a random
    generator matters.
    """
    model = ADAPTERS[name][0]()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float64) * 0.7 + index
            parameter.copy_(
                (torch.sin(values) * 0.2 + (parameter.dim() == 1)).reshape(parameter.shape)
            )
    return model.eval()


def logits(model: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result = model.eval()(token_ids)
    return result if isinstance(result, torch.Tensor) else result.logits


every_adapter = pytest.mark.parametrize("name", ADAPTERS)


@every_adapter
def test_a_golden_adapter_gives_the_recorded_logits(name, token_ids):
    model = PeftModel.from_pretrained(base_of(name), GOLDEN / name, adapter_name="old")
    # Logits show a bottleneck at a wrong place, weights each tensor that was not loaded.
    expected = torch.tensor(json.loads((GOLDEN / name / "logits.json").read_text()))
    torch.testing.assert_close(logits(model, token_ids), expected, atol=1e-5, rtol=1e-5)
    assert_same_tensors(
        get_peft_model_state_dict(model, adapter_name="old"),
        load_file(GOLDEN / name / "adapter_model.safetensors"),
    )


@every_adapter
def test_what_the_files_say_of_the_adapter(name):
    saved = json.loads((GOLDEN / name / "adapter_config.json").read_text())
    config = HoulsbyConfig.from_pretrained(GOLDEN / name)
    record = config.saved.record
    # The places are not in the files: they come from the table, or are inferred.
    assert saved["target_modules"] is None
    for field, value in {"r": 2, **ADAPTERS[name][1]}.items():
        assert getattr(config, field) == value, field
    if name in HEADS:
        assert (record.id2label, record.problem_type, record.two_layer_head) == HEADS[name]


if __name__ == "__main__":
    # Writes the folders that are missing. Run it only after adding a new kind of adapter, never to
    # make a test pass.
    ids = torch.randint(0, 99, (5, 7), generator=torch.Generator().manual_seed(0))
    for name, (_, fields) in ADAPTERS.items():
        folder = GOLDEN / name
        if not folder.exists():
            model = get_peft_model(base_of(name), HoulsbyConfig(r=2, **fields))
            perturb(model)
            model.save_pretrained(folder)
            (folder / "README.md").unlink()
            (folder / "logits.json").write_text(json.dumps(logits(model, ids).tolist()))
