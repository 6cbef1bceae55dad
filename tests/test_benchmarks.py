"""The benchmark runs, and its counts and comparisons are correct. The times are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from methods import FLOOR, METHODS, OURS
from models import SHAPES, build, flops, inputs, saved_bytes
from padding import padding
from timing import compared


RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"


def test_floating_point_operations_of_the_floor_and_of_adapters_by_hand():
    shape, tokens = SHAPES["tiny"], 4 * 16
    d, layers, r = shape["hidden_size"], shape["num_hidden_layers"], 64
    given = inputs(4, 16)
    products = tokens * layers * (4 * d * d + 2 * d * shape["intermediate_size"])
    head = 4 * (d * d + 2 * d)
    models = {name: build("tiny", METHODS[name]).eval() for name in (FLOOR, OURS)}
    forward = {name: flops(lambda model=model: model(**given)) for name, model in models.items()}
    assert forward[FLOOR] == 2 * (products + head)
    assert forward[OURS] - forward[FLOOR] == 2 * tokens * layers * 2 * 2 * d * r


def test_bytes_saved_for_backward_by_hand():
    model = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2, bias=False))
    model.forward = lambda x: nn.Sequential.forward(model, x)
    # The model's input, and the activation's input and output. Weights do not count.
    assert saved_bytes(model, {"x": torch.randn(3, 8)}) == 4 * (3 * 8 + 3 * 4 + 3 * 4)


def test_ratios_of_the_minima_and_of_each_round():
    found = compared({"floor": [1.0, 2.0, 4.0], "ours": [1.5, 2.0, 8.0]}, "floor")["ours"]
    assert found["min_s"] == 1.5
    assert found["median_s"] == 2.0
    assert found["ratio_of_minima"] == 1.5
    assert found["median_ratio"] == 1.5
    assert found["ratio_range"] == [1.0, 2.0]


def test_the_share_of_padding_by_hand():
    # Batches of 2 x 4 and 2 x 3 tokens, of which 10 belong to texts.
    assert padding([1, 2, 3, 4], [0, 3, 1, 2], batch=2) == pytest.approx(1 - 10 / 14)
    assert padding([5, 5, 5], [2, 0, 1], batch=2) == 0


@pytest.mark.slow
def test_the_quick_benchmark_writes_its_tables_and_a_chart(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the chart, is not installed")
    output = tmp_path / "quick.json"
    command = [sys.executable, str(RUN), "--quick", "--rounds", "1", "--output", str(output)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result = json.loads(output.read_text())
    assert result.keys() == {"machine", "steps", "sizes", "tasks", "held", "imports", "actions", "export"}
    assert result["machine"]["torch"] == torch.__version__
    peaks = {row["method"]: row["peak_bytes"] for row in result["steps"] if row["phase"] == "train"}
    assert peaks["full fine-tuning"] > peaks[OURS]
    for row in result["steps"]:
        assert row["method"] in printed
        low, high = row["ratio_range"]
        assert low <= row["median_ratio"] <= high
    assert output.with_suffix(".png").stat().st_size > 10_000
