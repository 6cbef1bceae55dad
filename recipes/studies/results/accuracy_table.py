"""The table of the 17 further tasks: test accuracies beside those of the papers."""

from collections.abc import Sequence

import pandas as pd

from results.additional import COLUMN_OF_2020, PAPER, PAPER_COLUMNS, PRINTED, counted_once
from results.lines import TableLine
from results.means import MeanAndError
from results.read import NO_BERT
from results.table import CONSTANT, MISSING, with_error
from tasks.scores import proper_name


def accuracies(lines: Sequence[TableLine]) -> pd.DataFrame:
    """Return the papers' test accuracies beside those of the lines that have some.

    A column is a method; below the tasks are the means and sizes. The last column says how the data
    differ from the paper's.
    """
    means = PAPER[PAPER_COLUMNS].astype(float)
    errors = PAPER.filter(like=", error").rename(columns=lambda name: name.partition(",")[0])
    errors = errors.reindex(columns=means.columns)
    for line in lines:
        for task in PAPER.index.intersection([*line.cells]):
            accuracy = line.cells[task].mean("accuracy", "test")
            if accuracy is not None:
                means.loc[task, line.label], errors.loc[task, line.label] = accuracy
    ours = means.columns[len(PAPER_COLUMNS) :]
    tasks = means[ours].dropna(how="all").index
    if tasks.empty:
        return pd.DataFrame()
    means, errors = means.loc[tasks], errors.loc[tasks]
    table = pd.DataFrame(index=[*map(proper_name, tasks)], columns=means.columns, dtype=object)
    for name in means:
        table[name] = [_text(name, pair) for pair in zip(means[name], errors[name], strict=True)]
    tested = [line for line in lines if line.label in ours]
    for line in tested:
        for task in means[line.label].dropna().index:
            if line.cells[task].constant:
                table.loc[proper_name(task), line.label] += f" {CONSTANT}"
    _add_means(table, means, errors)
    for task in tasks:
        table.loc[proper_name(task), "data"] = _describe_data(task, tested)
    table = pd.concat([table, PRINTED])
    for line in tested:
        if line.method != NO_BERT:
            sizes = line.sizes()
            table.loc["total parameters", line.label] = f"{sizes.total:.3g}x"
            table.loc["trained per task", line.label] = f"{sizes.share:.2%}"
    return table.fillna(MISSING)


def _add_means(table: pd.DataFrame, means: pd.DataFrame, errors: pd.DataFrame) -> None:
    """Add the mean of the tasks, and that of those of 2020, below them."""
    once = counted_once(means.index)
    of_2020 = means.loc[once, COLUMN_OF_2020].dropna().index
    for label, averaged in (("", once), (" of 2020", of_2020)):
        if len(averaged):
            average = means.loc[averaged].mean(skipna=False)
            error = (errors.loc[averaged] ** 2).sum(skipna=False) ** 0.5 / len(averaged)
            error[PAPER_COLUMNS] = float("nan")  # the papers give none
            texts = map(_text, means, zip(average, error, strict=True))
            table.loc[f"mean of {len(averaged)}{label}"] = [*texts]


def _text(column: str, value: MeanAndError) -> str:
    """Return a mean with its error as text, with the digits of its column."""
    mean, error = (None if pd.isna(number) else number for number in value)
    digits = 1 if column in PAPER_COLUMNS else 2
    return MISSING if mean is None else with_error((mean, error), digits=digits)


def _describe_data(task: str, lines: Sequence[TableLine]) -> str:
    """Return how the data of a task's runs differ from the paper's."""
    best = [line.cells[task].best for line in lines if task in line.cells][-1]
    rows, classes = sum(best["dataset"]["rows"].values()), len(best["labels"])
    paper = PAPER.loc[task]
    if (rows, classes) == (paper["rows"], paper["classes"]):
        return "as in the paper"
    printed = f"{paper['rows']:,.0f}, {paper['classes']:.0f}"
    return f"{rows:,} rows, {classes} classes; paper: {printed}"
