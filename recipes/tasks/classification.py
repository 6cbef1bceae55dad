"""Classification of texts or pairs of texts with any labels: the task, its scores, and a run.

text_classification.py and paper_tasks.py train single tasks with `run_task`; stream.py trains several on one model.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, f1_score
from transformers import DataCollatorWithPadding, EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.hf_argparser import HfArg

from tasks.glue import SCORES
from tasks.labels import (
    MULTI,
    REGRESSION,
    SINGLE,
    Labels,
    check_repeated,
    describe_balance,
    find_labels,
    has_labels,
    label_texts,
)  # fmt: skip
from training.arguments import ClassifierArguments, RecipeTrainingArguments, TextArguments
from training.data import (
    check_columns,
    describe_data,
    find_text_columns,
    load_splits,
    rows_with_text,
    sample,
    tokenize,
    with_validation,
)
from training.errors import RecipeError
from training.methods import MethodArguments, prepare_model
from training.model import describe_head, load_classifier
from training.runs import Run, plan_push
from training.scores import score_classes
from training.trainer import RecipeTrainer, check_finite


# The scores of an evaluation; the first chooses the best epoch.
SCORES_OF = {
    SINGLE: ("accuracy", "macro_f1", "loss"),
    MULTI: ("macro_f1", "micro_f1", "accuracy", "loss"),
    REGRESSION: ("spearmanr", "pearson", "loss"),
}


@dataclass(kw_only=True)
class ClassificationArguments(TextArguments):
    """What to learn, and from which columns."""

    _argument_group_name = "task"

    label_columns: list[str] | None = HfArg(  # noqa: RUF009
        default=None, help="Column of the label, or one 0/1 column for each class; default: detected by name."
    )
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = HfArg(
        default=None, help="Kind of the labels; default: detected."
    )


@dataclass(frozen=True)
class ClassificationTask:
    """A classification task: its splits, with the column `label` for the model, and what the labels mean."""

    name: str
    splits: dict[str, Dataset]
    text_columns: tuple[str, ...]
    labels: Labels

    @property
    def head(self) -> dict[str, object]:
        """The fields that describe the head in the configurations of model and adapter."""
        return describe_head(self.labels.names, self.labels.problem_type)

    @property
    def scores(self) -> tuple[str, ...]:
        """The scores of an evaluation; the first chooses the best epoch."""
        return SCORES_OF[self.labels.problem_type]

    def tokenized(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> "ClassificationTask":
        """Return the task with the tokens of its texts."""
        splits = {
            name: tokenize(split, tokenizer, self.text_columns, max_length) for name, split in self.splits.items()
        }
        return replace(self, splits=splits)

    def trainer(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, training: RecipeTrainingArguments
    ) -> RecipeTrainer:
        """Return a trainer of the tokenized task."""
        return RecipeTrainer(
            model=model,
            args=training,
            train_dataset=self.splits["train"],
            eval_dataset=self.splits["validation"],
            processing_class=tokenizer,
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=self.score,
            score_classes=partial(score_classes, names=self.labels.names) if len(self.labels.names) > 1 else None,
        )

    def score(self, evaluation: EvalPrediction) -> dict[str, float]:
        """Return the scores as the Trainer calls for them."""
        return classification_scores(evaluation.predictions, evaluation.label_ids, self.labels.problem_type)


def load_task(arguments: ClassificationArguments, training: RecipeTrainingArguments) -> ClassificationTask:
    """Load a data set and detect its texts and labels; leave out training examples without text.

    Raises:
        RecipeError: If a column is missing, or holds no text or a label that the training examples do not have.
    """
    with training.main_process_first():
        splits = load_splits(arguments.data, arguments.data_config)
    text_columns = find_text_columns(splits["train"], arguments.text_columns)
    for name, split in splits.items():
        check_columns(split, name, text_columns, arguments.label_columns or ())
    # The messages about labels number the rows as they are in the user's file.
    rows = {name: range(len(split)) for name, split in splits.items()}
    rows["train"] = rows_with_text(splits["train"], "train", text_columns)
    splits["train"] = splits["train"].select(rows["train"])
    labels = find_labels(splits["train"], arguments.label_columns, arguments.problem_type, rows["train"])
    clash = [column for column in labels.columns if column in text_columns]
    if clash:
        raise RecipeError(f"--text_columns and --label_columns must differ, got {clash[0]!r} in both. Name another.")
    for name, split in splits.items():
        check_columns(split, name, text_columns, labels.columns)
    if "test" in splits and not has_labels(splits["test"], labels.columns):
        print("the test split has no labels and is left out")
        del splits["test"]
    texts = label_texts(splits["train"], labels.columns, "train", rows["train"])
    encoded = {name: labels.encode(split, name, rows[name]) for name, split in splits.items()}
    check_repeated(labels, texts)
    if labels.problem_type == REGRESSION and training.label_smoothing_factor:
        raise RecipeError("--label_smoothing_factor is for classes, not for a regression. Leave it out.")
    # Other columns could have the names of the model's inputs.
    splits = {name: split.select_columns([*text_columns, "label"]) for name, split in encoded.items()}
    splits = with_validation(splits, None if labels.problem_type == REGRESSION else texts)
    splits["train"] = sample(splits["train"], arguments.max_train_samples)
    name = Path(arguments.data).stem + (f"_{arguments.data_config}" if arguments.data_config else "")
    if training.should_log:
        print(f"{name}: {len(splits['train']):,} training examples; text: {', '.join(text_columns)}")
        print(describe_balance(labels, splits["train"]["label"]))
    return ClassificationTask(name, splits, text_columns, labels)


def classification_scores(
    outputs: NDArray[np.float32], labels: NDArray[np.generic], problem_type: str
) -> dict[str, float]:
    """Return accuracy and macro-F1; for several labels per row exact matches, micro- and macro-F1; for a regression
    the correlations.

    Macro-F1 is the mean over the classes among the labels or the predictions; a class that is never right counts 0.

    Args:
        outputs: (rows, classes), or (rows, 1) for a regression.
        labels: The labels, as Labels.encode makes them.
        problem_type: One of PROBLEM_TYPES.
    """
    check_finite(outputs)
    if problem_type == REGRESSION:
        return {name: float(SCORES[name](labels, outputs[:, 0])) for name in ("spearmanr", "pearson")}
    several = problem_type == MULTI
    predicted = (outputs > 0).astype(int) if several else outputs.argmax(-1)
    averages = ("micro", "macro") if several else ("macro",)
    f1 = {f"{kind}_f1": f1_score(labels, predicted, average=kind, zero_division=0.0) for kind in averages}
    return {name: float(value) for name, value in {"accuracy": accuracy_score(labels, predicted), **f1}.items()}


def run_task(
    arguments: ClassificationArguments,
    method: MethodArguments,
    adapter: ClassifierArguments,
    training: RecipeTrainingArguments,
) -> dict[str, Any]:
    """Load the data, train, push if asked to, and return the content of results.json."""
    method.check(adapter, training)
    task = load_task(arguments, training)
    training.output_dir = training.output_dir.replace("{task}", task.name)
    training.choose_by(task.scores)
    push = plan_push(training, arguments.model_name)
    results = train(task, arguments, method, adapter, training)
    push(training.output_dir)
    return results


def train(
    task: ClassificationTask,
    arguments: ClassificationArguments,
    method: MethodArguments,
    adapter: ClassifierArguments,
    training: RecipeTrainingArguments,
) -> dict[str, Any]:
    """Train, keep the best epoch, save the trained weights and results.json, and score the test split.

    A run that is already finished is left as it is. Returns the content of results.json.
    """
    run = Run(training, arguments, method, adapter)
    if run.results is not None:
        return run.results
    set_seed(training.seed)  # before the first weights of head and adapter are drawn
    labels = task.labels
    model, tokenizer = load_classifier(arguments.model_name, labels.names, labels.problem_type, method.base_dtype)
    model = prepare_model(model, method, adapter, training, arguments.max_length, task_type="SEQ_CLS", **task.head)
    task = task.tokenized(tokenizer, arguments.max_length)
    trainer = task.trainer(model, tokenizer, training)
    trainer.train(run.checkpoint)
    trainer.save_trained()  # the best epoch's weights: load_best_model_at_end has restored them
    test = task.score(trainer.predict(task.splits["test"])) if "test" in task.splits else None
    return run.finish(
        trainer,
        example=[task.splits["validation"][0][column] for column in task.text_columns],
        method=method.method,
        task=task.name,
        model=arguments.model_name,
        dataset=describe_data(task.name, arguments.data, arguments.data_config, task.splits),
        labels=labels.names,
        r=adapter.r,
        learning_rate=training.learning_rate,
        test=test,
    )
