"""What PEFT leaves unchecked when it loads an adapter: that the file can be read, and that it fits the model.

PEFT adds an adapter first and reads its file afterwards, leaves weights that the file lacks at random, and may have
copied half of them when it meets one that does not fit. So the file is checked before the model is touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, file_exists
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from .registration import PREFIX


# What PEFT puts before the names of modules in a file.
FILE_PREFIX = "base_model.model."
_LISTED = 3


def refuse_pickle(
    name_or_path: str, subfolder: str | None = None, revision: str | None = None, token: Any = None
) -> None:
    """Refuse an adapter whose weights are in a pickled file only; PEFT would load that.

    Args:
        name_or_path: the adapter's folder, or its repository on the Hub.
        subfolder, revision, token: as for `huggingface_hub.hf_hub_download`.

    Raises:
        ValueError: the folder, or the repository on the Hub, has `adapter_model.bin` and no safetensors file.
    """
    folder = Path(name_or_path, subfolder or "")

    def has(name: str) -> bool:
        if folder.is_dir() or constants.HF_HUB_OFFLINE:
            return (folder / name).is_file()
        path = f"{subfolder}/{name}" if subfolder else name
        return bool(file_exists(name_or_path, path, revision=revision, token=token))

    if not has(SAFETENSORS_WEIGHTS_NAME) and has(WEIGHTS_NAME):
        raise ValueError(
            f"An adapter's weights must be in {SAFETENSORS_WEIGHTS_NAME}; {folder} has {WEIGHTS_NAME} only, a pickled "
            "file, which can run any code when it is loaded. Save the adapter again without safe_serialization=False, "
            "or convert a file that you trust: safetensors.torch.save_file(torch.load(..., weights_only=True), ...)."
        )


def read_shapes(file: Path) -> dict[str, torch.Size]:
    """Names and shapes of the tensors in a safetensors file, from its header alone.

    Raises:
        ValueError: the file is cut off or no safetensors file.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            return {key: torch.Size(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"An adapter's file must be a whole safetensors file; {file} ({file.stat().st_size:,} bytes) cannot be "
            f"read: {error}. Download or save it again."
        ) from error


def check_file(file: Path, expected: Mapping[str, torch.Size]) -> None:
    """Check an adapter's file against what a model will need, before anything is added to the model.

    Args:
        file: the safetensors file.
        expected: names, as in a file, and shapes.

    Raises:
        ValueError: the file cannot be read, or does not fit. A file whose tensors only have other names passes, as
            these may be mapped while loading; `check_shapes` sees the mapped names.
    """
    found = read_shapes(file)
    missing = {name: shape for name, shape in expected.items() if name not in found}
    unknown = {name: shape for name, shape in found.items() if name not in expected}
    if Counter(missing.values()) == Counter(unknown.values()):
        expected = {name: shape for name, shape in expected.items() if name in found}
        found = {name: found[name] for name in expected}
    check_shapes(expected, found, str(file))


def check_shapes(expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size], source: str) -> None:
    """Check that an adapter's tensors are all there, and of the shapes that the model has.

    Args:
        expected: names and shapes in the model.
        found: names and shapes in what is loaded. Further tensors may be there if they are no adapter's, such as a
            resized embedding that PEFT has saved.
        source: where they come from.

    Raises:
        ValueError: a tensor of the adapter is missing, is not expected, or has another shape.
    """
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected and (f".{PREFIX}" in name or missing)]
    wrong = [
        f"{name} has the shape {tuple(found[name])}, the model needs {tuple(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = [
        *([f"it lacks {_listed(missing)}"] if missing else []),
        *([f"it has {_listed(unknown)}, which this model and configuration have no place for"] if unknown else []),
        *([_listed(wrong)] if wrong else []),
    ]
    if problems:
        raise ValueError(
            f"The weights of a Houlsby adapter must fit its configuration and the base model; those of {source} do "
            f"not: {'; '.join(problems)}. Load the adapter on the base model that it was trained on, with its own "
            "adapter_config.json; for a new adapter of the same configuration, give dataclasses.replace(config, "
            "base_fingerprint=None, id2label=None, problem_type=None, inference_mode=False)."
        )


def _listed(items: Sequence[str]) -> str:
    rest = len(items) - _LISTED
    return ", ".join(items[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
