"""Compute the frozen layers below the first adapter once per text and cache their output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from .errors import check_bytes, check_kind, shortened
from .prefix_keys import Texts, digest_modules
from .prefix_layers import (
    Shortcut,
    find_embeddings,
    find_encoder,
    find_lowest_trained_layer,
    find_shortcut,
    is_trained,
    no_dropout,
    override,
)
from .prefix_store import FolderStore, MemoryStore


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
        if folder is not None:
            folder = folder / digest_modules([embeddings, *layers[: self.index + 1]])
        # The model that a user calls may be around the encoder or the encoder itself, so the hook is on the encoder.
        self._encoder = find_encoder(base, embeddings, layers_name)
        self._layers = (list(layers[: self.index]), layers[self.index])
        self._shortcut: Shortcut | None = None
        self._undo: list[Callable[[], None]] = []
        self._without_dropout: list[nn.Module] = []
        shortcut = self._examine_made_up_texts(base.get_input_embeddings())
        self._store = MemoryStore(max_bytes) if folder is None else FolderStore(folder, max_bytes)
        self._turn_dropout_off(embeddings)
        if shortcut is not None:
            self._open(shortcut)
        tuner: Any = model.base_model
        refuse = partial(_refuse_names, tuner._enable_peft_forward_hooks)
        self._undo.append(override(tuner, _enable_peft_forward_hooks=refuse))
        self._undo.append(self._encoder.register_forward_pre_hook(self._start_batch, with_kwargs=True).remove)
        self._undo.append(self._encoder.register_forward_hook(self._end_batch, always_call=True).remove)

    def remove(self) -> None:
        """Restore the model, dropout included. The content of a folder is kept."""
        while self._undo:
            self._undo.pop()()
        for module in self._without_dropout:
            module.train(self._encoder.training)

    def _examine_made_up_texts(self, tokens: nn.Module) -> Shortcut | None:
        """Return what may be left out, or None if the model does not run yet.

        Args:
            tokens: The input embeddings, which are on the device where the texts are to be.
        """
        device = next((weight.device for weight in tokens.parameters() if not weight.is_meta), None)
        # Of unlike tokens: where all are the same, nothing depends on position biases.
        ids = torch.tensor([[0, 1, 2], [1, 2, 0]], device=device)
        try:
            with torch.no_grad(), no_dropout(self._encoder):
                self._encoder.forward(input_ids=ids)
        except Exception:
            # An attention for GPUs does not run on a model that is still on the CPU, for example.
            return None
        return find_shortcut(self._encoder, *self._layers, Texts.read(self._encoder, (), {"input_ids": ids}))

    def _open(self, shortcut: Shortcut) -> Shortcut:
        self._shortcut = shortcut
        for span in shortcut.spans:
            for module in span.forms:
                self._turn_dropout_off(module)
        self._undo.append(shortcut.open())
        return shortcut

    def _turn_dropout_off(self, module: nn.Module) -> None:
        module.eval()
        self._undo.append(override(module, train=lambda mode=True: module))
        self._without_dropout.append(module)

    def _start_batch(self, encoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Look up or compute the activations of a batch's texts. Registered as a forward pre-hook of the encoder."""
        texts = Texts.read(encoder, args, kwargs)
        shortcut = self._shortcut or self._open(find_shortcut(self._encoder, *self._layers, texts))
        shortcut.known = self._find_activations(texts, shortcut)

    def _end_batch(self, encoder: nn.Module, args: Any, output: Any) -> None:
        if self._shortcut is not None:
            self._shortcut.known = None

    def _find_activations(self, texts: Texts, shortcut: Shortcut) -> dict[bytes, torch.Tensor]:
        """Return what the spans return for a batch, `(texts, tokens, width)`, and cache what was not in the cache."""
        keys = texts.keys()
        found = {span.name: [self._store.get(span.name + key) for key in keys] for span in shortcut.spans}
        if missing := [row for row in range(len(keys)) if any(rows[row] is None for rows in found.values())]:
            computed = shortcut.compute(texts.select(missing))
            for number, row in enumerate(missing):
                for name, output in computed.items():
                    found[name][row] = own = output[number, texts.mask[row]]
                    self._store.put(name + keys[row], own)
        activations = {}
        for name, rows in found.items():
            tokens = torch.cat([row.to(texts.mask.device) for row in rows if row is not None])
            activations[name] = tokens.new_zeros(*texts.mask.shape, tokens.shape[-1])
            activations[name][texts.mask] = tokens
        return activations


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
