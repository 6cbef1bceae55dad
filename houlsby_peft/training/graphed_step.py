"""`GraphedStep`: training steps as CUDA graphs.

A step of an encoder consists of hundreds of operations, which Python starts one after the other. On
a fast GPU, with short texts, this takes several times as long as the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..kernels.capture import capture


Inputs = dict[str, torch.Tensor]


@dataclass
class _Graph:
    """A captured step: what it reads, and what it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    loss: torch.Tensor
    gradients: list[torch.Tensor | None]


class GraphedStep:
    """Runs the forward and the backward pass of a training step as a CUDA graph, one for each shape
    of a batch.

    Args:
        step: Runs both passes on inputs, and returns the loss. It must always do the same, must not
            wait for the GPU, and must find no gradients.
        parameters: The model's. Those that are trained get the gradients, which the next call
            overwrites.
    """

    def __init__(
        self, step: Callable[[Inputs], torch.Tensor], parameters: Iterable[nn.Parameter]
    ) -> None:
        self._step = step
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        # By shape; None where it has run once, without a graph.
        self._graphs: dict[tuple[tuple[str, torch.Size], ...], _Graph | None] = {}
        self._pool: Any = None

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Return the loss of inputs on the GPU, and set the gradients."""
        shape = tuple((name, value.shape) for name, value in inputs.items())
        if shape not in self._graphs:
            self._graphs[shape] = None
            return self._step(inputs)
        graph = self._graphs[shape]
        if graph is None:
            graph = self._graphs[shape] = self._capture(inputs)
        for name, value in inputs.items():
            graph.inputs[name].copy_(value, non_blocking=True)
        graph.graph.replay()
        for parameter, gradient in zip(self._trained, graph.gradients, strict=True):
            parameter.grad = gradient
        return graph.loss.clone()

    def _capture(self, inputs: Inputs) -> _Graph:
        static = {name: value.clone() for name, value in inputs.items()}
        # The step may take inputs out.
        graph, loss = capture(partial(self._step, dict(static)), self._pool)
        self._pool = graph.pool()  # one step runs at a time
        gradients = [parameter.grad for parameter in self._trained]
        return _Graph(graph, static, loss, gradients)
