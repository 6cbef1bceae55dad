"""A ladder that is trained on the kept hidden states of its encoder."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bert.modeling_bert import BertLayer

import glue
from common.edge import RecipeError
from houlsby_peft.state_cache import StateFile
from recipe_runs import results_of, run


FLAGS = ("--task", "cola", "--num_train_epochs", "3", "--learning_rate", "3e-3", "--use_cpu")


def train(encoder, data, output, *flags: str) -> dict:
    """Train a ladder; return the content of results.json."""
    folders = ("--model_name", encoder, "--data_dir", data, "--output_dir", output)
    run(glue, *FLAGS, *map(str, folders), "--kind", "ladder", "--r", "8", *flags)
    return results_of(output)


def test_scores_are_those_of_the_encoder_which_reads_each_text_once(
    encoder, glue_data, tmp_path, monkeypatch
):
    """In two runs, whose texts are the same."""
    texts_of_encoder = 0
    forward = BertLayer.forward

    def count(layer, hidden, *args, **kwargs):
        nonlocal texts_of_encoder
        texts_of_encoder += len(hidden)
        return forward(layer, hidden, *args, **kwargs)

    expected = train(encoder, glue_data, tmp_path / "plain")
    monkeypatch.setattr(BertLayer, "forward", count)
    states = ("--cache_states", str(tmp_path / "states"))
    first = train(encoder, glue_data, tmp_path / "first", *states)
    passes, texts_of_encoder = texts_of_encoder, 0
    second = train(encoder, glue_data, tmp_path / "second", *states)

    for results in (first, second):
        for epoch, epoch_without in zip(results["epochs"], expected["epochs"], strict=True):
            assert epoch["loss"] == pytest.approx(epoch_without["loss"], abs=2e-3)
    # Each of the 144 texts by three layers once; by the last one in each epoch and in the end.
    last = 3 * 144 + 48
    assert passes == 3 * 144 + last
    # One batch tells what a layer returns.
    assert texts_of_encoder <= 3 * 32 + last


def test_other_adapters_change_what_is_kept(encoder, glue_data, tmp_path):
    folders = (encoder, glue_data, tmp_path / "run")
    with pytest.raises(RecipeError, match="needs --kind ladder"):
        train(*folders, "--kind", "houlsby", "--cache_states", str(tmp_path / "states"))


def test_killed_writer(tmp_path):
    path, states = tmp_path / "a.states", torch.randn(3, 2, 4).half()
    StateFile(path, (2, 4), torch.float16).add({b"a" * 16: states})
    complete = path.read_bytes()
    StateFile(path, (2, 4), torch.float16).add({b"b" * 16: states})
    path.write_bytes(path.read_bytes()[:-1])

    file = StateFile(path, (2, 4), torch.float16)

    assert b"b" * 16 not in file
    assert torch.equal(file.read(b"a" * 16), states)
    assert path.read_bytes() == complete


def test_two_writers(tmp_path):
    """Neither overwrites what the other has added since both have opened the file."""
    path = tmp_path / "a.states"
    files = [StateFile(path, (1, 2), torch.float16) for _ in range(2)]
    for number, file in enumerate(files):
        file.add({bytes([number]) * 16: torch.full((2, 1, 2), number).half()})

    both = StateFile(path, (1, 2), torch.float16)

    assert [float(both.read(bytes([number]) * 16)[0, 0, 0]) for number in range(2)] == [0, 1]
