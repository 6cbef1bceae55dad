"""Recipes that push what they have trained to a local Hub, and what others get from there."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from transformers import AutoTokenizer

import houlsby_peft
from hub_models import BASE, LABELS, TEXTS, make_base


RECIPES = Path(__file__).parents[2] / "recipes"
# Two questions about one text.
ASKED = ["Who?", TEXTS[0][0], "What?", TEXTS[0][0]]
SHORT = ("--model_name", BASE, "--use_cpu", "--num_train_epochs", "2", "--learning_rate", "1e-2")


@pytest.fixture(scope="module")
def inputs(hub, tmp_path_factory):
    """A base model on the Hub, a data set of the user's own, and one of GLUE."""
    folder = tmp_path_factory.mktemp("inputs")
    make_base(folder / "base", max_position_embeddings=128)
    # Questions take windows of more than 64 tokens.
    AutoTokenizer.from_pretrained(folder / "base", model_max_length=128).save_pretrained(folder / "base")
    hub.add(BASE, folder / "base")
    (folder / "rte").mkdir()
    for split in ("train", "validation"):
        rows = pd.DataFrame({"text": [text for text, _ in TEXTS], "label": [LABELS[label] for _, label in TEXTS]})
        rows.to_csv(folder / f"{split}.csv", index=False)
        pairs = pd.DataFrame({"sentence1": rows.text, "sentence2": rows.text[::-1].to_list(), "label": [0, 1] * 6})
        pairs.to_csv(folder / "rte" / f"{split}.csv", index=False)
    return folder


def start(hub, home, recipe, *flags):
    home.mkdir(exist_ok=True)
    environment = {**hub.environment(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RECIPES / f"{recipe}.py"), *SHORT, "--push_to_hub", *map(str, flags)]
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, check=False)


def predictions(name):
    """Client: what the adapter, as it is on the Hub, gives."""
    adapter = houlsby_peft.load(name)
    return [adapter.labels, adapter.predict([(text, text) for text, _ in TEXTS[:2]])]


def card_of(hub, name):
    text = hub.store.repos[name].head.files["README.md"].decode()
    return yaml.safe_load(text.split("---\n")[1]), text


def test_glue(hub, inputs, tmp_path):
    flags = ["--task", "rte", "--data_dir", inputs, "--hub_model_id", "user/rte", "--hub_private", "--seed", 3]
    flags += ["--base_dtype", "float32"]
    flags += ["--example", "He came.", "--example", "-- he arrived."]
    first = start(hub, tmp_path, "glue", *flags)
    assert first.returncode == 0, first.stderr
    repo = hub.store.repos["user/rte"]
    assert f"Pushed: {hub.url}/user/rte/commit/{repo.head.oid}" in first.stdout
    assert repo.private
    assert [commit.message for commit in repo.commits] == ["initial commit", "Upload Houlsby adapter"]
    saved = (tmp_path / "runs" / "rte" / "adapter" / "adapter_model.safetensors").read_bytes()
    assert repo.head.files["adapter_model.safetensors"] == saved

    results = json.loads((tmp_path / "runs" / "rte" / "results.json").read_text())
    data, card = card_of(hub, "user/rte")
    [result] = data["model-index"][0]["results"]
    assert result["dataset"]["name"] == "GLUE RTE"
    assert {metric["type"]: metric["value"] for metric in result["metrics"]}["accuracy"] == results["best_score"]
    assert data["language"] == "en"
    for said in (results["hardware"], "train examples**: 12", "`learning_rate` | 0.01 | 0.0003"):
        assert said in card
    command = "accelerate launch recipes/glue.py --model_name org/tiny-bert"
    assert results["command"].startswith(command)
    assert command in card
    assert str(tmp_path.parent) not in card

    example = [("He came.", "-- he arrived.")]
    assert json.dumps(example[0])[1:-1] in re.sub(r"\s+", " ", card)

    # The command finds the run's results beside the adapter, and gives the same card.
    command = [sys.executable, "-m", "houlsby_peft.cli", "push", "runs/rte/adapter", "user/by-command"]
    command += ["--example", "He came.", "--example=-- he arrived.", "--pairs"]
    done = subprocess.run(command, env=hub.environment(tmp_path), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    by_command = hub.store.repos["user/by-command"].head.files
    assert by_command.keys() == repo.head.files.keys()
    assert by_command["adapter_config.json"] == repo.head.files["adapter_config.json"]

    def anonymous(text):
        text = re.sub(r"(?<='score': 0\.\d{5})\d+", "", text)  # the last digits depend on how the memory is aligned
        return re.sub(r"generated [0-9a-f]{8}|by-command|(?<=user/)rte|(?<=# )rte|(?<=name: )rte", "...", text)

    assert anonymous(card_of(hub, "user/by-command")[1]) == anonymous(card)

    again = start(hub, tmp_path, "glue", *flags)
    assert again.returncode == 0, again.stderr
    assert "finished: nothing is trained" in again.stdout
    assert "trainable parameters" not in again.stdout
    assert repo.head.files["adapter_model.safetensors"] == saved

    elsewhere = start(
        hub, tmp_path / "elsewhere", "glue", *flags[:4], "--push_to_hub", False, "--evaluate", "user/rte"
    )
    assert elsewhere.returncode == 0, elsewhere.stderr
    evaluation = json.loads((tmp_path / "elsewhere" / "runs" / "rte" / "evaluation.json").read_text())
    assert evaluation["scores"] == pytest.approx(results["best_scores"], rel=1e-5)

    labels, found = hub.call(predictions, "user/rte", home=tmp_path / "elsewhere")
    assert labels == ["entailment", "not_entailment"]
    assert {one["label"] for one in found} <= set(labels)


def pushed(flags):
    """Client: runs each recipe, one after the other."""
    sys.path.insert(0, str(RECIPES))
    for recipe, own in flags.items():
        sys.argv = [
            f"{recipe}.py",
            *SHORT,
            "--push_to_hub",
            "--hub_model_id",
            f"user/{recipe}",
            "--max_steps",
            "1",
            *own,
        ]
        importlib.import_module(recipe).main()


def test_the_other_recipes(hub, inputs, tmp_path):
    """Their adapters are whole, and say what they are for."""
    sentences = [{"tokens": text.split(), "tags": ["B-X", *["O"] * (len(text.split()) - 1)]} for text, _ in TEXTS]
    questions = [
        {"id": str(i), "context": text, "question": "What?", "answers": {"text": [text[:9]], "answer_start": [0]}}
        for i, (text, _) in enumerate(TEXTS)
    ]
    for name, rows in (("tags", sentences), ("questions", questions)):
        for split in ("train", "validation"):
            path = tmp_path / name / f"{split}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(map(json.dumps, rows)))
    shutil.copy(inputs / "train.csv", tmp_path / "messages.csv")
    flags = {
        "token_classification": ["--data", str(tmp_path / "tags")],
        "squad": ["--data", str(tmp_path / "questions"), "--max_length", "96", "--stride", "8", "--example", *ASKED],
        "mlm": ["--data", str(inputs), "--max_length", "48"],
        "stream": ["--data", str(tmp_path / "messages.csv"), "--example", TEXTS[0][0]],
    }
    hub.call(pushed, flags, home=tmp_path / "home")
    question, context, *others = ASKED
    examples = {
        "squad": [{"text": question, "context": context}, {"text": others[0], "context": others[1]}],
        "stream-messages": [{"text": TEXTS[0][0]}],
    }
    kinds = {"token_classification": "token-classification", "squad": "question-answering", "mlm": "fill-mask",
             "stream-messages": "text-classification"}  # fmt: skip
    for name, kind in kinds.items():
        assert "adapter_model.safetensors" in hub.store.repos[f"user/{name}"].head.files
        data = card_of(hub, f"user/{name}")[0]
        assert data["pipeline_tag"] == kind
        shown = [{key: one[key] for key in one if key != "output"} for one in data.get("widget", [])]
        assert shown == examples.get(name, []), "no text of the data without --example"


def refusals(flags):
    """Client: how each recipe ends, with its flags."""
    sys.path.insert(0, str(RECIPES))
    endings = importlib.import_module("training.errors")
    found = {}
    for recipe, own in flags.items():
        sys.argv = [f"{recipe}.py", *SHORT, "--push_to_hub", *own]
        try:
            endings.end_with_one_line(importlib.import_module(recipe).main)
        except SystemExit as error:
            found[recipe] = str(error.code)
    return found


def test_without_a_token_nothing_is_trained(hub, inputs, tmp_path):
    """By no recipe."""
    data = ["--data", str(inputs)]
    flags = dict.fromkeys(("squad", "token_classification", "mlm", "stream", "text_classification"), data)
    flags["glue"] = ["--task", "rte", "--data_dir", str(inputs)]
    found = hub.call(refusals, flags, home=tmp_path, token=None)
    assert found.keys() == flags.keys()
    for recipe, ending in found.items():
        assert ending.startswith("error: "), recipe
        assert "token" in ending
    assert not list(tmp_path.rglob("results.json"))
