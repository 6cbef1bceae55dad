"""Load the base model and the tokenizer that a saved adapter needs."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from peft import PeftModel
from peft.utils import CONFIG_NAME
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.downloads import describe_damage_in_cache, find_packaged
from ..checkpoints.untrusted import TOKENIZER_FILES, shortened
from ..config import HoulsbyConfig
from ..errors import AdapterError, HubError, explain_hub_errors
from ..heads.tasks import task_of_config
from .process_state import set_environment, set_verbosity


# The largest vocabularies have a million tokens. Saving or copying a tokenizer takes time and memory for each number
# below its largest one.
_MOST_TOKENS = 10_000_000
# transformers' own messages advise to lift these rules.
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
    """Load the base model, with an untrained head for the adapter's classes.

    Args:
        folder: The adapter's folder.
        config: The adapter's configuration, which names the base model, its revision and the classes.
        name: Name of the base model on the Hub, or its folder. Default: the recorded one.
        token: Access token for private repositories.
        dtype: Dtype of the weights. Default: as in the files.

    Raises:
        AdapterError: The adapter names no base model or no task, or the base model's files are not usable.
        HubError: The base model's repository does not exist, is private or cannot be reached.
    """
    found, revision = name or _recorded_base(folder, config), None if name else config.revision
    task = task_of_config(config)
    auto_class = getattr(transformers, task.auto_class)
    # Answers have a start and an end, whatever the base model's configuration says.
    labels = {"num_labels": 2} if task.pipeline == "question-answering" else label_arguments(config)
    # Quietly, because transformers advises to train a head that the adapter brings along. Without its request to a
    # server to convert pickled weights, which would get the user's token.
    with (
        explain_errors("base model", found, revision),
        set_verbosity(logging.ERROR),
        set_environment("DISABLE_SAFETENSORS_CONVERSION", "1"),
    ):
        return auto_class.from_pretrained(  # type: ignore[no-any-return]
            find_packaged(found),
            revision=revision,
            token=token,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # of another task's head, which the adapter's replaces
            **labels,
        )


def load_tokenizer(
    folder: Path,
    config: HoulsbyConfig,
    base_name: str | None,
    token: str | None = None,
    known: MutableMapping[object, PreTrainedTokenizerBase] | None = None,
) -> PreTrainedTokenizerBase:
    """Load the adapter's own tokenizer or, if it has none, the base model's, at the recorded revision.

    Args:
        folder: The adapter's folder.
        config: The adapter's configuration.
        base_name: Name or folder of the base model. Default: the recorded one.
        token: Access token for private repositories.
        known: Tokenizers that were loaded before. One of equal files is returned instead of loading another, and a
            new one is added. Default: none.

    Raises:
        AdapterError: The files are not usable.
        HubError: The base model's repository does not exist, is private or cannot be reached.
    """
    own = (folder / TOKENIZER_FILES[0]).is_file()
    source = str(folder) if own else base_name or _recorded_base(folder, config)
    revision = config.revision if source == config.base_model_name_or_path else None
    known = {} if known is None else known
    key = _tokenizer_key(source, revision)
    if key in known:
        return known[key]
    with explain_errors("tokenizer of", source, revision):
        tokenizer = AutoTokenizer.from_pretrained(
            find_packaged(source), revision=revision, token=token, trust_remote_code=False
        )
        longest = tokenizer.model_max_length
        if isinstance(longest, bool) or not isinstance(longest, (int, float)) or not longest >= 1:
            raise AdapterError(
                f"The tokenizer of {source} must have a number of at least 1 as model_max_length in "
                f"{TOKENIZER_FILES[1]}; got {shortened(repr(longest))}. Correct it there."
            )
        backend = getattr(tokenizer, "backend_tokenizer", None)  # the one that pads its vocabulary when it is saved
        if backend is not None and (largest := max(backend.get_vocab().values(), default=0)) >= _MOST_TOKENS:
            raise AdapterError(
                f"The numbers of tokens must be below {_MOST_TOKENS:,}; {TOKENIZER_FILES[0]} of {source} has "
                f"{largest:,}. Use the tokenizer that the adapter was trained with."
            )
        with suppress(ValueError, TypeError):  # of tokenizers that need more than texts, such as boxes on a page
            tokenizer("a", "b")  # some malformed files are noticed only now
    return known.setdefault(key, tokenizer)


def _tokenizer_key(source: str, revision: str | None) -> object:
    """Return what tokenizers of equal files have in common, wherever the files are."""
    files = [Path(source) / name for name in TOKENIZER_FILES]
    try:
        if not files[0].is_file():
            return source, revision
        contents = [file.read_bytes() if file.is_file() else None for file in files]
    except (OSError, ValueError):  # not a path
        return source, revision
    return tuple(None if content is None else hashlib.sha256(content).digest() for content in contents)


def count_positions(model: nn.Module) -> int | None:
    """Return the number of tokens that a model, with adapters or without, reads at once; None if there is no limit."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    longest = getattr(base.config, "max_position_embeddings", None)
    positions = getattr(getattr(base.base_model, "embeddings", None), "position_embeddings", None)
    # As RoBERTa's, whose positions begin behind that of padding.
    padding = getattr(positions, "padding_idx", None)
    return longest - padding - 1 if longest and padding is not None else longest


def count_tokens(base: PreTrainedModel) -> int | None:
    """Return the number of tokens that a base model knows; None if it has no table of them, as Canine."""
    try:
        embeddings = base.get_input_embeddings()
    except NotImplementedError:
        return None
    return len(embeddings.weight) if isinstance(embeddings, nn.Embedding) else None


def label_arguments(config: HoulsbyConfig) -> dict[str, Any]:
    """Return an adapter's labels as transformers' configurations hold them; empty if it has none."""
    if config.labels is None:
        return {}
    label2id = {name: number for number, name in config.labels.items()}
    return {"id2label": config.labels, "label2id": label2id, "problem_type": config.kind_of_problem}


def _recorded_base(folder: Path, config: HoulsbyConfig) -> str:
    """Return the recorded name. A folder is accepted only from an adapter that is in a folder, not from the Hub."""
    name = config.base_model_name_or_path or ""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        is_downloaded = folder.parent.name == "snapshots"
        try:
            is_folder = Path(name).is_dir()
        except (OSError, ValueError):  # too long, or with characters that paths cannot have
            is_folder = False
        if is_downloaded or not is_folder:
            raise AdapterError(
                f"{folder / CONFIG_NAME}: base_model_name_or_path must be a name on the Hub, got {shortened(name)!r}. "
                "Give the base model, or its name or folder, as base_model."
            ) from error
    return name


@contextmanager
def explain_errors(kind: str, source: str, revision: str | None) -> Iterator[None]:
    """Explain why a base model or a tokenizer cannot be loaded."""
    what = f"The {kind} {source}"
    try:
        with explain_hub_errors(what):
            yield
    except HubError as error:
        remedy = f" Correct base_model_name_or_path and revision in {CONFIG_NAME}, or give base_model."
        raise HubError(f"{error}{remedy}") from error
    except AdapterError:
        raise
    except BaseException as error:  # transformers and tokenizers raise whatever a malformed file leads them to
        if not is_from_libraries(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        if rule := next((rule for word, rule in _RULES.items() if word in reason), None):
            raise AdapterError(f"{what} cannot be loaded: {rule}.") from error
        damage = describe_damage_in_cache(source, "config.json", revision=revision)
        raise AdapterError(f"{what} cannot be loaded: {shortened(reason)}.{damage or ' Save it again.'}") from error


def is_from_libraries(error: BaseException) -> bool:
    """Return whether an error may come from code below: a panic of tokenizers, for example, is not an `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
