"""Write an adapter in AdapterHub's format, for the `adapters` library 1.3."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft.utils import CONFIG_NAME
from safetensors.torch import load_file, save_file
from torch import nn

from ..checkpoints.untrusted import check_weights, read_config
from ..checkpoints.weights import FILE_PREFIX
from ..config import HoulsbyConfig
from ..errors import AdapterError
from ..heads.tasks import task_of_config
from ..placement.places import find_places
from ..placement.plan import Plan
from ..serving.base_model import label_arguments
from ..serving.load import find_folder
from .base import make_empty, read_base_config
from .heads import NO_HEAD, ROWS, Row, flexible_config, flexible_index
from .mapping import check_base_type, describe, library_keys
from .reading import ADAPTER_FILES, HEAD_FILES


_VERSION = "adapters.1.3.0"


def write_published(
    source: str | os.PathLike[str],
    folder: Path,
    name: str,
    *,
    base_model: str | os.PathLike[str] | None = None,
    with_head: bool = True,
    revision: str | None = None,
    token: str | None = None,
) -> None:
    """Write an adapter of this package in AdapterHub's format.

    A shared bottleneck is written at each of its places.

    Args:
        source: The adapter's folder, or its name on the Hub.
        folder: An empty folder.
        name: The adapter's name in the library.
        base_model: Name or folder of the base model. Default: the one that the adapter names.
        with_head: Whether to write the task head.
        revision: A branch, tag or commit of the source.
        token: Access token for private repositories.

    Raises:
        AdapterError: The source is damaged, or has something that the format cannot express.
        HubError: A repository does not exist, is private or cannot be reached.
    """
    found = find_folder(source, revision, token)
    config = read_config(found)
    check_weights(found, config)
    name = re.sub(r"[^\w-]+", "-", name).strip("-") or "adapter"
    base_name = os.fspath(base_model or config.base_model_name_or_path or "")
    base_config = read_base_config(base_name, token)
    check_base_type(str(base_config.model_type), config.kind, config.positions, found)
    for field, value in label_arguments(config).items():
        setattr(base_config, field, value)
    task = task_of_config(config)
    model = make_empty(base_config, task.auto_class)
    tensors = {key.removeprefix(FILE_PREFIX): value for key, value in _read(found, config, model).items()}
    plan = Plan(model, config)
    width = next(iter(plan.widths.values()))

    everywhere = find_places(model, _everywhere(config))
    places = {key: place for key, place in everywhere.items() if not place.is_norm and place.layer is not None}
    if others := sorted(plan.bottlenecks.keys() - everywhere.keys()):
        raise AdapterError(
            f"The format has bottlenecks only at the ends of sub-layers; {found} also has one at {others[0]}. Such an "
            "adapter cannot be converted."
        )
    names = {name: tensor for name, tensor in tensors.items() if ".houlsby_adapter." in name}
    expanded: dict[str, torch.Tensor] = {}
    for key, owner in plan.owners.items():
        expanded |= {key + own.removeprefix(owner): value for own, value in names.items() if _is_at(own, owner)}
    expanded = {**names, **expanded}
    keys = library_keys(expanded, plan.bottlenecks, model, name)
    sizes = {key: expanded[f"{key}.houlsby_adapter.down_proj.weight"].shape[0] for key in places if key in plan.owners}
    prefix = f"{model.base_model_prefix}."
    facts = {
        "hidden_size": width,
        "model_class": type(make_empty(base_config, "AutoModel")).__name__.removesuffix("Model") + "AdapterModel",
        "model_name": base_name,
        "model_type": base_config.model_type,
        "name": name,
        "version": _VERSION,
    }
    _save(
        folder,
        ADAPTER_FILES,
        {"config": describe(config, places, sizes, width), **facts},
        {prefix + key: expanded[own] for own, key in keys.items()},
    )
    head = {own: tensor for own, tensor in tensors.items() if own not in names}
    if head and with_head:
        row, renamed = _find_flexible(config, plan, model, head, task.class_suffix, name)
        last = row.modules[-1].format(base=model.base_model_prefix)
        has_bias = f"{last}.bias" in head
        outputs = head[f"{last}.weight"].shape[0]
        fields = flexible_config(row, outputs, config.labels, config.kind_of_problem, has_bias)
        _save(folder, HEAD_FILES, {"config": fields, **facts}, renamed)


def _read(folder: Path, config: HoulsbyConfig, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of an adapter, which can be written.

    Raises:
        AdapterError: They do not fit the base model, or the format has no place for them.
    """
    path = folder / CONFIG_NAME
    try:
        Plan(model, config).check_weights()
    except AdapterError:
        raise
    except ValueError as error:
        raise AdapterError(f"{folder} cannot be converted: {error}") from error
    assert config.record is not None
    assert config.record.source is not None
    assert config.record.source.weights is not None
    tensors = load_file(config.record.source.weights)
    if any(".houlsby_norm." in key for key in tensors):
        raise AdapterError(
            f"{path} has train_layer_norm={config.train_layer_norm!r}, and AdapterHub's format has no place for "
            "trained norms. Train the adapter with train_layer_norm=False to convert it."
        )
    if config.trainable_token_indices:
        raise AdapterError(
            f"{path} has trainable_token_indices, and AdapterHub's format has no place for trained embeddings of "
            "tokens. Train the adapter without them to convert it."
        )
    return tensors


def _everywhere(config: HoulsbyConfig) -> HoulsbyConfig:
    """Return the configuration of an adapter at the same sub-layers of all layers."""
    return replace(
        config, target_modules=None, exclude_modules=None, layers_to_transform=None, layers_pattern=None,
        rank_pattern={}, train_layer_norm=False,
    )  # fmt: skip


def _is_at(name: str, owner: str) -> bool:
    return name.startswith(f"{owner}.houlsby_adapter.")


def _find_flexible(
    config: HoulsbyConfig, plan: Plan, model: Any, head: Mapping[str, torch.Tensor], suffix: str, name: str
) -> tuple[Row, dict[str, torch.Tensor]]:
    """Return the row of the table of heads that a task head is, and its weights by the library's keys.

    Raises:
        AdapterError: The library has no such head.
    """
    for row in ROWS.get(model.config.model_type, ()):
        modules = [module.format(base=model.base_model_prefix) for module in row.modules]
        own = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
        if row.suffix != suffix or not head.keys() <= own or {key.rpartition(".")[0] for key in head} != set(modules):
            continue
        return row, {
            f"heads.{name}.{flexible_index(row.layers, number, row.activation is not None)}.{kind}": head[key]
            for number, module in enumerate(modules)
            for kind in ("weight", "bias")
            if (key := f"{module}.{kind}") in head
        }
    raise AdapterError(
        f"The `adapters` library has no head that consists of {', '.join(plan.heads)} of a {type(model).__name__}. "
        f"{NO_HEAD}."
    )


def _save(
    folder: Path, names: tuple[str, str, str], fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    text = json.dumps(fields, indent=2, sort_keys=True)
    (folder / names[0]).write_text(text, encoding="utf-8")
    # A shared bottleneck is one tensor at several places, which a safetensors file cannot hold.
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / names[1])
