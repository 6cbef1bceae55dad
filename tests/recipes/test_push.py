"""Recipes that push what they have trained to a local Hub, and what others get from there."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

import houlsby_peft
from hub_models import BASE, LABELS, TEXTS, WORDS, make_base
from recipe_runs import write


RECIPES = Path(__file__).parents[2] / "recipes"
SHORT = f"--model_name {BASE} --use_cpu --max_steps 2 --learning_rate 1e-2 --push_to_hub"


@pytest.fixture(scope="module")
def inputs(hub, tmp_path_factory):
    """A base model on the Hub, a data set of the user's own, and one of GLUE."""
    folder = tmp_path_factory.mktemp("inputs")
    make_base(folder / "base", max_position_embeddings=128)
    # Questions take windows of more than 64 tokens.
    tokenizer = AutoTokenizer.from_pretrained(folder / "base", model_max_length=128)
    tokenizer.save_pretrained(folder / "base")
    hub.add(BASE, folder / "base")
    labels = [LABELS[label] for _, label in TEXTS]
    pairs = {"sentence1": WORDS, "sentence2": WORDS[::-1], "label": [0, 1] * 6}
    questions = {"id": [*map(str, range(12))], "context": WORDS, "question": ["What?"] * 12}
    questions["answers"] = [{"text": [text[:9]], "answer_start": [0]} for text in WORDS]
    for split in ("train", "validation"):
        write(folder / f"{split}.csv", text=WORDS, label=labels)
        write(folder / "rte" / f"{split}.csv", **pairs)
        write(folder / "questions" / f"{split}.jsonl", **questions)
    shutil.copy(folder / "train.csv", folder / "messages.csv")
    return folder


def start(flags):
    """Client: run each recipe, one after the other; return how those end that end early."""
    sys.path.insert(0, str(RECIPES))
    edge = importlib.import_module("run.edge")
    importlib.import_module("tasks.scores")._RESAMPLES = 10  # as conftest.py does in its process
    endings = {}
    for recipe, words in flags.items():
        sys.argv = [f"{recipe}.py", *SHORT.split(), "--hub_model_id", f"user/{recipe}", *words]
        try:
            edge.end_with_one_line(importlib.import_module(recipe).main)
        except SystemExit as error:
            endings[recipe] = str(error.code)
    return endings


def predictions(name):
    """Client: what the adapter, as it is on the Hub, gives."""
    adapter = houlsby_peft.load(name)
    return [adapter.labels, adapter.predict([*zip(WORDS[:2], WORDS[:2], strict=True)])]


def test_adapters_are_whole_and_say_what_they_are_for(hub, inputs, tmp_path):
    flags = {
        "glue": ["--task", "rte", "--data_dir", str(inputs), "--hub_private"],
        "squad": ["--data", str(inputs / "questions"), "--max_length", "96", "--stride", "8"],
        "stream": ["--data", str(inputs / "messages.csv")],
    }
    assert hub.call(start, flags, home=tmp_path / "home") == {}
    kinds = dict.fromkeys(("glue", "stream-messages"), "text-classification")
    kinds["squad"] = "question-answering"
    cards, metadata = {}, {}
    for name, kind in kinds.items():
        files = hub.store.repos[f"user/{name}"].head.files
        assert "adapter_model.safetensors" in files
        cards[name] = files["README.md"].decode()
        metadata[name] = yaml.safe_load(cards[name].split("---\n")[1])
        assert metadata[name]["pipeline_tag"] == kind
        assert "widget" not in metadata[name], "the data may be private"
    assert hub.store.repos["user/glue"].private
    [result] = metadata["glue"]["model-index"][0]["results"]
    assert result["dataset"]["name"] == "GLUE RTE"
    assert "python recipes/glue.py --model_name org/tiny-bert" in cards["glue"]
    assert str(tmp_path.parent) not in "".join(cards.values())
    labels, answers = hub.call(predictions, "user/glue", home=tmp_path / "elsewhere")
    assert labels == ["entailment", "not_entailment"]
    assert len(answers) == 2


def test_without_a_token_nothing_is_trained(hub, inputs, tmp_path):
    """By no recipe."""
    flags = {recipe: ["--data", str(inputs)] for recipe in ("mlm", "stream")}
    flags["glue"] = ["--task", "rte", "--data_dir", str(inputs)]
    endings = hub.call(start, flags, home=tmp_path, token=None)
    assert endings.keys() == flags.keys()
    for recipe, ending in endings.items():
        assert ending.startswith("error: "), recipe
        assert "token" in ending
    assert not list(tmp_path.rglob("results.json"))
