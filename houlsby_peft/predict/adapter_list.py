"""The adapters that a service offers: a folder of adapters, or a JSON or YAML file that lists
them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from peft.utils import CONFIG_NAME

from ..errors import AdapterError, printable, shortened
from ..saved.adapter import adapter_of_run
from .held_adapters import TaskSource


class ListError(AdapterError):
    """A list of adapters cannot be read or written."""


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
            # A name that is no UTF-8 could not be sent.
            adapters[printable(folder.name)] = adapter_of_run(folder)
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
        _, adapters = _read_list(path)
    if not adapters:
        raise AdapterError(
            f"A service needs at least one adapter; {path} has none. Check the path."
        )
    return adapters


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads YAML without aliases, a few of which may stand for more than fits into the memory."""

    def compose_node(self, *args: Any) -> Any:
        """Return the next node."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("It must have no aliases.")
        return super().compose_node(*args)


def _read_list(path: Path) -> tuple[dict[str, Any], dict[str, TaskSource]]:
    """Return what a list in YAML or JSON, which is YAML, has of each task, and what it means."""
    content, adapters = {}, {}
    try:
        for task, listed in yaml.load(path.read_text(encoding="utf-8"), _Loader).items():
            name = printable(str(task))
            fields = {"source": listed} if isinstance(listed, str) else listed
            content[name], adapters[name] = listed, resolve(path, TaskSource(**fields))
    except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise ListError(
            f"{path} must map each task to a folder, to a name on the Hub, or to a mapping with "
            f"source and optionally revision and threshold. {shortened(str(error))}"
        ) from error
    return content, adapters


def resolve(path: Path, source: TaskSource) -> TaskSource:
    """Return a source whose folder does not depend on where the list is."""
    folder = path.parent / Path(source.source).expanduser()  # type: ignore[arg-type]
    return replace(source, source=str(folder)) if folder.is_dir() else source


@contextmanager
def changing_list(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of a list, and write it again with what the context has changed.

    Comments get lost. One process at a time can change it. After an error, it is as it was.

    Raises:
        ListError: It is not valid, or cannot be written.
        ValueError: It is a folder, or no adapter would be left.
    """
    import fcntl  # not on Windows

    if path.is_dir():
        raise ValueError(
            "The service follows a folder of adapters: put the adapter there, or take it out. To "
            "change tasks by requests, start the service with a list, as --adapters tasks.yaml."
        )
    folder = os.open(path.parent, os.O_RDONLY)
    written = path.with_name(f".{path.name}.new")
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        content, _ = _read_list(path)
        try:
            file = written.open("w", encoding="utf-8")  # before anything changes
        except OSError as error:
            raise ListError(f"{path} cannot be written: {error.strerror}.") from error
        try:
            with file:
                yield content
                if not content:
                    raise ValueError("A service needs at least one adapter. Add another one first.")
                yaml.safe_dump(content, file, sort_keys=False)
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)
    finally:
        os.close(folder)
