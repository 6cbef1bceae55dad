"""GLUE's nine tasks, and the generated minimal pairs that stand in for them where there are no data."""

from dataclasses import dataclass
from pathlib import Path

from common.data import check_columns, numeric_labels, read_split
from common.errors import RecipeError
from datasets import Dataset, load_dataset
from glue_metric import TASK_SCORES
from minimal_pairs import LABELS, minimal_pairs


HUB_DATASET = "nyu-mll/glue"
MINIMAL_PAIRS = "minimal_pairs"
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


def find_task(name: str) -> Task:
    """The task of that name.

    Raises:
        RecipeError: If there is none.
    """
    if name not in TASKS:
        raise RecipeError(f"--task must be one of {', '.join(TASKS)}, got {name!r}.")
    return TASKS[name]


def load_splits(task: Task, data_dir: str | None) -> dict[str, Dataset]:
    """The task's splits, checked: from `data_dir`/<task> or the Hub, or generated for minimal_pairs.

    Raises:
        RecipeError: If a split, a column or the Hub is missing, or a text or label is not what the task needs.
    """
    if task.name == MINIMAL_PAIRS:
        if data_dir is not None:
            raise RecipeError(f"--data_dir has no use for {MINIMAL_PAIRS}, which are generated: give --task as well.")
        return dict(minimal_pairs())
    if data_dir is None:
        splits = _from_hub(task)
    else:
        splits = {split: read_split(Path(data_dir).expanduser() / task.name, split) for split in task.splits}
    for split, data in splits.items():
        name = f"{task.name} {split}"
        check_columns(data, name, task.text_columns)
        splits[split] = numeric_labels(data, name, len(task.labels), STSB_RANGE)
    return splits


def _from_hub(task: Task) -> dict[str, Dataset]:
    try:
        return {split: load_dataset(HUB_DATASET, task.name, split=split) for split in task.splits}
    except OSError as error:  # no network, no cache, no such data set: all of them OSErrors
        raise RecipeError(
            f"Cannot load {HUB_DATASET}, {task.name}: {error}. Without a network, give --data_dir, a folder with "
            f"{task.name}/train.parquet and so on (or .csv, .tsv, .jsonl)."
        ) from error
