"""Look into the Hub's cache: which repository a folder is of, and whether a download is damaged."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError


def find_repo(folder: str | os.PathLike[str]) -> tuple[str, str] | None:
    """Return the name and the commit of the model whose files a folder in the Hub's cache holds; None for others."""
    path = Path(folder)
    kind, *name = path.parent.parent.name.split("--")
    is_model = path.parent.name == "snapshots" and kind == "models" and bool(name)
    return ("/".join(name), path.name) if is_model else None


def describe_damage(folder: Path) -> str:
    """Return how to fetch the damaged files of a repository in the Hub's cache anew; "" if none is damaged.

    The cache never checks a file again after its download. It names each file after its SHA-256 or, for small files,
    its hash in git, so damage can be told without asking the Hub.

    Args:
        folder: The folder of a repository's revision in the cache. In other folders nothing is found.
    """
    if folder.parent.name != "snapshots" or not folder.is_dir():
        return ""
    stored = {path.name: path.resolve() for path in sorted(folder.iterdir()) if path.is_symlink() and path.is_file()}
    damaged = {name: blob for name, blob in stored.items() if blob.parent.name == "blobs" and not _is_sound(blob)}
    if not damaged:
        return ""
    files = " and ".join(map(str, damaged.values()))
    return f" The download of {' and '.join(damaged)} is damaged; to fetch it again, delete {files}."


def describe_damage_in_cache(repo_id: str, file: str, **options: Any) -> str:
    """Return how to fetch the damaged files of a repository anew; "" if none is damaged or none is in the cache.

    Args:
        repo_id: The repository. A folder counts as having no damaged files.
        file: A file that is in it.
        options: Arguments of `huggingface_hub.try_to_load_from_cache`: `revision` and `cache_dir`.
    """
    try:
        cached = try_to_load_from_cache(repo_id, file, **options)
    except HFValidationError:
        return ""
    return describe_damage(Path(cached).parent) if isinstance(cached, str) else ""


def _is_sound(blob: Path) -> bool:
    """Return False if a file's content does not have the hash that is its name."""
    size = blob.stat().st_size
    kinds = {64: hashlib.sha256(), 40: hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)}
    digest = kinds.get(len(blob.name))
    if digest is None:
        return True
    with blob.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest() == blob.name
