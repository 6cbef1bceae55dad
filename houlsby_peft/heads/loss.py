"""The loss of an adapter that classifies, from the logits of its head.

A model of transformers computes its loss by its own number of labels and its own problem type, and
writes the type that it infers to its configuration. An adapter may have other labels, and another
thread may run another adapter. So hooks take the labels out of a call, and compute the loss by
transformers' own functions. The base model is never written to.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.utils.generic import ModelOutput

from ..config import HoulsbyConfig
from ..method.tuner_layer import ModelState, batch_of
from ..saved.record import AdapterRecord
from .tasks import task_kind_of_class


def hook_loss(model: nn.Module, state: ModelState) -> Iterator[RemovableHandle]:
    """Let a model with adapters compute the loss of the adapter whose head predicts, until the
    hooks are removed.
    """
    kind = task_kind_of_class(type(model).__name__)
    if kind is not None and kind.has_labels:
        names = [*inspect.signature(model.forward).parameters]
        position = names.index("labels") if "labels" in names else len(names)
        # A copy of the model gets a copy of these, with its own state.
        take = partial(_take_labels, state, position)
        yield model.register_forward_pre_hook(take, with_kwargs=True)
        yield model.register_forward_hook(partial(_add_loss, state, kind.class_suffix))


def _take_labels(
    state: ModelState, position: int, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Take the labels out of the arguments, if an adapter's head predicts.

    Args:
        state: What all layers of the model share.
        position: Where the labels are among arguments without names.
        model, args, kwargs: The model, and what it is called with.
    """
    if state.labels:
        state.labels.pop(state.thread, None)  # of a pass that has failed
    labels = args[position] if len(args) > position else kwargs.get("labels")
    if labels is None:
        return None
    name = _find_predicting(state)
    if name is None or not isinstance(model.peft_config.get(name), HoulsbyConfig):
        return None
    state.labels[state.thread] = name, labels
    if len(args) > position:
        return (*args[:position], None, *args[position + 1 :]), kwargs
    return args, {**kwargs, "labels": None}


def _find_predicting(state: ModelState) -> str | None:
    """Return the adapter whose head predicts in this thread; None if it is the base model's head.

    Raises:
        ValueError: The rows of a mixed batch have different adapters.
    """
    names: list[str] = []
    for head in state.heads:
        if head.disable_adapters:
            return None
        names = names or head.active_adapters
    batch: Any = batch_of(state.batches)
    if batch is not None:
        if batch.only_name is None:
            raise ValueError(
                "If labels are given, all rows must have the same adapter, because one loss is "
                f"computed; got rows of {', '.join(dict.fromkeys(batch.names))}. Run the rows of "
                "each adapter separately, or leave the labels out."
            )
        names = [batch.only_name]
    for name in names:
        if name in state.records and state.records[name].heads:
            return name
    return None


def _add_loss(
    state: ModelState, class_suffix: str, model: Any, args: tuple[Any, ...], output: Any
) -> Any:
    """Put the loss before the other outputs, where transformers has it."""
    if not state.labels:
        return output
    taken = state.labels.pop(state.thread, None)
    if taken is None:
        return output
    name, labels = taken
    record = state.records[name]
    settings = copy.copy(model.config)
    settings.problem_type = stated = _stated_problem_type(
        model.peft_config[name], record, model.config
    )
    if record.id2label:
        settings.id2label = record.id2label
    logits = output[0]
    loss = _compute(class_suffix, logits, labels, settings)
    if stated is None:
        _note_problem_type(state, name, settings.problem_type)
    if isinstance(output, ModelOutput):
        return type(output)(**{**output, "loss": loss})
    return (loss, *output)


def _compute(class_suffix: str, logits: torch.Tensor, labels: torch.Tensor, settings: Any) -> Any:
    compute: Any = LOSS_MAPPING[class_suffix]
    if class_suffix == "ForTokenClassification":
        return compute(logits, labels, settings)
    return compute(labels, logits, settings)


def _stated_problem_type(
    config: HoulsbyConfig, record: AdapterRecord, base_config: Any
) -> str | None:
    """Return the problem type of an adapter; None if the labels of a batch have to tell."""
    if config.problem_type:
        return config.problem_type
    if record.has_labels_of_base:
        return getattr(base_config, "problem_type", None)
    if record.is_problem_type_inferred:
        return None
    return record.problem_type


def _note_problem_type(state: ModelState, adapter_name: str, problem_type: str | None) -> None:
    """Record whether the labels of a batch are several per row, as predictions depend on it."""
    if problem_type == "multi_label_classification":
        state.note(adapter_name, problem_type=problem_type, is_problem_type_inferred=True)
    elif state.records[adapter_name].is_problem_type_inferred:
        state.note(adapter_name, problem_type=None, is_problem_type_inferred=False)
