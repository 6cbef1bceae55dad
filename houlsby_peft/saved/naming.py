"""The names that an adapter's weights have in a file, and in a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from ..registration import PREFIX


# What PEFT puts before the names of modules in a file.
FILE_PREFIX = "base_model.model."


def own_names(adapter_name: str) -> re.Pattern[str]:
    """Return what is in the names that an adapter's weights have in a model, and in no others."""
    name = re.escape(adapter_name)
    return re.compile(rf"\.(?:{PREFIX}(?:adapter|ladder|norm)|modules_to_save)\.{name}\.")


def name_in_file(key: str, adapter_name: str) -> str:
    """Return `X.houlsby_adapter.down_proj.weight` for `X.houlsby_adapter.NAME.down_proj.weight`.

    Another method, such as LoRA, may have wrapped X afterwards, which makes it `X.base_layer`.
    """
    name = re.escape(adapter_name)
    return re.sub(rf"(?:\.base_layer)*(\.{PREFIX}(?:adapter|ladder|norm))\.{name}\.", r"\1.", key)


def translate(
    weights: Mapping[str, torch.Tensor], names: Iterable[str], encoder: str
) -> dict[str, torch.Tensor]:
    """Name the weights of a file as in a model: `encoder.x` and `bert.encoder.x` are the same.

    Args:
        weights: The weights by their names in the file.
        names: The names that the model expects.
        encoder: Name of the encoder in the model, such as "bert"; "" if it is the encoder itself.
    """
    expected = {name.removeprefix(FILE_PREFIX) for name in names}
    translated = {}
    for key, weight in weights.items():
        name = key.removeprefix(FILE_PREFIX)
        for other in (name, name.removeprefix(f"{encoder}."), f"{encoder}.{name}"):
            if other in expected:
                key = key.removesuffix(name) + other
                break
        translated[key] = weight
    return translated


def name_for_model(
    weights: Mapping[str, torch.Tensor], names: Iterable[str], adapter_name: str, encoder: str
) -> dict[str, torch.Tensor]:
    """Name the weights of a file as those of an adapter in a model; what has no place keeps its
    name.

    Args:
        weights: The weights by their names in the file.
        names: The names that the adapter's weights have in the model.
        adapter_name: The adapter's name in the model.
        encoder: Name of the encoder in the model; see `translate`.
    """
    # By the names that the file of an adapter trained in this model would have.
    in_model = {}
    for name in names:
        saved_name = name_in_file(name, adapter_name)
        saved_name = saved_name.replace(f".modules_to_save.{adapter_name}.", ".")
        in_model[saved_name.removeprefix(FILE_PREFIX)] = name
    named = {}
    for key, weight in translate(weights, in_model, encoder).items():
        named[in_model.get(key.removeprefix(FILE_PREFIX), key)] = weight
    return named
