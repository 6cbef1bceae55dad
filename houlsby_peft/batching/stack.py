"""`Stack`: the bottlenecks or norms that several adapters hold in slots at one place, and rows of
them at once.

A row names its adapter by a number. On a CPU, the rows of each adapter are computed with its
weights where they are: nothing is copied. Elsewhere, the weights are gathered by row, and a few
operations compute all rows, however many adapters there are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from accelerate.utils import has_offloaded_params
from torch import nn
from torch.nn import functional as F

from ..kernels import layer_norm
from ..kernels import rows as operation
from ..kernels.bottleneck import ACTIVATIONS, MODULES
from ..kernels.plain import is_plain_call
from ..kernels.rows import find_runs
from ..method.bottleneck import Bottleneck


_WEIGHTS = ("down_proj.weight", "down_proj.bias", "up_proj.weight", "up_proj.bias")


def saves_starts(device: torch.device) -> bool:
    """Return whether few operations are better on a device than few copies of weights."""
    return device.type != "cpu"


class Choice:
    """The number of each row's adapter in a stack."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        self._indices: dict[torch.device, torch.Tensor] = {}

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The adapters of consecutive rows, each with how many rows it has."""
        return find_runs(self.numbers)

    def split(self, *tensors: torch.Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield each adapter of consecutive rows, with its part of each tensor `(rows, ..., d)`."""
        numbers, sizes = zip(*self.runs, strict=True)
        yield from zip(numbers, *(tensor.split(sizes) for tensor in tensors), strict=True)

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return what each row's adapter has: `(rows, ...)` from `(adapters, ...)`."""
        if self.numbers == tuple(range(len(values))):
            return values
        if len(self.runs) == 1:
            return values[self.numbers[0]].expand(len(self.numbers), *values.shape[1:])
        return values.index_select(0, self.index(values.device))

    def index(self, device: torch.device) -> torch.Tensor:
        """Return the numbers as a tensor, which all places share.

        Copying one to a GPU waits for all of its work, and cannot be captured in a CUDA graph.
        """
        if device not in self._indices:
            count = len(self.numbers)
            if self.numbers == tuple(range(count)):
                index = torch.arange(count, device=device)
            elif len(self.runs) == 1:
                index = torch.full((count,), self.numbers[0], device=device)
            else:
                index = torch.tensor(self.numbers, device=device)
            self._indices[device] = index
        return self._indices[device]


class ChoiceOfTensor(Choice):
    """A choice that may be another one whenever it is used.

    Args:
        index: The numbers, `(rows,)`.
    """

    def __init__(self, index: torch.Tensor) -> None:
        self._index = index

    @property
    def runs(self) -> list[tuple[int, int]]:
        return find_runs(self._index.tolist())

    def take(self, values: torch.Tensor) -> torch.Tensor:
        return values.index_select(0, self._index)

    def index(self, device: torch.device) -> torch.Tensor:
        return self._index


class Stack:
    """Modules that differ in nothing but the values of their weights.

    Args:
        module: One of them.
        weights: The weights of all of them by name, each `(slots, ...)`.
    """

    def __init__(self, module: Any, weights: dict[str, torch.Tensor]) -> None:
        self.module = module
        self.weights = weights

    def _needs_no_gradient(self, *tensors: torch.Tensor) -> bool:
        """Return whether plain numbers are computed, on the device of the weights."""
        device = next(iter(self.weights.values())).device
        is_recorded = torch.is_grad_enabled()
        for tensor in tensors:
            if not is_plain_call(tensor) or tensor.device != device:
                return False
            if is_recorded and tensor.requires_grad:
                return False
        return True

    def run_bottleneck(
        self, hidden: torch.Tensor, read: torch.Tensor, choice: Choice
    ) -> torch.Tensor:
        """Add to each row the branch of its bottleneck.

        Args:
            hidden: Hidden states `(rows, ..., d)`.
            read: What the branches are computed from, of the same shape.
            choice: The bottleneck of each row.
        """
        if self._needs_no_gradient(hidden, read):
            if not saves_starts(hidden.device):
                return self._run_bottleneck_in_turn(hidden, read, choice)
            if read is hidden and self._is_operation():
                weights = [self.weights[name] for name in _WEIGHTS]
                index = choice.index(hidden.device)
                return operation.run(hidden, weights, index, self.module.activation_name)
        # The bottleneck's own code, on the shape `(rows, tokens, d)`.
        bottleneck = copy.copy(self.module)
        bottleneck._modules = dict(bottleneck._modules)
        for name in ("down_proj", "up_proj"):
            weight, bias = (self.weights[f"{name}.{part}"] for part in ("weight", "bias"))
            bottleneck._modules[name] = LinearOfRows(choice.take(weight), choice.take(bias))
        if "scaling" in self.weights:
            scaling = choice.take(self.weights["scaling"])
            bottleneck._parameters = {"scaling": scaling.unsqueeze(1)}
        shape = (len(hidden), -1, hidden.shape[-1])
        result: torch.Tensor = bottleneck(hidden.reshape(shape), read.reshape(shape))
        return result.reshape(hidden.shape)

    def _is_operation(self) -> bool:
        """Return whether the operation computes these bottlenecks."""
        has_scaling = "scaling" in self.weights or self.module.scaling != 1
        return not has_scaling and self.module.activation_name in ACTIVATIONS

    def _run_bottleneck_in_turn(
        self, hidden: torch.Tensor, read: torch.Tensor, choice: Choice
    ) -> torch.Tensor:
        """Add the branches, one adapter after another."""
        weights = [self.weights[name] for name in _WEIGHTS]
        wide = read.to(weights[0][0].dtype)
        branch = operation.compute_in_turn(wide, weights, choice.runs, self.module.activation)
        if "scaling" in self.weights:
            for number, part in choice.split(branch):
                part *= self.weights["scaling"][number]
        elif self.module.scaling != 1:
            branch *= self.module.scaling
        if branch.dtype == hidden.dtype:
            return branch.add_(hidden)
        return hidden + branch.to(hidden)

    def run_norm(self, hidden: torch.Tensor, choice: Choice) -> torch.Tensor:
        """Normalize each row by its norm, in the norm's dtype; the result has the rows' dtype.

        Args:
            hidden: Hidden states `(rows, ..., d)`.
            choice: The norm of each row.
        """
        if isinstance(self.module, nn.LayerNorm) and self._needs_no_gradient(hidden):
            if not saves_starts(hidden.device):
                return self._run_norm_in_turn(hidden, choice)
            weight, bias = self.weights["weight"], self.weights.get("bias")
            index = choice.index(hidden.device)
            return layer_norm.run_rows(hidden, weight, bias, index, self.module.eps)
        shape = (len(hidden), *[1] * (hidden.dim() - 2), hidden.shape[-1])
        weights = {}
        for name in self.weights:
            weights[name] = choice.take(self.weights[name]).reshape(shape)
        norm, wide = self.module, hidden.to(weights["weight"].dtype)
        if isinstance(norm, nn.LayerNorm):
            result = F.layer_norm(wide, wide.shape[-1:], eps=norm.eps)
            if "bias" in weights:
                result = torch.addcmul(weights["bias"], result, weights["weight"])
            else:
                result = result * weights["weight"]
        else:
            result = F.rms_norm(wide, wide.shape[-1:], eps=norm.eps) * weights["weight"]
        return result.to(hidden.dtype)

    def _run_norm_in_turn(self, hidden: torch.Tensor, choice: Choice) -> torch.Tensor:
        """Normalize the rows, one adapter after another."""
        weights, biases = self.weights["weight"], self.weights.get("bias")
        result = torch.empty_like(hidden)
        for number, vectors, target in choice.split(hidden, result):
            # The base model's own norm may be in another precision than an adapter's.
            weight, wide = weights[number], vectors.to(weights[number].dtype)
            bias = None if biases is None else biases[number]
            target.copy_(F.layer_norm(wide, weight.shape, weight, bias, self.module.eps))
        return result


class LinearOfRows(nn.Module):
    """A linear layer for each row.

    Args:
        weight: `(rows, outputs, inputs)`.
        bias: `(rows, outputs)`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias.unsqueeze(1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Transform `(rows, ..., inputs)` to `(rows, ..., outputs)`."""
        vectors = hidden.reshape(len(hidden), -1, hidden.shape[-1])
        result = torch.baddbmm(self.bias, vectors, self.weight.mT)
        return result.reshape(*hidden.shape[:-1], -1)


def stacking_key(bottleneck: Any) -> tuple[object, ...] | None:
    """Return what bottlenecks in one stack have in common; None if one cannot be part of a stack.

    It is all that determines what a bottleneck computes in evaluation, except for the values of its
    weights. A stack needs the library's own class with plain weights in its projections and scaling
    only: no quantized, sharded or offloaded weights, and no activation with weights.
    """
    parameters, modules = bottleneck._parameters, bottleneck._modules
    if type(bottleneck) is not Bottleneck or modules.keys() != MODULES:
        return None
    activation, down_proj = modules["activation"], modules["down_proj"]
    if parameters.keys() - {"scaling"} or activation._parameters or activation._modules:
        return None
    weight = down_proj._parameters.get("weight")
    if not _is_plain(weight) or not _is_plain(modules["up_proj"]._parameters.get("weight")):
        return None
    options = [option for option in vars(bottleneck).items() if not option[0].startswith("_")]
    return (*options, *parameters, weight.shape, weight.dtype)


def _is_plain(weight: torch.Tensor | None) -> bool:
    return type(weight) in (nn.Parameter, torch.Tensor) and not weight.is_meta  # type: ignore[union-attr]


def is_torch_norm(norm: nn.Module) -> bool:
    """Return whether a norm computes as PyTorch's own norms do, with its weights at hand."""
    is_own = type(norm).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward)
    return is_own and not has_offloaded_params(norm)
