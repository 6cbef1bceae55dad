"""Which modules run before the first trained one, and how a batch passes an encoder without them.

`FrozenPrefix` leaves out all layers below the lowest trained layer and, inside that layer, what runs before its first
trained module. Nothing says what else such modules do, so `find_shortcut` asks the model: it must return the same with
them and without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .layer import HoulsbyLayer, HoulsbyTunerLayer, is_inside
from .prefix_keys import Texts


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
class Span:
    """Modules that run one after the other, where other modules use only what the last one returns.

    Args:
        name: One byte that distinguishes its activations in the store from those of other spans.
        forms: For each module, its output for one token; see `_take_one_token`.
    """

    name: bytes
    forms: dict[nn.Module, Any]


class _Arrived(Exception):
    """The last span has run, and the rest of the encoder need not."""


class Shortcut:
    """A way through an encoder without some spans of its modules, for texts whose activations there are known.

    Args:
        encoder: The encoder.
        spans: The spans, in the order in which they run.

    Attributes:
        known: For each span, by name, what its last module returns for the batch that is running through the encoder,
            `(texts, tokens, width)`. If None, all modules run.
    """

    def __init__(self, encoder: nn.Module, spans: list[Span]) -> None:
        self.spans = spans
        self.known: dict[bytes, torch.Tensor] | None = None
        self._encoder = encoder
        self._computed: dict[bytes, torch.Tensor] | None = None

    def open(self) -> Callable[[], None]:
        """Override `forward` of the modules and return a function that restores it."""
        undo = [
            override(module, forward=partial(self._run, span, module, module.forward))
            for span in self.spans
            for module in span.forms
        ]

        def close() -> None:
            for restore in undo:
                restore()

        return close

    def compute(self, texts: Texts) -> dict[bytes, torch.Tensor]:
        """Return what `known` is for these texts, from running the encoder without dropout up to the last span."""
        computed = self._computed = {}
        try:
            with torch.no_grad(), no_dropout(self._encoder):
                self._encoder.forward(**texts.inputs)
        except _Arrived:
            pass
        finally:
            self._computed = None
        return computed

    def _run(self, span: Span, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the output of a module, in place of its `forward`."""
        is_last = module is next(reversed(span.forms))
        with torch.no_grad():
            if self.known is None:
                # Gradient checkpointing runs modules again in the backward pass, on the texts of any earlier batch.
                output = forward(*args, **kwargs)
            else:
                known = self.known[span.name]
                output = _make_zeros(span.forms[module], known)
                if is_last:
                    output = (known, *output[1:]) if isinstance(output, tuple) else known
        if is_last and self._computed is not None:
            self._computed[span.name] = _take_first(output)
            if span is self.spans[-1]:
                raise _Arrived
        # With reentrant checkpointing, a layer whose input requires no gradient is not trained.
        needs_gradient = (isinstance(each, torch.Tensor) and each.requires_grad for each in (*args, *kwargs.values()))
        if span is self.spans[0] and torch.is_grad_enabled() and any(needs_gradient):
            _take_first(output).requires_grad_()
        return output


def find_shortcut(encoder: nn.Module, frozen: list[nn.Module], layer: nn.Module, texts: Texts) -> Shortcut:
    """Return the way through an encoder that leaves out as much as its output allows.

    Args:
        encoder: The encoder. It runs several times, without dropout.
        frozen: Its layers below the first trained one.
        layer: The first trained layer.
        texts: Texts to try.

    Raises:
        ValueError: The frozen layers cannot be left out.
    """
    with torch.no_grad(), no_dropout(encoder):
        spans, expected = _find_spans(encoder, frozen, layer, texts)
    problem = ""
    for count in range(len(spans), 0, -1):
        shortcut = Shortcut(encoder, spans[:count])
        if not (problem := _find_difference(shortcut, encoder, expected, texts)):
            return shortcut
    raise ValueError(
        "FrozenPrefix needs frozen layers that run each text alone and pass on nothing but hidden states of the shape "
        f"(texts, tokens, width); got {type(frozen[0]).__name__}, where {problem}. Train this model without "
        "FrozenPrefix."
    )


def _find_spans(
    encoder: nn.Module, frozen: list[nn.Module], layer: nn.Module, texts: Texts
) -> tuple[list[Span], torch.Tensor]:
    """Return what may be left out of an encoder, and the encoder's output.

    The first span is the frozen layers. A second one is in the first trained layer, if a trained module there receives
    just what the module before it returns.
    """
    of_layers: dict[nn.Module, Any] = dict.fromkeys(frozen)
    before: dict[nn.Module, Any] = {}
    received: list[Any] = []
    handles = [each.register_forward_hook(lambda m, _, output: of_layers.update({m: output})) for each in frozen]
    names = {module: name for name, module in layer.named_modules() if name}
    for module in names:
        if isinstance(module, HoulsbyTunerLayer) and is_trained(module):
            handles.append(module.register_forward_pre_hook(lambda _, inputs: received.extend(inputs[:1])))
        handles.append(
            module.register_forward_hook(lambda m, _, output: None if received else before.update({m: output}))
        )
    try:
        output = encoder.forward(**texts.inputs)
    finally:
        for handle in handles:
            handle.remove()
    spans = {b"h": of_layers}
    outermost = [m for m in before if not any(is_inside(names[m], names[other]) for other in before if other is not m)]
    # Some kinds of bottlenecks read more than one output.
    reads_one = all(each.skip is None for each in names if isinstance(each, HoulsbyLayer))
    if reads_one and outermost and received and before[outermost[-1]] is received[0]:
        spans[b"o"] = {module: before[module] for module in outermost}
    forms = [
        Span(name, {module: _take_one_token(each, texts.mask.shape) for module, each in outputs.items()})
        for name, outputs in spans.items()
    ]
    return forms, _take_first(output)


@torch.no_grad()
def _find_difference(shortcut: Shortcut, encoder: nn.Module, expected: torch.Tensor, texts: Texts) -> str:
    """Return why the shortcut does not lead to the expected output; "" if it does."""
    close = shortcut.open()
    try:
        known = shortcut.compute(texts)
        for span in shortcut.spans:
            hidden: Any = known.get(span.name)
            got = tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else type(hidden).__name__
            if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or hidden.shape[:2] != texts.mask.shape:
                return f"the last one returns {got} for {tuple(texts.mask.shape)} tokens"
        shortcut.known = known
        try:
            with no_dropout(encoder):
                is_same = torch.equal(_take_first(encoder.forward(**texts.inputs)), expected)
        except Exception:  # of any kind, where the model misses what it uses
            is_same = False
        shortcut.known = None
        if not is_same:
            return "the model uses more of what they return than the hidden states"
        last = len(texts.mask) - 1
        for name, hidden in shortcut.compute(texts.select([last])).items() if last else ():
            alone, beside = (each[-1, texts.mask[-1]].float() for each in (hidden, known[name]))
            # In half precision, other kernels give slightly different results.
            if not (alone - beside).norm() <= 0.02 * beside.norm():
                return "a text has other hidden states if it runs alone"
    finally:
        shortcut.known = None
        close()
    return ""


def _take_first(output: Any) -> Any:
    """Return the hidden states of what a layer or an encoder returns."""
    return output if output is None or isinstance(output, torch.Tensor) else output[0]


def _take_one_token(output: Any, tokens: torch.Size) -> Any:
    """Return the form of a module's output: for each tensor, one token of it on the meta device.

    What has no entry per token is None, as nothing can be said of its form for other texts.
    """
    if isinstance(output, tuple):
        return tuple(_take_one_token(item, tokens) for item in output)
    if isinstance(output, torch.Tensor) and output.shape[:2] == tokens:
        return output[0, 0].to("meta")
    return None


def _make_zeros(form: Any, known: torch.Tensor) -> Any:
    """Return zeros of a form for the tokens of hidden states. They take no memory."""
    if isinstance(form, tuple):
        return tuple(_make_zeros(item, known) for item in form)
    if form is None:
        return None
    return torch.zeros((), dtype=form.dtype, device=known.device).expand(*known.shape[:2], *form.shape)


def is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


@contextmanager
def no_dropout(module: nn.Module) -> Iterator[None]:
    """Turn dropout off in a module, and then restore the mode of each module inside it."""
    modes = {inner: inner.training for inner in module.modules()}
    for inner in modes:
        inner.training = False
    try:
        yield
    finally:
        for inner, mode in modes.items():
            inner.training = mode


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
