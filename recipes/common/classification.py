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
from common.data import (
    WHERE,
    check_columns,
    divide,
    files_of,
    find_text_columns,
    load_data,
    locate,
    report_repeated,
    rows_with_text,
)
from common.edge import RecipeError, log
from common.labels import (
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
    split_labels,
)
from common.model import Saved, active_config
from common.scores import SCORES, check_finite
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
    *_, last = (
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    )
    return last


class ClassificationTrainer(RecipeTrainer):
    """A trainer whose loss may count some classes more than others, or standardize the targets of a
    regression.

    With `scale`, the targets' mean and standard deviation, the model learns standardized targets,
    whatever their unit; its head gives values in the unit, also when it is saved.
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
        self.weights = None if weights is None else torch.tensor(weights, device=self.args.device)
        self.scale = scale
        if scale is not None:
            self._output, (mean, deviation) = last_linear(self.model), scale
            self._hook = self._output.register_forward_hook(
                lambda _, args, out: out.float() * deviation + mean
            )

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        """Return the mean of the weighted losses of the rows, or the model's own loss if there are
        no weights.

        The mean is over the rows, not over their weights, so that a batch of one row has its weight
        as well.
        """
        if self.weights is None:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            loss = loss if self.scale is None else loss / self.scale[1] ** 2
            return (loss, outputs) if return_outputs else loss
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        logits = outputs.logits.float()
        if (
            labels.is_floating_point()
        ):  # several labels per row: the weight of a class is that of its presence
            loss = binary_cross_entropy_with_logits(logits, labels, pos_weight=self.weights)
        else:
            smoothing = self.args.label_smoothing_factor
            total = cross_entropy(
                logits, labels, self.weights, reduction="sum", label_smoothing=smoothing
            )
            loss = total / len(labels)
        return (loss, outputs) if return_outputs else loss

    def save_trained(self) -> None:
        """Save the weights of the kept epoch and, for several labels per text, thresholds chosen on
        validation.
        """
        if self.scale is not None:  # from now on, the weights themselves give values in the unit
            (mean, deviation), self.scale = self.scale, None
            self._hook.remove()
            with torch.no_grad():
                self._output.weight.mul_(deviation)
                self._output.bias.mul_(deviation).add_(mean)
        config = active_config(self.model)
        if (
            self._is_multi
            and config is not None
            and config.record is not None
            and self.eval_dataset is not None
        ):
            output = self.predict(self.eval_dataset, metric_key_prefix="kept")
            config.record.thresholds = choose_thresholds(
                expit(output.predictions), output.label_ids
            )
            log(
                f"thresholds of the classes: {', '.join(map(str, config.record.thresholds[:SHOWN]))}"
            )
        super().save_trained()


@dataclass(kw_only=True)
class ClassificationTask(Task):
    """A classification task: its splits have the column `label` for the model, but for a test split
        without labels.

    With `weights`, the loss counts each class that much; with `scale`, the model learns
    standardized scores.
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

    def trainer_options(
        self, model: PreTrainedModel, training: RecipeTrainingArguments
    ) -> dict[str, Any]:
        scale = self.scale
        if scale and (is_deepspeed_zero3_enabled() or training.fsdp):
            scale = None  # a sharded head cannot be changed here
        elif scale:
            output = last_linear(model)
            # Without a bias, it cannot give values around another mean.
            scale = scale if output.out_features == 1 and output.bias is not None else None
        return {
            "weights": self.weights,
            "scale": scale,
            "is_multi": self.kind.problem_type == MULTI,
        }

    def predicted(self, prediction: PredictionOutput) -> pd.DataFrame:
        """Return the texts of the test split, their labels if they have some, and what is
        predicted, for one class per text with its probability.
        """
        test, outputs = self.data["test"], prediction.predictions
        table = pd.DataFrame({name: test[name] for name in self.text_columns})
        if prediction.label_ids is not None:
            table["label"] = self.kind.decode(test["label"])
        if self.kind.problem_type == SINGLE:
            table["predicted"] = self.kind.decode(outputs.argmax(-1))
            return table.assign(probability=softmax(outputs, -1).max(-1).round(4))
        values = outputs[:, 0] if self.kind.problem_type == REGRESSION else outputs > 0
        return table.assign(predicted=self.kind.decode(values))


def load_task(
    arguments: ClassificationArguments,
    training: RecipeTrainingArguments,
    saved: Saved | None = None,
) -> ClassificationTask:
    """Load a data set and detect its texts and labels, or take those of a saved adapter or model;
    leave out examples without a label, and training examples without text.
    """
    if saved:
        before = saved.results.get("arguments", {})
        separator = arguments.label_separator or before.get("label_separator")
        columns = arguments.label_columns or before.get("label_columns")
        arguments = replace(arguments, label_separator=separator, label_columns=columns)
    splits, text_columns, columns = _read_splits(
        arguments, training, saved and saved.recorded("text_columns")
    )
    texts = label_texts(splits["train"], columns)
    if saved:
        problem_type = saved.problem_type or (REGRESSION if len(saved.labels) == 1 else SINGLE)
        labels = Labels(columns, problem_type, saved.labels)
    else:
        labels = find_labels(splits["train"], columns, arguments.problem_type)
        if labels.problem_type == REGRESSION and arguments.class_weights:
            raise RecipeError("--class_weights is for classes, not for a regression. Leave it out.")
        check_repeated(labels, texts)
        report_repeated(splits["train"], text_columns, texts)
    splits, rarest = _encode(splits, labels, text_columns), rarest_labels(labels, texts)
    splits = divide(splits, arguments, training, saved and saved.results, rarest, text_columns)
    task = ClassificationTask(
        name=arguments.name, text_columns=text_columns, splits=splits, kind=labels
    )
    if not saved:
        classes = splits["train"]["label"]
        log(f"{task.name}: {len(classes):,} training examples; {describe_balance(labels, classes)}")
        if labels.problem_type == REGRESSION:
            targets = np.asarray(classes, dtype=float)
            task.scale = (float(targets.mean()), float(targets.std()) or 1.0)
        if arguments.class_weights:
            task.weights = balanced_weights(labels, classes)
            shown = [
                f"{name} {weight:.2f}"
                for name, weight in zip(labels.names, task.weights, strict=True)
            ]
            log(
                f"weights of the classes in the loss: {', '.join(shown[:SHOWN])}{', ...' * (len(shown) > SHOWN)}"
            )
    return task


def _read_splits(
    arguments: ClassificationArguments,
    training: RecipeTrainingArguments,
    recorded: Sequence[str] | None = None,
) -> tuple[dict[str, Dataset], tuple[str, ...], tuple[str, ...]]:
    """Return the splits without what is left out, and the columns of the texts and of the labels."""
    splits = load_data(arguments, training)
    text_columns = find_text_columns(splits["train"], arguments.text_columns, recorded)
    columns = find_label_columns(splits["train"], arguments.label_columns, text_columns)
    if clash := [column for column in columns if column in text_columns]:
        raise RecipeError(
            f"--text_columns and --label_columns must differ, got {clash[0]!r} in both. Name another."
        )
    if arguments.label_separator and len(columns) == 1:
        for name in [name for name, split in splits.items() if columns[0] in split.column_names]:
            splits[name] = split_labels(splits[name], columns[0], arguments.label_separator)
    for name, split in splits.items():
        is_labeled = name != "test" or has_labels(split, columns)
        check_columns(split, name, text_columns, columns if is_labeled else ())
        splits[name] = rows_with_label(split, columns, name) if is_labeled else split
    splits["train"] = data = rows_with_text(splits["train"], "train", text_columns)
    log(f"texts: {', '.join(text_columns)}; labels: {', '.join(columns)}; to choose others, give --text_columns or "
        "--label_columns")  # fmt: skip
    few = data.select(range(min(_EXAMPLES, len(data))))
    for row, label in enumerate(label_texts(few, columns)):
        text = " | ".join(few[row][column][:_SHOWN_TEXT] for column in text_columns)
        shown = ", ".join(label) if isinstance(label, tuple) else label
        log(
            f"  {locate(few, row)}: {textwrap.shorten(text, _SHOWN_TEXT, placeholder='...')!r} -> {shown}"
        )
    return splits, text_columns, columns


def _encode(
    splits: Mapping[str, Dataset], labels: Labels, text_columns: Sequence[str]
) -> dict[str, Dataset]:
    """Return the splits with their texts and, unless they have no labels, the column `label` and
    where each row is in the user's file; other columns could have the names of the model's inputs.
    """
    return {
        name: labels.encode(split, name).select_columns([*text_columns, "label", WHERE])
        if has_labels(split, labels.columns)
        else split.select_columns(list(text_columns))
        for name, split in splits.items()
    }


def classification_scores(
    outputs: NDArray[np.float32], labels: NDArray[np.generic], problem_type: str
) -> dict[str, float]:
    """Return accuracy and macro-F1; for several labels per row exact matches, micro- and macro-F1;
    for a regression the correlations and errors. Macro-F1 is over the classes among the labels or
    the predictions.
    """
    check_finite(outputs)
    if problem_type == REGRESSION:
        return {
            name: float(SCORES[name](labels, outputs[:, 0])) for name in SCORES_OF[REGRESSION][:-1]
        }
    several = problem_type == MULTI
    predicted = (outputs > 0).astype(int) if several else outputs.argmax(-1)
    averages = ("micro", "macro") if several else ("macro",)
    # For several labels, scikit-learn averages over all columns unless the classes that occur are
    # named.
    occur = np.flatnonzero((labels + predicted).any(0)) if several else ()
    named = occur if len(occur) else None
    f1 = {
        f"{kind}_f1": f1_score(labels, predicted, labels=named, average=kind, zero_division=0.0)
        for kind in averages
    }
    return {
        name: float(value)
        for name, value in {"accuracy": accuracy_score(labels, predicted), **f1}.items()
    }


def run(command: Command) -> dict[str, Any]:
    """Train on the data of the command line, or score what is saved, as common.task.run_task does."""
    command = command.for_task(command.arguments.name)
    arguments, training = command.arguments, command.training

    return run_task(
        ClassificationTask,
        lambda saved: load_task(arguments, training, saved),
        command,
        files_of(arguments),
    )


def choose_thresholds(
    probabilities: NDArray[np.float64], labels: NDArray[np.float64]
) -> list[float]:
    """Return for each class the threshold with the best F1, or 0.5 if it has few examples; arrays
    are (examples, classes).
    """
    chosen = []
    for scores, expected in zip(probabilities.T, labels.T, strict=True):
        if not _FEWEST <= expected.sum() <= len(expected) - _FEWEST:
            chosen.append(0.5)
            continue
        precision, recall, thresholds = precision_recall_curve(expected, scores)
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
        best = int(f1[:-1].argmax())
        # In the middle of the gap below the least score that is still given.
        below = thresholds[best - 1] if best else 0.0
        chosen.append(round(float(thresholds[best] + below) / 2, 4))
    return chosen
