"""The papers' numbers, in percent.

`glue.csv` has the lines of the papers' tables of GLUE as they are printed: Houlsby et al. 2019,
table 1; Mohebbi and Rajaei 2020, tables 1 and 2; Han, Pang and Wu 2021, table 1, whose adapters'
scores are AdapterHub's; Whritenour and Schoch 2019, a reproduction with the first paper's code; and
the README of that code. Test scores are the server's. "trained" is the parameters per task, as a
share of the encoder or as a number, "total" those for all tasks in multiples of the encoder.
"""

from pathlib import Path

import pandas as pd


PAPER_LINES = pd.read_csv(Path(__file__).with_name("glue.csv"), index_col="line", dtype=str)
# The second scores of some tasks, which are no columns of the papers' tables of GLUE.
SECOND_COLUMNS = {
    "CoLA accuracy": ("cola", "accuracy"),
    "MRPC accuracy": ("mrpc", "accuracy"),
    "STS-B Pearson": ("stsb", "pearson"),
    "QQP accuracy": ("qqp", "accuracy"),
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
