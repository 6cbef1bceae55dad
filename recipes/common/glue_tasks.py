"""GLUE's nine tasks and their scores, and the generated minimal pairs that stand in for them without data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import evaluate
import numpy as np
import pandas as pd
from datasets import Dataset, load_dataset
from numpy.typing import NDArray
from transformers import EvalPrediction

from common.data import check_columns, find_split, locate, read_split
from common.edge import RecipeError
from common.minimal_pairs import LABELS, minimal_pairs
from common.scores import SCORES, check_finite
from common.submission import TEST_SETS
from common.task import Task
from common.trainer import RecipeTrainer


HUB_DATASET = "nyu-mll/glue"
MINIMAL_PAIRS, ALL = "minimal_pairs", "all"
STSB_RANGE = (0.0, 5.0)

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
    """

    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("float64" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description="The scores of one task of GLUE.",
            citation="Wang et al. 2018, arXiv 1804.07461",
            inputs_description="predictions and references: class numbers, or scores for stsb",
            features=datasets.Features({"predictions": number, "references": number}),
        )

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        predicted, expected = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
        check_finite(predicted)
        return {name: float(SCORES[name](expected, predicted)) for name in TASK_SCORES[self.config_name]}


@dataclass(kw_only=True)
class GlueTask(Task):
    """A task of GLUE, without data until `load` returns it with them."""

    validation_splits: tuple[str, ...] = ("validation",)
    test_splits: tuple[str, ...] = ()  # without GLUE's own, whose labels are not public

    @property
    def scores(self) -> tuple[str, ...]:
        """The scores of an evaluation, by the Trainer's names for them; the first chooses the best epoch."""
        names = (*TASK_SCORES[self.name], "loss")
        if len(self.validation_splits) == 1:
            return names
        splits = (split.removeprefix("validation_") for split in self.validation_splits)
        return tuple(f"{split}_{name}" for split in splits for name in names)

    @property
    def example(self) -> list[str]:
        """The first text, or pair of texts, of the validation split."""
        return [self.splits[self.validation_splits[0]][0][column] for column in self.text_columns]

    def score(self, evaluation: EvalPrediction) -> dict[str, float]:
        """Return the task's metric of logits or, for a regression, of scores."""
        outputs = evaluation.predictions
        check_finite(outputs)
        predictions = outputs.argmax(-1) if len(self.labels) > 1 else outputs.squeeze(-1)
        metric = GlueMetric(self.name, keep_in_memory=True)
        return metric.compute(predictions=predictions, references=evaluation.label_ids)

    def validation(self, data: Mapping[str, Dataset]) -> Dataset | dict[str, Dataset] | None:
        """Return the validation split; MNLI's two by their names."""
        found = {name.removeprefix("validation_"): data[name] for name in self.validation_splits}
        return found if len(found) > 1 else next(iter(found.values()))

    def load(self, data_dir: str | None, trains: bool = True) -> "GlueTask":
        """Return the task with its splits, from `data_dir`/<task> or the Hub; those of minimal_pairs are generated."""
        if self.name == MINIMAL_PAIRS:
            return replace(self, splits=dict(minimal_pairs()))
        splits = {}
        for split in (*(("train",) if trains else ()), *self.validation_splits, *self.test_splits):
            name, data = f"{self.name} {split}", _read(self.name, split, data_dir)
            check_columns(data, name, self.text_columns, ["label"])
            splits[split] = numeric_labels(data, name, len(self.labels))
        return replace(self, splits=splits)

    def files(self, data_dir: str | None) -> dict[str, Path]:
        """Return the files that `load` reads, by their splits; those on the Hub and generated ones have none."""
        if data_dir is None or self.name == MINIMAL_PAIRS:
            return {}
        folder = Path(data_dir).expanduser() / self.name
        splits = ("train", *self.validation_splits)
        return {split: file for split in splits if (file := find_split(folder, split)) is not None}

    def predict(
        self, trainer: RecipeTrainer, data_dir: str | None, max_length: int
    ) -> dict[str, NDArray[np.floating]]:
        """Return the outputs for the task's test sets, by their names in a submission; MNLI's "AX" only if it is at
        hand."""
        found = {name: test_set for name, test_set in TEST_SETS.items() if test_set.task == self.name}
        if data_dir is not None and not (Path(data_dir).expanduser() / "ax").is_dir():
            found.pop("AX", None)
        outputs = {}
        for name, test_set in found.items():
            data = _read(test_set.source, test_set.split, data_dir)
            check_columns(data, f"{test_set.source} {test_set.split}", self.text_columns)
            if "idx" in data.column_names and [int(index) for index in data["idx"]] != list(range(len(data))):
                raise RecipeError(
                    f"{test_set.source} {test_set.split}: idx must count the rows from 0, in their order."
                )
            texts = data.select_columns(list(self.text_columns))
            encoded = self.encode(texts, name, trainer.processing_class, max_length)
            outputs[name] = trainer.predict(encoded, metric_key_prefix="submission").predictions
        return outputs


_SENTENCES = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    name: GlueTask(name=name, text_columns=columns, labels=labels)
    for name, columns, labels in (
        ("cola", ("sentence",), ("unacceptable", "acceptable")),
        ("sst2", ("sentence",), ("negative", "positive")),
        ("mrpc", _SENTENCES, ("not_equivalent", "equivalent")),
        ("stsb", _SENTENCES, ("similarity",)),
        ("qqp", ("question1", "question2"), ("not_duplicate", "duplicate")),
        ("mnli", ("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
        ("qnli", ("question", "sentence"), _ENTAILMENT),
        ("rte", _SENTENCES, _ENTAILMENT),
        ("wnli", _SENTENCES, ("not_entailment", "entailment")),
        (MINIMAL_PAIRS, ("sentence",), LABELS),
    )
}
TASKS["mnli"].validation_splits = ("validation_matched", "validation_mismatched")
TASKS[MINIMAL_PAIRS].test_splits = ("test",)


def find_tasks(name: str) -> list[GlueTask]:
    """Return the task of that name, or GLUE's nine for "all"."""
    if name == ALL:
        return [task for task in TASKS.values() if task.name != MINIMAL_PAIRS]
    if name not in TASKS:
        raise RecipeError(f"--task must be one of {', '.join([*TASKS, ALL])}, got {name!r}.")
    return [TASKS[name]]


def numeric_labels(data: Dataset, name: str, num_labels: int) -> Dataset:
    """Make the column `label` of the split `name` numeric: whole numbers from 0 to num_labels - 1 or, with one label,
    scores in STSB_RANGE."""
    labels = np.asarray(pd.to_numeric(pd.Series(data["label"]), errors="coerce"), dtype=np.float64)
    low, high = STSB_RANGE if num_labels == 1 else (0, num_labels - 1)
    valid = (labels >= low) & (labels <= high)  # False for NaN, which stands for what is not a number
    if num_labels > 1:
        valid &= labels == np.round(labels)
    if not valid.all():
        row = int(np.argmin(valid))
        raise RecipeError(
            f"{name}: label must be a {'number' if num_labels == 1 else 'whole number'} from {low:g} to {high:g}, "
            f"{locate(data, row)} has {data[row]['label']!r}. Unlabelled rows (-1) can neither train nor score a "
            "model: leave them out."
        )
    values = labels.astype(np.float32 if num_labels == 1 else np.int64)
    return data.remove_columns("label").add_column("label", values.tolist() if num_labels > 1 else values)


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
