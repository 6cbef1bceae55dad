"""The table of differences: each line's means minus another line's, mostly full fine-tuning's."""

from collections.abc import Iterable, Sequence

import pandas as pd

from results.additional import counted_once
from results.lines import Columns, TableLine, join_labels
from results.means import MeanAndError, difference, mean_over
from results.read import Results
from results.table import table_of, with_error


MEAN = "mean of these columns"


def compared(
    lines: Sequence[TableLine], base: TableLine, columns: Columns, split: str = "validation"
) -> pd.DataFrame:
    """Return the lines' differences to another line, each with its standard error, and their mean.

    A line whose runs are all those of the other one is left out.
    """
    cells = {}
    for line in lines:
        changes = differences_to(line, base, columns, split)
        if not changes or line.cells.items() <= base.cells.items():
            continue
        compared_cells = [*line.cells_of(columns).items(), *base.cells_of(columns).items()]
        constant = {name for name, cell in compared_cells if cell.constant}
        tasks = counted_once(columns[name][0] for name in changes)
        counted, texts = [], {}
        for name, change in changes.items():
            texts[name] = with_error(change, sign="+", constant=name in constant)
            if columns[name][0] in tasks:
                counted.append(change)
        texts[MEAN] = f"{with_error(mean_over(counted), sign='+')} of {len(counted)}"
        cells[line.label] = texts
    return table_of(cells, [*columns, MEAN])


def full_fine_tuning(lines: Iterable[TableLine]) -> TableLine:
    """Return a line with the runs of full fine-tuning with which the others are compared.

    Of several lines that have a task, it takes the runs of the line with the most tasks.
    """
    full = [line for line in lines if line.method == "full"]
    if not full:
        return TableLine("", "full", {}, ())
    full.sort(key=lambda line: len(line.runs))
    runs: dict[str, list[Results]] = {}
    for line in full:
        runs |= line.runs
    return TableLine(join_labels(reversed(full)), "full", runs, full[0].choices)


def differences_to(
    line: TableLine, base: TableLine, columns: Columns, split: str = "validation"
) -> dict[str, MeanAndError]:
    """Return the line's means minus another's, in the columns that both have.

    Each has the standard error of the difference.
    """
    ours, theirs = line.scores(columns, split), base.scores(columns, split)
    return {name: difference(ours[name], theirs[name]) for name in ours if name in theirs}
