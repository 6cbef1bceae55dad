"""`load`: from the name of an adapter to a predictor."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import nullcontext
from typing import Literal

import torch
from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, PeftModel, set_peft_model_state_dict
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..beneath import open_beneath
from ..errors import AdapterError, shortened
from ..heads.tasks import task_kind_of_class
from ..method.tuner_layer import HoulsbyTunerLayer
from ..saved.adapter import SavedAdapter
from ..saved.fingerprint import refuse_other_bases
from ..saved.weights import first_of
from .base_model import check_tokens, load_base, load_tokenizer, uncompiled
from .predictor import Predictor


# Adding an adapter changes the model, which one thread at a time may do.
_ADDING = threading.RLock()


def load(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    base_model: nn.Module | str | None = None,
    beside: Predictor | None = None,
    adapter_name: str | None = None,
    token: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    other_base: Literal["refuse", "warn"] = "refuse",
    compile: bool = False,
) -> Predictor:
    """Load a trained adapter with its base model, labels and tokenizer.

    Of the adapter, only JSON and safetensors files are read, and code from a repository is never
    run. Threads may load adapters onto one base model, and predict with others on it, at the same
    time. If loading fails, a model that was given is as it was before.

    Args:
        name_or_path: "user/adapter" on the Hub, or a folder.
        revision: A branch, tag or commit of the adapter's repository. The base model's is recorded
            in the adapter.
        base_model: The base model, or its name or folder, in place of the one that the adapter
            names. Of a model from `torch.compile`, the model inside is used.
        beside: An adapter that was loaded before, whose base model this one shares.
        adapter_name: A new name in the model. Default: "default", or the first unused name of
            "default_2", "default_3" and so on.
        token: Access token for private repositories. Default: the one that `hf auth login` or
            HF_TOKEN has set.
        device: Where to put the model. Default: where it is; the CPU for a new one.
        dtype: Dtype of the base model. Default: as in its files.
        other_base: What to do if weights of the base model differ from those that the adapter was
            trained on: "refuse" the adapter, or "warn" and load it.
        compile: Whether a GPU repeats the model's layers as CUDA graphs (see `Predictor`).

    Raises:
        AdapterError: The folder or repository does not contain a loadable Houlsby adapter, the
            adapter was trained on another base model, the base model lacks weights, or the given
            base model already holds adapters, or one of this name.
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
        compile=compile,
    )


def load_saved(
    saved: SavedAdapter,
    base_model: nn.Module | str | None = None,
    beside: Predictor | None = None,
    adapter_name: str | None = None,
    tokenizers: MutableMapping[object, PreTrainedTokenizerBase] | None = None,
    *,
    token: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    other_base: Literal["refuse", "warn"] = "refuse",
    compile: bool = False,
) -> Predictor:
    """Load an opened adapter as `load` does. Predictors that never run at the same time may share
    tokenizers.
    """
    task = saved.task
    open_beneath(saved.config, token)
    if beside is not None:
        _check_head(saved, beside)
        base, task = beside.base_model, beside.task
    elif isinstance(base_model, nn.Module):
        base = _given_base(base_model)
        task = task_kind_of_class(type(base).__name__) or task
    else:
        base = load_base(saved, task, base_model, token, dtype)
    check_tokens(saved, base, is_shared=beside is not None)
    # Before the adapter, which changes a model that is in use.
    tokenizer = load_tokenizer(saved, task, base.name_or_path, token, tokenizers)
    with _ADDING, refuse_other_bases() if other_base == "refuse" else nullcontext():
        model: PreTrainedModel | PeftModel = base
        name = adapter_name or "default"
        if beside is not None:
            model = beside.model
            name = _new_name(adapter_name, beside.model.peft_config)
        adapted = _add_adapter(saved, model, name)
        if device:
            with adapted.base_model.adding(name):  # type: ignore[operator]
                adapted.to(device)
    if beside is None:
        adapted.eval()
    # Decoders classify at the last token that is no padding.
    settings = base.config.get_text_config()
    if getattr(settings, "pad_token_id", None) is None:
        settings.pad_token_id = tokenizer.pad_token_id
    return Predictor(adapted, name, task, tokenizer, compile)


def _add_adapter(saved: SavedAdapter, model: PreTrainedModel | PeftModel, name: str) -> PeftModel:
    """Add an adapter to a base model, or beside others; after an error, the model is as before."""
    weights = saved.weights
    config = copy.deepcopy(saved.config)  # PEFT changes it
    config.inference_mode = True
    try:
        # The file's weights replace those on the meta device. PEFT's own low_cpu_mem_usage patches
        # `nn.Module`, so that modules that other threads create would be on the meta device.
        with torch.device("meta"):
            if isinstance(model, PeftModel):
                adapted = model
                adapted.add_adapter(name, config)
            else:
                model_class = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(
                    config.task_type or "", PeftModel
                )
                adapted = model_class(model, config, name)
        with adapted.base_model.adding(name):  # type: ignore[operator]
            _set_weights(adapted, name, weights, is_shared=adapted is model)
        return adapted
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the file leads PEFT to
        reason = str(error) if isinstance(error, AdapterError) else shortened(str(error))
        raise AdapterError(f"{saved.name}: {reason}") from error


def _set_weights(
    model: PeftModel, name: str, weights: Mapping[str, torch.Tensor], is_shared: bool
) -> None:
    """Set the weights of an added adapter, and of the base model those that its file has, such as
    resized embeddings.
    """
    tensors = model.state_dict()
    of_adapter = {key: weight for key, weight in weights.items() if key not in tensors}
    of_base = sorted(weights.keys() - of_adapter.keys())
    if of_base and is_shared:
        raise AdapterError(
            f"it was saved with weights of the base model, {first_of(of_base)}, which would change "
            "the adapters beside it. Load it on a base model of its own."
        )
    for key in of_base:
        if tensors[key].is_meta or tensors[key].shape != weights[key].shape:
            raise AdapterError(
                f"it was saved with weights of the base model; {key} must be in memory, and have "
                f"the shape {tuple(weights[key].shape)}. Give a base model that fits."
            )
    set_peft_model_state_dict(model, of_adapter, name, low_cpu_mem_usage=True)
    model.base_model._cast_adapter_dtype(name)  # type: ignore[operator]
    for key in of_base:
        # In place, so that tied weights stay tied and each keeps its device and dtype.
        tensors[key].copy_(weights[key])


def _check_head(saved: SavedAdapter, beside: Predictor) -> None:
    task = saved.task
    if task.auto_class != beside.task.auto_class:
        raise AdapterError(
            f"Adapters on one base model must have the same kind of head; {saved.name} is for "
            f"{task.pipeline}, the one beside it for {beside.task.pipeline}. Load it separately."
        )


def _given_base(model: nn.Module) -> PreTrainedModel:
    base = uncompiled(model)
    if any(isinstance(module, HoulsbyTunerLayer) for module in base.modules()):
        raise AdapterError(
            "A base model that is given must hold no Houlsby adapters, which would be changed. "
            "Give beside=, what houlsby_peft.load returned for it, or another base model."
        )
    return base


def _new_name(adapter_name: str | None, taken: Collection[str]) -> str:
    """Return the name that an adapter gets beside others."""
    if adapter_name is None:
        name, number = "default", 1
        while name in taken:
            number += 1
            name = f"default_{number}"
        return name
    if adapter_name in taken:
        raise AdapterError(
            f"The model has an adapter {adapter_name!r} already. Give another adapter_name."
        )
    return adapter_name
