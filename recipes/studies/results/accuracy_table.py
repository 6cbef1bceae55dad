"""The table of the 17 further tasks: test accuracies beside those of the papers."""

from collections.abc import Mapping, Sequence
from statistics import mean

import pandas as pd

from results.additional import (
    COLUMNS_OF_2020,
    PAPER,
    PAPER_COLUMNS,
    PRINTED,
    TOTAL_SIZES,
    TRAINED,
    counted_once,
)
from results.lines import TableLine
from results.means import MeanAndError, mean_over
from results.read import NO_BERT
from results.table import table_of, with_error
from tasks.scores import proper_name


ByTask = Mapping[str, MeanAndError]  # a column of the table


def accuracies(lines: Sequence[TableLine]) -> pd.DataFrame:
    """Return the papers' test accuracies beside those of the lines that have some.

    A column is a method; below the tasks are the means and sizes. The last column says how the data
    differ from the paper's.
    """
    tested, ours = [], {}
    for line in lines:
        by_task = _test_accuracies(line)
        if by_task:
            tested.append(line)
            ours[line.label] = by_task
    tested_tasks = set[str]().union(*ours.values())
    tasks = [task for task in PAPER if task in tested_tasks]
    if not tasks:
        return pd.DataFrame()
    papers = {name: _paper_accuracies(name, tasks) for name in PAPER_COLUMNS}
    cells: dict[str, dict[str, str]] = {}
    for task in tasks:
        texts = {"data": _describe_data(task, tested)}
        for name in papers:
            texts[name] = with_error(papers[name].get(task), digits=1)
        for name in ours:
            texts[name] = with_error(ours[name].get(task))
        cells[proper_name(task)] = texts
    for name, averaged in _averages_over(tasks).items():
        cells[name] = _means_of_papers(papers, averaged) | _means_of_ours(ours, averaged)
    cells["as printed"] = dict(zip(PAPER_COLUMNS, PRINTED, strict=True))
    return table_of(cells | _sizes(tested), [*papers, *ours, "data"])


def _test_accuracies(line: TableLine) -> dict[str, MeanAndError]:
    """Return the test accuracies of a line on the 17 tasks, as far as it has some."""
    by_task = {}
    for task, cell in line.cells.items():
        accuracy = cell.mean("accuracy", "test")
        if task in PAPER and accuracy is not None:
            by_task[task] = accuracy
    return by_task


def _paper_accuracies(column: str, tasks: Sequence[str]) -> dict[str, MeanAndError]:
    """Return the accuracies in a column of the papers, as far as there are some."""
    by_task = {}
    for task in tasks:
        accuracy = PAPER[task].accuracy(column)
        if accuracy is not None:
            by_task[task] = accuracy
    return by_task


def _averages_over(tasks: Sequence[str]) -> dict[str, list[str]]:
    """Return the tasks of each average: all, and those that the paper of 2020 has."""
    once = counted_once(tasks)
    of_2020 = [*_paper_accuracies(COLUMNS_OF_2020[0], once)]
    averages = {f"mean of {len(once)}": once}
    if of_2020:
        averages[f"mean of {len(of_2020)} of 2020"] = of_2020
    return averages


def _means_of_papers(papers: Mapping[str, ByTask], tasks: Sequence[str]) -> dict[str, str]:
    """Return the means of the columns that have all tasks; the papers give them without errors."""
    means = {}
    for name, column in papers.items():
        if column.keys() >= {*tasks}:
            means[name] = f"{mean(column[task][0] for task in tasks):.1f}"
    return means


def _means_of_ours(ours: Mapping[str, ByTask], tasks: Sequence[str]) -> dict[str, str]:
    """Return the means of the columns that have all tasks, with their standard errors."""
    means = {}
    for name, column in ours.items():
        if column.keys() >= {*tasks}:
            means[name] = with_error(mean_over([column[task] for task in tasks]))
    return means


def _sizes(lines: Sequence[TableLine]) -> dict[str, dict[str, str]]:
    """Return the sizes of the papers' columns and of the lines."""
    totals, trained = dict(TOTAL_SIZES), dict(TRAINED)
    for line in lines:
        if line.method != NO_BERT:
            sizes = line.sizes()
            totals[line.label] = f"{sizes.total:.3g}x"
            trained[line.label] = f"{sizes.share:.2%}"
    return {"total parameters": totals, "trained per task": trained}


def _describe_data(task: str, lines: Sequence[TableLine]) -> str:
    """Return how the data of a task's runs differ from the paper's."""
    best = [line.cells[task].best for line in lines if task in line.cells]
    rows = sum(best[-1]["dataset"]["rows"].values())
    return PAPER[task].difference(rows, len(best[-1]["labels"]))
