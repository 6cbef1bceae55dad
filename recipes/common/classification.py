"""Classification of texts or pairs of texts with any labels.

text_classification.py, paper_tasks.py and stream.py train with `run`.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from numpy.typing import NDArray
from scipy.special import expit, softmax
from sklearn.metrics import accuracy_score, f1_score, precision_recall_curve
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import EvalPrediction, PreTrainedModel
from transformers.hf_argparser import HfArg
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import PredictionOutput

from common.arguments import Command, RecipeTrainingArguments, TextArguments
from common.balance import (
    balanced_weights,
    check_classes_recur,
    describe_balance,
    describe_constant,
    rarest_classes,
)
from common.data import check_columns, find_text_columns, locate, rows_of, rows_with_text
from common.edge import RecipeError, log
from common.labels import (
    MULTI,
    REGRESSION,
    SHOWN,
    SINGLE,
    Labels,
    classes_of,
    find_label_columns,
    find_labels,
    has_labels,
    read_labels,
    rows_with_label,
    split_labels,
)
from common.model import Saved, active_config
from common.reading import files_of, load_data
from common.run import WHERE
from common.scores import SCORES, ClassScores, ValueScores, check_finite
from common.splits import divide, report_repeated
from common.task import Task, run_task
from common.trainer import RecipeTrainer


_FEWEST = 5  # examples with and without a class, from which its threshold is chosen
_EXAMPLES, _SHOWN_TEXT = 3, 70  # rows of the log, and characters of a text
# The scores of an evaluation; the first chooses the best epoch.
SCORES_OF = {
    SINGLE: ("accuracy", "macro_f1", "loss"),
    MULTI: ("macro_f1", "micro_f1", "accuracy", "loss"),
    REGRESSION: (
        "r2",
        "spearmanr",
        "pearson",
        "mean_absolute_error",
        "root_mean_squared_error",
        "loss",
    ),
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
    problem_type: (
        Literal["single_label_classification", "multi_label_classification", "regression"] | None
    ) = HfArg(default=None, help="Kind of the labels; default: detected.")
    label_separator: str | None = HfArg(
        default=None, help="What separates several labels of one text in the column, such as '|'."
    )
    keep_repeated: bool = HfArg(
        default=False, help="Keep validation examples whose text is a training example as well."
    )
    class_weights: Literal["balanced"] | None = HfArg(
        default=None,
        help="'balanced': give each class the same weight in the loss, however rare it is.",
    )


def last_linear(model: nn.Module) -> nn.Linear:
    """Return the layer that gives a classifier's output: the last linear one that is trained."""
    trained = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad:
            trained.append(module)
    return trained[-1]


class ClassificationTrainer(RecipeTrainer):
    """A trainer whose loss may weight classes, or standardize the targets of a regression.

    With `scale`, the targets' mean and standard deviation, the model learns standardized targets,
    whatever their unit. Its head gives values in the unit, also when it is saved.
    """

    def __init__(
        self,
        weights: Sequence[float] | None = None,
        scale: tuple[float, float] | None = None,
        is_multi: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._is_multi = is_multi
        self.weights: torch.Tensor | None = None
        if weights is not None:
            self.weights = torch.tensor(weights, device=self.args.device)
        self.scale = scale
        if scale is not None:
            mean, deviation = scale
            self._output = last_linear(self.model)
            self._hook = self._output.register_forward_hook(
                lambda _, args, output: output.float() * deviation + mean
            )

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        """Return the loss of standardized targets or weighted classes, or the model's own."""
        if self.weights is None:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            if self.scale is not None:
                _, deviation = self.scale
                loss = loss / deviation**2
        else:
            labels = inputs["labels"]
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
            smoothing = self.args.label_smoothing_factor
            loss = weighted_loss(outputs.logits.float(), labels, self.weights, smoothing)
        return (loss, outputs) if return_outputs else loss

    def save_trained(self) -> None:
        """Save the weights of the kept epoch and, for several classes per text, thresholds."""
        if self.scale is not None:
            self._move_scale_into_head()
        if self._is_multi and self.eval_dataset is not None:
            self._record_thresholds()
        super().save_trained()

    def _move_scale_into_head(self) -> None:
        """Let the weights themselves give values in the unit, without the hook."""
        assert self.scale is not None
        mean, deviation = self.scale
        self.scale = None
        self._hook.remove()
        with torch.no_grad():
            self._output.weight.mul_(deviation)
            self._output.bias.mul_(deviation).add_(mean)

    def _record_thresholds(self) -> None:
        """Choose the thresholds of the classes on validation, and record them in an adapter."""
        config = active_config(self.model)
        if config is None or config.record is None:
            return
        output = self.predict(self.eval_dataset, metric_key_prefix="kept")
        thresholds = choose_thresholds(expit(output.predictions), output.label_ids)
        config.record.thresholds = thresholds
        log(f"thresholds of the classes: {', '.join(map(str, thresholds[:SHOWN]))}")


def weighted_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """Return the mean of the weighted losses of the rows, for `logits` of (rows, classes).

    The labels are class numbers, (rows), or a 0.0 or 1.0 for each class, (rows, classes); the
    weight of a class is then that of its presence. The mean is over the rows, not over their
    weights, so that a batch of one row has its weight as well.
    """
    if labels.is_floating_point():
        return binary_cross_entropy_with_logits(logits, labels, pos_weight=weights)
    total = cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=smoothing)
    return total / len(labels)


@dataclass(kw_only=True)
class ClassificationTask(Task):
    """A classification task. Its splits have the column `label`, unless a test split has no labels.

    With `weights`, the loss counts each class that much. With `scale`, the mean and the standard
    deviation of the scores, the model learns standardized scores.
    """

    kind: Labels
    weights: tuple[float, ...] | None = None
    scale: tuple[float, float] | None = None
    trainer_class = ClassificationTrainer

    def __post_init__(self) -> None:
        self.labels, self.problem_type = self.kind.names, self.kind.problem_type

    @property
    def scores(self) -> tuple[str, ...]:
        return SCORES_OF[self.kind.problem_type]

    def score(self, evaluation: EvalPrediction) -> dict[str, float]:
        return classification_scores(
            evaluation.predictions, evaluation.label_ids, self.kind.problem_type
        )

    def describe(
        self, outputs: NDArray[np.float32], labels: NDArray[Any]
    ) -> ClassScores | ValueScores:
        """Return what a model has predicted; say so if it predicts a single class."""
        classes = super().describe(outputs, labels)
        if isinstance(classes, ClassScores):
            message = describe_constant(classes)
            if message is not None:
                log(message)
        return classes

    def trainer_options(
        self, model: PreTrainedModel, training: RecipeTrainingArguments
    ) -> dict[str, Any]:
        scale = self.scale
        if scale is not None and not _can_scale(model, training):
            scale = None
        is_multi = self.kind.problem_type == MULTI
        return {"weights": self.weights, "scale": scale, "is_multi": is_multi}

    def predicted(self, prediction: PredictionOutput) -> pd.DataFrame:
        """Return the texts of the test split, their labels if they have some, and the predictions.

        One class per text has its probability.
        """
        test, outputs = self.data["test"], prediction.predictions
        table = pd.DataFrame({name: test[name] for name in self.text_columns})
        if prediction.label_ids is not None:
            table["label"] = self.kind.decode(test["label"])
        if self.kind.problem_type == SINGLE:
            table["predicted"] = self.kind.decode(outputs.argmax(-1))
            return table.assign(probability=softmax(outputs, -1).max(-1).round(4))
        if self.kind.problem_type == REGRESSION:
            return table.assign(predicted=self.kind.decode(outputs[:, 0]))
        return table.assign(predicted=self.kind.decode(outputs > 0))


def _can_scale(model: PreTrainedModel, training: RecipeTrainingArguments) -> bool:
    """Return whether the head of a regression can give values in any unit."""
    if is_deepspeed_zero3_enabled() or training.fsdp:
        return False  # a sharded head cannot be changed here
    output = last_linear(model)
    # Without a bias, it cannot give values around another mean.
    return output.out_features == 1 and output.bias is not None


def run(command: Command) -> dict[str, Any]:
    """Train on the data of the command line, or score what is saved: see common.task.run_task."""
    command = command.for_task(command.arguments.name)
    arguments, training = command.arguments, command.training

    return run_task(
        ClassificationTask,
        lambda saved: load_task(arguments, training, saved),
        command,
        files_of(arguments),
    )


def load_task(
    arguments: ClassificationArguments,
    training: RecipeTrainingArguments,
    saved: Saved | None = None,
) -> ClassificationTask:
    """Load a data set and detect its texts and labels, or take those of a saved adapter or model.

    Examples without a label and training examples without text are left out.
    """
    if saved:
        arguments = _with_recorded(arguments, saved)
    splits = load_data(arguments, training)
    columns = _find_columns(splits["train"], arguments, saved and saved.recorded("text_columns"))
    splits = _rows_to_use(splits, columns, arguments.label_separator)
    _show_examples(splits["train"], columns)
    row_labels = read_labels(splits["train"], columns.of_labels)
    if saved:
        labels = _labels_of(saved, columns)
    else:
        labels = find_labels(splits["train"], columns.of_labels, arguments.problem_type)
        if labels.problem_type == REGRESSION and arguments.class_weights:
            raise RecipeError("--class_weights is for classes, not for a regression. Leave it out.")
        check_classes_recur(labels, row_labels)
        report_repeated(splits["train"], columns.of_texts, row_labels)
    splits = divide(
        _encode(splits, labels, columns.of_texts),
        arguments,
        training,
        saved and saved.results,
        labels=rarest_classes(labels, row_labels),
        text_columns=columns.of_texts,
        keep_repeated=arguments.keep_repeated,
    )
    task = ClassificationTask(
        name=arguments.name, text_columns=columns.of_texts, splits=splits, kind=labels
    )
    if not saved:
        _prepare_loss(task, arguments)
    return task


@dataclass(frozen=True)
class _Columns:
    of_texts: tuple[str, ...]
    of_labels: tuple[str, ...]


def _with_recorded(arguments: ClassificationArguments, saved: Saved) -> ClassificationArguments:
    """Return the arguments with those of the saved run, where the command line gives no others."""
    recorded = saved.results.get("arguments", {})
    return replace(
        arguments,
        label_separator=arguments.label_separator or recorded.get("label_separator"),
        label_columns=arguments.label_columns or recorded.get("label_columns"),
    )


def _labels_of(saved: Saved, columns: _Columns) -> Labels:
    """Return what a saved adapter or model predicts."""
    default = REGRESSION if len(saved.labels) == 1 else SINGLE
    return Labels(columns.of_labels, saved.problem_type or default, saved.labels)


def _find_columns(
    train: Dataset, arguments: ClassificationArguments, recorded: Sequence[str] | None
) -> _Columns:
    """Return the columns of the texts and of the labels."""
    text_columns = find_text_columns(train, arguments.text_columns, recorded)
    label_columns = find_label_columns(train, arguments.label_columns, text_columns)
    for column in label_columns:
        if column in text_columns:
            raise RecipeError(
                f"--text_columns and --label_columns must differ, got {column!r} in both. Name "
                "another."
            )
    return _Columns(text_columns, label_columns)


def _rows_to_use(
    splits: Mapping[str, Dataset], columns: _Columns, separator: str | None
) -> dict[str, Dataset]:
    """Return the rows that have a label and, to train on, text; check the columns of all splits."""
    usable = {}
    for name, split in splits.items():
        if separator and len(columns.of_labels) == 1 and columns.of_labels[0] in split.column_names:
            split = split_labels(split, columns.of_labels[0], separator)
        is_labeled = name != "test" or has_labels(split, columns.of_labels)
        if is_labeled:
            check_columns(split, name, columns.of_texts, columns.of_labels)
            split = rows_with_label(split, columns.of_labels, name)
        else:
            check_columns(split, name, columns.of_texts)
        usable[name] = split
    usable["train"] = rows_with_text(usable["train"], "train", columns.of_texts)
    return usable


def _show_examples(train: Dataset, columns: _Columns) -> None:
    """Log the columns and a few rows, so that a wrong guess is seen."""
    log(
        f"texts: {', '.join(columns.of_texts)}; labels: {', '.join(columns.of_labels)}; to choose "
        "others, give --text_columns or --label_columns"
    )
    examples = train.select(range(min(_EXAMPLES, len(train))))
    texts = rows_of(examples, columns.of_texts)
    for row, label in enumerate(read_labels(examples, columns.of_labels)):
        text = " | ".join(part[:_SHOWN_TEXT] for part in texts[row])
        text = textwrap.shorten(text, _SHOWN_TEXT, placeholder="...")
        log(f"  {locate(examples, row)}: {text!r} -> {', '.join(classes_of(label))}")


def _encode(
    splits: Mapping[str, Dataset], labels: Labels, text_columns: Sequence[str]
) -> dict[str, Dataset]:
    """Return the splits with their texts, encoded labels and where each row is in the user's file.

    Other columns are left out: they could have the names of the model's inputs. A test split
    without labels has its texts only.
    """
    encoded = {}
    for name, split in splits.items():
        used = [*text_columns]
        if has_labels(split, labels.columns):
            split = labels.encode(split, name)
            used += ["label", WHERE]
        encoded[name] = split.select_columns(used)
    return encoded


def _prepare_loss(task: ClassificationTask, arguments: ClassificationArguments) -> None:
    """Log how often the classes occur; set what the loss needs to know of the training examples."""
    encoded = task.splits["train"]["label"]
    balance = describe_balance(task.kind, encoded)
    log(f"{task.name}: {len(encoded):,} training examples; {balance}")
    if task.problem_type == REGRESSION:
        targets = np.asarray(encoded, dtype=float)
        task.scale = (float(targets.mean()), float(targets.std()) or 1.0)
    if arguments.class_weights:
        task.weights = balanced_weights(task.kind, encoded)
        listed = []
        for name, weight in list(zip(task.labels, task.weights, strict=True))[:SHOWN]:
            listed.append(f"{name} {weight:.2f}")
        more = ", ..." * (len(task.labels) > SHOWN)
        log(f"weights of the classes in the loss: {', '.join(listed)}{more}")


def classification_scores(
    outputs: NDArray[np.float32], labels: NDArray[np.generic], problem_type: str
) -> dict[str, float]:
    """Return the scores of `outputs` of (rows, classes), or of (rows, 1) for a regression.

    Macro-F1 is over the classes among the labels or the predictions. With several classes per row,
    the accuracy is the share of rows of which all classes are right.
    """
    check_finite(outputs)
    if problem_type == REGRESSION:
        *names, _ = SCORES_OF[REGRESSION]  # the loss is the Trainer's
        return {name: float(SCORES[name](labels, outputs[:, 0])) for name in names}
    if problem_type == SINGLE:
        predicted = outputs.argmax(-1)
        averages, occurring = ["macro"], None
    else:
        predicted = (outputs > 0).astype(int)
        averages = ["micro", "macro"]
        # scikit-learn would average over all columns, also of classes that do not occur.
        occurring = np.flatnonzero((labels + predicted).any(0))
        if not len(occurring):
            occurring = None
    scores = {"accuracy": float(accuracy_score(labels, predicted))}
    for average in averages:
        scores[f"{average}_f1"] = float(
            f1_score(labels, predicted, labels=occurring, average=average, zero_division=0.0)
        )
    return scores


def choose_thresholds(
    probabilities: NDArray[np.float64], labels: NDArray[np.float64]
) -> list[float]:
    """Return for each class the threshold with the best F1, or 0.5 if it has few examples.

    The arrays are (examples, classes).
    """
    return [_choose_threshold(*columns) for columns in zip(probabilities.T, labels.T, strict=True)]


def _choose_threshold(scores: NDArray[np.float64], is_class: NDArray[np.float64]) -> float:
    """Return the threshold of one class, for its probability in each example."""
    if not _FEWEST <= is_class.sum() <= len(is_class) - _FEWEST:
        return 0.5
    precision, recall, thresholds = precision_recall_curve(is_class, scores)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    best = int(f1[:-1].argmax())
    # In the middle of the gap below the least score that is still given.
    below = thresholds[best - 1] if best else 0.0
    return round(float(thresholds[best] + below) / 2, 4)
