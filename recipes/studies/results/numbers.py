"""The papers' numbers on GLUE, in percent, by the columns of the tables."""

from dataclasses import dataclass

from common.scores import COLUMNS


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table: the scores by column."""

    scores: dict[str, float]
    total: float | None = (
        None  # as printed: the server's average, or in two rows of 2020 the plain mean
    )
    trained: float | None = None  # parameters per task, in percent of the encoder
    size: float | None = None  # parameters for all tasks, in multiples of the encoder


# The second scores of some tasks, which are no columns of the papers' tables of GLUE.
SECOND_COLUMNS = {
    "CoLA accuracy": ("cola", "accuracy"),
    "MRPC accuracy": ("mrpc", "accuracy"),
    "STS-B Pearson": ("stsb", "pearson"),
    "QQP accuracy": ("qqp", "accuracy"),
}


def _row(
    scores: tuple[float | None, ...], *sizes: float, second: tuple[float | None, ...] = ()
) -> PaperRow:
    named = [
        *zip([*COLUMNS, "WNLI"], scores, strict=False),
        *zip(SECOND_COLUMNS, second, strict=False),
    ]
    return PaperRow({name: score for name, score in named if score is not None}, *sizes)


_H = "Houlsby 2019, BERT-large"  # table 1
_M = "Mohebbi 2020, BERT-base"  # Mohebbi and Rajaei: the report of their re-implementation
# Whritenour and Schoch: a reproduction with the first paper's code, whose total is the mean of CoLA
# and MRPC. Han, Pang and Wu 2021, Robust Transfer Learning ... through Adapters; the adapters'
# scores are AdapterHub's.
_U, _R = "Whritenour 2019, BERT-base", "Han 2021, BERT-base"
# Test scores are the server's.
PAPER_ROWS = {
    f"{_H}: full (test)": _row((60.5, 94.9, 89.3, 87.6, 72.1, 86.7, 85.9, 91.1, 70.1), 80.4, 100, 9.0),
    f"{_H}: r 8-256 (test)": _row((59.5, 94.0, 89.5, 86.9, 71.8, 84.9, 85.1, 90.7, 71.5), 80.0, 3.6, 1.3),
    f"{_H}: r 64 (test)": _row((56.9, 94.2, 89.6, 87.3, 71.8, 85.3, 84.6, 91.4, 68.8), 79.6, 2.1, 1.2),
    f"{_M}: full (test)": _row((52.1, 93.5, 88.9, 87.1, 71.2, 84.6, 83.4, 90.5, 66.4), 79.7),
    f"{_M}: shared in each layer (test)": _row((55.2, 90.9, 88.7, 82.5, 71.4, 84.1, 83.3, 90.6, 68.2), 79.4),
    f"{_M}: not shared (test)": _row((55.6, 93.4, 87.8, 83.9, 71.4, 84.0, 83.1, 90.7, 66.0), 79.2),
    f"{_M}: 3-shared (test)": _row((53.5, 92.6, 88.6, 84.6, 70.9, 83.5, 82.9, 90.3, 67.6), 79.3),
    f"{_R}: full (dev)": _row((56.53, 92.32, 88.85, 88.48, 87.49, None, 84.1, 90.66, 65.7, 56.34),
                              second=(None, 84.07, 88.64, 90.71)),
    f"{_R}: adapters (dev)": _row((49.23, 91.97, 89.47, 83.7, 84.31, None, 81.08, 87.46, 61.73, 45.07),
                                  second=(None, 85.29, 83.95, 88.40)),
    f"{_R}: pretrained (dev)": _row((64.87, 92.78, 89.76, 88.87, 87.88, None, 84.14, 91.12, 68.59, 56.34),
                                    second=(None, 86.37, 89.24, 90.92)),
    f"{_U}: full (dev)": _row((), second=(82.742, 85.049)),
    f"{_U}: adapters (dev)": _row((), second=(81.78, 85.78)),
    "adapter-bert, BERT-base: lr 3e-4, 5 epochs (dev)": _row((), second=(None, 85.78)),  # google-research's
}  # fmt: skip
# Houlsby et al. 2019, section 3.6: mean validation accuracy of eight tasks by size, and figure 5:
# F1 on SQuAD.
SIZES, TASKS_OF_SIZES = {8: 86.2, 64: 85.8, 256: 85.7}, 8
SQUAD = {"full": 90.7, "r 64": 90.4, "r 2": 89.9}
