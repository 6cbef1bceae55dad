"""Read the files of AdapterHub, in the formats of all versions of the `adapters` library.

No code in the files runs. The rules are those of the `adapters` library 1.3 (`loading.py`,
`utils.py`, `configuration/adapter_config.py`).
"""

from __future__ import annotations

import os
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..errors import AdapterError, shortened
from ..hub.card import is_repo_id
from ..saved.weights import check_values, read_json


ADAPTER_FILES = ("adapter_config.json", "adapter.safetensors", "pytorch_adapter.bin")
HEAD_FILES = ("head_config.json", "model_head.safetensors", "pytorch_model_head.bin")

# The containers of bottlenecks and couplings in keys: the names of adapter-transformers 1, and
# today's.
_RENAMED = {
    "attention_text_task_adapters": "adapters",
    "attention_text_lang_adapters": "adapters",
    "layer_text_task_adapters": "adapters",
    "layer_text_lang_adapters": "adapters",
    "invertible_lang_adapters": "invertible_adapters",
}
# Before the library wrote its version into the file, "gelu" was the approximation by tanh.
_OLD_ACTIVATIONS = {"gelu": "gelu_new", "gelu_orig": "gelu"}
# What the library does not write, it assumes.
_DEFAULTS: dict[str, Any] = {
    "mh_adapter": False,
    "output_adapter": False,
    "cross_adapter": False,
    "original_ln_before": False,
    "original_ln_after": True,
    "residual_before_ln": True,
    "is_parallel": False,
    "scaling": 1.0,
    "leave_out": [],
    "dropout": 0.0,
    "inv_adapter": None,
    "inv_adapter_reduction_factor": None,
}
# Options that cannot be converted, with the values that switch them off, and the reason.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "phm_layer": (
        (False, None),
        "its projections are sums of Kronecker products (Compacter), not linear layers",
    ),
    "use_gating": ((False, None), "a gate over the whole sequence scales the bottleneck"),
    "ln_before": ((False, None), "a norm of its own stands before the bottleneck"),
    "ln_after": ((False, None), "a norm of its own stands after the bottleneck"),
    "inv_adapter": (
        ("nice", None),
        "the forward pass of 'glow' slices the wrong dimension, so none can be trained",
    ),
    "architecture": (
        (None,),
        "it is not a bottleneck adapter; PEFT has LoRA, prefix tuning and others itself",
    ),
}


@dataclass(frozen=True)
class Part:
    """An adapter or a head: its configuration, and its weights by today's keys.

    All weights are finite numbers.
    """

    fields: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    file: Path


@dataclass(frozen=True)
class Published:
    """An adapter of AdapterHub, with all options of its bottlenecks by today's names."""

    options: dict[str, Any]
    adapter: Part
    head: Part | None

    @property
    def base_model(self) -> str:
        """The recorded name of the base model on the Hub. A source may not name a folder."""
        name = self.adapter.fields.get("model_name")
        if not is_repo_id(name):  # type: ignore[arg-type]
            raise AdapterError(
                f"model_name in {ADAPTER_FILES[0]} must be a name on the Hub; got "
                f"{shortened(repr(name))}. Give the base model's name or folder as base_model."
            )
        return str(name)


def read_published(folder: Path, allow_pickle: bool, with_head: bool) -> Published:
    """Read and check the files that the library has written.

    A pickled file is read with `weights_only=True`.

    Raises:
        AdapterError: A file is too large or not a regular file, or the adapter has an option that
            cannot be converted. Other errors of missing, damaged and hostile files are those of the
            libraries that read them.
    """
    for name in (*ADAPTER_FILES, *HEAD_FILES):
        path = folder / name
        # A pipe would keep its reader waiting.
        if os.path.lexists(path) and not path.is_file():
            raise AdapterError(f"{name} must be a regular file. Download the adapter again.")
    adapter = _read_part(folder, ADAPTER_FILES, allow_pickle)
    if not isinstance(adapter.fields.get("config"), dict):
        raise AdapterError(
            f"{ADAPTER_FILES[0]} must hold the options of one bottleneck adapter of AdapterHub in "
            "`config`."
        )
    head = None
    if with_head and (folder / HEAD_FILES[0]).is_file():
        head = _read_part(folder, HEAD_FILES, allow_pickle)
    return Published(_complete_options(adapter), adapter, head)


def _read_part(folder: Path, names: tuple[str, str, str], allow_pickle: bool) -> Part:
    """Read an adapter or a head from files of these names."""
    fields = read_json(folder / names[0])
    if "peft_type" in fields:
        raise AdapterError(
            f"{folder / names[0]} is of PEFT's format already, method {fields['peft_type']}."
        )
    file, pickled_file = folder / names[1], folder / names[2]
    if file.is_file():
        tensors = load_file(file)
    elif pickled_file.is_file() and not allow_pickle:
        raise AdapterError(
            f"The weights are in {pickled_file.name}, a pickled file, which only the converter "
            "reads, and only if you allow it. Give allow_pickle=True, or --allow-pickle, if you "
            "trust its author; it is read with torch.load(weights_only=True), and no code in it "
            "runs."
        )
    else:
        file = pickled_file
        tensors = _read_pickle(file)
    renamed = {}
    for key, tensor in tensors.items():
        check_values(file.name, key, tensor)
        for name, todays_name in _RENAMED.items():
            key = key.replace(f".{name}.", f".{todays_name}.")
        renamed[key] = tensor
    return Part(fields, renamed, file)


def _read_pickle(file: Path) -> dict[str, torch.Tensor]:
    """Read tensors from a file that torch has pickled, of at most the file's size.

    A pickle can describe tensors that take more memory than the file has bytes: compressed ones, or
    views with a stride of zero.
    """
    size = file.stat().st_size
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > size:
            raise AdapterError(f"{file.name} has {size:,} bytes and would unpack to {unpacked:,}.")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # whose message advises to run the file's code
        raise AdapterError(
            f"{file.name} holds more than tensors, or is damaged, and is not read. Download it "
            "again."
        ) from None
    tensors = {}
    for key, tensor in content.items():
        is_dense = type(tensor) in (torch.Tensor, torch.nn.Parameter) and (
            tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
        )
        if not is_dense or tensor.numel() * tensor.element_size() > size:
            raise AdapterError(
                f"{file.name}: {shortened(str(key))!r} is not a plain tensor of at most the file's "
                "size."
            )
        tensors[key] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensors


def _complete_options(adapter: Part) -> dict[str, Any]:
    """Return all options of the bottlenecks, with today's names.

    Raises:
        AdapterError: The adapter has an option that cannot be converted.
    """
    options = {key.lower(): value for key, value in adapter.fields["config"].items()}
    coupling = options.pop("invertible_adapter", None)
    if isinstance(coupling, dict):
        options["inv_adapter"] = coupling.get("block_type")
        options["inv_adapter_reduction_factor"] = coupling.get("reduction_factor")
    has_coupling = any("invertible_adapters" in key for key in adapter.tensors)
    if adapter.fields.get("type") == "text_task" and not has_coupling:
        # Task adapters named the language adapter's coupling without having one.
        options["inv_adapter"] = options["inv_adapter_reduction_factor"] = None
    for name, (off, reason) in _UNSUPPORTED.items():
        if options.get(name) not in off:
            raise AdapterError(
                f"{name}={shortened(repr(options[name]))} cannot be converted: {reason}."
            )
    activation = options["non_linearity"].lower()
    if "version" not in adapter.fields:
        activation = _OLD_ACTIVATIONS.get(activation, activation)
    if activation == "leakyrelu":
        activation = "leaky_relu"
    complete = {
        **_DEFAULTS,
        "non_linearity": activation,
        "reduction_factor": options["reduction_factor"],
    }
    for name in _DEFAULTS:
        if options.get(name) is not None:
            complete[name] = options[name]
    return complete
