"""What an adapter's head predicts: classes of transformers, their names on the Hub, and PEFT's task types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import AdapterError
from .two_layer_head import has_two_layer_head


if TYPE_CHECKING:
    from torch import nn

    from .config import HoulsbyConfig


@dataclass(frozen=True)
class Task:
    """One kind of task.

    Args:
        pipeline: its name on the Hub, which is that of transformers' pipeline where there is one.
        auto_class: the class of transformers that loads a base model with a head for it.
        class_suffix: how the names of the models' own classes end: `BertForSequenceClassification`.
        task_type: PEFT's name for it; None where PEFT has none.
    """

    pipeline: str
    auto_class: str
    class_suffix: str
    task_type: str | None = None

    @property
    def has_labels(self) -> bool:
        """Whether the head chooses among classes that have names."""
        return self.class_suffix.endswith("Classification")


TASKS = (
    Task("text-classification", "AutoModelForSequenceClassification", "ForSequenceClassification", "SEQ_CLS"),
    Task("token-classification", "AutoModelForTokenClassification", "ForTokenClassification", "TOKEN_CLS"),
    Task("question-answering", "AutoModelForQuestionAnswering", "ForQuestionAnswering", "QUESTION_ANS"),
    Task("multiple-choice", "AutoModelForMultipleChoice", "ForMultipleChoice"),
    Task("image-classification", "AutoModelForImageClassification", "ForImageClassification"),
    Task("audio-classification", "AutoModelForAudioClassification", "ForAudioClassification"),
    Task("text-generation", "AutoModelForCausalLM", "ForCausalLM", "CAUSAL_LM"),
    Task("text-generation", "AutoModelForCausalLM", "LMHeadModel"),
    Task("text2text-generation", "AutoModelForSeq2SeqLM", "ForConditionalGeneration", "SEQ_2_SEQ_LM"),
    Task("fill-mask", "AutoModelForMaskedLM", "ForMaskedLM"),
    Task("feature-extraction", "AutoModel", "Model", "FEATURE_EXTRACTION"),
)


def task_of_class(name: str) -> Task | None:
    """The task of a class of transformers by its name, or None: "BertForTokenClassification"."""
    return next((task for task in TASKS if name.endswith(task.class_suffix)), None)


def task_of_config(config: HoulsbyConfig) -> Task:
    """The task that a saved configuration tells, by its task type or the class of the model that it was trained in.

    Raises:
        AdapterError: It tells none of TASKS.
    """
    mapping = config.auto_mapping if isinstance(config.auto_mapping, dict) else {}
    class_name = str(mapping.get("base_model_class"))
    by_type = next((task for task in TASKS if config.task_type and task.task_type == config.task_type), None)
    found = by_type or task_of_class(class_name)
    if found is None:
        raise AdapterError(
            "The adapter must tell its task, by a task type of PEFT or by a class of transformers such as "
            f"BertForSequenceClassification; got {config.task_type!r} and {class_name!r}. Load the base model "
            "yourself and give it as base_model."
        )
    return found


def record_head(config: HoulsbyConfig, model: nn.Module) -> None:
    """Record in an adapter's configuration what the head is and predicts, where the user has not given it.

    Called when an adapter is made and again before it is pushed, as names may be given, and the Trainer's loss finds
    the kind of task out, in between.

    Args:
        config: of the adapter; `id2label`, `problem_type` and `two_layer_head` are set.
        model: the base model, whose configuration knows both. A head of one output is a regression, as for
            transformers' loss.
    """
    task = task_of_class(type(model).__name__)
    known = getattr(model, "config", None)
    if task is None or not task.has_labels or known is None:
        return
    recorded = config.recorded_head
    if config.two_layer_head in (False, recorded.get("two_layer_head")):
        config.two_layer_head = recorded["two_layer_head"] = has_two_layer_head(model)
    if config.id2label in (None, recorded.get("id2label")):
        config.id2label = recorded["id2label"] = {int(number): str(name) for number, name in known.id2label.items()}
    if config.problem_type in (None, recorded.get("problem_type")):
        regression = "regression" if len(config.id2label) == 1 else None
        config.problem_type = recorded["problem_type"] = getattr(known, "problem_type", None) or regression
