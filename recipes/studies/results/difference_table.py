"""The table of differences: each line's means minus another line's, mostly full fine-tuning's."""

from collections.abc import Iterable, Sequence

import pandas as pd

from results.additional import counted_once
from results.lines import Columns, TableLine
from results.means import MeanAndError, difference, mean_over
from results.table import table_of, with_error


MEAN = "mean of these columns"


def compared(
    lines: Sequence[TableLine], base: TableLine, shown: Columns, split: str = "validation"
) -> pd.DataFrame:
    """Return the lines' differences to another line, each with its standard error, and their mean.

    A line whose runs are all those of the other one is left out.
    """
    cells = {}
    for line in lines:
        changes = differences_to(line, base, shown, split)
        if not changes or line.cells.items() <= base.cells.items():
            continue
        tasks = counted_once(shown[name][0] for name in changes)
        counted = [change for name, change in changes.items() if shown[name][0] in tasks]
        cells[line.label] = {name: with_error(changes[name], sign="+") for name in changes}
        cells[line.label][MEAN] = f"{with_error(mean_over(counted), sign='+')} of {len(counted)}"
    return table_of(cells, [*shown, MEAN])


def full_fine_tuning(lines: Iterable[TableLine]) -> TableLine:
    """Return a line with the runs of full fine-tuning with which the others are compared.

    Of several lines that have a task, it takes the runs of the line with the most tasks.
    """
    full = [line for line in lines if line.method == "full"]
    if not full:
        return TableLine("", "full", {}, ())
    full.sort(key=lambda line: len(line.runs))
    runs = {}
    for line in full:
        runs |= line.runs
    label = "; ".join(line.label for line in reversed(full))
    return TableLine(label, "full", runs, full[0].chosen)


def differences_to(
    line: TableLine, base: TableLine, shown: Columns, split: str = "validation"
) -> dict[str, MeanAndError]:
    """Return the line's means minus another's, in the columns that both have.

    Each has the standard error of the difference.
    """
    ours, theirs = line.scores(shown, split), base.scores(shown, split)
    return {name: difference(ours[name], theirs[name]) for name in ours if name in theirs}
