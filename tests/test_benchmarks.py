"""The benchmark's counts and comparisons are correct. The times are not tested."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import gpu
import mixed
from methods import FLOOR, METHODS, OURS
from models import SHAPES, build, flops, inputs, saved_bytes
from timing import compared


def test_floating_point_operations_of_the_floor_and_of_adapters_by_hand():
    shape, tokens = SHAPES["tiny"], 4 * 16
    d, layers, r = shape["hidden_size"], shape["num_hidden_layers"], 64
    batch = inputs(4, 16)
    products = tokens * layers * (4 * d * d + 2 * d * shape["intermediate_size"])
    head = 4 * (d * d + 2 * d)
    models = {name: build("tiny", METHODS[name]).eval() for name in (FLOOR, OURS)}
    forward = {name: flops(lambda model=model: model(**batch)) for name, model in models.items()}
    assert forward[FLOOR] == 2 * (products + head)
    assert forward[OURS] - forward[FLOOR] == 2 * tokens * layers * 2 * 2 * d * r


def test_bytes_saved_for_backward_by_hand():
    model = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2, bias=False))
    model.forward = lambda x: nn.Sequential.forward(model, x)
    # The model's input, and the activation's input and output. Weights do not count.
    assert saved_bytes(model, {"x": torch.randn(3, 8)}) == 4 * (3 * 8 + 3 * 4 + 3 * 4)


def test_ratios_of_the_minima_and_of_each_round():
    comparison = compared({"floor": [1.0, 2.0, 4.0], "ours": [1.5, 2.0, 8.0]}, "floor")["ours"]
    assert comparison["min_s"] == 1.5
    assert comparison["median_s"] == 2.0
    assert comparison["ratio_of_minima"] == 1.5
    assert comparison["median_ratio"] == 1.5
    assert comparison["ratio_range"] == [1.0, 2.0]


def failing(error):
    def rows():
        yield {"figure": 1}
        raise error

    return rows


def test_what_is_not_measured_is_named_and_a_second_run_measures_it(tmp_path):
    facts = {"gpu": "H100", "torch": "2.13", "houlsby_peft": "abc"}
    jobs = [
        ("too large", failing(torch.OutOfMemoryError("Tried to allocate 1 GiB"))),
        ("broken", failing(ValueError("a mistake"))),
        ("small", lambda: [{"figure": 2}]),
    ]
    assert gpu.work(jobs, gpu.read(tmp_path, facts), tmp_path, deadline=float("inf")) == 1
    assert (
        gpu.work(
            [("late", failing(AssertionError))], gpu.read(tmp_path, facts), tmp_path, deadline=0
        )
        == 0
    )
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["measured"] == {"small": [{"figure": 2}]}
    reasons = {name: reason.partition(":")[0] for name, reason in result["left out"].items()}
    assert reasons == {"too large": "out of memory", "broken": "failed", "late": "no time left"}
    again = [
        ("small", failing(AssertionError)),
        *((name, lambda: [{"figure": 3}]) for name in reasons),
    ]
    assert gpu.work(again, gpu.read(tmp_path, facts), tmp_path, deadline=float("inf")) == 0
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["measured"] == {"small": [{"figure": 2}]} | {
        name: [{"figure": 3}] for name in reasons
    }
    assert not result["left out"]
    with pytest.raises(SystemExit, match="another GPU"):
        gpu.read(tmp_path, {**facts, "gpu": "H200"})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_adapters_in_slots_are_those_of_their_rows(device):
    model = mixed.with_slots("tiny", 3, torch.bfloat16, device)
    ids = torch.randint(0, 30522, (4, 7), device=device)
    names = ["task_2", "task_0", "task_0", "of_modules"]
    together = mixed.evaluate(model, ids, names).float()
    for row, name in enumerate(names):
        alone = mixed.evaluate(model, ids[row : row + 1], [name]).float()
        torch.testing.assert_close(together[row], alone[0], atol=0.05, rtol=0.05)
