"""Read the files of a saved adapter that others may have written, and trust nothing in them.

Only JSON and safetensors files are read, which cannot contain code. Everything is checked before memory is allocated
in the amount that a file asks for.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from ..config import HoulsbyConfig
from ..errors import AdapterError
from ..errors import shortened as shortened  # which the modules that load these files use as well
from .weights import check_values, missing_message


# What transformers writes for a tokenizer that needs no other format; `tokenizer.json` alone holds the vocabulary.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

_MAX_CONFIG_BYTES = 1_000_000
_AGAIN = "Save or download the adapter again."
_KINDS: dict[str, type | tuple[type, ...]] = {
    "text": str,
    "a mapping": dict,
    "a list of names": list,
    "a list of names or one pattern": (list, str),
}
_RULES = {
    "target_modules": "a list of names or one pattern",
    "exclude_modules": "a list of names or one pattern",
    "layers_pattern": "a list of names or one pattern",
    "modules_to_save": "a list of names",
    "positions": "a list of names",
    "rank_pattern": "a mapping",
    "auto_mapping": "a mapping",
    "base_fingerprint": "a mapping",
    "recorded": "a mapping",
    "base_model_name_or_path": "text",
    "revision": "text",
}
# Repeated groups take a time that is exponential in the length of a module's name. A comment, or a space that the flag
# x ignores, may stand between a group and what repeats it.
_REPEATED_GROUP = re.compile(r"\)[*+{]|\(\?#|\(\?[a-zA-Z-]*x")
_MOST_REPEATS, _MOST_CHOICES = 4, 24


def read_config(folder: Path) -> HoulsbyConfig:
    """Read and check the configuration of the adapter in a folder.

    Raises:
        AdapterError: There is none, it is not that of a Houlsby adapter, or a value breaks its rule.
    """
    path = folder / CONFIG_NAME
    fields = read_json(path)
    if fields.get("peft_type") != "HOULSBY":
        raise AdapterError(f"{path} must have peft_type 'HOULSBY'; {_other_method(fields)}")
    _check_types(path, fields)
    _check_patterns(path, fields)
    if not (folder / SAFETENSORS_WEIGHTS_NAME).is_file():
        raise AdapterError(missing_weights(folder, [file.name for file in folder.iterdir()]))
    return HoulsbyConfig.from_pretrained(str(folder))


def check_weights(folder: Path, config: HoulsbyConfig) -> dict[str, int]:
    """Check that the weights in a folder can be loaded safely, whatever the model.

    Returns:
        The number of parameters, by the names of the tensors.

    Raises:
        AdapterError: The file is damaged, its numbers are not finite, or the configured bottleneck has more weights
            than the file has bytes.
    """
    path = folder / SAFETENSORS_WEIGHTS_NAME
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            _check_sizes(path, shapes, config)
            for key in shapes:
                check_values(str(path), key, file.get_tensor(key))
    except (SafetensorError, OSError) as error:
        raise AdapterError(
            f"{path} is not a valid safetensors file ({path.stat().st_size:,} bytes): {shortened(str(error))}. "
            "Download or save it again."
        ) from error
    return {key: math.prod(shape) for key, shape in shapes.items()}


def missing_weights(where: object, names: Iterable[str]) -> str:
    """Return a message that a folder or repository, which holds files of these names, lacks the adapter's weights."""
    pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl")))
    if pickled:
        return (
            f"{where} has its weights in {pickled[0]}, a pickled file, which can run any code when it is loaded and "
            f"is never read here. Ask its author to save the adapter again, which writes {SAFETENSORS_WEIGHTS_NAME}."
        )
    return missing_message(where)


def read_json(path: Path) -> dict[str, Any]:
    """Read a configuration: one JSON object of limited size.

    Raises:
        AdapterError: The file does not exist, is too large or holds anything else.
    """
    if not path.is_file():
        remedy = "Check the name."
        if (path.parent / "config.json").exists():
            remedy = "It looks like a whole model: load it with transformers."
        # PEFT saves an adapter that is not called "default" in a folder of its name.
        elif inside := sorted(path.parent.glob(f"*/{CONFIG_NAME}")):
            remedy = f"Give the folder of an adapter in it, such as {inside[0].parent}."
        raise AdapterError(f"{path.parent} holds no {CONFIG_NAME} and therefore no loadable adapter. {remedy}")
    size = path.stat().st_size
    if size > _MAX_CONFIG_BYTES:
        raise AdapterError(f"{path} must be smaller than {_MAX_CONFIG_BYTES:,} bytes; it has {size:,}. {_AGAIN}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is not valid JSON: {shortened(str(error))}. {_AGAIN}") from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{path} must hold one JSON object, got {shortened(repr(fields))}. {_AGAIN}")
    return fields


def _other_method(fields: dict[str, Any]) -> str:
    found = fields.get("peft_type")
    if found is not None:
        return f"got {shortened(repr(found))}. Load adapters of other methods with peft.PeftModel.from_pretrained."
    if "config" in fields or "hidden_size" in fields:
        return "it has none and looks like one of the `adapters` library, whose weights have other names."
    return "it has none. Save the adapter with PeftModel.save_pretrained."


def _check_types(path: Path, fields: dict[str, Any]) -> None:
    for name, rule in _RULES.items():
        value = fields.get(name)
        holds = value is None or isinstance(value, _KINDS[rule])
        if not holds or (isinstance(value, list) and not all(isinstance(item, str) for item in value)):
            raise AdapterError(f"{path}: {name} must be {rule}, got {shortened(repr(value))}. {_AGAIN}")


def _check_patterns(path: Path, fields: dict[str, Any]) -> None:
    single = [fields.get(name) for name in ("target_modules", "exclude_modules", "layers_pattern")]
    names = fields.get("layers_pattern")
    several = [*(fields.get("rank_pattern") or ()), *(names if isinstance(names, list) else ())]
    for pattern in filter(None, single + several):
        if isinstance(pattern, str) and not (_is_quick(pattern) and _compiles(pattern)):
            raise AdapterError(
                f"{path}: a pattern must be a regular expression with at most four of * + {{ and none of them after a "
                "group, with few ? and |, and without comments, as matching it could take forever; got "
                f"{shortened(repr(pattern))}. Name the modules in a list instead."
            )


def _is_quick(pattern: str) -> bool:
    """Return whether the ways in which a pattern can match a name are few enough to try them all.

    Each repeat multiplies their number by about the length of a name, each optional part by two, and each group by its
    alternatives, which are most ways if they are spread evenly over the groups.
    """
    repeats, optionals = len(re.findall(r"[*+{]", pattern)), len(re.findall(r"(?<!\()\?", pattern))
    groups, alternatives = pattern.count("(") + 1, pattern.count("|")
    choices = 5 * repeats + 2 * optionals + groups * math.log2(1 + alternatives / groups)
    return not _REPEATED_GROUP.search(pattern) and repeats <= _MOST_REPEATS and choices <= _MOST_CHOICES


def _compiles(pattern: str) -> bool:
    try:
        return bool(re.compile(pattern))
    except (re.error, OverflowError, RecursionError):
        return False


def _check_sizes(path: Path, shapes: dict[str, tuple[int, ...]], config: HoulsbyConfig) -> None:
    down = [shape for key, shape in shapes.items() if key.endswith(".houlsby_adapter.down_proj.weight")]
    if not down or not all(down):
        some = ", ".join(shortened(key) for key in list(shapes)[:2]) or "nothing"
        raise AdapterError(f"{path} must hold matrices *.houlsby_adapter.down_proj.weight; it holds {some}. {_AGAIN}")
    r, largest, size = max([config.r, *config.rank_pattern.values()]), max(down)[0], path.stat().st_size
    if r > largest and 2 * r > size:
        raise AdapterError(
            f"{path.with_name(CONFIG_NAME)} asks for bottlenecks of size {r:,}, which have more weights than all of "
            f"{path.name} has bytes ({size:,}); its largest has size {largest:,}. {_AGAIN}"
        )
