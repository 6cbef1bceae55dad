"""What PEFT leaves unchecked when it loads an adapter: that its file can be read, and that it fits the model.

PEFT adds an adapter first and reads its file afterwards. It leaves weights that the file lacks at random, and may have
copied half of them when it meets one that does not fit. So the file is checked before the model is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import file_exists, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from ..errors import explain_hub_errors
from ..registration import PREFIX
from .downloads import describe_damage


# What PEFT puts before the names of modules in a file.
FILE_PREFIX = "base_model.model."
_MOST_NAMES = 3
_DOWNLOAD_OPTIONS = ("revision", "token", "cache_dir", "local_files_only")


def find_weights(name_or_path: str, subfolder: str | None, options: Mapping[str, Any]) -> Path:
    """Return the weights file of a saved adapter, which is downloaded if it is on the Hub.

    An adapter is thus added to a model only once its file is at hand.

    Args:
        name_or_path: The adapter's folder, or its repository on the Hub.
        subfolder: A folder inside of it.
        options: Arguments of `huggingface_hub.hf_hub_download`; others are ignored.

    Returns:
        The file, which a folder may lack.

    Raises:
        ValueError: The adapter's weights are in a pickled file only, or not in the repository.
        HubError: They are not in the cache, and the Hub cannot be reached or refuses the request.
    """
    folder = Path(name_or_path, subfolder or "")
    if folder.is_dir():
        refuse_pickle(folder)
        return folder / SAFETENSORS_WEIGHTS_NAME
    options = {name: options[name] for name in _DOWNLOAD_OPTIONS if options.get(name) is not None}
    with explain_hub_errors(name_or_path):
        try:
            return Path(hf_hub_download(name_or_path, SAFETENSORS_WEIGHTS_NAME, subfolder=subfolder, **options))
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            pickled = f"{subfolder}/{WEIGHTS_NAME}" if subfolder else WEIGHTS_NAME
            is_pickled = file_exists(
                name_or_path, pickled, revision=options.get("revision"), token=options.get("token")
            )
    raise ValueError(_pickle_message(name_or_path) if is_pickled else missing_message(name_or_path))


def missing_message(where: object) -> str:
    """Return a message that a folder or repository lacks its weights."""
    return f"{where} holds {CONFIG_NAME} but no {SAFETENSORS_WEIGHTS_NAME}. Save or download the adapter again."


def refuse_pickle(folder: Path) -> None:
    """Refuse an adapter whose weights are in a pickled file only, which PEFT would load.

    Raises:
        ValueError: The folder holds `adapter_model.bin` and no safetensors file.
    """
    if not (folder / SAFETENSORS_WEIGHTS_NAME).is_file() and (folder / WEIGHTS_NAME).is_file():
        raise ValueError(_pickle_message(folder))


def check_file(file: Path, expected: Mapping[str, torch.Size]) -> None:
    """Check an adapter's file against what a model needs, before anything is added to the model.

    Args:
        file: The safetensors file, of which only the header is read.
        expected: Names, as in a file, and shapes.

    Raises:
        ValueError: The file cannot be read or does not fit. A file whose tensors differ only in their names passes,
            because PEFT may map names while loading; `check_shapes` sees the mapped names.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            found = {name: torch.Size(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"An adapter's weights must be in a complete safetensors file; {file} ({file.stat().st_size:,} bytes) "
            f"cannot be read: {error}. Download or save it again.{describe_damage(file.parent)}"
        ) from error
    missing = {name: shape for name, shape in expected.items() if name not in found}
    unknown = {name: shape for name, shape in found.items() if name not in expected}
    if Counter(missing.values()) == Counter(unknown.values()):
        expected = {name: shape for name, shape in expected.items() if name in found}
        found = {name: found[name] for name in expected}
    check_shapes(expected, found, str(file))


def check_shapes(expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size], source: str) -> None:
    """Check that an adapter's tensors are all there and have the shapes that the model needs.

    Args:
        expected: Names and shapes in the model.
        found: Names and shapes of what is loaded. Further tensors are allowed if they are not an adapter's, such as
            a resized embedding that PEFT has saved.
        source: Where they come from, for the message.

    Raises:
        ValueError: A tensor of the adapter is missing, unexpected, or of another shape.
    """
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected and (f".{PREFIX}" in name or missing)]
    wrong = [
        f"{name} has the shape {tuple(found[name])}, the model needs {tuple(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = [
        *([f"it lacks {_first_of(missing)}"] if missing else []),
        *([f"it has {_first_of(unknown)}, which this model and configuration have no place for"] if unknown else []),
        *([_first_of(wrong)] if wrong else []),
    ]
    if problems:
        raise ValueError(
            f"The weights of a Houlsby adapter must fit its configuration and the base model; those of {source} do "
            f"not: {'; '.join(problems)}. Load the adapter on the base model that it was trained on, with its own "
            "adapter_config.json. For a new adapter with the same settings, use dataclasses.replace(config, "
            "inference_mode=False)."
        )


def _pickle_message(where: object) -> str:
    return (
        f"An adapter's weights must be in {SAFETENSORS_WEIGHTS_NAME}; {where} has only {WEIGHTS_NAME}, a pickled "
        "file, which can run any code when it is loaded. Save the adapter again without safe_serialization=False, or "
        "convert a file that you trust: safetensors.torch.save_file(torch.load(..., weights_only=True), ...)."
    )


def _first_of(items: Sequence[str]) -> str:
    rest = len(items) - _MOST_NAMES
    return ", ".join(items[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
