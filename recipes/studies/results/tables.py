"""The tables of runs beside the papers' rows: scores, differences, what validation has chosen, test
accuracies.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd

from common.scores import COLUMNS, ByTask, mean_of_nine, proper_name, server_average
from results.additional import PAPER, PAPER_COLUMNS, PRINTED, TOTAL_SIZES, TRAINED, counted_once
from results.lines import (
    NO_BERT,
    Cell,
    Columns,
    MeanAndError,
    Row,
    arrange,
    collect,
    columns,
    difference,
    differences,
    mean_and_error,
    mean_over,
)
from results.numbers import PAPER_ROWS, SECOND_COLUMNS, SQUAD
from sweeping.runs import MEANT_FOR


MISSING = "-"
Pages = dict[str, tuple[pd.DataFrame, str]]  # tables by their headings, each with a note
NOTES = """\
Scores: Matthews' correlation for CoLA, F1 for MRPC and QQP, Spearman's correlation for STS-B, else accuracy; in
percent, on the validation split at the epoch that it has chosen, except for papers' rows that say "test". ±: standard
error. Mean: over the seeds, at the point with the best mean; the seeds that have searched it are among them, so it is
slightly optimistic. Best: of all runs, as in Houlsby et al. 2019. MNLI-mm has a point of its own, by its own score; if
only one seed has searched, its mean is at MNLI-m's point, where the other seeds ran. MRPC's, CoLA's and QQP's accuracy
and STS-B's Pearson correlation are at the same points. Mean of nine: the plain mean of the columns from CoLA to RTE.
Server's average: as GLUE's server defines it, the mean over its nine tasks, with WNLI, of the mean of each task's
scores (two for MRPC, STS-B, QQP and MNLI); for a paper the total as printed, in two rows of 2020 the plain mean.
Trained: parameters per task, with the head, and as a share of the encoder. Total: for all tasks, in multiples of the
encoder; as in the papers, MNLI counts as two tasks, complaints as one, and WNLI not at all."""
DIFFERENCES = """\
±: standard error of the difference. Rows with the same seeds on a task are compared seed by seed (paired). The mean is
over the columns; its error is that over the seeds, for these tasks, as if MNLI's two were of different runs."""
ACCURACIES = """\
The papers' columns stand first, then the runs', at the values that validation has chosen, with the standard error over
the seeds. The averages as printed differ from those of the printed rows by 0.1 in two columns (74.1 and 75.0). The
last column says how the data differ from the paper's."""


def print_study(folder: Path, chosen: Sequence[str], score: str = "main") -> None:
    """Print the tables of the runs below a folder, at the values that validation has chosen, and
    write study.md, a CSV file for each table and study.png, with the main scores or accuracies,
    into it.
    """
    # Only here, as the import takes a second.
    from common.figures import save
    from results.chart import draw

    rows = arrange([one for one in collect(folder) if one["task"] != "mlm"], chosen)
    pages = study(rows)
    show(pages, folder / "study.md")
    for name, (table, _) in pages.items():
        table.to_csv(folder / f"study_{name.lower().replace(' ', '_')}.csv")
    if rows:
        save(draw(rows, score), folder / "study")


def show(pages: Pages, path: Path) -> None:
    """Print tables at most 140 characters wide, and write them in Markdown."""
    for name, (table, note) in pages.items():
        # A wide table is turned, and columns that are too many for a line continue below.
        turned = table.T if len(table) < len(table.columns) > 6 else table
        print(
            "\n\n".join([f"\n{name}", turned.to_string(line_width=140), *([note] if note else [])])
        )
    parts = [
        f"## {name}\n\n{table.to_markdown(tablefmt='github', disable_numparse=True)}\n\n{note}".rstrip()
        for name, (table, note) in pages.items()
    ]
    path.write_text("\n\n".join(parts) + "\n")


def study(rows: Sequence[Row]) -> Pages:
    tables = {
        "Scores": (scores(rows), NOTES if {*columns(rows)} & {*COLUMNS} else ""),
        "Difference to full": (compared(rows, full_fine_tuning(rows), columns(rows)), DIFFERENCES),
        "Chosen on validation": (settings(rows), ""),
        "Test accuracy": (accuracies(rows), ACCURACIES),
    }
    return {name: (table, note) for name, (table, note) in tables.items() if len(table)}


def table_of(
    lines: Mapping[str, Mapping[str, Any]], names: Iterable[str] | None = None
) -> pd.DataFrame:
    """Return a table of rows by name, in which a dash stands for what is missing; by default with
    all columns.
    """
    names = [
        *(
            dict.fromkeys(name for line in lines.values() for name in line)
            if names is None
            else names
        )
    ]
    cells = [
        [line[name] if line.get(name) is not None else MISSING for name in names]
        for line in lines.values()
    ]
    return pd.DataFrame(cells, [*lines], names, dtype=object)


def scores(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the mean over the seeds and the best run of each row, and the papers' rows with a
    score there.
    """
    first = columns(rows)
    second = {name: column for name, column in SECOND_COLUMNS.items()
              if any((cell := row.cell(*column)) and cell.by_seed(column[1]) for row in rows)}  # fmt: skip
    shown = first | second
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        cells = {name: cell for name, column in shown.items() if (cell := row.cell(*column))}
        best = {
            name: Cell({cell.best["seed"]: cell.best}, cell.best) for name, cell in cells.items()
        }
        for kind, own in (("mean", cells), ("best", best)):
            sizes = row.sizes(kind == "best")
            counted = f"{sizes.total:.2f}x for {sizes.tasks} task{'s' * (sizes.tasks > 1)}"
            lines[f"{row.label}: {kind}"] = {
                "trained": MISSING
                if row.method == NO_BERT
                else f"{sizes.trained:,.0f} ({sizes.share:.1%})",
                "total": MISSING if row.method == NO_BERT else counted,
                **{name: with_error(cell.mean(shown[name][1])) for name, cell in own.items()},
                **averages_of(own, shown),
            }
    averages = [name for name in AVERAGES if any(line[name] != MISSING for line in lines.values())]
    for label, paper in PAPER_ROWS.items():
        if {*paper.scores} & {*shown}:
            nine, both = (
                [paper.scores.get(name) for name in names]
                for names in (COLUMNS, ("CoLA accuracy", "MRPC accuracy"))
            )
            lines[label] = {
                "trained": f"{paper.trained}%" if paper.trained else MISSING,
                "total": f"{paper.size}x" if paper.size else MISSING,
                **{name: f"{score}" for name, score in paper.scores.items()},
                "mean of nine": MISSING if None in nine else f"{mean(nine):.1f}",
                "server's average": f"{paper.total} printed" if paper.total else MISSING,
                BOTH: MISSING if None in both else f"{mean(both):.2f}",
            }
    if "squad" in shown:
        lines |= {
            f"Houlsby 2019, BERT-large: {name}": {"squad": f"{score}"}
            for name, score in SQUAD.items()
        }
    return table_of(lines, ["trained", "total", *shown, *averages])


def mean_of_both(scores: ByTask) -> float | None:
    """Return the mean of the accuracies of CoLA and MRPC, the total of Whritenour and Schoch 2019."""
    both = [scores.get(task, {}).get("accuracy") for task in ("cola", "mrpc")]
    return None if None in both else mean(both)


BOTH = "mean of CoLA and MRPC"
AVERAGES = {"mean of nine": mean_of_nine, "server's average": server_average, BOTH: mean_of_both}


def averages_of(cells: Mapping[str, Cell], shown: Columns) -> dict[str, str]:
    """Return all averages; if all columns have the same seeds, they are taken per seed and have
    standard errors.
    """
    values = {shown[name]: cell.by_seed(shown[name][1]) for name, cell in cells.items()}
    by_seed = pd.DataFrame({column: own for column, own in values.items() if own})
    samples = by_seed.mean().to_frame().T if by_seed.isna().any(axis=None) else by_seed
    scores = [
        {task: line[task].to_dict() for task, _ in line.index} for _, line in samples.iterrows()
    ]
    found = {name: [average(one) for one in scores] for name, average in AVERAGES.items()}
    return {
        name: with_error(None if None in own or not own else mean_and_error(own))
        for name, own in found.items()
    }


def compared(
    rows: Sequence[Row], base: Row, shown: Columns, split: str = "validation"
) -> pd.DataFrame:
    """Return the rows' means minus another row's, each with the difference's standard error, and
    their mean.
    """
    lines = {}
    for row in rows:
        own = differences_to(row, base, shown, split)
        if own and not row.cells.items() <= base.cells.items():
            once = counted_once(shown[name][0] for name in own)
            values = [value for name, value in own.items() if shown[name][0] in once]
            average = f"{with_error(mean_over(values), sign='+')} of {len(values)}"
            lines[row.label] = {name: with_error(value, sign="+") for name, value in own.items()}
            lines[row.label]["mean of these columns"] = average
    return table_of(lines, [*shown, "mean of these columns"])


def full_fine_tuning(rows: Iterable[Row]) -> Row:
    """Return for each task the runs of full fine-tuning with which the others are compared: of
    several rows that have the task, those of the row with the most tasks.
    """
    full = sorted((row for row in rows if row.method == "full"), key=lambda row: len(row.runs))
    runs = {task: same for row in full for task, same in row.runs.items()}
    return Row(
        "; ".join(row.label for row in full[::-1]), "full", runs, full[0].chosen if full else ()
    )


def differences_to(
    row: Row, base: Row, shown: Columns, split: str = "validation"
) -> dict[str, MeanAndError]:
    """Return the row's means minus another's, with the difference's standard error, in the columns
    that both have.
    """
    ours, theirs = (one.scores(shown, split) for one in (row, base))
    return {name: difference(own, theirs[name]) for name, own in ours.items() if name in theirs}


def settings(rows: Sequence[Row]) -> pd.DataFrame:
    """Return for each row and column the values that validation has chosen, the other arguments
    that differ between the row's tasks, the seeds, and the folder of the best run.
    """
    lines = {}
    for row in rows:
        differing = differences(row)
        for name, (task, score) in columns([row]).items():
            cell = row.cell(task, score)
            arguments = next(iter(cell.seeds.values()))["arguments"]
            own = (axis for axis in row.chosen if MEANT_FOR.get(axis, row.method) == row.method)
            lines[f"{row.label}: {name}"] = {
                **{
                    axis: f"{value:g}" for axis in own if (value := arguments.get(axis)) is not None
                },
                "differs between the tasks": differing[task] or MISSING,
                "seeds": " ".join(map(str, sorted(cell.seeds))),
                "best run": cell.best["folder"],
            }
    last = ["differs between the tasks", "seeds", "best run"]
    return table_of(lines, [*(rows[0].chosen if rows else ()), *last])


def accuracies(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the papers' test accuracies of the 17 further tasks beside those of the rows that have
    some, with their means and sizes, and how the data differ from the paper's.
    """
    found = {row.label: {task: value for task, cell in row.cells.items()
                         if task in PAPER and (value := cell.mean("accuracy", "test"))} for row in rows}  # fmt: skip
    ours = {label: own for label, own in found.items() if own}
    tasks = [task for task in PAPER if any(task in own for own in ours.values())]
    if not tasks:
        return pd.DataFrame()
    papers = {name: {task: (PAPER[task].accuracies[n], None) for task in tasks if n < len(PAPER[task].accuracies)}
              for n, name in enumerate(PAPER_COLUMNS)}  # fmt: skip
    groups = {proper_name(task): [task] for task in tasks}
    once = counted_once(tasks)
    groups[f"mean of {len(once)}"] = once
    if of_2020 := [task for task in once if task in papers[PAPER_COLUMNS[-1]]]:
        groups[f"mean of {len(of_2020)} of 2020"] = of_2020
    lines: dict[str, dict[str, str]] = {}
    for name, group in groups.items():
        means = {label: mean_over([own[task] for task in group])
                 for label, own in (papers | ours).items() if {*group} <= {*own}}  # fmt: skip
        lines[name] = {label: with_error(value) if label in ours else f"{value[0]:.1f}"
                       for label, value in means.items()}  # fmt: skip
    runs = {task: cell.best for row in rows for task, cell in row.cells.items()}
    for task in tasks:
        count, classes = sum(runs[task]["dataset"]["rows"].values()), len(runs[task]["labels"])
        lines[proper_name(task)]["data"] = PAPER[task].difference(count, classes)
    lines["as printed"] = dict(zip(PAPER_COLUMNS, PRINTED, strict=True))
    sizes = {row.label: row.sizes() for row in rows if row.label in ours and row.method != NO_BERT}
    lines["total parameters"] = TOTAL_SIZES | {
        label: f"{size.total:.3g}x" for label, size in sizes.items()
    }
    lines["trained per task"] = TRAINED | {
        label: f"{size.share:.2%}" for label, size in sizes.items()
    }
    return table_of(lines, [*papers, *ours, "data"])


def with_error(value: MeanAndError | None, sign: str = "") -> str:
    """Return a mean with its standard error."""
    if value is None:
        return MISSING
    middle, error = value
    return f"{middle:{sign}.2f}" if error is None else f"{middle:{sign}.2f} ± {error:.2f}"
