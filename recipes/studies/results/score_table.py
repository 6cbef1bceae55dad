"""The table of scores: the mean over the seeds and the best run, beside the papers' lines."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

import pandas as pd

from results.lines import Cell, Columns, TableLine, find_columns
from results.means import mean_and_error
from results.numbers import PAPER_LINES, SECOND_COLUMNS, SQUAD
from results.read import NO_BERT
from results.table import MISSING, table_of, with_error
from tasks.scores import COLUMNS, ByTask, mean_of_nine, server_average


def scores(lines: Sequence[TableLine]) -> pd.DataFrame:
    """Return the mean over the seeds and the best run of each line, and the papers' lines.

    A paper's line is columns if it has a score in one of the columns.
    """
    columns = find_columns(lines)
    for name, column in SECOND_COLUMNS.items():
        if any(line.scores({name: column}) for line in lines):
            columns[name] = column
    cells: dict[str, dict[str, Any]] = {}
    for line in lines:
        of_means = line.cells_of(columns)
        best = {name: cell.best for name, cell in of_means.items()}
        of_best = {name: Cell({run["seed"]: run}, run) for name, run in best.items()}
        cells[f"{line.label}: mean"] = _sizes(line, best=False) | _scores(of_means, columns)
        cells[f"{line.label}: best"] = _sizes(line, best=True) | _scores(of_best, columns)
    table = table_of(cells)
    averages = [name for name in AVERAGES if lines and (table[name] != MISSING).any()]
    for label, printed in PAPER_LINES.iterrows():
        if printed.reindex([*columns]).notna().any():
            cells[str(label)] = _of_paper(printed)
    if "squad" in columns:
        for name, f1 in SQUAD.items():
            cells[f"Houlsby 2019, BERT-large: {name}"] = {"squad": f"{f1}"}
    return table_of(cells, ["trained", "total", *columns, *averages])


def _sizes(line: TableLine, best: bool) -> dict[str, str]:
    """Return the cells with the trained parameters and the total."""
    if line.method == NO_BERT:
        return {"trained": MISSING, "total": MISSING}
    sizes = line.sizes(best)
    tasks = "task" if sizes.tasks == 1 else "tasks"
    return {
        "trained": f"{sizes.trained:,.0f} ({sizes.share:.1%})",
        "total": f"{sizes.total:.2f}x for {sizes.tasks} {tasks}",
    }


def _scores(cells: Mapping[str, Cell], columns: Columns) -> dict[str, str]:
    """Return the cells with the scores and their averages."""
    texts = {}
    for name, cell in cells.items():
        texts[name] = with_error(cell.mean(columns[name][1]), constant=cell.constant)
    return texts | _averages(cells, columns)


def mean_of_both(scores: ByTask) -> float | None:
    """Return the mean of the accuracies of CoLA and MRPC, the total of Whritenour and Schoch."""
    accuracies = [scores.get(task, {}).get(score) for task, score in OF_BOTH.values()]
    present = [accuracy for accuracy in accuracies if accuracy is not None]
    return mean(present) if len(present) == len(accuracies) else None


NINE, SERVER, BOTH = "mean of nine", "server's average", "mean accuracy of CoLA and MRPC"
OF_BOTH = {name: SECOND_COLUMNS[name] for name in ("CoLA accuracy", "MRPC accuracy")}
AVERAGES: dict[str, Callable[[ByTask], float | None]] = {
    NINE: mean_of_nine,
    SERVER: server_average,
    BOTH: mean_of_both,
}


def _averages(cells: Mapping[str, Cell], columns: Columns) -> dict[str, str]:
    """Return the averages over tasks, with the error over the seeds that all columns have.

    If the columns have other seeds, an average is that of their means, and has no error. One for
    which a score is missing is a dash.
    """
    by_column = {}
    for name, cell in cells.items():
        by_seed = cell.by_seed(columns[name][1])
        if by_seed:
            by_column[columns[name]] = by_seed
    if len({frozenset(by_seed) for by_seed in by_column.values()}) > 1:
        for column, by_seed in by_column.items():
            by_column[column] = {0: mean(by_seed.values())}
    by_task: dict[int, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for (task, score), by_seed in by_column.items():
        for seed, value in by_seed.items():
            by_task[seed][task][score] = value
    texts = {}
    for name, average in AVERAGES.items():
        averages = [average(scores) for scores in by_task.values()]
        known = [value for value in averages if value is not None]
        is_complete = known and len(known) == len(averages)
        texts[name] = with_error(mean_and_error(known) if is_complete else None)
    return texts


def _of_paper(printed: pd.Series) -> dict[str, str]:
    """Return the cells of a paper's line, with the plain means of its scores."""
    cells: dict[str, str] = printed.dropna().to_dict()
    if SERVER in cells:
        cells[SERVER] += " printed"
    for name, averaged, digits in ((NINE, [*COLUMNS], 1), (BOTH, [*OF_BOTH], 2)):
        average = printed[averaged].astype(float).mean(skipna=False)
        if pd.notna(average):
            cells[name] = f"{average:.{digits}f}"
    return cells
