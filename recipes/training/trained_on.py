"""The data of a run: which files it was trained on, and what has changed in them since."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.files import measure


ARGUMENTS_FILE = "arguments.json"
TRAINED_ON = "trained_on"  # the entry of ARGUMENTS_FILE that says what the data of a run are
# How changes of the data begin.
CHANGES = ("data of ", "classes ")
Describe = Callable[[Path], dict[str, Any]]


def describe_file(path: Path) -> dict[str, Any]:
    """Return what is recorded of a file: its name, the path by which it was read, its size and its checksum."""
    return {"name": path.name, "path": str(path), **measure(path)}


def describe_data_of_run(files: Mapping[str, Path], classes: Sequence[str]) -> dict[str, Any]:
    """Return the entry TRAINED_ON; nothing if nothing is known.

    Args:
        files: The files of training and validation, by their splits.
        classes: The names of the classes.
    """
    try:
        described = {split: describe_file(path) for split, path in files.items()}
    except OSError:  # reported when the data are loaded
        described = {}
    return {TRAINED_ON: {"files": described, "classes": list(classes)}} if described or classes else {}


def changed_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs between the data of two runs, as far as both are known; each begins with one of CHANGES.

    A file may have another name or another place.
    """
    were, are = before.get("files", {}), now.get("files", {})
    # Without files of training on one side, its data are unknown, on the Hub or no longer there.
    known = "train" in were and "train" in are
    for split in sorted(were.keys() | are.keys() if known else were.keys() & are.keys()):
        if split not in were:
            yield f"data of {split} were in no file, are in {are[split]['name']}"
        elif split not in are:
            yield f"data of {split} were in {were[split]['name']}, are in no file"
        elif were[split]["bytes"] != are[split]["bytes"]:
            sizes = were[split]["bytes"], are[split]["bytes"]
            yield f"data of {split} have changed: {are[split]['name']} had {sizes[0]:,} bytes, has {sizes[1]:,}"
        elif were[split]["crc32"] != are[split]["crc32"]:
            yield f"data of {split} have changed: {are[split]['name']} has the same size and other content"
    old, new = before.get("classes"), now.get("classes")
    if old and new and old != new:
        yield f"classes were {_shorten(old)}, are {_shorten(new)}"


def changed_files(files: Mapping[str, Mapping[str, Any]], describe: Describe = describe_file) -> list[str]:
    """Return what has changed in files, as far as they are where they were. Earlier versions have not recorded that.

    Args:
        files: What was recorded of each file, by its split.
        describe: `describe_file`, or a function that remembers its results.
    """
    paths = {split: Path(file["path"]) for split, file in files.items() if "path" in file}
    now = {split: describe(path) for split, path in paths.items() if path.is_file()}
    return list(changed_data({"files": files}, {"files": now}))


def _shorten(names: Sequence[str]) -> str:
    return textwrap.shorten(", ".join(names), 200, placeholder=" ...")
