"""Loads the base model and the tokenizer that a saved adapter needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..config import HoulsbyConfig
from ..errors import AdapterError, HubError
from ..hub.errors import explain_hub_errors
from ..tasks import task_of_config
from .adapter_files import CONFIG_FILE, TOKENIZER_FILES, shortened
from .predictor import label_arguments
from .process_state import environment, verbosity


# transformers' advice is to lift these rules.
_RULES = {
    "trust_remote_code": "it needs code from its repository, which is never run here",
    "use_safetensors": "it has no safetensors file, and others are never read here; load it yourself, for base_model",
}


def load_base(
    folder: Path,
    config: HoulsbyConfig,
    name: str | None = None,
    token: str | None = None,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """The base model, with an untrained head for the adapter's classes.

    Args:
        folder: of the adapter.
        config: of the adapter, which names the base model, its revision and the classes.
        name: of the base model, on the Hub or a folder; default: the one in `config`.
        token: for private repositories.
        dtype: of the weights; default: as in the files.

    Raises:
        AdapterError: The adapter names no base model or no task, or the base model's files are not usable.
        HubError: The base model's repository does not exist, is private or cannot be reached.
    """
    found = name or _base_name(folder, config)
    auto_class = getattr(transformers, task_of_config(config).auto_class)
    with _loading(f"The base model {found}"), _as_it_is():
        return auto_class.from_pretrained(  # type: ignore[no-any-return]
            found,
            revision=None if name else config.revision,
            token=token,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # of another task's head, which gives way to the adapter's
            **label_arguments(config),
        )


def load_tokenizer(
    folder: Path, config: HoulsbyConfig, base_name: str | None, token: str | None = None
) -> PreTrainedTokenizerBase:
    """The adapter's own tokenizer, or the base model's if it has none: of the recorded revision, if it is the recorded
    base model.

    Raises:
        AdapterError: The files are not usable.
        HubError: The base model's repository does not exist, is private or cannot be reached.
    """
    own = (folder / TOKENIZER_FILES[0]).is_file()
    source = str(folder) if own else base_name or _base_name(folder, config)
    revision = config.revision if source == config.base_model_name_or_path else None
    with _loading(f"The tokenizer of {source}"):
        return AutoTokenizer.from_pretrained(source, revision=revision, token=token, trust_remote_code=False)


def _base_name(folder: Path, config: HoulsbyConfig) -> str:
    """The recorded name. A folder is taken only from an adapter that lies in a folder itself, not from the Hub."""
    name = config.base_model_name_or_path or ""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        downloaded = folder.parent.name == "snapshots"
        if downloaded or not Path(name).is_dir():
            raise AdapterError(
                f"{folder / CONFIG_FILE}: base_model_name_or_path must be a name on the Hub, got {shortened(name)!r}. "
                "Give the base model, or its name or folder, as base_model."
            ) from error
    return name


@contextmanager
def _loading(what: str) -> Iterator[None]:
    try:
        with explain_hub_errors(what):
            yield
    except (HubError, AdapterError):
        raise
    except Exception as error:  # transformers and tokenizers raise whatever a malformed file leads them to
        reason = " ".join(str(error).split()) or type(error).__name__
        for word, rule in _RULES.items():
            reason = rule if word in reason else reason
        raise AdapterError(f"{what} cannot be loaded: {shortened(reason)}") from error


@contextmanager
def _as_it_is() -> Iterator[None]:
    """Without transformers' advice to train a head that the adapter brings along, and without its request to a server,
    which gets the user's token, to convert weights that are pickled."""
    with verbosity(logging.ERROR), environment("DISABLE_SAFETENSORS_CONVERSION", "1"):
        yield
