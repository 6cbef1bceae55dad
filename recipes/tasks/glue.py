"""GLUE's nine tasks and their scores, and the generated minimal pairs that stand in for them without data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import evaluate
import numpy as np
import pandas as pd
from datasets import Dataset, load_dataset
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import EvalPrediction

from tasks.minimal_pairs import LABELS, minimal_pairs
from tasks.submission import TEST_SETS
from training.data import check_columns
from training.errors import RecipeError
from training.tables import find_split, locate, read_split
from training.trainer import check_finite


HUB_DATASET = "nyu-mll/glue"
MINIMAL_PAIRS = "minimal_pairs"
ALL = "all"
STSB_RANGE = (0.0, 5.0)
Score = Callable[[NDArray[np.float64], NDArray[np.float64]], float]


def _zero_if_constant(score: Score) -> Score:
    """Return 0 where a correlation, which divides by both standard deviations, has no value."""

    def checked(references: NDArray[np.float64], predictions: NDArray[np.float64]) -> float:
        return 0.0 if np.ptp(predictions) == 0 or np.ptp(references) == 0 else score(references, predictions)

    return checked


SCORES: dict[str, Score] = {
    "accuracy": accuracy_score,
    "f1": lambda references, predictions: f1_score(references, predictions, zero_division=0.0),
    "matthews_correlation": _zero_if_constant(matthews_corrcoef),
    "pearson": _zero_if_constant(lambda references, predictions: pearsonr(references, predictions)[0]),
    "spearmanr": _zero_if_constant(lambda references, predictions: spearmanr(references, predictions)[0]),
}

# The main score of each task comes first: it is in the papers' tables and chooses the best epoch. CoLA's accuracy,
# which the papers' analyses and Whritenour and Schoch 2019 report, is in no table and no average.
TASK_SCORES: dict[str, tuple[str, ...]] = {
    "cola": ("matthews_correlation", "accuracy"),
    "sst2": ("accuracy",),
    "mrpc": ("f1", "accuracy"),
    "stsb": ("spearmanr", "pearson"),
    "qqp": ("f1", "accuracy"),
    "mnli": ("accuracy",),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
    MINIMAL_PAIRS: ("accuracy",),
}


class GlueMetric(evaluate.Metric):
    """The scores of a GLUE task (Wang et al. 2018, arXiv 1804.07461), with the names of evaluate's "glue", and CoLA's
    accuracy. Unlike evaluate's, it runs no code from the Hub.

    `GlueMetric("mrpc", keep_in_memory=True).compute(predictions=[...], references=[...])` returns {"f1": ...,
    "accuracy": ...}. Predictions and references are class numbers, or similarity scores for "stsb". A score without a
    value is 0: Matthews' and the other correlations if all predictions or all references are equal, F1 if neither has
    the class 1.

    Raises:
        ValueError: If the task is unknown, or there are no predictions or any that are not finite.
    """

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in TASK_SCORES:
            raise ValueError(f"The task must be one of {', '.join(TASK_SCORES)}, got {self.config_name!r}.")
        number = datasets.Value("float64" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description="The scores of one task of GLUE.",
            citation="Wang et al. 2018, GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language "
            "Understanding, arXiv 1804.07461",
            inputs_description="predictions and references: class numbers, or scores for stsb",
            features=datasets.Features({"predictions": number, "references": number}),
        )

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        predicted, expected = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
        if not predicted.size:
            raise ValueError("A score needs at least one prediction, got none.")
        if not np.isfinite(predicted).all():
            raise ValueError(
                f"Predictions must be finite, {(~np.isfinite(predicted)).sum()} of {predicted.size} are not: the "
                "training has diverged; lower the learning rate."
            )
        return {name: float(SCORES[name](expected, predicted)) for name in TASK_SCORES[self.config_name]}


@dataclass(frozen=True)
class GlueTask:
    """A task: its text columns, its labels by number (a single one for a regression), and its splits."""

    name: str
    text_columns: tuple[str, ...]
    labels: tuple[str, ...]
    validation_splits: tuple[str, ...] = ("validation",)
    test_splits: tuple[str, ...] = ()  # without GLUE's own, whose labels are not public

    @property
    def splits(self) -> tuple[str, ...]:
        """Every split that a run reads."""
        return ("train", *self.validation_splits, *self.test_splits)

    @property
    def main_score(self) -> str:
        """The score that chooses the best epoch, by the Trainer's name for it."""
        score = TASK_SCORES[self.name][0]
        return score if len(self.validation_splits) == 1 else f"matched_{score}"

    @property
    def scores(self) -> tuple[str, ...]:
        """The scores of an evaluation, by the Trainer's names for them; the first chooses the best epoch."""
        names = (*TASK_SCORES[self.name], "loss")
        if len(self.validation_splits) == 1:
            return names
        splits = (split.removeprefix("validation_") for split in self.validation_splits)
        return tuple(f"{split}_{name}" for split in splits for name in names)

    def scorer(self) -> Callable[[EvalPrediction], dict[str, float]]:
        """Return the task's metric as the Trainer calls it: on logits or, for a regression, on scores."""
        metric = GlueMetric(self.name, keep_in_memory=True)

        def score(evaluation: EvalPrediction) -> dict[str, float]:
            outputs = evaluation.predictions
            check_finite(outputs)
            predictions = outputs.argmax(-1) if len(self.labels) > 1 else outputs.squeeze(-1)
            return metric.compute(predictions=predictions, references=evaluation.label_ids)

        return score


_SENTENCES = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    task.name: task
    for task in (
        GlueTask("cola", ("sentence",), ("unacceptable", "acceptable")),
        GlueTask("sst2", ("sentence",), ("negative", "positive")),
        GlueTask("mrpc", _SENTENCES, ("not_equivalent", "equivalent")),
        GlueTask("stsb", _SENTENCES, ("similarity",)),
        GlueTask("qqp", ("question1", "question2"), ("not_duplicate", "duplicate")),
        GlueTask(
            "mnli",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            ("validation_matched", "validation_mismatched"),
        ),
        GlueTask("qnli", ("question", "sentence"), _ENTAILMENT),
        GlueTask("rte", _SENTENCES, _ENTAILMENT),
        GlueTask("wnli", _SENTENCES, ("not_entailment", "entailment")),
        GlueTask(MINIMAL_PAIRS, ("sentence",), LABELS, test_splits=("test",)),
    )
}


def find_tasks(name: str) -> list[GlueTask]:
    """Return the task of that name, or GLUE's nine for "all".

    Raises:
        RecipeError: If there is no such task.
    """
    if name == ALL:
        return [task for task in TASKS.values() if task.name != MINIMAL_PAIRS]
    if name not in TASKS:
        raise RecipeError(f"--task must be one of {', '.join([*TASKS, ALL])}, got {name!r}.")
    return [TASKS[name]]


def load_splits(task: GlueTask, data_dir: str | None, evaluated_only: bool = False) -> dict[str, Dataset]:
    """Load and check the task's splits, from `data_dir`/<task> or the Hub; generate those of minimal_pairs.

    Args:
        task: The task.
        data_dir: Folder with a folder per task; None: the Hub.
        evaluated_only: Whether to leave out the training examples.

    Raises:
        RecipeError: If a split, a column or the Hub is missing, or a text or label does not fit the task.
    """
    if task.name == MINIMAL_PAIRS:
        if data_dir is not None:
            raise RecipeError(f"--data_dir has no use for {MINIMAL_PAIRS}, which are generated: also give --task.")
        return dict(minimal_pairs())
    splits = {name: _read(task.name, name, data_dir) for name in task.splits[1 if evaluated_only else 0 :]}
    for split, data in splits.items():
        name = f"{task.name} {split}"
        check_columns(data, name, task.text_columns)
        splits[split] = numeric_labels(data, name, len(task.labels))
    return splits


def find_files(task: GlueTask, data_dir: str | None) -> dict[str, Path]:
    """Return the files that load_splits reads, by their splits; those on the Hub and generated ones have none."""
    if data_dir is None or task.name == MINIMAL_PAIRS:
        return {}
    folder = Path(data_dir).expanduser() / task.name
    return {split: file for split in task.splits if (file := find_split(folder, split)) is not None}


def numeric_labels(data: Dataset, name: str, num_labels: int) -> Dataset:
    """Check the column `label` of the split `name` and make it numeric.

    With several labels it must hold whole numbers from 0 to num_labels - 1; with one, scores in STSB_RANGE.

    Raises:
        RecipeError: If a label is not a number in that range.
    """
    labels = np.asarray(pd.to_numeric(pd.Series(data["label"]), errors="coerce"), dtype=np.float64)
    low, high = STSB_RANGE if num_labels == 1 else (0, num_labels - 1)
    valid = (labels >= low) & (labels <= high)  # False for NaN, which stands for what is not a number
    if num_labels > 1:
        valid &= labels == np.round(labels)
    if not valid.all():
        row = int(np.argmin(valid))
        kind = "number" if num_labels == 1 else "whole number"
        raise RecipeError(
            f"{name}: label must be a {kind} from {low:g} to {high:g}, {locate(data, row)} has "
            f"{data[row]['label']!r}. Unlabelled rows (-1) can neither train nor score a model: leave them out."
        )
    values = labels.astype(np.float32 if num_labels == 1 else np.int64)
    return data.remove_columns("label").add_column("label", values.tolist() if num_labels > 1 else values)


def load_test_sets(task: GlueTask, data_dir: str | None) -> dict[str, Dataset]:
    """Load the texts of the task's test sets, by their names in a submission; MNLI's "AX" only if it is at hand.

    Raises:
        RecipeError: If a test set is missing, or its rows are not in their order.
    """
    found = {name: test_set for name, test_set in TEST_SETS.items() if test_set.task == task.name}
    if not found:
        raise RecipeError(f"--predict needs a task of GLUE, which has a test split without labels; got {task.name}.")
    if data_dir is not None and not (Path(data_dir).expanduser() / "ax").is_dir():
        found.pop("AX", None)
    sets = {}
    for name, test_set in found.items():
        data = _read(test_set.source, test_set.split, data_dir)
        check_columns(data, f"{test_set.source} {test_set.split}", task.text_columns, label_columns=())
        if "idx" in data.column_names and [int(index) for index in data["idx"]] != list(range(len(data))):
            raise RecipeError(f"{test_set.source} {test_set.split}: idx must count the rows from 0, in their order.")
        sets[name] = data.select_columns(list(task.text_columns))
    return sets


def _read(source: str, split: str, data_dir: str | None) -> Dataset:
    if data_dir is not None:
        return read_split(Path(data_dir).expanduser() / source, split)
    try:
        return load_dataset(HUB_DATASET, source, split=split)
    except OSError as error:  # no network, no cache and no such data set are all OSErrors
        raise RecipeError(
            f"Cannot load {HUB_DATASET}, {source}: {error}. Without a network, give --data_dir, a folder with "
            f"{source}/{split}.parquet and so on (or .csv, .tsv, .jsonl)."
        ) from error
