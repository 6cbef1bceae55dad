"""Files of runs: JSON that is written whole, and checksums of files and folders.

This file imports no PyTorch, so that sweep.py and study_table.py start in a moment.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


_PART = 1 << 24  # bytes that are read at once
FINGERPRINTED = (".json", ".safetensors", ".bin", ".txt", ".model")  # files of a model's folder


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that other processes, also after a kill, see all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file is missing, damaged or holds something
    else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: Mapping[str, Any] | Iterable[Any]) -> None:
    """Write an object as write_atomically does."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def fingerprint(path: Path) -> str:
    """Return a checksum of a file, or of the names and the content of the files directly in the
    folder of a model.

    Cards and logs, which change without changing the model, are left out.
    """
    if path.is_file():
        return f"{add_to_checksum(0, path, name=''):08x}"
    total = 0
    for file in sorted(path.iterdir()):
        if file.is_file() and file.suffix in FINGERPRINTED:
            total = add_to_checksum(total, file, file.name)
    return f"{total:08x}"


def fingerprint_of_all(path: Path) -> str:
    """Return a checksum of a file, or of all files in a folder of data."""
    if path.is_file():
        return fingerprint(path)
    total = 0
    for file in sorted(path.rglob("*")):
        if file.is_file():
            total = add_to_checksum(total, file, file.relative_to(path).as_posix())
    return f"{total:08x}"


def add_to_checksum(total: int, file: Path, name: str) -> int:
    """Return a checksum that goes on with a file: its name, its size and its content."""
    size = file.stat().st_size
    total = zlib.crc32(f"{name} {size}".encode(), total)
    with file.open("rb") as opened:
        while part := opened.read(_PART):
            total = zlib.crc32(part, total)
    return total
