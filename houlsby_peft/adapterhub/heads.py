"""Prediction heads: which modules of a transformers model compute what a head of the `adapters` library computes.

The library's flexible heads are one or two linear layers on the hidden states of all tokens, of the first token or of
the model's pooler. Its static heads are those of a class of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..checkpoints.weights import first_of
from ..errors import AdapterError, shortened
from ..heads.find import find_head
from ..heads.tasks import Task, task_of_class
from .reading import HEAD_FILES, Part


# The class of transformers for each type of head, by the end of its name.
_CLASSES = {
    "classification": "ForSequenceClassification",
    "multilabel_classification": "ForSequenceClassification",
    "tagging": "ForTokenClassification",
    "question_answering": "ForQuestionAnswering",
    "multiple_choice": "ForMultipleChoice",
}
_LANGUAGE_MODELS = ("causal_lm", "masked_lm", "seq2seq_lm")
# More would be no classes, and take memory before the weights are compared with it.
_MOST_OUTPUTS = 100_000
NO_HEAD = "Convert the adapter without its head: with_head=False, or --no-head"


class Row(NamedTuple):
    """A head of transformers, as the library describes one.

    Args:
        suffix: The end of the class's name.
        layers: Number of linear layers.
        activation: Non-linearity between two layers.
        use_pooler: Whether the head reads the model's pooler instead of the first token or all tokens.
        modules: The linear layers; `{base}` stands for the encoder's name.
        is_added: Whether the head gets its hidden layer from `HoulsbyConfig.two_layer_head`.
    """

    suffix: str
    layers: int
    activation: str | None
    use_pooler: bool
    modules: tuple[str, ...]
    is_added: bool = False


_TEXT, _CHOICE, _TOKENS = "ForSequenceClassification", "ForMultipleChoice", "ForTokenClassification"
_ADDED = ("classifier.dense", "classifier.out_proj")


def _of_tokens(name: str = "classifier") -> tuple[Row, ...]:
    return (
        Row(_TOKENS, 1, None, False, (name,)),
        Row(_TOKENS, 2, "tanh", False, (f"{name}.dense", f"{name}.out_proj"), is_added=True),
        Row("ForQuestionAnswering", 1, None, False, ("qa_outputs",)),
    )


def _with_pooler(suffix: str) -> tuple[Row, ...]:
    """The pooler of BERT is a linear layer with tanh on the first token: the first of the library's two layers."""
    return (
        Row(suffix, 2, "tanh", False, ("{base}.pooler.dense", "classifier")),
        Row(suffix, 1, None, True, ("classifier",)),
        Row(suffix, 2, "tanh", True, _ADDED, is_added=True),
    )


_DENSE = Row(_TEXT, 2, "tanh", False, ("classifier.dense", "classifier.out_proj"))
_ENCODER_DECODER = Row(_TEXT, 2, "tanh", False, ("classification_head.dense", "classification_head.out_proj"))
_DEBERTA = (Row(_TEXT, 2, "gelu", False, ("pooler.dense", "classifier")), *_of_tokens())
_ROBERTA = (_DENSE, *_with_pooler(_CHOICE), *_of_tokens())
_GPT = (
    Row(_TEXT, 1, None, False, ("score",)),
    Row(_TEXT, 2, "tanh", False, ("score.dense", "score.out_proj"), is_added=True),
)
_HALVES = ("pre_classifier.dense", "classifier.out_proj")
ROWS: dict[str, tuple[Row, ...]] = {
    "albert": (*_of_tokens(), Row(_TEXT, 1, None, True, ("classifier",))),
    "bart": (_ENCODER_DECODER, *_of_tokens()),
    "bert": (*_with_pooler(_TEXT), *_with_pooler(_CHOICE), *_of_tokens()),
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA,
    "distilbert": (
        *(Row(suffix, 2, "relu", False, ("pre_classifier", "classifier")) for suffix in (_TEXT, _CHOICE)),
        *(Row(suffix, 2, "tanh", False, _HALVES, is_added=True) for suffix in (_TEXT, _CHOICE)),
        *_of_tokens(),
    ),
    "electra": (_DENSE._replace(activation="gelu"), *_of_tokens()),
    "gpt2": (*_GPT, *_of_tokens()),
    "gptj": (*_GPT, *_of_tokens()),
    "llama": (*_GPT, *_of_tokens("score")),
    "mbart": (_ENCODER_DECODER, *_of_tokens()),
    "mistral": (*_GPT, *_of_tokens("score")),
    # The library's class scales what other heads of T5 read.
    "mt5": (_ENCODER_DECODER,),
    "plbart": (_ENCODER_DECODER,),
    "roberta": _ROBERTA,
    "t5": (_ENCODER_DECODER,),
    "xlm-roberta": _ROBERTA,
}


@dataclass(frozen=True)
class Head:
    """A head of the library, found among those of transformers.

    Args:
        task: What it predicts.
        outputs: Its number of outputs.
        id2label: The names of the classes; None where a head has no classes.
        problem_type: As in transformers' configurations.
        row: For a flexible head, the row of the table that computes the same.
        part: Its files.
    """

    task: Task
    outputs: int
    id2label: dict[int, str] | None
    problem_type: str | None
    row: Row | None
    part: Part


def find_target(part: Part, model_type: str) -> Head:
    """Return which head of transformers computes what a head of the library computes.

    Raises:
        AdapterError: There is none, or the files do not fit one another.
    """
    path = part.file.with_name(HEAD_FILES[0])
    config = part.fields.get("config")
    if config is None:
        return _find_static(path, part)
    if not isinstance(config, dict):
        raise AdapterError(f"{path}: config must be a mapping; got {shortened(repr(config))}. {NO_HEAD}.")
    head_type, layers, activation = (config.get(name) for name in ("head_type", "layers", "activation_function"))
    if isinstance(head_type, str) and head_type in _LANGUAGE_MODELS:
        raise AdapterError(
            f"{path}: a head that is a language model ({head_type}) holds a copy of the vocabulary's embeddings and "
            f"cannot be converted; the base model's own head predicts instead. {NO_HEAD}."
        )
    suffix = _CLASSES.get(head_type) if isinstance(head_type, str) else None
    if suffix is None:
        raise AdapterError(
            f"{path}: head_type must be one of {', '.join(_CLASSES)}; got {shortened(repr(head_type))}. {NO_HEAD}."
        )
    use_pooler = bool(config.get("use_pooler"))
    between = activation if layers != 1 else None
    row = next(
        (row for row in ROWS.get(model_type, ()) if row[:4] == (suffix, layers, between, use_pooler)),
        None,
    )
    if row is None:
        reads = "the pooler" if use_pooler else "the hidden states"
        raise AdapterError(
            f"{path}: the head has {shortened(repr(layers))} layers with the activation {shortened(repr(activation))} "
            f"on {reads}, and no class of transformers for {model_type} has such a head. {NO_HEAD}."
        )
    outputs = (
        1
        if suffix == _CHOICE
        else _count(path, config, part, _flexible_key(part, row.layers, row.layers - 1, bool(activation)))
    )
    has_classes = suffix.endswith("Classification")
    problem = "multi_label_classification" if head_type == "multilabel_classification" else None
    return Head(
        task=_task(suffix),
        outputs=outputs,
        id2label=_labels(path, config.get("label2id"), outputs) if has_classes else None,
        problem_type="regression" if has_classes and outputs == 1 and problem is None else problem,
        row=row,
        part=part,
    )


def head_modules(head: Head, model: nn.Module) -> list[str]:
    """Return the names of the modules that make up a head: those of which an adapter has a copy."""
    if head.row is None:
        return find_head(model, ())
    names = (name.format(base=getattr(model, "base_model_prefix", "")) for name in head.row.modules)
    ends = (".dense", ".out_proj")
    return list(dict.fromkeys(name.removesuffix(ends[0]).removesuffix(ends[1]) for name in names))


def head_keys(head: Head, model: nn.Module, names: Mapping[str, torch.Tensor]) -> dict[str, str | None]:
    """Return the library's keys of a head's weights, by their own names.

    Args:
        head: The head.
        model: A model of its class.
        names: The names and shapes of the weights that the model's head has.

    Returns:
        A key for each name; None for the bias of the last layer if it has none, which counts as zero.

    Raises:
        AdapterError: The weights do not fit.
    """
    if head.row is None:
        keys: dict[str, str | None] = {name: name for name in names}
    else:
        config = head.part.fields["config"]
        has_activation, last = bool(config.get("activation_function")), head.row.layers - 1
        keys = {}
        for number, module in enumerate(head.row.modules):
            has_no_bias = number == last and config.get("bias") is False
            own = module.format(base=getattr(model, "base_model_prefix", ""))
            for kind in ("weight", "bias"):
                key = _flexible_key(head.part, head.row.layers, number, has_activation, kind)
                if f"{own}.{kind}" in names:
                    keys[f"{own}.{kind}"] = None if kind == "bias" and has_no_bias else key
    missing = [key for key in keys.values() if key is not None and key not in head.part.tensors]
    unknown = [key for key in head.part.tensors if key not in keys.values()]
    if missing or unknown:
        problems = [f"it lacks {first_of(missing)}"] if missing else []
        problems += [f"it has {first_of(unknown)}"] if unknown else []
        raise AdapterError(
            f"{head.part.file} must hold the weights of the head of a {type(model).__name__}: "
            f"{' and '.join(problems)}. {NO_HEAD}."
        )
    return keys


def flexible_config(
    row: Row, outputs: int, labels: Mapping[int, str] | None, problem_type: str | None, has_bias: bool
) -> dict[str, Any]:
    """Return the library's configuration of a flexible head; see `find_target` for the way back."""
    kind = next(name for name, suffix in _CLASSES.items() if suffix == row.suffix)
    if problem_type == "multi_label_classification":
        kind = "multilabel_classification"
    config: dict[str, Any] = {
        "head_type": kind,
        "layers": row.layers,
        "activation_function": row.activation,
        "label2id": {name: number for number, name in labels.items()} if labels else None,
        "dropout_prob": None,
    }
    config |= {"num_choices": 2} if kind == "multiple_choice" else {"num_labels": outputs}
    if kind in ("classification", "multilabel_classification", "multiple_choice"):
        config["use_pooler"] = row.use_pooler
    if kind in ("classification", "multilabel_classification"):
        config["bias"] = has_bias
    return config


def flexible_index(layers: int, number: int, has_activation: bool) -> int:
    """Return the index of a linear layer in a flexible head.

    A dropout comes before each linear layer, and an activation may come after each but the last.
    """
    return 1 + number * (3 if has_activation else 2)


def _flexible_key(part: Part, layers: int, number: int, has_activation: bool, kind: str = "weight") -> str:
    return f"heads.{part.fields.get('name')}.{flexible_index(layers, number, has_activation)}.{kind}"


def _find_static(path: Path, part: Part) -> Head:
    model_class = part.fields.get("model_class")
    task = task_of_class(model_class) if isinstance(model_class, str) else None
    if task is None or task.class_suffix not in _CLASSES.values():
        raise AdapterError(
            f"{path}: the head of a {shortened(repr(model_class))} cannot be converted: only heads for "
            f"classification, tagging, question answering and multiple choice can. {NO_HEAD}."
        )
    labels = part.fields.get("label2id")
    outputs = part.fields.get("num_labels", len(labels) if isinstance(labels, dict) else 2)
    if not isinstance(outputs, int) or isinstance(outputs, bool) or not 1 <= outputs <= _MOST_OUTPUTS:
        raise AdapterError(
            f"{path}: num_labels must be the head's number of outputs; got {shortened(repr(outputs))}. {NO_HEAD}."
        )
    has_classes = task.has_labels
    return Head(
        task=task,
        outputs=outputs,
        id2label=_labels(path, labels, outputs) if has_classes else None,
        problem_type="regression" if has_classes and outputs == 1 else None,
        row=None,
        part=part,
    )


def _count(path: Path, config: Mapping[str, Any], part: Part, key: str) -> int:
    weight = part.tensors.get(key)
    if weight is None or weight.dim() != 2:
        raise AdapterError(f"{part.file} must hold the matrix {key!r} of the head. {NO_HEAD}.")
    outputs, given = weight.shape[0], config.get("num_labels")
    if given is not None and given != outputs:
        raise AdapterError(
            f"{path}: num_labels must be the head's number of outputs, {outputs}; got {shortened(repr(given))}. "
            f"{NO_HEAD}."
        )
    return outputs


def _labels(path: Path, label2id: Any, outputs: int) -> dict[int, str]:
    if label2id is None:
        return {number: f"LABEL_{number}" for number in range(outputs)}
    is_mapping = isinstance(label2id, dict) and all(type(number) is int for number in label2id.values())
    labels = {number: name for name, number in label2id.items()} if is_mapping else {}
    if set(labels) != set(range(outputs)):
        raise AdapterError(
            f"{path}: label2id must give each of the {outputs} outputs a name; got {shortened(repr(label2id))}. "
            f"{NO_HEAD}."
        )
    return dict(sorted(labels.items()))


def _task(suffix: str) -> Task:
    task = task_of_class(suffix)
    assert task is not None
    return task
