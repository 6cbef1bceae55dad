"""Classification of texts or pairs of texts with any labels: the task, its scores, and a run.

text_classification.py and paper_tasks.py train single tasks with `run_task`; stream.py trains several on one model.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.metrics import accuracy_score, f1_score
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import DataCollatorWithPadding, EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.hf_argparser import HfArg

from tasks.glue import SCORES
from tasks.labels import (
    MULTI,
    REGRESSION,
    SHOWN,
    SINGLE,
    Labels,
    balanced_weights,
    check_repeated,
    describe_balance,
    find_label_columns,
    find_labels,
    has_labels,
    label_texts,
    rarest_labels,
    rows_with_label,
)
from training.arguments import ClassifierArguments, RecipeTrainingArguments, TextArguments
from training.data import (
    check_columns,
    describe_data,
    find_text_columns,
    rows_with_text,
    sample,
    tokenize,
    with_validation,
)
from training.errors import RecipeError
from training.evaluation import EVALUATED, find_evaluated, with_evaluated, write_evaluation
from training.methods import MethodArguments, prepare_model
from training.model import (
    describe_head,
    load_classifier,
    load_saved,
    read_results,
    recorded_labels,
    recorded_length,
    recorded_text_columns,
)
from training.results import without_times
from training.runs import Run, plan_push
from training.scores import score_classes
from training.tables import locate, log
from training.trainer import RecipeTrainer, check_finite


PREDICTIONS = "predictions.csv"
_EXAMPLES, _SHOWN_TEXT = 3, 70  # rows of the log, and characters of a text
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
        aliases=["--label_column", "--label_column_name"],
        default=None,
        help="Column of the label, or one 0/1 column for each class; default: detected by name.",
    )
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = HfArg(
        default=None, help="Kind of the labels; default: detected."
    )
    class_weights: Literal["balanced"] | None = HfArg(
        default=None, help="'balanced': give each class the same weight in the loss, however rare it is."
    )

    @property
    def name(self) -> str:
        """The name of the task, which is that of its data."""
        return Path(self.data).resolve().stem + (f"_{self.data_config}" if self.data_config else "")


@dataclass(frozen=True)
class ClassificationTask:
    """A classification task: its splits, with the column `label` for the model, and what the labels mean.

    A test split without labels has no such column. With `weights`, the loss counts each class that much.
    """

    name: str
    splits: dict[str, Dataset]
    text_columns: tuple[str, ...]
    labels: Labels
    weights: tuple[float, ...] | None = None

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
            name: tokenize(split, tokenizer, self.text_columns, max_length, name)
            for name, split in self.splits.items()
        }
        return replace(self, splits=splits)

    def trainer(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, training: RecipeTrainingArguments
    ) -> RecipeTrainer:
        """Return a trainer of the tokenized task."""
        return ClassificationTrainer(
            self.weights,
            model=model,
            args=training,
            train_dataset=self.splits.get("train"),
            eval_dataset=self.splits.get("validation"),
            processing_class=tokenizer,
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=self.score,
            score_classes=partial(score_classes, names=self.labels.names) if len(self.labels.names) > 1 else None,
        )

    def score(self, evaluation: EvalPrediction) -> dict[str, float]:
        """Return the scores as the Trainer calls for them."""
        return classification_scores(evaluation.predictions, evaluation.label_ids, self.labels.problem_type)


class ClassificationTrainer(RecipeTrainer):
    """A trainer whose loss may count some classes more than others.

    Args:
        weights: The weight of each class; None: the model's own loss.
        kwargs: As for a Trainer.
    """

    def __init__(self, weights: Sequence[float] | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weights = None if weights is None else torch.tensor(weights, device=self.args.device)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        """Return the mean of the weighted losses of the rows, or the model's own loss if there are no weights.

        The mean is over the rows, not over their weights, so that a batch of one row has its weight as well.
        """
        if self.weights is None:
            return super().compute_loss(model, inputs, return_outputs)
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        logits = outputs.logits.float()
        if labels.is_floating_point():  # several labels per row: the weight of a class is that of its presence
            loss = binary_cross_entropy_with_logits(logits, labels, pos_weight=self.weights)
        else:
            smoothing = self.args.label_smoothing_factor
            total = cross_entropy(logits, labels, self.weights, reduction="sum", label_smoothing=smoothing)
            loss = total / len(labels)
        return (loss, outputs) if return_outputs else loss


def load_task(arguments: ClassificationArguments, training: RecipeTrainingArguments) -> ClassificationTask:
    """Load a data set and detect its texts and labels; leave out examples without a label, and training examples
    without text.

    Raises:
        RecipeError: If a column is missing, or holds no text or a label that the training examples do not have.
    """
    splits, text_columns, columns = _read_splits(arguments, training)
    labels = find_labels(splits["train"], columns, arguments.problem_type)
    if labels.problem_type == REGRESSION and arguments.class_weights:
        raise RecipeError("--class_weights is for classes, not for a regression. Leave it out.")
    if labels.problem_type != SINGLE and training.label_smoothing_factor:
        raise RecipeError("--label_smoothing_factor is for one class per text, not several or a score. Leave it out.")
    texts = label_texts(splits["train"], columns)
    check_repeated(labels, texts)
    splits = _encode(splits, labels, text_columns)
    if training.do_eval:
        splits = with_validation(splits, rarest_labels(labels, texts))
    splits["train"] = train = sample(splits["train"], arguments.max_train_samples)
    log(f"{arguments.name}: {len(train):,} training examples; {describe_balance(labels, train['label'])}")
    weights = None
    if arguments.class_weights:
        weights = balanced_weights(labels, train["label"])
        shown = (f"{label} {weight:.2f}" for label, weight in zip(labels.names, weights[:SHOWN], strict=False))
        log(f"weights of the classes in the loss: {', '.join(shown)}{', ...' if len(weights) > SHOWN else ''}")
    return ClassificationTask(arguments.name, splits, text_columns, labels, weights)


def load_evaluated(
    arguments: ClassificationArguments,
    training: RecipeTrainingArguments,
    labels: Labels,
    run: Mapping[str, Any],
    recorded: Sequence[str] | None = None,
) -> ClassificationTask:
    """Load the splits on which a saved adapter or model is scored; see with_evaluated.

    Args:
        arguments: The data, and how to read them.
        training: The training arguments.
        labels: The labels of what is scored; the columns are those of the data.
        run: The results of the run that has trained it; empty if they are unknown.
        recorded: The columns of the texts that it was trained on, if they are recorded.

    Raises:
        RecipeError: As for load_task.
        AdapterError: If the data have single texts for an adapter of pairs, or the reverse.
    """
    splits, text_columns, columns = _read_splits(arguments, training, recorded)
    labels = replace(labels, columns=columns)
    texts = label_texts(splits["train"], columns)
    splits = _encode(splits, labels, text_columns)
    splits = with_evaluated(splits, arguments, run, rarest_labels(labels, texts))
    del splits["train"]
    log(f"{arguments.name}: {len(splits['validation']):,} examples to score")
    return ClassificationTask(arguments.name, splits, text_columns, labels)


def _read_splits(
    arguments: ClassificationArguments, training: RecipeTrainingArguments, recorded: Sequence[str] | None = None
) -> tuple[dict[str, Dataset], tuple[str, ...], tuple[str, ...]]:
    """Return the splits without what is left out, and the columns of the texts and of the labels."""
    with training.main_process_first():
        splits = arguments.load_splits()
    text_columns = find_text_columns(splits["train"], arguments.text_columns, recorded)
    columns = find_label_columns(splits["train"], arguments.label_columns)
    clash = [column for column in columns if column in text_columns]
    if clash:
        raise RecipeError(f"--text_columns and --label_columns must differ, got {clash[0]!r} in both. Name another.")
    for name, split in splits.items():
        is_labeled = name != "test" or has_labels(split, columns)
        flags = ("--text_columns", "--label_columns")
        check_columns(split, name, text_columns, columns if is_labeled else (), flags)
        splits[name] = rows_with_label(split, columns, name) if is_labeled else split
    splits["train"] = train = rows_with_text(splits["train"], "train", text_columns)
    log(f"texts: {', '.join(text_columns)}; labels: {', '.join(columns)}; to choose others, give --text_columns or "
        "--label_columns")  # fmt: skip
    few = train.select(range(min(_EXAMPLES, len(train))))
    for row, label in enumerate(label_texts(few, columns)):
        text = " | ".join(few[row][column][:_SHOWN_TEXT] for column in text_columns)
        shown = ", ".join(label) if isinstance(label, tuple) else label
        log(f"  {locate(few, row)}: {textwrap.shorten(text, _SHOWN_TEXT, placeholder='...')!r} -> {shown}")
    return splits, text_columns, columns


def _encode(splits: Mapping[str, Dataset], labels: Labels, text_columns: Sequence[str]) -> dict[str, Dataset]:
    """Return the splits with their texts and, unless they have no labels, the column `label`; other columns could have
    the names of the model's inputs."""
    return {
        name: labels.encode(split, name).select_columns([*text_columns, "label"])
        if has_labels(split, labels.columns)
        else split.select_columns(list(text_columns))
        for name, split in splits.items()
    }


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
    # For several labels, scikit-learn averages over all columns unless the classes that occur are named.
    occur = np.flatnonzero((labels + predicted).any(0)) if several else ()
    named = occur if len(occur) else None
    f1 = {
        f"{kind}_f1": f1_score(labels, predicted, labels=named, average=kind, zero_division=0.0) for kind in averages
    }
    return {name: float(value) for name, value in {"accuracy": accuracy_score(labels, predicted), **f1}.items()}


def run_task(
    arguments: ClassificationArguments,
    method: MethodArguments,
    adapter: ClassifierArguments,
    training: RecipeTrainingArguments,
) -> dict[str, Any]:
    """Load the data, train, push if asked to, and return the content of results.json; or evaluate what is saved, and
    return the content of evaluation.json."""
    training.output_dir = training.output_dir.replace("{task}", arguments.name)
    saved = find_evaluated(arguments, adapter, training)
    if saved is not None:
        return evaluate(saved, arguments, method, training)
    method = method.settled(adapter, training)
    task = load_task(arguments, training)
    training.choose_by(task.scores)
    push = plan_push(training, arguments.model_name, len(task.text_columns))
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
    """Train, keep the best epoch, save the trained weights and results.json, and predict the test split.

    Of a run that is already finished, only predictions that it has not made are, or those for another test file.
    Returns the content of results.json.
    """
    run = Run(training, arguments, method, adapter, files=arguments.find_files(), classes=task.labels.names)
    test_file = arguments.describe_test()
    if run.results is not None:
        is_missing = run.has_other_test_file(test_file) or not Path(training.output_dir, PREDICTIONS).exists()
        if training.do_predict and "test" in task.splits and is_missing:
            saved = "adapter" if method.adds_weights else "model"
            found = evaluate(f"{training.output_dir}/{saved}", arguments, method, training, PREDICTIONS)
            return run.add(test=found["test"], test_file=test_file)
        return run.results
    set_seed(training.seed)  # before the first weights of head and adapter are drawn
    labels = task.labels
    model, tokenizer = load_classifier(arguments.model_name, labels.names, labels.problem_type, method.base_dtype)
    recorded = {"text_columns": task.text_columns, "task_type": "SEQ_CLS", **task.head}
    model = prepare_model(model, method, adapter, training, arguments.max_length, **recorded)
    task = task.tokenized(tokenizer, arguments.max_length)
    trainer = task.trainer(model, tokenizer, training)
    trainer.train(run.checkpoint)
    trainer.save_trained()  # the best epoch's weights: load_best_model_at_end has restored them
    test = predict_test(task, trainer, PREDICTIONS)
    return run.finish(
        trainer,
        example=[task.splits.get("validation", task.splits["train"])[0][column] for column in task.text_columns],
        method=method.method,
        task=task.name,
        model=arguments.model_name,
        dataset=describe_data(task.name, arguments.data, arguments.data_config, task.splits),
        labels=labels.names,
        problem_type=labels.problem_type,
        r=adapter.r,
        learning_rate=training.learning_rate,
        test=test,
        test_file=test_file,
    )


def evaluate(
    saved: str,
    arguments: ClassificationArguments,
    method: MethodArguments,
    training: RecipeTrainingArguments,
    file: str = EVALUATED + PREDICTIONS,
) -> dict[str, Any]:
    """Score a saved adapter or model, write the predictions for the test split to `file` in the output folder, and
    return the content of evaluation.json."""
    model, tokenizer = load_saved(saved, None, arguments.model_name, method.base_dtype)
    names, problem_type = recorded_labels(saved, model)
    labels = Labels((), problem_type or (REGRESSION if len(names) == 1 else SINGLE), names)
    recorded = recorded_text_columns(saved, model)
    task = load_evaluated(arguments, training, labels, read_results(saved), recorded)
    task = task.tokenized(tokenizer, arguments.max_length or recorded_length(saved, model))
    trainer = task.trainer(model, tokenizer, training)
    scores = without_times(trainer.evaluate())
    dataset = describe_data(task.name, arguments.data, arguments.data_config, task.splits)
    test = predict_test(task, trainer, file)
    return write_evaluation(training, task.name, saved, scores, dataset=dataset, labels=names, test=test)


def predict_test(task: ClassificationTask, trainer: RecipeTrainer, file: str) -> dict[str, float] | None:
    """Write the predictions for the test split to `file` in the output folder; return the scores if it has labels."""
    test = task.splits.get("test")
    if test is None or not trainer.args.do_predict:
        return None
    prediction = trainer.predict(test)
    is_labeled = "label" in test.column_names
    if trainer.is_world_process_zero():
        path = Path(trainer.args.output_dir, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pd.DataFrame({name: test[name] for name in task.text_columns})
        if is_labeled:
            table["label"] = task.labels.decode(test["label"])
        table = table.assign(**predicted_columns(prediction.predictions, task.labels))
        table.to_csv(path, index=False)
        log(f"predictions for the test split: {path}")
    return task.score(prediction) if is_labeled else None


def predicted_columns(outputs: NDArray[np.float32], labels: Labels) -> dict[str, list[Any]]:
    """Return the predicted label of each row and, for one class per row, its probability."""
    if labels.problem_type == SINGLE:
        return {"predicted": labels.decode(outputs.argmax(-1)), "probability": softmax(outputs, -1).max(-1).round(4)}
    return {"predicted": labels.decode(outputs[:, 0] if labels.problem_type == REGRESSION else outputs > 0)}
