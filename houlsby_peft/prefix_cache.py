"""Compute the frozen layers below the first adapter once per text and cache their output.

`FrozenPrefix` comes first. It caches the outputs of modules with `_CachedModules`, finds these modules with the
functions after it, and stores the activations in a `MemoryStore` or a `FolderStore`.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from .batching import select_rows
from .errors import check_bytes, check_kind, shortened
from .layer import HoulsbyLayer, HoulsbyTunerLayer, is_inside
from .registration import PREFIX


KEY_BYTES = 16


class FrozenPrefix:
    """Cache the output of the frozen layers below the lowest trained layer, until `remove` is called.

    If only upper layers have adapters, the layers below them compute the same activations for a text in every epoch,
    provided that their dropout is off. `FrozenPrefix` turns their dropout off, also in training mode, and caches their
    output by the tokens of each text. A text is computed the first time it appears in a batch. From the second epoch
    on, the frozen layers do not run. Where a frozen attention precedes the first adapter of the lowest trained layer,
    as in BERT, its output is cached as well, which doubles the size of the cache.

    While the cache is in use, do not change the frozen weights or the active adapters, and pass texts as `input_ids`,
    with an `attention_mask` if they are padded. Other tensors, such as LayoutLM's `bbox`, also identify a text. The
    hidden states of padding tokens are zeros. With `output_hidden_states=True`, those of the frozen layers are
    placeholders, except for the highest one. `output_attentions` and `adapter_names` are refused.

    Args:
        model: Model with adapters in the upper layers of a single encoder or decoder. It is changed in place.
        max_bytes: Maximum size of the cache in bytes. Texts that do not fit are computed every time.
        folder: Folder for the cache. Later runs reuse its content, and several processes may use it at the same
            time. The cache is in a subfolder named after a digest of the frozen weights, those of other active
            adapters included, so a folder can serve many models and data sets. Pass None to keep the cache in memory.

    Attributes:
        index: Index of the lowest trained layer, which is also the number of frozen layers.

    Raises:
        TypeError: `model` is not a `PeftModel`.
        ValueError: No layer below the lowest trained layer is frozen, the trained adapters are not in a single list
            of layers, the frozen layers pass on more than hidden states, as T5's position biases, or the weights
            that identify a folder are offloaded. If the model cannot run before it is moved to another device, what
            the frozen layers pass on is only known in the first forward pass, which then raises this error.
    """

    def __init__(self, model: PeftModel, max_bytes: int = 4 * 10**9, folder: Path | None = None) -> None:
        check_kind("model", model, PeftModel, "a PeftModel, which peft.get_peft_model returns")
        check_bytes("max_bytes", max_bytes)
        base: Any = model.get_base_model()
        layers_name, self.index = _find_lowest_trained_layer(base)
        layers = base.get_submodule(layers_name)
        embeddings = _find_embeddings(base, layers_name)
        if self.index == 0 or _is_trained(embeddings):
            trained = "the embeddings are" if _is_trained(embeddings) else f"{layers_name}.0 is"
            raise ValueError(
                f"FrozenPrefix needs frozen embeddings and at least one frozen layer below the adapters; {trained} "
                "trained. Adapt upper layers only with layers_to_transform, and set neither train_layer_norm='all' "
                "nor invertible."
            )
        self._store: MemoryStore | FolderStore = MemoryStore(max_bytes)
        if folder is not None:
            self._store = FolderStore(folder / _digest([embeddings, *layers[: self.index + 1]]), max_bytes)
        self._batch = _Batch([], torch.ones(0, 0, dtype=torch.bool))
        # The model that a user calls may be around the encoder or the encoder itself, so the hook is on the encoder.
        self._encoder = _find_encoder(base, embeddings, layers_name)
        self._frozen = list(layers[: self.index])
        # From a frozen layer's number to the length of the tuple that it returns; 0 for a tensor. Empty until known.
        self._lengths: list[int] = []
        self._examine_layers(base.get_input_embeddings())
        self._undo: list[Callable[[], None]] = []
        self._without_dropout: list[nn.Module] = []
        self._turn_dropout_off(embeddings)
        self._cache_output(b"h", self._frozen, templates=None)
        tuner: Any = model.base_model
        refuse = partial(_refuse_names, tuner._enable_peft_forward_hooks)
        self._undo.append(_override(tuner, _enable_peft_forward_hooks=refuse))
        self._undo.append(self._encoder.register_forward_pre_hook(self._start_batch, with_kwargs=True).remove)
        self._undo.append(self._encoder.register_forward_hook(self._end_batch, always_call=True).remove)
        # What precedes the adapter inside the lowest trained layer is only known when a batch runs through it.
        self._first_batch = layers[self.index].register_forward_pre_hook(self._examine_layer, with_kwargs=True)
        self._undo.append(self._first_batch.remove)

    def remove(self) -> None:
        """Restore the model, dropout included. The content of a folder is kept."""
        while self._undo:
            self._undo.pop()()
        for module in self._without_dropout:
            module.train(self._encoder.training)

    def _examine_layers(self, tokens: nn.Module) -> None:
        """Find out from two made-up texts what the frozen layers return, before anything is changed.

        Args:
            tokens: The input embeddings, which are on the device where the texts are to be.
        """
        device = next((weight.device for weight in tokens.parameters() if not weight.is_meta), None)
        # Of unlike tokens: where all are the same, nothing depends on position biases.
        ids = torch.tensor([[0, 1, 2], [1, 2, 0]], device=device)
        try:
            recorded = _record_calls(self._encoder, self._frozen, (), {"input_ids": ids})
        except Exception:
            # An attention for GPUs does not run on a model that is still on the CPU, for example.
            return
        self._lengths += _find_lengths(recorded, self._encoder, self._frozen, (), {"input_ids": ids}, ids.shape)

    def _start_batch(self, encoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Compute the cache keys of a batch's texts. Registered as a forward pre-hook of the encoder."""
        given = inspect.signature(encoder.forward).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        if ids is None:
            raise ValueError(
                "FrozenPrefix recognizes texts by their input_ids; got none. Pass input_ids, or call remove() first."
            )
        whole, per_row, per_token = _sort_inputs(given, ids)
        if not self._lengths:
            recorded = _record_calls(encoder, self._frozen, args, kwargs)
            self._lengths += _find_lengths(recorded, encoder, self._frozen, args, kwargs, ids.shape)
        if given.get("output_attentions", getattr(getattr(encoder, "config", None), "output_attentions", False)):
            raise ValueError(
                "FrozenPrefix does not cache attention probabilities; got output_attentions=True. Leave it out, or "
                "call remove() first."
            )
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        device = ids.device.type
        precision = str(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else "").encode()
        keys = []
        for row, own in enumerate(mask.cpu()):
            digest = hashlib.blake2b(precision, digest_size=KEY_BYTES - 1)
            # The indices of the tokens are part of the key: padding on the left changes the position embeddings.
            digest.update(own.nonzero().numpy().tobytes())
            for name, value in whole.items():
                _digest_weight(digest, name, value)
            for name, value in per_row.items():
                _digest_weight(digest, name, value[row])
            for name, value in per_token.items():
                _digest_weight(digest, name, value[row][own])
            keys.append(digest.digest())
        self._batch.keys, self._batch.mask = keys, mask

    def _end_batch(self, encoder: nn.Module, args: Any, output: Any) -> None:
        self._batch.keys = []

    def _examine_layer(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """On the first batch, cache what precedes the first adapter of the layer as well, if it can be determined."""
        if not self._lengths:  # they are being examined
            return
        self._first_batch.remove()
        modules, templates = _find_modules_before_adapter(layer, args, kwargs)
        if modules:
            self._cache_output(b"o", modules, templates)

    def _cache_output(self, name: bytes, modules: list[nn.Module], templates: list[Any] | None) -> None:
        cached = _CachedModules(self._store, self._batch, name, len(modules), templates, self._lengths)
        for number, module in enumerate(modules):
            self._turn_dropout_off(module)
            self._undo.append(_override(module, forward=partial(cached.run, number, module.forward)))

    def _turn_dropout_off(self, module: nn.Module) -> None:
        module.eval()
        self._undo.append(_override(module, train=lambda mode=True: module))
        self._without_dropout.append(module)


@dataclass
class _Batch:
    """The texts that are passing through the model."""

    keys: list[bytes]  # empty outside of the encoder's forward pass
    mask: torch.Tensor  # (texts, tokens), False at padding


@dataclass
class _CachedModules:
    """Modules that run in sequence, where only the output of the last one is used by other modules.

    They run on the texts whose output is not in the cache. If all texts of a batch are cached, no module runs.

    Args:
        store: Holds the output of the last module.
        batch: The current texts.
        name: One byte that distinguishes these modules' entries in the store from those of other modules.
        count: Number of modules.
        templates: For each module, its output for one token; see `_make_template`. A module that does not run returns
            zeros of this form. None for modules that return what they receive, such as layers.
        lengths: For each layer, the length of the tuple that it returns, hidden states first; 0 for a tensor.
    """

    store: MemoryStore | FolderStore
    batch: _Batch
    name: bytes
    count: int
    templates: Sequence[Any] | None
    lengths: Sequence[int]
    _cached: list[torch.Tensor | None] = field(default_factory=list)
    _missing: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    def run(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one of the modules on the texts that are not cached, in place of its `forward`."""
        with torch.no_grad():
            # Gradient checkpointing runs modules again in the backward pass, on the texts of any earlier batch.
            output = self._run(number, forward, args, kwargs) if self.batch.keys else forward(*args, **kwargs)
        # With reentrant checkpointing, a layer whose input requires no gradient is not trained.
        if self.templates is None and torch.is_grad_enabled() and args[0].requires_grad:
            _hidden_states(output).requires_grad_()
        return output

    def _run(self, number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if number == 0:
            self._cached = [self.store.get(self.name + key) for key in self.batch.keys]
            missing = [row for row, cached in enumerate(self._cached) if cached is None]
            self._missing = torch.tensor(missing, device=self.batch.mask.device, dtype=torch.long)
        is_last = number == self.count - 1
        if len(self._missing):
            args, kwargs = select_rows((args, kwargs), self._missing, len(self.batch.keys))
            output = forward(*args, **kwargs)
            if not is_last:
                return output
            hidden = self._complete(_hidden_states(output))
        elif is_last:
            hidden = self._complete(None)
        elif self.templates is not None:
            return _make_zeros(self.templates[number], self.batch.mask)
        else:
            hidden = args[0]
        return _make_tuple(hidden, self.lengths[number]) if self.templates is None else hidden

    def _complete(self, computed: torch.Tensor | None) -> torch.Tensor:
        """Store the output of the missing texts and return the output of all texts, `(texts, tokens, width)`."""
        mask = self.batch.mask
        if computed is not None:
            for row, output in zip(self._missing.tolist(), computed, strict=True):
                self._cached[row] = output[mask[row]]
                self.store.put(self.name + self.batch.keys[row], self._cached[row])
        tokens = torch.cat([rows.to(mask.device) for rows in self._cached if rows is not None])
        whole = tokens.new_zeros(*mask.shape, tokens.shape[-1])
        whole[mask] = tokens
        return whole


def _find_lowest_trained_layer(model: nn.Module) -> tuple[str, int]:
    """Return the name of the list of layers that holds the trained adapters, and the lowest index among them."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    lowest: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, HoulsbyTunerLayer) and _is_trained(module):
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


def _find_embeddings(model: Any, layers: str) -> nn.Module:
    """Return the largest module that contains the input embeddings and not the layers."""
    tokens = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is tokens)
    while (outer := name.rpartition(".")[0]) and not is_inside(layers, outer):
        name = outer
    return model.get_submodule(name)  # type: ignore[no-any-return]


def _find_encoder(model: nn.Module, embeddings: nn.Module, layers: str) -> nn.Module:
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
def _record_calls(
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
        return _make_tuple(output[0], len(output)) if hidden_only and isinstance(output, tuple) else output

    undo = [_override(layer, forward=partial(run, number, layer.forward)) for number, layer in enumerate(layers)]
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


def _find_lengths(
    recorded: tuple[list[_Call], Any],
    encoder: nn.Module,
    layers: list[nn.Module],
    args: Any,
    kwargs: Any,
    tokens: torch.Size,
) -> list[int]:
    """Return the length of the tuple that each layer returns, 0 for a tensor.

    Args:
        recorded: What `_record_calls` returns for these arguments.
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
            _, found = _record_calls(encoder, layers, args, kwargs, hidden_only=True)
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
        hidden = _hidden_states(call.output)
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
                    alone = _hidden_states(layers[number].forward(*args, **kwargs))
                # In half precision, other kernels give slightly different results.
                same = bool((alone - hidden[-1:]).float().norm() <= 0.02 * hidden[-1:].float().norm())
            except Exception:
                same = False
            if not same:
                return f"layer {number} gives a text another output if it runs on this text alone"
        before = hidden
    return ""


def _hidden_states(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _make_tuple(hidden: torch.Tensor, length: int) -> Any:
    """Return the output of a layer that returns a tuple of this length, or a tensor if it is 0."""
    return (hidden, *[None] * (length - 1)) if length else hidden


@torch.no_grad()
def _find_modules_before_adapter(layer: nn.Module, args: Any, kwargs: Any) -> tuple[list[nn.Module], list[Any]]:
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
            output = received if module is modules[-1] else _make_zeros(template, args[0][..., 0])
            undo.append(_override(module, forward=lambda *_, output=output, **__: output))
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
        if isinstance(module, HoulsbyTunerLayer) and _is_trained(module):
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


def _make_zeros(template: Any, mask: torch.Tensor) -> Any:
    """Return zeros for every token of a batch in the form of a template. They take no memory."""
    if template is None:
        return None
    if isinstance(template, tuple):
        return tuple(_make_zeros(item, mask) for item in template)
    return torch.zeros((), dtype=template.dtype, device=mask.device).expand(*mask.shape, *template.shape)


def _refuse_names(enter: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse rows of named adapters, in place of the context that PEFT enters for a forward pass or a generation.

    Raises:
        ValueError: `adapter_names` are given.
    """
    # Not in the encoder: the search for the rows' places runs it before, and would keep the error for good.
    if kwargs.get("adapter_names") is not None:
        raise ValueError(
            "FrozenPrefix caches the frozen layers with the active adapters, so no others can be named; got "
            f"adapter_names={shortened(repr(kwargs['adapter_names']))}. Leave adapter_names out, or call the "
            "FrozenPrefix's remove() first."
        )
    return enter(*args, **kwargs)


def _sort_inputs(
    given: dict[str, Any], ids: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors that an encoder is called with: those without rows, with one per text, and one per token.

    Args:
        given: The encoder's arguments, by name.
        ids: The `input_ids` among them, `(texts, tokens)`.

    Raises:
        ValueError: One of them cannot be part of the cache keys.
    """
    whole: dict[str, torch.Tensor] = {}
    per_row: dict[str, torch.Tensor] = {}
    per_token: dict[str, torch.Tensor] = {}
    for name, value in sorted(given.items()):
        # The number of labels in a step, with which transformers' Trainer scales the loss.
        if value is None or isinstance(value, (bool, int, float, str)) or name == "num_items_in_batch":
            continue
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or (name == "attention_mask" and value.shape != ids.shape):
            got = f"the shape {tuple(value.shape)}" if is_tensor else type(value).__name__
            raise ValueError(
                "FrozenPrefix recognizes texts by the tensors that the model is called with, and attention_mask must "
                f"have the shape of input_ids, {tuple(ids.shape)}; got {name} of {got}. Leave it out, or call "
                "remove() first."
            )
        if name == "attention_mask":
            continue
        if name == "position_ids" and value.dim() == 2:
            value = value.expand_as(ids)
        kind = per_token if value.shape[:2] == ids.shape else per_row if value.shape[:1] == ids.shape[:1] else whole
        kind[name] = value.detach().cpu()
    return whole, per_row, per_token


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _override(module: nn.Module, **methods: Callable[..., Any]) -> Callable[[], None]:
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


def _digest(modules: Iterable[nn.Module]) -> str:
    """Return a digest of the classes and the frozen weights of modules, those of active adapters included."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update(type(module).__name__.encode())
        for name, weight in module.state_dict().items():
            if weight.is_meta:
                raise ValueError(
                    "FrozenPrefix identifies a folder by the frozen weights, which must be in memory; "
                    f"{name} of a {type(module).__name__} is offloaded. Use folder=None, or load the model without "
                    "offloading."
                )
            if PREFIX not in name:
                _digest_weight(digest, name, weight)
        for place, inner in module.named_modules():
            if isinstance(inner, HoulsbyTunerLayer):
                _digest_adapters(digest, place, inner)
            elif isinstance(inner, AuxiliaryTrainingWrapper):
                # The weights of all its adapters are in the state above; which of them compute is not.
                digest.update(f"{place} {inner.active_adapters} {inner.disable_adapters}".encode())
    return digest.hexdigest()[:32]


def _digest_adapters(digest: Any, place: str, layer: HoulsbyTunerLayer) -> None:
    """Add the adapters to a digest that a layer applies and that are not trained, in their order."""
    if layer.disable_adapters:
        return
    for name in layer.active_adapters:
        added = [getattr(layer, container) for container in layer.adapter_layer_names]
        # A shared bottleneck may be registered in another layer.
        own: list[Any] = [layer.bottleneck(name)] if isinstance(layer, HoulsbyLayer) else []
        own += [container[name] for container in added if name in container and not own]
        for adapter in own:
            if adapter is None or _is_trained(adapter):
                continue
            # Its repr has the activation, which is no weight.
            kind, scaling = getattr(adapter, "kind", ""), getattr(adapter, "scaling", "")
            factor = "" if isinstance(scaling, torch.Tensor) else scaling
            digest.update(f"{place} {name} {kind} {factor} {adapter!r}".encode())
            for key, weight in adapter.state_dict().items():
                _digest_weight(digest, key, weight)


def _digest_weight(digest: Any, name: str, weight: torch.Tensor) -> None:
    digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
    digest.update(weight.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


class MemoryStore:
    """Store the activations of texts in memory.

    A full store keeps what it has. All texts come again in every epoch, so dropping the oldest one would drop each
    text just before it is needed.

    Args:
        max_bytes: Maximum size of all activations.
    """

    def __init__(self, max_bytes: int) -> None:
        self._free = max_bytes
        self._entries: dict[bytes, torch.Tensor] = {}

    def get(self, key: bytes) -> torch.Tensor | None:
        """Return the activations of a key, `(tokens, width)` on the CPU, or None if there are none."""
        return self._entries.get(key)

    def put(self, key: bytes, rows: torch.Tensor) -> None:
        """Store the activations of a key of 16 bytes if they fit."""
        if key not in self._entries and rows.nbytes <= self._free:
            self._entries[key] = rows.to("cpu", copy=True)
            self._free -= rows.nbytes


class FolderStore:
    """Store the activations of texts in files, where later runs find them.

    Each process appends records to a file of its own and reads the files that exist when it starts, so several
    processes may share a folder. A record is a header, which holds the key, the shape and the dtype, followed by the
    activations. A record that a crash has truncated is ignored.

    Args:
        folder: Folder of the files. It is created if it does not exist.
        max_bytes: Maximum size of all files, including those of earlier runs.
    """

    _HEADER = struct.Struct(f"<{KEY_BYTES}sIIB")  # key, tokens, width, index of the dtype
    _DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._free = max_bytes
        # From key to file, offset of the activations, shape and dtype.
        self._entries: dict[bytes, tuple[Path, int, tuple[int, int], torch.dtype]] = {}
        for path in sorted(folder.glob("*.activations")):
            size = path.stat().st_size
            self._free -= size
            with path.open("rb", buffering=0) as file:
                while len(header := file.read(self._HEADER.size)) == self._HEADER.size:
                    key, tokens, width, number = self._HEADER.unpack(header)
                    offset, dtype = file.tell(), self._DTYPES[number]
                    if file.seek(tokens * width * dtype.itemsize, 1) > size:
                        break
                    self._entries[key] = (path, offset, (tokens, width), dtype)
        self._path = folder / f"{uuid.uuid4().hex}.activations"

    def get(self, key: bytes) -> torch.Tensor | None:
        """Return the activations of a key, `(tokens, width)` on the CPU, or None if there are none."""
        if key not in self._entries:
            return None
        path, offset, shape, dtype = self._entries[key]
        rows = torch.empty(shape, dtype=dtype)
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            file.readinto(rows.view(torch.uint8).numpy().data)
        return rows

    def put(self, key: bytes, rows: torch.Tensor) -> None:
        """Store the activations of a key of 16 bytes if they fit."""
        size = self._HEADER.size + rows.nbytes
        if key in self._entries or size > self._free:
            return
        tokens, width = rows.shape
        with self._path.open("ab") as file:
            file.write(self._HEADER.pack(key, tokens, width, self._DTYPES.index(rows.dtype)))
            offset = file.tell()
            file.write(rows.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        self._entries[key] = (self._path, offset, (tokens, width), rows.dtype)
        self._free -= size
