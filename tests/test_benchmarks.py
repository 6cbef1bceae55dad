"""The benchmarks' counts, comparisons and computed memory are correct. The times are not tested."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gpu
import memory
import mixed
from houlsby_peft import HoulsbyConfig
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


ADAPTED = {
    "full": None,
    "adapters": HoulsbyConfig(r=16),
    "3-shared, no norms": HoulsbyConfig(r=16, share_layers=3, train_layer_norm=False),
}


def allocated(action: Callable[[], object]) -> int:
    """Bytes that an action allocates on the CPU and does not free."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = action()
    events = profiler.profiler.kineto_results.events()
    del result
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("method", ADAPTED)
@pytest.mark.parametrize("bf16", [False, True])
def test_activations(method, bf16):
    model = memory.build("tiny", ADAPTED[method], **memory.FUSED)

    def forward() -> object:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return model(torch.randint(0, 99, (4, 32)), labels=torch.zeros(4, dtype=torch.long))

    computed = memory.activations("tiny", ADAPTED[method], 4, 32, bf16)
    # The loss and the logits are allocated, but not kept for the backward pass. A bottleneck's
    # operation computes its activation again; fake tensors take the path of the modules.
    assert computed * (0.97 if ADAPTED[method] else 1) - 100 <= allocated(forward) <= computed + 100


@pytest.mark.parametrize("method", ADAPTED)
def test_what_lasts_from_step_to_step(method):
    model = None

    def make() -> object:
        nonlocal model
        model = memory.build("tiny", ADAPTED[method])
        return model

    weights = allocated(make)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad]
    )

    def step() -> None:
        model(
            torch.zeros(2, 8, dtype=torch.long), labels=torch.zeros(2, dtype=torch.long)
        ).loss.backward()
        optimizer.step()

    computed = memory.strategies(memory.sizes(model), 1)["one device"]
    # Besides: BERT's two buffers of positions and AdamW's counters of steps.
    assert weights == pytest.approx(computed["weights"], abs=2 * 8 * 512 + 200)
    assert allocated(step) == pytest.approx(computed["gradients"] + computed["optimizer"], rel=2e-3)


def test_traffic_and_parts():
    """Written out for four devices: rings send three quarters, twice for a sum that all need."""
    exchanged = memory.strategies(memory.Sizes(total=1000, trained=10, largest_unit=100), 4)
    assert exchanged["DDP"]["sent"] == exchanged["ZeRO-2"]["sent"] == 2 * 0.75 * 40
    assert exchanged["FSDP2"]["sent"] == 0.75 * 4000 * 2 + 0.75 * 40
    assert exchanged["one device"]["sent"] == 0
    assert exchanged["ZeRO-3"]["weights"] == 1000
