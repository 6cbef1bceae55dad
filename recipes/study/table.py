"""The tables of a study in Markdown: our rows, the papers', and the values that validation has chosen."""

from collections.abc import Iterable, Mapping, Sequence
from math import hypot
from pathlib import Path

from study.additional import PAPER, describe, format_table
from study.papers import COLUMNS, GLUE_TASKS, PAPER_ROWS, mean_of_nine, server_average
from study.results import Row, arrange, collect, columns, mean_and_error, score_percent


MISSING = "-"
Columns = Mapping[str, tuple[str, str]]
NOTES = """\
Scores: Matthews' correlation for CoLA, F1 for MRPC and QQP, Spearman's correlation for STS-B, else accuracy; in
percent, on the validation split at the epoch that it has chosen, except for papers' rows that say "test". ±: standard
error. Mean: over the seeds, at the point with the best mean. Best: of all runs, as in Houlsby et al. 2019.
Mean of nine: the plain mean of the columns from CoLA to RTE. Server's average: as GLUE's server defines it, the mean
over its nine tasks, with WNLI, of the mean of each task's scores (two for MRPC, STS-B, QQP and MNLI); for a paper the
total as printed, which is not the plain mean. Neither is given if a column is missing.
Trained: parameters per task, with the head, and as a share of the encoder. Total: for all tasks with runs, in
multiples of the encoder."""


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
        from study.chart import draw  # needs matplotlib, which the tables do not
    except ModuleNotFoundError as error:
        print(f"No chart: {error}. pip install matplotlib")
    else:
        draw(rows).savefig(folder / "study.png", dpi=150)


def study(rows: Sequence[Row], chosen: Sequence[str]) -> str:
    """Return all tables in Markdown."""
    shown = columns(rows)
    of_glue = set(COLUMNS) <= set(shown)  # otherwise there are no averages
    header = ["", "trained", "total", *shown, *(["mean of nine", "server's average"] if of_glue else [])]
    lines = [line for row in rows for line in score_lines(row, shown, of_glue)]
    papers = paper_lines(shown, of_glue)
    parts = ["## Scores", table(header, [*lines, *papers]), *([NOTES] if papers else [])]
    full = next((row for row in rows if row.method == "full"), None)
    others = [row for row in rows if row is not full]
    if full and others:
        differences = [[row.label, *difference_cells(row, full, shown)] for row in others]
        parts += [f"## Difference to {full.label}", table(["", *shown, "mean of these columns"], differences)]
    settings = [[row.label, task, *setting_cells(row, task, chosen)] for row in rows for task in row.cells]
    parts += ["## Chosen on validation", table(["", "task", *chosen, "seeds", "best run"], settings)]
    parts += [part for row in rows for part in additional_parts(row)]
    return "\n\n".join(parts) + "\n"


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


def score_lines(row: Row, shown: Columns, of_glue: bool) -> list[list[str]]:
    """Return the row's two lines, mean over the seeds and best run, with both averages if all columns are GLUE's."""
    tasks = f"{len(row.cells)} task{'s' if len(row.cells) > 1 else ''}"
    sizes = [f"{row.trained:,.0f} ({row.share:.1%})", f"{row.total:.2f}x for {tasks}"]
    means = [_with_error(row.cells[task].mean(score) if task in row.cells else None) for task, score in shown.values()]
    bests = [
        f"{score_percent(row.cells[task].best, score):.2f}" if task in row.cells else MISSING
        for task, score in shown.values()
    ]
    return [
        [f"{row.label}: mean", *sizes, *means, *(mean_averages(row) if of_glue else [])],
        [f"{row.label}: best", *sizes, *bests, *(best_averages(row) if of_glue else [])],
    ]


def mean_averages(row: Row) -> list[str]:
    """Return both averages; if all tasks have the same seeds, averages are taken per seed and have standard errors."""
    seeds = {tuple(sorted(cell.seeds)) for cell in row.cells.values()}
    if len(seeds) == 1:
        by_seed = [{task: cell.seeds[seed]["best_scores"] for task, cell in row.cells.items()} for seed in seeds.pop()]
        averages = [[average(scores) for scores in by_seed] for average in (mean_of_nine, server_average)]
        return [_with_error(None if None in one else mean_and_error([100 * x for x in one])) for one in averages]
    means = {
        task: {name: mean[0] / 100 for name in GLUE_TASKS.get(task, ()) if (mean := cell.mean(name))}
        for task, cell in row.cells.items()
    }
    return _averages(means)


def best_averages(row: Row) -> list[str]:
    """Return both averages of the best runs."""
    return _averages({task: cell.best["best_scores"] for task, cell in row.cells.items()})


def _averages(scores: Mapping[str, Mapping[str, float]]) -> list[str]:
    averages = (mean_of_nine(scores), server_average(scores))
    return [MISSING if average is None else f"{100 * average:.2f}" for average in averages]


def difference_cells(row: Row, full: Row, shown: Columns) -> list[str]:
    """Return the row's means minus full fine-tuning's, with the difference's standard error, then their plain mean
    over the columns that both have, and the number of these columns."""
    differences = []
    for task, score in shown.values():
        ours, theirs = (one.cells[task].mean(score) if task in one.cells else None for one in (row, full))
        if ours is None or theirs is None:
            differences.append(None)
            continue
        known = None not in (ours[1], theirs[1])
        differences.append((ours[0] - theirs[0], hypot(ours[1], theirs[1]) if known else None))
    values = [difference[0] for difference in differences if difference]
    mean = f"{mean_and_error(values)[0]:+.2f} of {len(values)}" if values else MISSING
    return [*(_with_error(difference, sign="+") for difference in differences), mean]


def setting_cells(row: Row, task: str, chosen: Sequence[str]) -> list[str]:
    """Return the values that validation has chosen for the task, the seeds, and the folder of the best run."""
    seeds, best = row.cells[task].seeds, row.cells[task].best
    arguments = next(iter(seeds.values()))["arguments"]
    values = (_plain(arguments.get(name)) for name in chosen)
    return [*values, " ".join(map(str, sorted(seeds))), best["arguments"]["output_dir"]]


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
