"""Each snippet of docs/integrations.md runs on tiny models, and does what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from transformers import AutoTokenizer, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import houlsby_peft
from hub_models import make_base
from snippets import run_snippets


pytest.importorskip("datasets", reason="the extra recipes is not installed")
# The libraries use what transformers 5.23 and others deprecate; PyTorch warns of pinned memory
# without a GPU.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning"),
]
PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
ADAPTER = {"README.md", "adapter_config.json", "adapter_model.safetensors"}


def run(library):
    """Run the snippets of a section; return what they define."""
    (section,) = (part for part in PAGE.split("\n## ") if part.startswith(f"{library}\n"))
    names = run_snippets(section)
    assert names
    return names


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder in which the page's names on the Hub are paths of tiny models."""
    monkeypatch.chdir(tmp_path)
    for name in ("google-bert/bert-base-uncased", "sentence-transformers/all-MiniLM-L6-v2"):
        make_base(tmp_path / name)
    llama = tmp_path / "HuggingFaceTB/SmolLM2-135M"
    sizes = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    LlamaForCausalLM(LlamaConfig(**sizes, **special, intermediate_size=48)).save_pretrained(llama)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "google-bert/bert-base-uncased")
    tokenizer.eos_token = "[SEP]"
    tokenizer.save_pretrained(llama)
    return tmp_path


def trained(model):
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def files(folder):
    return {path.name for path in folder.iterdir()}


def test_transformers(models):
    names = run("transformers")
    assert isinstance(names["model"], BertForSequenceClassification)
    assert all(
        "houlsby_" in name or "classifier.modules_to_save" in name
        for name in trained(names["model"])
    )
    assert files(models / "reviews") == {
        *ADAPTER - {"README.md"},
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert names["third"]["label"] in {"complaint", "praise"}
    model = names["base"]
    inputs = names["tokenizer"]("The soup was cold.", return_tensors="pt")
    with torch.no_grad():
        adapted = model.eval()(**inputs).logits
        model.disable_adapters()
        assert not torch.equal(model(**inputs).logits, adapted)
        model.enable_adapters()
        assert torch.equal(model(**inputs).logits, adapted)
    model.delete_adapter("reviews")
    assert not hasattr(model, "peft_config") or not model.peft_config


@pytest.mark.slow
def test_sentence_transformers(models):
    pytest.importorskip("sentence_transformers", reason="the extra integrations is not installed")
    names = run("sentence-transformers")
    assert trained(names["encoder"])
    assert all("houlsby_" in name for name in trained(names["encoder"]))
    assert files(models / "questions") > ADAPTER
    assert "model.safetensors" not in files(models / "questions")
    untrained = names["SentenceTransformer"]("sentence-transformers/all-MiniLM-L6-v2")
    text = "Which train is the last?"
    assert abs(names["reloaded"].encode(text) - untrained.encode(text)).max() > 1e-3
    adapter = houlsby_peft.load(models / "questions")
    assert adapter.task.pipeline == "feature-extraction"
    untrained.add_adapter(houlsby_peft.HoulsbyConfig(kind="ladder", r=8, init_std=1))
    texts = [text, "Is there a vegetarian dish on the menu?"]
    alone, together = untrained.encode(text), untrained.encode(texts)[0]
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_trl(models):
    pytest.importorskip("trl", reason="the extra integrations is not installed")
    names = run("TRL")
    assert all("houlsby_" in name for name in trained(names["trainer"].model))
    assert files(models / "tuned") > ADAPTER
    assert "model.safetensors" not in files(models / "tuned")
    expected, loaded = map(get_peft_model_state_dict, (names["trainer"].model, names["decoder"]))
    assert expected.keys() == loaded.keys()
    assert all(torch.equal(loaded[key].to(weight), weight) for key, weight in expected.items())
    with torch.no_grad():
        ids = names["prompt"]["input_ids"]
        adapted = names["decoder"](ids).logits
        with names["decoder"].disable_adapter():
            assert (names["decoder"](ids).logits - adapted).abs().max() > 1e-3


@pytest.mark.slow
def test_setfit(models):
    pytest.importorskip("setfit", reason="the extra integrations is not installed")
    names = run("SetFit")
    body = names["reloaded"].model_body
    assert all("houlsby_" in name for name in trained(names["classifier"].model_body))
    assert any("houlsby_adapter" in name for name, _ in body.named_parameters())
    assert set(names["reloaded"].predict(["The soup was cold."])) <= {"complaint", "praise"}
