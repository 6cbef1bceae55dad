"""The tables of a study: scores, differences, what validation has chosen, test accuracies."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from results.accuracy_table import accuracies
from results.difference_table import compared, full_fine_tuning, note_on
from results.lines import TableLine, arrange, differences, find_columns
from results.means import mean_and_error
from results.read import collect
from results.score_table import scores
from results.table import MISSING, Pages, show, table_of, with_error
from sweeping.runs import is_meant_for
from tasks.scores import COLUMNS


NOTES = """\
In percent, on validation at the epoch that is kept; papers' lines as marked. ±: standard error.
Mean: over the seeds, at the point with the best mean. Best: of all runs. More: docs/papers.md."""
_PAIRED = "standard error of the difference, seed by seed where both lines have the same seeds."
DIFFERENCES = {
    "main": f"Of the main scores. ±: {_PAIRED}",
    "accuracy": f"Of the accuracies, where a task has one. ±: {_PAIRED}",
}
METRICS = """\
What --metric has computed of the kept epoch on validation, as it is; ±: standard error."""
ACCURACIES = """\
Papers' columns first, then the runs', at the values that validation has chosen; ±: standard error.
Two printed averages, 74.0 and 74.9, are 74.1 and 75.0 of the printed accuracies."""


def print_study(folder: Path, choices: Sequence[str], score: str = "main") -> None:
    """Print the tables of the runs below a folder, at the values that validation has chosen.

    Write study.md and a CSV file for each table into the folder.
    """
    lines = arrange((run for run in collect(folder) if run["task"] != "mlm"), choices)
    pages = study(lines, score)
    show(pages, folder / "study.md")
    for heading, (table, _) in pages.items():
        table.to_csv(folder / f"study_{heading.lower().replace(' ', '_')}.csv")


def study(lines: Sequence[TableLine], score: str = "main") -> Pages:
    """Return the tables by their headings, each with a note; those without lines are left out.

    The differences are of the main scores or of the accuracies.
    """
    columns = find_columns(lines, score)
    has_glue = bool(columns.keys() & COLUMNS.keys())
    differences_to_full = compared(lines, full_fine_tuning(lines), columns)
    note = f"{DIFFERENCES[score]}\n{note_on(differences_to_full)}".rstrip()
    pages = {
        "Scores": (scores(lines), NOTES if has_glue else ""),
        "Difference to full": (differences_to_full, note),
        "Further metrics": (further_metrics(lines), METRICS),
        "Chosen on validation": (settings(lines), ""),
        "Test accuracy": (accuracies(lines), ACCURACIES),
    }
    return {heading: page for heading, page in pages.items() if len(page[0])}


def further_metrics(lines: Sequence[TableLine]) -> pd.DataFrame:
    """Return the means over the seeds of the metrics of `--metric`, by task and name."""
    cells: dict[str, dict[str, str]] = {}
    for line in lines:
        for task, cell in line.cells.items():
            by_seed = pd.DataFrame([run.get("metrics") or {} for run in cell.seeds.values()])
            for name in by_seed.dropna(axis=1):
                value = mean_and_error(by_seed[name].tolist())
                cells.setdefault(line.label, {})[f"{task}: {name}"] = with_error(
                    value, digits=4, constant=cell.constant
                )
    return table_of(cells)


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
            chosen = {axis: cell.first["arguments"].get(axis) for axis in line.choices}
            if cell.first["arguments"].get("max_steps", -1) > 0:
                chosen["num_train_epochs"] = None  # which it has not trained for
            values = {}
            for axis, value in chosen.items():
                if is_meant_for(line.method, axis) and value is not None:
                    values[axis] = f"{value:g}"
            seeds = " ".join(map(str, sorted(cell.seeds)))
            facts = (differing[task] or MISSING, seeds, cell.best["folder"])
            cells[f"{line.label}: {name}"] = values | dict(zip(names, facts, strict=True))
    choices = lines[0].choices if lines else ()
    return table_of(cells, [*choices, *names])
