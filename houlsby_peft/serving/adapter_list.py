"""The adapters that a service offers: a folder of adapters, or a JSON or YAML file that lists them."""

from __future__ import annotations

import os
from pathlib import Path

import yaml
from peft.utils import CONFIG_NAME

from ..errors import AdapterError, shortened
from .held_adapters import TaskSource


def read_adapters(path: str | os.PathLike[str]) -> dict[str, TaskSource]:
    """Return the adapters of a folder or of a list, by task: what `TaskBank.serve` takes.

    In a folder, each subfolder with an `adapter_config.json` is an adapter, and its name is the task. Names that begin
    with a dot are left out, so that an adapter can be copied under such a name and then renamed. A list is a mapping
    from tasks to folders or names on the Hub, or to mappings with `source`, `revision` and `threshold`. Folders are
    relative to the list. An adapter itself is one task, named after its folder, or after the run that has saved it in
    its folder `adapter`.

    Raises:
        AdapterError: There is no such folder or file, it is not valid, or it has no adapter.
    """
    path = Path(path).expanduser()
    if (path / CONFIG_NAME).is_file():
        folder = path.resolve()
        found = {(folder.parent if folder.name == "adapter" else folder).name: TaskSource(str(path))}
    elif path.is_dir():
        folders = sorted(file.parent for file in path.glob(f"[!.]*/{CONFIG_NAME}"))
        found = {folder.name: TaskSource(str(folder)) for folder in folders}
    else:
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
            found = {task: _read_entry(path.parent, task, entry) for task, entry in content.items()}
        except FileNotFoundError:
            raise AdapterError(
                f"The adapters of a service must be in a folder, or in a JSON or YAML list; there is no {path}."
            ) from None
        except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
            raise AdapterError(
                f"{path} must map each task to a folder, to a name on the Hub, or to a mapping with source and "
                f"optionally revision and threshold. {shortened(str(error))}"
            ) from error
    if not found:
        raise AdapterError(f"A service needs at least one adapter; {path} has none. Check the path.")
    return found


def _read_entry(parent: Path, task: object, entry: object) -> TaskSource:
    fields = {"source": entry} if isinstance(entry, str) else dict(entry)  # type: ignore[call-overload]
    found = TaskSource(**fields)
    is_number = isinstance(found.threshold, (int, float)) and 0 <= found.threshold <= 1
    if not isinstance(task, str) or not isinstance(found.source, str) or not (found.threshold is None or is_number):
        raise ValueError(
            f"A task and its source must be texts, and a threshold between 0 and 1; got {entry!r} for {task!r}."
        )
    folder = parent / Path(found.source).expanduser()
    return TaskSource(str(folder) if folder.is_dir() else found.source, found.revision, found.threshold)
