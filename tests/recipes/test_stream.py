"""Tasks in sequence on one encoder: nothing that was learned changes, and the sizes are what they must be."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import stream
from common.data import with_validation
from common.edge import RecipeError
from common.minimal_pairs import minimal_pairs
from recipe_runs import run


SENTENCES = minimal_pairs()["train"]["sentence"][:96]
LABELS = {
    "two.classes": ["a", "b"] * 48,
    "three": ["a", "b", "c"] * 32,
    "several": [["a"], ["b", "c"], [], ["d", "e"]] * 24,
    "grade": [number / 7 for number in range(96)],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, labels in LABELS.items():
        pd.DataFrame({"text": SENTENCES, "label": labels}).to_json(
            folder / f"{name}.jsonl", orient="records", lines=True
        )
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory, encoder, data):
    """The folder of a run over tasks of unlike kinds and widths."""
    folder = tmp_path_factory.mktemp("run")
    files = [data / f"{name}.jsonl" for name in LABELS]
    run(stream, "--data", *files, "--model_name", encoder, "--output_dir", folder, "--use_cpu", "--max_steps", 4,
        "--learning_rate", 1e-2)  # fmt: skip
    return folder


def test_earlier_scores_stay_to_the_last_bit(output):
    rows = json.loads((output / "stream.json").read_text())
    names = ["two_classes", "three", "several", "grade"]
    assert [row["task"] for row in rows] == names
    for number, row in enumerate(rows):
        assert row["unchanged"] == dict.fromkeys(names[: number + 1], True)
        assert row["scores"] == {name: rows[-1]["scores"][name] for name in names[: number + 1]}


def test_the_model_grows_by_what_a_task_trains(output):
    rows = json.loads((output / "stream.json").read_text())
    body = 4 * 2 * (2 * 64 * 32 + 64 + 32 + 2 * 32)
    assert [row["trained"] for row in rows] == [body + 33 * width for width in (2, 3, 5, 1)]
    # The base model's own head, which no task changes, is as wide as the first task's.
    assert np.diff([row["total"] for row in rows]).tolist() == [row["trained"] for row in rows[1:]]


def test_saved_adapters_are_scored_again(data, output, tmp_path):
    files = [data / f"{name}.jsonl" for name in LABELS]
    run(stream, "--data", *files, "--evaluate", output, "--output_dir", tmp_path, "--use_cpu")
    last = json.loads((output / "stream.json").read_text())[-1]["scores"]
    for name, scores in last.items():
        found = json.loads((tmp_path / name / "evaluation.json").read_text())
        assert found["scores"] == pytest.approx({**found["scores"], **scores}, rel=1e-4)
        assert found["labels"] == json.loads((output / name / "results.json").read_text())["labels"]


def test_poolers_of_their_own(encoder, data, tmp_path):
    names = ["two_classes", "three"]
    run(stream, "--data", data / "two.classes.jsonl", data / "three.jsonl", "--model_name", encoder, "--output_dir",
        tmp_path, "--use_cpu", "--max_steps", 2, "--learning_rate", 1e-2, "--train_pooler", "true")  # fmt: skip
    rows = json.loads((tmp_path / "stream.json").read_text())
    assert rows[1]["unchanged"] == dict.fromkeys(names, True)
    body = 4 * 2 * (2 * 64 * 32 + 64 + 32 + 2 * 32)
    assert [row["trained"] for row in rows] == [body + 32 * 32 + 32 + 33 * width for width in (2, 3)]
    files = [tmp_path / name / "adapter_model.safetensors" for name in names]
    poolers = [load_file(file)["base_model.model.bert.pooler.dense.weight"] for file in files]
    poolers.append(load_file(encoder / "model.safetensors")["pooler.dense.weight"])
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(poolers, 2))


def test_a_saved_adapter_alone_gives_the_score(encoder, output):
    """On base weights that never saw another task, in plain PyTorch."""
    model = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=3)
    model = PeftModel.from_pretrained(model, output / "three").eval()
    splits = with_validation({"train": Dataset.from_dict({"row": range(96)})}, LABELS["three"])
    rows = splits["validation"]["row"]
    batch = AutoTokenizer.from_pretrained(encoder)([SENTENCES[row] for row in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        classes = model(**batch).logits.argmax(-1)
    right = np.mean([LABELS["three"][row] == "abc"[number] for row, number in zip(rows, classes, strict=True)])
    assert json.loads((output / "three" / "results.json").read_text())["scores"]["three"]["accuracy"] == right


def test_a_change_is_noticed(encoder, data, tmp_path, monkeypatch):
    """A task whose training touches the encoder itself."""
    add_task = stream.add_task

    def careless(model, *rest):
        adapted, tokenizer = add_task(model, *rest)
        if model is not None:
            with torch.no_grad():
                adapted.get_base_model().bert.embeddings.word_embeddings.weight += 1e-3
        return adapted, tokenizer

    monkeypatch.setattr(stream, "add_task", careless)
    files = [data / "two.classes.jsonl", data / "three.jsonl"]
    with pytest.raises(RecipeError, match="outputs have changed with three"):
        run(stream, "--data", *files, "--model_name", encoder, "--output_dir", tmp_path, "--use_cpu", "--max_steps", 1)


@pytest.mark.parametrize(
    ("files", "flags", "message"),
    [
        (["three.jsonl", "three.jsonl"], [], "two of --data are called three"),
        (["three.jsonl"], ["--save_strategy", "epoch"], "leave out --save_strategy"),
        (["three.jsonl"], ["--resume_from_checkpoint", "last"], "leave out --resume_from_checkpoint"),
        (["three.jsonl", "none.jsonl"], [], r"--data must be .*none\.jsonl"),
    ],
)
def test_likely_mistakes(encoder, data, tmp_path, files, flags, message):
    with pytest.raises(RecipeError, match=message):
        run(
            stream,
            "--data",
            *(data / file for file in files),
            "--model_name",
            encoder,
            "--output_dir",
            tmp_path,
            *flags,
        )


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"])
def test_sharding_is_refused_before_anything_is_loaded(monkeypatch, variable):
    """By what `accelerate launch` tells the processes; the data are not even there."""
    monkeypatch.setenv(variable, "true")
    with pytest.raises(RecipeError, match=r"neither DeepSpeed nor FSDP supports: .*ddp.yaml"):
        run(stream, "--data", "none.csv")


def test_results_are_not_lost_unasked(encoder, data, tmp_path):
    flags = ["--model_name", encoder, "--output_dir", tmp_path, "--use_cpu", "--max_steps", 1]
    run(stream, "--data", data / "three.jsonl", *flags)
    before = (tmp_path / "three" / "adapter_model.safetensors").read_bytes()
    again = ["--data", data / "two.classes.jsonl", data / "three.jsonl", *flags, "--learning_rate", 1e-2]
    with pytest.raises(RecipeError, match=r"already results in .*stream.json.* or --overwrite_output_dir"):
        run(stream, *again)
    (tmp_path / "stream.json").unlink()  # as if it had been killed before the end
    with pytest.raises(RecipeError, match=r"already results in .*three.results.json"):
        run(stream, *again)
    assert (tmp_path / "three" / "adapter_model.safetensors").read_bytes() == before
    run(stream, *again, "--overwrite_output_dir")
    assert (tmp_path / "three" / "adapter_model.safetensors").read_bytes() != before
    assert [row["task"] for row in json.loads((tmp_path / "stream.json").read_text())] == ["two_classes", "three"]


def test_a_score_that_a_later_task_lacks_is_refused_before_any_training(encoder, data, tmp_path):
    (tmp_path / "stream.json").write_text("[]")
    with pytest.raises(RecipeError, match=r"must be one of main, spearmanr, .*, got 'macro_f1'"):
        run(stream, "--data", data / "three.jsonl", data / "grade.jsonl", "--model_name", encoder, "--output_dir",
            tmp_path, "--use_cpu", "--max_steps", 1, "--metric_for_best_model", "macro_f1",
            "--overwrite_output_dir")  # fmt: skip
    assert list(tmp_path.iterdir()) == [tmp_path / "stream.json"]
