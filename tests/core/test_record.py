"""The record of what a version computes: equal when nothing changes, and unequal when a single weight does."""

from __future__ import annotations

import json

import pytest
import torch

import record
import record_cases
from record_cases import CASES


SAMPLE = ("grid/bert/share 3, norms all", "mixed/gpt2", "options/home-made/own", "task_bank")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record")
    record.run({name: CASES[name] for name in SAMPLE}).save(folder)
    return folder


def test_two_records_of_one_version_are_equal(folder, tmp_path, capsys):
    record.run({name: CASES[name] for name in SAMPLE}).save(tmp_path)
    entries = json.loads((tmp_path / record.ENTRIES_FILE).read_text())["entries"]
    assert {name for name in SAMPLE if any(entry.startswith(f"{name}/") for entry in entries)} == set(SAMPLE)
    assert not [name for name in entries if name.endswith("/error")]
    assert record.main(["compare", str(folder), str(tmp_path)]) == 0
    assert capsys.readouterr().out == "0 entries differ.\n"


def test_a_changed_weight_is_noticed_wherever_it_matters(folder, tmp_path, monkeypatch, capsys):
    name = SAMPLE[0]
    noise = record_cases.noise

    def changed(key, like, seed=1):
        result = noise(key, like, seed)
        if key.endswith("encoder.layer.0.attention.output.dropout.houlsby_adapter.up_proj.bias"):
            result[3] += 1e-3
        return result

    monkeypatch.setattr(record_cases, "noise", changed)
    record.run({name: CASES[name] for name in SAMPLE}).save(tmp_path)
    assert record.main(["compare", str(folder), str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    file = "file/weights/base_model.model.bert.encoder.layer.0.attention.output.dropout.houlsby_adapter.up_proj.bias"
    assert f"{name}/{file}: max abs difference 0.0002, in 1 of 16 values" in lines
    assert {line.partition(": ")[0].removeprefix(f"{name}/") for line in lines} >= {
        "perturbed/logits",
        "loaded/logits",
    }
    assert not [line for line in lines if line.startswith((f"{name}/base/", f"{name}/fresh/", "mixed", "options"))]


def test_every_kind_of_difference_is_named(tmp_path):
    one, other = record.Record(), record.Record()
    for number, part in enumerate((one, other)):
        part.put("equal", torch.tensor([1.0, float("-inf")]))
        part.put("values", torch.tensor([1.0, float("-inf"), 2.0 + number]))
        part.put("shapes", torch.zeros(2 + number))
        part.put("numbers", [number])
        part.put("error" if number else "missing", "ValueError")
    with pytest.raises(ValueError, match="got 'equal' twice"):
        one.put("equal", 1)
    one.save(tmp_path / "one")
    other.save(tmp_path / "other")
    assert record.compare(tmp_path / "one", tmp_path / "other") == [
        f"error: only in {tmp_path / 'other'}",
        f"missing: only in {tmp_path / 'one'}",
        "numbers: [0] and [1]",
        "shapes: [2] of torch.float32 and [3] of torch.float32",
        "values: max abs difference 1, in 1 of 3 values",
    ]


def test_an_error_ends_its_case_only(capsys):
    def fails(part, folder):
        part.put("before", 1)
        raise KeyError("what")

    entries = record.run({"fails": fails, "works": lambda part, folder: part.put("after", 2)}).entries
    assert entries == {"fails/before": 1, "fails/error": "KeyError", "works/after": 2}
    assert "fails: KeyError: 'what'" in capsys.readouterr().err
