"""Classification of texts or pairs of texts with any labels.

text_classification.py, paper_tasks.py and stream.py train with `run`.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import pandas as pd
from datasets import Dataset
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.metrics import accuracy_score, f1_score
from transformers import EvalPrediction, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import PredictionOutput

from data.balance import (
    balanced_weights,
    check_classes_recur,
    describe_balance,
    describe_constant,
    rarest_classes,
)
from data.data import (
    check_columns,
    find_text_columns,
    lines_of,
    locate,
    rows_of,
    rows_with_text,
    tokenize,
    with_strings,
)
from data.label_forms import (
    find_label_form,
    find_marks_for_missing,
    find_spellings,
    with_names,
    with_one_spelling,
    without_labels,
)
from data.label_reading import (
    Label,
    classes_of,
    find_label_columns,
    has_labels,
    read_labels,
    rows_with_label,
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
from tasks.label_issues import FrozenEncoder, Items, LabeledTask, check_labels
from tasks.scores import SCORES, ClassScores, ValueScores, check_finite


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


@dataclass(frozen=True, kw_only=True)
class ClassificationArguments(LabelArguments, TextArguments):
    """What to learn, and from which columns."""

    _argument_group_name = "task"

    label_columns: list[str] | None = flag(  # noqa: RUF009
        aliases=["--label_column", "--label_column_name"],
        default=None,
        help="Column of the label, or one 0/1 column for each class; default: detected by name.",
    )
    problem_type: (
        Literal["single_label_classification", "multi_label_classification", "regression"] | None
    ) = flag(default=None, help="Kind of the labels; default: detected.")
    label_separator: str | None = flag(
        default=None, help="What separates several labels of one text in the column, such as '|'."
    )
    class_names: list[str] | None = flag(  # noqa: RUF009
        default=None, help="Names of the classes, if each label is a list of 0 and 1."
    )
    merge_labels: bool = flag(
        default=False, help="Take labels that differ in case and blanks only for one class."
    )
    keep_repeated: bool = flag(
        default=False, help="Keep validation examples whose text is a training example as well."
    )
    class_weights: Literal["balanced"] | None = flag(
        default=None,
        help="'balanced': give each class the same weight in the loss, however rare it is.",
    )


@dataclass(kw_only=True)
class ClassificationTask(LabeledTask):
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
        outputs, labels = np.asarray(evaluation.predictions), np.asarray(evaluation.label_ids)
        return classification_scores(outputs, labels, self.kind.problem_type)

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

    def items_to_check(self, examples: Dataset, encoder: FrozenEncoder, max_length: int) -> Items:
        """Return the texts with their classes."""
        if self.kind.problem_type == REGRESSION:
            raise RecipeError("--check_labels is for classes, not for scores. Leave it out.")
        tokens = tokenize(examples, encoder.tokenizer, self.text_columns, max_length)
        texts = [" | ".join(parts) for parts in rows_of(examples, self.text_columns)]
        targets = np.array(list(examples["label"]), dtype=np.int64)
        table = pd.DataFrame({"line": lines_of(examples), "text": texts})
        return Items(encoder.read_texts(tokens), targets, table)

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
        test, outputs = self.data["test"], np.asarray(prediction.predictions)
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
    """Train on the data of the command line, or score what is saved: see run/run_task.py."""
    command = command.for_task(command.arguments.name)
    arguments, training = command.arguments, command.training
    load = check_labels(partial(load_task, arguments, training), command)
    if load is None:
        return {}
    return run_task(ClassificationTask, load, command, files_of(arguments))


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
    columns = _find_columns(splits["train"], arguments, saved)
    if len(columns.labels) == 1:
        splits = _read_label_forms(splits, columns.labels[0], arguments, saved)
    splits = _rows_to_use(splits, columns)
    if arguments.merge_labels:
        splits = _merge_labels(splits, columns.labels, saved)
    _show_examples(splits["train"], columns)
    row_labels = read_labels(splits["train"], columns.labels)
    if saved:
        labels = _labels_of(saved, columns)
    else:
        labels = find_labels(splits["train"], columns.labels, arguments.problem_type)
        if labels.problem_type == REGRESSION and arguments.class_weights:
            raise RecipeError("--class_weights is for classes, not for a regression. Leave it out.")
        check_classes_recur(labels, row_labels)
        report_repeated(splits["train"], columns.texts, row_labels)
    encoded = _encode(splits, labels, columns.texts)
    splits = divide(
        encoded,
        arguments,
        training,
        results=saved.results if saved else None,
        labels=rarest_classes(labels, row_labels),
        text_columns=columns.texts,
        keep_repeated=arguments.keep_repeated,
    )
    task = ClassificationTask(
        name=arguments.name,
        text_columns=columns.texts,
        splits=splits,
        undivided=encoded["train"],
        kind=labels,
    )
    if not saved:
        _prepare_loss(task, arguments)
    return task


@dataclass(frozen=True)
class _Columns:
    texts: tuple[str, ...]
    labels: tuple[str, ...]


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
    return Labels(columns.labels, saved.problem_type or default, saved.labels)


def _find_columns(
    train: Dataset, arguments: ClassificationArguments, saved: Saved | None
) -> _Columns:
    """Return the columns of the texts and of the labels."""
    recorded = saved.recorded("text_columns") if saved else None
    text_columns = find_text_columns(train, arguments.text_columns, recorded)
    label_columns = find_label_columns(train, arguments.label_columns, text_columns)
    for column in label_columns:
        if column in text_columns:
            raise RecipeError(
                f"--text_columns and --label_columns must differ, got {column!r} in both. Name "
                "another."
            )
    if len(label_columns) == 1 and not arguments.label_columns:
        label_columns = (with_names(train, label_columns[0]),)
    return _Columns(text_columns, label_columns)


def _read_label_forms(
    splits: Mapping[str, Dataset],
    column: str,
    arguments: ClassificationArguments,
    saved: Saved | None,
) -> dict[str, Dataset]:
    """Return the splits with the labels of a column in the form in which others have them."""
    train = splits["train"]
    if saved is None or saved.problem_type == MULTI:
        form = find_label_form(
            train,
            column,
            arguments.label_separator,
            arguments.class_names,
            saved.labels if saved else (),
        )
        splits = {name: form.read(split) for name, split in splits.items()}
    if saved is None:
        gaps = find_marks_for_missing(train[column])
        splits = {name: without_labels(split, column, gaps, name) for name, split in splits.items()}
    return dict(splits)


def _merge_labels(
    splits: Mapping[str, Dataset], columns: Sequence[str], saved: Saved | None
) -> dict[str, Dataset]:
    """Return the splits with one spelling of each class: that of a saved one, or the usual one."""
    if saved:
        labels: Sequence[Label] = saved.labels
    else:
        labels = read_labels(splits["train"], columns)
    spellings = find_spellings(chain.from_iterable(map(classes_of, labels)))
    merged = {}
    for name, split in splits.items():
        merged[name] = with_one_spelling(split, columns[0], spellings)
    return merged


def _rows_to_use(splits: Mapping[str, Dataset], columns: _Columns) -> dict[str, Dataset]:
    """Return the rows that have a label and, to train on, text; check the columns of all splits."""
    usable = {}
    for name, split in splits.items():
        split = with_strings(split, columns.texts)
        is_labeled = name != "test" or has_labels(split, columns.labels)
        if is_labeled:
            check_columns(split, name, columns.texts, columns.labels)
            split = rows_with_label(split, columns.labels, name)
        else:
            check_columns(split, name, columns.texts)
        usable[name] = split
    usable["train"] = rows_with_text(usable["train"], "train", columns.texts)
    return usable


def _show_examples(train: Dataset, columns: _Columns) -> None:
    """Log the columns and a few rows, so that a wrong guess is seen."""
    log(
        f"texts: {', '.join(columns.texts)}; labels: {', '.join(columns.labels)}; to choose "
        "others, give --text_columns or --label_columns"
    )
    examples = train.select(range(min(_EXAMPLES, len(train))))
    texts = rows_of(examples, columns.texts)
    for row, label in enumerate(read_labels(examples, columns.labels)):
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
        for name, weight in zip(task.labels[:SHOWN], task.weights[:SHOWN], strict=True):
            listed.append(f"{name} {weight:.2f}")
        more = ", ..." * (len(task.labels) > SHOWN)
        log(f"weights of the classes in the loss: {', '.join(listed)}{more}")


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
