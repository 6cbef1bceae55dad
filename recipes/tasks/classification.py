"""Classification of texts or pairs of texts with any labels.

text_classification.py, paper_tasks.py and stream.py train with `run`.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
from datasets import Dataset, concatenate_datasets
from numpy.typing import NDArray
from scipy.special import logit, softmax
from sklearn.metrics import accuracy_score, f1_score
from transformers import EvalPrediction, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import PredictionOutput

from data.balance import (
    balanced_weights,
    check_classes_recur,
    describe_balance,
    note_missing_classes,
    rarest_classes,
)
from data.data import (
    check_columns,
    find_text_columns,
    lines_of,
    locate,
    rows_of,
    rows_with_text,
    with_strings,
)
from data.label_column import (
    Label,
    LabelColumn,
    classes_of,
    declared_classes,
    find_label_column,
    find_label_columns,
)
from data.labels import MULTI, REGRESSION, SHOWN, SINGLE, Labels, find_labels
from data.reading import files_of, load_data
from data.splits import divide, report_repeated
from run.arguments import LabelArguments, TextArguments
from run.command import Command
from run.edge import RecipeError, log
from run.run import WHERE
from run.run_task import run_task
from run.saved import Saved
from run.training_arguments import RecipeTrainingArguments, flag
from tasks.classification_trainer import ClassificationTrainer, last_linear
from tasks.frozen_encoder import FrozenEncoder, make_classifier
from tasks.label_issues import (
    Items,
    LabeledTask,
    check_labels,
)
from tasks.scores import SCORES, check_finite, find_intervals


_EXAMPLES, _SHOWN_TEXT = 3, 70  # rows of the log, and characters of a text
# Of fewer training examples, a second loss with this weight compares the texts.
_FEW, _WEIGHT_OF_FEW = 400, 5.0
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


@dataclass(frozen=True, kw_only=True)
class ClassificationArguments(LabelArguments, TextArguments):
    """What to learn, and from which columns."""

    _argument_group_name = "task"

    label_columns: list[str] | None = flag(
        aliases=["--label_column", "--label_column_name"],
        default=None,
        help="Column of the label, one for each task, or one 0/1 column for each class; default: "
        "detected by name.",
    )
    tasks_of_columns: bool | None = flag(
        default=None,
        help="Of several --label_columns: train a task for each, with an adapter of its own; "
        "default: if they hold classes, and not 0 and 1.",
    )
    problem_type: (
        Literal["single_label_classification", "multi_label_classification", "regression"] | None
    ) = flag(default=None, help="Kind of the labels; default: detected.")
    label_separator: str | None = flag(
        default=None, help="What separates several labels of one text in the column, such as '|'."
    )
    class_names: list[str] | None = flag(
        default=None, help="Names of the classes, if each label is a list of 0 and 1."
    )
    merge_labels: bool = flag(
        default=False, help="Take labels that differ in case and blanks only for one class."
    )
    keep_repeated: bool = flag(
        default=False, help="Keep validation examples whose text is a training example as well."
    )
    baseline: bool = flag(
        default=True,
        help="Also score a logistic regression on the frozen encoder, of up to 10,000 rows.",
    )
    class_weights: Literal["balanced"] | None = flag(
        default=None,
        help="'balanced': give each class the same weight in the loss, however rare it is.",
    )
    contrastive_weight: float | None = flag(
        default=None,
        help="Weight of a second loss, which draws texts of one class together and those of others "
        f"apart; default: {_WEIGHT_OF_FEW:g} with fewer than {_FEW} training examples, else 0.",
    )


@dataclass(kw_only=True)
class ClassificationTask(LabeledTask):
    """A classification task. Its splits have the column `label`, unless a test split has no labels.

    With `weights`, the loss counts each class that much. `contrastive_weight` is that of a second
    loss, for one class per text. With `scale`, the mean and the standard deviation of the scores,
    the model learns standardized scores. `frozen_states` are those of the frozen encoder, by text:
    tasks on one table share them.
    """

    kind: Labels
    frozen_states: dict[tuple[Any, ...], NDArray[np.float32]] = field(default_factory=dict)
    weights: tuple[float, ...] | None = None
    scale: tuple[float, float] | None = None
    contrastive_weight: float = 0.0
    trainer_class = ClassificationTrainer

    def __post_init__(self) -> None:
        self.labels, self.problem_type = self.kind.names, self.kind.problem_type

    @property
    def scores(self) -> tuple[str, ...]:
        return SCORES_OF[self.kind.problem_type]

    def score(self, evaluation: EvalPrediction) -> dict[str, float]:
        outputs, labels = np.asarray(evaluation.predictions), np.asarray(evaluation.label_ids)
        return classification_scores(outputs, labels, self.kind.problem_type)

    def describe_labels(self) -> dict[str, Any]:
        return {**super().describe_labels(), "label_columns": self.kind.columns}

    def items_to_check(self, examples: Dataset, command: Command) -> Items:
        """Return the texts with their classes."""
        states = self._read_states(examples, command)
        texts = [" | ".join(parts) for parts in rows_of(examples, self.text_columns)]
        targets = np.array(list(examples["label"]), dtype=np.int64)
        return Items(states, targets, pd.DataFrame({"row": lines_of(examples), "text": texts}))

    def _read_states(self, examples: Dataset, command: Command) -> NDArray[np.float32]:
        """Return the mean state of each text's tokens in the frozen encoder, `(rows, width)`."""
        texts = rows_of(examples, self.text_columns)
        new = [row for row, text in enumerate(texts) if text not in self.frozen_states]
        if new:
            encoder, max_length = FrozenEncoder.load(command), command.arguments.max_length
            tokens = self.encode(examples.select(new), "", encoder.tokenizer, max_length)
            for row, state in zip(new, encoder.read_texts(tokens), strict=True):
                self.frozen_states[texts[row]] = state
        return np.stack([self.frozen_states[text] for text in texts])

    def score_baseline(self, command: Command) -> dict[str, Any]:
        """Return the scores of a logistic regression on the frozen encoder, on validation."""
        if not command.arguments.baseline:
            return {}
        train, validation = self.splits["train"], self.splits["validation"]
        examples = concatenate_datasets([train, validation])
        states = self._read_states(examples, command)
        targets = np.array(list(examples["label"]), dtype=np.int64)
        classifier = make_classifier().fit(states[: len(train)], targets[: len(train)])
        probabilities = classifier.predict_proba(states[len(train) :])
        outputs = np.full((len(validation), len(self.labels)), -np.inf)
        outputs[:, classifier.classes_] = logit(probabilities)
        outputs = np.clip(outputs, -1e3, 1e3)
        expected = targets[len(train) :]
        score = partial(classification_scores, problem_type=str(self.problem_type))
        baseline = {
            "method": "logistic regression on the frozen encoder",
            "scores": score(outputs, expected),
            "intervals": find_intervals(score, outputs, expected),
        }
        return {"baseline": baseline}

    def trainer_options(
        self, model: PreTrainedModel, training: RecipeTrainingArguments
    ) -> dict[str, Any]:
        scale, is_sharded = self.scale, is_deepspeed_zero3_enabled() or training.fsdp
        if scale is not None:
            output = last_linear(model)
            # A sharded head cannot be changed here. Without a bias, it cannot give values around
            # another mean.
            if is_sharded or output.out_features != 1 or output.bias is None:
                scale = None
        is_multi = self.kind.problem_type == MULTI
        return {
            "weights": self.weights,
            "scale": scale,
            "is_multi": is_multi,
            "contrastive_weight": self.contrastive_weight,
        }

    def predicted(self, prediction: PredictionOutput) -> pd.DataFrame:
        """Return the texts of the test split, their labels if they have some, and the predictions.

        One class per text has its probability.
        """
        test, outputs = self.data["test"], np.asarray(prediction.predictions)
        table = pd.DataFrame({"row": lines_of(test)})
        for name in self.text_columns:
            table[name] = test[name]
        if prediction.label_ids is not None:
            table["label"] = self.kind.decode(test["label"])
        if self.kind.problem_type == SINGLE:
            table["predicted"] = self.kind.decode(outputs.argmax(-1))
            probabilities = softmax(outputs.astype(np.float64), -1).max(-1)
            return table.assign(probability=probabilities.round(3))
        if self.kind.problem_type == REGRESSION:
            return table.assign(predicted=self.kind.decode(outputs[:, 0]))
        return table.assign(predicted=self.kind.decode(outputs > 0))


def run(command: Command, load: Callable[..., LabeledTask] | None = None) -> dict[str, Any]:
    """Train on the data of the command line, or score what is saved: see run/run_task.py.

    `load` returns the task, as `load_task` does. Return nothing if labels are only checked.
    """
    command = command.for_task(command.arguments.name)
    arguments = command.arguments
    load = load or partial(load_task, arguments, command.training)
    load_checked = check_labels(load, command)
    if load_checked is None:
        return {}
    return run_task(ClassificationTask, load_checked, command, files_of(arguments))


def load_task(
    arguments: ClassificationArguments,
    training: RecipeTrainingArguments,
    saved: Saved | None = None,
    splits: Mapping[str, Dataset] | None = None,
) -> ClassificationTask:
    """Load a data set and detect its texts and labels, or take those of a saved adapter or model.

    `splits` are the data, if they have been read. Examples without a label and training examples
    without text are left out.
    """
    if saved:  # where the command line gives no others
        recorded_arguments = saved.results.get("arguments", {})
        arguments = replace(
            arguments,
            label_columns=arguments.label_columns or saved.results.get("label_columns"),
            label_separator=arguments.label_separator or recorded_arguments.get("label_separator"),
        )
    splits = dict(splits or load_data(arguments, training))
    recorded = saved.recorded("text_columns") if saved else None
    text_columns = find_text_columns(
        splits["train"], arguments.text_columns, recorded, arguments.label_columns
    )
    column = _find_label_column(splits["train"], text_columns, arguments, saved)
    labels: dict[str, list[Label]] = {}
    for name, split in splits.items():
        title = arguments.title_of(name)
        is_labeled = name != "test" or column.is_in(split)
        split = with_strings(split, text_columns)
        check_columns(split, title, text_columns, column.columns if is_labeled else ())
        if name == "train":
            split = rows_with_text(split, title, text_columns)
        if is_labeled:
            split, labels[name] = column.read_rows(split, title)
        else:
            columns = " and ".join(map(repr, column.columns))
            log(f"test: predicted and not scored, as it has no label in {columns}")
        splits[name] = split
    _show_examples(splits["train"], labels["train"], text_columns, column.columns)
    kind = _find_kind(splits["train"], labels["train"], column, arguments, saved)
    if not saved:
        check_classes_recur(kind, labels["train"], splits["train"])
        report_repeated(splits["train"], text_columns, labels["train"])
    for name, split in splits.items():
        # Other columns could have the names of the model's inputs.
        used = [*text_columns, WHERE]
        if name in labels:
            split = kind.encode(split, labels[name], arguments.title_of(name))
            used.append("label")
        splits[name] = split.select_columns(used)
    task = ClassificationTask(
        name=column.columns[0] if arguments.tasks_of_columns else arguments.name,
        text_columns=text_columns,
        undivided=splits["train"],
        kind=kind,
    )
    task.splits = divide(
        splits,
        arguments,
        training,
        results=saved.results if saved else None,
        labels=rarest_classes(kind, splits["train"]["label"]),
        text_columns=text_columns,
        keep_repeated=arguments.keep_repeated,
    )
    if not saved:
        note_missing_classes(kind, task.splits)
        _prepare_loss(task, arguments)
    return task


def _find_kind(
    train: Dataset,
    labels: Sequence[Label],
    column: LabelColumn,
    arguments: ClassificationArguments,
    saved: Saved | None,
) -> Labels:
    """Return what is predicted: what a saved adapter does, or what the training examples have."""
    if saved:
        default = REGRESSION if len(saved.labels) == 1 else SINGLE
        return Labels(column.columns, saved.problem_type or default, saved.labels)
    declared = declared_classes(train, column.columns[0])
    kind = find_labels(labels, column.columns, declared, arguments.problem_type)
    if kind.problem_type == REGRESSION and arguments.class_weights:
        raise RecipeError("--class_weights is for classes, not for a regression. Leave it out.")
    if kind.problem_type != SINGLE and arguments.contrastive_weight:
        raise RecipeError("--contrastive_weight is for one class per text. Leave it out.")
    return kind


def _find_label_column(
    train: Dataset,
    text_columns: tuple[str, ...],
    arguments: ClassificationArguments,
    saved: Saved | None,
) -> LabelColumn:
    """Return in which columns the labels are, and how they are written."""
    columns = find_label_columns(train, arguments.label_columns, text_columns)
    for name in columns:
        if name in text_columns:
            raise RecipeError(
                f"--text_columns and --label_columns must differ, got {name!r} in both. Name "
                "another."
            )
    column = LabelColumn(columns)
    if saved is None or saved.problem_type == MULTI:
        column = find_label_column(
            train,
            columns,
            arguments.label_separator,
            arguments.class_names,
            arguments.problem_type,
            saved.labels if saved else (),
        )
    if arguments.merge_labels:
        return column.with_one_spelling(saved.labels if saved else column.read(train, "train"))
    return column


def _show_examples(
    train: Dataset,
    labels: Sequence[Label],
    text_columns: Sequence[str],
    label_columns: Sequence[str],
) -> None:
    """Log the columns and a few rows, so that a wrong guess is seen."""
    log(
        f"texts: {', '.join(text_columns)}; labels: {', '.join(label_columns)}; to choose "
        "others, give --text_columns or --label_columns"
    )
    examples = train.select(range(min(_EXAMPLES, len(train))))
    for row, texts in enumerate(rows_of(examples, text_columns)):
        text = " | ".join(part[:_SHOWN_TEXT] for part in texts)
        text = textwrap.shorten(text, _SHOWN_TEXT, placeholder="...")
        log(f"  {locate(examples, row)}: {text!r} -> {', '.join(classes_of(labels[row]))}")


def _prepare_loss(task: ClassificationTask, arguments: ClassificationArguments) -> None:
    """Log how often the classes occur; set what the loss needs to know of the training examples."""
    encoded = task.splits["train"]["label"]
    log(f"{task.name}: {describe_examples(task)}")
    if task.problem_type == REGRESSION:
        targets = np.asarray(encoded, dtype=float)
        task.scale = (float(targets.mean()), float(targets.std()) or 1.0)
    if task.problem_type == SINGLE:
        task.contrastive_weight = arguments.contrastive_weight or 0.0
        if arguments.contrastive_weight is None and len(encoded) < _FEW:
            task.contrastive_weight = _WEIGHT_OF_FEW
            log("few examples: the training loss also compares texts (--contrastive_weight 0: not)")
    if arguments.class_weights:
        task.weights = balanced_weights(task.kind, encoded)
        listed = []
        for name, weight in zip(task.labels[:SHOWN], task.weights[:SHOWN], strict=True):
            listed.append(f"{name} {weight:.2f}")
        more = ", ..." * (len(task.labels) > SHOWN)
        log(f"weights of the classes in the loss: {', '.join(listed)}{more}")


def describe_examples(task: ClassificationTask) -> str:
    """Return the number of training examples, and how often their classes occur."""
    encoded = task.splits["train"]["label"]
    return f"{len(encoded):,} training examples; {describe_balance(task.kind, encoded)}"


def classification_scores(
    outputs: NDArray[Any], labels: NDArray[Any], problem_type: str
) -> dict[str, float]:
    """Return the scores of `outputs` of (rows, classes), or of (rows, 1) for a regression.

    Macro-F1 is over the classes among the labels or the predictions. With several classes per row,
    the accuracy is the share of rows of which all classes are right.
    """
    check_finite(outputs)
    if problem_type == REGRESSION:
        *names, _ = SCORES_OF[REGRESSION]  # the loss is the Trainer's
        return {name: float(SCORES[name](labels, outputs[:, 0])) for name in names}
    averages, occurring = ["macro"], None
    if problem_type == SINGLE:
        predicted = outputs.argmax(-1)
    else:
        averages = ["micro", "macro"]
        predicted = (outputs > 0).astype(int)
        # scikit-learn would average over all columns, also of classes that do not occur.
        occurring = np.flatnonzero((labels + predicted).any(0)).tolist() or None
    scores = {"accuracy": float(accuracy_score(labels, predicted))}
    for average in averages:
        scores[f"{average}_f1"] = float(
            f1_score(labels, predicted, labels=occurring, average=average, zero_division=0.0)
        )
    return scores
