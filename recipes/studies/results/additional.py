"""The 17 further classification tasks of Houlsby et al. 2019, with both papers' accuracies."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from run.edge import RecipeError


@dataclass(frozen=True)
class PaperTask:
    """A task's rows and classes, and its test accuracies in the papers, in percent."""

    rows: int
    classes: int
    accuracies: tuple[float, ...]  # by PAPER_COLUMNS as far as there are some
    errors: tuple[float, float, float]  # the standard errors of COLUMNS_WITH_ERRORS

    def accuracy(self, column: str) -> tuple[float, float | None] | None:
        """Return the accuracy and its standard error in a column of the papers, if printed."""
        number = PAPER_COLUMNS.index(column)
        if number >= len(self.accuracies):
            return None
        if column not in COLUMNS_WITH_ERRORS:
            return self.accuracies[number], None
        return self.accuracies[number], self.errors[COLUMNS_WITH_ERRORS.index(column)]

    def difference(self, rows: int, classes: int) -> str:
        """Return how the data differ from the paper's."""
        if (rows, classes) == (self.rows, self.classes):
            return "as in the paper"
        return f"{rows:,} rows, {classes} classes; paper: {self.rows:,}, {self.classes}"


# Houlsby et al. 2019, table 2, and Mohebbi and Rajaei 2020, table 3, who have twelve of the tasks.
COLUMNS_WITH_ERRORS = ("2019: full", "2019: top n", "2019: adapters")
COLUMNS_OF_2020 = ("2020: full", "2020: not shared")
PAPER_COLUMNS = ("2019: no BERT", *COLUMNS_WITH_ERRORS, *COLUMNS_OF_2020)
BY_ISSUE, BY_PRODUCT = "customer_complaints_issue", "customer_complaints_product"
PAPER = {
    "20_newsgroups": PaperTask(18_846, 20, (91.1, 92.8, 92.8, 91.7), (0.1, 0.1, 0.2)),
    "crowdflower_airline": PaperTask(
        14_640, 3, (84.5, 83.6, 84.0, 84.5, 83.6, 83.3), (0.3, 0.1, 0.2)
    ),
    "crowdflower_corporate_messaging": PaperTask(
        3_118, 4, (91.9, 92.5, 92.4, 92.9, 92.5, 92.2), (0.5, 0.6, 0.3)
    ),
    "crowdflower_disasters": PaperTask(
        10_860, 2, (84.9, 85.3, 85.3, 84.1, 85.3, 84.0), (0.4, 0.4, 0.2)
    ),
    "crowdflower_economic_news_relevance": PaperTask(
        7_991, 2, (81.1, 82.1, 78.9, 82.5, 82.1, 84.6), (0.0, 2.8, 0.3)
    ),
    "crowdflower_emotion": PaperTask(
        40_000, 13, (36.3, 38.4, 37.6, 38.7, 38.4, 41.6), (0.1, 0.2, 0.1)
    ),
    "crowdflower_global_warming": PaperTask(4_225, 2, (82.7, 84.2, 81.9, 82.7), (0.4, 0.2, 0.3)),
    "crowdflower_political_audience": PaperTask(
        5_000, 2, (81.0, 80.9, 80.7, 79.0, 80.9, 78.5), (0.3, 0.8, 0.5)
    ),
    "crowdflower_political_bias": PaperTask(
        5_000, 2, (76.8, 75.2, 76.5, 75.9, 75.2, 76.5), (0.9, 0.4, 0.3)
    ),
    "crowdflower_political_message": PaperTask(
        5_000, 9, (43.8, 38.9, 44.9, 44.1, 38.9, 79.3), (0.6, 0.6, 0.2)
    ),
    "crowdflower_primary_emotions": PaperTask(
        2_524, 18, (33.5, 36.9, 38.2, 33.9, 36.9, 35.1), (1.6, 1.0, 1.4)
    ),
    "crowdflower_progressive_opinion": PaperTask(
        1_159, 3, (70.6, 71.6, 75.9, 71.7, 71.6, 81.4), (0.5, 1.3, 1.1)
    ),
    "crowdflower_progressive_stance": PaperTask(
        1_159, 4, (54.3, 63.8, 61.5, 60.6), (1.0, 1.3, 1.4)
    ),
    "crowdflower_us_economic_performance": PaperTask(
        4_952, 2, (75.6, 75.3, 76.5, 77.3, 75.3, 71.0), (0.1, 0.4, 0.1)
    ),
    "customer_complaints_issue": PaperTask(183_334, 157, (54.5, 55.9, 56.4, 55.4), (0.1, 0.1, 0.1)),
    "news_aggregator": PaperTask(422_937, 4, (95.2, 96.3, 96.5, 96.2, 96.3, 92.2), (0.0, 0.0, 0.0)),
    "sms_spam": PaperTask(5_573, 2, (98.5, 99.3, 99.3, 95.1), (0.2, 0.2, 2.2)),
}
# Another way to label complaints, by the product; the paper's 157 classes are issues.
PAPER[BY_PRODUCT] = PAPER[BY_ISSUE]
ALL = [name for name in PAPER if name != BY_PRODUCT]
# The columns' averages as printed. Two of them are not the means of the accuracies above, which are
# 74.1 and 75.0.
PRINTED = ("72.7", "73.7", "74.0", "73.3", "71.4", "74.9")
TOTAL_SIZES = {"2019: full": "17x", "2019: top n": "9.9x", "2019: adapters": "1.19x"}
TRAINED = {"2019: full": "100%", "2019: top n": "52.9%", "2019: adapters": "1.14%"}


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
