"""GLUE as the papers report it: the columns, the two averages, and the papers' rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import mean


# The scores that GLUE's server averages for each task, by the recipe's names; the papers' score first.
GLUE_TASKS = {
    "cola": ("matthews_correlation",),
    "sst2": ("accuracy",),
    "mrpc": ("f1", "accuracy"),
    "stsb": ("spearmanr", "pearson"),
    "qqp": ("f1", "accuracy"),
    "mnli": ("matched_accuracy", "mismatched_accuracy"),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
}
# The papers' nine columns.
COLUMNS = {
    "CoLA": ("cola", "matthews_correlation"),
    "SST-2": ("sst2", "accuracy"),
    "MRPC": ("mrpc", "f1"),
    "STS-B": ("stsb", "spearmanr"),
    "QQP": ("qqp", "f1"),
    "MNLI-m": ("mnli", "matched_accuracy"),
    "MNLI-mm": ("mnli", "mismatched_accuracy"),
    "QNLI": ("qnli", "accuracy"),
    "RTE": ("rte", "accuracy"),
}
WNLI = {"WNLI": ("wnli", "accuracy")}
# Runs of MNLI that were tuned for the mismatched split, as the papers' MNLI-mm column is, are a task of their own.
MISMATCHED = "mnli-mm"
_NAMES = {
    **{task: column for column, (task, _) in (COLUMNS | WNLI).items() if task != "mnli"},
    "mnli": "MNLI", MISMATCHED: "MNLI-mm", "squad": "SQuAD", "minimal_pairs": "generated sentences",
    "matthews_correlation": "Matthews correlation", "f1": "F1", "exact_match": "exact match", "spearmanr":
    "Spearman correlation", "pearson": "Pearson correlation", "matched_accuracy": "accuracy (matched)",
    "mismatched_accuracy": "accuracy (mismatched)", "loss": "loss",
}  # fmt: skip

Scores = Mapping[str, Mapping[str, float]]


def proper_name(name: str) -> str:
    """Return the name of a task or a score as it is printed: "CoLA" for "cola", "F1" for "f1"."""
    return _NAMES.get(name, name.replace("_", " "))


def mean_of_nine(scores: Scores) -> float | None:
    """Return the plain mean of the papers' nine columns, with both of MNLI and without WNLI; None if one is missing.

    Args:
        scores: The scores by task and name, such as {"mrpc": {"f1": 89.5, "accuracy": 85.3}}.
    """
    values = [scores.get(task, {}).get(name) for task, name in COLUMNS.values()]
    return None if None in values else mean(values)


def server_average(scores: Scores) -> float | None:
    """Return the average of GLUE's server: the mean over nine tasks, with WNLI, of the mean of each task's scores."""
    values = [[scores.get(task, {}).get(name) for name in names] for task, names in GLUE_TASKS.items()]
    return None if any(None in task for task in values) else mean(mean(task) for task in values)


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table.

    Attributes:
        label: Paper, encoder and method.
        scores: The papers' nine columns in order, then WNLI, in percent; None where the paper has no score.
        split: The split that was scored; test scores are the server's.
        printed_total: The total as printed, which is not the plain mean; it looks like the server's average.
        trained: Trained parameters per task, in percent of the encoder.
        total: Parameters for all tasks, in multiples of the encoder.
    """

    label: str
    scores: tuple[float | None, ...]
    split: str = "test"
    printed_total: float | None = None
    trained: float | None = None
    total: float | None = None
    by_column: dict[str, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = [*COLUMNS, *WNLI]
        known = {name: score for name, score in zip(names, self.scores, strict=False) if score is not None}
        object.__setattr__(self, "by_column", known)

    @property
    def mean_of_nine(self) -> float | None:
        by_task: dict[str, dict[str, float]] = {}
        for column, score in self.by_column.items():
            task, name = (COLUMNS | WNLI)[column]
            by_task.setdefault(task, {})[name] = score
        return mean_of_nine(by_task)


_H = "Houlsby et al. 2019, BERT-large"  # arXiv 1902.00751, table 1
_M = "Mohebbi and Rajaei 2020, BERT-base"  # their re-implementation's report
# Robust Transfer Learning with Pretrained Language Models through Adapters; the adapters' scores are AdapterHub's.
_R = "Han et al. 2021, BERT-base"
PAPER_ROWS = (
    PaperRow(f"{_H}: full", (60.5, 94.9, 89.3, 87.6, 72.1, 86.7, 85.9, 91.1, 70.1), "test", 80.4, 100, 9.0),
    PaperRow(f"{_H}: r 8-256", (59.5, 94.0, 89.5, 86.9, 71.8, 84.9, 85.1, 90.7, 71.5), "test", 80.0, 3.6, 1.3),
    PaperRow(f"{_H}: r 64", (56.9, 94.2, 89.6, 87.3, 71.8, 85.3, 84.6, 91.4, 68.8), "test", 79.6, 2.1, 1.2),
    PaperRow(f"{_M}: full", (52.1, 93.5, 88.9, 87.1, 71.2, 84.6, 83.4, 90.5, 66.4), "test", 79.7),
    PaperRow(f"{_M}: shared in each layer", (55.2, 90.9, 88.7, 82.5, 71.4, 84.1, 83.3, 90.6, 68.2), "test", 79.4),
    PaperRow(f"{_M}: not shared", (55.6, 93.4, 87.8, 83.9, 71.4, 84.0, 83.1, 90.7, 66.0), "test", 79.2),
    PaperRow(f"{_M}: 3-shared", (53.5, 92.6, 88.6, 84.6, 70.9, 83.5, 82.9, 90.3, 67.6), "test", 79.3),
    PaperRow(f"{_R}: full", (56.53, 92.32, 88.85, 88.48, 87.49, None, 84.1, 90.66, 65.7, 56.34), "dev"),
    PaperRow(f"{_R}: adapters", (49.23, 91.97, 89.47, 83.7, 84.31, None, 81.08, 87.46, 61.73, 45.07), "dev"),
    PaperRow(
        f"{_R}: adapters after pretraining on the task",
        (64.87, 92.78, 89.76, 88.87, 87.88, None, 84.14, 91.12, 68.59, 56.34),
        "dev",
    ),
)

# The second scores of some tasks, which are no column of the table above.
SECOND_COLUMNS = {
    "CoLA accuracy": ("cola", "accuracy"),
    "MRPC accuracy": ("mrpc", "accuracy"),
    "STS-B Pearson": ("stsb", "pearson"),
    "QQP accuracy": ("qqp", "accuracy"),
}
_U = "Whritenour and Schoch 2019, BERT-base"  # a reproduction with the first paper's code
# In percent, in the order of SECOND_COLUMNS, on the validation split; None where the paper has no score.
SECOND_ROWS = {
    f"{_U}: full (dev)": (82.74, 85.05, None, None),
    f"{_U}: adapters (dev)": (81.78, 85.78, None, None),
    "google-research/adapter-bert, BERT-base: adapters, lr 3e-4, 5 epochs (dev)": (None, 85.78, None, None),
    f"{_R}: full (dev)": (None, 84.07, 88.64, 90.71),
    f"{_R}: adapters (dev)": (None, 85.29, 83.95, 88.40),
    f"{_R}: adapters after pretraining on the task (dev)": (None, 86.37, 89.24, 90.92),
}
