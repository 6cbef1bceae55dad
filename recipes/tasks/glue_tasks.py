"""GLUE: its nine tasks, glue.py's command line with the papers' presets, and the predictions for
its server.
"""

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from datasets import ClassLabel, Dataset, Value, load_dataset
from numpy.typing import NDArray
from transformers import EvalPrediction

from data.data import check_columns, locate, sample
from data.reading import find_split, read_split
from run.arguments import ClassifierArguments, EncoderArguments
from run.command import Command, parse_command
from run.edge import RecipeError
from run.files import write_atomically, write_json
from run.presets import with_preset
from run.trainer import RecipeTrainer
from run.training_arguments import flag
from tasks.scores import (
    GLUE_TASKS,
    SCORES,
    check_finite,
    mean_of_nine,
    proper_name,
    server_average,
)
from tasks.task import Task


HUB_DATASET = "nyu-mll/glue"
ALL = "all"
LOWEST, HIGHEST = 0.0, 5.0  # similarity in STS-B

# The main score of each task comes first: it is in the papers' tables and chooses the best epoch.
# CoLA's accuracy, which the papers' analyses and Whritenour and Schoch 2019 report, is in no table
# and no average.
TASK_SCORES: dict[str, tuple[str, ...]] = {
    **GLUE_TASKS,
    "cola": ("matthews_correlation", "accuracy"),
    "mnli": ("accuracy",),  # of each of its two validation splits
}


@dataclass(kw_only=True)
class GlueTask(Task):
    """A task of GLUE, without data until `load` returns it with them."""

    data_dir: str | None = None  # a folder with a folder for each task; None: the Hub
    validation_splits: tuple[str, ...] = ("validation",)
    predicts: bool = False  # the test sets of the server

    @property
    def scores(self) -> tuple[str, ...]:
        names = (*TASK_SCORES[self.name], "loss")
        if len(self.validation_splits) == 1:
            return names
        of_splits: list[str] = []
        for split in self.validation_splits:
            of_splits += [f"{split.removeprefix('validation_')}_{name}" for name in names]
        return tuple(of_splits)

    def score(self, evaluation: EvalPrediction) -> dict[str, float]:
        """Return the task's scores (Wang et al. 2018, arXiv 1804.07461) of logits or, for a
        regression, of scores.

        A score without a value is 0: Matthews' and the other correlations if all predictions or all
        references are equal, F1 if neither has the class 1.
        """
        outputs = np.asarray(evaluation.predictions)
        check_finite(outputs)
        predicted = outputs.argmax(-1) if len(self.labels) > 1 else outputs.squeeze(-1)
        scores = {}
        for name in TASK_SCORES[self.name]:
            expected = np.asarray(evaluation.label_ids, np.float64)
            scores[name] = float(SCORES[name](expected, predicted.astype(np.float64)))
        return scores

    def load(
        self, data_dir: str | None, trains: bool = True, max_train_samples: int | None = None
    ) -> "GlueTask":
        """Return the task with its splits, from `data_dir`/<task> or the Hub."""
        names = ("train", *self.validation_splits) if trains else self.validation_splits
        splits = {}
        for split in names:
            name, data = f"{self.name} {split}", _read(self.name, split, data_dir)
            check_columns(data, name, self.text_columns, ["label"])
            if split == "train":
                data = sample(data, max_train_samples)
            splits[split] = numeric_labels(data, name, self.labels)
        return replace(self, splits=splits, data_dir=data_dir)

    @property
    def files(self) -> dict[str, list[Path]]:
        """The files that `load` reads, by their splits; those on the Hub have none."""
        files: dict[str, list[Path]] = {}
        if self.data_dir is None:
            return files
        folder = Path(self.data_dir).expanduser() / self.name
        for split in ("train", *self.validation_splits):
            file = find_split(folder, split)
            if file is not None:
                files[split] = [file]
        return files

    def predict_test(self, trainer: RecipeTrainer) -> None:
        """Write the predictions for GLUE's server into the folder "submission", if they are asked
        for; MNLI's "AX" if it is at hand.
        """
        if not self.predicts:
            return
        folder = None if self.data_dir is None else Path(self.data_dir).expanduser()
        for name, test_set in TEST_SETS.items():
            is_missing = name == "AX" and folder and not (folder / test_set.source).is_dir()
            if test_set.task == self.name and not is_missing:
                data = _read(test_set.source, test_set.split, self.data_dir)
                check_columns(data, f"{test_set.source} {test_set.split}", self.text_columns)
                texts = data.select_columns(list(self.text_columns))
                rows = self.encode(texts, name, trainer.processing_class, self.max_length)
                predicted = trainer.predict(rows, metric_key_prefix="submission")
                outputs = np.asarray(predicted.predictions)
                if trainer.is_world_process_zero():
                    path = Path(trainer.args.output_dir, "submission", f"{name}.tsv")
                    write_atomically(path, test_set.table(outputs).to_csv(sep="\t", index=False))
                    print(f"{path}: {len(outputs):,} predictions")

    def describe_data(self, arguments: Any) -> dict[str, Any]:
        address = {}
        if self.data_dir is None:
            address = self.address_on_hub(HUB_DATASET, self.name)
        rows = {name: len(split) for name, split in self.splits.items()}
        about = {"language": "en", "name": f"GLUE {proper_name(self.name)}", **address}
        return {**about, "split": self.validation_splits[0], "rows": rows}


_SENTENCES = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
_MNLI = ("entailment", "neutral", "contradiction")
TASKS = {
    task.name: task
    for task in (
        GlueTask(name="cola", text_columns=("sentence",), labels=("unacceptable", "acceptable")),
        GlueTask(name="sst2", text_columns=("sentence",), labels=("negative", "positive")),
        GlueTask(name="mrpc", text_columns=_SENTENCES, labels=("not_equivalent", "equivalent")),
        GlueTask(name="stsb", text_columns=_SENTENCES, labels=("similarity",)),
        GlueTask(
            name="qqp",
            text_columns=("question1", "question2"),
            labels=("not_duplicate", "duplicate"),
        ),
        GlueTask(
            name="mnli",
            text_columns=("premise", "hypothesis"),
            labels=_MNLI,
            validation_splits=("validation_matched", "validation_mismatched"),
        ),
        GlueTask(name="qnli", text_columns=("question", "sentence"), labels=_ENTAILMENT),
        GlueTask(name="rte", text_columns=_SENTENCES, labels=_ENTAILMENT),
        GlueTask(name="wnli", text_columns=_SENTENCES, labels=("not_entailment", "entailment")),
    )
}


def find_tasks(arguments: "GlueArguments") -> list[GlueTask]:
    """Return the task that a command line names, or GLUE's nine for "all"."""
    tasks = []
    for name in TASKS if arguments.task == ALL else [arguments.task]:
        task = replace(TASKS[name], data_dir=arguments.data_dir, predicts=arguments.predict)
        tasks.append(task)
    return tasks


def numeric_labels(data: Dataset, name: str, labels: Sequence[str]) -> Dataset:
    """Return the split `name` with numbers of classes or, with one label, scores in the column
    `label`.
    """
    kind, highest = Value("float32"), HIGHEST
    if len(labels) > 1:
        kind, highest = ClassLabel(names=[*labels]), len(labels) - 1
    data = data.cast_column("label", kind)
    for row, label in enumerate(data["label"]):
        if label is None or not 0 <= label <= highest:
            raise RecipeError(
                f"{name}: label must be from 0 to {highest:g}, {locate(data, row)} has {label}. "
                "Unlabelled rows (-1) can neither train nor score a model: leave them out."
            )
    return data


def _read(source: str, split: str, data_dir: str | None) -> Dataset:
    if data_dir is not None:
        return read_split(Path(data_dir).expanduser() / source, split)
    return load_dataset(HUB_DATASET, source, split=split)


@dataclass(frozen=True, kw_only=True)
class GlueArguments(EncoderArguments):
    """The task and the encoder."""

    _argument_group_name = "task"

    task: Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "all"] = (
        flag(aliases=["--task_name"], help="The task; all: the nine, one after the other.")
    )
    data_dir: str | None = flag(
        default=None, help="Folder with a folder of files per task; default: the Hub."
    )
    preset: Literal["houlsby2019", "mohebbi2020", "uva2019", "han2021"] | None = flag(
        default=None,
        help="A paper's settings instead of the defaults; see recipes/run/presets.py.",
    )
    predict: bool = flag(
        default=False, help="Write predictions of the test splits in the format of GLUE's server."
    )


def parse_arguments(
    args: Sequence[str] | None = None, kind: type[GlueArguments] = GlueArguments
) -> Command:
    """Parse the command line, or `args`; check what does not depend on the data."""
    command = parse_command(kind, ClassifierArguments, args, with_preset)
    arguments, _, _, training = command
    tasks = find_tasks(arguments)
    if arguments.data_dir is not None:
        _check_folders(Path(arguments.data_dir).expanduser(), tasks)
    for task in tasks:
        training.choosing_by(task.scores, training.output_dir)
    return command


def _check_folders(folder: Path, tasks: Sequence[GlueTask]) -> None:
    """Raise RecipeError if the data of a task is missing, or a test set that is to be predicted: a
    run would miss that only at its end.
    """
    missing = []
    for task in tasks:
        if not (folder / task.name).is_dir():
            missing.append(task.name)
        for test_set in TEST_SETS.values():
            is_needed = task.predicts and test_set.task == task.name and test_set.source != "ax"
            if is_needed and not find_split(folder / test_set.source, test_set.split):
                missing.append(f"{test_set.source}/{test_set.split}.parquet")
    if missing:
        raise RecipeError(
            "--data_dir must hold a folder per task and, for --predict, its test set; "
            f"{folder} has no {missing[0]}. Add it."
        )


@dataclass(frozen=True)
class TestSet:
    """A test set of GLUE's server: its task, its data set and split on the Hub, and what the file
    of predictions says for the classes 0, 1, ...; without classes, it has scores from 0 to 5.
    """

    task: str
    source: str
    split: str = "test"
    labels: tuple[str, ...] = ("0", "1")

    def table(self, outputs: NDArray[np.floating]) -> pd.DataFrame:
        """Return the file for a model's outputs, (rows, classes) or (rows, 1)."""
        check_finite(outputs)
        if self.labels:
            predictions = [self.labels[number] for number in outputs.argmax(-1)]
        else:
            predictions = [f"{score:.4f}" for score in np.clip(outputs[:, 0], LOWEST, HIGHEST)]
        return pd.DataFrame({"index": range(len(predictions)), "prediction": predictions})


TEST_SETS = {
    "CoLA": TestSet("cola", "cola"),
    "SST-2": TestSet("sst2", "sst2"),
    "MRPC": TestSet("mrpc", "mrpc"),
    "STS-B": TestSet("stsb", "stsb", labels=()),
    "QQP": TestSet("qqp", "qqp"),
    "MNLI-m": TestSet("mnli", "mnli", "test_matched", _MNLI),
    "MNLI-mm": TestSet("mnli", "mnli", "test_mismatched", _MNLI),
    "QNLI": TestSet("qnli", "qnli", labels=_ENTAILMENT),
    "RTE": TestSet("rte", "rte", labels=_ENTAILMENT),
    "WNLI": TestSet("wnli", "wnli"),
    # The diagnostic examples, predicted by the model for MNLI.
    "AX": TestSet("mnli", "ax", labels=_MNLI),
}


def write_all(
    start: str, results: Mapping[str, Mapping[str, Any]], submissions: Sequence[Path]
) -> None:
    """Print the scores of all tasks and both averages; write them to all.json and the predictions
    in the folders, if there are some, to submission.zip. The paths of both files begin with
    `start`.
    """
    scores = {}
    for task, content in results.items():
        scores[task] = content["scores" if "evaluated" in content else "best_scores"]
    nine, server = mean_of_nine(scores), server_average(scores)
    averages = {"mean_of_nine_columns": nine, "server_average": server}
    write_json(Path(f"{start}all.json"), {"scores": scores, **averages})
    for task, of_task in scores.items():
        shown = []
        for name, score in of_task.items():
            if not name.endswith("loss"):
                shown.append(f"{name} {100 * score:.1f}")
        print(f"{task:<5} {', '.join(shown)}")
    if nine is not None and server is not None:  # --do_train alone scores nothing
        print(
            "Mean of the papers' nine columns (MNLI's two apart, MRPC and QQP by F1, no WNLI): "
            f"{100 * nine:.1f}"
        )
        print(
            "GLUE server's average (over nine tasks with WNLI, each the mean of its scores): "
            f"{100 * server:.1f}"
        )
    if submissions:
        with zipfile.ZipFile(f"{start}submission.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for folder in submissions:
                for file in sorted(folder.glob("*.tsv")):
                    archive.write(file, file.name)
