"""Keeps rows of activations by a key, in memory or in a folder, up to a number of bytes."""

from __future__ import annotations

import struct
import uuid
from pathlib import Path
from typing import Protocol

import torch


KEY_BYTES = 16


class ActivationStore(Protocol):
    """What both stores do. Once full they keep what they have: all rows come again in every epoch, so that dropping
    the oldest ones would drop each just before it is needed."""

    def get(self, key: bytes) -> torch.Tensor | None:
        """The rows of a key, `(tokens, width)` on the CPU; None if there are none."""
        ...

    def put(self, key: bytes, rows: torch.Tensor) -> None:
        """Keep the rows of a key of 16 bytes, if there is room."""
        ...


class MemoryStore:
    """Rows in memory.

    Args:
        max_bytes: how many to keep at most.
    """

    def __init__(self, max_bytes: int) -> None:
        self._room = max_bytes
        self._rows: dict[bytes, torch.Tensor] = {}

    def get(self, key: bytes) -> torch.Tensor | None:
        return self._rows.get(key)

    def put(self, key: bytes, rows: torch.Tensor) -> None:
        if key not in self._rows and rows.nbytes <= self._room:
            self._rows[key] = rows.to("cpu", copy=True)
            self._room -= rows.nbytes


class FolderStore:
    """Rows in files, which later runs find again.

    Every process appends to files of its own, and reads those that were there when it started: several may use one
    folder at the same time. A row counts once its entry in the index is whole, so that a crash does no harm.

    Args:
        folder: where the files are; made if it is missing.
        max_bytes: how many to keep at most, earlier runs' rows included.
    """

    _ENTRY = struct.Struct(f"{KEY_BYTES}sQIIB")  # key, offset in the file, tokens, width, number of the dtype
    _DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._places: dict[bytes, tuple[Path, int, int, int, int]] = {}
        for index in sorted(folder.glob("*.index")):
            entries = index.read_bytes()
            whole = len(entries) - len(entries) % self._ENTRY.size
            for key, *place in self._ENTRY.iter_unpack(entries[:whole]):
                self._places[key] = (index.with_suffix(".rows"), *place)
        self._room = max_bytes - sum(file.stat().st_size for file in folder.glob("*.rows"))
        self._own = folder / f"{uuid.uuid4().hex}.rows"
        self._end = 0

    def get(self, key: bytes) -> torch.Tensor | None:
        if key not in self._places:
            return None
        path, offset, tokens, width, number = self._places[key]
        dtype = self._DTYPES[number]
        content = bytearray(tokens * width * dtype.itemsize)
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            file.readinto(content)
        return torch.frombuffer(content, dtype=dtype).view(tokens, width)

    def put(self, key: bytes, rows: torch.Tensor) -> None:
        if key in self._places or rows.nbytes > self._room:
            return
        place = (self._end, *rows.shape, self._DTYPES.index(rows.dtype))
        with self._own.open("ab") as file:
            file.write(rows.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        with self._own.with_suffix(".index").open("ab") as file:
            file.write(self._ENTRY.pack(key, *place))
        self._places[key] = (self._own, *place)
        self._end += rows.nbytes
        self._room -= rows.nbytes
