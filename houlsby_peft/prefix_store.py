"""Where the activations of `FrozenPrefix` are stored."""

from __future__ import annotations

import struct
import uuid
from pathlib import Path

import torch


KEY_BYTES = 16


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
