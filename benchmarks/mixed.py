"""Measure batches whose rows use different adapters: one to many of them, and others than in the
batch before.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, BertModel

from houlsby_peft import HoulsbyConfig, HoulsbyLayer, HoulsbyLayerNorm
from houlsby_peft.batching.slots import Slots
from houlsby_peft.heads.head import HoulsbyHead
from houlsby_peft.method.tuner_layer import state_of
from houlsby_peft.predict.graphs import use_graphs
from methods import METHODS, OURS
from models import SHAPES, Method
from report import Rows
from timing import compared, interleaved


COMPARED = (OURS, f"{OURS}, 3-shared", "LoRA r=8, all linear layers")
# A batch of other adapters uses the next of this many sets.
SETS = 8


def by_tasks(shape: str, rows: int, length: int, rounds: int, device: str) -> Rows:
    """Measure an evaluation whose rows use 1 to `rows` adapters, relative to one adapter."""
    numbers = [2**power for power in range(rows.bit_length())]
    ids = torch.randint(0, 30522, (rows, length), device=device)
    result: Rows = []
    for method in COMPARED:
        model = with_each_added(shape, METHODS[method], max(numbers)).to(device).eval()
        calls = {number: partial(evaluate, model, ids, spread(rows, number)) for number in numbers}
        found = compared(interleaved(calls, rounds, device), 1)
        result += [{"method": method, "tasks": number, **row} for number, row in found.items()]
    return result


def after_a_change(shape: str, rows: int, length: int, rounds: int, device: str) -> Rows:
    """Measure batches of other adapters than before, as a service has them, and of the same,
    relative to one adapter.

    Each row has an adapter of its own. The model holds eight times as many in slots, as a
    `TaskBank` does, and the sets take turns.
    """
    model = with_slots(shape, SETS * rows, torch.float32, device)
    ids = torch.randint(0, 30522, (rows, length), device=device)
    sets = [[f"task_{first + row}" for row in range(rows)] for first in range(0, SETS * rows, rows)]
    turns = itertools.cycle(sets)
    calls = {
        "one adapter": partial(evaluate, model, ids, sets[0][:1] * rows),
        "other adapters": lambda: evaluate(model, ids, next(turns)),
        "the same adapters": partial(evaluate, model, ids, sets[0]),
    }
    found = compared(interleaved(calls, rounds, device), "one adapter")
    return [
        {"shape": shape, "rows": rows, "tokens": length, "batch": name, **row}
        for name, row in found.items()
    ]


def by_number(
    cell: tuple[str, int, int],
    numbers: Sequence[int],
    dtype: torch.dtype,
    device: str,
    rounds: int,
    at_most: float,
) -> Iterator[dict[str, Any]]:
    """Measure batches of 1 to many adapters in slots, each time other ones, interleaved with a
    batch of one adapter: plain, and as CUDA graphs.

    Args:
        cell: Shape, batch size and length.
        numbers: Numbers of adapters, at most one per row. Rows are spread evenly over them.
        dtype: Dtype of the base model; the adapters are float32.
        device: "cpu" or "cuda".
        rounds: Number of rounds.
        at_most: See `interleaved`; for each number.
    """
    shape, rows, length = cell
    held = 2 * max(numbers)
    model = with_slots(shape, held, dtype, device)
    ids = torch.randint(0, 30522, (rows, length), device=device)
    one = partial(evaluate, model, ids, ["task_0"] * rows)
    facts = {"shape": shape, "rows": rows, "tokens": length}
    for way, number in itertools.product(("plain", "CUDA graphs"), numbers):
        if way == "CUDA graphs":
            use_graphs(model)
        firsts = range(0, held - number + 1, number)
        turns = itertools.cycle(spread(rows, number, first) for first in firsts)
        calls = {"one": one, "several": lambda turns=turns: evaluate(model, ids, next(turns))}
        found = compared(interleaved(calls, rounds, device, at_most), "one")
        one_s = found["one"]["median_s"]
        yield {**facts, "way": way, "adapters": number, "one_s": one_s, **found["several"]}


def spread(rows: int, number: int, first: int = 0) -> list[str]:
    """Return the adapter of each row, the rows of an adapter together, each with equally many."""
    return [f"task_{first + row * number // rows}" for row in range(rows)]


def with_slots(shape: str, number: int, dtype: torch.dtype, device: str = "cpu") -> PeftModel:
    """Return a BERT classifier with float32 adapters of random weights in slots, task_0 and so on,
    each with its head, as a `TaskBank` holds them.
    """
    torch.manual_seed(0)
    with torch.device(device):
        base = BertForSequenceClassification(BertConfig(**SHAPES[shape])).to(dtype)
        model = get_peft_model(base, HoulsbyConfig(r=64), adapter_name="of_modules").eval()
    modules, heads = {}, []
    for layer in model.modules():
        if isinstance(layer, (HoulsbyLayer, HoulsbyLayerNorm)):
            modules[layer] = layer.module_of("of_modules")
        elif isinstance(layer, HoulsbyHead):
            heads.append(layer.modules_to_save)
    slots, records = Slots(modules), state_of(model).records
    for task in range(number):
        weights = []
        for layer, module in modules.items():
            for name, weight in module.named_parameters():
                changed = weight + 0.01 * torch.randn_like(weight)
                weights.append((slots.stacks[layer], name, changed))
        slots.put(f"task_{task}", weights)
        for head in heads:
            head[f"task_{task}"] = copy.deepcopy(head["of_modules"])
        records[f"task_{task}"] = records["of_modules"]
    return model


def with_adapters(
    shape: str, number: int, dtype: torch.dtype, device: str = "cpu", **options: object
) -> PeftModel:
    """Return a BERT with float32 adapters of random weights, task_0 and so on, in evaluation mode.

    They are put into the layers directly: PEFT's `add_adapter` visits all modules for each.
    """
    torch.manual_seed(0)
    with torch.device(device):
        base = BertModel(BertConfig(**SHAPES[shape]), add_pooling_layer=False).to(dtype)
        model = get_peft_model(base, HoulsbyConfig(**{"r": 64, **options}), adapter_name="task_0")
        layers = [
            module
            for module in model.modules()
            if isinstance(module, (HoulsbyLayer, HoulsbyLayerNorm))
        ]
        for added in (
            getattr(layer, name) for layer in layers for name in layer.adapter_layer_names
        ):
            for name in (f"task_{task}" for task in range(1, number if "task_0" in added else 1)):
                added[name] = copy.deepcopy(added["task_0"])
                for weight in added[name].parameters():
                    weight.data += 0.01 * torch.randn_like(weight)
    for task in range(1, number):
        for of_adapters in (model.peft_config, state_of(model).records):
            of_adapters[f"task_{task}"] = of_adapters["task_0"]
    return model.eval()


@torch.inference_mode()
def evaluate(model: PeftModel, ids: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """Return the last hidden states or the logits of rows of the given adapters."""
    outputs: torch.Tensor = model(input_ids=ids, adapter_names=names)[0]
    return outputs


def with_each_added(shape: str, method: Method, number: int) -> PeftModel:
    """Return a BERT with the adapters task_0 and so on, as `add_adapter` makes them."""
    torch.manual_seed(0)
    model = method(BertModel(BertConfig(**SHAPES[shape]), add_pooling_layer=False))
    for name in range(number):
        model.add_adapter(f"task_{name}", copy.copy(model.peft_config["default"]))
    return model
