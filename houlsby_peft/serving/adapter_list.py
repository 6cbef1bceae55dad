"""The adapters that a service offers: a folder of adapters, or a JSON or YAML file that lists them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import yaml
from peft.utils import CONFIG_NAME

from ..checkpoints.saved import adapter_of_run
from ..errors import AdapterError, shortened
from .held_adapters import TaskSource


def find_adapters(path: Path) -> dict[str, Path]:
    """Return the folders of adapters, by task: of a folder of adapters or runs, or of one adapter
        or run.

    A task is called after the adapter's folder, or after that of the run. Names that begin with a
    dot are left out, so that an adapter can be copied under such a name and then renamed.
    """
    path = adapter_of_run(path)
    if (path / CONFIG_NAME).is_file():
        folder = path.absolute()
        return {(folder.parent if folder.name == "adapter" else folder).name: path}
    inner = {folder.name: adapter_of_run(folder) for folder in sorted(path.glob("[!.]*"))}
    return {task: folder for task, folder in inner.items() if (folder / CONFIG_NAME).is_file()}


def read_adapters(path: str | os.PathLike[str]) -> dict[str, TaskSource]:
    """Return the adapters of a folder or of a list, by task: what `TaskBank.serve` takes.

    In a folder, they are those of `find_adapters`. A list is a mapping from tasks to folders or
    names on the Hub, or to mappings with `source`, `revision` and `threshold`. Folders are relative
    to the list.

    Raises:
        AdapterError: The file is not valid, or there is no adapter.
        OSError: There is no such folder or file.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        found = {task: TaskSource(str(folder)) for task, folder in find_adapters(path).items()}
    else:
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
            found = {}
            for task, entry in content.items():
                listed = TaskSource(**({"source": entry} if isinstance(entry, str) else entry))
                folder = path.parent / Path(listed.source).expanduser()  # type: ignore[arg-type]
                found[str(task)] = (
                    replace(listed, source=str(folder)) if folder.is_dir() else listed
                )
        except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
            raise AdapterError(
                f"{path} must map each task to a folder, to a name on the Hub, or to a mapping with source and "
                f"optionally revision and threshold. {shortened(str(error))}"
            ) from error
    if not found:
        raise AdapterError(
            f"A service needs at least one adapter; {path} has none. Check the path."
        )
    return found
