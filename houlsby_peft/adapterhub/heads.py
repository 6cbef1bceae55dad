"""Prediction heads: which modules of a transformers model compute what a library's head computes.

The flexible heads of the `adapters` library are one or two linear layers on the hidden states of
all tokens, of the first token or of the model's pooler. Its static heads are those of a class of
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import AdapterError, shortened
from ..heads.finding import find_head
from ..heads.tasks import TaskKind, task_kind_of_class
from ..saved.weights import first_of
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


class HeadLayout(NamedTuple):
    """A head of transformers, as the library describes one.

    Attributes:
        suffix: The end of the class's name.
        layers: The number of linear layers in the library.
        activation: The activation between two layers.
        use_pooler: Whether the library's layers read the pooler's output.
        modules: The linear layers, where `{base}` stands for the encoder's name.
        is_added: Whether `HoulsbyConfig.two_layer_head` adds the hidden layer.
    """

    suffix: str
    layers: int
    activation: str | None
    use_pooler: bool
    modules: tuple[str, ...]
    is_added: bool = False

    def names(self, model: nn.Module) -> list[str]:
        """Return the names of the linear layers in a model."""
        base = getattr(model, "base_model_prefix", "")
        return [module.format(base=base) for module in self.modules]

    def keys(self, model: nn.Module, adapter_name: str) -> dict[str, str]:
        """Return the library's keys of the weights, by their names in a model."""
        keys = {}
        for number, module in enumerate(self.names(model)):
            # A dropout precedes each linear layer, an activation is between them.
            layer = f"heads.{adapter_name}.{1 + 3 * number}"
            keys[f"{module}.weight"] = f"{layer}.weight"
            keys[f"{module}.bias"] = f"{layer}.bias"
        return keys


_TEXT, _CHOICE, _TOKENS = "ForSequenceClassification", "ForMultipleChoice", "ForTokenClassification"
_ADDED = ("classifier.dense", "classifier.out_proj")


def _of_tokens(name: str = "classifier") -> tuple[HeadLayout, ...]:
    return (
        HeadLayout(_TOKENS, 1, None, False, (name,)),
        HeadLayout(_TOKENS, 2, "tanh", False, (f"{name}.dense", f"{name}.out_proj"), is_added=True),
        HeadLayout("ForQuestionAnswering", 1, None, False, ("qa_outputs",)),
    )


def _with_pooler(suffix: str) -> tuple[HeadLayout, ...]:
    # BERT's pooler is a linear layer with tanh on the first token: the first of the library's two.
    return (
        HeadLayout(suffix, 2, "tanh", False, ("{base}.pooler.dense", "classifier")),
        HeadLayout(suffix, 1, None, True, ("classifier",)),
        HeadLayout(suffix, 2, "tanh", True, _ADDED, is_added=True),
    )


_DENSE = HeadLayout(_TEXT, 2, "tanh", False, ("classifier.dense", "classifier.out_proj"))
_ENCODER_DECODER = HeadLayout(
    _TEXT, 2, "tanh", False, ("classification_head.dense", "classification_head.out_proj")
)
_DISTILBERT = HeadLayout(_TEXT, 2, "relu", False, ("pre_classifier", "classifier"))
_DEBERTA = (HeadLayout(_TEXT, 2, "gelu", False, ("pooler.dense", "classifier")), *_of_tokens())
_ROBERTA = (_DENSE, *_with_pooler(_CHOICE), *_of_tokens())
_GPT = (
    HeadLayout(_TEXT, 1, None, False, ("score",)),
    HeadLayout(_TEXT, 2, "tanh", False, ("score.dense", "score.out_proj"), is_added=True),
)
LAYOUTS: dict[str, tuple[HeadLayout, ...]] = {
    "albert": (*_of_tokens(), HeadLayout(_TEXT, 1, None, True, ("classifier",))),
    "bart": (_ENCODER_DECODER, *_of_tokens()),
    "bert": (*_with_pooler(_TEXT), *_with_pooler(_CHOICE), *_of_tokens()),
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA,
    "distilbert": (
        _DISTILBERT,
        _DISTILBERT._replace(suffix=_CHOICE),
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
    """A head of the library, found among those of transformers; a static head has no layout."""

    task: TaskKind
    id2label: dict[int, str] | None
    problem_type: str | None
    layout: HeadLayout | None
    part: Part

    @property
    def is_added(self) -> bool:
        """Whether `HoulsbyConfig.two_layer_head` adds its hidden layer."""
        return self.layout is not None and self.layout.is_added


def find_target(part: Part, model_type: str) -> Head:
    """Return which head of transformers computes what a head of the library computes.

    Raises:
        AdapterError: There is none.
    """
    config, layout = part.fields.get("config"), None
    if config is None:  # a static head
        head_type, labels = str(part.fields.get("model_class")), part.fields.get("label2id")
        task = _find_task(head_type, is_static=True)
        outputs = min(part.fields.get("num_labels", len(labels or (0, 1))), _MOST_OUTPUTS)
    else:
        head_type, labels = str(config["head_type"]), config.get("label2id")
        task = _find_task(head_type, is_static=False)
        layout = _find_layout(config, task.class_suffix, model_type)
        last_layer = f"heads.{part.fields['name']}.{3 * layout.layers - 2}"
        outputs = len(part.tensors[f"{last_layer}.weight"])
    if not task.has_labels:
        return Head(task, None, None, layout, part)
    if not labels:
        labels = {f"LABEL_{number}": number for number in range(outputs)}
    id2label = {number: name for name, number in labels.items()}
    problem_type = None
    if head_type == "multilabel_classification":
        problem_type = "multi_label_classification"
    elif outputs == 1:
        problem_type = "regression"
    return Head(task, dict(sorted(id2label.items())), problem_type, layout, part)


def _find_task(head_type: str, is_static: bool) -> TaskKind:
    """Return the task of a head: a type of the library or, if static, a class of transformers."""
    for library_type, suffix in _CLASSES.items():
        is_type = head_type.endswith(suffix) if is_static else head_type == library_type
        task = task_kind_of_class(suffix)
        if is_type and task is not None:
            return task
    raise AdapterError(
        f"A head must be for one of {', '.join(_CLASSES)}; got {shortened(head_type)}. {NO_HEAD}."
    )


def _find_layout(config: Mapping[str, Any], suffix: str, model_type: str) -> HeadLayout:
    """Return the layout that the library's configuration of a flexible head describes."""
    layers, activation = config.get("layers"), config.get("activation_function")
    use_pooler = bool(config.get("use_pooler"))
    for layout in LAYOUTS.get(model_type, ()):
        has_activation = layers == 1 or layout.activation == activation
        has_layers = layout.layers == layers and layout.use_pooler == use_pooler
        if layout.suffix == suffix and has_layers and has_activation:
            return layout
    inputs = "the pooler" if use_pooler else "the hidden states"
    raise AdapterError(
        f"The head has {shortened(repr(layers))} layers with the activation "
        f"{shortened(repr(activation))} on {inputs}, and no class of transformers for {model_type} "
        f"has such a head. {NO_HEAD}."
    )


def head_modules(head: Head, model: nn.Module) -> list[str]:
    """Return the names of the modules that make up a head, of which an adapter has copies."""
    if head.layout is None:
        return find_head(model)
    modules: list[str] = []
    for name in head.layout.names(model):
        module = name.removesuffix(".dense").removesuffix(".out_proj")
        if module not in modules:
            modules.append(module)
    return modules


def head_weights(
    head: Head, model: nn.Module, expected: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Return a head's weights by their names in transformers.

    Args:
        head: The head of the library.
        model: The model with the head of transformers.
        expected: The shapes of the weights in the model, by name.

    Raises:
        AdapterError: The head has other weights.
    """
    part = head.part
    keys = {name: name for name in expected}
    if head.layout is not None:
        keys = head.layout.keys(model, str(part.fields["name"]))
    weights = {}
    unknown = set(part.tensors)
    for name, key in keys.items():
        if name in expected and key in part.tensors:
            weights[name] = part.tensors[key]
            unknown.discard(key)
    if unknown:
        raise AdapterError(
            f"{part.file.name} must hold the weights of the head of a {type(model).__name__}; it "
            f"has {first_of(sorted(unknown))}. {NO_HEAD}."
        )
    if head.layout is not None and part.fields["config"].get("bias") is False:
        *_, bias = keys
        if bias in expected:
            weights[bias] = torch.zeros(expected[bias])
    return weights
