"""Load the base model and the tokenizer that a saved adapter needs."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import AdapterError, HubError, shortened
from ..heads.tasks import TaskKind
from ..method.modules import base_model_of
from ..saved.adapter import TOKENIZER_FILES, SavedAdapter
from ..saved.downloads import explain_hub_errors, find_packaged
from ..saved.naming import FILE_PREFIX
from ..saved.record import AdapterRecord
from ..saved.weights import first_of


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
        level_before = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity(level)
        try:
            yield
        finally:
            transformers.logging.set_verbosity(level_before)


def load_whole(auto_class: Any, name: str, **options: Any) -> tuple[PreTrainedModel, set[str]]:
    """Load a whole model from a folder or the Hub, without running code and reading pickles.

    A head of another size is made anew. transformers advises to train it; here an adapter brings
    it, or a recipe trains it.

    Returns:
        The model, and the names of the weights that its files lack, or have in another shape.

    Raises:
        AdapterError: The weights are in a pickled file.
        HubError: The repository does not exist, is private or cannot be reached.
    """
    with explain_hub_errors(f"The base model {name}"), set_verbosity(logging.ERROR):
        try:
            model, report = auto_class.from_pretrained(
                find_packaged(name),
                trust_remote_code=False,
                weights_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
        except UnpicklingError as error:  # which advises to read it with weights_only=False
            raise AdapterError(
                f"The weights of {name} are in a pickled file that could run any code when it is "
                "read. Give a base model in safetensors files. A file that you trust can be "
                "converted with safetensors.torch.save_file, or with its model's save_pretrained."
            ) from error
    if model.config.model_type == "deberta":  # whose biases transformers leaves in float32
        model.to(model.dtype)
    lacking = set(report["missing_keys"])
    for key, *_ in report["mismatched_keys"]:
        lacking.add(key)
    return model, lacking


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
    revision = None
    if name is None:
        name, revision = _recorded_base(saved), saved.config.revision
    labels = label_arguments(saved.record)
    if task.pipeline == "question-answering":
        # Answers have a start and an end, whatever the base model's configuration says.
        labels = {"num_labels": 2}
    auto_class = getattr(transformers, task.auto_class)
    base, lacking = load_whole(
        auto_class, name, revision=revision, token=token, dtype=dtype, **labels
    )
    _check_missing_weights(saved, task, base, lacking)
    tokens = saved_tokens(saved, base)
    if tokens is not None and tokens != count_tokens(base):
        base.resize_token_embeddings(tokens, mean_resizing=False)
    return base


def _check_missing_weights(
    saved: SavedAdapter, task: TaskKind, base: PreTrainedModel, lacking: Collection[str]
) -> None:
    """Refuse a base model some of whose weights are random: its files lack them, or have another
    shape, and the adapter does not bring them.

    transformers would create them anew each time, so that each load would predict something else.
    """
    prefix = f"{base.base_model_prefix}."
    brought = {key.removeprefix(FILE_PREFIX).removeprefix(prefix) for key in saved.shapes}
    heads = tuple(f"{head}.".removeprefix(prefix) for head in saved.record.heads)
    missing: list[str] = []
    unused: list[str] = []
    for key in sorted(lacking):
        name = key.removeprefix(prefix)
        if name in brought or name.startswith(heads):
            continue
        if _is_unused(task, name, is_of_head=name == key):
            unused.append(key)
        else:
            missing.append(key)
    if missing:
        raise AdapterError(
            f"The base model {base.name_or_path} lacks {first_of(missing)}, which {saved.name} "
            "needs and does not bring along: they would be random. Give the whole base model, or "
            "its name or folder, as base_model."
        )
    if unused:
        transformers.logging.get_logger(__name__).warning_once(
            f"The base model {base.name_or_path} lacks {first_of(unused)}, which are random. The "
            "adapter does not need them."
        )


def _is_unused(task: TaskKind, name: str, is_of_head: bool) -> bool:
    """Return whether a task does without a weight of the model, by its name inside the encoder."""
    if task.pipeline == "feature-extraction":  # the hidden states of the tokens are used
        return name.startswith("pooler.") or ".pooler." in name
    # The head for masked words is kept apart from an adapter, which others use without it.
    return task.pipeline == "fill-mask" and is_of_head


def load_tokenizer(
    saved: SavedAdapter,
    task: TaskKind,
    base_name: str | None,
    token: str | None = None,
    tokenizers: MutableMapping[object, PreTrainedTokenizerBase] | None = None,
) -> PreTrainedTokenizerBase:
    """Load the adapter's own tokenizer or, if it has none, the base model's, at the recorded
    revision. It pads as the task needs it.

    If a tokenizer of equal files is among `tokenizers`, it is returned; otherwise the new one is
    added to them.
    """
    source = str(saved.folder) if saved.own_tokenizer else base_name or _recorded_base(saved)
    revision = saved.config.revision if source == saved.config.base_model_name_or_path else None
    if tokenizers is None:
        tokenizers = {}
    key = _contents(source) or (source, revision)
    tokenizer = tokenizers.get(key)
    if tokenizer is None:
        tokenizer = tokenizers[key] = _read_tokenizer(source, revision, token)
    if not task.auto_class.endswith("LM"):
        # Whoever generates text pads on the left, where GPT-2 would count the padding as positions,
        # and an encoder take it for the first token. Tokenizers of models that need it, such as
        # XLNet's, do so by themselves.
        tokenizer.padding_side = type(tokenizer).padding_side
    return tokenizer


def _contents(folder: str) -> tuple[tuple[str, bytes], ...]:
    """Return the name and the hash of each file of a tokenizer, wherever its folder is."""
    contents = []
    for name in TOKENIZER_FILES:
        path = Path(folder, name)
        if path.is_file():
            contents.append((name, hashlib.sha256(path.read_bytes()).digest()))
    return tuple(contents)


def _read_tokenizer(
    source: str, revision: str | None, token: str | None
) -> PreTrainedTokenizerBase:
    try:
        with explain_hub_errors(f"The tokenizer of {source}"):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                find_packaged(source), revision=revision, token=token, trust_remote_code=False
            )
        _check_numbers_of_tokens(tokenizer, source)
        # Some malformed files are noticed only now. Some tokenizers need more than texts, such as
        # boxes on a page.
        with suppress(ValueError, TypeError):
            tokenizer("a", "b")
    except (HubError, AdapterError):
        raise
    except BaseException as error:
        # transformers and tokenizers raise whatever a malformed file leads them to. A panic of
        # tokenizers is not an `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise AdapterError(
            f"The tokenizer of {source} cannot be loaded: {shortened(str(error))}"
        ) from error
    return tokenizer


def _check_numbers_of_tokens(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    # A fast tokenizer pads its vocabulary when it is saved or copied.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    largest = max(backend.get_vocab().values(), default=0)
    if largest >= _MOST_TOKENS:
        raise AdapterError(
            f"The tokenizer of {source} cannot be loaded: the numbers of tokens must be below "
            f"{_MOST_TOKENS:,}; it has {largest:,}."
        )


def check_tokens(saved: SavedAdapter, base: PreTrainedModel, is_shared: bool) -> None:
    """Refuse an adapter whose tokens the base model does not have.

    If the base model is shared with other adapters, it keeps its embeddings.
    """
    tokens = saved_tokens(saved, base)
    if tokens is not None and (is_shared or tokens != count_tokens(base)):
        raise AdapterError(
            f"{saved.name} was saved with embeddings of {tokens:,} tokens, which replace those of "
            "the base model. Load it on a base model of its own, after "
            f"resize_token_embeddings({tokens})."
        )
    trained = saved.config.trainable_token_indices
    present = count_tokens(base)
    if isinstance(trained, list) and trained and present is not None and max(trained) >= present:
        raise AdapterError(
            f"{saved.name} trains the token {max(trained):,}; the base model has {present:,} "
            "tokens. Load it on a base model of its own, after resize_token_embeddings."
        )


def saved_tokens(saved: SavedAdapter, base: PreTrainedModel) -> int | None:
    """Return the number of tokens of the embeddings that PEFT has saved, as of a resized
    vocabulary; None without.
    """
    embeddings = _embeddings(base)
    for name, module in base.named_modules():
        if module is embeddings:
            # Where tokens are trained, PEFT saves the embeddings inside its wrapper.
            for place in (name, f"{name}.token_adapter.base_layer"):
                shape = saved.shapes.get(f"{FILE_PREFIX}{place}.weight")
                if shape:
                    return shape[0]
    return None


def count_positions(model: nn.Module) -> int | None:
    """Return the number of tokens that a model, with adapters or without, reads at once; None if
    there is no limit.
    """
    base: Any = base_model_of(model)
    longest: int | None = getattr(base.config, "max_position_embeddings", None)
    embeddings = getattr(base.base_model, "embeddings", None)
    positions = getattr(embeddings, "position_embeddings", None)
    padding: int | None = getattr(positions, "padding_idx", None)
    if longest and padding is not None:
        # As RoBERTa's, whose positions begin behind that of padding.
        return longest - padding - 1
    return longest


def count_tokens(base: PreTrainedModel) -> int | None:
    """Return the number of tokens that a base model knows; None if it has no table of them, as
    Canine.
    """
    embeddings = _embeddings(base)
    if isinstance(embeddings, nn.Embedding):
        return len(embeddings.weight)
    return None


def uncompiled(model: nn.Module) -> PreTrainedModel:
    """Return the model that `torch.compile` has wrapped; any other as it is."""
    return cast(PreTrainedModel, getattr(model, "_orig_mod", model))


def _embeddings(base: PreTrainedModel) -> nn.Module | None:
    with suppress(NotImplementedError):
        return base.get_input_embeddings()
    return None


def label_arguments(record: AdapterRecord) -> dict[str, Any]:
    """Return an adapter's labels in the form of transformers' configurations; empty without."""
    if record.id2label is None:
        return {}
    label2id = {name: number for number, name in record.id2label.items()}
    return {
        "id2label": record.id2label,
        "label2id": label2id,
        "problem_type": record.problem_type,
    }


def _recorded_base(saved: SavedAdapter) -> str:
    """Return the recorded name."""
    name = saved.config.base_model_name_or_path or ""
    if not name or saved.may_not_name(name):
        raise AdapterError(
            f"{saved.name}: base_model_name_or_path must be a name on the Hub, got "
            f"{shortened(name)!r}. Give the base model, or its name or folder, as base_model."
        )
    return name
