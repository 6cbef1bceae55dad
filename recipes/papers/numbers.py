"""The papers' numbers on GLUE, as rows of a table."""

from dataclasses import dataclass, field

from common.glue_report import COLUMNS, HOULSBY, WNLI, mean_of_nine


# Runs of MNLI that were tuned for the mismatched split, as the papers' MNLI-mm column is, are a task of their own.
MISMATCHED = "mnli-mm"


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


_M = "Mohebbi and Rajaei 2020, BERT-base"  # their re-implementation's report
# Robust Transfer Learning with Pretrained Language Models through Adapters; the adapters' scores are AdapterHub's.
_R = "Han et al. 2021, BERT-base"
PAPER_ROWS = (
    *(
        PaperRow(label, scores, "test", *sizes)
        for (label, scores), sizes in zip(
            HOULSBY.items(), ((80.4, 100, 9.0), (80.0, 3.6, 1.3), (79.6, 2.1, 1.2)), strict=True
        )
    ),
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
    f"{_U}: full (dev)": (82.742, 85.049, None, None),
    f"{_U}: adapters (dev)": (81.78, 85.78, None, None),
    "google-research/adapter-bert, BERT-base: adapters, lr 3e-4, 5 epochs (dev)": (None, 85.78, None, None),
    f"{_R}: full (dev)": (None, 84.07, 88.64, 90.71),
    f"{_R}: adapters (dev)": (None, 85.29, 83.95, 88.40),
    f"{_R}: adapters after pretraining on the task (dev)": (None, 86.37, 89.24, 90.92),
}
