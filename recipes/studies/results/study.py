"""The tables of a study: scores, differences, what validation has chosen, test accuracies."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from results.accuracy_table import accuracies
from results.difference_table import compared, full_fine_tuning
from results.lines import TableLine, arrange, differences, find_columns
from results.read import collect
from results.score_table import scores
from results.table import MISSING, Pages, show, table_of
from sweeping.runs import is_meant_for
from tasks.scores import COLUMNS


NOTES = """\
Scores: Matthews' correlation for CoLA, F1 for MRPC and QQP, Spearman's correlation for STS-B,
else accuracy; in percent, on the validation split at the epoch that it has chosen, except for
papers' lines that say "test". ±: standard error. Mean: over the seeds, at the point with the
best mean; the seeds that have searched it are among them, so it is slightly optimistic. Best: of
all runs, as in Houlsby et al. 2019. MNLI-mm has a point of its own, by its own score; if only
one seed has searched, its mean is at MNLI-m's point, where the other seeds ran. MRPC's, CoLA's
and QQP's accuracy and STS-B's Pearson correlation are at the same points. Mean of nine: the
plain mean of the columns from CoLA to RTE. Server's average: as GLUE's server defines it, the
mean over its nine tasks, with WNLI, of the mean of each task's scores (two for MRPC, STS-B, QQP
and MNLI); for a paper the total as printed, in two lines of 2020 the plain mean. Trained:
parameters per task, with the head, and as a share of the encoder. Total: for all tasks, in
multiples of the encoder; as in the papers, MNLI counts as two tasks, complaints as one, and WNLI
not at all."""
DIFFERENCES = """\
±: standard error of the difference. Lines with the same seeds on a task are compared seed by
seed (paired). The mean is over the columns; its error is that over the seeds, for these tasks,
as if MNLI's two were of different runs."""
ACCURACIES = """\
The papers' columns stand first, with the standard errors of 2019, then the runs', at the values
that validation has chosen, with the standard error over the seeds. The averages as printed
differ from the means of the printed accuracies by 0.1 in two columns (74.1 and 75.0). The last
column says how the data differ from the paper's."""


def print_study(folder: Path, choices: Sequence[str], score: str = "main") -> None:
    """Print the tables of the runs below a folder, at the values that validation has chosen.

    Write study.md, a CSV file for each table, and study.png with the main scores or accuracies,
    into the folder.
    """
    # Only here, as the import takes a second.
    from results.chart import draw
    from run.figures import save

    lines = arrange((run for run in collect(folder) if run["task"] != "mlm"), choices)
    pages = study(lines)
    show(pages, folder / "study.md")
    for heading, (table, _) in pages.items():
        table.to_csv(folder / f"study_{heading.lower().replace(' ', '_')}.csv")
    if lines:
        save(draw(lines, score), folder / "study")


def study(lines: Sequence[TableLine]) -> Pages:
    """Return the tables by their headings, each with a note; those without lines are left out."""
    columns = find_columns(lines)
    has_glue = bool(columns.keys() & COLUMNS.keys())
    differences_to_full = compared(lines, full_fine_tuning(lines), columns)
    pages = {
        "Scores": (scores(lines), NOTES if has_glue else ""),
        "Difference to full": (differences_to_full, DIFFERENCES),
        "Chosen on validation": (settings(lines), ""),
        "Test accuracy": (accuracies(lines), ACCURACIES),
    }
    return {heading: page for heading, page in pages.items() if len(page[0])}


def settings(lines: Sequence[TableLine]) -> pd.DataFrame:
    """Return for each line and column the values that validation has chosen.

    Beside them are the other arguments that differ between the line's tasks, the seeds, and the
    folder of the best run.
    """
    cells: dict[str, dict[str, str]] = {}
    names = ["differs between the tasks", "seeds", "best run"]
    for line in lines:
        differing = differences(line)
        columns = find_columns([line])
        for name, cell in line.cells_of(columns).items():
            task, _ = columns[name]
            values = _chosen_values(line, cell.first["arguments"])
            seeds = " ".join(map(str, sorted(cell.seeds)))
            facts = (differing[task] or MISSING, seeds, cell.best["folder"])
            cells[f"{line.label}: {name}"] = values | dict(zip(names, facts, strict=True))
    choices = lines[0].choices if lines else ()
    return table_of(cells, [*choices, *names])


def _chosen_values(line: TableLine, arguments: dict[str, float | None]) -> dict[str, str]:
    """Return the chosen arguments that the line's method uses."""
    values = {}
    for axis in line.choices:
        value = arguments.get(axis)
        if is_meant_for(line.method, axis) and value is not None:
            values[axis] = f"{value:g}"
    return values
