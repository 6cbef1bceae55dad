"""Load the base model and the tokenizer that a saved adapter needs."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.downloads import explain_hub_errors, find_packaged
from ..checkpoints.saved import TOKENIZER_FILES, SavedAdapter
from ..config import HoulsbyConfig
from ..errors import AdapterError, HubError, shortened
from ..heads.tasks import TaskKind
from ..weights import FILE_PREFIX


# The largest vocabularies have a million tokens. Saving or copying a tokenizer takes time and
# memory for each number below its largest one.
_MOST_TOKENS = 10_000_000


# transformers would ask a server to convert pickled weights to safetensors, which would get the
# user's token.
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
_QUIET = threading.RLock()


@contextmanager
def set_verbosity(level: int) -> Iterator[None]:
    """Let transformers log from this level on, within the context, which one thread at a time
    enters.
    """
    with _QUIET:
        before = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity(level)
        try:
            yield
        finally:
            transformers.logging.set_verbosity(before)


def load_base(
    saved: SavedAdapter,
    task: TaskKind,
    name: str | None = None,
    token: str | None = None,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Load the base model, with an untrained head for the adapter's classes and the adapter's
    number of tokens.
    """
    found, revision = name or _recorded_base(saved), None if name else saved.config.revision
    # Answers have a start and an end, whatever the base model's configuration says.
    labels = (
        {"num_labels": 2}
        if task.pipeline == "question-answering"
        else label_arguments(saved.config)
    )
    # Quietly, because transformers advises to train a head that the adapter brings along.
    with explain_hub_errors(f"The base model {found}"), set_verbosity(logging.ERROR):
        base: PreTrainedModel = getattr(transformers, task.auto_class).from_pretrained(
            find_packaged(found),
            revision=revision,
            token=token,
            dtype=dtype,
            trust_remote_code=False,
            weights_only=True,
            ignore_mismatched_sizes=True,  # of another task's head, which the adapter's replaces
            **labels,
        )
    tokens = saved_tokens(saved, base)
    if tokens is not None and tokens != count_tokens(base):
        base.resize_token_embeddings(tokens, mean_resizing=False)
    return base


def load_tokenizer(
    saved: SavedAdapter,
    base_name: str | None,
    token: str | None = None,
    known: MutableMapping[object, PreTrainedTokenizerBase] | None = None,
) -> PreTrainedTokenizerBase:
    """Load the adapter's own tokenizer or, if it has none, the base model's, at the recorded
    revision.

    If one of equal files is among those that are known, it is returned instead; otherwise the new
    one is added.
    """
    source = str(saved.folder) if saved.own_tokenizer else base_name or _recorded_base(saved)
    revision = saved.config.revision if source == saved.config.base_model_name_or_path else None
    known = {} if known is None else known
    # Tokenizers of equal files are the same, wherever the files are.
    files = [path for path in (Path(source, name) for name in TOKENIZER_FILES) if path.is_file()]
    key = tuple((path.name, hashlib.sha256(path.read_bytes()).digest()) for path in files) or (
        source,
        revision,
    )
    if key in known:
        return known[key]
    try:
        with explain_hub_errors(f"The tokenizer of {source}"):
            tokenizer = AutoTokenizer.from_pretrained(
                find_packaged(source), revision=revision, token=token, trust_remote_code=False
            )
        backend = getattr(
            tokenizer, "backend_tokenizer", None
        )  # the one that pads its vocabulary when it is saved
        if (
            backend is not None
            and (largest := max(backend.get_vocab().values(), default=0)) >= _MOST_TOKENS
        ):
            raise AdapterError(
                f"The numbers of tokens must be below {_MOST_TOKENS:,}; {source} has {largest:,}."
            )
        with suppress(
            ValueError, TypeError
        ):  # of tokenizers that need more than texts, such as boxes on a page
            tokenizer("a", "b")  # some malformed files are noticed only now
    except (
        BaseException
    ) as error:  # transformers and tokenizers raise whatever a malformed file leads them to
        # A panic of tokenizers is not an `Exception`.
        is_of_file = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, HubError) or not is_of_file:
            raise
        raise AdapterError(
            f"The tokenizer of {source} cannot be loaded: {shortened(str(error))}"
        ) from error
    return known.setdefault(key, tokenizer)


def saved_tokens(saved: SavedAdapter, base: PreTrainedModel) -> int | None:
    """Return the number of tokens of the embeddings that PEFT has saved, as of a resized
    vocabulary; None without.
    """
    embeddings = _embeddings(base)
    name = next((name for name, module in base.named_modules() if module is embeddings), "")
    shape = saved.shapes.get(f"{FILE_PREFIX}{name}.weight")
    return shape[0] if shape else None


def count_positions(model: nn.Module) -> int | None:
    """Return the number of tokens that a model, with adapters or without, reads at once; None if
    there is no limit.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    longest = getattr(base.config, "max_position_embeddings", None)
    positions = getattr(getattr(base.base_model, "embeddings", None), "position_embeddings", None)
    # As RoBERTa's, whose positions begin behind that of padding.
    padding = getattr(positions, "padding_idx", None)
    return longest - padding - 1 if longest and padding is not None else longest


def count_tokens(base: PreTrainedModel) -> int | None:
    """Return the number of tokens that a base model knows; None if it has no table of them, as
    Canine.
    """
    embeddings = _embeddings(base)
    return len(embeddings.weight) if isinstance(embeddings, nn.Embedding) else None


def _embeddings(base: PreTrainedModel) -> nn.Module | None:
    with suppress(NotImplementedError):
        return base.get_input_embeddings()
    return None


def label_arguments(config: HoulsbyConfig) -> dict[str, Any]:
    """Return an adapter's labels as transformers' configurations hold them; empty if it has none."""
    if config.labels is None:
        return {}
    label2id = {name: number for number, name in config.labels.items()}
    return {"id2label": config.labels, "label2id": label2id, "problem_type": config.kind_of_problem}


def _recorded_base(saved: SavedAdapter) -> str:
    """Return the recorded name. An adapter from the Hub may not name any folder of this machine."""
    name = saved.config.base_model_name_or_path or ""
    if not name or (saved.commit and (Path(name).is_absolute() or ".." in name)):
        raise AdapterError(
            f"{saved.name}: base_model_name_or_path must be a name on the Hub, got {shortened(name)!r}. Give the base "
            "model, or its name or folder, as base_model."
        )
    return name
