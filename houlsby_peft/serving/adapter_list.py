"""The adapters that a service offers: a folder of adapters, or a JSON or YAML file that lists
them.
"""

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
        return {folder.parent.name if folder.name == "adapter" else folder.name: path}
    adapters = {}
    for folder in sorted(path.glob("[!.]*")):
        if (adapter_of_run(folder) / CONFIG_NAME).is_file():
            adapters[folder.name] = adapter_of_run(folder)
    return adapters


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
        adapters = {task: TaskSource(str(folder)) for task, folder in find_adapters(path).items()}
    else:
        adapters = _read_list(path)
    if not adapters:
        raise AdapterError(
            f"A service needs at least one adapter; {path} has none. Check the path."
        )
    return adapters


def _read_list(path: Path) -> dict[str, TaskSource]:
    adapters = {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
        for task, listed in content.items():
            fields = {"source": listed} if isinstance(listed, str) else listed
            source = TaskSource(**fields)
            folder = path.parent / Path(source.source).expanduser()  # type: ignore[arg-type]
            if folder.is_dir():
                source = replace(source, source=str(folder))
            adapters[str(task)] = source
    except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise AdapterError(
            f"{path} must map each task to a folder, to a name on the Hub, or to a mapping with "
            f"source and optionally revision and threshold. {shortened(str(error))}"
        ) from error
    return adapters
