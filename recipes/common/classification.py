"""Classification of texts or pairs of texts with any labels.

text_classification.py and paper_tasks.py train single tasks with `run_task`; stream.py trains several on one model.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from numpy.typing import NDArray
from scipy.special import expit, softmax
from sklearn.metrics import accuracy_score, f1_score
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg
from transformers.integrations import is_deepspeed_zero3_enabled

from common.arguments import ClassifierArguments, MethodArguments, RecipeTrainingArguments, TextArguments
from common.data import (
    check_columns,
    find_text_columns,
    locate,
    report_repeated,
    rows_with_text,
    sample,
    with_validation,
    without_known,
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
from common.model import Saved, active_config, load_saved, settle
from common.report import defused
from common.run import EVALUATED, Run, find_evaluated, plan_push
from common.scores import SCORES, check_finite, choose_thresholds
from common.task import Task, evaluate, files_of, load_data, split_to_score, train
from common.trainer import RecipeTrainer


PREDICTIONS = "predictions.csv"
_EXAMPLES, _SHOWN_TEXT = 3, 70  # rows of the log, and characters of a text
# The scores of an evaluation; the first chooses the best epoch.
SCORES_OF = {
    SINGLE: ("accuracy", "macro_f1", "loss"),
    MULTI: ("macro_f1", "micro_f1", "accuracy", "loss"),
    REGRESSION: ("spearmanr", "pearson", "mean_absolute_error", "root_mean_squared_error", "loss"),
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
    labels_as_text: bool = HfArg(
        default=False, help="Numbers among the labels are only names: 7 and 007 are two classes, and 1.5 is one."
    )
    label_separator: str | None = HfArg(
        default=None, help="What separates several labels of one text in the column, such as '|'."
    )
    keep_repeated: bool = HfArg(
        default=False, help="Keep validation examples whose text is a training example as well."
    )
    class_weights: Literal["balanced"] | None = HfArg(
        default=None, help="'balanced': give each class the same weight in the loss, however rare it is."
    )

    @property
    def name(self) -> str:
        """The name of the task, which is that of its data: a file without its extension, or a folder."""
        path = Path(self.data).expanduser()
        name = path.resolve().name if path.is_dir() else path.stem if path.is_file() else path.name
        return name + (f"_{self.data_config}" if self.data_config else "")


def last_linear(model: nn.Module) -> nn.Linear:
    """Return the layer that gives a classifier's output: the last linear one that is trained."""
    *_, last = (module for module in model.modules() if isinstance(module, nn.Linear) and module.weight.requires_grad)
    return last


class ClassificationTrainer(RecipeTrainer):
    """A trainer whose loss may count some classes more than others, or standardize the targets of a regression.

    Args:
        weights: The weight of each class; None: the model's own loss.
        scale: Mean and standard deviation of the targets. The model learns standardized ones, whatever their unit. Its
            head gives values in the unit, also when it is saved.
        is_multi: Whether texts have several labels.
        kwargs: As for a RecipeTrainer.
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
            self._hook = self._output.register_forward_hook(lambda _, args, out: out.float() * deviation + mean)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        """Return the mean of the weighted losses of the rows, or the model's own loss if there are no weights.

        The mean is over the rows, not over their weights, so that a batch of one row has its weight as well.
        """
        if self.weights is None:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            loss = loss if self.scale is None else loss / self.scale[1] ** 2
            return (loss, outputs) if return_outputs else loss
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

    def restore_unit(self) -> None:
        """Let the weights themselves give values in the unit of the targets, after the training."""
        if self.scale is not None:
            (mean, deviation), self.scale = self.scale, None
            self._hook.remove()
            with torch.no_grad():
                self._output.weight.mul_(deviation)
                self._output.bias.mul_(deviation).add_(mean)

    def save_trained(self) -> None:
        """Save the weights of the kept epoch and, for several labels per text, thresholds chosen on validation."""
        self.restore_unit()
        config = active_config(self.model)
        if self._is_multi and config is not None and config.record is not None and self.eval_dataset is not None:
            output = self.predict(self.eval_dataset, metric_key_prefix="kept")
            config.record.thresholds = choose_thresholds(expit(output.predictions), output.label_ids)
            log(f"thresholds of the classes: {', '.join(map(str, config.record.thresholds[:SHOWN]))}")
        super().save_trained()


@dataclass(kw_only=True)
class ClassificationTask(Task):
    """A classification task: its splits have the column `label` for the model, but for a test split without labels.

    With `weights`, the loss counts each class that much; with `scale`, the model learns standardized scores.
    """

    kind: Labels
    weights: tuple[float, ...] | None = None
    scale: tuple[float, float] | None = None
    trainer_class = ClassificationTrainer

    @property
    def scores(self) -> tuple[str, ...]:
        """The scores of an evaluation; the first chooses the best epoch."""
        return SCORES_OF[self.kind.problem_type]

    def score(self, evaluation: EvalPrediction) -> dict[str, float]:
        """Return the scores as the Trainer calls for them."""
        return classification_scores(evaluation.predictions, evaluation.label_ids, self.kind.problem_type)

    def make_trainer(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int,
        training: RecipeTrainingArguments, **options: Any,
    ) -> RecipeTrainer:  # fmt: skip
        """Return a trainer with the tokens of all splits."""
        scale = self.scale
        if scale and (is_deepspeed_zero3_enabled() or training.fsdp):
            scale = None  # a sharded head cannot be changed here
        elif scale:
            output = last_linear(model)
            # Without a bias, it cannot give values around another mean.
            scale = scale if output.out_features == 1 and output.bias is not None else None
        options |= {"weights": self.weights, "scale": scale, "is_multi": self.kind.problem_type == MULTI}
        return super().make_trainer(model, tokenizer, max_length, training, **options)

    def predict_test(self, trainer: RecipeTrainer, prefix: str = "") -> dict[str, float] | None:
        """Write the predictions for the test split to `prefix`predictions.csv in the output folder; return the scores
        if it has labels."""
        test = self.data.get("test")
        if test is None or not trainer.args.do_predict:
            return None
        prediction = trainer.predict(test)
        is_labeled = "label" in test.column_names
        if trainer.is_world_process_zero():
            path = Path(trainer.args.output_dir, prefix + PREDICTIONS)
            path.parent.mkdir(parents=True, exist_ok=True)
            table = pd.DataFrame({name: test[name] for name in self.text_columns})
            if is_labeled:
                table["label"] = self.kind.decode(test["label"])
            table = table.assign(**predicted_columns(prediction.predictions, self.kind))
            table.map(defused).to_csv(path, index=False)
            log(f"predictions for the test split: {path}")
        return self.score(prediction) if is_labeled else None


def load_task(arguments: ClassificationArguments, training: RecipeTrainingArguments) -> ClassificationTask:
    """Load a data set and detect its texts and labels; leave out examples without a label, and training examples
    without text."""
    splits, text_columns, columns = _read_splits(arguments, training)
    labels = find_labels(splits["train"], columns, arguments.problem_type, arguments.labels_as_text)
    if labels.problem_type != SINGLE and training.label_smoothing_factor:
        raise RecipeError("--label_smoothing_factor is for one class per text, not several or a score. Leave it out.")
    if labels.problem_type == REGRESSION and arguments.class_weights:
        raise RecipeError("--class_weights is for classes, not for a regression. Leave it out.")
    texts = label_texts(splits["train"], columns)
    check_repeated(labels, texts)
    report_repeated(splits, text_columns, texts)
    splits = _encode(splits, labels, text_columns)
    if training.do_eval:
        splits = with_validation(splits, rarest_labels(labels, texts))
        splits = splits if arguments.keep_repeated else without_known(splits, text_columns)
    splits["train"] = data = sample(splits["train"], arguments.max_train_samples)
    log(f"{arguments.name}: {len(data):,} training examples; {describe_balance(labels, data['label'])}")
    weights = scale = None
    if labels.problem_type == REGRESSION:
        targets = np.asarray(data["label"], dtype=float)
        scale = (float(targets.mean()), float(targets.std()) or 1.0)
    if arguments.class_weights:
        weights = balanced_weights(labels, data["label"])
        shown = (f"{label} {weight:.2f}" for label, weight in zip(labels.names, weights[:SHOWN], strict=False))
        log(f"weights of the classes in the loss: {', '.join(shown)}{', ...' if len(weights) > SHOWN else ''}")
    return _make_task(arguments, splits, text_columns, labels, weights, scale)


def _make_task(
    arguments: ClassificationArguments, splits: dict[str, Dataset], text_columns: tuple[str, ...], labels: Labels,
    weights: tuple[float, ...] | None = None, scale: tuple[float, float] | None = None,
) -> ClassificationTask:  # fmt: skip
    return ClassificationTask(
        name=arguments.name,
        labels=labels.names,
        text_columns=text_columns,
        splits=splits,
        problem_type=labels.problem_type,
        kind=labels,
        weights=weights,
        scale=scale,
    )


def load_evaluated(
    arguments: ClassificationArguments, training: RecipeTrainingArguments, saved: Saved
) -> ClassificationTask:
    """Load the splits on which a saved adapter or model is scored; see split_to_score."""
    separator = arguments.label_separator or saved.results.get("arguments", {}).get("label_separator")
    arguments = replace(arguments, label_separator=separator)
    problem_type = saved.problem_type or (REGRESSION if len(saved.labels) == 1 else SINGLE)
    splits, text_columns, columns = _read_splits(arguments, training, saved.text_columns)
    labels = Labels(columns, problem_type, saved.labels)
    texts = label_texts(splits["train"], columns)
    rarest = rarest_labels(labels, texts)
    splits = split_to_score(_encode(splits, labels, text_columns), arguments, saved, rarest, text_columns)
    return _make_task(arguments, splits, text_columns, labels)


def _read_splits(
    arguments: ClassificationArguments, training: RecipeTrainingArguments, recorded: Sequence[str] | None = None
) -> tuple[dict[str, Dataset], tuple[str, ...], tuple[str, ...]]:
    """Return the splits without what is left out, and the columns of the texts and of the labels."""
    splits = load_data(arguments, training)
    text_columns, columns = _find_columns(splits["train"], arguments, recorded)
    if clash := [column for column in columns if column in text_columns]:
        raise RecipeError(f"--text_columns and --label_columns must differ, got {clash[0]!r} in both. Name another.")
    if arguments.label_separator and len(columns) == 1:
        splits = {
            name: split_labels(split, columns[0], arguments.label_separator)
            if columns[0] in split.column_names
            else split
            for name, split in splits.items()
        }
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
        log(f"  {locate(few, row)}: {textwrap.shorten(text, _SHOWN_TEXT, placeholder='...')!r} -> {shown}")
    return splits, text_columns, columns


def _find_columns(
    data: Dataset, arguments: ClassificationArguments, recorded: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns of the texts and of the labels; say at once what is missing of both."""
    errors, found = [], []
    for find in (
        lambda: find_text_columns(data, arguments.text_columns, recorded),
        lambda: find_label_columns(data, arguments.label_columns),
    ):
        try:
            found.append(find())
        except RecipeError as error:
            errors.append(error)
    if errors:
        raise RecipeError(" ".join(map(str, errors)))
    return found[0], found[1]


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
    the correlations and the mean absolute error.

    Macro-F1 is the mean over the classes among the labels or the predictions; a class that is never right counts 0.

    Args:
        outputs: (rows, classes), or (rows, 1) for a regression.
        labels: The labels, as Labels.encode makes them.
        problem_type: The kind of the problem.
    """
    check_finite(outputs)
    if problem_type == REGRESSION:
        return {name: float(SCORES[name](labels, outputs[:, 0])) for name in SCORES_OF[REGRESSION][:-1]}
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
    name = find_evaluated(arguments, adapter, training)
    if name is not None:
        saved = load_saved(name, None, arguments.model_name, method.base_dtype)
        return evaluate(load_evaluated(arguments, training, saved), saved, arguments, training, EVALUATED)
    method = settle(method, adapter, training, arguments.model_name)
    task = load_task(arguments, training)
    push = plan_push(training, arguments.model_name, len(task.text_columns))
    run = Run(training, arguments, method, adapter, files=files_of(arguments))
    results = run.results
    if results is None:
        entries = {"r": adapter.r, "learning_rate": training.learning_rate}
        results = train(task, run, arguments, method, adapter, training, **entries)
    elif "test" in task.splits and (run.new_test or not Path(training.output_dir, PREDICTIONS).exists()):
        saved = load_saved(run.saved, None, arguments.model_name, method.base_dtype)
        task = replace(task, splits={name: split for name, split in task.splits.items() if name != "train"})
        trainer = task.make_trainer(saved.model, saved.tokenizer, arguments.max_length, training)
        results = run.add(test=task.predict_test(trainer))
    push(training.output_dir)
    return results


def predicted_columns(outputs: NDArray[np.float32], labels: Labels) -> dict[str, list[Any]]:
    """Return the predicted label of each row and, for one class per row, its probability."""
    if labels.problem_type == SINGLE:
        return {"predicted": labels.decode(outputs.argmax(-1)), "probability": softmax(outputs, -1).max(-1).round(4)}
    return {"predicted": labels.decode(outputs[:, 0] if labels.problem_type == REGRESSION else outputs > 0)}
