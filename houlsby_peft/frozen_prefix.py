"""`FrozenPrefix`: what lies below the first adapter is computed once for each text, and then kept."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from .activation_store import KEY_BYTES, ActivationStore, FolderStore, MemoryStore
from .batching import select_rows
from .prefix_modules import (
    blank,
    embeddings_of,
    lowest_trained_layer,
    module_around,
    modules_before_the_adapter,
    trains,
)
from .registration import PREFIX


class FrozenPrefix:
    """Keeps the activations below the lowest trained layer of a model, from its creation until `remove`.

    Where only upper layers have adapters, what lies below is the same function of a text in every epoch, if dropout is
    off there: so it is, also in training. The activations of a text are computed when it first comes, in any batch,
    and are kept by its tokens; from the second epoch on, the lower layers do not run. In a layer of BERT's kind the
    attention below its first adapter is kept, too, which takes as much memory again.

    Neither the frozen weights nor the set of active adapters may be changed while it is in use. Texts must come as
    `input_ids`, with an `attention_mask` if they are padded; the hidden states of padding are zeros.

    Args:
        model: a model with adapters in the upper layers of one stack, changed in place.
        max_bytes: how much to keep. Further texts are computed each time.
        folder: where to keep it, for later runs, too: in a folder in it that is named by the frozen weights; a text
            counts by its tokens, so that neither the data nor the tokenizer need be known. None: in memory.

    Raises:
        ValueError: nothing is frozen below the lowest trained layer.
    """

    def __init__(self, model: PeftModel, max_bytes: int = 4 * 10**9, folder: Path | None = None) -> None:
        base: Any = model.get_base_model()
        self.name, self.index = lowest_trained_layer(base)
        layers = base.get_submodule(self.name)
        self._embeddings = embeddings_of(base, self.name)
        if self.index == 0 or trains(self._embeddings):
            trained = "the embeddings" if trains(self._embeddings) else f"{self.name}.0"
            raise ValueError(
                f"Something must be frozen below the lowest layer that trains; {trained} trains. Leave lower layers "
                "out by layers_to_transform, and do not give train_layer_norm='all'."
            )
        frozen = list(layers[: self.index])
        self._store: ActivationStore = MemoryStore(max_bytes)
        if folder is not None:
            digest = _digest([self._embeddings, *layers[: self.index + 1]])
            self._store = FolderStore(folder / digest, max_bytes)
        self._keys: list[bytes] = []
        self._mask = torch.ones(0, 0, dtype=torch.bool)
        self._segments = [_Segment(self, b"h", frozen)]
        _without_dropout(self._embeddings)
        # Not on the model as a whole, as a user may call the encoder in it.
        encoder = module_around(base, self._embeddings, self.name)
        self._encoder = encoder
        self._handles = [encoder.register_forward_pre_hook(self._new_batch, with_kwargs=True)]
        self._handles.append(layers[self.index].register_forward_pre_hook(self._extend, with_kwargs=True))
        self._is_extended = False

    def remove(self) -> None:
        """Give the model back as it was; what is in a folder stays there."""
        for handle in self._handles:
            handle.remove()
        for module in [self._embeddings, *(module for segment in self._segments for module in segment.modules)]:
            module.__dict__.pop("forward", None)
            module.__dict__.pop("train", None)
            module.train(self._encoder.training)

    def _new_batch(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        if ids is None:
            raise ValueError("Texts must come as input_ids while their activations are kept; got none.")
        self._mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        texts = [ids, *(given[key] for key in ("token_type_ids", "position_ids") if given.get(key) is not None)]
        rows = zip(torch.stack([text.expand_as(ids) for text in texts], -1).cpu(), self._mask.cpu(), strict=True)
        kind, automatic = ids.device.type, torch.is_autocast_enabled(ids.device.type)
        precision = str(torch.get_autocast_dtype(kind) if automatic else "").encode()
        # With their positions, as other ones have other embeddings where a text is padded on the left.
        self._keys = [
            _hash(precision + own.nonzero().numpy().tobytes() + row[own].numpy().tobytes()) for row, own in rows
        ]

    def _extend(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """At the first batch: keep what lies below the first adapter of its layer, too, if that can be told."""
        if not self._is_extended:
            self._is_extended = True
            modules, shapes = modules_before_the_adapter(layer, args, kwargs)
            if modules:
                self._segments.append(_Segment(self, b"o", modules, shapes))


class _Segment:
    """Modules that run one after the other, of which only the last one's output is used by others.

    They run on the rows whose output is not kept; where all are kept, none runs.

    Args:
        prefix: what it belongs to.
        name: one byte that tells its rows from those of other segments.
        modules: the modules.
        shapes: what each but the last gives: see `blank`. None: what it is given.
    """

    def __init__(
        self, prefix: FrozenPrefix, name: bytes, modules: list[nn.Module], shapes: list[Any] | None = None
    ) -> None:
        self._prefix, self._name, self.modules = prefix, name, modules
        self._missing = torch.zeros(0, dtype=torch.long)
        self._kept: list[torch.Tensor | None] = []
        for number, module in enumerate(modules):
            _without_dropout(module)
            module.forward = partial(self._run, number, module.forward, shapes and shapes[number])

    @torch.no_grad()
    def _run(self, number: int, forward: Any, shape: Any, *args: Any, **kwargs: Any) -> Any:
        keys, last = self._prefix._keys, number == len(self.modules) - 1
        if number == 0:
            self._kept = [self._prefix._store.get(self._own(key)) for key in keys]
            missing = [row for row, kept in enumerate(self._kept) if kept is None]
            self._missing = torch.tensor(missing, device=self._prefix._mask.device, dtype=torch.long)
        output = None
        if len(self._missing):
            args, kwargs = select_rows((args, kwargs), self._missing, len(keys))
            output = forward(*args, **kwargs)
        elif not last:
            return args[0] if shape is None else blank(shape, self._prefix._mask)
        return self._whole(output) if last else output

    def _whole(self, output: torch.Tensor | None) -> torch.Tensor:
        """The output for all rows, from what was kept and what has been computed, which is kept now."""
        mask = self._prefix._mask
        for place, row in enumerate(self._missing.tolist()):
            assert output is not None
            self._kept[row] = output[place][mask[row]]
            self._prefix._store.put(self._own(self._prefix._keys[row]), self._kept[row])
        tokens = torch.cat([rows.to(mask.device) for rows in self._kept if rows is not None])
        whole = tokens.new_zeros(*mask.shape, tokens.shape[-1])
        whole[mask] = tokens
        return whole

    def _own(self, key: bytes) -> bytes:
        return self._name + key[1:]


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()


def _digest(modules: Iterable[nn.Module]) -> str:
    """Of the modules' frozen weights and their kinds."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update(type(module).__name__.encode())
        for name, weight in module.state_dict().items():
            if PREFIX not in name:
                digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
                digest.update(weight.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _without_dropout(module: nn.Module) -> None:
    """In evaluation mode until `train` is deleted from the module's own attributes."""
    module.eval()
    module.train = lambda mode=True: module  # type: ignore[method-assign]
