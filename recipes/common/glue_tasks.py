"""GLUE: its nine tasks, glue.py's command line with the papers' presets, and the predictions for its server."""

import copy
import csv
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
from datasets import Dataset, load_dataset
from numpy.typing import NDArray
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from common.arguments import (
    ClassifierArguments,
    ClassifierMethodArguments,
    EncoderArguments,
    RecipeParser,
    RecipeTrainingArguments,
)
from common.data import check_columns, describe_data, find_split, locate, read_split
from common.edge import RecipeError
from common.presets import with_preset
from common.run import write_atomically, write_json
from common.scores import (
    GLUE_TASKS,
    SCORES,
    ByTask,
    check_finite,
    mean_of_nine,
    proper_name,
    server_average,
)
from common.task import Task
from common.trainer import RecipeTrainer


HUB_DATASET = "nyu-mll/glue"
ALL = "all"
STSB_RANGE = LOWEST, HIGHEST = 0.0, 5.0

# The main score of each task comes first: it is in the papers' tables and chooses the best epoch. CoLA's accuracy,
# which the papers' analyses and Whritenour and Schoch 2019 report, is in no table and no average.
TASK_SCORES: dict[str, tuple[str, ...]] = {
    **GLUE_TASKS,
    "cola": ("matthews_correlation", "accuracy"),
    "mnli": ("accuracy",),  # of each of its two validation splits
}


@dataclass(kw_only=True)
class GlueTask(Task):
    """A task of GLUE, without data until `load` returns it with them."""

    data_dir: str | None = None
    validation_splits: tuple[str, ...] = ("validation",)
    predicts: bool = False  # the test sets of the server

    @property
    def scores(self) -> tuple[str, ...]:
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
        """Return the task's scores of logits or, for a regression, of scores."""
        outputs = evaluation.predictions
        predictions = outputs.argmax(-1) if len(self.labels) > 1 else outputs.squeeze(-1)
        check_finite(outputs)
        return glue_scores(self.name, predictions, evaluation.label_ids)

    def validation(self, data: Mapping[str, Dataset]) -> Dataset | dict[str, Dataset] | None:
        """Return the validation split; MNLI's two by their names."""
        found = {name.removeprefix("validation_"): data[name] for name in self.validation_splits}
        return found if len(found) > 1 else next(iter(found.values()))

    def load(self, data_dir: str | None, trains: bool = True) -> "GlueTask":
        """Return the task with its splits, from `data_dir`/<task> or the Hub."""
        splits = {}
        for split in (*(("train",) if trains else ()), *self.validation_splits):
            name, data = f"{self.name} {split}", _read(self.name, split, data_dir)
            check_columns(data, name, self.text_columns, ["label"])
            splits[split] = numeric_labels(data, name, len(self.labels))
        return replace(self, splits=splits, data_dir=data_dir)

    def files(self, data_dir: str | None) -> dict[str, Path]:
        """Return the files that `load` reads, by their splits; those on the Hub have none."""
        if data_dir is None:
            return {}
        folder = Path(data_dir).expanduser() / self.name
        splits = ("train", *self.validation_splits)
        return {split: file for split in splits if (file := find_split(folder, split)) is not None}

    def make_trainer(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int,
        training: RecipeTrainingArguments, **options: Any,
    ) -> RecipeTrainer:  # fmt: skip
        self.max_length = max_length  # of the test sets as well
        return super().make_trainer(model, tokenizer, max_length, training, **options)

    def predict_test(self, trainer: RecipeTrainer, prefix: str = "") -> None:
        """Write the predictions for GLUE's server, if they are asked for."""
        if self.predicts:
            outputs = self._predict_for_server(trainer)
            if trainer.is_world_process_zero():
                write_predictions(trainer.args.output_dir, outputs, prefix)

    def _predict_for_server(self, trainer: RecipeTrainer) -> dict[str, NDArray[np.floating]]:
        """Return the outputs for the task's test sets, by their names; MNLI's "AX" only if it is at hand."""
        found = {name: test_set for name, test_set in TEST_SETS.items() if test_set.task == self.name}
        if self.data_dir is not None and not (Path(self.data_dir).expanduser() / "ax").is_dir():
            found.pop("AX", None)
        outputs = {}
        for name, test_set in found.items():
            data = _read(test_set.source, test_set.split, self.data_dir)
            check_columns(data, f"{test_set.source} {test_set.split}", self.text_columns)
            if "idx" in data.column_names and [int(index) for index in data["idx"]] != list(range(len(data))):
                raise RecipeError(
                    f"{test_set.source} {test_set.split}: idx must count the rows from 0, in their order."
                )
            texts = data.select_columns(list(self.text_columns))
            encoded = self.encode(texts, name, trainer.processing_class, self.max_length)
            outputs[name] = trainer.predict(encoded, metric_key_prefix="submission").predictions
        return outputs

    def describe_data(self, arguments: Any) -> dict[str, Any]:
        title, source = f"GLUE {proper_name(self.name)}", None if self.data_dir else HUB_DATASET
        return {"language": "en"} | describe_data(title, source, self.name, self.splits, self.validation_splits[0])


_SENTENCES = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
_MNLI = ("entailment", "neutral", "contradiction")
TASKS = {
    name: GlueTask(name=name, text_columns=columns, labels=labels)
    for name, columns, labels in (
        ("cola", ("sentence",), ("unacceptable", "acceptable")),
        ("sst2", ("sentence",), ("negative", "positive")),
        ("mrpc", _SENTENCES, ("not_equivalent", "equivalent")),
        ("stsb", _SENTENCES, ("similarity",)),
        ("qqp", ("question1", "question2"), ("not_duplicate", "duplicate")),
        ("mnli", ("premise", "hypothesis"), _MNLI),
        ("qnli", ("question", "sentence"), _ENTAILMENT),
        ("rte", _SENTENCES, _ENTAILMENT),
        ("wnli", _SENTENCES, ("not_entailment", "entailment")),
    )
}
TASKS["mnli"].validation_splits = ("validation_matched", "validation_mismatched")


def find_tasks(name: str) -> list[GlueTask]:
    """Return the task of that name, or GLUE's nine for "all"."""
    if name == ALL:
        return list(TASKS.values())
    if name not in TASKS:
        raise RecipeError(f"--task must be one of {', '.join([*TASKS, ALL])}, got {name!r}.")
    return [TASKS[name]]


def glue_scores(task: str, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Return the scores of a task (Wang et al. 2018, arXiv 1804.07461) for class numbers or, for "stsb", scores.

    A score without a value is 0: Matthews' and the other correlations if all predictions or all references are equal,
    F1 if neither has the class 1.
    """
    predicted, expected = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    return {name: float(SCORES[name](expected, predicted)) for name in TASK_SCORES[task]}


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


@dataclass(kw_only=True)
class GlueArguments(EncoderArguments):
    """The task and the encoder."""

    _argument_group_name = "task"

    task: str = HfArg(aliases=["--task_name"], help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, or all.")
    data_dir: str | None = HfArg(default=None, help="Folder with a folder of files per task; default: the Hub.")
    preset: Literal["houlsby2019", "mohebbi2020", "uva2019", "han2021"] | None = HfArg(
        default=None, help="A paper's settings instead of the defaults; see recipes/common/presets.py."
    )
    predict: bool = HfArg(default=False, help="Write predictions of the test splits in the format of GLUE's server.")


Arguments = TypeVar("Arguments", bound=GlueArguments)


def parse_arguments(
    args: Sequence[str] | None = None, kind: type[Arguments] = GlueArguments, recipe: str = "glue.py"
) -> tuple[Arguments, ClassifierMethodArguments, ClassifierArguments, RecipeTrainingArguments]:
    """Parse the command line, or `args`; check what does not depend on the data."""
    groups = (kind, ClassifierMethodArguments, ClassifierArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage=f"accelerate launch recipes/{recipe} [flags]")
    arguments, method, adapter, training = parser.parse(args, with_preset)
    tasks = find_tasks(arguments.task)
    if arguments.evaluate is None and training.do_train:
        method.check(adapter, training)
    if arguments.data_dir is not None:
        folder = Path(arguments.data_dir).expanduser()
        if missing := [task.name for task in tasks if not (folder / task.name).is_dir()]:
            raise RecipeError(f"--data_dir must hold a folder per task, {folder} has no {missing[0]}. Add it.")
        if arguments.predict:
            check_test_sets(folder, [task.name for task in tasks])
    for task in tasks:
        copy.copy(training).choose_by(task.scores)
    return arguments, method, adapter, training


def check_test_sets(folder: Path, tasks: Sequence[str]) -> None:
    """Raise RecipeError if a test set that --predict needs is missing, which a run would find only at its end."""
    for test_set in TEST_SETS.values():
        is_optional = test_set.source == "ax"
        if test_set.task in tasks and not is_optional and find_split(folder / test_set.source, test_set.split) is None:
            raise RecipeError(f"--predict needs {folder / test_set.source}/{test_set.split}.parquet. Add it.")


@dataclass(frozen=True)
class TestSet:
    """A test set of GLUE's server: its task, its data set and split on the Hub, its rows, and what the file of
    predictions says for the classes 0, 1, ...; without classes, it has scores from 0 to 5."""

    task: str
    source: str
    split: str
    rows: int
    labels: tuple[str, ...] = ()

    def table(self, outputs: NDArray[np.floating]) -> pd.DataFrame:
        """Return the file for a model's outputs, (rows, classes) or (rows, 1)."""
        if self.labels:
            predictions = [self.labels[number] for number in outputs.argmax(-1)]
        else:
            predictions = [f"{score:.4f}" for score in np.clip(outputs[:, 0], LOWEST, HIGHEST)]
        return pd.DataFrame({"index": range(len(predictions)), "prediction": predictions})


_BINARY = ("0", "1")
TEST_SETS = {
    "CoLA": TestSet("cola", "cola", "test", 1063, _BINARY),
    "SST-2": TestSet("sst2", "sst2", "test", 1821, _BINARY),
    "MRPC": TestSet("mrpc", "mrpc", "test", 1725, _BINARY),
    "STS-B": TestSet("stsb", "stsb", "test", 1379),
    "QQP": TestSet("qqp", "qqp", "test", 390_965, _BINARY),
    "MNLI-m": TestSet("mnli", "mnli", "test_matched", 9796, _MNLI),
    "MNLI-mm": TestSet("mnli", "mnli", "test_mismatched", 9847, _MNLI),
    "QNLI": TestSet("qnli", "qnli", "test", 5463, _ENTAILMENT),
    "RTE": TestSet("rte", "rte", "test", 3000, _ENTAILMENT),
    "WNLI": TestSet("wnli", "wnli", "test", 146, _BINARY),
    # The diagnostic examples, predicted by the model for MNLI.
    "AX": TestSet("mnli", "ax", "test", 1104, _MNLI),
}
FILES = {f"{name}.tsv": test_set for name, test_set in TEST_SETS.items()}


def write_predictions(output_dir: str, outputs: Mapping[str, NDArray[np.floating]], prefix: str = "") -> None:
    """Write a model's outputs, by test set, into the folder "submission", whose name begins with `prefix`."""
    folder = Path(output_dir, f"{prefix}submission")
    for name, output in outputs.items():
        check_finite(output)
        table, rows = TEST_SETS[name].table(output), TEST_SETS[name].rows
        write_atomically(folder / f"{name}.tsv", table.to_csv(sep="\t", index=False))
        note = "" if len(output) == rows else f", but GLUE's test set has {rows:,}"
        print(f"{folder / name}.tsv: {len(output):,} predictions{note}")


def pack(files: Iterable[Path], path: Path) -> None:
    """Write the files into a zip, without their folders; raise RecipeError if GLUE's server would refuse it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, file.name)
    check_submission(path)


def check_submission(path: Path) -> None:
    """Raise RecipeError if GLUE's server would refuse a zip, which must hold all files of FILES and nothing else."""
    found = []
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        found += [f"{name} is missing" for name in FILES if name not in names]
        found += [f"{name} does not belong there" for name in names if name not in FILES or names.count(name) > 1]
        for name in FILES.keys() & {*names}:
            with archive.open(name) as file:
                table = pd.read_csv(file, sep="\t", dtype=str, keep_default_na=False, quoting=csv.QUOTE_NONE)
            rows, labels = FILES[name].rows, FILES[name].labels
            if list(table) != ["index", "prediction"] or len(table) != rows:
                found.append(f"{name} must have the columns index and prediction and {rows:,} rows")
            elif labels and not table["prediction"].isin(labels).all():
                found.append(f"{name} must predict {' or '.join(labels)}")
    if found:
        raise RecipeError(f"GLUE's server would refuse {path}: {'; '.join(found)}.")
    print(f"{path} is a valid submission.")


def write_all(folder: str, scores: ByTask, predicted: bool, prefix: str = "") -> None:
    """Print the scores of all tasks and both averages; write them to all.json and, if `predicted`, the submission.

    The names of both files begin with the part of the folder before {task}, so that "runs/r8-{task}" and
    "runs/r64-{task}" do not overwrite each other's.
    """
    before = folder.partition("{task}")[0] + prefix
    averages = {"mean_of_nine_columns": mean_of_nine(scores), "server_average": server_average(scores)}
    write_json(Path(f"{before}all.json"), {"scores": scores, **averages})
    for task, own in scores.items():
        shown = (f"{name} {100 * score:.1f}" for name, score in own.items() if not name.endswith("loss"))
        print(f"{task:<5} {', '.join(shown)}")
    nine, server = averages.values()
    if nine is not None and server is not None:  # --do_train alone scores nothing
        print(f"Mean of the papers' nine columns (MNLI's two apart, MRPC and QQP by F1, no WNLI): {100 * nine:.1f}")
        print(f"GLUE server's average (over nine tasks with WNLI, each the mean of its scores): {100 * server:.1f}")
    if predicted:
        folders = (Path(folder.replace("{task}", task), f"{prefix}submission") for task in scores)
        pack((file for path in folders for file in sorted(path.glob("*.tsv"))), Path(f"{before}submission.zip"))
