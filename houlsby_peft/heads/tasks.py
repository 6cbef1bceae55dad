"""What an adapter's head predicts: kinds of tasks, task types of PEFT, and labels."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import HEADS_OF_PEFT, HoulsbyConfig
from ..method.modules import is_inside


if TYPE_CHECKING:
    from torch import nn

    from ..saved.record import AdapterRecord


@dataclass(frozen=True)
class TaskKind:
    """A kind of task.

    Args:
        pipeline: Its name on the Hub and, if transformers has a pipeline for it, the pipeline's.
        auto_class: The class of transformers that loads a base model with a head for it.
        class_suffix: The end of the names of the models' own classes, as of
            `BertForSequenceClassification`.
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
    for kind in TASK_KINDS:
        if name.endswith(kind.class_suffix):
            return kind
    return None


def find_task_type(model: nn.Module, heads: Collection[str], names: Iterable[str]) -> str | None:
    """Return PEFT's name for the task of a model's head; None if PEFT cannot load the adapter so.

    The adapter is then loaded without a task type. For some task types, PEFT expects that the
    adapter has trained the head: no module of `names` that PEFT calls a head is outside of `heads`.
    """
    kind = task_kind_of_class(type(model).__name__)
    if kind is None or kind.task_type is None or not _fits_class_of_peft(model, kind.task_type):
        return None
    expected = HEADS_OF_PEFT.get(kind.task_type)
    if expected is None:
        return kind.task_type
    if not heads:
        return None
    for key in names:
        if key.endswith(expected) and not any(is_inside(key, head) for head in heads):
            return None
    return kind.task_type


def _fits_class_of_peft(model: nn.Module, task_type: str) -> bool:
    """Return whether a model takes the inputs that PEFT's class for a task gives to it by name."""
    if getattr(model, "main_input_name", None) != "input_ids":
        return False
    names = {"input_ids", "attention_mask", "inputs_embeds"}
    if task_type == "SEQ_2_SEQ_LM":
        names.add("decoder_input_ids")
    parameters = inspect.signature(model.forward).parameters.keys()
    # PEFT's class for question answering drops the token types, which tell BERT the question from
    # its context.
    has_token_types = getattr(model.config, "type_vocab_size", 2) > 1
    if task_type == "QUESTION_ANS" and "token_type_ids" in parameters and has_token_types:
        return False
    return names <= parameters


def label_facts(config: HoulsbyConfig, model: nn.Module) -> dict[str, Any]:
    """Return the labels and the problem type of a new adapter, as `AdapterRecord` holds them.

    They are empty for a model without labels. What the user has not set comes from the base model.
    A head of one output is a regression, as for transformers' loss.
    """
    kind = task_kind_of_class(type(model).__name__)
    base_config = getattr(model, "config", None)
    if kind is None or not kind.has_labels or base_config is None:
        return {}
    labels = config.id2label or labels_of_base(base_config)
    problem_type = config.problem_type or _problem_type_of_base(base_config, labels)
    if problem_type is None and len(labels) == 1:
        problem_type = "regression"
    return {
        "id2label": labels,
        "problem_type": problem_type,
        "has_labels_of_base": config.id2label is None,
    }


def labels_of_base(base_config: Any) -> dict[int, str]:
    """Return the labels in a base model's configuration; empty if it has none."""
    labels = getattr(base_config, "id2label", None) or {}
    return {int(number): str(name) for number, name in labels.items()}


def warn_of_other_labels(base_config: Any, record: AdapterRecord) -> None:
    """Warn that a loaded adapter has other labels than its model's configuration, by which
    transformers' pipelines name and score them.
    """
    labels, labels_of_model = record.id2label or {}, labels_of_base(base_config)
    several = "multi_label_classification"
    has_several = record.problem_type == several
    is_other_kind = has_several != (getattr(base_config, "problem_type", None) == several)
    if labels_of_model and (len(labels) != len(labels_of_model) or is_other_kind):
        warnings.warn(
            f"An adapter has other labels ({len(labels):,}{', several per text' * has_several}) "
            f"than the configuration of its model ({len(labels_of_model):,}). The logits are "
            "right, but a pipeline of transformers would give wrong names and scores. Load the "
            "adapter with houlsby_peft.load, or give the base model its id2label and problem_type.",
            stacklevel=2,
        )


def _problem_type_of_base(base_config: Any, labels: Mapping[int, str]) -> str | None:
    """Return the base model's problem type, if it can be that of a head with these labels.

    transformers writes it to the configuration of every model that it trains. A head with one
    output and a head with several never have the same problem.
    """
    if (len(labels) == 1) != (len(labels_of_base(base_config)) == 1):
        return None
    return getattr(base_config, "problem_type", None)
