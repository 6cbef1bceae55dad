"""`load`: from the name of an adapter to something that predicts."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path

import torch
from huggingface_hub import HfApi, snapshot_download
from peft import PeftModel
from transformers import PreTrainedModel

from ..config import HoulsbyConfig
from ..errors import AdapterError
from ..head import HoulsbyHead
from ..hub.errors import explain_hub_errors
from ..tasks import task_of_class, task_of_config
from ..tuner_layer import HoulsbyTunerLayer
from ..two_layer_head import has_two_layer_head, put_two_layer_head
from .adapter_files import CONFIG_FILE, TOKENIZER_FILES, WEIGHTS_FILE, check_weights, missing_weights, read_config
from .base_model import load_base, load_tokenizer
from .predictor import Predictor, label_arguments
from .process_state import raised_warnings


def load(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    base_model: PreTrainedModel | str | None = None,
    beside: Predictor | None = None,
    adapter_name: str | None = None,
    token: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Predictor:
    """Load a trained adapter with its base model, labels and tokenizer.

    Only JSON and safetensors are read, and no code from a repository is ever run.

    Args:
        name_or_path: "user/adapter" on the Hub, or a folder.
        revision: a branch, tag or commit of the adapter's repository. The base model's is recorded in the adapter.
        base_model: the base model, or its name or folder, in place of the one that the adapter names.
        beside: an adapter that was loaded before, on whose base model this one is put, too.
        adapter_name: the name in the model, where it must be new. Default: "default", or the first that is free of
            "default_2", "default_3" and so on.
        token: for private repositories. Default: the one that `hf auth login` or HF_TOKEN has set.
        device: where to put the model. Default: where it is, for a new one the CPU.
        dtype: of the base model. Default: as in its files.

    Raises:
        AdapterError: The files are no Houlsby adapter, are damaged, or belong to another base model; or the base model
            that is given holds adapters already, or one of this name.
        HubError: A repository does not exist, is private or cannot be reached.
    """
    folder = find_folder(name_or_path, revision, token)
    with _messages_name(name_or_path, folder):
        config = read_config(folder)
        check_weights(folder, config)
        name = _new_name(adapter_name, beside)
        if beside is not None:
            base_model = _base(beside.model)
        elif not isinstance(base_model, PreTrainedModel):
            base_model = load_base(folder, config, base_model, token, dtype)
        # Before the adapter, which an error would leave in a model that is in use.
        tokenizer = load_tokenizer(folder, config, base_model.name_or_path, token)
        if beside is not None:
            task, model = beside.task, _put_beside(beside, folder, config, name)
        else:
            task = task_of_class(type(base_model).__name__) or task_of_config(config)
            model = _put_on(base_model, folder, config, name)
    return Predictor(model.eval().to(device) if device else model.eval(), name, task, tokenizer)


def find_folder(name_or_path: str | os.PathLike[str], revision: str | None = None, token: str | None = None) -> Path:
    """The folder of an adapter; one on the Hub is downloaded to the cache, as far as it is needed.

    Raises:
        AdapterError: There is no such folder, or no safetensors file in the repository.
        HubError: The repository does not exist, is private or cannot be reached.
    """
    path, name = Path(name_or_path).expanduser(), str(name_or_path)
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise AdapterError(
            f"An adapter must be a folder, or a name on the Hub such as user/adapter; {name} is neither."
        )
    needed = [CONFIG_FILE, WEIGHTS_FILE, *TOKENIZER_FILES]  # no pattern, so that a repository has no say in paths
    with explain_hub_errors(name):
        folder = Path(snapshot_download(name, revision=revision, token=token, allow_patterns=needed))
        if (folder / CONFIG_FILE).is_file() and not (folder / WEIGHTS_FILE).is_file():
            names = HfApi(token=token).list_repo_files(name, revision=folder.name)
            raise AdapterError(missing_weights(name, names))
    return folder


def _base(model: PeftModel) -> PreTrainedModel:
    return model.get_base_model()  # type: ignore[return-value]


def _new_name(asked: str | None, beside: Predictor | None) -> str:
    """A name that no adapter of the model has: the one that is asked for, or a free one. PEFT would load the weights
    into the adapter that has it."""
    taken = beside.model.peft_config if beside else {}
    if asked in taken:
        raise AdapterError(
            f"The name of an adapter must be new to its model; {asked!r} is one of {', '.join(taken)}. Give another "
            "adapter_name, or delete that adapter first."
        )
    names = chain(["default"], (f"default_{number}" for number in count(2)))
    return asked or next(name for name in names if name not in taken)


def _put_on(base: PreTrainedModel, folder: Path, config: HoulsbyConfig, name: str) -> PeftModel:
    if any(isinstance(module, HoulsbyTunerLayer) for module in base.modules()):
        raise AdapterError(
            "A base model that is given must hold no Houlsby adapters, which would be changed; this "
            f"{type(base).__name__} does. Give beside=, what houlsby_peft.load returned for it, or a base model anew."
        )
    with _fitting():
        if config.two_layer_head:
            put_two_layer_head(base)
        return PeftModel.from_pretrained(base, str(folder), name, config=config)


def _put_beside(beside: Predictor, folder: Path, config: HoulsbyConfig, name: str) -> PeftModel:
    task = task_of_config(config)
    if task.auto_class != beside.task.auto_class:
        raise AdapterError(
            f"Adapters on one base model must have the same kind of head; {folder} is for {task.pipeline}, the one "
            f"beside it for {beside.task.pipeline}. Load it by itself."
        )
    with _heads_for(_base(beside.model), config), _fitting():
        beside.model.load_adapter(str(folder), name)
    return beside.model


@contextmanager
def _heads_for(base: PreTrainedModel, config: HoulsbyConfig) -> Iterator[None]:
    """While an adapter is put beside others: heads of its kind and number of classes, which PEFT makes copies of."""
    heads = {key: module for key, module in base.named_modules() if isinstance(module, HoulsbyHead)}
    kept = {key: head.original_module for key, head in heads.items()}
    own_config = copy.deepcopy(base.config)
    for key, value in label_arguments(config).items():
        setattr(own_config, key, value)
    if (own_config.num_labels, config.two_layer_head) != (base.config.num_labels, has_two_layer_head(base)):
        with torch.device("meta"):
            blank = type(base)(own_config)
            if config.two_layer_head:
                put_two_layer_head(blank)
        for key, head in heads.items():
            some = next(kept[key].parameters())
            head.original_module = blank.get_submodule(key).to_empty(device=some.device).to(some.dtype)
    try:
        yield
    finally:
        for key, head in heads.items():
            head.original_module = kept[key]


@contextmanager
def _messages_name(name: str | os.PathLike[str], folder: Path) -> Iterator[None]:
    """Call the adapter what the user calls it, not by its folder in the cache."""
    try:
        yield
    except AdapterError as error:
        message = str(error).replace(str(folder), str(name))
        raise AdapterError(message if str(name) in message else f"{name}: {message}") from error


@contextmanager
def _fitting() -> Iterator[None]:
    """Refuse an adapter that does not fit the base model, also where PEFT would only warn of it."""
    try:
        with raised_warnings("Adapter .* was trained on the base model"):
            yield
    except (UserWarning, ValueError, RuntimeError, KeyError) as error:
        raise AdapterError(str(error)) from error
