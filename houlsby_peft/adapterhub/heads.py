"""Prediction heads: which modules of a transformers model compute what a head of the `adapters`
    library computes.

The library's flexible heads are one or two linear layers on the hidden states of all tokens, of the
first token or of the model's pooler. Its static heads are those of a class of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import AdapterError, shortened
from ..heads.head import find_head
from ..heads.tasks import TaskKind, task_kind_of_class
from ..weights import first_of
from .format import Part


# The class of transformers for each type of head, by the end of its name.
_CLASSES = {
    "classification": "ForSequenceClassification",
    "multilabel_classification": "ForSequenceClassification",
    "tagging": "ForTokenClassification",
    "question_answering": "ForQuestionAnswering",
    "multiple_choice": "ForMultipleChoice",
}
# More would be no classes, and take memory before the weights are compared with it.
_MOST_OUTPUTS = 100_000
NO_HEAD = "Convert the adapter without its head: with_head=False, or --no-head"


class Row(NamedTuple):
    """A head of transformers, as the library describes one; both directions read it.

    `suffix` is the end of the class's name. `modules` are the linear layers, where `{base}` stands
    for the encoder's name; a head that `is_added` gets its hidden one from
    `HoulsbyConfig.two_layer_head`.
    """

    suffix: str
    layers: int
    activation: str | None
    use_pooler: bool
    modules: tuple[str, ...]
    is_added: bool = False

    def names(self, model: nn.Module) -> list[str]:
        """Return the names of the linear layers in a model."""
        return [
            module.format(base=getattr(model, "base_model_prefix", "")) for module in self.modules
        ]

    def keys(self, model: nn.Module, adapter_name: str) -> dict[str, str]:
        """Return the library's keys of the weights, by their names in a model."""
        # A dropout precedes each linear layer, an activation is between them.
        return {
            f"{module}.{kind}": f"heads.{adapter_name}.{1 + 3 * number}.{kind}"
            for number, module in enumerate(self.names(model))
            for kind in ("weight", "bias")
        }


_TEXT, _CHOICE, _TOKENS = "ForSequenceClassification", "ForMultipleChoice", "ForTokenClassification"
_ADDED = ("classifier.dense", "classifier.out_proj")


def _of_tokens(name: str = "classifier") -> tuple[Row, ...]:
    return (
        Row(_TOKENS, 1, None, False, (name,)),
        Row(_TOKENS, 2, "tanh", False, (f"{name}.dense", f"{name}.out_proj"), is_added=True),
        Row("ForQuestionAnswering", 1, None, False, ("qa_outputs",)),
    )


def _with_pooler(suffix: str) -> tuple[Row, ...]:
    """The pooler of BERT is a linear layer with tanh on the first token: the first of the library's
    two layers.
    """
    return (
        Row(suffix, 2, "tanh", False, ("{base}.pooler.dense", "classifier")),
        Row(suffix, 1, None, True, ("classifier",)),
        Row(suffix, 2, "tanh", True, _ADDED, is_added=True),
    )


_DENSE = Row(_TEXT, 2, "tanh", False, ("classifier.dense", "classifier.out_proj"))
_ENCODER_DECODER = Row(
    _TEXT, 2, "tanh", False, ("classification_head.dense", "classification_head.out_proj")
)
_DEBERTA = (Row(_TEXT, 2, "gelu", False, ("pooler.dense", "classifier")), *_of_tokens())
_ROBERTA = (_DENSE, *_with_pooler(_CHOICE), *_of_tokens())
_GPT = (
    Row(_TEXT, 1, None, False, ("score",)),
    Row(_TEXT, 2, "tanh", False, ("score.dense", "score.out_proj"), is_added=True),
)
ROWS: dict[str, tuple[Row, ...]] = {
    "albert": (*_of_tokens(), Row(_TEXT, 1, None, True, ("classifier",))),
    "bart": (_ENCODER_DECODER, *_of_tokens()),
    "bert": (*_with_pooler(_TEXT), *_with_pooler(_CHOICE), *_of_tokens()),
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA,
    "distilbert": (
        *(
            Row(suffix, 2, "relu", False, ("pre_classifier", "classifier"))
            for suffix in (_TEXT, _CHOICE)
        ),
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
    """A head of the library, found among those of transformers; a static head has no row of the
    table.
    """

    task: TaskKind
    id2label: dict[int, str] | None
    problem_type: str | None
    row: Row | None
    part: Part


def find_target(part: Part, model_type: str) -> Head:
    """Return which head of transformers computes what a head of the library computes."""
    config, row = part.fields.get("config"), None
    if config is None:
        kind = str(part.fields.get("model_class"))
        suffix = next((each for each in _CLASSES.values() if kind.endswith(each)), None)
    else:
        kind = config["head_type"]
        suffix = _CLASSES.get(kind)
    if suffix is None or (task := task_kind_of_class(suffix)) is None:
        raise AdapterError(
            f"A head must be for one of {', '.join(_CLASSES)}; got {shortened(kind)}. {NO_HEAD}."
        )
    if config is None:
        labels = part.fields.get("label2id")
        outputs = min(part.fields.get("num_labels", len(labels or (0, 1))), _MOST_OUTPUTS)
    else:
        labels, layers, activation = (
            config.get("label2id"),
            config.get("layers"),
            config.get("activation_function"),
        )
        use_pooler = bool(config.get("use_pooler"))
        wanted = (suffix, layers, activation if layers != 1 else None, use_pooler)
        row = next((row for row in ROWS.get(model_type, ()) if row[:4] == wanted), None)
        if row is None:
            raise AdapterError(
                f"The head has {shortened(repr(layers))} layers with the activation {shortened(repr(activation))} on "
                f"{'the pooler' if use_pooler else 'the hidden states'}, and no class of transformers for "
                f"{model_type} has such a head. {NO_HEAD}."
            )
        outputs = len(part.tensors[f"heads.{part.fields['name']}.{3 * row.layers - 2}.weight"])
    if not task.has_labels:
        return Head(task, None, None, row, part)
    names = {
        number: name
        for name, number in (labels or {f"LABEL_{n}": n for n in range(outputs)}).items()
    }
    is_multilabel = kind == "multilabel_classification"
    problem_type = (
        "multi_label_classification" if is_multilabel else "regression" if outputs == 1 else None
    )
    return Head(task, dict(sorted(names.items())), problem_type, row, part)


def head_modules(head: Head, model: nn.Module) -> list[str]:
    """Return the names of the modules that make up a head: those of which an adapter has a copy."""
    if head.row is None:
        return find_head(model)
    names = (
        name.removesuffix(".dense").removesuffix(".out_proj") for name in head.row.names(model)
    )
    return list(dict.fromkeys(names))


def head_weights(
    head: Head, model: nn.Module, expected: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Return a head's weights by their names in transformers, whose shapes in the model are
    expected.
    """
    row, part = head.row, head.part
    keys = row.keys(model, str(part.fields["name"])) if row else {name: name for name in expected}
    known = {name: key for name, key in keys.items() if name in expected and key in part.tensors}
    weights = {name: part.tensors[key] for name, key in known.items()}
    if unknown := sorted(part.tensors.keys() - known.values()):
        raise AdapterError(
            f"{part.file.name} must hold the weights of the head of a {type(model).__name__}; it has "
            f"{first_of(unknown)}. {NO_HEAD}."
        )
    bias = [*keys][-1]
    if row and part.fields["config"].get("bias") is False and bias in expected:
        weights[bias] = torch.zeros(expected[bias])
    return weights


def describe_head(
    suffix: str,
    labels: Mapping[int, str] | None,
    problem_type: str | None,
    model: Any,
    weights: Mapping[str, torch.Tensor],
    name: str,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the library's configuration of a head and its weights by the library's keys; see
    `find_target`.
    """
    modules = {key.rpartition(".")[0] for key in weights}
    rows = [row for row in ROWS.get(model.config.model_type, ()) if row.suffix == suffix]
    row = next((row for row in rows if modules == set(row.names(model))), None)
    if row is None:
        raise AdapterError(
            f"The `adapters` library has no head that consists of {first_of(sorted(weights))} of a "
            f"{type(model).__name__}. {NO_HEAD}."
        )
    kind = next(kind for kind, each in _CLASSES.items() if each == suffix)
    last = row.names(model)[-1]
    config: dict[str, Any] = {
        "head_type": "multilabel_classification"
        if problem_type == "multi_label_classification"
        else kind,
        "layers": row.layers,
        "activation_function": row.activation,
        "label2id": {label: number for number, label in labels.items()} if labels else None,
        "dropout_prob": None,
    }
    config |= (
        {"num_choices": 2} if suffix == _CHOICE else {"num_labels": len(weights[f"{last}.weight"])}
    )
    if suffix in (_CHOICE, _TEXT):
        config["use_pooler"] = row.use_pooler
    if suffix == _TEXT:
        config["bias"] = f"{last}.bias" in weights
    return config, {
        key: weights[own] for own, key in row.keys(model, name).items() if own in weights
    }
