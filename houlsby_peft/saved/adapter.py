"""`SavedAdapter`: the files of an adapter, from a folder, the Hub or its cache, opened and checked
once.

Others may have written these files. Only JSON and safetensors files are read, which cannot contain
code, and nothing is allocated in the amount that a file asks for before its size is known.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from huggingface_hub import get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    CachedRepoTreeNotFoundError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
)
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load as load_tensors

from ..config import HoulsbyConfig
from ..errors import AdapterError, shortened
from ..heads.tasks import TASK_KINDS, TaskKind, task_kind_of_class
from .downloads import explain_hub_errors, find_repo
from .record import AdapterRecord, SavedState
from .weights import check_values, read_json


# What transformers writes for a tokenizer that needs no other format; `tokenizer.json` alone holds
# the vocabulary.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# The largest vocabularies take some 35 MB.
_MOST_BYTES = 200_000_000
# How many times longer a text may become before it is cut into tokens.
_MOST_GROWTH = 64
# How many special tokens a text and a pair of texts may get.
_MOST_ADDED = 64

SAVED_FILES = (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, *TOKENIZER_FILES)
_AGAIN = "Save or download the adapter again."
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedAdapter:
    """The checked files of an adapter; made by `SavedAdapter.open`.

    Attributes:
        name: What the user gave: the folder, or the name of the repository.
        folder: The folder with the files, which for a repository is in the Hub's cache.
        config: The configuration.
        record: What the file records of the adapter.
        shapes: The shapes of the tensors in the weights file, by name.
        own_tokenizer: Whether the adapter was saved with a tokenizer.
    """

    name: str
    folder: Path
    config: HoulsbyConfig
    record: AdapterRecord
    shapes: Mapping[str, torch.Size]
    own_tokenizer: bool

    @classmethod
    def open(
        cls,
        name_or_path: str | os.PathLike[str],
        revision: str | None = None,
        token: str | None = None,
    ) -> SavedAdapter:
        """Open a saved adapter; the needed files of one on the Hub are downloaded to the cache.

        Args:
            name_or_path: "user/adapter" on the Hub, or a folder, such as that of a recipe's run.
            revision: A branch, tag or commit of the repository. Default: the latest version.
            token: Access token for private repositories. Default: the one that the user has logged
                in with.

        Raises:
            AdapterError: The folder or repository does not contain a loadable Houlsby adapter.
            HubError: The repository does not exist, is private or cannot be reached.
        """
        name = os.fspath(name_or_path)
        folder = find_files(name, SAVED_FILES, revision, token)
        for file_name in SAVED_FILES:
            path = folder / file_name
            # A dangling link, a folder, or a pipe that would keep its reader waiting.
            if os.path.lexists(path) and not path.is_file():
                raise AdapterError(f"{name}: {path.name} must be a file. {_AGAIN}")
        try:
            config, state = _read_config(folder)
        except Exception as error:  # whatever a damaged file leads the libraries to
            reason = str(error)
            if isinstance(error, OSError) and error.strerror:
                reason = f"{error.filename}: {error.strerror}"
            reason = shortened(reason.replace(str(folder), name))
            if name not in reason:
                reason = f"{name}: {reason}"
            raise AdapterError(reason) from error
        _check_tokenizer_files(folder, name)
        has_tokenizer = (folder / TOKENIZER_FILES[0]).is_file()
        saved = cls(name, folder, config, state.record, state.shapes or {}, has_tokenizer)
        if saved.may_not_name(config.beneath or ""):
            raise AdapterError(
                f"{name}: beneath must be a name on the Hub; got "
                f"{shortened(str(config.beneath))!r}."
            )
        saved._warn_of_missing_tokenizer()
        return saved

    def _warn_of_missing_tokenizer(self) -> None:
        """Warn that the tokenizer of an adapter in the Hub's cache may not have been downloaded."""
        if self.own_tokenizer or not self.commit or self.folder == Path(self.name):
            return
        try:
            get_cached_repo_tree(self.name, revision=self.commit)
        except CachedRepoTreeNotFoundError:
            _log.warning(
                "The cache holds only those files of %s that PEFT has downloaded. If the adapter "
                "has its own tokenizer, load it once with a network connection; the base model's "
                "tokenizer is used.",
                self.name,
            )

    def may_not_name(self, name: str) -> bool:
        """Return whether a name in the configuration is a folder of this machine, of which an
        adapter from the Hub knows nothing.
        """
        return self.commit is not None and (Path(name).is_absolute() or ".." in name)

    @property
    def weights_file(self) -> Path:
        """The file of the weights."""
        return self.folder / SAFETENSORS_WEIGHTS_NAME

    @property
    def commit(self) -> str | None:
        """The commit that the files were downloaded from; None for a folder of the user's own."""
        repo = find_repo(self.folder)
        return repo[1] if repo else None

    @property
    def task(self) -> TaskKind:
        """The task, from the task type or from the class of the model that the adapter was trained
        in.
        """
        task_type = self.config.task_type
        for kind in TASK_KINDS:
            if task_type and kind.task_type == task_type:
                return kind
        class_name = str((self.config.auto_mapping or {}).get("base_model_class"))
        kind_of_class = task_kind_of_class(class_name)
        if kind_of_class is None:
            raise AdapterError(
                "An adapter must name its task, by a task type of PEFT or by a class of "
                f"transformers such as BertForSequenceClassification; got {task_type!r} and "
                f"{class_name!r}. Load the base model yourself and give it as base_model."
            )
        return kind_of_class

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors by name, read from the file each time and checked.

        They are in memory of their own, and stay as they are when the file changes.
        """
        weights = {}
        for key, tensor in load_tensors(self.weights_file.read_bytes()).items():
            # Beside saved embeddings, PEFT saves trained tokens again, under the adapter's name.
            if ".trainable_tokens_delta." not in key:
                check_values(self.name, key, tensor)
                weights[key] = tensor
        return weights


def adapter_of_run(path: Path) -> Path:
    """Return the adapter of a recipe's run, which has checkpoints beside it; any other path as it
    is.
    """
    adapter = path / "adapter"
    if (path / "results.json").is_file() and (adapter / CONFIG_NAME).is_file():
        return adapter
    return path


def find_files(
    name_or_path: str | os.PathLike[str],
    needed: Sequence[str],
    revision: str | None = None,
    token: str | None = None,
) -> Path:
    """Return a folder, or that of a repository in the cache, to which those of its files that are
    needed are fetched.

    `needed` are names of files, no patterns, so that a repository has no say in paths. Raises
    HubError.
    """
    name = os.fspath(name_or_path)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return adapter_of_run(folder)
    download = partial(
        snapshot_download, name, revision=revision, token=token, allow_patterns=list(needed)
    )
    kind = "a file, no folder" if folder.is_file() else "no folder"
    with explain_hub_errors(f"{shortened(name)} is {kind}, and on the Hub"):
        try:
            return Path(download())
        except HTTPError as error:
            # The Hub's client takes the cache if it cannot connect, but not if the connection
            # breaks off.
            if isinstance(error, HfHubHTTPError):
                raise
            try:
                return Path(download(local_files_only=True))
            except LocalEntryNotFoundError:
                raise error from None


def _read_config(folder: Path) -> tuple[HoulsbyConfig, SavedState]:
    """Read the configuration in a folder, and what else the folder's files say of the adapter."""
    path, weights = folder / CONFIG_NAME, folder / SAFETENSORS_WEIGHTS_NAME
    if not path.is_file():
        remedy = "Check the name."
        # PEFT saves an adapter that is not called "default" in a folder of its name. A recipe has
        # a run of each task.
        inner = [*folder.glob(f"*/{CONFIG_NAME}"), *folder.glob(f"*/adapter/{CONFIG_NAME}")]
        if (folder / "config.json").exists() or (folder / "model/config.json").exists():
            remedy = "It looks like a whole model: load it with transformers."
        elif inner:
            remedy = f"Give the folder of an adapter in it, such as {min(inner).parent}."
        raise AdapterError(
            f"{folder} holds no {CONFIG_NAME} and therefore no loadable adapter. {remedy}"
        )
    fields = read_json(path)
    kind = fields.get("peft_type")
    if kind != "HOULSBY":
        remedy = "Load adapters of other methods with peft.PeftModel.from_pretrained."
        if kind is None:
            remedy = "Convert an adapter of the `adapters` library with `houlsby-peft convert`."
        raise AdapterError(f"{path} must have peft_type 'HOULSBY'; got {kind!r}. {remedy}")
    # PEFT's own fields, which the configuration's rules leave to PEFT.
    for name, form in (("auto_mapping", dict), ("base_model_name_or_path", str)):
        if not isinstance(fields.get(name), (form, NoneType)):
            raise AdapterError(
                f"{path}: {name} has an unknown form: {shortened(str(fields[name]))}. {_AGAIN}"
            )
    config = HoulsbyConfig.from_pretrained(str(folder))
    state: SavedState = config.saved  # type: ignore[assignment]
    # Larger bottlenecks than the file would be allocated before they are compared with it.
    size, largest = weights.stat().st_size, max([config.r, *config.rank_pattern.values()])
    if largest > size:
        raise AdapterError(
            f"{path} asks for bottlenecks of size {shortened(str(largest))}, but all of "
            f"{weights.name} has {size:,} bytes. {_AGAIN}"
        )
    return config, state


def _check_tokenizer_files(folder: Path, name: str) -> None:
    """Refuse the files of a tokenizer that would fill the memory, or leave no room for a text.

    A few rules that replace each letter by many make terabytes of one text. Files that are not
    valid JSON are left to the library that reads them.

    Args:
        folder: The folder of the files.
        name: The adapter's name in the message.
    """
    for file_name in TOKENIZER_FILES:
        path = folder / file_name
        if path.is_file() and path.stat().st_size > _MOST_BYTES:
            raise AdapterError(
                f"{name}: {file_name} must have at most {_MOST_BYTES:,} bytes; it has "
                f"{path.stat().st_size:,}. Save the tokenizer again."
            )
    length = _read_object(folder / TOKENIZER_FILES[1]).get("model_max_length", 1)
    if not isinstance(length, (int, float)) or not length >= 1:
        raise AdapterError(
            f"{name}: model_max_length in {TOKENIZER_FILES[1]} must be a number of at least 1; got "
            f"{shortened(repr(length))}. Save the tokenizer again."
        )
    path = folder / TOKENIZER_FILES[0]
    content = _read_object(path)
    try:
        growth = _growth(content.get("normalizer")) * _growth(content.get("pre_tokenizer"))
        added = _count_added(content.get("post_processor"))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return
    if added > _MOST_ADDED:
        raise AdapterError(
            f"{name}: {path.name} may add at most {_MOST_ADDED} special tokens to a text; it adds "
            f"{added:,}. Use the base model's tokenizer."
        )
    if growth > _MOST_GROWTH:
        raise AdapterError(
            f"{name}: the rules of {path.name} may make a text at most {_MOST_GROWTH} times "
            f"longer; they make it up to {growth:.3g} times longer. Use the base model's tokenizer."
        )


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty without one."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _count_added(rule: Any) -> int:
    """Return how many special tokens the rules of a tokenizer add to a text or a pair."""
    if not rule:
        return 0
    count = sum(map(_count_added, rule.get("processors", ())))
    for template in ("single", "pair"):
        for item in rule.get(template, ()):
            if "SpecialToken" in item:
                count += len(rule["special_tokens"][item["SpecialToken"]["id"]]["ids"])
    return count


def _growth(rule: Any) -> float:
    """Return how many times longer the rules of a tokenizer may make a text."""
    if not rule:
        return 1.0
    growth = 1.0
    for part in (*rule.get("normalizers", ()), *rule.get("pretokenizers", ())):
        growth *= _growth(part)
    if rule.get("type") == "Replace":
        # A regular expression may match a single letter, or the empty text before each.
        replaced = len(rule["pattern"].get("String", ""))
        growth *= max(1.0, (len(rule["content"]) + (not replaced)) / max(1, replaced))
    return growth
