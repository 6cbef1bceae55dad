"""What lies below the lowest trained adapter: the layers, what they return, and what precedes an adapter in its layer.

`FrozenPrefix` leaves these modules out where it has their output, so they must not do more than return it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .batching import select_rows
from .layer import HoulsbyLayer, HoulsbyTunerLayer, is_inside


def find_lowest_trained_layer(model: nn.Module) -> tuple[str, int]:
    """Return the name of the list of layers that holds the trained adapters, and the lowest index among them."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    lowest: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, HoulsbyTunerLayer) and is_trained(module):
            # A layer may hold further lists, such as the experts of a mixture.
            layers = min((other for other in lists if is_inside(name, other)), key=len, default="")
            if layers:
                index = int(name.removeprefix(f"{layers}.").partition(".")[0])
                lowest[layers] = min(index, lowest.get(layers, index))
    if len(lowest) != 1:
        raise ValueError(
            "FrozenPrefix needs all trained adapters in one list of layers; found them in "
            f"{', '.join(map(repr, lowest)) or 'none'}. Use it with adapters in a single encoder or decoder."
        )
    return next(iter(lowest.items()))


def find_embeddings(model: Any, layers: str) -> nn.Module:
    """Return the largest module that contains the input embeddings and not the layers."""
    tokens = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is tokens)
    while (outer := name.rpartition(".")[0]) and not is_inside(layers, outer):
        name = outer
    return model.get_submodule(name)  # type: ignore[no-any-return]


def find_encoder(model: nn.Module, embeddings: nn.Module, layers: str) -> nn.Module:
    """Return the smallest module that contains both the embeddings and the layers."""
    around = [
        name
        for name, outer in model.named_modules()
        if (not name or is_inside(layers, name)) and any(inner is embeddings for inner in outer.modules())
    ]
    return model.get_submodule(max(around, key=len))


@dataclass(frozen=True)
class _Call:
    """A call of one of several layers, by its number, with copies of its arguments."""

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@torch.no_grad()
def record_calls(
    encoder: nn.Module, layers: list[nn.Module], args: Any, kwargs: Any, hidden_only: bool = False
) -> tuple[list[_Call], Any]:
    """Run an encoder without dropout. Return the calls of its layers, and its output.

    Args:
        encoder: The encoder.
        layers: Its layers.
        args, kwargs: Its arguments.
        hidden_only: Whether the layers return None in place of everything but the hidden states.
    """
    calls: list[_Call] = []

    def run(number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A decoder's layer adds to the cache of keys and values that it receives.
        before = copy.deepcopy((args, kwargs))
        output = forward(*args, **kwargs)
        calls.append(_Call(number, *before, output))
        return make_tuple(output[0], len(output)) if hidden_only and isinstance(output, tuple) else output

    undo = [override(layer, forward=partial(run, number, layer.forward)) for number, layer in enumerate(layers)]
    try:
        with _no_dropout(encoder):
            output = encoder.forward(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    finally:
        for restore in undo:
            restore()
    return calls, output


@contextmanager
def _no_dropout(module: nn.Module) -> Iterator[None]:
    """Turn dropout off in a module, and then restore the mode of each module inside it."""
    modes = {inner: inner.training for inner in module.modules()}
    for inner in modes:
        inner.training = False
    try:
        yield
    finally:
        for inner, mode in modes.items():
            inner.training = mode


def find_lengths(
    recorded: tuple[list[_Call], Any],
    encoder: nn.Module,
    layers: list[nn.Module],
    args: Any,
    kwargs: Any,
    tokens: torch.Size,
) -> list[int]:
    """Return the length of the tuple that each layer returns, 0 for a tensor.

    Args:
        recorded: What `record_calls` returns for these arguments.
        encoder: The encoder.
        layers: Its frozen layers.
        args, kwargs: Its arguments.
        tokens: Shape of the batch, `(texts, tokens)`.

    Raises:
        ValueError: The hidden states of the last layer cannot stand for what all of these layers return.
    """
    calls, expected = recorded
    problem = _find_problem(calls, layers, tokens)
    lengths = [len(call.output) if isinstance(call.output, tuple) else 0 for call in calls]
    if not problem and any(length > 1 for length in lengths):
        # Attention probabilities are only returned. Position biases, as T5's, reach the layers above.
        try:
            _, found = record_calls(encoder, layers, args, kwargs, hidden_only=True)
            same = torch.equal(found[0], expected[0])
        except Exception:
            same = False
        problem = "" if same else "the model uses more of what they return than the hidden states"
    if problem:
        raise ValueError(
            "FrozenPrefix needs frozen layers that run once each, in their order, on each text alone, and pass on "
            f"nothing but hidden states of the shape (texts, tokens, width); got {type(layers[0]).__name__}, where "
            f"{problem}. Train this model without FrozenPrefix."
        )
    return lengths


@torch.no_grad()
def _find_problem(calls: list[_Call], layers: list[nn.Module], tokens: torch.Size) -> str:
    """Return why not every layer can be left out, or run on some of the texts only; "" if each can."""
    order = [call.number for call in calls]
    if order != list(range(len(layers))):
        return f"they run in the order {order}"
    before = None
    last = torch.tensor([tokens[0] - 1])
    for number, call in enumerate(calls):
        hidden = hidden_states(call.output)
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or hidden.shape[:2] != tokens:
            got = tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else type(hidden).__name__
            return f"layer {number} returns {got} for {tuple(tokens)} tokens"
        if not call.args or not isinstance(call.args[0], torch.Tensor):
            return f"layer {number} does not get the hidden states as its first argument"
        if before is not None and not torch.equal(call.args[0].to(before.device), before):
            return f"the model changes the hidden states between layers {number - 1} and {number}"
        if tokens[0] > 1:
            args, kwargs = select_rows((call.args, call.kwargs), last, tokens[0])
            try:
                with _no_dropout(layers[number]):
                    alone = hidden_states(layers[number].forward(*args, **kwargs))
                # In half precision, other kernels give slightly different results.
                same = bool((alone - hidden[-1:]).float().norm() <= 0.02 * hidden[-1:].float().norm())
            except Exception:
                same = False
            if not same:
                return f"layer {number} gives a text another output if it runs on this text alone"
        before = hidden
    return ""


def hidden_states(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def make_tuple(hidden: torch.Tensor, length: int) -> Any:
    """Return the output of a layer that returns a tuple of this length, or a tensor if it is 0."""
    return (hidden, *[None] * (length - 1)) if length else hidden


@torch.no_grad()
def find_modules_before_adapter(layer: nn.Module, args: Any, kwargs: Any) -> tuple[list[nn.Module], list[Any]]:
    """Return the modules of a layer that run before its first trained module, with a template of each output.

    Both lists are empty if the output of the last of these modules cannot stand for all of them. It can if the trained
    module receives that output and the layer's output does not change when the other modules return zeros. Llama is
    a counterexample: it rotates the outputs of its projections. So are layers that use the output of a norm twice.

    Args:
        layer: The lowest trained layer. It runs twice, without dropout.
        args, kwargs: Its arguments.
    """
    if any(isinstance(module, HoulsbyLayer) and module.skip is not None for module in layer.modules()):
        return [], []  # its bottlenecks read more than one output
    modes = {module: module.training for module in layer.modules()}
    undo: list[Callable[[], None]] = []
    for module in modes:
        module.training = False
    try:
        # A decoder's layer adds to the cache of keys and values that it receives.
        outputs, received, expected = _trace(layer, *copy.deepcopy((args, kwargs)))
        names = {module: name for name, module in layer.named_modules()}
        modules = [m for m in outputs if not any(is_inside(names[m], names[o]) for o in outputs if o is not m)]
        if not modules or outputs[modules[-1]] is not received:
            return [], []
        try:
            templates = [_make_template(outputs[module], args[0].shape[:2]) for module in modules]
        except TypeError:
            return [], []
        for module, template in zip(modules, templates, strict=True):
            output = received if module is modules[-1] else make_zeros(template, args[0][..., 0])
            undo.append(override(module, forward=lambda *_, output=output, **__: output))
        args, kwargs = copy.deepcopy((args, kwargs))
        same = _are_equal(layer.forward(*args, **kwargs), expected)
        return (modules, templates) if same else ([], [])
    finally:
        for restore in undo:
            restore()
        for module, mode in modes.items():
            module.training = mode


def _trace(layer: nn.Module, args: Any, kwargs: Any) -> tuple[dict[nn.Module, Any], Any, Any]:
    """Run a layer. Return the outputs of the modules that end before the first trained module starts, the input of
    that module, and the layer's output."""
    outputs: dict[nn.Module, Any] = {}
    received: list[Any] = []
    handles = []
    for module in list(layer.modules())[1:]:
        if isinstance(module, HoulsbyTunerLayer) and is_trained(module):
            handles.append(module.register_forward_pre_hook(lambda _, inputs: received.append(inputs[0])))
        handles.append(
            module.register_forward_hook(lambda m, _, output: None if received else outputs.update({m: output}))
        )
    try:
        result = layer.forward(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, received[0] if received else None, result


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two outputs of a layer, tensors or tuples of tensors, are equal."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is None and other is None


def _make_template(output: Any, tokens: torch.Size) -> Any:
    """Return a module's output for one token, on the meta device.

    Raises:
        TypeError: The output is not made of tensors with one entry per token; `tokens` is the shape of the batch.
    """
    if output is None:
        return None
    if isinstance(output, tuple):
        return tuple(_make_template(item, tokens) for item in output)
    if isinstance(output, torch.Tensor) and output.shape[:2] == tokens:
        return output[0, 0].to("meta")
    raise TypeError(f"got {type(output).__name__}")


def make_zeros(template: Any, mask: torch.Tensor) -> Any:
    """Return zeros for every token of a batch in the form of a template. They take no memory."""
    if template is None:
        return None
    if isinstance(template, tuple):
        return tuple(make_zeros(item, mask) for item in template)
    return torch.zeros((), dtype=template.dtype, device=mask.device).expand(*mask.shape, *template.shape)


def is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def override(module: nn.Module, **methods: Callable[..., Any]) -> Callable[[], None]:
    """Override methods of a module and return a function that restores them.

    Accelerate overrides `forward` in the same way, so deleting the attribute would not be enough.
    """
    before = {name: module.__dict__[name] for name in methods if name in module.__dict__}
    module.__dict__.update(methods)

    def restore() -> None:
        for name in methods:
            module.__dict__.pop(name, None)
        module.__dict__.update(before)

    return restore
