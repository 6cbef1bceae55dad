"""The tables of a study in Markdown: our rows, the papers', and the values that validation has chosen."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import hypot
from pathlib import Path

from common.glue_report import COLUMNS, GLUE_TASKS, mean_of_nine, server_average
from papers.additional import PAPER, describe, format_table
from papers.numbers import (
    PAPER_ROWS,
    SECOND_COLUMNS,
    SECOND_ROWS,
)
from papers.results import Row, arrange, collect, columns, differences, mean_and_error


MISSING = "-"
Columns = Mapping[str, tuple[str, str]]
NOTES = """\
Scores: Matthews' correlation for CoLA, F1 for MRPC and QQP, Spearman's correlation for STS-B, else accuracy; in
percent, on the validation split at the epoch that it has chosen, except for papers' rows that say "test". ±: standard
error. Mean: over the seeds, at the point with the best mean. Best: of all runs, as in Houlsby et al. 2019.
Mean of nine: the plain mean of the columns from CoLA to RTE. Server's average: as GLUE's server defines it, the mean
over its nine tasks, with WNLI, of the mean of each task's scores (two for MRPC, STS-B, QQP and MNLI); for a paper the
total as printed, which is not the plain mean. Neither is given if a column is missing.
Trained: parameters per task, with the head, and as a share of the encoder, at the chosen point or of the best run.
Total: for all tasks with runs, in multiples of the encoder. The papers count MNLI-m and -mm as two tasks, and no WNLI.
This table counts WNLI if it has runs, and MNLI as two tasks if it has runs that were chosen by the mismatched split
(--metric_for_best_model mismatched_accuracy), which are then those of the MNLI-mm column."""
DIFFERENCES = """\
±: standard error of the difference. Rows with the same seeds on a task are compared seed by seed (paired)."""


def print_study(folder: Path, chosen: Sequence[str]) -> None:
    """Print the tables, and write study.md, study.png and results.jsonl into the folder.

    Args:
        folder: A folder with runs at any depth.
        chosen: The arguments that validation chooses, for each row and task.
    """
    rows = arrange(collect(folder), chosen)
    text = study(rows, chosen)
    print(text)
    (folder / "study.md").write_text(text)
    try:
        from papers.chart import draw  # needs matplotlib, which the tables do not
    except ModuleNotFoundError as error:
        print(f"No chart: {error}. pip install matplotlib")
    else:
        draw(rows).savefig(folder / "study.png", dpi=150)


def study(rows: Sequence[Row], chosen: Sequence[str]) -> str:
    """Return all tables in Markdown."""
    shown = columns(rows)
    of_glue = set(COLUMNS) <= set(shown)  # otherwise there are no averages
    header = ["", "trained", "total", *shown, *(["mean of nine", "server's average"] if of_glue else [])]
    lines = [
        score_line(f"{one.label}: {kind}", one, shown, of_glue)
        for row in rows
        for kind, one in (("mean", row), ("best", row.best()))
    ]
    papers = paper_lines(shown, of_glue)
    parts = ["## Scores", table(header, [*lines, *papers]), *([NOTES] if papers else [])]
    parts += second_parts(rows)
    full = full_fine_tuning(rows)
    others = [row for row in rows if row.method != "full" or not row.cells.items() <= full.cells.items()]
    if full.cells and others:
        compared = [[row.label, *difference_cells(row, full, shown)] for row in others]
        header = ["", *shown, "mean of these columns"]
        parts += [f"## Difference to {full.label}", table(header, compared), DIFFERENCES]
    settings = [[row.label, *cells] for row in rows for cells in setting_cells(row, chosen)]
    header = ["", "task", *chosen, "differs between the tasks", "seeds", "best run"]
    parts += ["## Chosen on validation", table(header, settings)]
    parts += [part for row in rows for part in additional_parts(row)]
    return "\n\n".join(parts) + "\n"


def second_parts(rows: Sequence[Row]) -> list[str]:
    """Return a heading and the table of the tasks' second scores beside the papers', if the study has some."""
    shown = {
        name: (task, score)
        for name, (task, score) in SECOND_COLUMNS.items()
        if any((cell := row.cell(task, score)) and cell.by_seed(score) for row in rows)
    }
    if not shown:
        return []
    lines = []
    for row in rows:
        means = [(cell := row.cell(*column)) and cell.mean(column[1]) for column in shown.values()]
        own = {name: value[0] for name, value in zip(shown, means, strict=True) if value}
        lines.append([f"{row.label}: mean", *map(_with_error, means), _total(own)])
    for label, scores in SECOND_ROWS.items():
        own = {name: value for name, value in zip(SECOND_COLUMNS, scores, strict=True) if value and name in shown}
        if own:
            lines.append([label, *(f"{own[name]:.2f}" if name in own else MISSING for name in shown), _total(own)])
    return ["## Second scores, at the same points", table(["", *shown, "mean of CoLA and MRPC"], lines)]


def _total(scores: Mapping[str, float]) -> str:
    """Return what Whritenour and Schoch call the total."""
    both = [scores.get(f"{task} accuracy") for task in ("CoLA", "MRPC")]
    return MISSING if None in both else f"{sum(both) / 2:.2f}"


def additional_parts(row: Row) -> list[str]:
    """Return a heading and the papers' table of test accuracies, if the row has runs of the 17 further tasks."""
    tested = [(task, list(cell.seeds.values())) for task, cell in row.cells.items() if task in PAPER]
    tested = [(task, runs) for task, runs in tested if all("accuracy" in (run.get("test") or {}) for run in runs)]
    heading = f"## Test accuracy, at the values that validation has chosen: {row.label}"
    return [heading, format_table([describe(*one) for one in tested]).rstrip()] if tested else []


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns, which is also readable as text."""
    cells = [list(header), *map(list, lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def score_line(label: str, row: Row, shown: Columns, of_glue: bool) -> list[str]:
    """Return a row's sizes and mean scores over the seeds, with both averages if all columns are GLUE's."""
    tasks = f"{len(row.cells)} task{'s' if len(row.cells) > 1 else ''}"
    cells = [row.cell(task, score) for task, score in shown.values()]
    means = [cell and cell.mean(score) for cell, (_, score) in zip(cells, shown.values(), strict=True)]
    return [
        *(label, f"{row.trained:,.0f} ({row.share:.1%})", f"{row.total:.2f}x for {tasks}"),
        *map(_with_error, means),
        *(averages(row) if of_glue else []),
    ]


def averages(row: Row) -> list[str]:
    """Return both averages; if all tasks have the same seeds, averages are taken per seed and have standard errors."""
    scores = {
        (task, name): cell.by_seed(name)
        for task, names in GLUE_TASKS.items()
        for name in names
        if (cell := row.cell(task, name))
    }
    seeds = {tuple(sorted(cell.seeds)) for cell in row.cells.values()}
    if len(seeds) == 1:
        samples = [{key: values.get(seed) for key, values in scores.items()} for seed in seeds.pop()]
    else:
        samples = [{key: mean_and_error([*values.values()])[0] for key, values in scores.items() if values}]
    found = []
    for average in (mean_of_nine, server_average):
        values = [average(_by_task(sample)) for sample in samples]
        found.append(_with_error(None if None in values else mean_and_error(values)))
    return found


def _by_task(scores: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    return {task: {name: value for (of, name), value in scores.items() if of == task} for task, _ in scores}


def full_fine_tuning(rows: Iterable[Row]) -> Row:
    """Return for each task the runs of full fine-tuning with which the others are compared: of several rows that have
    the task, those of the row with the most tasks."""
    full = sorted((row for row in rows if row.method == "full"), key=lambda row: -len(row.cells))
    cells = {task: cell for row in reversed(full) for task, cell in row.cells.items()}
    used = [row.label for row in full if any(cells[task] is cell for task, cell in row.cells.items())]
    return Row("; ".join(used), "full", cells)


def difference_cells(row: Row, full: Row, shown: Columns) -> list[str]:
    """Return the row's means minus full fine-tuning's, with the difference's standard error, then their plain mean
    over the columns that both have, and the number of these columns."""
    differences = []
    for task, score in shown.values():
        cells = [one.cell(task, score) for one in (row, full)]
        ours, theirs = (cell.by_seed(score) if cell else {} for cell in cells)
        differences.append(difference(ours, theirs) if ours and theirs else None)
    values = [difference[0] for difference in differences if difference]
    mean = f"{mean_and_error(values)[0]:+.2f} of {len(values)}" if values else MISSING
    return [*(_with_error(difference, sign="+") for difference in differences), mean]


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, float | None]:
    """Return the difference of two means and its standard error: of the differences by seed if both have the same
    seeds, else of two independent means; no error if one of them has a single seed."""
    if ours.keys() == theirs.keys():
        return mean_and_error([ours[seed] - theirs[seed] for seed in ours])
    (mean, error), (reference, reference_error) = mean_and_error([*ours.values()]), mean_and_error([*theirs.values()])
    return mean - reference, None if None in (error, reference_error) else hypot(error, reference_error)


def setting_cells(row: Row, chosen: Sequence[str]) -> Iterator[list[str]]:
    """Yield for each task the values that validation has chosen for it, the other arguments that differ between the
    row's tasks, the seeds, and the folder of the best run."""
    differing = differences(row, chosen)
    for task, cell in row.cells.items():
        arguments = next(iter(cell.seeds.values()))["arguments"]
        values = (_plain(arguments.get(name)) for name in chosen)
        seeds = " ".join(map(str, sorted(cell.seeds)))
        yield [task, *values, differing[task] or MISSING, seeds, cell.best["arguments"]["output_dir"]]


def paper_lines(shown: Columns, of_glue: bool) -> list[list[str]]:
    """Return the papers' rows with a score in these columns, with both averages if all columns are GLUE's."""
    lines = []
    for row in (row for row in PAPER_ROWS if set(row.by_column) & set(shown)):
        trained = MISSING if row.trained is None else f"{row.trained}%"
        total = MISSING if row.total is None else f"{row.total}x"
        scores = [f"{row.by_column[column]}" if column in row.by_column else MISSING for column in shown]
        mean = MISSING if row.mean_of_nine is None else f"{row.mean_of_nine:.1f}"
        printed = MISSING if row.printed_total is None else f"{row.printed_total} printed"
        averages = [mean, printed] if of_glue else []
        lines.append([f"{row.label} ({row.split})", trained, total, *scores, *averages])
    return lines


def _with_error(value: tuple[float, float | None] | None, sign: str = "") -> str:
    if value is None:
        return MISSING
    mean, error = value
    return f"{mean:{sign}.2f}" if error is None else f"{mean:{sign}.2f} ± {error:.2f}"


def _plain(value: float | None) -> str:
    return MISSING if value is None else f"{value:g}"
