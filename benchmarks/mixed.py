"""Measure batches whose rows use different adapters: many of them, others than before, and `grouped_mm`."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from peft import PeftModel, get_peft_model
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from graphs import graphed
from houlsby_peft import Bottleneck, HoulsbyConfig
from houlsby_peft.batching import batch as batching
from houlsby_peft.batching import forget_batches, forward
from houlsby_peft.layer import HoulsbyTunerLayer
from methods import LINEAR, houlsby, lora
from models import SHAPES, Method
from timing import compared, interleaved, seconds


Rows = list[dict[str, Any]]
METHODS: dict[str, Method] = {
    "Houlsby r=64": houlsby(r=64),
    "Houlsby r=64, 3-shared": houlsby(r=64, share_layers=3),
    "LoRA r=8, all linear layers": lora(8, LINEAR),
}
# A batch after a change of adapters uses the next of this many sets.
SETS = 8
# The dtype of the base model, and whether the adapters have it as well. Otherwise they are float32.
DTYPES = {
    "float32": (torch.float32, True),
    "bf16 base": (torch.bfloat16, False),
    "bf16 base and adapters": (torch.bfloat16, True),
}


def by_tasks(shape: str, rows: int, length: int, rounds: int, device: str) -> Rows:
    """Measure an evaluation whose rows use 1 to `rows` adapters, in the same or a changed order each time."""
    numbers = [2**power for power in range(rows.bit_length())]
    ids = torch.randint(0, 30522, (rows, length), device=device)
    result = []
    for method, make in METHODS.items():
        model = _with_each_added(shape, make, max(numbers)).to(device).eval()
        # Not interleaved, because the stacked weights of a batch are cached until the next batch.
        times = {}
        for tasks in numbers:
            names = spread(rows, tasks)
            turned = [names[turn:] + names[:turn] for turn in range(1, 4)]
            for order, lists in (("same", [names]), ("changed", turned)):
                call = partial(_evaluate_next, model, ids, itertools.cycle(lists))
                times[tasks, order] = interleaved({"": call}, rounds, device)[""]
        found = compared(times, (1, "same"))
        result += [{"method": method, "tasks": key[0], "rows": key[1], **row} for key, row in found.items()]
    return result


def after_a_change(shape: str, rows: int, length: int, rounds: int, device: str) -> Rows:
    """Measure the first batch with another set of adapters, which stacks their weights, and the same batch again.

    Each row has an adapter of its own. The model has eight times as many, and the sets take turns.
    """
    model = with_adapters(shape, SETS * rows, torch.float32, device=device)
    ids = torch.randint(0, 30522, (rows, length), device=device)
    sets = [[f"task_{first + row}" for row in range(rows)] for first in range(0, SETS * rows, rows)]
    now = sets[0]

    def change() -> None:
        nonlocal now
        now = sets[(sets.index(now) + 1) % SETS]
        evaluate(model, ids, now)

    calls = {
        "the same adapters": lambda: evaluate(model, ids, now),
        "other adapters": change,
        "one adapter": lambda: evaluate(model, ids, sets[0][:1] * rows),
    }
    found = compared(interleaved(calls, rounds, device), "the same adapters")
    return [{"shape": shape, "rows": rows, "tokens": length, "batch": name, **row} for name, row in found.items()]


def by_number(
    cell: tuple[str, int, int],
    numbers: Sequence[int],
    dtype: str,
    ways: Sequence[str],
    device: str,
    rounds: int,
    at_most: float,
) -> Iterator[dict[str, Any]]:
    """Measure batches of 1 to many adapters in some ways of computing them, interleaved with a batch of one adapter.

    Rows are spread evenly over the adapters, and unevenly, where adapter n has about 1/n of the rows of the first.

    Args:
        cell: Shape, batch size and length.
        numbers: Numbers of adapters, at most one per row.
        dtype: A key of `DTYPES`.
        ways: Keys of `WAYS`.
        device: "cpu" or "cuda".
        rounds: Number of rounds.
        at_most: See `interleaved`; for each way and number.
    """
    shape, rows, length = cell
    base, alike = DTYPES[dtype]
    model = with_adapters(shape, max(numbers), base, alike, device)
    ids = torch.randint(0, 30522, (rows, length), device=device)
    one = partial(evaluate, model, ids, ["task_0"] * rows)
    for number, (order, names_of) in itertools.product(numbers, {"even": spread, "uneven": spread_unevenly}.items()):
        if order == "uneven" and number in (1, rows):
            continue
        names = names_of(rows, number)
        for way in ways:
            if number == 1 and way in (UNCHECKED, GROUPED):
                continue
            facts = {"shape": shape, "rows": rows, "tokens": length, "precision": dtype}
            facts |= {"adapters": number, "spread": order, "way": way}
            forget_batches(model.get_base_model())
            try:
                with WAYS[way](model, ids, names) as call:
                    first = seconds(call, device)
                    found = compared(interleaved({"one": one, way: call}, rounds, device, at_most), "one")[way]
            # Also for lack of memory, or of a kernel for this dtype.
            except (NotAvailable, RuntimeError) as error:
                yield {**facts, "note": str(error).splitlines()[0][:100]}
            else:
                yield {**facts, **found, "first_s": first}


class NotAvailable(Exception):
    """A way that this machine or this version of torch does not offer."""


@contextmanager
def _as_it_is(model: PeftModel, ids: torch.Tensor, names: Sequence[str]) -> Iterator[Callable[[], object]]:
    yield partial(evaluate, model, ids, names)


@contextmanager
def _with_grouped_mm(model: PeftModel, ids: torch.Tensor, names: Sequence[str]) -> Iterator[Callable[[], object]]:
    if not hasattr(F, "grouped_mm"):
        raise NotAvailable(f"torch {torch.__version__} has no grouped_mm; 2.10 has")
    # The function that chooses how the bottlenecks of a layer are computed for a batch.
    with patch.object(batching, "_group", ragged):
        yield partial(evaluate, model, ids, names)
    forget_batches(model.get_base_model())


@contextmanager
def _without_check(model: PeftModel, ids: torch.Tensor, names: Sequence[str]) -> Iterator[Callable[[], object]]:
    """Use what is stacked without looking whether the weights have changed, which takes time for each weight."""
    reuse = forward._LastBatch.reuse

    def last(self: Any, names: Sequence[str]) -> batching.MixedBatch:
        batch: batching.MixedBatch = self._last[0]
        return batch if batch.names == tuple(names) else reuse(self, names)

    with patch.object(forward._LastBatch, "reuse", last):
        yield partial(evaluate, model, ids, names)


@contextmanager
def _in_a_graph(model: PeftModel, ids: torch.Tensor, names: Sequence[str]) -> Iterator[Callable[[], object]]:
    if ids.device.type != "cuda":
        raise NotAvailable("needs CUDA")
    yield graphed(lambda ids: model(input_ids=ids, adapter_names=names).last_hidden_state, ids)


BATCHED, GROUPED = "baddbmm", "grouped_mm"
UNCHECKED, GRAPH = f"{BATCHED}, weights not checked", f"{BATCHED} in a CUDA graph"
WAYS = {BATCHED: _as_it_is, UNCHECKED: _without_check, GROUPED: _with_grouped_mm, GRAPH: _in_a_graph}


class Ragged:
    """Bottlenecks of equal shape, each with any number of rows, computed by `grouped_mm` without padding.

    It computes what the groups of `MixedBatch` compute, for bottlenecks without scaling that read the hidden states.
    """

    def __init__(self, names: Sequence[str], used: Mapping[str, Bottleneck], device: torch.device) -> None:
        bottlenecks = list(used.values())
        weight = bottlenecks[0].down_proj.weight
        if weight.is_cuda and weight.dtype != torch.bfloat16:
            raise NotAvailable(f"on CUDA, grouped_mm loops over the adapters unless they are bfloat16: {weight.dtype}")
        self.activation = bottlenecks[0].activation
        self.down = torch.stack([bottleneck.down_proj.weight.t() for bottleneck in bottlenecks])
        self.up = torch.stack([bottleneck.up_proj.weight.t() for bottleneck in bottlenecks])
        rows = [[row for row, other in enumerate(names) if other == name] for name in used]
        order = list(itertools.chain.from_iterable(rows))
        self.order = None if order == list(range(len(names))) else torch.tensor(order, device=device)
        # The row after the last one of each bottleneck, and the bottleneck of each row.
        self.ends = torch.tensor([len(own) for own in rows], device=device).cumsum(0, dtype=torch.int32)
        owners = torch.tensor([owner for owner, own in enumerate(rows) for _ in own], device=device)
        self.down_bias = torch.stack([bottleneck.down_proj.bias for bottleneck in bottlenecks])[owners].unsqueeze(1)
        self.up_bias = torch.stack([bottleneck.up_proj.bias for bottleneck in bottlenecks])[owners].unsqueeze(1)

    def adapt(self, hidden: torch.Tensor, result: torch.Tensor, read: object) -> torch.Tensor:
        """Return `result` with the rows of these bottlenecks replaced by their adapted `hidden` states."""
        own = hidden if self.order is None else hidden.index_select(0, self.order)
        rows, tokens, width = own.shape
        ends = self.ends * tokens
        branch = F.grouped_mm(own.to(self.down).reshape(-1, width), self.down, offs=ends).view(rows, tokens, -1)
        branch = self.activation(branch + self.down_bias)
        branch = F.grouped_mm(branch.reshape(rows * tokens, -1), self.up, offs=ends).view(rows, tokens, width)
        adapted = own + (branch + self.up_bias).to(hidden)
        return adapted if self.order is None else result.index_copy(0, self.order, adapted)


@torch.inference_mode(False)
@torch.no_grad()
def ragged(names: Sequence[str], used: Mapping[str, Bottleneck], device: torch.device) -> list[Ragged]:
    """Return all bottlenecks of a layer as one group, in place of groups with about as many rows each."""
    return [Ragged(names, used, device)]


def spread(rows: int, number: int) -> list[str]:
    """Return the adapter of each row, the rows of an adapter together, each with equally many."""
    return [f"task_{row * number // rows}" for row in range(rows)]


def spread_unevenly(rows: int, number: int) -> list[str]:
    """Return the adapter of each row, the rows of an adapter together: one each, and 1/n of the rest for the n-th."""
    harmonic = sum(1 / n for n in range(1, number + 1))
    ends = itertools.accumulate((rows - number) / (n * harmonic) for n in range(1, number + 1))
    # Rounded ends, so that all rows are given away.
    last = [number_before + round(end) for number_before, end in enumerate(ends, start=1)]
    return [f"task_{next(n for n, end in enumerate(last) if row < end)}" for row in range(rows)]


def with_adapters(
    shape: str, number: int, dtype: torch.dtype, alike: bool = True, device: str = "cpu", **sizes: int
) -> PeftModel:
    """Return a BERT with adapters of random weights, task_0 and so on, in evaluation mode.

    They are put into the layers directly: PEFT's `add_adapter` visits all modules for each.

    Args:
        shape: A key of `SHAPES`.
        number: The number of adapters.
        dtype: Dtype of the base model.
        alike: Whether the adapters have the dtype of the base model. Otherwise they are float32.
        device: "cpu" or "cuda".
        sizes: Other sizes than those of the shape.
    """
    torch.manual_seed(0)
    with torch.device(device):
        base = BertModel(BertConfig(**{**SHAPES[shape], **sizes}), add_pooling_layer=False).to(dtype)
        model = get_peft_model(base, HoulsbyConfig(r=64), adapter_name="task_0", autocast_adapter_dtype=not alike)
        layers = [module for module in model.modules() if isinstance(module, HoulsbyTunerLayer)]
        for added in (getattr(layer, name) for layer in layers for name in layer.adapter_layer_names):
            for name in (f"task_{task}" for task in range(1, number)):
                added[name] = copy.deepcopy(added["task_0"])
                if isinstance(added[name], Bottleneck):
                    added[name].reset_parameters()
    for task in range(1, number):
        model.peft_config[f"task_{task}"] = model.peft_config["task_0"]
    assert isinstance(model, PeftModel)
    return model.eval()


@torch.inference_mode()
def evaluate(model: PeftModel, ids: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """Return the last hidden states of rows of the given adapters."""
    states: torch.Tensor = model(input_ids=ids, adapter_names=names).last_hidden_state
    return states


def _with_each_added(shape: str, method: Method, number: int) -> PeftModel:
    torch.manual_seed(0)
    model = method(BertModel(BertConfig(**SHAPES[shape]), add_pooling_layer=False))
    assert isinstance(model, PeftModel)
    for name in range(number):
        model.add_adapter(f"task_{name}", model.peft_config["default"])
    return model


def _evaluate_next(model: PeftModel, ids: torch.Tensor, names: Iterator[Sequence[str]]) -> None:
    evaluate(model, ids, next(names))
