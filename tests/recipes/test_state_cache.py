"""A ladder that is trained on the kept hidden states of its encoder."""

from __future__ import annotations

import copy
import os
import shutil

import pandas as pd
import pytest
import torch
from peft import get_peft_model
from transformers.models.bert.modeling_bert import BertLayer

import glue
from architecture_cases import CASES
from houlsby_peft import AdapterError, HoulsbyConfig, StateCache
from houlsby_peft.training.state_cache import StateFile
from recipe_runs import results_of, run
from run.edge import RecipeError
from tiny_models import adapted, tiny_bert


def train(encoder, data, output, **flags) -> dict:
    """Train a ladder; return the content of results.json."""
    run(glue, task="cola", model_name=encoder, data_dir=data, output_dir=output,
        num_train_epochs=3, learning_rate=3e-3, r=8, **{"kind": "ladder", **flags})  # fmt: skip
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
    states = tmp_path / "states"
    first = train(encoder, glue_data, tmp_path / "first", cache_states=states)
    passes, texts_of_encoder = texts_of_encoder, 0
    second = train(encoder, glue_data, tmp_path / "second", cache_states=states)

    for results in (first, second):
        for epoch, epoch_without in zip(results["epochs"], expected["epochs"], strict=True):
            assert epoch["loss"] == pytest.approx(epoch_without["loss"], abs=2e-3)
    # Each of the 144 texts by three layers once; by the last one in each epoch and in the end.
    last = 3 * 144 + 48
    assert passes == 3 * 144 + last
    # One batch tells what a layer returns.
    assert texts_of_encoder <= 3 * 32 + last


@pytest.mark.parametrize(
    ("flags", "word"),
    [({"kind": "houlsby"}, "--kind ladder"), ({"cuda_graphs": True}, "--cuda_graphs False")],
)
def test_what_does_not_go_together(flags, word, encoder, glue_data, tmp_path, monkeypatch):
    monkeypatch.setattr("run.training_arguments.RecipeTrainingArguments._check_cuda_graphs", bool)
    with pytest.raises(RecipeError, match=word):
        train(encoder, glue_data, tmp_path, cache_states=tmp_path / "states", **flags)


@pytest.mark.parametrize(
    "options", [{"kind": "houlsby"}, {"kind": "ladder", "modules_to_save": ["word_embeddings"]}]
)
def test_what_changes_the_kept_states_is_refused(options, tmp_path):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=8, **options))
    with pytest.raises(AdapterError, match="must be one ladder"):
        StateCache(model, tmp_path)


def test_a_test_split_is_not_kept(encoder, glue_data, tmp_path):
    """It is read once, and may be many times as large as the rest."""
    shutil.copytree(glue_data, tmp_path / "data")
    folder = tmp_path / "data" / "cola"
    table = pd.read_csv(folder / "validation.csv")
    table["sentence"] = table["sentence"] + " again"
    table.to_csv(folder / "test.csv", index=False)
    states = tmp_path / "states"
    train(encoder, tmp_path / "data", tmp_path / "run", cache_states=states, predict=True)

    assert (tmp_path / "run" / "submission" / "CoLA.tsv").exists()
    [path] = states.iterdir()
    texts = set()
    for name in ("train", "validation"):
        texts.update(pd.read_csv(folder / f"{name}.csv")["sentence"])
    assert len(StateFile(path, (3, 32), torch.float16)._entries) == len(texts)


@torch.no_grad()
def test_damaged_states_are_read_anew(tmp_path):
    """A flipped bit, a text of zeros and a wrong number of tokens; then the cache is taken off."""
    model, inputs = with_ladder("bert"), CASES["bert"].batch(3)
    expected = model(**inputs).last_hidden_state
    cache = StateCache(model, tmp_path)
    model(**inputs)
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[60] ^= 64
    for damaged in (
        bytes(flipped),
        whole[:24] + bytes(len(whole) - 24),
        whole[:16] + b"\1" + whole[17:],
    ):
        path.write_bytes(damaged)
        torch.testing.assert_close(
            model(**inputs).last_hidden_state, expected, atol=2e-3, rtol=2e-3
        )
    cache.close()
    path.unlink()
    assert torch.equal(model(**inputs).last_hidden_state, expected)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_a_full_disk_ends_no_training(tmp_path, monkeypatch):
    model, inputs = with_ladder("bert"), CASES["bert"].batch(3)
    expected = model(**inputs).last_hidden_state
    StateCache(model, tmp_path)

    def fail(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.warns(UserWarning, match="No further hidden states are kept: No space left"):
        torch.testing.assert_close(model(**inputs).last_hidden_state, expected)


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "a.states").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic"):
        StateFile(tmp_path / "a.states", (1, 2), torch.float16)
    assert (tmp_path / "mine").read_bytes() == b"mine"


def with_other_positions(encoder):
    encoder.embeddings.position_ids.copy_(encoder.embeddings.position_ids.flip(1))


def with_another_activation(encoder):
    encoder.encoder.layer[0].intermediate.intermediate_act_fn = torch.nn.ReLU()


def with_another_epsilon(encoder):
    encoder.config.layer_norm_eps = 0.5
    for norm in encoder.modules():
        if isinstance(norm, torch.nn.LayerNorm):
            norm.eps = 0.5


@torch.no_grad()
@pytest.mark.parametrize(
    "change", [with_other_positions, with_another_activation, with_another_epsilon]
)
def test_states_of_an_encoder_that_computes_otherwise_are_others(change, tmp_path):
    """Of the same weights, whatever else it differs in."""
    model, inputs = with_ladder("bert"), CASES["bert"].batch(3)
    other = copy.deepcopy(model)
    change(other.get_base_model())
    expected = other(**inputs).last_hidden_state
    for cached in (model, other):
        StateCache(cached, tmp_path)
        for _ in range(2):
            states = cached(**inputs).last_hidden_state

    torch.testing.assert_close(states, expected, atol=2e-3, rtol=2e-3)


def test_two_writers(tmp_path):
    """Neither overwrites what the other has added since both have opened the file."""
    path = tmp_path / "a.states"
    files = [StateFile(path, (1, 2), torch.float16) for _ in range(2)]
    for number, file in enumerate(files):
        file.add({bytes([number]) * 16: torch.full((2, 1, 2), number).half()})

    both = StateFile(path, (1, 2), torch.float16)

    assert [float(both.read(bytes([number]) * 16, 2)[0, 0, 0]) for number in range(2)] == [0, 1]


def with_ladder(case):
    """An encoder of an architecture with a ladder."""
    return adapted(CASES[case].model(), r=8, kind="ladder")


@torch.no_grad()
@pytest.mark.parametrize("case", ["bert", "mpnet", "deberta-v2:v3", "modernbert", "distilbert"])
def test_kept_states_are_those_of_each_encoder(case, tmp_path):
    """Whatever its layers return."""
    model, inputs = with_ladder(case), CASES[case].batch(3)
    expected = model(**inputs).last_hidden_state
    StateCache(model, tmp_path)
    for _ in range(2):
        torch.testing.assert_close(
            model(**inputs).last_hidden_state, expected, atol=2e-3, rtol=2e-3
        )


@torch.no_grad()
def test_other_positions_are_another_text(tmp_path):
    """Given ones, and those of padding on the left."""
    model = with_ladder("bert")
    cached = copy.deepcopy(model)
    StateCache(cached, tmp_path)
    ids, mask = torch.arange(5, 11)[None], torch.ones(1, 6, dtype=torch.long)
    padding = torch.zeros(1, 3, dtype=torch.long)
    on_the_left = {
        "input_ids": torch.cat([padding, ids], 1),
        "attention_mask": torch.cat([padding, mask], 1),
    }
    given = {"input_ids": ids, "position_ids": torch.arange(6)[None] + 3}
    for inputs in ({"input_ids": ids, "attention_mask": mask}, on_the_left, given):
        expected = model(**inputs).last_hidden_state
        torch.testing.assert_close(cached(**inputs).last_hidden_state, expected)


@torch.no_grad()
def test_states_in_another_precision_are_others(tmp_path):
    """Those of a run with autocast, in the file of one without."""
    model, inputs = with_ladder("bert"), CASES["bert"].batch(3)
    expected = model(**inputs).last_hidden_state
    StateCache(model, tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            model(**inputs)

    torch.testing.assert_close(model(**inputs).last_hidden_state, expected, atol=0, rtol=0)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Hidden states that are too large")
def test_states_too_large_for_the_file(tmp_path):
    model, inputs = with_ladder("bert"), CASES["bert"].batch(3)
    norm = model.get_base_model().encoder.layer[0].output.LayerNorm
    norm.weight *= 1e6
    expected = model(**inputs).last_hidden_state
    assert expected.isfinite().all()
    StateCache(model, tmp_path)
    for _ in range(2):
        torch.testing.assert_close(model(**inputs).last_hidden_state, expected, atol=0, rtol=0)


@pytest.mark.parametrize("left", [slice(10), slice(-1)], ids=["half a header", "half an entry"])
def test_killed_writer_beside_another(left, tmp_path):
    """Which has opened the file before."""
    path, states = tmp_path / "a.states", torch.randn(3, 2, 4).half()
    other = StateFile(path, (2, 4), torch.float16)
    StateFile(path, (2, 4), torch.float16).add({b"a" * 16: states})
    path.write_bytes(path.read_bytes()[left])
    other.add({b"b" * 16: states})

    for file in (other, StateFile(path, (2, 4), torch.float16)):
        assert b"a" * 16 not in file
        assert torch.equal(file.read(b"b" * 16, 3), states)
