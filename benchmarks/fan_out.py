"""Measure one text with many tasks: the lower half once, against a row for each task and against
LoRA.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel

from methods import lora as lora_of
from mixed import evaluate, with_adapters, with_each_added
from models import SHAPES
from report import Rows
from timing import compared, interleaved


def by_tasks_of_a_text(
    shape: str, length: int, numbers: Sequence[int], rounds: int, device: str, at_most: float
) -> Rows:
    """Measure one text with 1 to many tasks, relative to a batch that repeats the text for each.

    The adapters have r=64 and are in the upper half of the layers. LoRA has r=8, on query and value
    in all layers.

    Args:
        shape: A name of `SHAPES`.
        length: Tokens of the text.
        numbers: Numbers of tasks.
        rounds: Number of rounds.
        device: "cpu" or "cuda".
        at_most: See `interleaved`; for each number.

    Returns:
        A row for each number and way. `expected` is the share of layers that run: ((L - k) + N k) /
            (N L).
    """
    depth = SHAPES[shape]["num_hidden_layers"]
    upper = range(depth - depth // 2, depth)
    adapters = with_adapters(
        shape, max(numbers), torch.float32, device, layers_to_transform=list(upper)
    )
    lora = with_each_added(shape, lora_of(8, ["query", "value"]), max(numbers)).to(device).eval()
    text = torch.randint(0, 30522, (1, length), device=device)
    result: Rows = []
    for number in numbers:
        names, rows = [f"task_{task}" for task in range(number)], text.expand(number, -1)
        calls = {
            "repeated": partial(evaluate, adapters, rows, names),
            "fan-out": partial(evaluate, adapters, text, [names]),
            "separate passes": partial(_evaluate_each, adapters, text, names),
            "LoRA, separate passes": partial(_evaluate_each, lora, text, names),
            "LoRA, mixed batch": partial(evaluate, lora, rows, names),
        }
        torch.testing.assert_close(calls["fan-out"](), calls["repeated"](), rtol=0, atol=1e-5)
        expected = {"fan-out": (depth - len(upper) + number * len(upper)) / (number * depth)}
        found = compared(interleaved(calls, rounds, device, at_most), "repeated")
        one = {"shape": shape, "tokens": length, "tasks": number}
        result += [
            {**one, "way": way, **row, "expected": expected.get(way)} for way, row in found.items()
        ]
    return result


@torch.inference_mode()
def _evaluate_each(model: PeftModel, ids: torch.Tensor, names: Sequence[str]) -> None:
    for name in names:
        model.set_adapter(name)
        model(input_ids=ids)


def draw(rows: Rows, path: str) -> None:
    """Draw the time of each way, in passes of LoRA with one task, against the number of tasks."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(4.4, 3.2), layout="constrained")
    one = next(
        row["median_s"]
        for row in rows
        if row["way"] == "LoRA, separate passes" and row["tasks"] == 1
    )
    colors = {
        "LoRA, separate passes": "#D55E00",
        "LoRA, mixed batch": "#E69F00",
        "repeated": "#56B4E9",
        "fan-out": "#0072B2",
    }
    for way, color in colors.items():
        own = [row for row in rows if row["way"] == way]
        label = {"repeated": "adapters, text repeated", "fan-out": "adapters, lower half once"}.get(
            way, way
        )
        points = [row["tasks"] for row in own], [row["median_s"] / one for row in own]
        axes.plot(
            *points, "o--" if way == "repeated" else "o-", markersize=3.5, color=color, label=label
        )
    axes.set(
        xlabel="tasks of one text", ylabel="time, in passes of LoRA", xlim=(0, None), ylim=(0, None)
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=200)


if __name__ == "__main__":  # python benchmarks/fan_out.py benchmark.json fan_out.png
    draw(json.loads(Path(sys.argv[1]).read_text())["fan_out"], sys.argv[2])
