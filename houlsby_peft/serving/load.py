"""`load`: from the name of an adapter to a predictor."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from itertools import chain, count
from typing import Literal

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.fingerprint import refuse_other_bases
from ..checkpoints.saved import SavedAdapter
from ..errors import AdapterError, shortened
from ..heads.tasks import task_kind_of_class
from ..layer import HoulsbyTunerLayer
from .base_model import count_tokens, load_base, load_tokenizer, saved_tokens
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
    other_base: Literal["refuse", "warn"] = "refuse",
) -> Predictor:
    """Load a trained adapter with its base model, labels and tokenizer.

    Of the adapter, only JSON and safetensors files are read, and code from a repository is never
    run. Threads may load adapters onto one base model, and predict with others on it, at the same
    time.

    Args:
        name_or_path: "user/adapter" on the Hub, or a folder.
        revision: A branch, tag or commit of the adapter's repository. The base model's is recorded in the adapter.
        base_model: The base model, or its name or folder, in place of the one that the adapter names.
        beside: An adapter that was loaded before, whose base model this one shares.
        adapter_name: A new name in the model. Default: "default", or the first unused name of
            "default_2", "default_3" and so on.
        token: Access token for private repositories. Default: the one that `hf auth login` or
            HF_TOKEN has set.
        device: Where to put the model. Default: where it is; the CPU for a new one.
        dtype: Dtype of the base model. Default: as in its files.
        other_base: What to do if many weights of the base model differ from those that the adapter
            was trained on: "refuse" the adapter, or "warn" and load it.

    Raises:
        AdapterError: The folder or repository does not contain a loadable Houlsby adapter, the
            adapter was trained on another base model, or the given base model already holds
            adapters, or one of this name.
        HubError: A repository does not exist, is private or cannot be reached.
    """
    saved = SavedAdapter.open(name_or_path, revision, token)
    return load_saved(
        saved,
        base_model,
        beside,
        adapter_name,
        token=token,
        device=device,
        dtype=dtype,
        other_base=other_base,
    )


def load_saved(
    saved: SavedAdapter,
    base_model: PreTrainedModel | str | None = None,
    beside: Predictor | None = None,
    adapter_name: str | None = None,
    tokenizers: MutableMapping[object, PreTrainedTokenizerBase] | None = None,
    *,
    token: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    other_base: Literal["refuse", "warn"] = "refuse",
) -> Predictor:
    """Load an opened adapter as `load` does. Predictors that never run at the same time may share
    tokenizers.
    """
    task = saved.task
    if beside is not None:
        if task.auto_class != beside.task.auto_class:
            raise AdapterError(
                f"Adapters on one base model must have the same kind of head; {saved.name} is for {task.pipeline}, "
                f"the one beside it for {beside.task.pipeline}. Load it separately."
            )
        base, task = beside.base_model, beside.task
    elif isinstance(base_model, PreTrainedModel):
        base, task = base_model, task_kind_of_class(type(base_model).__name__) or task
        if any(isinstance(module, HoulsbyTunerLayer) for module in base.modules()):
            raise AdapterError(
                "A base model that is given must hold no Houlsby adapters, which would be changed. Give beside=, what "
                "houlsby_peft.load returned for it, or another base model."
            )
    else:
        base = load_base(saved, task, base_model, token, dtype)
    tokens = saved_tokens(saved, base)
    if tokens is not None and (beside is not None or tokens != count_tokens(base)):
        raise AdapterError(
            f"{saved.name} was saved with embeddings of {tokens:,} tokens, which replace those of the base model. "
            f"Load it on a base model of its own, after resize_token_embeddings({tokens})."
        )
    # Before the adapter, which would stay in a model that is in use if the tokenizer failed.
    tokenizer = load_tokenizer(saved, base.name_or_path, token, tokenizers)
    settings = base.config.get_text_config()
    if (
        getattr(settings, "pad_token_id", None) is None
    ):  # as of decoders, which classify at the last other token
        settings.pad_token_id = tokenizer.pad_token_id
    if not task.auto_class.endswith("LM"):
        # Whoever generates text pads on the left, where GPT-2 would count the padding as positions,
        # and an encoder take it for the first token. Tokenizers of models that need it, such as
        # XLNet's, do so by themselves.
        tokenizer.padding_side = type(tokenizer).padding_side
    with _ADDING, refuse_other_bases() if other_base == "refuse" else nullcontext():
        taken = {} if beside is None else beside.model.peft_config
        names = (
            [adapter_name]
            if adapter_name
            else chain(["default"], (f"default_{n}" for n in count(2)))
        )
        name = next((name for name in names if name not in taken), None)
        if name is None:  # PEFT would overwrite the adapter
            raise AdapterError(
                f"The model has an adapter {adapter_name!r} already. Give another adapter_name."
            )
        folder = str(saved.folder)
        try:
            if beside is None:
                # The random weights that PEFT makes first would take half of the time; on the meta
                # device they do not.
                model = PeftModel.from_pretrained(
                    base, folder, name, config=saved.config, low_cpu_mem_usage=True
                )
                model.eval()
            else:
                model, was_training = beside.model, beside.model.training
                model.load_adapter(folder, name, low_cpu_mem_usage=True)
                model.train(was_training)
        except ValueError as error:
            reason = str(error) if isinstance(error, AdapterError) else shortened(str(error))
            raise AdapterError(f"{saved.name}: {reason}") from error
        # safetensors maps the file into memory: weights would change, or the process be killed,
        # with the file.
        for key, weight in chain(model.named_parameters(), model.named_buffers()):
            if f".{name}." in f"{key}.":
                weight.data = weight.data.clone()
        return Predictor(model.to(device) if device else model, name, task, tokenizer)


@contextmanager
def removed_on_error(model: PeftModel, name: str) -> Iterator[None]:
    """Remove an adapter from its model if the context fails. A base model that holds no other is
    as it was before.
    """
    try:
        yield
    except BaseException:
        if name in model.peft_config:  # unless the tuner has removed it
            model.base_model._remove(name)  # type: ignore[operator]
        raise
