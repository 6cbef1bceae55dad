"""The 17 further classification tasks of Houlsby et al. 2019, with both papers' accuracies.

`additional.csv` has the tasks' rows and classes, the test accuracies and standard errors of table
2, and those of table 3 of Mohebbi and Rajaei 2020, who have twelve of the tasks.
"""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from run.edge import RecipeError


BY_ISSUE, BY_PRODUCT = "customer_complaints_issue", "customer_complaints_product"
PAPER = pd.read_csv(Path(__file__).with_name("additional.csv"), index_col="task")
ALL = [*PAPER.index]
# Another way to label complaints, by the product; the paper's 157 classes are issues.
PAPER.loc[BY_PRODUCT] = PAPER.loc[BY_ISSUE]
PAPER_COLUMNS = [name for name in PAPER if name[0] == "2" and not name.endswith("error")]
COLUMN_OF_2020 = PAPER_COLUMNS[-1]
# Two of the averages as printed are not the means of the accuracies, which are 74.1 and 75.0.
PRINTED = pd.DataFrame(
    [
        ("72.7", "73.7", "74.0", "73.3", "71.4", "74.9"),
        (None, "17x", "9.9x", "1.19x", None, None),
        (None, "100%", "52.9%", "1.14%", None, None),
    ],
    ["as printed", "total parameters", "trained per task"],
    PAPER_COLUMNS,
)


def counted_once(tasks: Iterable[str]) -> list[str]:
    """Return the tasks without the second of two that are one task in the papers."""
    tasks = list(tasks)
    if BY_ISSUE in tasks and BY_PRODUCT in tasks:
        tasks.remove(BY_PRODUCT)
    return tasks


def check_folders(folder: str, tasks: Iterable[str]) -> None:
    """Raise RecipeError if a task's folder or its test file is missing."""
    for name in tasks:
        if not Path(folder, name).is_dir():
            raise RecipeError(
                f"{folder} has no folder {name}. Name the tasks that are there with --task."
            )
        if not any(Path(folder, name).glob("test.*")):
            raise RecipeError(
                f"{folder}/{name} must have a test split with labels: the papers report test "
                "accuracy."
            )
