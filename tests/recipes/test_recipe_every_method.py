"""Every method in every recipe: which weights change, by name, and that what is saved gives the same outputs."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import glue
import mlm
import paper_tasks
import squad
import text_classification
import token_classification
from recipe_runs import run, save_tiny_encoder
from tasks.minimal_pairs import minimal_pairs
from training.errors import RecipeError
from training.trainer import RecipeTrainer


SENTENCES = minimal_pairs()["train"]["sentence"][:32]


class Recipe(NamedTuple):
    """A recipe, the class that loads what it saves, and the names of its head's modules."""

    script: ModuleType
    auto_class: Any
    head: tuple[str, ...]
    flags: tuple[object, ...] = ()


RECIPES = {
    "tagging": Recipe(token_classification, AutoModelForTokenClassification, ("classifier.",)),
    "squad": Recipe(squad, AutoModelForQuestionAnswering, ("qa_outputs.",), ("--max_length", 80, "--stride", 4)),
    "texts": Recipe(text_classification, AutoModelForSequenceClassification, ("classifier.",)),
    "masked words": Recipe(mlm, AutoModelForMaskedLM, ("cls.",), ("--text_columns", "text")),
}
OPTIONS = {
    "top_k": ("--top_k", 2),
    "lora": ("--lora_targets", "query", "value"),
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder"), max_position_embeddings=96)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder per recipe, each with the same few sentences."""
    root = tmp_path_factory.mktemp("data")
    words = [sentence.rstrip(".").split() for sentence in SENTENCES]
    frames = {
        "texts": pd.DataFrame({"text": SENTENCES, "label": ["a", "b"] * 16}),
        "tagging": pd.DataFrame({"words": words, "tags": [["X", *"O" * (len(row) - 1)] for row in words]}),
        "squad": pd.DataFrame(
            {
                "id": [str(number) for number in range(32)],
                "context": SENTENCES,
                "question": [sentence.replace(".", "?") for sentence in SENTENCES],
                "answers": [{"text": [text.split()[0]], "answer_start": [0]} for text in SENTENCES],
            }
        ),
    }
    for folder, frame in (*frames.items(), ("masked words", frames["texts"]), ("sms_spam", frames["texts"])):
        (root / folder).mkdir()
        for split in ("train", "validation", "test"):
            frame.to_json(root / folder / f"{split}.jsonl", orient="records", lines=True)
    return root


@pytest.fixture
def ends(monkeypatch):
    """The models at the end of the runs, with the weights that they kept."""
    found = []
    save = RecipeTrainer.save_trained
    monkeypatch.setattr(RecipeTrainer, "save_trained", lambda self: (found.append(self.model.eval()), save(self)))
    return found


def start(encoder, data, output, *flags):
    return ["--data", data, "--model_name", encoder, "--output_dir", output, "--use_cpu", "--max_steps", 1,
            "--warmup_steps", 0, "--learning_rate", 1e-2, *flags]  # fmt: skip


def is_trained(method: str, name: str, head: tuple[str, ...]) -> bool:
    """What the method trains of the base model, by the names of BERT's weights."""
    return (
        name.startswith(head)
        or method == "full"
        or (method == "top_k" and (".layer.2." in name or ".layer.3." in name or ".pooler." in name))
        or (method == "layer_norm" and "LayerNorm" in name)
    )


@pytest.mark.parametrize(
    ("recipe", "method"),
    [
        *(("tagging", method) for method in ("full", "top_k", "lora")),
        *(("squad", method) for method in ("full", "layer_norm", "lora")),
        *(("texts", method) for method in ("full", "top_k", "linear")),
        *(("masked words", method) for method in ("full", "layer_norm", "lora", "linear")),
    ],
)
def test_a_run(recipe, method, encoder, data, tmp_path, ends):
    script, auto_class, head, own = RECIPES[recipe]
    run(script, *start(encoder, data / recipe, tmp_path, "--method", method, *OPTIONS.get(method, ()), *own))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["method"] == method
    tokens = AutoTokenizer.from_pretrained(encoder)(SENTENCES[:4], padding=True, return_tensors="pt")
    fields = {"num_labels": len(set(results.get("tags", "ab")))}
    if method == "lora":
        saved = tmp_path / "adapter"
        model = auto_class.from_pretrained(encoder, **fields)
        if (saved / mlm.HEAD_FILE).exists():
            model.load_state_dict(load_file(saved / mlm.HEAD_FILE), strict=False)
        model = PeftModel.from_pretrained(model, saved)
    else:
        model = auto_class.from_pretrained(tmp_path / "model")
        before = load_file(encoder / "model.safetensors")
        now = {name.removeprefix("bert."): value for name, value in model.state_dict().items()}
        # A key's bias moves all scores of a query alike, so that it has no gradient.
        same = {name for name in before.keys() & now.keys() if torch.equal(before[name], now[name])}
        frozen = {name for name in before.keys() & now.keys() if not is_trained(method, f".{name}", head)}
        assert frozen <= same | {name for name in before if method == "full" and "pooler" in name}
        assert {name for name in same - frozen if "key.bias" not in name and "pooler" not in name} == set()
    with torch.no_grad():
        for kept, loaded in zip(ends[-1](**tokens).to_tuple(), model.eval()(**tokens).to_tuple(), strict=True):
            torch.testing.assert_close(loaded, kept)


def test_pretraining_without_adapters_is_a_start_for_a_task(encoder, data, tmp_path, capsys):
    """At a learning rate that is zero in float32, what glue.py saves is what it started from, with a new head."""
    (tmp_path / "cola").symlink_to(data / "texts")
    text = tmp_path / "cola-text"
    run(mlm, *start(encoder, data / "texts", text, "--method", "full"))
    assert "head for masked words: trained, not in the checkpoint" in capsys.readouterr().out
    pretrained, pooler = load_file(text / "model" / "model.safetensors"), load_file(encoder / "model.safetensors")
    assert torch.equal(pretrained["bert.pooler.dense.weight"], pooler["pooler.dense.weight"])
    frame = pd.DataFrame({"sentence": SENTENCES, "label": [0, 1] * 16})
    (tmp_path / "glue" / "cola").mkdir(parents=True)
    for split in ("train", "validation"):
        frame.to_csv(tmp_path / "glue" / "cola" / f"{split}.csv", index=False)
    flags = ["--task", "cola", "--data_dir", tmp_path / "glue", "--use_cpu", "--max_steps", 1, "--method", "full"]
    folders = ["--model_name", tmp_path / "{task}-text" / "model", "--output_dir", tmp_path / "run"]
    run(glue, *flags, *folders, "--learning_rate", 1e-60)
    started = load_file(tmp_path / "run" / "model" / "model.safetensors")
    shared = {name for name in pretrained if name.startswith("bert.")}
    assert started.keys() == shared | {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(started[name], pretrained[name]) for name in shared)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [(["--method", "full"], "all"), (["--head", "two_layer"], "head")],
    ids=["full", "two_layer"],
)
def test_both_columns_of_table_3(flags, expected, encoder, data, tmp_path, ends):
    """Mohebbi and Rajaei 2020: full fine-tuning, and adapters that are not shared with a head of two layers."""
    run(paper_tasks, *start(encoder, data, tmp_path, "--task", "sms_spam", *flags))
    (model,) = ends
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    if expected == "all":
        assert trained == {name for name, _ in model.named_parameters()}
    else:
        sizes = [
            weight.numel() for name, weight in model.named_parameters() if "classifier" in name and name in trained
        ]
        assert sum(sizes) == 32 * 32 + 32 + 2 * 32 + 2
    assert "sms_spam" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (squad, ["--method", "top_k"], "needs it; got --method top_k without it"),
        (token_classification, ["--method", "full", "--init_adapter", "."], "--init_adapter needs --method houlsby"),
        (mlm, ["--layers", 2, "--keep_prefix", "memory"], "each epoch masks other words"),
        (mlm, ["--base_dtype", "bfloat16"], "needs a checkpoint with a head for masked words"),
        (text_classification, ["--method", "lora", "--head", "two_layer"], "--head two_layer needs --method houlsby"),
    ],
    ids=lambda value: "" if isinstance(value, (str, list)) else value.__name__,
)
def test_what_a_method_does_not_have(script, flags, message, encoder, data, tmp_path):
    folder = {squad: "squad", token_classification: "tagging"}.get(script, "texts")
    with pytest.raises(RecipeError, match=message):
        run(script, *start(encoder, data / folder, tmp_path / "run", *flags))


def test_nothing_to_train(encoder, data, tmp_path):
    """The head for masked words is the checkpoint's."""
    run(mlm, *start(encoder, data / "texts", tmp_path / "first", "--method", "full"))
    with pytest.raises(RecipeError, match=r"--method linear trains only the head .* has one. Give another"):
        run(mlm, *start(tmp_path / "first" / "model", data / "texts", tmp_path / "second", "--method", "linear"))


def test_pretraining_of_all_weights_resumes(encoder, data, tmp_path):
    """With the same weights as without an interruption, tied embeddings and the frozen pooler included."""
    steps = ["--method", "full", "--max_steps", 2, "--save_total_limit", 2, "--load_best_model_at_end", "false"]
    run(mlm, *start(encoder, data / "texts", tmp_path / "whole", *steps))
    last = tmp_path / "whole" / "checkpoint-1"
    run(mlm, *start(encoder, data / "texts", tmp_path / "resumed", *steps, "--resume_from_checkpoint", last))
    whole, resumed = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not torch.equal(whole["cls.predictions.bias"], torch.zeros_like(whole["cls.predictions.bias"]))
