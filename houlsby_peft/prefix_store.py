"""Where the activations of `FrozenPrefix` are stored, and the digests that identify weights and texts."""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from .layer import HoulsbyLayer, HoulsbyTunerLayer
from .prefix_layers import is_trained
from .registration import PREFIX


KEY_BYTES = 16


def digest_modules(modules: Iterable[nn.Module]) -> str:
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
                digest_tensor(digest, name, weight)
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
            if adapter is None or is_trained(adapter):
                continue
            # Its repr has the activation, which is no weight.
            kind, scaling = getattr(adapter, "kind", ""), getattr(adapter, "scaling", "")
            factor = "" if isinstance(scaling, torch.Tensor) else scaling
            digest.update(f"{place} {name} {kind} {factor} {adapter!r}".encode())
            for key, weight in adapter.state_dict().items():
                digest_tensor(digest, key, weight)


def digest_tensor(digest: Any, name: str, weight: torch.Tensor) -> None:
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
