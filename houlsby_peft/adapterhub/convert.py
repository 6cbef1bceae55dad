"""`convert`: from a folder of AdapterHub to an adapter of this package."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from ..config import HoulsbyConfig
from ..errors import AdapterError, shortened
from ..hub.card import CARD_FILE, is_repo_id, make_card
from ..hub.markdown import code
from ..hub.results import read_report
from ..placement.places import find_places
from ..placement.plan import Plan
from ..registration import PREFIX
from ..saved.adapter import SavedAdapter, find_files
from ..saved.downloads import explain_hub_errors, find_packaged
from ..saved.naming import FILE_PREFIX
from ..saved.record import AdapterRecord
from ..saved.weights import check_shapes, first_of
from .format import ADAPTER_FILES, HEAD_FILES, Published, read_published
from .heads import Head, find_target, head_modules, head_weights
from .names import check_base_type, find_kind, layer_config, library_keys, own_config


# The class that an adapter without a head is for: the first that the base model has, or AutoModel.
# Classes for other tasks have the same names of modules, except on T5.
_WITHOUT_HEAD = ("AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    base_model: str | os.PathLike[str] | None = None,
    with_head: bool = True,
    allow_pickle: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> Path:
    """Convert an adapter from AdapterHub's format, which the `adapters` library writes.

    The converted adapter computes what the library computes. What cannot be expressed is refused
    with the reason. Only the base model's configuration is read, so the adapter does not record
    what identifies its weights.

    Args:
        source: The adapter's folder, or its name on the Hub.
        target: A new folder for the converted adapter, with its model card.
        base_model: Name of the base model on the Hub, or its folder, in place of the one that the
            adapter names.
        with_head: Whether to convert the prediction head, if the adapter has one.
        allow_pickle: Whether weights may be read from a pickled file, with
            `torch.load(weights_only=True)`. Nothing else in this package reads such files. Most
            older adapters of AdapterHub have no other.
        revision: A branch, tag or commit of the source.
        token: Access token for private repositories.

    Returns:
        The target.

    Raises:
        AdapterError: The source is damaged or hostile, or has something that cannot be expressed.
        HubError: A repository does not exist, is private or cannot be reached.
        OSError: The target is not empty, or cannot be written.
    """
    name, folder = os.fspath(source), Path(target)
    base = None if base_model is None else os.fspath(base_model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        unfinished = Path(temporary) / "unfinished"
        unfinished.mkdir()
        adapter_name = folder.resolve().name
        try:
            files = find_files(name, [*ADAPTER_FILES, *HEAD_FILES], revision, token)
            published = read_published(files, allow_pickle, with_head)
            _write_adapter(name, published, unfinished, adapter_name, base, token)
        except OSError:  # which names its file, or the repository
            raise
        except AdapterError as error:
            raise AdapterError(f"{shortened(name)} cannot be converted: {error}") from error
        except Exception as error:  # whichever library meets a damaged or hostile file
            reason = shortened(f"{type(error).__name__}: {error}")
            raise AdapterError(f"{shortened(name)} cannot be converted: {reason}") from error
        if folder.is_dir():
            folder.rmdir()  # an empty one
        unfinished.rename(folder)
    return folder


def _write_adapter(
    source: str, published: Published, folder: Path, name: str, base: str | None, token: str | None
) -> None:
    """Write an adapter in this package's format, with its card."""
    base = base or published.base_model
    # Without its weights, and without running code.
    with explain_hub_errors(f"The base model {base}"):
        base_config = AutoConfig.from_pretrained(
            find_packaged(base), token=token, trust_remote_code=False
        )
    config, weights = _convert(published, base_config)
    config.base_model_name_or_path = base
    save_file(weights, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    config.save_pretrained(str(folder))
    name = re.sub(r"[^\w.-]+", "-", name).strip("-.")
    names_of_base = [base, str(published.adapter.fields.get("model_name"))]
    on_hub = [name for name in names_of_base if is_repo_id(name) and not Path(name).is_dir()]
    card = make_card(
        SavedAdapter.open(folder),
        read_report(folder),
        name if is_repo_id(name) else "adapter",
        base_model=on_hub[0] if on_hub else None,
    )
    text = (
        f"{str(card).rstrip()}\n\n## Origin\n\nConverted from {code(source)}, an adapter in "
        "AdapterHub's format, with `houlsby_peft.convert`.\n"
    )
    (folder / CARD_FILE).write_text(text, encoding="utf-8")


def _convert(
    published: Published, base_config: PretrainedConfig
) -> tuple[HoulsbyConfig, dict[str, torch.Tensor]]:
    """Return the configuration, with its record, and the weights of a converted adapter."""
    options, width = published.options, published.adapter.fields["hidden_size"]
    model_type = str(base_config.model_type)
    recorded_type = published.adapter.fields.get("model_type") or model_type
    width_of_base = getattr(base_config, "hidden_size", None)
    if recorded_type != model_type or width != width_of_base:
        raise AdapterError(
            "The adapter was trained on a base model of the type "
            f"{shortened(str(recorded_type))} and the width {shortened(str(width))}; this one is a "
            f"{model_type} of the width {width_of_base}. Give the right one as base_model."
        )
    kind = find_kind(options, model_type)
    fields = own_config(options, width, kind)
    check_base_type(model_type, kind, fields["positions"])
    head = find_target(published.head, model_type) if published.head else None
    model = _make_target(base_config, head)
    fields |= layer_config(options, width, find_places(model, HoulsbyConfig(**fields)))
    if head is None:
        fields["modules_to_save"] = []  # so that the adapter fits a model with any head
    elif head.task.has_labels:
        fields |= {"id2label": head.id2label, "problem_type": head.problem_type}
    record = AdapterRecord()
    if head is not None:
        record = AdapterRecord(heads=head_modules(head, model), two_layer_head=head.is_added)
    plan = Plan(model, HoulsbyConfig(**fields).derived(record))
    weights = _collect(published, head, plan, model)
    record = replace(plan.new_record(), two_layer_head=record.two_layer_head)
    if head is None:
        # PEFT's class for the task would refuse models with other heads.
        record = replace(record, task_type=None)
    config = plan.config.derived(record)
    config.auto_mapping = {
        "base_model_class": type(model).__name__,
        "parent_library": type(model).__module__,
    }
    config.inference_mode = True
    return config, weights


def _make_target(base_config: PretrainedConfig, head: Head | None) -> Any:
    """Return a model on the meta device, of the class that has the head, or of one for adapters
    without one.
    """
    auto_class = "AutoModel"
    if head is not None:
        auto_class = head.task.auto_class
        if head.id2label is not None:
            base_config.id2label = head.id2label
            base_config.label2id = {name: number for number, name in head.id2label.items()}
    else:
        for name in _WITHOUT_HEAD:
            if type(base_config) in getattr(transformers, name)._model_mapping:
                auto_class = name
                break
    with torch.device("meta"):
        return getattr(transformers, auto_class).from_config(base_config, trust_remote_code=False)


def _collect(
    published: Published, head: Head | None, plan: Plan, model: nn.Module
) -> dict[str, torch.Tensor]:
    """Return the weights by the names that they have in the converted adapter's file."""
    adapter, expected = published.adapter, _saved_shapes(plan)
    keys = library_keys(expected, plan.bottlenecks, model, str(adapter.fields["name"]))
    names = {key: name for name, key in keys.items()}
    weights: dict[str, torch.Tensor] = {}
    unknown = []
    for key, tensor in adapter.tensors.items():
        # Keys lack the base model's prefix if the adapter was saved from an encoder alone.
        name = names.get(key) or names.get(key.partition(".")[2])
        if name is None or name in weights:
            unknown.append(key)
        else:
            weights[name] = tensor
    if unknown:
        raise AdapterError(
            f"{adapter.file.name} must hold the weights of one bottleneck adapter on a "
            f"{type(model).__name__}; it also has {first_of(unknown)}, which its configuration has "
            "no place for. Give the base model that the adapter was trained on."
        )
    if head is not None:
        of_head = {name: shape for name, shape in expected.items() if name not in keys}
        weights |= head_weights(head, model, of_head)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    check_shapes(expected, shapes, adapter.file.name)
    return {FILE_PREFIX + name: tensor.contiguous() for name, tensor in weights.items()}


def _saved_shapes(plan: Plan) -> dict[str, torch.Size]:
    """Return the shapes of the tensors in the file of a plan's adapter, by name.

    The names lack PEFT's prefix.
    """
    modules: dict[str, nn.Module] = {}
    with torch.device("meta"):
        for key, place in plan.places.items():
            if place.is_norm:
                modules[f"{key}.{PREFIX}norm"] = plan.reference(place)
            elif plan.owners[key] == key:
                modules[f"{key}.{PREFIX}adapter"] = plan.new_bottleneck(place)
    for name in plan.heads:
        modules[name] = plan.head(name)
    shapes = {}
    for key, module in modules.items():
        for name, weight in module.state_dict().items():
            shapes[f"{key}.{name}"] = weight.shape
    return shapes
