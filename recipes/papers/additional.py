"""The 17 further classification tasks of Houlsby et al. 2019: both papers' test accuracies, and ours beside them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any


Results = dict[str, Any]


@dataclass(frozen=True)
class PaperTask:
    """Rows and classes of a task, and its test accuracies in percent; None where a paper has none.

    Houlsby et al. 2019, table 2: the best model without BERT, BERT-base fine-tuned, its best number of top layers
    fine-tuned, adapters. Mohebbi and Rajaei 2020, table 3: fine-tuned, adapters that are not shared.
    """

    rows: int
    classes: int
    houlsby: tuple[float, float, float, float]
    mohebbi: tuple[float, float] | tuple[None, None] = (None, None)

    def difference(self, rows: int, classes: int) -> str:
        """Return how the data differ from the paper's."""
        if (rows, classes) == (self.rows, self.classes):
            return "as in the paper"
        return f"{rows:,} rows, {classes} classes; paper: {self.rows:,}, {self.classes}"


_COMPLAINTS = PaperTask(183_334, 157, (54.5, 55.9, 56.4, 55.4))
PAPER = {
    "20_newsgroups": PaperTask(18_846, 20, (91.1, 92.8, 92.8, 91.7)),
    "crowdflower_airline": PaperTask(14_640, 3, (84.5, 83.6, 84.0, 84.5), (83.6, 83.3)),
    "crowdflower_corporate_messaging": PaperTask(3_118, 4, (91.9, 92.5, 92.4, 92.9), (92.5, 92.2)),
    "crowdflower_disasters": PaperTask(10_860, 2, (84.9, 85.3, 85.3, 84.1), (85.3, 84.0)),
    "crowdflower_economic_news_relevance": PaperTask(7_991, 2, (81.1, 82.1, 78.9, 82.5), (82.1, 84.6)),
    "crowdflower_emotion": PaperTask(40_000, 13, (36.3, 38.4, 37.6, 38.7), (38.4, 41.6)),
    "crowdflower_global_warming": PaperTask(4_225, 2, (82.7, 84.2, 81.9, 82.7)),
    "crowdflower_political_audience": PaperTask(5_000, 2, (81.0, 80.9, 80.7, 79.0), (80.9, 78.5)),
    "crowdflower_political_bias": PaperTask(5_000, 2, (76.8, 75.2, 76.5, 75.9), (75.2, 76.5)),
    "crowdflower_political_message": PaperTask(5_000, 9, (43.8, 38.9, 44.9, 44.1), (38.9, 79.3)),
    "crowdflower_primary_emotions": PaperTask(2_524, 18, (33.5, 36.9, 38.2, 33.9), (36.9, 35.1)),
    "crowdflower_progressive_opinion": PaperTask(1_159, 3, (70.6, 71.6, 75.9, 71.7), (71.6, 81.4)),
    "crowdflower_progressive_stance": PaperTask(1_159, 4, (54.3, 63.8, 61.5, 60.6)),
    "crowdflower_us_economic_performance": PaperTask(4_952, 2, (75.6, 75.3, 76.5, 77.3), (75.3, 71.0)),
    # Two ways to label complaints, by the issue as in the paper, or by the product.
    "customer_complaints_issue": _COMPLAINTS,
    "customer_complaints_product": _COMPLAINTS,
    "news_aggregator": PaperTask(422_937, 4, (95.2, 96.3, 96.5, 96.2), (96.3, 92.2)),
    "sms_spam": PaperTask(5_573, 2, (98.5, 99.3, 99.3, 95.1)),
}


def describe(name: str, runs: Sequence[Results]) -> tuple[str, float, str]:
    """Return a row of the table: the task, the mean test accuracy of runs with different seeds, and how their data
    differ from the paper's."""
    rows = sum(runs[0]["dataset"]["rows"].values())
    accuracy = 100 * mean(results["test"]["accuracy"] for results in runs)
    return name, accuracy, PAPER[name].difference(rows, len(runs[0]["labels"]))


def format_table(rows: Iterable[tuple[str, float, str]]) -> str:
    """Return a Markdown table of our accuracies beside the papers', from rows of (task, ours, difference of the data).

    The last row has the mean of each column in which all of these tasks have a number. Tasks that are one task in the
    papers count once, with the mean of their accuracies.
    """
    lines = [
        "| task | no BERT | fine-tuned | top n | adapters | fine-tuned (2020) | not shared (2020) | this run | data |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    columns = [(*PAPER[name].houlsby, *PAPER[name].mohebbi, ours) for name, ours, _ in rows]
    for (name, _, data), scores in zip(rows, columns, strict=True):
        lines.append(_line(name, scores, data))
    of_task: dict[PaperTask, list[tuple[float | None, ...]]] = {}
    for (name, _, _), scores in zip(rows, columns, strict=True):
        of_task.setdefault(PAPER[name], []).append(scores)
    once = [(*same[0][:-1], mean(scores[-1] for scores in same)) for same in of_task.values()]
    means = [mean(column) if None not in column else None for column in zip(*once, strict=True)]
    return "\n".join([*lines, _line("mean", means, ""), ""])


def _line(name: str, scores: Iterable[float | None], data: str) -> str:
    cells: list[Any] = [name, *("" if score is None else f"{score:.1f}" for score in scores), data]
    return f"| {' | '.join(cells)} |"
