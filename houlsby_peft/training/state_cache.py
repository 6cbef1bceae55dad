"""The hidden states of a frozen encoder, kept in a file from the first time that a text is read.

A ladder leaves the encoder's hidden states as they are. So in later epochs, and for other tasks on
the same texts, they come from the file, and of the encoder only the embeddings and the last layer
run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import AdapterError
from ..method.modules import base_modules
from ..method.tuner_layer import HoulsbyTunerLayer, batch_of
from ..saved.record import AdapterRecord, Place


_DIGEST = 16  # bytes
# Of an entry: the text's digest, its number of tokens, and the checksum of its states.
_HEADER = struct.Struct(f"<{_DIGEST}sII")
# The attributes of a module that its computation may depend on.
_PLAIN = (bool, int, float, str, type(None), tuple)


class StateFile:
    """States of texts by a digest of their tokens. Several processes may add to the file.

    Args:
        path: The file, which is made if it is not there.
        shape: Of the states of one token: `(layers, d)`.
        dtype: Of the states.
    """

    def __init__(self, path: Path, shape: tuple[int, int], dtype: torch.dtype) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.shape, self.dtype = shape, dtype
        self.bytes_per_token = shape[0] * shape[1] * dtype.itemsize
        # Not through a link, whose target would be written to.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        # By digest: where the states begin, their number of tokens, and their checksum.
        self._entries: dict[bytes, tuple[int, int, int]] = {}
        # Of the entries that are known.
        self._end = 0
        with self._locked():
            self._read_entries()

    def _read_entries(self) -> None:
        """Find what the file has since the last time, and cut off an entry that a killed process
        has begun.
        """
        size = os.fstat(self._file).st_size
        while header := os.pread(self._file, _HEADER.size, self._end):
            start = end = self._end + len(header)
            if len(header) == _HEADER.size:
                digest, tokens, checksum = _HEADER.unpack(header)
                end = start + tokens * self.bytes_per_token
            if len(header) < _HEADER.size or end > size:
                os.ftruncate(self._file, self._end)
                break
            self._entries[digest] = start, tokens, checksum
            self._end = end

    @contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # not on Windows

        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def read(self, digest: bytes, tokens: int) -> torch.Tensor | None:
        """Return the states of a text, `(tokens, layers, d)`; None, and forget them, if they have
        been damaged.
        """
        start, tokens_of_entry, checksum = self._entries[digest]
        content = bytearray(os.pread(self._file, tokens * self.bytes_per_token, start))
        if tokens_of_entry != tokens or zlib.crc32(content) != checksum:
            del self._entries[digest]
            return None
        return torch.frombuffer(content, dtype=self.dtype).view(tokens, *self.shape)

    def add(self, states: Mapping[bytes, torch.Tensor]) -> None:
        """Add the states of texts that the file lacks, `(tokens, layers, d)` on the CPU."""
        with self._locked():
            self._read_entries()
            for digest, state in states.items():
                if digest in self:  # another process has added it since
                    continue
                content = state.contiguous().view(torch.uint8).numpy().tobytes()
                checksum = zlib.crc32(content)
                entry = memoryview(_HEADER.pack(digest, len(state), checksum) + content)
                start, position = self._end + _HEADER.size, self._end
                while entry:  # as much as there is room for at once
                    written = os.pwrite(self._file, entry, position)
                    entry, position = entry[written:], position + written
                self._entries[digest] = start, len(state), checksum
                self._end = position


class StateCache:
    """Runs a frozen encoder from its kept states, where all texts of a batch have some.

    States are kept in half precision, apart for each dtype of autocast. A text whose states are too
    large for float16 is read each time, as is one whose states have been damaged. A pass in which
    the ladder is not applied, or what lies beneath it is not, keeps nothing and reads every text.
    If the disk is full, a warning says so, and no further states are kept. It runs on Linux and
    macOS.

    Args:
        model: A model whose only adapter is a ladder, to be trained in one process. Its encoder
            reads token numbers, not embeddings.
        folder: Folder of the files: one for each encoder.

    Attributes:
        bytes_per_token: What is kept for a token.
        keeps_new: Whether the states of texts that are read from now on are kept. Default: True.

    Raises:
        AdapterError: The model has another adapter, or trains its tokens' embeddings.
    """

    def __init__(self, model: PeftModel, folder: str | os.PathLike[str]) -> None:
        whole = cast(PreTrainedModel, model.get_base_model())
        encoder = cast(PreTrainedModel, whole.base_model)
        tuner: Any = model.base_model
        self._adapter_name = model.active_adapter
        record: AdapterRecord = tuner.records[self._adapter_name]
        layers = [module for module in whole.modules() if isinstance(module, HoulsbyTunerLayer)]
        self._tuner_layers = layers
        place = _find_ladder(model, record)
        last = int(place.layer or 0)
        # By the indices of layers: what tells a ladder the input of the layer.
        self._readers = {
            index: encoder.get_submodule(key) for index, key in place.rungs.items() if index < last
        }
        # The layers whose inputs are kept. The last one runs, and the embeddings give the first.
        self._kept = [index for index in range(1, last + 1) if index in (*self._readers, last)]
        self._signature = inspect.signature(encoder.forward)
        weight = next(encoder.parameters())
        dtype = weight.dtype if weight.dtype.itemsize == 2 else torch.float16
        name = f"{_digest_of_encoder(encoder, record)}-{'_'.join(map(str, self._kept))}.states"
        shape = len(self._kept), whole.config.hidden_size
        self.file = StateFile(Path(folder) / name, shape, dtype)
        self.bytes_per_token = self.file.bytes_per_token
        self.keeps_new = True
        # In a pass: the inputs of layers that stand for those below, or that are to be kept.
        self._replayed: dict[int, torch.Tensor] | None = None
        self._to_keep: dict[int, torch.Tensor] = {}
        self._digests: list[bytes] = []
        self._mask = torch.zeros(0)
        # Of the tuple that a layer returns; 0 if it returns hidden states alone, and None until one
        # has run.
        self._parts_of_output: int | None = None
        self._hooks = [
            encoder.register_forward_pre_hook(self._begin, with_kwargs=True),
            encoder.register_forward_hook(self._end),
        ]
        self._layers: list[Any] = []
        for index in range(last):
            layer: Any = encoder.get_submodule(f"{place.stack}.{index}")
            layer.forward = partial(self._run_layer, index, layer.forward)
            self._layers.append(layer)

    def close(self) -> None:
        """Take the cache off the model, which then reads every text, and close the file."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            del layer.forward
        self.file.close()

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find out which texts the encoder is called with, and whether their states are kept."""
        self._to_keep.clear()
        self._replayed = None
        self._digests = []
        if not self._is_ladder_alone():
            return
        inputs = self._signature.bind(*args, **kwargs).arguments
        ids: torch.Tensor = inputs["input_ids"].cpu()
        mask: torch.Tensor | None = inputs.get("attention_mask")
        self._mask = torch.ones_like(ids).bool() if mask is None else mask.cpu().bool()
        # Beside a token, its hidden states depend on its position and type.
        facts = [torch.arange(ids.shape[1]).expand_as(ids)]
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and name != "attention_mask":
                facts.append(value.cpu().expand_as(ids))
        tokens = torch.stack(facts, -1)
        precision = _autocast_of(inputs["input_ids"].device)
        for row, row_mask in zip(tokens, self._mask, strict=True):
            content = row[row_mask].numpy().tobytes()
            digest = hashlib.blake2b(content, digest_size=_DIGEST, person=precision)
            self._digests.append(digest.digest())
        is_known = all(digest in self.file for digest in self._digests)
        if is_known and self._parts_of_output is not None:
            self._replayed = self._read(inputs["input_ids"].device)

    def _is_ladder_alone(self) -> bool:
        """Return whether this pass applies the ladder, and no other adapter, in all layers.

        Otherwise the adapter beneath it may be left out, or another one may change the states.
        """
        if any(layer.disable_adapters for layer in self._tuner_layers):
            return False
        first = self._tuner_layers[0]
        batch = batch_of(first.state.batches)
        names = first.active_adapters if batch is None else batch.names
        return set(names) == {self._adapter_name}

    def _read(self, device: torch.device) -> dict[int, torch.Tensor] | None:
        """Return the kept inputs of the layers, `(rows, tokens, d)` each; None after damage."""
        states = torch.zeros(*self._mask.shape, *self.file.shape, dtype=self.file.dtype)
        for row, row_mask, digest in zip(states, self._mask, self._digests, strict=True):
            state = self.file.read(digest, int(row_mask.sum()))
            if state is None:
                return None
            row[row_mask] = state
        by_layer = states.to(device).movedim(2, 0).contiguous()
        return dict(zip(self._kept, by_layer, strict=True))

    def _run_layer(
        self, index: int, forward: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kw: Any
    ) -> Any:
        """Run a layer, or return what it returned before."""
        if self._replayed is None:
            output = forward(hidden, *args, **kw)
            self._parts_of_output = len(output) if isinstance(output, tuple) else 0
            self._to_keep[index + 1] = output[0] if self._parts_of_output else output
            return output
        if index in self._readers:
            reader: Any = self._readers[index]
            reader.tell_residual_users((hidden,), {})
        # Where nothing reads the next layer's input, this one's stands for it.
        state = self._replayed.get(index + 1, hidden).to(hidden.dtype)
        if not self._parts_of_output:
            return state
        return (state, *[None] * (self._parts_of_output - 1))

    def _end(self, *_: Any) -> None:
        """Keep the states of the texts that are new."""
        if self._replayed is not None or not self._digests or not self.keeps_new:
            return
        kept = [self._to_keep[index].detach() for index in self._kept]
        states = torch.stack(kept, 2).to(self.file.dtype).cpu()
        new: dict[bytes, torch.Tensor] = {}
        for digest, row, row_mask in zip(self._digests, states, self._mask, strict=True):
            if digest in self.file:
                continue
            state = row[row_mask]
            if state.isfinite().all():
                new[digest] = state
            else:
                warnings.warn(
                    f"Hidden states that are too large for {self.file.dtype} are not kept: the "
                    "encoder reads their texts each time. It keeps them if it is in bfloat16.",
                    stacklevel=2,
                )
        self._to_keep.clear()
        try:
            self.file.add(new)
        except OSError as error:  # such as a full disk, which is no reason to end a training
            self.keeps_new = False
            warnings.warn(f"No further hidden states are kept: {error}", stacklevel=2)


def _autocast_of(device: torch.device) -> bytes:
    """Return what tells passes in one precision from those in another; empty without autocast."""
    if not torch.is_autocast_enabled(device.type):
        return b""
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.").encode()


def _find_ladder(model: PeftModel, record: AdapterRecord) -> Place:
    """Return the place of a model's ladder, by names inside the encoder."""
    place = record.ladder
    embeddings = cast(PreTrainedModel, model.get_base_model()).get_input_embeddings()
    trains_tokens = any(weight.requires_grad for weight in embeddings.parameters())
    if len(model.peft_config) > 1 or place is None or trains_tokens:
        raise AdapterError(
            "What the model trains below its end must be one ladder: other adapters and trained "
            "tokens change the hidden states."
        )
    return place


def _digest_of_encoder(encoder: PreTrainedModel, record: AdapterRecord) -> str:
    """Return a digest of what a pass through the encoder reads and does not train: its options,
    weights and buffers, the classes and attributes of its modules, and the adapter beneath the
    ladder.
    """
    digest = hashlib.blake2b(digest_size=8)
    if record.beneath is not None:
        digest.update(record.beneath_name.encode())
    options = encoder.config.to_dict()
    for name in PreTrainedConfig().to_dict():  # labels, names and the like
        options.pop(name, None)
    digest.update(json.dumps(options, sort_keys=True, default=str).encode())
    for module_name, module in base_modules(encoder):
        facts: list[object] = [module_name, type(module).__qualname__]
        for name, value in sorted(vars(module).items()):
            if name != "training" and isinstance(value, _PLAIN):
                facts.append((name, value))
        digest.update(repr(facts).encode())
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            if not tensor.requires_grad:
                digest.update(name.encode())
                content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                digest.update(content.numpy().data)
    return digest.hexdigest()
