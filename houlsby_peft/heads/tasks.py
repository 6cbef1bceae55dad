"""What an adapter's head predicts: classes of transformers, their names on the Hub, and PEFT's task
types.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import HEADS_OF_PEFT, HoulsbyConfig
from ..modules import is_inside


if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TaskKind:
    """A kind of task.

    Args:
        pipeline: Its name on the Hub, which is that of transformers' pipeline if there is one.
        auto_class: The class of transformers that loads a base model with a head for it.
        class_suffix: The end of the names of the models' own classes: `BertForSequenceClassification`.
        task_type: PEFT's name for it; None if PEFT has none.
    """

    pipeline: str
    auto_class: str
    class_suffix: str
    task_type: str | None = None

    @property
    def has_labels(self) -> bool:
        """Whether the head chooses among classes that have names."""
        return self.class_suffix.endswith("Classification")

    @property
    def reads_text(self) -> bool:
        """Whether the inputs are texts, which need a tokenizer."""
        return self.pipeline not in ("image-classification", "audio-classification")


TASK_KINDS = (
    TaskKind(
        "text-classification",
        "AutoModelForSequenceClassification",
        "ForSequenceClassification",
        "SEQ_CLS",
    ),
    TaskKind(
        "token-classification",
        "AutoModelForTokenClassification",
        "ForTokenClassification",
        "TOKEN_CLS",
    ),
    TaskKind(
        "question-answering",
        "AutoModelForQuestionAnswering",
        "ForQuestionAnswering",
        "QUESTION_ANS",
    ),
    TaskKind("multiple-choice", "AutoModelForMultipleChoice", "ForMultipleChoice"),
    TaskKind("image-classification", "AutoModelForImageClassification", "ForImageClassification"),
    TaskKind("audio-classification", "AutoModelForAudioClassification", "ForAudioClassification"),
    TaskKind("text-generation", "AutoModelForCausalLM", "ForCausalLM", "CAUSAL_LM"),
    TaskKind("text-generation", "AutoModelForCausalLM", "LMHeadModel", "CAUSAL_LM"),
    TaskKind(
        "text2text-generation", "AutoModelForSeq2SeqLM", "ForConditionalGeneration", "SEQ_2_SEQ_LM"
    ),
    TaskKind("fill-mask", "AutoModelForMaskedLM", "ForMaskedLM"),
    TaskKind("feature-extraction", "AutoModel", "Model", "FEATURE_EXTRACTION"),
)


def task_kind_of_class(name: str) -> TaskKind | None:
    """Return the task of a class of transformers by its name, such as "BertForTokenClassification",
    or None.
    """
    return next((task for task in TASK_KINDS if name.endswith(task.class_suffix)), None)


def find_task_type(model: nn.Module, heads: Collection[str], names: Iterable[str]) -> str | None:
    """Return PEFT's name for the task of a model's head, or None if PEFT has none under which it
    loads the adapter.

    For some task types, PEFT expects that an adapter has trained the head, and it passes texts to
    the model by name. Where that does not fit, an adapter is loaded without a task type.
    """
    task = task_kind_of_class(type(model).__name__)
    if (
        task is None
        or task.task_type is None
        or getattr(model, "main_input_name", None) != "input_ids"
    ):
        return None
    inputs = {"input_ids", "attention_mask", "inputs_embeds"}
    if task.task_type == "SEQ_2_SEQ_LM":
        inputs.add("decoder_input_ids")
    given = inspect.signature(model.forward).parameters.keys()
    if not inputs <= given:
        return None
    # PEFT's class for question answering drops the token types, which tell BERT the question from
    # its context.
    has_token_types = "token_type_ids" in given and getattr(model.config, "type_vocab_size", 2) > 1
    if task.task_type == "QUESTION_ANS" and has_token_types:
        return None
    expected = HEADS_OF_PEFT.get(task.task_type, ())
    found = [key for key in names if key.endswith(expected)] if expected else []
    is_trained = bool(heads) and all(any(is_inside(key, head) for head in heads) for key in found)
    return task.task_type if is_trained or not expected else None


def label_facts(config: HoulsbyConfig, model: nn.Module) -> dict[str, Any]:
    """Return the labels and the problem type of a new adapter, as `AdapterRecord` holds them; empty
    without labels.

    What the user has not set comes from the base model's configuration. A head of one output is a
    regression, as for transformers' loss.
    """
    task = task_kind_of_class(type(model).__name__)
    known = getattr(model, "config", None)
    if task is None or not task.has_labels or known is None:
        return {}
    labels = config.id2label or {
        int(number): str(name) for number, name in labels_of_base(known).items()
    }
    of_base = None if config.id2label else getattr(known, "problem_type", None)
    regression = "regression" if len(labels) == 1 else None
    return {
        "id2label": None if config.id2label else labels,
        "problem_type": config.problem_type or of_base or regression,
        "has_labels_of_base": config.id2label is None,
    }


class AdapterLabels(dict[int, str]):
    """Names of classes that a base model's configuration has from the active adapter, beside its
    own ones.
    """

    def __init__(self, labels: Mapping[int, str], of_base: Mapping[int, str]) -> None:
        super().__init__(labels)
        self.of_base = of_base

    def __reduce__(self) -> Any:
        return AdapterLabels, (dict(self), self.of_base)


def labels_of_base(config: Any) -> Mapping[int, str]:
    """Return a base model's own labels from its configuration; empty if it has none."""
    known = getattr(config, "id2label", None) or {}
    return known.of_base if isinstance(known, AdapterLabels) else known


def find_adapter_with_head(configs: Mapping[str, Any], active: Sequence[str]) -> str | None:
    """Return the adapter whose head predicts: of several active ones, the last that has a head."""
    for name in reversed(active):
        config = configs.get(name)
        if isinstance(config, HoulsbyConfig) and config.record is not None and config.record.heads:
            return name
    return None


def name_classes(config: Any, configs: Mapping[str, Any], active: Sequence[str]) -> None:
    """Name the classes of a base model after those of the active adapter, because pipelines look
    for names there.

    Names that the base model's checkpoint gives stay if the adapter has as many classes and was
    given no names. LABEL_0 and so on are no names.
    """
    of_base = labels_of_base(config)
    name = find_adapter_with_head(configs, active)
    own = configs[name].labels if name is not None else None
    has_names = of_base != {number: f"LABEL_{number}" for number in of_base}
    if (
        not own
        or own == of_base
        or (has_names and not configs[str(name)].id2label and len(own) == len(of_base))
    ):
        own = None
    if not of_base or (own is None and not isinstance(config.id2label, AdapterLabels)):
        return
    config.id2label = of_base if own is None else AdapterLabels(own, of_base)
    config.label2id = {label: number for number, label in config.id2label.items()}


@contextmanager
def use_labels(model: Any, config: HoulsbyConfig | None) -> Iterator[None]:
    """Within this context, let a base model compute the loss for an adapter's labels, or for its
    own ones.

    The models of transformers take labels and problem type from themselves and from their
    configuration, to which they write the problem type that they infer. They get a copy, so that it
    is not taken for another adapter's.
    """
    known = getattr(model, "config", None)
    labels, problem_type = _own_labels(config) if config is not None else (None, None)
    is_own = bool(labels or problem_type)
    if not is_own and not isinstance(getattr(known, "id2label", None), AdapterLabels):
        yield
        return
    before = {
        name: value for name, value in vars(model).items() if name in ("config", "num_labels")
    }
    model.config = copy.copy(known)
    # The names of the classes may be those of another adapter, which is active.
    model.config.id2label = labels or dict(labels_of_base(known))
    if is_own:
        model.config.problem_type = problem_type
    if labels and "num_labels" in before:
        model.num_labels = len(labels)
    try:
        yield
        if (
            labels
            and config
            and problem_type is None
            and model.config.problem_type == "multi_label_classification"
        ):
            config.problem_type = "multi_label_classification"  # which the labels' type has told
    finally:
        vars(model).update(before)


def _own_labels(config: HoulsbyConfig) -> tuple[dict[int, str] | None, str | None]:
    """Return the labels and the problem type that an adapter does not have from the base model;
    None if it has.
    """
    is_of_base = config.record is not None and config.record.has_labels_of_base
    return (None, config.problem_type) if is_of_base else (config.labels, config.kind_of_problem)
