"""`convert`: from a folder of AdapterHub to an adapter of this package, and back."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig

from ..checkpoints.record import AdapterRecord
from ..checkpoints.weights import FILE_PREFIX, check_shapes, first_of
from ..config import HoulsbyConfig
from ..errors import AdapterError, shortened
from ..hub.card import CARD_FILE, make_card
from ..hub.markdown import code
from ..hub.metadata import is_repo_id
from ..placement.place import Place
from ..placement.places import find_places
from ..placement.plan import Plan
from ..serving.load import find_files
from .base import make_empty, read_base_config
from .heads import Head, find_target, head_keys, head_modules
from .mapping import check_base_type, find_kind, layer_config, library_keys, own_config
from .reading import ADAPTER_FILES, HEAD_FILES, Published, read_published
from .writing import write_published


logger = logging.getLogger(__name__)

FORMATS = ("houlsby", "adapterhub")
# The class that an adapter without a head is for, the first that the base model has. Its names of modules are also
# those of classes for other tasks, except on T5.
_WITHOUT_HEAD = ("AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModel")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str = "houlsby",
    base_model: str | os.PathLike[str] | None = None,
    with_head: bool = True,
    allow_pickle: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> Path:
    """Convert an adapter of AdapterHub, as the `adapters` library saves it, or write one in its format.

    The converted adapter computes what the library computes. What cannot be expressed is refused with the reason.
    Only the base model's configuration is read, so the adapter does not record what identifies its weights.

    Args:
        source: The adapter's folder, or its name on the Hub.
        target: A new folder for the converted adapter, with its model card.
        to: "houlsby": from AdapterHub's format to this package's. "adapterhub": back.
        base_model: Name of the base model on the Hub, or its folder, in place of the one that the adapter names.
        with_head: Whether to convert the prediction head, if the adapter has one.
        allow_pickle: Whether weights may be read from a pickled file, with `torch.load(weights_only=True)`. Nothing
            else in this package reads such files. Most older adapters of AdapterHub have no other.
        revision: A branch, tag or commit of the source.
        token: Access token for private repositories.

    Returns:
        The target.

    Raises:
        AdapterError: The source is damaged or hostile, or has something that cannot be expressed.
        HubError: A repository does not exist, is private or cannot be reached.
        ValueError: An argument is not of the kind described above, or the target is not empty.
    """
    if to not in FORMATS:
        raise ValueError(f"to must be one of {FORMATS}; got {shortened(repr(to))}.")
    folder = Path(target)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"The target must be a new folder, or an empty one; {folder} holds files. Name another one.")
    if to == "adapterhub":
        with _new_folder(folder) as new:
            options = {"base_model": base_model, "with_head": with_head, "revision": revision, "token": token}
            write_published(source, new, folder.resolve().name, **options)  # type: ignore[arg-type]
        return folder
    found = find_files(source, [*ADAPTER_FILES, *HEAD_FILES], revision, token)
    with _name_source(source, found):
        published = read_published(found, allow_pickle, with_head)
        name = os.fspath(base_model) if base_model is not None else _recorded_base(published)
        base_config = read_base_config(name, token)
        _check_base(published, base_config, name)
        config, weights = _convert(published, base_config)
    config.base_model_name_or_path = name
    with _new_folder(folder) as new:
        save_file(weights, new / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
        config.save_pretrained(str(new))
        _write_card(new, folder, os.fspath(source), next(filter(is_repo_id, (name, published.model_name)), None))
    return folder


def _write_card(new: Path, folder: Path, source: str, base_model: str | None) -> None:
    if base_model is None:
        logger.warning(
            "A card must name a base model on the Hub, so none is written. Write it later with `houlsby-peft card %s "
            "NAME --base-model BASE`.",
            folder,
        )
        return
    name = re.sub(r"[^\w.-]+", "-", folder.resolve().name).strip("-.")
    card = make_card(new, name if is_repo_id(name) else "adapter", base_model=base_model)
    origin = (
        f"## Origin\n\nConverted from {code(source)}, an adapter in AdapterHub's format, with "
        "`houlsby_peft.convert`.\n"
    )
    (new / CARD_FILE).write_text(f"{str(card).rstrip()}\n\n{origin}", encoding="utf-8")


def _convert(published: Published, base_config: PretrainedConfig) -> tuple[HoulsbyConfig, dict[str, torch.Tensor]]:
    """Return the configuration, with its record, and the weights of a converted adapter."""
    model_type, options, width = str(base_config.model_type), published.config, published.hidden_size
    path = published.adapter.file.with_name(ADAPTER_FILES[0])
    kind = find_kind(options, model_type, path)
    fields = own_config(options, width, kind)
    check_base_type(model_type, kind, fields["positions"], path)
    head = find_target(published.head, model_type) if published.head else None
    model = _empty_model(base_config, head)
    try:
        everywhere = HoulsbyConfig(**fields)
        places = _bottlenecks(find_places(model, everywhere))
        fields |= layer_config(options, width, places, type(model).__name__)
        if head is None:
            fields["modules_to_save"] = []  # so that the adapter fits a model with any head
        elif head.task.has_labels:
            fields |= {"id2label": head.id2label, "problem_type": head.problem_type}
        config = HoulsbyConfig(**fields)
        record = AdapterRecord(heads=head_modules(head, model) if head else [])
        record.two_layer_head = head is not None and head.row is not None and head.row.is_added
        config._mark_as_loaded(record)
        plan = Plan(model, config)
    except AdapterError:
        raise
    except ValueError as error:
        raise AdapterError(f"{path} cannot be converted: {error}") from error
    expected = plan.saved_tensors()
    weights = _collect(published, head, plan, model, expected)
    made = plan.new_record()
    made.two_layer_head = record.two_layer_head
    if head is None:
        made.task_type = None  # PEFT's class for the task would refuse models with other heads
    config.record = made
    module = type(model).__module__
    config.auto_mapping = {"base_model_class": type(model).__name__, "parent_library": module}
    config.inference_mode = True
    return config, weights


def _collect(
    published: Published, head: Head | None, plan: Plan, model: nn.Module, expected: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the weights by the names that they have in the converted adapter's file."""
    keys = library_keys(expected, plan.bottlenecks, model, published.name)
    by_key = {key: name for name, key in keys.items()}
    weights: dict[str, torch.Tensor] = {}
    unknown = []
    for key, tensor in published.adapter.tensors.items():
        # With the base model's prefix, or without it if the adapter was saved from an encoder alone.
        name = by_key.get(key) or by_key.get(key.partition(".")[2])
        if name is None or name in weights:
            unknown.append(key)
        else:
            weights[name] = tensor
    if unknown:
        raise AdapterError(
            f"{published.adapter.file} must hold the weights of one bottleneck adapter on a {type(model).__name__}; "
            f"it also has {first_of(unknown)}, which its configuration has no place for. Give the base model that the "
            "adapter was trained on."
        )
    if head is not None:
        own = {name: like for name, like in expected.items() if name not in keys}
        for name, source in head_keys(head, model, own).items():
            like = own[name]
            weights[name] = torch.zeros(like.shape) if source is None else head.part.tensors[source]
    shapes = {name: like.shape for name, like in expected.items()}
    try:
        check_shapes(shapes, {name: tensor.shape for name, tensor in weights.items()}, str(published.adapter.file))
    except ValueError as error:
        raise AdapterError(str(error)) from error
    return {FILE_PREFIX + name: tensor.contiguous() for name, tensor in weights.items()}


def _empty_model(base_config: PretrainedConfig, head: Head | None) -> Any:
    if head is None:
        for auto_class in _WITHOUT_HEAD:
            with suppress(AdapterError):
                return make_empty(base_config, auto_class)
        raise AdapterError(f"transformers has no model for a base model of the type {base_config.model_type}.")
    if head.id2label is not None:
        base_config.id2label = head.id2label
        base_config.label2id = {name: number for number, name in head.id2label.items()}
    model = make_empty(base_config, head.task.auto_class)
    recorded = head.part.fields.get("model_class")
    if head.row is None and type(model).__name__ != recorded:
        raise AdapterError(
            f"The head of a {shortened(str(recorded))} fits no {type(model).__name__}, the class of this base model. "
            "Give the base model that the adapter was trained on."
        )
    return model


def _bottlenecks(places: Mapping[str, Place]) -> dict[str, Place]:
    return {key: place for key, place in places.items() if place.layer is not None and not place.is_norm}


def _recorded_base(published: Published) -> str:
    """Return the recorded name of the base model. A source may not name a folder."""
    try:
        validate_repo_id(published.model_name)
    except HFValidationError as error:
        raise AdapterError(
            f"{published.adapter.file.with_name(ADAPTER_FILES[0])}: model_name must be a name on the Hub; got "
            f"{shortened(repr(published.model_name))}. Give the base model's name or folder as base_model."
        ) from error
    return published.model_name


def _check_base(published: Published, base_config: PretrainedConfig, name: str) -> None:
    here = (str(base_config.model_type), getattr(base_config, "hidden_size", None))
    recorded = (published.model_type or here[0], published.hidden_size)
    if recorded != here:
        raise AdapterError(
            f"The adapter was trained on a base model of the type {shortened(recorded[0])} and the width "
            f"{recorded[1]}; {name} is a {here[0]} of the width {here[1]}. Give the right one as base_model."
        )


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Create a folder only if everything that it is to hold has been written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        yield new
        if folder.is_dir():
            folder.rmdir()  # an empty one
        new.rename(folder)


@contextmanager
def _name_source(source: str | os.PathLike[str], folder: Path) -> Iterator[None]:
    """Call an adapter from the Hub by its name in messages, not by its folder in the cache."""
    try:
        yield
    except AdapterError as error:
        name = os.fspath(source)
        message = str(error).replace(str(folder), name)
        raise AdapterError(message if name in message else f"{name}: {message}") from error
