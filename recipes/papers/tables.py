"""The tables of runs beside the papers' rows: scores, differences, what validation has chosen, test accuracies."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd

from common.scores import COLUMNS, GLUE_TASKS, mean_of_nine, proper_name, server_average
from papers.additional import PAPER, PAPER_COLUMNS, PRINTED, TOTAL_SIZES, TRAINED, counted_once
from papers.numbers import PAPER_ROWS, SECOND_COLUMNS, SECOND_ROWS, SQUAD
from papers.results import (
    NO_BERT,
    Cell,
    MeanAndError,
    Results,
    Row,
    Sizes,
    arrange,
    collect,
    columns,
    difference,
    differences,
    mean_and_error,
    mean_over,
)
from sweeping.runs import MEANT_FOR


MISSING, WIDTH = "-", 140
Columns = Mapping[str, tuple[str, str]]
NOTES = """\
Scores: Matthews' correlation for CoLA, F1 for MRPC and QQP, Spearman's correlation for STS-B, else accuracy; in
percent, on the validation split at the epoch that it has chosen, except for papers' rows that say "test". ±: standard
error. Mean: over the seeds, at the point with the best mean; the seeds that have searched it are among them, so it is
slightly optimistic. Best: of all runs, as in Houlsby et al. 2019. MNLI-mm has a point of its own, by its own score.
Mean of nine: the plain mean of the columns from CoLA to RTE. Server's average: as GLUE's server defines it, the mean
over its nine tasks, with WNLI, of the mean of each task's scores (two for MRPC, STS-B, QQP and MNLI); for a paper the
total as printed, which is the plain mean of its columns in two rows of 2020 only.
Trained: parameters per task, with the head, and as a share of the encoder. Total: for all tasks, in multiples of the
encoder; as in the papers, MNLI counts as two tasks, complaints as one, and WNLI not at all."""
DIFFERENCES = """\
±: standard error of the difference. Rows with the same seeds on a task are compared seed by seed (paired). The mean is
over the columns; its error is that over the seeds, for these tasks."""
ACCURACIES = """\
The papers' columns stand first, then the runs', at the values that validation has chosen, with the standard error over
the seeds. The averages as printed differ from those of the printed rows by 0.1 in two columns (74.1 and 75.0)."""


def print_study(folder: Path, chosen: Sequence[str]) -> None:
    """Print the tables at most 140 characters wide, and write study.md, a CSV file for each, study.png and
    results.jsonl into the folder.

    Args:
        folder: A folder with runs at any depth.
        chosen: The arguments that validation chooses, for each row and task.
    """
    # Only here, as the import takes a second.
    from common.figures import save
    from papers.chart import draw

    rows = arrange(collect(folder), chosen)
    pages = study(rows)
    for name, (table, note) in pages.items():
        print("\n\n".join([f"\n{name}", wrapped(table), *([note] if note else [])]))
        table.to_csv(folder / f"study_{name.lower().replace(' ', '_')}.csv")
    parts = [f"## {name}\n\n{markdown(table)}\n\n{note}".rstrip() for name, (table, note) in pages.items()]
    (folder / "study.md").write_text("\n\n".join(parts) + "\n")
    if rows:
        save(draw(rows), folder / "study")


def study(rows: Sequence[Row]) -> dict[str, tuple[pd.DataFrame, str]]:
    """Return the tables by their headings, each with a note."""
    tables = {
        "Scores": (scores(rows), NOTES if {*columns(rows)} & {*COLUMNS} else ""),
        "Second scores": (second_scores(rows), ""),
        "Difference to full": (compared(rows), DIFFERENCES),
        "Chosen on validation": (settings(rows), ""),
        "Test accuracy": (test_accuracies(rows), ACCURACIES),
        "Data": (data(rows), ""),
    }
    return {name: (table, note) for name, (table, note) in tables.items() if len(table)}


def wrapped(table: pd.DataFrame) -> str:
    """Return a table as text, whose columns continue below if they are too many for a line; a wide one is turned."""
    return (table.T if len(table) < len(table.columns) > 6 else table).to_string(line_width=WIDTH)


def markdown(table: pd.DataFrame) -> str:
    """Return a table in Markdown with aligned columns."""
    cells = [[str(table.index.name or ""), *table.columns], *([str(name), *row] for name, row in zip(
        table.index, table.astype(str).to_numpy().tolist(), strict=True
    ))]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in cells)


def table_of(lines: Mapping[str, Mapping[str, Any]], names: Iterable[str] | None = None) -> pd.DataFrame:
    """Return a table of rows by name, in which a dash stands for what is missing; by default with all columns."""
    names = [*(dict.fromkeys(name for line in lines.values() for name in line) if names is None else names)]
    cells = [[line[name] if line.get(name) is not None else MISSING for name in names] for line in lines.values()]
    return pd.DataFrame(cells, [*lines], names, dtype=object)


def scores(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the mean over the seeds and the best run of each row, and the papers' rows with a score there."""
    shown = columns(rows)
    of_glue = set(COLUMNS) <= set(shown)  # otherwise there are no averages
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        cells = {name: cell for name, column in shown.items() if (cell := row.cell(*column))}
        best = {name: Cell({cell.best["seed"]: cell.best}, cell.best) for name, cell in cells.items()}
        for kind, own in (("mean", cells), ("best", best)):
            sizes = row.sizes(kind == "best")
            counted = f"{sizes.total:.2f}x for {sizes.tasks} task{'s' * (sizes.tasks > 1)}"
            lines[f"{row.label}: {kind}"] = {
                "trained": MISSING if row.method == NO_BERT else f"{sizes.trained:,.0f} ({sizes.share:.1%})",
                "total": MISSING if row.method == NO_BERT else counted,
                **{name: with_error(cell.mean(shown[name][1])) for name, cell in own.items()},
                **(averages(own) if of_glue else {}),
            }
    for label, paper in PAPER_ROWS.items():
        if own_scores := {name: f"{score}" for name, score in paper.scores.items() if name in shown}:
            nine = [paper.scores.get(name) for name in COLUMNS]
            printed = {
                "mean of nine": MISSING if None in nine else f"{mean(nine):.1f}",
                "server's average": f"{paper.total} printed" if paper.total else MISSING,
            }
            lines[label] = {"trained": f"{paper.trained}%" if paper.trained else MISSING,
                            "total": f"{paper.size}x" if paper.size else MISSING,
                            **own_scores, **(printed if of_glue else {})}  # fmt: skip
    if "squad" in shown:
        lines |= {f"Houlsby 2019, BERT-large: {name}": {"squad": f"{score}"} for name, score in SQUAD.items()}
    return table_of(lines, ["trained", "total", *shown, *(AVERAGES if of_glue else ())])


AVERAGES = {"mean of nine": mean_of_nine, "server's average": server_average}


def averages(cells: Mapping[str, Cell]) -> dict[str, str]:
    """Return both averages; if all tasks have the same seeds, averages are taken per seed and have standard errors."""
    by_task = {cell.best["task"]: cell for name, cell in cells.items() if name != "MNLI-mm"}
    by_seed: dict[str, dict[str, dict[int, float]]] = {}
    for task, names in GLUE_TASKS.items():
        for name in names:
            cell = cells.get("MNLI-mm") if name == "mismatched_accuracy" else by_task.get(task)
            if cell and (values := cell.by_seed(name)):
                by_seed.setdefault(task, {})[name] = values
    seeds = {tuple(sorted(cell.seeds)) for cell in cells.values()}
    samples: list[dict[str, dict[str, float]]] = [
        {task: {name: values[seed] for name, values in own.items()} for task, own in by_seed.items()}
        for seed in (seeds.pop() if len(seeds) == 1 else ())
    ] or [{task: {name: mean(values.values()) for name, values in own.items()} for task, own in by_seed.items()}]
    found = {}
    for name, average in AVERAGES.items():
        values = [average(sample) for sample in samples]
        found[name] = with_error(None if None in values else mean_and_error(values))
    return found


def second_scores(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the tasks' second scores at the same points, beside the papers', if the study has some."""
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        means = {name: (cell := row.cell(*column)) and cell.mean(column[1]) for name, column in SECOND_COLUMNS.items()}
        if own := {name: value for name, value in means.items() if value}:
            plain = {name: value for name, (value, _) in own.items()}
            lines[f"{row.label}: mean"] = {name: with_error(value) for name, value in own.items()} | _total(plain)
    shown = [name for name in SECOND_COLUMNS if any(name in line for line in lines.values())]
    for label, scores in SECOND_ROWS.items():
        given = zip(SECOND_COLUMNS, scores, strict=True)
        if of_paper := {name: value for name, value in given if value and name in shown}:
            lines[label] = {name: f"{value:.2f}" for name, value in of_paper.items()} | _total(of_paper)
    return table_of(lines, [*shown, TOTAL]) if shown else pd.DataFrame()


TOTAL = "mean of CoLA and MRPC"


def _total(scores: Mapping[str, float]) -> dict[str, str]:
    both = [scores.get(f"{task} accuracy") for task in ("CoLA", "MRPC")]
    return {} if None in both else {TOTAL: f"{sum(both) / 2:.2f}"}


def compared(rows: Sequence[Row], split: str = "validation") -> pd.DataFrame:
    """Return the rows' means minus full fine-tuning's, each with the difference's standard error, and their mean."""
    full, shown = full_fine_tuning(rows), columns(rows)
    lines = {}
    for row in rows:
        own = differences_to(row, full, shown, split)
        if own and (row.method != "full" or not row.cells.items() <= full.cells.items()):
            once = counted_once(shown[name][0] for name in own)
            values = [value for name, value in own.items() if shown[name][0] in once]
            average = f"{with_error(mean_over(values), sign='+')} of {len(values)}"
            lines[row.label] = {name: with_error(value, sign="+") for name, value in own.items()}
            lines[row.label]["mean of these columns"] = average
    return table_of(lines, [*shown, "mean of these columns"])


def full_fine_tuning(rows: Iterable[Row]) -> Row:
    """Return for each task the runs of full fine-tuning with which the others are compared: of several rows that have
    the task, those of the row with the most tasks."""
    full = sorted((row for row in rows if row.method == "full"), key=lambda row: len(row.runs))
    runs = {task: same for row in full for task, same in row.runs.items()}
    return Row("; ".join(row.label for row in full[::-1]), "full", runs, full[0].chosen if full else ())


def differences_to(row: Row, base: Row, shown: Columns, split: str = "validation") -> dict[str, MeanAndError]:
    """Return the row's means minus another's, with the difference's standard error, in the columns that both have."""
    found = {}
    for name, (task, score) in shown.items():
        cells = [one.cell(task, score) for one in (row, base)]
        ours, theirs = (cell.by_seed(score, split) if cell else {} for cell in cells)
        if ours and theirs:
            found[name] = difference(ours, theirs)
    return found


def settings(rows: Sequence[Row]) -> pd.DataFrame:
    """Return for each row and column the values that validation has chosen, the other arguments that differ between
    the row's tasks, the seeds, and the folder of the best run."""
    lines = {}
    for row in rows:
        differing = differences(row)
        for name, (task, score) in columns([row]).items():
            cell = row.cell(task, score)
            arguments = next(iter(cell.seeds.values()))["arguments"]
            own = (axis for axis in row.chosen if MEANT_FOR.get(axis, row.method) == row.method)
            lines[f"{row.label}: {name}"] = {
                **{axis: plain(arguments.get(axis)) for axis in own},
                "differs between the tasks": differing[task] or MISSING,
                "seeds": " ".join(map(str, sorted(cell.seeds))),
                "best run": cell.best["folder"],
            }
    last = ["differs between the tasks", "seeds", "best run"]
    return table_of(lines, [*(rows[0].chosen if rows else ()), *last])


def test_accuracies(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the table of the 17 further tasks for the rows with test accuracies of them."""
    found: dict[str, dict[str, MeanAndError]] = {}
    for row in rows:
        cells = {task: cell.mean("accuracy", "test") for task, cell in row.cells.items() if task in PAPER}
        if tested := {task: value for task, value in cells.items() if value}:
            found[row.label] = tested
    return accuracies(found, {row.label: row.sizes() for row in rows if row.method != NO_BERT})


def accuracies(found: Mapping[str, Mapping[str, MeanAndError]], sizes: Mapping[str, Sizes]) -> pd.DataFrame:
    """Return the papers' test accuracies of the 17 further tasks beside others, with their means and sizes.

    Args:
        found: Accuracies in percent by column and task.
        sizes: The sizes of the columns.
    """
    tasks = [task for task in PAPER if any(task in own for own in found.values())]
    if not tasks:
        return pd.DataFrame()
    printed = pd.DataFrame([(*PAPER[task].houlsby, *PAPER[task].mohebbi) for task in tasks], tasks, PAPER_COLUMNS)
    lines: dict[str, dict[str, Any]] = {}
    for task in tasks:
        lines[proper_name(task)] = {name: f"{value}" for name, value in printed.loc[task].dropna().items()}
        lines[proper_name(task)] |= {label: with_error(own.get(task)) for label, own in found.items()}
    once = counted_once(tasks)
    of_2020 = [task for task in once if PAPER[task].mohebbi[0] is not None]
    groups = {f"mean of {len(once)}": once, f"mean of {len(of_2020)} of 2020": of_2020}
    for label, present in ((label, group) for label, group in groups.items() if group):
        means = printed.loc[present].mean(skipna=False).dropna()
        lines[label] = {name: f"{value:.1f}" for name, value in means.items()} | {
            name: with_error(mean_over([own[task] for task in present]))
            for name, own in found.items()
            if {*present} <= {*own}
        }
    shown = [(size, label) for label, size in sizes.items() if label in found]
    lines["all 17, as printed"] = dict(zip(PAPER_COLUMNS, PRINTED, strict=True))
    lines["total parameters"] = TOTAL_SIZES | {label: f"{size.total:.3g}x" for size, label in shown}
    lines["trained per task"] = TRAINED | {label: f"{size.share:.2%}" for size, label in shown}
    return table_of(lines, [*PAPER_COLUMNS, *found])


def data(rows: Sequence[Row]) -> pd.DataFrame:
    """Return how the data of the 17 further tasks differ from the paper's."""
    runs: dict[str, Results] = {}
    for row in rows:
        runs |= {task: cell.best for task, cell in row.cells.items() if task in PAPER and "dataset" in cell.best}
    return table_of({proper_name(task): {"data": PAPER[task].difference(sum(run["dataset"]["rows"].values()),
                                                                  len(run["labels"]))}
                     for task, run in runs.items()})  # fmt: skip


def with_error(value: MeanAndError | None, sign: str = "") -> str:
    """Return a mean with its standard error."""
    if value is None:
        return MISSING
    middle, error = value
    return f"{middle:{sign}.2f}" if error is None else f"{middle:{sign}.2f} ± {error:.2f}"


def plain(value: float | None) -> str:
    """Return a number as short as it can be."""
    return MISSING if value is None else f"{value:g}"
