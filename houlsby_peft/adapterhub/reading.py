"""Read a folder of AdapterHub: what the library wrote in any version, in today's names, and nothing that runs code.

The rules are those of the `adapters` library 1.3 (`loading.py`, `utils.py`, `configuration/adapter_config.py`).
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..checkpoints.untrusted import read_json
from ..checkpoints.weights import check_values
from ..errors import AdapterError, shortened


ADAPTER_FILES = ("adapter_config.json", "adapter.safetensors", "pytorch_adapter.bin")
HEAD_FILES = ("head_config.json", "model_head.safetensors", "pytorch_model_head.bin")

# The containers of bottlenecks and couplings in keys: the names of adapter-transformers 1, and those of today.
_RENAMED = {
    "attention_text_task_adapters": "adapters",
    "attention_text_lang_adapters": "adapters",
    "layer_text_task_adapters": "adapters",
    "layer_text_lang_adapters": "adapters",
    "invertible_lang_adapters": "invertible_adapters",
}
# Before the library wrote its version into the file, "gelu" was the approximation by tanh.
_RENAMED_ACTIVATIONS = {"gelu": "gelu_new", "gelu_orig": "gelu"}
# What the library does not write, it assumes.
_DEFAULTS: dict[str, Any] = {
    "mh_adapter": False,
    "output_adapter": False,
    "cross_adapter": False,
    "original_ln_before": False,
    "original_ln_after": True,
    "residual_before_ln": True,
    "adapter_residual_before_ln": False,
    "is_parallel": False,
    "scaling": 1.0,
    "leave_out": [],
    "dropout": 0.0,
    "inv_adapter": None,
    "inv_adapter_reduction_factor": None,
}
# Options that cannot be had, with the values that switch them off, and what they do.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "phm_layer": ((False, None), "its projections are sums of Kronecker products (Compacter), not linear layers"),
    "use_gating": ((False, None), "a gate over the whole sequence scales the bottleneck"),
    "ln_before": ((False, None), "a norm of its own stands before the bottleneck"),
    "ln_after": ((False, None), "a norm of its own stands after the bottleneck"),
    "architecture": ((None,), "it is not a bottleneck adapter; PEFT has LoRA, prefix tuning and others itself"),
}


@dataclass(frozen=True)
class Part:
    """An adapter or a head, as its two files hold it.

    Args:
        fields: The configuration file.
        tensors: The weights, by today's keys.
        file: The file of the weights, for messages.
    """

    fields: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    file: Path


@dataclass(frozen=True)
class Published:
    """An adapter of AdapterHub.

    Args:
        name: The adapter's name in its keys.
        config: The bottleneck's options by today's names, complete.
        model_name: Name of the base model, as recorded.
        model_type: The base model's type, such as "bert".
        hidden_size: Width of the base model.
        adapter: The bottlenecks.
        head: The prediction head, if there is one.
    """

    name: str
    config: dict[str, Any]
    model_name: str
    model_type: str
    hidden_size: int
    adapter: Part
    head: Part | None = field(default=None)


def read_published(folder: Path, allow_pickle: bool, with_head: bool) -> Published:
    """Read and check an adapter of AdapterHub.

    Args:
        folder: Folder with the files that the library writes.
        allow_pickle: Whether the weights may be in a pickled file. It is read with `weights_only=True`.
        with_head: Whether to read the prediction head, if there is one.

    Raises:
        AdapterError: A file is missing, damaged or hostile, or the adapter has an option that cannot be had.
    """
    adapter = _read_part(folder, ADAPTER_FILES, allow_pickle)
    path = folder / ADAPTER_FILES[0]
    fields = adapter.fields
    config = fields.get("config")
    if not isinstance(config, dict):
        raise AdapterError(
            f"{path} must hold the options of one bottleneck adapter of AdapterHub in `config`; got "
            f"{shortened(repr(config))}. An adapter of PEFT needs no conversion."
        )
    name = _text(path, fields, "name")
    config = _complete(path, fields, config)
    is_task = fields.get("type") == "text_task"
    if is_task and config["inv_adapter"] and not any("invertible_adapters" in key for key in adapter.tensors):
        # Task adapters named the language adapter's coupling without having one.
        config |= {"inv_adapter": None, "inv_adapter_reduction_factor": None}
    width = fields.get("hidden_size")
    if not isinstance(width, int) or isinstance(width, bool) or not 1 <= width <= 1_000_000:
        raise AdapterError(f"{path}: hidden_size must be the base model's width; got {shortened(repr(width))}.")
    return Published(
        name=name,
        config=config,
        model_name=_text(path, fields, "model_name", ""),
        model_type=_text(path, fields, "model_type", ""),
        hidden_size=width,
        adapter=adapter,
        head=_read_part(folder, HEAD_FILES, allow_pickle)
        if with_head and (folder / HEAD_FILES[0]).is_file()
        else None,
    )


def _read_part(folder: Path, names: tuple[str, str, str], allow_pickle: bool) -> Part:
    config_name, safe_name, pickled_name = names
    fields = read_json(folder / config_name)
    if (folder / safe_name).is_file():
        file = folder / safe_name
        tensors = _read_safetensors(file)
    elif not (folder / pickled_name).is_file():
        raise AdapterError(
            f"{folder} must hold the weights in {safe_name} or {pickled_name}, as the `adapters` library writes them; "
            "it holds neither. Check the name, or download the adapter again."
        )
    elif not allow_pickle:
        raise AdapterError(
            f"{folder} has its weights in {pickled_name}, a pickled file, which only the converter reads, and only if "
            "you allow it. Give allow_pickle=True, or --allow-pickle, if you trust its author; it is read with "
            "torch.load(weights_only=True), and no code in it runs."
        )
    else:
        file = folder / pickled_name
        tensors = _read_pickle(file)
    for key, tensor in tensors.items():
        check_values(str(file), key, tensor)
    return Part(fields, {_rename(key): tensor for key, tensor in tensors.items()}, file)


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AdapterError(
            f"{file} is not a valid safetensors file ({file.stat().st_size:,} bytes): {shortened(str(error))}. "
            "Download it again."
        ) from error


def _read_pickle(file: Path) -> dict[str, torch.Tensor]:
    """Read tensors from a file that torch has pickled, of at most the file's size.

    A pickle can describe tensors that take more memory than the file has bytes: compressed ones, or views with a
    stride of zero.
    """
    size = file.stat().st_size
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > size:
                raise ValueError(f"it would unpack to {unpacked:,} bytes")
        found = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
            raise ValueError("it holds no tensors by name")
        for key, tensor in found.items():
            is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
            if not is_plain or tensor.is_meta or tensor.is_quantized:
                raise ValueError(f"{shortened(key)!r} is no plain tensor")
            if tensor.numel() * tensor.element_size() > size:
                raise ValueError(f"{shortened(key)!r} has more bytes than the file")
        return {key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in found.items()}
    except (
        pickle.UnpicklingError, zipfile.BadZipFile, ValueError, TypeError, KeyError, IndexError, AttributeError,
        RuntimeError, EOFError, OSError, AssertionError, RecursionError, OverflowError, MemoryError,
    ) as error:  # fmt: skip
        raise AdapterError(
            f"{file} cannot be read as pickled tensors ({size:,} bytes): "
            f"{shortened(str(error) or type(error).__name__)}. Download it again; a file that needs more than "
            "weights_only=True allows is not read."
        ) from error


def _rename(key: str) -> str:
    for old, new in _RENAMED.items():
        key = key.replace(f".{old}.", f".{new}.")
    return key


def _complete(path: Path, fields: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with today's names and all defaults.

    Raises:
        AdapterError: An option cannot be had, or has a value that the library never writes.
    """
    given = {key.lower(): value for key, value in config.items()}
    for name, (off, reason) in _UNSUPPORTED.items():
        if name in given and given[name] not in off:
            raise AdapterError(
                f"{path} has {name}={shortened(repr(given[name]))}, which cannot be converted: {reason}."
            )
    block = given.pop("invertible_adapter", None)
    if isinstance(block, dict):
        given["inv_adapter"] = block.get("block_type")
        given["inv_adapter_reduction_factor"] = block.get("reduction_factor")
    known = {name: given[name] for name in _DEFAULTS if given.get(name) is not None}
    options = {**_DEFAULTS, **known}
    activation = given.get("non_linearity")
    if not isinstance(activation, str):
        raise AdapterError(f"{path}: non_linearity must be text; got {shortened(repr(activation))}.")
    activation = activation.lower()
    if "version" not in fields:
        activation = _RENAMED_ACTIVATIONS.get(activation, activation)
    options["non_linearity"] = {"leakyrelu": "leaky_relu"}.get(activation, activation)
    options["reduction_factor"] = given.get("reduction_factor")
    _check_options(path, options)
    return options


def _check_options(path: Path, options: Mapping[str, Any]) -> None:
    factors = options["reduction_factor"]
    checks: dict[str, tuple[bool, str]] = {
        "reduction_factor": (
            _is_factor(factors)
            or (isinstance(factors, dict) and bool(factors) and all(map(_is_factor, factors.values()))),
            "a positive number, or a mapping from layers to such numbers",
        ),
        "scaling": (
            options["scaling"] in ("learned", "channel")
            if isinstance(options["scaling"], str)
            else _is_number(options["scaling"]),
            "a number, 'learned' or 'channel'",
        ),
        "leave_out": (
            isinstance(options["leave_out"], list)
            and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in options["leave_out"]),
            "a list of layers",
        ),
        "dropout": (_is_number(options["dropout"]) and 0 <= options["dropout"] < 1, "a probability in [0, 1)"),
        "inv_adapter": (
            options["inv_adapter"] in (None, "nice"),
            "'nice' or nothing; of 'glow', whose forward pass slices the wrong dimension, no trained adapter can work",
        ),
        "inv_adapter_reduction_factor": (
            options["inv_adapter"] is None or _is_factor(options["inv_adapter_reduction_factor"]),
            "a positive number",
        ),
        **{
            name: (isinstance(options[name], bool), "true or false")
            for name in ("mh_adapter", "output_adapter", "cross_adapter", "original_ln_before", "original_ln_after",
                         "is_parallel")
        },
    }  # fmt: skip
    for name, (holds, rule) in checks.items():
        if not holds:
            raise AdapterError(f"{path}: {name} must be {rule}; got {shortened(repr(options[name]))}.")


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e9 and math.isfinite(value)
    )


def _is_factor(value: Any) -> bool:
    return _is_number(value) and value > 1e-9


def _text(path: Path, fields: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, str) or (not value and default is None):
        raise AdapterError(f"{path}: {name} must be text; got {shortened(repr(value))}. Download the adapter again.")
    return value
