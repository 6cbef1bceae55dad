"""What PEFT leaves unchecked when it loads an adapter: that its file can be read, fits the model and holds numbers.

PEFT adds an adapter first and reads its file afterwards. It leaves weights that the file lacks at random, and may have
copied half of them when it meets one that does not fit. It accepts weights of any dtype and value. So the file is
checked before the model is changed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import file_exists, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from ..errors import AdapterError, explain_hub_errors
from ..registration import PREFIX
from .downloads import describe_damage


# The dtypes that weights may be saved in, and that a base model which is not quantized may be loaded in.
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The dtypes of counts, which a head may hold, as batch norms do.
_COUNTS = (torch.int64, torch.int32)
# What PEFT puts before the names of modules in a file.
FILE_PREFIX = "base_model.model."
_MOST_NAMES, _MOST_LETTERS = 3, 300
# The square of a larger weight is not finite in float32, so that outputs would be NaN.
_LARGEST_WEIGHT = torch.finfo(torch.float32).max ** 0.5
# The arguments of `huggingface_hub.hf_hub_download` that tell where a file is, without the user's token.
DOWNLOAD_OPTIONS = ("revision", "cache_dir", "local_files_only")


def find_weights(
    name_or_path: str, subfolder: str | None, options: Mapping[str, Any], token: bool | str | None = None
) -> Path:
    """Return the weights file of a saved adapter, which is downloaded if it is on the Hub.

    An adapter is thus added to a model only once its file is at hand.

    Args:
        name_or_path: The adapter's folder, or its repository on the Hub.
        subfolder: A folder inside of it.
        options: Those of `DOWNLOAD_OPTIONS` that are given.
        token: The access token for the Hub. None: the one that the user has logged in with.

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
    with explain_hub_errors(name_or_path):
        try:
            return Path(
                hf_hub_download(name_or_path, SAFETENSORS_WEIGHTS_NAME, subfolder=subfolder, token=token, **options)
            )
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            pickled = f"{subfolder}/{WEIGHTS_NAME}" if subfolder else WEIGHTS_NAME
            is_pickled = file_exists(name_or_path, pickled, revision=options.get("revision"), token=token)
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


def refuse_pickle_just_saved(folder: Path) -> None:
    """Refuse weights that were pickled beside those of an earlier save, which would be loaded in their place.

    A pickled file that is older than the safetensors file is a leftover, which nothing reads.

    Raises:
        ValueError: The folder holds `adapter_model.bin`, and no safetensors file that is newer.
    """
    refuse_pickle(folder)
    pickled, safe = folder / WEIGHTS_NAME, folder / SAFETENSORS_WEIGHTS_NAME
    if pickled.is_file() and pickled.stat().st_mtime_ns >= safe.stat().st_mtime_ns:
        raise ValueError(
            f"An adapter's weights must be saved in {SAFETENSORS_WEIGHTS_NAME}; got {pickled}, a pickled file beside "
            f"the {SAFETENSORS_WEIGHTS_NAME} of an earlier save, which would be loaded in its place. Delete it, and "
            "save the adapter again without safe_serialization=False."
        )


def check_file(
    file: Path, expected: Mapping[str, torch.Tensor], may_map_names: bool = False, optional_prefix: str = ""
) -> bool:
    """Check an adapter's file against what a model needs, before anything is added to the model.

    Args:
        file: The safetensors file.
        expected: The tensors by name, as in a file, with the shapes and dtypes that they have in the model.
        may_map_names: Whether PEFT may map the names of bottlenecks and norms while loading. A file in which only
            these names differ passes then; `check_tensors` sees the mapped names.
        optional_prefix: A prefix of modules that transformers adds to names, or removes, while loading.

    Returns:
        Whether the names fit, even without that.

    Raises:
        ValueError: The file cannot be read, does not fit, or holds weights that cannot be right.
    """

    def short(name: str) -> str:
        long = f"{FILE_PREFIX}{optional_prefix}."
        return FILE_PREFIX + name.removeprefix(long) if optional_prefix and name.startswith(long) else name

    in_model = {short(name): name for name in expected}
    needed = {name: tensor.shape for name, tensor in expected.items()}
    try:
        with safe_open(file, framework="pt") as tensors:
            names = {name: in_model.get(short(name), name) for name in tensors.keys()}  # noqa: SIM118
            found = {own: torch.Size(tensors.get_slice(name).get_shape()) for name, own in names.items()}
            missing = {name: shape for name, shape in needed.items() if name not in found}
            unknown = {name: shape for name, shape in found.items() if name not in needed}
            is_renamed = missing and all(f".{PREFIX}" in name for name in missing)
            if may_map_names and is_renamed and Counter(missing.values()) == Counter(unknown.values()):
                needed = {name: shape for name, shape in needed.items() if name in found}
                found = {name: found[name] for name in needed}
            check_shapes(needed, found, str(file))
            for name, own in names.items():
                check_values(str(file), name, tensors.get_tensor(name), expected.get(own))
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"An adapter's weights must be in a complete safetensors file; {file} ({file.stat().st_size:,} bytes) "
            f"cannot be read: {error}. Download or save it again.{describe_damage(file.parent)}"
        ) from error
    return expected.keys() <= names.keys()


def check_tensors(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], source: str) -> None:
    """Check that an adapter's tensors fit those of the model and hold weights that can be right.

    Args:
        expected: The tensors in the model, by name.
        found: What is loaded. Further tensors are allowed as in `check_shapes`.
        source: Where they come from, for the message.

    Raises:
        ValueError: A tensor does not fit, or holds weights that cannot be right.
    """
    needed, present = ({name: tensor.shape for name, tensor in each.items()} for each in (expected, found))
    check_shapes(needed, present, source)
    for name, tensor in found.items():
        check_values(source, name, tensor, expected.get(name))


def check_values(source: str, name: str, tensor: torch.Tensor, expected: torch.Tensor | None = None) -> None:
    """Check that a tensor holds weights that can be right, in the dtype in which the model uses them.

    Args:
        source: Where it comes from, for the message.
        name: Its name.
        tensor: The tensor.
        expected: The tensor of the model, or one on the meta device, of which only the dtype is read. None: float32.

    Raises:
        AdapterError: It holds anything but floating-point numbers of at least 16 bits, or a number that is not finite
            or that makes outputs infinite.
    """
    kind = torch.float32 if expected is None else expected.dtype
    if kind in _COUNTS and tensor.dtype in _COUNTS:
        return
    name = name[:_MOST_LETTERS]
    if tensor.dtype not in PRECISIONS or kind in _COUNTS:
        rule = "whole numbers" if kind in _COUNTS else "floating-point numbers of at least 16 bits"
        raise AdapterError(f"{source}: {name!r} must hold {rule}, got {tensor.dtype}. Save the adapter again.")
    if tensor.is_meta or not tensor.numel():
        return
    low, high = (value.item() for value in tensor.detach().aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise AdapterError(
            f"{source}: {name!r} must hold finite numbers, got NaN or infinity: its training has diverged. Use an "
            "earlier checkpoint, or train it again with a smaller learning rate."
        )
    limit = min(torch.finfo(kind).max, _LARGEST_WEIGHT)
    if max(-low, high) > limit:
        remedy = "Load the base model in float32" if kind is torch.float16 else "Train it again"
        raise AdapterError(
            f"{source}: {name!r} must hold numbers up to {limit:.3g}, as it is used in {kind}, got "
            f"{max(low, high, key=abs):.3g}. {remedy}."
        )


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
        *([f"it lacks {first_of(missing)}"] if missing else []),
        *([f"it has {first_of(unknown)}, which this model and configuration have no place for"] if unknown else []),
        *([first_of(wrong)] if wrong else []),
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


def first_of(items: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    rest = len(items) - _MOST_NAMES
    return ", ".join(item[:_MOST_LETTERS] for item in items[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
