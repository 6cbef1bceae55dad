"""The papers' numbers on GLUE, in percent, by the columns of the tables."""

from dataclasses import dataclass
from typing import Any

from tasks.scores import COLUMNS


@dataclass(frozen=True)
class PaperLine:
    """A line of a paper's table: the scores by column."""

    scores: dict[str, float]
    total: float | None = None  # as printed: GLUE's server's average
    trained: str = "-"  # parameters per task as printed, in percent of the encoder or as a number
    size: float | None = None  # parameters for all tasks, in multiples of the encoder


# The second scores of some tasks, which are no columns of the papers' tables of GLUE.
SECOND_COLUMNS = {
    "CoLA accuracy": ("cola", "accuracy"),
    "MRPC accuracy": ("mrpc", "accuracy"),
    "STS-B Pearson": ("stsb", "pearson"),
    "QQP accuracy": ("qqp", "accuracy"),
}


def _line(
    scores: tuple[float | None, ...], *printed_sizes: Any, second: tuple[float | None, ...] = ()
) -> PaperLine:
    """Return a line from its scores in the order of the columns, None where there is none."""
    by_column = dict(zip([*COLUMNS, "WNLI"], scores, strict=False))
    by_column |= zip(SECOND_COLUMNS, second, strict=False)
    printed = {name: score for name, score in by_column.items() if score is not None}
    return PaperLine(printed, *printed_sizes)


_H = "Houlsby 2019, BERT-large"  # table 1
_M = "Mohebbi 2020, BERT-base"  # Mohebbi and Rajaei: the report of their re-implementation
# Whritenour and Schoch: a reproduction with the first paper's code, whose total is the mean of CoLA
# and MRPC.
_U = "Whritenour 2019, BERT-base"
# Han, Pang and Wu 2021, Robust Transfer Learning ... through Adapters; the adapters' scores are
# AdapterHub's.
_R = "Han 2021, BERT-base"
# Test scores are the server's.
PAPER_LINES = {
    f"{_H}: full (test)": _line(
        (60.5, 94.9, 89.3, 87.6, 72.1, 86.7, 85.9, 91.1, 70.1), 80.4, "100%", 9.0
    ),
    f"{_H}: r 8-256 (test)": _line(
        (59.5, 94.0, 89.5, 86.9, 71.8, 84.9, 85.1, 90.7, 71.5), 80.0, "3.6%", 1.3
    ),
    f"{_H}: r 64 (test)": _line(
        (56.9, 94.2, 89.6, 87.3, 71.8, 85.3, 84.6, 91.4, 68.8), 79.6, "2.1%", 1.2
    ),
    f"{_M}: full (test)": _line((52.1, 93.5, 88.9, 87.1, 71.2, 84.6, 83.4, 90.5, 66.4), 79.7),
    f"{_M}: shared in each layer (test)": _line(
        (55.2, 90.9, 88.7, 82.5, 71.4, 84.1, 83.3, 90.6, 68.2), 79.4, "1,189,632"
    ),
    f"{_M}: not shared (test)": _line(
        (55.6, 93.4, 87.8, 83.9, 71.4, 84.0, 83.1, 90.7, 66.0), 79.2, "3,006,720"
    ),
    f"{_M}: 3-shared (test)": _line(
        (53.5, 92.6, 88.6, 84.6, 70.9, 83.5, 82.9, 90.3, 67.6), 79.3, "396,544"
    ),
    f"{_R}: full (dev)": _line(
        (56.53, 92.32, 88.85, 88.48, 87.49, None, 84.1, 90.66, 65.7, 56.34),
        second=(None, 84.07, 88.64, 90.71),
    ),
    f"{_R}: adapters (dev)": _line(
        (49.23, 91.97, 89.47, 83.7, 84.31, None, 81.08, 87.46, 61.73, 45.07),
        second=(None, 85.29, 83.95, 88.40),
    ),
    f"{_R}: pretrained (dev)": _line(
        (64.87, 92.78, 89.76, 88.87, 87.88, None, 84.14, 91.12, 68.59, 56.34),
        second=(None, 86.37, 89.24, 90.92),
    ),
    f"{_U}: full (dev)": _line((), second=(82.742, 85.049)),
    f"{_U}: adapters (dev)": _line((), None, "2,379,264 (2.1%)", second=(81.78, 85.78)),
    # google-research's
    "adapter-bert, BERT-base: lr 3e-4, 5 epochs (dev)": _line((), second=(None, 85.78)),
}
# Houlsby et al. 2019, section 3.4, of figure 4: validation accuracies, and trained parameters.
FIGURE_4 = {
    "MNLI-m": "the top layer alone 77.8 (9M), adapters of r=64 83.7 (2M), full fine-tuning 84.4; "
    "norms alone 4 points less than full fine-tuning",
    "CoLA": "norms alone 3.5 points less than full fine-tuning",
}
# Houlsby et al. 2019, section 3.5, of figure 6: validation accuracies without any adapter, which
# are those of the majority class, and the largest drop without the adapters of one layer.
WITHOUT_ADAPTERS = {"mnli": 37, "cola": 69}
LARGEST_DROP = 2
# Houlsby et al. 2019, section 3.6: mean validation accuracy of eight tasks by size.
SIZES = {8: 86.2, 64: 85.8, 256: 85.7}
TASKS_OF_SIZES = 8
# Houlsby et al. 2019, figure 5: F1.
SQUAD = {"full": 90.7, "r 64": 90.4, "r 2": 89.9}
