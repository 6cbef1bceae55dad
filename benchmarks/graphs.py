"""CUDA graphs and `torch.compile` for prediction, where small batches wait for the launches of their kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from methods import FLOOR, OURS
from timing import compared, interleaved


Rows = list[dict[str, Any]]
# Forward passes before a graph is captured, as PyTorch's documentation has it.
_WARM_UP = 3


@torch.inference_mode()
def graphed(call: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Capture a call in a CUDA graph, and return a function that replays it on what `inputs` holds by then.

    All replays write to the same tensor. The call must not wait for the GPU, so what is computed once, such as the
    stacked weights of a mixed batch, comes before the capture.
    """
    static = inputs.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            call(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(static)

    @torch.inference_mode()
    def replay() -> torch.Tensor:
        static.copy_(inputs)
        graph.replay()
        return output

    return replay


def predictions(
    models: dict[str, nn.Module], ids: torch.Tensor, rounds: int, at_most: float, compiler: dict[str, Any] | None
) -> Rows:
    """Measure predictions of the base model and of one adapter, plain, in a CUDA graph, and compiled.

    Args:
        models: The base model and the adapted one, by name.
        ids: The tokens.
        rounds: Number of rounds.
        at_most: See `interleaved`.
        compiler: Arguments of `torch.compile`. None: nothing is compiled.

    Returns:
        A row for each model and way. `difference` is the largest one of a logit to the plain forward pass, relative to
        the largest logit; `prepare_s` is the time of the capture or of the compilation.
    """
    device = ids.device.type
    # The compiler gives up on code that it has compiled for many models and shapes.
    torch._dynamo.reset()
    calls: dict[tuple[str, str], Callable[[], torch.Tensor]] = {}
    facts: dict[tuple[str, str], dict[str, Any]] = {}
    for name, model in models.items():
        model.eval()
        plain = partial(_logits, model)
        ways: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {"plain": lambda plain=plain: partial(plain, ids)}
        if device == "cuda":
            ways["CUDA graph"] = lambda plain=plain: graphed(plain, ids)
        if compiler is not None:
            ways[f"compiled, {compiler.get('mode') or compiler['backend']}"] = lambda model=model: _compiled(
                model, ids, compiler
            )
        expected = plain(ids)
        for way, prepare in ways.items():
            start = time.monotonic()
            call = prepare()
            logits = call().clone()
            prepared = time.monotonic() - start
            difference = (logits - expected).abs().max() / expected.abs().max()
            calls[name, way] = call
            facts[name, way] = {"model": name, "way": way, "difference": float(difference), "prepare_s": prepared}
    found = compared(interleaved(calls, rounds, device, at_most), (FLOOR, "plain"))
    return [{"rows": ids.shape[0], "tokens": ids.shape[1], **facts[key], **row} for key, row in found.items()]


MODELS = (FLOOR, OURS)


@torch.inference_mode()
def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def _compiled(model: nn.Module, ids: torch.Tensor, compiler: dict[str, Any]) -> Callable[[], torch.Tensor]:
    compiled = torch.compile(model, fullgraph=True, dynamic=False, **compiler)

    @torch.no_grad()
    def call() -> torch.Tensor:
        # With mode="reduce-overhead", the next call overwrites what the last one has returned.
        torch.compiler.cudagraph_mark_step_begin()
        logits: torch.Tensor = compiled(input_ids=ids).logits
        return logits

    for _ in range(_WARM_UP):
        call()
    return call
