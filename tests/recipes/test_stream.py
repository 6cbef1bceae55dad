"""Tasks in sequence on one encoder: nothing that was learned changes, and the sizes are what they
must be.
"""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch

import stream
from demo import minimal_pairs
from houlsby_peft import load
from recipe_runs import results_of, run
from run.edge import RecipeError


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
def flags(encoder, data):
    """Tasks of unlike kinds and widths."""
    files = [data / f"{name}.jsonl" for name in LABELS]
    return {"data": files, "model_name": encoder, "max_steps": 4, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def output(tmp_path_factory, flags):
    folder = tmp_path_factory.mktemp("run")
    run(stream, **flags, output_dir=folder)
    return folder


def test_nothing_is_forgotten_and_the_model_grows_by_what_a_task_trains(output):
    rows = json.loads((output / "stream.json").read_text())
    assert [row["task"] for row in rows] == list(LABELS)
    assert all(row["unchanged"] for row in rows)
    body = 4 * 2 * (2 * 64 * 32 + 64 + 32 + 2 * 32)
    assert [row["trained"] for row in rows] == [body + 33 * width for width in (2, 3, 5, 1)]


def test_the_same_command_goes_on(output, flags, capsys):
    (output / "grade" / "results.json").unlink()
    table = (output / "stream.json").read_text()
    run(stream, **flags, output_dir=output)
    assert capsys.readouterr().out.count("nothing is trained") == 3
    assert (output / "stream.json").read_text() == table


def test_saved_adapters_are_scored_again(output, flags, tmp_path):
    run(stream, data=flags["data"], evaluate=output, output_dir=tmp_path)
    for name in LABELS:
        scores = json.loads((tmp_path / name / "evaluation.json").read_text())["scores"]
        expected = results_of(output / name)["best_scores"]  # with the loss of standardized grades
        assert scores == pytest.approx({**expected, "loss": scores["loss"]}, rel=1e-4)


def test_a_change_is_noticed(encoder, data, tmp_path, monkeypatch):
    """An adapter whose loading touches the encoder itself."""

    def careless(folder, beside=None):
        adapter = load(folder, beside=beside)
        if beside is not None:
            with torch.no_grad():
                adapter.model.get_base_model().bert.embeddings.word_embeddings.weight += 1e-3
        return adapter

    monkeypatch.setattr(stream.houlsby_peft, "load", careless)
    files = [data / "two.classes.jsonl", data / "three.jsonl"]
    with pytest.raises(RecipeError, match="three differ"):
        run(stream, data=files, model_name=encoder, output_dir=tmp_path, max_steps=1)


@pytest.mark.parametrize(
    ("tasks", "flags", "word"),
    [
        (["three", "three"], {}, "got only three"),
        (["three"], {"method": "full"}, "--method houlsby"),
        (["three", "grade"], {"metric_for_best_model": "macro_f1"}, "'macro_f1'"),
    ],
)
def test_mistakes_are_found_before_any_training(encoder, data, tmp_path, tasks, flags, word):
    files = [data / f"{task}.jsonl" for task in tasks]
    with pytest.raises(RecipeError, match=word):
        run(stream, data=files, model_name=encoder, output_dir=tmp_path, **flags)
    assert not list(tmp_path.iterdir())
