"""GLUE's nine tasks, and the generated minimal pairs that stand in for them where there are no data."""

from dataclasses import dataclass
from pathlib import Path

from common.data import check_columns, numeric_labels, read_split
from common.errors import RecipeError
from datasets import Dataset, load_dataset
from glue_metric import TASK_SCORES
from minimal_pairs import LABELS, minimal_pairs
from submission import TEST_SETS


HUB_DATASET = "nyu-mll/glue"
MINIMAL_PAIRS = "minimal_pairs"
ALL = "all"
STSB_RANGE = (0.0, 5.0)


@dataclass(frozen=True)
class Task:
    """One task: its texts, its labels by number (one: a regression), its splits for validation and for a test."""

    name: str
    text_columns: tuple[str, ...]
    labels: tuple[str, ...]
    validation_splits: tuple[str, ...] = ("validation",)
    test_splits: tuple[str, ...] = ()  # GLUE's own are not here: their labels are not public

    @property
    def title(self) -> str:
        """What the data are called on a card."""
        return "generated minimal pairs" if self.name == MINIMAL_PAIRS else f"GLUE {self.name}"

    @property
    def splits(self) -> tuple[str, ...]:
        """Every split that a run reads."""
        return ("train", *self.validation_splits, *self.test_splits)

    @property
    def main_score(self) -> str:
        """The name, among the Trainer's, of the score that chooses the best epoch."""
        score = TASK_SCORES[self.name][0]
        return score if len(self.validation_splits) == 1 else f"matched_{score}"


_SENTENCES = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    task.name: task
    for task in (
        Task("cola", ("sentence",), ("unacceptable", "acceptable")),
        Task("sst2", ("sentence",), ("negative", "positive")),
        Task("mrpc", _SENTENCES, ("not_equivalent", "equivalent")),
        Task("stsb", _SENTENCES, ("similarity",)),
        Task("qqp", ("question1", "question2"), ("not_duplicate", "duplicate")),
        Task(
            "mnli",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            ("validation_matched", "validation_mismatched"),
        ),
        Task("qnli", ("question", "sentence"), _ENTAILMENT),
        Task("rte", _SENTENCES, _ENTAILMENT),
        Task("wnli", _SENTENCES, ("not_entailment", "entailment")),
        Task(MINIMAL_PAIRS, ("sentence",), LABELS, test_splits=("test",)),
    )
}


def find_tasks(name: str) -> list[Task]:
    """The task of that name, or the nine of GLUE for "all".

    Raises:
        RecipeError: If there is none.
    """
    if name == ALL:
        return [task for task in TASKS.values() if task.name != MINIMAL_PAIRS]
    if name not in TASKS:
        raise RecipeError(f"--task must be one of {', '.join([*TASKS, ALL])}, got {name!r}.")
    return [TASKS[name]]


def load_splits(task: Task, data_dir: str | None, evaluated_only: bool = False) -> dict[str, Dataset]:
    """The task's splits, checked: from `data_dir`/<task> or the Hub, or generated for minimal_pairs.

    Args:
        task: The task.
        data_dir: Folder with a folder per task; None: the Hub.
        evaluated_only: Leave out the training examples.

    Raises:
        RecipeError: If a split, a column or the Hub is missing, or a text or label is not what the task needs.
    """
    if task.name == MINIMAL_PAIRS:
        if data_dir is not None:
            raise RecipeError(f"--data_dir has no use for {MINIMAL_PAIRS}, which are generated: give --task as well.")
        return dict(minimal_pairs())
    splits = {name: _read(task.name, name, data_dir) for name in task.splits[1 if evaluated_only else 0 :]}
    for split, data in splits.items():
        name = f"{task.name} {split}"
        check_columns(data, name, task.text_columns)
        splits[split] = numeric_labels(data, name, len(task.labels), STSB_RANGE)
    return splits


def load_test_sets(task: Task, data_dir: str | None) -> dict[str, Dataset]:
    """The texts of the task's test sets, by their names in a submission; of MNLI's, "AX" only where it is at hand.

    Raises:
        RecipeError: If one is missing, or its rows are not in their order.
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
    except OSError as error:  # no network, no cache, no such data set: all of them OSErrors
        raise RecipeError(
            f"Cannot load {HUB_DATASET}, {source}: {error}. Without a network, give --data_dir, a folder with "
            f"{source}/{split}.parquet and so on (or .csv, .tsv, .jsonl)."
        ) from error
