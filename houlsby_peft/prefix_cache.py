"""Compute the frozen layers below the first adapter once per text and cache their output."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from .batching import select_rows
from .errors import check_bytes, check_kind, shortened
from .prefix_layers import (
    find_embeddings,
    find_encoder,
    find_lengths,
    find_lowest_trained_layer,
    find_modules_before_adapter,
    hidden_states,
    is_trained,
    make_tuple,
    make_zeros,
    override,
    record_calls,
)
from .prefix_store import KEY_BYTES, FolderStore, MemoryStore, digest_modules, digest_tensor


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
        layers_name, self.index = find_lowest_trained_layer(base)
        layers = base.get_submodule(layers_name)
        embeddings = find_embeddings(base, layers_name)
        if self.index == 0 or is_trained(embeddings):
            trained = "the embeddings are" if is_trained(embeddings) else f"{layers_name}.0 is"
            raise ValueError(
                f"FrozenPrefix needs frozen embeddings and at least one frozen layer below the adapters; {trained} "
                "trained. Adapt upper layers only with layers_to_transform, and set neither train_layer_norm='all' "
                "nor invertible."
            )
        self._store: MemoryStore | FolderStore = MemoryStore(max_bytes)
        if folder is not None:
            self._store = FolderStore(folder / digest_modules([embeddings, *layers[: self.index + 1]]), max_bytes)
        self._batch = _Batch([], torch.ones(0, 0, dtype=torch.bool))
        # The model that a user calls may be around the encoder or the encoder itself, so the hook is on the encoder.
        self._encoder = find_encoder(base, embeddings, layers_name)
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
        self._undo.append(override(tuner, _enable_peft_forward_hooks=refuse))
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
            recorded = record_calls(self._encoder, self._frozen, (), {"input_ids": ids})
        except Exception:
            # An attention for GPUs does not run on a model that is still on the CPU, for example.
            return
        self._lengths += find_lengths(recorded, self._encoder, self._frozen, (), {"input_ids": ids}, ids.shape)

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
            recorded = record_calls(encoder, self._frozen, args, kwargs)
            self._lengths += find_lengths(recorded, encoder, self._frozen, args, kwargs, ids.shape)
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
                digest_tensor(digest, name, value)
            for name, value in per_row.items():
                digest_tensor(digest, name, value[row])
            for name, value in per_token.items():
                digest_tensor(digest, name, value[row][own])
            keys.append(digest.digest())
        self._batch.keys, self._batch.mask = keys, mask

    def _end_batch(self, encoder: nn.Module, args: Any, output: Any) -> None:
        self._batch.keys = []

    def _examine_layer(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """On the first batch, cache what precedes the first adapter of the layer as well, if it can be determined."""
        if not self._lengths:  # they are being examined
            return
        self._first_batch.remove()
        modules, templates = find_modules_before_adapter(layer, args, kwargs)
        if modules:
            self._cache_output(b"o", modules, templates)

    def _cache_output(self, name: bytes, modules: list[nn.Module], templates: list[Any] | None) -> None:
        cached = _CachedModules(self._store, self._batch, name, len(modules), templates, self._lengths)
        for number, module in enumerate(modules):
            self._turn_dropout_off(module)
            self._undo.append(override(module, forward=partial(cached.run, number, module.forward)))

    def _turn_dropout_off(self, module: nn.Module) -> None:
        module.eval()
        self._undo.append(override(module, train=lambda mode=True: module))
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
            hidden_states(output).requires_grad_()
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
            hidden = self._complete(hidden_states(output))
        elif is_last:
            hidden = self._complete(None)
        elif self.templates is not None:
            return make_zeros(self.templates[number], self.batch.mask)
        else:
            hidden = args[0]
        return make_tuple(hidden, self.lengths[number]) if self.templates is None else hidden

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
