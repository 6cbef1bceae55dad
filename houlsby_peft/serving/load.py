"""`load`: from the name of an adapter to a predictor."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from types import NoneType

import torch
from huggingface_hub import HfApi, constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from peft import PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.downloads import describe_damage, refuse_missing_folder
from ..checkpoints.fingerprint import refuse_other_bases
from ..checkpoints.untrusted import (
    TOKENIZER_FILES,
    check_weights,
    missing_weights,
    read_config,
    shortened,
)
from ..config import HoulsbyConfig
from ..errors import AdapterError, HubError, check_kind, explain_hub_errors
from ..heads.tasks import Task, task_of_class, task_of_config
from ..layer import HoulsbyTunerLayer
from .base_model import load_base, load_tokenizer
from .predictor import Predictor


# Adding an adapter changes the model, which one thread at a time may do.
_ADDING = threading.RLock()


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

    Only JSON and safetensors files are read, and code from a repository is never run. Threads may load adapters onto
    one base model, and predict with others on it, at the same time.

    Args:
        name_or_path: "user/adapter" on the Hub, or a folder.
        revision: A branch, tag or commit of the adapter's repository. The base model's is recorded in the adapter.
        base_model: The base model, or its name or folder, in place of the one that the adapter names.
        beside: An adapter that was loaded before, whose base model this one shares.
        adapter_name: A new name in the model. Default: "default", or the first unused name of "default_2",
            "default_3" and so on.
        token: Access token for private repositories. Default: the one that `hf auth login` or HF_TOKEN has set.
        device: Where to put the model. Default: where it is; the CPU for a new one.
        dtype: Dtype of the base model. Default: as in its files.

    Raises:
        AdapterError: The folder or repository does not contain a loadable Houlsby adapter, the adapter was trained on
            another base model, or the given base model already holds adapters, or one of this name.
        HubError: A repository does not exist, is private or cannot be reached.
        TypeError, ValueError: An argument is not of the kind described above.
    """
    check_kind("beside", beside, (Predictor, NoneType), "what houlsby_peft.load returned for another adapter")
    base_kinds = (PreTrainedModel, str, os.PathLike, NoneType)
    check_kind("base_model", base_model, base_kinds, "a model of transformers, without PEFT, or its name or folder")
    check_kind("dtype", dtype, (torch.dtype, NoneType), "a dtype such as torch.bfloat16")
    device = None if device is None else _find_device(device)
    return load_beside(
        name_or_path, revision, base_model, beside, adapter_name, token=token, device=device, dtype=dtype
    )


def _find_device(device: str | torch.device) -> torch.device:
    """Return a device, before anything is loaded for it.

    Raises:
        ValueError: PyTorch does not know it, or this machine does not have it.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be one that torch knows, such as 'cuda:0'; got {device!r}.") from error
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # the latter without CUDA
        reason = shortened(str(error).partition("\n")[0]).rstrip(".")
        raise ValueError(
            f"device must be one that this machine has; got {str(found)!r} ({reason}). Leave it out for the CPU."
        ) from error
    return found


def load_beside(
    name_or_path: str | os.PathLike[str],
    revision: str | None,
    base_model: PreTrainedModel | str | None,
    beside: Predictor | None,
    adapter_name: str | None,
    tokenizers: MutableMapping[object, PreTrainedTokenizerBase] | None = None,
    *,
    token: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Predictor:
    """Load an adapter as `load` does, whose arguments these are.

    Args:
        tokenizers: Tokenizers that may be shared (see `load_tokenizer`). Only predictors that never run at the same
            time may share one.
    """
    folder = find_folder(name_or_path, revision, token)
    _check_is_whole(name_or_path, folder)
    with _name_adapter_in_errors(name_or_path, folder):
        config = read_config(folder)
        check_weights(folder, config)
        if beside is not None:
            base = beside.base_model
            _check_kind(folder, config, beside.task)
        elif isinstance(base_model, PreTrainedModel):
            base = base_model
            _check_has_no_adapters(base)
        else:
            _check_reads_text(folder, config)
            base = load_base(folder, config, base_model, token, dtype)
        # Before the adapter, which would stay in a model that is in use if the tokenizer failed.
        tokenizer = load_tokenizer(folder, config, base.name_or_path, token, tokenizers)
        settings = base.config.get_text_config()
        if getattr(settings, "pad_token_id", None) is None:  # as of decoders, which classify at the last other token
            settings.pad_token_id = tokenizer.pad_token_id
        task = beside.task if beside is not None else task_of_class(type(base).__name__) or task_of_config(config)
        if not task.auto_class.endswith("LM"):
            # Whoever generates text pads on the left, where GPT-2 would count the padding as positions, and an encoder
            # take it for the first token. Tokenizers of models that need it, such as XLNet's, do so by themselves.
            tokenizer.padding_side = type(tokenizer).padding_side
        with _ADDING:
            name = _unused_name(adapter_name, {} if beside is None else beside.model.peft_config)
            model = _add(folder, config, name, base, None if beside is None else beside.model)
            return Predictor(model.to(device) if device else model, name, task, tokenizer)


def find_folder(name_or_path: str | os.PathLike[str], revision: str | None = None, token: str | None = None) -> Path:
    """Return the folder of an adapter; the needed files of one on the Hub are downloaded to the cache.

    Raises:
        AdapterError: There is no such folder, or no safetensors file in the repository.
        HubError: The repository does not exist, is private or cannot be reached.
    """
    needed = [CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, *TOKENIZER_FILES]
    folder = find_files(name_or_path, needed, revision, token)
    is_here = folder == Path(os.fspath(name_or_path)).expanduser()
    if not is_here and (folder / CONFIG_NAME).is_file() and not (folder / SAFETENSORS_WEIGHTS_NAME).is_file():
        name = os.fspath(name_or_path)
        with explain_hub_errors(name):
            names = HfApi(token=token).list_repo_files(name, revision=folder.name)
        raise AdapterError(missing_weights(name, names))
    return folder


def _check_is_whole(name_or_path: str | os.PathLike[str], folder: Path) -> None:
    """Refuse an adapter in the cache that may lack its tokenizer, in place of which the base model's would be read.

    PEFT and transformers download an adapter's configuration and weights only. Without a network, just the list of
    files that `snapshot_download` leaves in the cache shows whether there are others.
    """
    name = os.fspath(name_or_path)
    if folder == Path(name).expanduser() or (folder / TOKENIZER_FILES[0]).is_file():
        return
    try:
        get_cached_repo_tree(name, revision=folder.name)
    except CachedRepoTreeNotFoundError as error:
        raise HubError(
            f"{name}: the cache holds only what PEFT has downloaded, so it is unknown whether the adapter has its own "
            "tokenizer. Load it once with a network connection."
        ) from error


def find_files(
    name_or_path: str | os.PathLike[str], needed: list[str], revision: str | None = None, token: str | None = None
) -> Path:
    """Return a folder, or that of a repository in the cache, to which those of its files that are needed are fetched.

    Args:
        name_or_path: The folder, or the repository's name on the Hub.
        needed: Names of files, no patterns, so that a repository has no say in paths.
        revision: A branch, tag or commit.
        token: Access token for private repositories.

    Raises:
        AdapterError: It is neither a folder nor a name on the Hub.
        HubError: The repository does not exist, is private or cannot be reached.
    """
    if not isinstance(name_or_path, (str, os.PathLike)) or not (name := os.fspath(name_or_path)):
        raise AdapterError(
            f"An adapter must be a folder, or a name on the Hub such as user/adapter; got {name_or_path!r}."
        )
    if revision is not None and not (isinstance(revision, str) and revision):
        raise AdapterError(
            f"A revision must be a branch, a tag or a commit of the adapter's repository; got {revision!r}. Leave it "
            "out for the latest version."
        )
    try:
        path = Path(name).expanduser()
        is_folder = path.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, with characters that paths cannot have, no such home
        is_folder = False
    if is_folder:
        return path
    refuse_missing_folder(name)
    with explain_hub_errors(name), _explain_portals(name):
        return Path(snapshot_download(name, revision=revision, token=token, allow_patterns=needed))


@contextmanager
def _explain_portals(name: str) -> Iterator[None]:
    """Explain an answer that is no JSON, such as the page on which a network wants its users to log in."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise HubError(
            f"{name}: {constants.ENDPOINT} must answer with JSON, but its answer begins with {error.doc[:40]!r}. "
            "A network's login page may stand in between; open it in a browser, or check HF_ENDPOINT."
        ) from error


def _check_kind(folder: Path, config: HoulsbyConfig, task: Task) -> None:
    own = task_of_config(config)
    if own.auto_class != task.auto_class:
        raise AdapterError(
            f"Adapters on one base model must have the same kind of head; {folder} is for {own.pipeline}, the one "
            f"beside it for {task.pipeline}. Load it separately."
        )


def _check_reads_text(folder: Path, config: HoulsbyConfig) -> None:
    task = task_of_config(config)
    if not task.reads_text:
        raise AdapterError(
            f"load combines an adapter with a tokenizer, so it must be for texts; {folder} is for {task.pipeline}. "
            f"Import houlsby_peft and load it with transformers.{task.auto_class}.from_pretrained."
        )


def _check_has_no_adapters(base: PreTrainedModel) -> None:
    if any(isinstance(module, HoulsbyTunerLayer) for module in base.modules()):
        raise AdapterError(
            "A base model that is given must hold no Houlsby adapters, which would be changed; this "
            f"{type(base).__name__} does. Give beside=, what houlsby_peft.load returned for it, or another base model."
        )


def _unused_name(asked: str | None, taken: Mapping[str, object]) -> str:
    """Return the name that is asked for, or an unused one. PEFT would overwrite the adapter that has the name."""
    if asked is not None and asked in taken:
        raise AdapterError(
            f"The name of an adapter must be new to its model; {asked!r} is one of {', '.join(taken)}. Give another "
            "adapter_name, or delete that adapter first."
        )
    names = chain(["default"], (f"default_{number}" for number in count(2)))
    return asked or next(name for name in names if name not in taken)


def _add(folder: Path, config: HoulsbyConfig, name: str, base: PreTrainedModel, model: PeftModel | None) -> PeftModel:
    """Add the adapter to the model that other adapters are on, or to a base model without adapters."""
    try:
        with refuse_other_bases():
            if model is None:
                return PeftModel.from_pretrained(base, str(folder), name, config=config).eval()
            was_training = model.training
            model.load_adapter(str(folder), name)
            return model.train(was_training)
    except AdapterError:
        raise
    except (ValueError, RuntimeError, LookupError, TypeError, OSError) as error:
        raise AdapterError(" ".join(str(error).split()) or type(error).__name__) from error


@contextmanager
def _name_adapter_in_errors(name: str | os.PathLike[str], folder: Path) -> Iterator[None]:
    """Call an adapter from the Hub by its name in error messages, not by its folder in the cache."""
    try:
        yield
    except AdapterError as error:
        message = str(error) if folder == Path(name) else str(error).replace(str(folder), str(name))
        message = message if str(name) in message else f"{name}: {message}"
        raise AdapterError(message + describe_damage(folder)) from error
