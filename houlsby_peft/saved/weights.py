"""What PEFT leaves unchecked when it saves or loads: that weights are whole, fit and are finite.

PEFT leaves weights that the file lacks at random, and accepts weights of any dtype and value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from ..errors import AdapterError, shortened
from ..registration import PREFIX


# The dtypes that weights may be saved in, and that a base model which is not quantized may be
# loaded in.
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

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
    """Read the shapes of the weights in a folder, by name; None if it holds none.

    PEFT adds an adapter before it reads the weights, so these are read first. A pickled file is
    refused.
    """
    file = folder / SAFETENSORS_WEIGHTS_NAME
    if file.is_file():
        # safetensors says of a file that may not be read that it is missing.
        file.open("rb").close()
        try:
            with safe_open(file, framework="pt") as weights:
                names = list(weights.keys())
                return {name: torch.Size(weights.get_slice(name).get_shape()) for name in names}
        except SafetensorError as error:
            raise AdapterError(
                f"{file} is damaged or incomplete ({shortened(str(error))}). Save or download the "
                "adapter again."
            ) from error
    if (folder / WEIGHTS_NAME).is_file():
        raise AdapterError(
            f"An adapter's weights must be in {SAFETENSORS_WEIGHTS_NAME}; {folder} has only "
            f"{WEIGHTS_NAME}, a pickled file, which can run any code when it is loaded. Save the "
            "adapter again without safe_serialization=False, or convert a file that you trust: "
            "safetensors.torch.save_file(torch.load(..., weights_only=True), ...)."
        )
    return None


def check_at_hand(weights: Mapping[str, Any]) -> None:
    """Refuse to save, copy or replace weights that are not finite, or of which this process does
    not hold the whole.
    """
    for name, weight in weights.items():
        if not isinstance(weight, torch.Tensor) or weight.is_meta:
            state = "offloaded" if isinstance(weight, torch.Tensor) else "quantized"
            raise ValueError(
                "An adapter's weights must be in memory and not quantized to be saved, copied or "
                f"initialized; got {name}, which is {state}. Do it before the model is offloaded "
                "or quantized."
            )
        is_part = hasattr(weight, "full_tensor")
        if is_part or weight.numel() == 0:
            state = "a DTensor (FSDP2)" if is_part else "which is empty (ZeRO-3)"
            raise ValueError(
                "An adapter's weights must be gathered before they are saved; this process holds "
                f"only a part of {name}, {state}. On every process: "
                "weights = accelerator.get_state_dict(wrapped_model); then "
                "accelerator.unwrap_model(wrapped_model).save_pretrained(folder, "
                "state_dict=weights, is_main_process=accelerator.is_main_process). transformers' "
                "Trainer does this automatically."
            )
        if weight.is_floating_point() and not weight.isfinite().all():
            raise ValueError(
                f"An adapter's weights must be finite to be saved, copied or initialized; {name} "
                "has NaN or infinite values. Its training has diverged: use an earlier checkpoint, "
                "or a smaller learning rate."
            )


def check_tensors(
    expected: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], source: str
) -> None:
    """Check that an adapter's weights fit those that the model expects, and can be right.

    Args:
        expected: The model's tensors by name, which may be on the meta device.
        weights: The adapter's tensors by the same names.
        source: The adapter's name in the message.
    """
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    check_shapes({name: tensor.shape for name, tensor in expected.items()}, shapes, source)
    for name, tensor in weights.items():
        check_values(source, name, tensor, expected.get(name))


def check_values(
    source: str, name: str, tensor: torch.Tensor, expected: torch.Tensor | None = None
) -> None:
    """Check that a tensor holds finite numbers of at least 16 bits, in the dtype of their use.

    This is the dtype of the tensor that the model expects. If it is unknown, it is float32.
    """
    may_count = f".{PREFIX}" not in name if expected is None else expected.dtype in _COUNTS
    if tensor.dtype in _COUNTS and may_count:
        return
    if tensor.dtype not in PRECISIONS:
        raise AdapterError(
            f"{source}: {name[:_MOST_LETTERS]!r} must hold floating-point numbers of at least 16 "
            f"bits, got {tensor.dtype}. Save the adapter again."
        )
    if tensor.is_meta or not tensor.numel():
        return
    dtype = torch.float32
    if expected is not None and expected.is_floating_point():
        dtype = expected.dtype
    limit = torch.finfo(dtype).max
    least, largest = tensor.detach().aminmax()
    if not (-limit <= least.item() and largest.item() <= limit):
        raise AdapterError(
            f"{source}: {name[:_MOST_LETTERS]!r} must hold finite numbers of {dtype}, got "
            f"{least:.3g} to {largest:.3g}. If its training has diverged, use an earlier "
            "checkpoint or a smaller learning rate; if the base model is in half precision, load "
            "it in float32."
        )


def check_shapes(
    expected: Mapping[str, torch.Size], shapes: Mapping[str, torch.Size], source: str
) -> None:
    """Check that an adapter's tensors are all there and have the shapes that the model expects.

    Further tensors are allowed if they are not an adapter's, such as a resized embedding that PEFT
    has saved.
    """
    problems = []
    missing = [name for name in expected if name not in shapes]
    if missing:
        problems.append(f"it lacks {first_of(missing)}")
    unknown = [name for name in shapes if name not in expected]
    if not missing:
        unknown = [name for name in unknown if f".{PREFIX}" in name]
    if unknown:
        problems.append(
            f"it has {first_of(unknown)}, which this model and configuration have no place for"
        )
    of_other_shape = []
    for name in sorted(expected.keys() & shapes.keys()):
        shape, needed = tuple(shapes[name]), tuple(expected[name])
        if shape != needed:
            of_other_shape.append(f"{name} has the shape {shape}, the model needs {needed}")
    if of_other_shape:
        problems.append(first_of(of_other_shape))
    if problems:
        raise AdapterError(
            "The weights of a Houlsby adapter must fit its configuration and the base model; those "
            f"of {source} do not: {'; '.join(problems)}. Load the adapter on the base model that "
            "it was trained on, with its own adapter_config.json. For a new adapter with the same "
            "settings, use dataclasses.replace(config, inference_mode=False)."
        )


def first_of(items: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    names = ", ".join(item[:_MOST_LETTERS] for item in items[:_MOST_NAMES])
    more = len(items) - _MOST_NAMES
    return f"{names} and {more} more" if more > 0 else names
