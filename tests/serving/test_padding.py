"""Adapters of decoders, whose tokenizers add no special tokens and often cannot pad."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    CanineConfig,
    CanineModel,
    CanineTokenizer,
)

import houlsby_peft
from answers import near
from decoders import save_gpt2
from houlsby_peft import AdapterError, TaskBank
from hub_models import save_adapter


KINDS = {
    "topic": (AutoModelForSequenceClassification, {"id2label": {0: "bad", 1: "good"}}),
    "things": (AutoModelForTokenClassification, {"id2label": {0: "O", 1: "B-X"}}),
    "answer": (AutoModelForQuestionAnswering, {}),
    "vector": (AutoModel, {}),
}
INPUTS = {
    "answer": [("who said ?", "he said so . a film"), ("who ?", "he")],
    "things": ["a fine film", "he " * 20],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("base"))


def save(folder, base, task, pad_token=None, **options):
    """Save an adapter of random weights; with a pad token, also the tokenizer that has it and
    further options.
    """
    model_class, head = KINDS[task]
    save_adapter(folder, base, model_class, head)
    if pad_token is not None:
        AutoTokenizer.from_pretrained(base, pad_token=pad_token, **options).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("pad_token", "side"),
    [(None, "right"), ("<eos>", "right"), ("<pad>", "right"), ("<pad>", "left")],
)
@pytest.mark.parametrize("task", KINDS)
def test_texts_of_unlike_length_are_predicted_as_each_alone(task, pad_token, side, base, tmp_path):
    """Also with a tokenizer that was set up for the generation of texts, which needs the padding on
    the left.
    """
    inputs = INPUTS.get(task, ["a fine film", "he said so . who ?"])
    folder = save(tmp_path, base, task, pad_token, padding_side=side)
    adapter, bank = houlsby_peft.load(folder), TaskBank({task: folder})
    alone = [houlsby_peft.load(folder).predict(text)[0] for text in inputs]
    assert any(alone)
    assert adapter.predict(inputs) == near(alone)
    assert bank.predict([(task, text) for text in inputs]) == near(alone)


@torch.no_grad()
def test_adapters_that_pad_with_unlike_tokens_share_a_bank(base, tmp_path):
    """The model classifies a text by its last token that is not its pad token, of which it knows
    one.
    """
    folders = {
        str(pad): save(tmp_path / str(pad), base, "topic", pad) for pad in ("<eos>", "<pad>", None)
    }
    texts = ["a fine film", "he said so . who ?"]
    bank, requests = TaskBank(folders), [(task, text) for task in folders for text in texts]
    adapter = houlsby_peft.load(folders["None"])
    expected = [adapter.predict(text)[0] for text in texts] * 3
    assert bank.predict(requests) == near(expected)
    first = houlsby_peft.load(folders["<eos>"])
    beside = houlsby_peft.load(folders["<pad>"], beside=first)
    assert beside.predict(texts) == near(expected[:2])


@pytest.mark.parametrize("texts", [[""], ["a fine film", "  "]])
@pytest.mark.parametrize("task", ["topic", "vector"])
def test_a_text_without_tokens_is_refused(task, texts, base, tmp_path):
    folder = save(tmp_path, base, task, "<pad>")
    with pytest.raises(ValueError, match="text to read"):
        houlsby_peft.load(folder).predict(texts)


def test_a_base_model_that_reads_characters(tmp_path):
    """Canine has no table of tokens, and its tokenizer does not say where its tokens are."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hash_buckets": 128}
    config = CanineConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    CanineModel(config).save_pretrained(tmp_path / "base")
    CanineTokenizer().save_pretrained(tmp_path / "base")
    folders = {task: save(tmp_path / task, tmp_path / "base", task) for task in ("topic", "answer")}
    texts = ["a fine film " * 3, "he said so . who ? " * 5]
    predictor = houlsby_peft.load(folders["topic"])
    alone = [predictor.predict(text)[0] for text in texts]
    bank = TaskBank(folders)
    assert bank.predict([("topic", text) for text in texts]) == near(alone)
    with pytest.raises(AdapterError, match="fast tokenizer"):
        bank.predict([("answer", ("who ?", "he said so ."))])
