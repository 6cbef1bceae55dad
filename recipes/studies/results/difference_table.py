"""The table of differences: each line's means minus another line's, mostly full fine-tuning's."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import pandas as pd

from results.additional import counted_once
from results.lines import Cell, Columns, TableLine, join_labels
from results.means import MeanAndError, difference, mean_over
from results.read import Results
from results.table import MISSING, table_of, with_error
from run.run import CONTENT


MEAN = "mean of these columns"
OTHER_DATA = "other data"  # in place of a difference
_NOTE = f"{OTHER_DATA}: the runs are scored on other examples, so that there is no difference."


def compared(
    lines: Sequence[TableLine], base: TableLine, columns: Columns, split: str = "validation"
) -> pd.DataFrame:
    """Return the lines' differences to another line, each with its standard error, and their mean.

    A line whose runs are all those of the other one is left out. OTHER_DATA stands for a difference
    between scores on unlike examples.
    """
    cells = {}
    for line in lines:
        changes = differences_to(line, base, columns, split)
        of_other_data = on_other_data(line, base, columns, split)
        if line.cells.items() <= base.cells.items() or not (changes or of_other_data):
            continue
        compared_cells = [*line.cells_of(columns).items(), *base.cells_of(columns).items()]
        constant = {name for name, cell in compared_cells if cell.constant}
        tasks = counted_once(columns[name][0] for name in changes)
        counted, texts = [], dict.fromkeys(of_other_data, OTHER_DATA)
        for name, change in changes.items():
            texts[name] = with_error(change, sign="+", constant=name in constant)
            if columns[name][0] in tasks:
                counted.append(change)
        texts[MEAN] = MISSING
        if counted:
            texts[MEAN] = f"{with_error(mean_over(counted), sign='+')} of {len(counted)}"
        cells[line.label] = texts
    return table_of(cells, [*columns, MEAN])


def note_on(table: pd.DataFrame) -> str:
    """Return what OTHER_DATA means if it is in a table."""
    return _NOTE if (table == OTHER_DATA).any(axis=None) else ""


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
    """Return the line's means minus another's, in the columns that both have, scored on the same
    examples.

    Each has the standard error of the difference.
    """
    ours, theirs = line.scores(columns, split), base.scores(columns, split)
    names = theirs.keys() - on_other_data(line, base, columns, split)
    return {name: difference(ours[name], theirs[name]) for name in ours if name in names}


def on_other_data(
    line: TableLine, base: TableLine, columns: Columns, split: str = "validation"
) -> list[str]:
    """Return the columns with a score of two lines that is not of the same examples."""
    ours, theirs = line.cells_of(columns), base.cells_of(columns)
    names = [name for name in line.scores(columns, split) if name in base.scores(columns, split)]
    return [name for name in names if not _are_on_same_data([ours[name], theirs[name]], split)]


def _are_on_same_data(cells: Iterable[Cell], split: str) -> bool:
    """Return whether the runs of all seeds record the same files and numbers of rows of a split, as
    far as they record them. A validation split without a file is a part of the training file.
    """
    recorded = defaultdict(set)
    for cell in cells:
        for run in cell.seeds.values():
            content, dataset = run.get(CONTENT, {}), run.get("dataset", {})
            files = [name for name in content if name.startswith(split)]
            if not files and split == "validation" and "id" not in dataset:  # not on the Hub
                files = [name for name in content if name == "train"]
            for name in files:
                recorded["file", name].add(content[name]["sum"])
            for name, rows in dataset.get("rows", {}).items():
                if name.startswith(split):
                    recorded["rows", name].add(rows)
    return all(len(values) == 1 for values in recorded.values())
