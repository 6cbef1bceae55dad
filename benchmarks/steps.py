"""Measure training steps and evaluations of all methods on one shape of model and batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from houlsby_peft import GraphedStep
from models import Method, build, flops, inputs, saved_bytes
from timing import compared, interleaved


@dataclass(frozen=True)
class Precision:
    """The dtype of the base model, and what computes faster: autocast in bfloat16, or float32
    products in TF32.

    Adapters are always float32.
    """

    base: torch.dtype = torch.float32
    autocast: bool = False
    tf32: bool = False


PRECISIONS = {
    "float32": Precision(),
    "bf16 autocast": Precision(autocast=True),
    "bf16 base": Precision(torch.bfloat16),
    "bf16 base, TF32": Precision(torch.bfloat16, tf32=True),
    "bf16 base, autocast": Precision(torch.bfloat16, autocast=True),
}


def training_step(
    model: nn.Module, given: dict[str, torch.Tensor], precision: Precision = PRECISIONS["float32"]
) -> Callable[[], None]:
    """Return a full training step: forward, backward, update, zero the gradients."""
    return _with_update(model, partial(_run_passes(model, precision), given))


def graphed_step(
    model: nn.Module, given: dict[str, torch.Tensor], precision: Precision = PRECISIONS["float32"]
) -> Callable[[], None]:
    """Return a training step whose passes are a CUDA graph, as with the recipes' --cuda_graphs."""
    passes = GraphedStep(_run_passes(model, precision), model.parameters())
    return _with_update(model, partial(passes, given))


def _run_passes(
    model: nn.Module, precision: Precision
) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """Return a function that runs the forward and the backward pass."""

    def run(given: dict[str, torch.Tensor]) -> torch.Tensor:
        device = given["input_ids"].device.type
        with torch.autocast(device, torch.bfloat16, enabled=precision.autocast):
            loss: torch.Tensor = model(**given).loss
        loss.backward()
        return loss.detach()

    return run


def _with_update(model: nn.Module, passes: Callable[[], object]) -> Callable[[], None]:
    """Return a step that runs both passes and updates the weights."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The Trainer's default optimizer.
    optimizer = torch.optim.AdamW(trained, fused=True) if trained else None

    def step() -> None:
        passes()
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()

    return step


def evaluation(
    model: nn.Module, given: dict[str, torch.Tensor], precision: Precision = PRECISIONS["float32"]
) -> Callable[[], object]:
    """Return a forward pass in evaluation mode."""
    model.eval()
    device = given["input_ids"].device.type

    @torch.inference_mode()
    def evaluate() -> object:
        with torch.autocast(device, torch.bfloat16, enabled=precision.autocast):
            return model(**given)

    return evaluate


PHASES: dict[str, Callable[..., Callable[[], object]]] = {
    "train": training_step,
    "eval": evaluation,
}


def measure(
    phase: str, methods: Mapping[str, Method], cell: tuple[str, int, int], rounds: int, device: str
) -> list[dict[str, Any]]:
    """Measure all methods in one phase. Ratios are relative to the first method.

    Args:
        phase: "train" or "eval".
        methods: Methods by name.
        cell: Shape, batch size and length.
        rounds: Number of rounds.
        device: "cpu" or "cuda".
    """
    shape, batch, length = cell
    given = inputs(batch, length, device)
    models = {name: build(shape, method).to(device) for name, method in methods.items()}
    saved = {name: saved_bytes(model, given) for name, model in models.items()}
    calls = {name: PHASES[phase](model, given) for name, model in models.items()}
    times = compared(interleaved(calls, rounds, device), next(iter(methods)))
    return [
        {
            "shape": shape,
            "batch": batch,
            "length": length,
            "phase": phase,
            "method": name,
            **times[name],
            "tokens_per_s": batch * length / times[name]["median_s"],
            "flops": flops(call),
            "saved_bytes": saved[name] if phase == "train" else 0,
        }
        for name, call in calls.items()
    ]
