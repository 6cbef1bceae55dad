"""What PEFT leaves unchecked when it saves or loads an adapter: that weights are whole, fit and
    hold numbers.

PEFT leaves weights that the file lacks at random, and accepts weights of any dtype and value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import safe_open

from .errors import AdapterError, shortened
from .registration import PREFIX


# The dtypes that weights may be saved in, and that a base model which is not quantized may be
# loaded in.
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# What PEFT puts before the names of modules in a file.
FILE_PREFIX = "base_model.model."

# The dtypes of counts, which a head may hold, as batch norms do.
_COUNTS = (torch.int64, torch.int32)
# Room for the names of some 100,000 classes.
_MOST_BYTES_OF_JSON = 20_000_000
_MOST_NAMES, _MOST_LETTERS = 3, 300


def read_json(path: Path) -> dict[str, Any]:
    """Read a configuration that others may have written: one JSON object of limited size."""
    size = path.stat().st_size
    if size > _MOST_BYTES_OF_JSON:
        raise AdapterError(
            f"{path} must be smaller than {_MOST_BYTES_OF_JSON:,} bytes; it has {size:,}."
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise AdapterError(
            f"{path} is not valid JSON: {shortened(str(error))}. Save or download it again."
        ) from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{path} must hold one JSON object, got {shortened(repr(fields))}.")
    return fields


def read_shapes(folder: Path) -> dict[str, torch.Size] | None:
    """Read the shapes of the weights in a folder, by name, before PEFT adds an adapter, which it
    does before it reads.

    Return None if the folder holds no weights, or is a repository's name. A pickled file is
    refused.
    """
    file = folder / SAFETENSORS_WEIGHTS_NAME
    if file.is_file():
        with safe_open(file, framework="pt") as weights:
            return {key: torch.Size(weights.get_slice(key).get_shape()) for key in weights.keys()}  # noqa: SIM118
    if (folder / WEIGHTS_NAME).is_file():
        raise AdapterError(
            f"An adapter's weights must be in {SAFETENSORS_WEIGHTS_NAME}; {folder} has only {WEIGHTS_NAME}, a pickled "
            "file, which can run any code when it is loaded. Save the adapter again without safe_serialization=False, "
            "or convert a file that you trust: safetensors.torch.save_file(torch.load(..., weights_only=True), ...)."
        )
    return None


def check_at_hand(weights: Mapping[str, Any]) -> None:
    """Refuse to save, copy or replace weights of which this process does not hold the whole."""
    for name, weight in weights.items():
        is_tensor, is_dtensor = isinstance(weight, torch.Tensor), hasattr(weight, "full_tensor")
        if not is_tensor or weight.is_meta:
            problem = (
                "in memory and not quantized to be saved, copied or initialized; got "
                f"{name}, which is {'offloaded' if is_tensor else 'quantized'}. Do it before the model is "
                "offloaded or quantized."
            )
        elif is_dtensor or weight.numel() == 0:
            problem = (
                f"gathered before they are saved; this process holds only a part of {name}, "
                f"{'a DTensor (FSDP2)' if is_dtensor else 'which is empty (ZeRO-3)'}. On every process: "
                "weights = accelerator.get_state_dict(wrapped_model); then "
                "accelerator.unwrap_model(wrapped_model).save_pretrained(folder, state_dict=weights, "
                "is_main_process=accelerator.is_main_process). transformers' Trainer does this automatically."
            )
        else:
            continue
        raise ValueError(f"An adapter's weights must be {problem}")


def check_tensors(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], source: str
) -> None:
    """Check that an adapter's tensors fit those that the model expects and hold weights that can be
    right.

    The model's tensors may be on the meta device. `source` names the adapter in the message.
    """
    needed, present = (
        {name: tensor.shape for name, tensor in each.items()} for each in (expected, found)
    )
    check_shapes(needed, present, source)
    for name, tensor in found.items():
        check_values(source, name, tensor, expected.get(name))


def check_values(
    source: str, name: str, tensor: torch.Tensor, expected: torch.Tensor | None = None
) -> None:
    """Check that a tensor holds finite numbers, of at least 16 bits, in the dtype in which the
    model uses them.

    That is the dtype of the tensor that the model expects; if it is unknown, float32 for
    bottlenecks and norms.
    """
    may_count = f".{PREFIX}" not in name if expected is None else expected.dtype in _COUNTS
    if tensor.dtype in _COUNTS and may_count:
        return
    if tensor.dtype not in PRECISIONS:
        raise AdapterError(
            f"{source}: {name[:_MOST_LETTERS]!r} must hold floating-point numbers of at least 16 bits, got "
            f"{tensor.dtype}. Save the adapter again."
        )
    if tensor.is_meta or not tensor.numel():
        return
    kind = (
        expected.dtype if expected is not None and expected.is_floating_point() else torch.float32
    )
    low, high = (value.item() for value in tensor.detach().aminmax())
    limit = torch.finfo(kind).max
    if not (-limit <= low and high <= limit):
        raise AdapterError(
            f"{source}: {name[:_MOST_LETTERS]!r} must hold finite numbers of {kind}, got {low:.3g} to {high:.3g}. If "
            "its training has diverged, use an earlier checkpoint or a smaller learning rate; if the base model is in "
            "half precision, load it in float32."
        )


def check_shapes(
    expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size], source: str
) -> None:
    """Check that an adapter's tensors are all there and have the shapes that the model expects.

    Further tensors are allowed if they are not an adapter's, such as a resized embedding that PEFT
    has saved.
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
        *(
            [f"it has {first_of(unknown)}, which this model and configuration have no place for"]
            if unknown
            else []
        ),
        *([first_of(wrong)] if wrong else []),
    ]
    if problems:
        raise AdapterError(
            f"The weights of a Houlsby adapter must fit its configuration and the base model; those of {source} do "
            f"not: {'; '.join(problems)}. Load the adapter on the base model that it was trained on, with its own "
            "adapter_config.json. For a new adapter with the same settings, use dataclasses.replace(config, "
            "inference_mode=False)."
        )


def first_of(items: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    rest = len(items) - _MOST_NAMES
    return ", ".join(item[:_MOST_LETTERS] for item in items[:_MOST_NAMES]) + (
        f" and {rest} more" if rest > 0 else ""
    )
