"""Files that are whole or not there: written at once, listed with checksums, and compared with such a list later."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from training.errors import RecipeError


_CHUNK = 1 << 20


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that other processes see all of it or none, even after a kill or a loss of power."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file is missing, damaged or holds something else."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def list_files(folder: Path, paths: Iterable[Path]) -> dict[str, dict[str, int]]:
    """Wait until these files are on disk; return the size and the CRC-32 of each, by its name in the folder."""
    listed = {}
    for path in sorted(paths):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        listed[path.relative_to(folder).as_posix()] = measure(path)
    return listed


def find_damage(folder: Path, listed: Mapping[str, Mapping[str, int]]) -> str | None:
    """Return the first difference between the files of a folder and their list, or None if there is none."""
    for name, expected in listed.items():
        try:
            found = measure(folder / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found["bytes"] != expected["bytes"]:
            return f"{name} has {found['bytes']:,} of {expected['bytes']:,} bytes"
        if found != expected:
            return f"{name} has changed since it was saved"
    return None


def measure(path: Path) -> dict[str, int]:
    """Return the size and the CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return {"bytes": size, "crc32": checksum}


def refuse_folder(folder: Path, error: OSError) -> RecipeError:
    """Return the error of an output folder that cannot be created or written."""
    return RecipeError(
        f"--output_dir must be a folder that can be written, got {folder}: {error.strerror}. Give another one."
    )
