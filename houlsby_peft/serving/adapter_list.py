"""The adapters that a service offers: a folder of adapters, or a JSON or YAML file that lists them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from peft.utils import CONFIG_NAME

from ..errors import AdapterError, shortened


_FIELDS: dict[str, Any] = {"source": str, "revision": str, "threshold": (int, float)}


@dataclass(frozen=True)
class Listed:
    """An adapter of a list.

    Args:
        source: Its folder, or its name on the Hub.
        revision: A branch, tag or commit of its repository.
        threshold: The least score of a class (see `TaskBank`).
    """

    source: str
    revision: str | None = None
    threshold: float | None = None


def read_adapters(path: str | os.PathLike[str]) -> dict[str, Listed]:
    """Return the adapters of a folder or of a list, by task.

    In a folder, each subfolder with an `adapter_config.json` is an adapter, and its name is the task. Names that begin
    with a dot are left out, so that an adapter can be copied under such a name and then renamed. A list is a mapping
    from tasks to folders or names on the Hub, or to mappings with `source`, `revision` and `threshold`. Folders are
    relative to the list.

    Raises:
        AdapterError: There is no such folder or file, it is not valid, or it has no adapter.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        folders = sorted(file.parent for file in path.glob(f"[!.]*/{CONFIG_NAME}"))
        found = {folder.name: Listed(str(folder)) for folder in folders}
    elif path.is_file():
        found = _read_list(path)
    else:
        raise AdapterError(
            f"The adapters of a service must be in a folder of adapters, or in a JSON or YAML list; {path} is "
            "neither. Check the path."
        )
    if not found:
        is_adapter = (path / CONFIG_NAME).is_file()
        remedy = (
            "It is an adapter itself: copy it into a folder of adapters, under its task's name."
            if is_adapter
            else "Check the path."
        )
        raise AdapterError(f"A service needs at least one adapter; {path} has none. {remedy}")
    return found


def check_threshold(threshold: object, task: str) -> None:
    """Check the least score of a class.

    Raises:
        ValueError: It is neither None nor a number between 0 and 1.
    """
    is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if threshold is not None and not (is_number and 0 <= threshold <= 1):  # type: ignore[operator]
        raise ValueError(f"A threshold must be between 0 and 1; got {shortened(repr(threshold))} for {task!r}.")


def _read_list(path: Path) -> dict[str, Listed]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise AdapterError(f"{path} must be valid JSON or YAML; {shortened(str(error))}. Correct it there.") from error
    if not isinstance(content, dict) or not all(isinstance(task, str) for task in content):
        raise AdapterError(
            f"{path} must map the names of tasks to adapters; got {shortened(repr(content))}. For example, "
            "reviews: folders/reviews."
        )
    return {task: _read_entry(path, task, entry) for task, entry in content.items()}


def _read_entry(path: Path, task: str, entry: Any) -> Listed:
    fields = {"source": entry} if isinstance(entry, str) else entry
    if (
        not isinstance(fields, dict)
        or "source" not in fields
        or any(name not in _FIELDS or not isinstance(value, _FIELDS[name]) for name, value in fields.items())
    ):
        raise AdapterError(
            f"{path}: an adapter must be a folder, a name on the Hub, or a mapping with source and optionally "
            f"revision and threshold; got {shortened(repr(entry))} for {task!r}. Correct it there."
        )
    try:
        check_threshold(fields.get("threshold"), task)
    except ValueError as error:
        raise AdapterError(f"{path}: {error} Correct it there.") from error
    folder = path.parent / Path(fields["source"]).expanduser()
    return Listed(**{**fields, "source": str(folder) if folder.is_dir() else fields["source"]})
