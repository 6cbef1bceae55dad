"""`Graphs`: the layers of a model as CUDA graphs, which a GPU repeats without the CPU starting each
operation.

A graph is captured for each shape of the inputs. The slot of each row is one of the inputs, so that
a graph serves all tasks whose adapters are in the same slots.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial, update_wrapper
from typing import Any
from weakref import ref

import torch
from peft import PeftModel
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers.utils.generic import ModelOutput

from ..batching.batch import MixedBatch
from ..batching.slots import Slots
from ..errors import shortened
from ..kernels.capture import capture
from ..method.layer import HoulsbyLayer
from ..method.tuner_layer import HoulsbyTunerLayer, ModelState, activate, batch_of, state_of


# The least recently used graph gives way to a further one.
_MOST_GRAPHS = 128
# Of inputs that a graph keeps as they were when it was captured.
_FIXED = (type(None), bool, int, float, str)
# Graphs share their memory, also those of several models, and one is captured at a time.
_LOCK = threading.Lock()


def use_graphs(model: PeftModel) -> None:
    """Let batches run as graphs whose rows are all of one adapter or in the same slots."""
    if "graphs" in vars(model):  # a copy of the model has a copy of them
        return
    encoder = find_encoder(model)
    if encoder is not None:
        vars(model)["graphs"] = Graphs(encoder, state_of(model))


def find_encoder(model: nn.Module) -> nn.Module | None:
    """Return the module that calls the layers with adapters; None if it has heads as well."""
    modules = dict(model.named_modules())
    paths = []
    for name, module in modules.items():
        if isinstance(module, HoulsbyTunerLayer):
            paths.append(name.split("."))
    path = ""
    for parts in zip(*paths, strict=False):
        longer = f"{path}.{parts[0]}".lstrip(".")
        # All layers, as those of later adapters may read what enters a layer.
        if len(set(parts)) > 1 or isinstance(modules[longer], nn.ModuleList):
            break
        path = longer
    encoder = modules[path]
    has_heads = any(isinstance(module, AuxiliaryTrainingWrapper) for module in encoder.modules())
    return None if has_heads else encoder


class Graphs:
    """Runs a module as graphs where they can be used, and as it is elsewhere.

    Args:
        module: The module, whose `forward` is replaced.
        state: What all layers of the model share.
    """

    def __init__(self, module: nn.Module, state: ModelState) -> None:
        self._module = module
        self._compute = module.forward
        self._state = state
        self._graphs: OrderedDict[object, _Graph] = OrderedDict()
        module.forward = update_wrapper(partial(self.run), module.forward)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the graphs to this model: a copy captures its own."""
        return {**vars(self), "_graphs": OrderedDict()}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module computes."""
        batch: Any = batch_of(self._state.batches)
        kinds = [_kind(value) for value in (*args, *kwargs.values())]
        if None in kinds or self._is_observed(kwargs) or not _has_one_text_per_row(batch):
            return self._compute(*args, **kwargs)
        slots = self._find_slots(batch.names)
        weights = self._find_weights(batch, slots)
        if weights is None or torch.is_autocast_enabled(weights.device.type):
            return self._compute(*args, **kwargs)
        size = (id(weights), len(batch.names), len(args), *kwargs, *kinds)
        with _LOCK:
            key, graph = self._take(size, batch, weights)
            if graph is None:
                self._drop_dead()
                try:
                    graph = _Graph(self._compute_for, batch, slots, args, kwargs, weights)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    warnings.warn(
                        f"{type(self._module).__name__} runs without CUDA graphs, as it cannot be "
                        f"captured: {shortened(str(error))}",
                        stacklevel=2,
                    )
                    self._module.forward = self._compute
                    return self._compute(*args, **kwargs)
            self._graphs[key] = graph
            if len(self._graphs) > _MOST_GRAPHS:
                self._graphs.popitem(last=False)
            return graph.run(batch.names, args, kwargs)

    def _take(
        self, size: object, batch: MixedBatch, weights: torch.Tensor
    ) -> tuple[object, _Graph | None]:
        """Take the graph for a batch out of the others, if there is one that reads its weights;
        return its key as well.
        """
        # A graph of several adapters serves one as well. That of one knows of no rows.
        key = (False, size)
        graph = self._graphs.pop(key, None)
        if batch.only_name is not None and (graph is None or not graph.reads(weights)):
            key = (True, size)
            graph = self._graphs.pop(key, None)
        if graph is not None and not graph.reads(weights):
            graph = None
        return key, graph

    def _is_observed(self, kwargs: dict[str, Any]) -> bool:
        """Return whether transformers collects what the layers compute, as their hooks tell it."""
        settings = getattr(self._module, "config", None)
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name) or getattr(settings, name, False):
                return True
        return False

    def _find_slots(self, names: Collection[str]) -> Slots | None:
        """Return the slots that hold the adapters of all rows."""
        distinct = set(names)
        for slots in self._state.slots:
            if distinct <= slots.numbers.keys():
                return slots  # type: ignore[no-any-return]
        return None

    def _find_weights(self, batch: MixedBatch, slots: Slots | None) -> torch.Tensor | None:
        """Return a tensor that stands for the weights of all rows; None if there is none, or if
        adapters are disabled somewhere.
        """
        if slots is not None:
            is_disabled = any(layer.disable_adapters for layer in slots.stacks)
            return None if is_disabled else slots.rows
        if batch.only_name is None:
            return None
        weights = None
        for layer in self._module.modules():
            if isinstance(layer, HoulsbyTunerLayer) and layer.disable_adapters:
                return None
            # What lies beneath a ladder is not the ladder's: a graph would tell it nothing.
            if weights is None and isinstance(layer, HoulsbyLayer) and layer.has(batch.only_name):
                weights = layer.module_of(batch.only_name).down_proj.weight
        return weights

    def _compute_for(self, batch: MixedBatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the module computes for a batch other than the one that runs."""
        with activate(self._state.batches, batch):
            return self._compute(*args, **kwargs)

    def _drop_dead(self) -> None:
        """Drop the graphs whose weights are gone."""
        for key, graph in list(self._graphs.items()):
            if graph.weights() is None:
                del self._graphs[key]


class _Graph:
    """What a module computes for inputs of one shape, to be repeated with others.

    Args:
        compute: Returns what the module computes for a batch, arguments and named arguments.
        batch: The batch.
        slots: What holds the adapters of all rows; None if they have one adapter, with modules.
        args, kwargs: The inputs, which are copied.
        weights: A tensor that stands for the weights which are read.
    """

    def __init__(
        self,
        compute: Callable[..., Any],
        batch: MixedBatch,
        slots: Slots | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weights: torch.Tensor,
    ) -> None:
        self.weights = ref(weights)
        self._address = weights.data_ptr()
        self._args = _map_tensors(torch.clone, args)
        self._kwargs = _map_tensors(torch.clone, kwargs)
        self._slots = slots
        # The slot of each row.
        self._index = torch.zeros(len(batch.names), dtype=torch.long, device=weights.device)
        batch = copy.copy(batch)
        if slots is not None:
            batch.slots_in_graph = slots, self._index
        self._replay = _repeatable(
            partial(compute, batch, self._args, self._kwargs), weights.device
        )

    def reads(self, weights: torch.Tensor) -> bool:
        """Return whether these weights are read, and are where they were."""
        return self.weights() is weights and self._address == weights.data_ptr()

    def run(self, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what is computed for other inputs and adapters of the rows."""
        inputs = (*self._args, *self._kwargs.values())
        for target, value in zip(inputs, (*args, *kwargs.values()), strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(value)
        if self._slots is not None:
            self._index.copy_(torch.tensor([self._slots.numbers[name] for name in names]))
        # The next batch overwrites what the graph has computed.
        return _map_tensors(torch.clone, self._replay())


def _repeatable(compute: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return a function that repeats a computation on what its inputs hold by then."""
    if device.type != "cuda":
        return compute
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is done at the first call alone is not captured
            compute()
        torch.cuda.current_stream().wait_stream(side)
        graph, output = capture(compute, _pool(device))

    def replay() -> Any:
        graph.replay()
        return output

    return replay


@cache
def _pool(device: torch.device) -> Any:
    """Return the memory that the graphs of a device share, as they run one after the other."""
    return torch.cuda.graph_pool_handle()


def _has_one_text_per_row(batch: Any) -> bool:
    """Return whether a batch is one that is predicted, with a text for each row."""
    is_mixed = isinstance(batch, MixedBatch) and batch.fan_out is None
    return is_mixed and torch.is_inference_mode_enabled()


def _kind(value: Any) -> object:
    """Return what a graph is captured anew for; None for an input that no graph can have."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return (type(value), value) if isinstance(value, _FIXED) else None


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a copy of tuples, dicts and outputs, with a function of each tensor inside."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        return tuple(_map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        mapped = {key: _map_tensors(function, item) for key, item in value.items()}
        return type(value)(**mapped) if isinstance(value, ModelOutput) else mapped
    return value if isinstance(value, _FIXED) else copy.deepcopy(value)  # such as a cache
