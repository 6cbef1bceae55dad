"""Classification of texts or pairs of texts with the labels of a data set, whatever they are."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from datasets import Dataset
from transformers import DataCollatorWithPadding, EvalPrediction, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from common.arguments import RecipeTrainingArguments, TextArguments
from common.columns import find_text_columns, leave_out_empty
from common.data import check_columns, load_splits, tokenize
from common.labels import REGRESSION, Labels, describe_balance, find_labels, label_texts
from common.model import describe_head
from common.scores import classification_scores
from common.split import draw, with_validation


@dataclass(kw_only=True)
class ClassificationArguments(TextArguments):
    """What to learn, and from which columns."""

    _argument_group_name = "task"

    label_columns: list[str] | None = HfArg(  # noqa: RUF009, which takes the type for a mutable default
        default=None, help="Column of the label, or one 0/1 column for each class; default: found."
    )
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = HfArg(
        default=None, help="Kind of the labels; default: found out."
    )


@dataclass(frozen=True)
class Task:
    """A task of classification: its splits, with the column `label` for the model, and what the labels mean."""

    name: str
    splits: dict[str, Dataset]
    text_columns: tuple[str, ...]
    labels: Labels

    @property
    def head(self) -> dict[str, object]:
        """What the configurations of model and adapter say of the head."""
        return describe_head(self.labels.names, self.labels.problem_type)

    def tokenized(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> "Task":
        """The task with the tokens of its texts."""
        splits = {
            name: tokenize(split, tokenizer, self.text_columns, max_length) for name, split in self.splits.items()
        }
        return replace(self, splits=splits)

    def score(self, evaluation: EvalPrediction) -> dict[str, float]:
        """The scores as the Trainer calls for them."""
        return classification_scores(evaluation.predictions, evaluation.label_ids, self.labels.problem_type)


def load_task(arguments: ClassificationArguments, training: RecipeTrainingArguments) -> Task:
    """Reads a data set and finds out what there is to learn; training examples without text are left out.

    Raises:
        RecipeError: If a column is missing, or holds no text or a label that the training examples do not have.
    """
    with training.main_process_first():
        splits = load_splits(arguments.data, arguments.data_config)
    text_columns = find_text_columns(splits["train"], arguments.text_columns)
    labels = find_labels(splits["train"], arguments.label_columns, arguments.problem_type)
    for name, split in splits.items():
        check_columns(split, name, text_columns, labels.columns)
    if "test" in splits and not any(label_texts(splits["test"], labels.columns)):
        print("the test split has no labels and is left out")
        del splits["test"]
    splits["train"] = leave_out_empty(splits["train"], "train", text_columns)
    classes = None if labels.problem_type == REGRESSION else label_texts(splits["train"], labels.columns)
    splits = with_validation(splits, classes)
    splits["train"] = draw(splits["train"], arguments.max_train_samples, training.seed)
    name = Path(arguments.data).stem + (f"_{arguments.data_config}" if arguments.data_config else "")
    if training.should_log:
        print(f"{name}: {len(splits['train']):,} training examples; text: {', '.join(text_columns)}")
        print(describe_balance(labels, splits["train"]))
    return Task(name, {name: labels.encode(split, name) for name, split in splits.items()}, text_columns, labels)


def trainer_arguments(task: Task, tokenizer: PreTrainedTokenizerBase) -> dict[str, Dataset | Callable | object]:
    """What a Trainer needs to know of a tokenized task."""
    return {
        "train_dataset": task.splits["train"],
        "eval_dataset": task.splits["validation"],
        "processing_class": tokenizer,
        "data_collator": DataCollatorWithPadding(tokenizer),
        "compute_metrics": task.score,
    }
