"""Compare methods: scores, paired differences to a baseline, sizes, and the time to train and to
    reach a score.

    python recipes/studies/figure.py compare runs/study            # to full fine-tuning
    python recipes/studies/figure.py compare runs/h36 --baseline "activation gelu"

Differences are paired by seed; their mean over the tasks has the standard error over the seeds.
Bytes are those of the saved weights, seconds those of the training steps, without evaluations and
checkpoints, and memory is the peak, of the GPU's or else the machine's. The time to a score is that
until the first evaluation whose mean over the seeds reaches a share of the baseline's best mean, so
evaluations should be frequent (--eval_strategy steps --save_strategy steps).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from common.edge import RecipeError
from common.figures import COLUMN, save
from common.run import lower_is_better
from figures.drawing import legend, panels, show_counts, styles
from results.lines import (
    Cell,
    Columns,
    Results,
    Row,
    arrange,
    columns,
    finished,
    in_percent,
    mean_and_error,
    mean_over,
)
from results.tables import MISSING, compared, differences_to, show, table_of
from sweeping.runs import CHOICES, CHOSEN


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--baseline", default="full", help="A row, by its label or by a part that only it has.")
    add(
        "--score",
        choices=("accuracy", "main"),
        default="main",
        help="A task without accuracy shows its main score.",
    )
    add(
        "--split", choices=("validation", "test"), default="validation", help="Where it was scored."
    )
    add(
        "--epoch",
        choices=("kept", "best", "last"),
        default="kept",
        help="The epoch whose scores are compared.",
    )
    add(
        "--share",
        type=float,
        default=0.99,
        help="Share of the baseline's best score, for the time to a score.",
    )
    add("--choose", nargs="+", choices=CHOICES, default=CHOSEN, help="What validation chooses.")


def main(folder: Path, arguments: argparse.Namespace) -> None:
    """Print the tables, and write them and the figure."""
    runs = [at_epoch(one, arguments.epoch) for one in finished(folder)]
    rows = arrange(runs, arguments.choose)
    base, shown = find_baseline(rows, arguments.baseline), columns(rows, arguments.score)
    facts = summarize(rows, base, shown, arguments.split)
    tables = {
        "Methods": pd.DataFrame.from_dict(facts, orient="index", dtype=object).map(
            lambda value: MISSING if pd.isna(value) else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
        ),
        f"Difference to {base.label}": compared(rows, base, shown, arguments.split),
        f"Time to {arguments.share:.0%} of the best score of {base.label}":
            table_of({row.label: times(row, base, arguments.share) for row in rows}),
    }  # fmt: skip
    show(
        {name: (table, "") for name, table in tables.items() if len(table.columns)},
        folder / "compare.md",
    )
    pd.DataFrame.from_dict(facts, orient="index").to_csv(folder / "compare.csv")
    save(draw(facts, arguments.split), folder / "compare")


def at_epoch(results: Results, epoch: str) -> Results:
    """Return a run with the scores of another epoch than the one whose weights it has kept, such as
    the best one of a run that saves no checkpoints.
    """
    if epoch == "kept":
        return results
    name = results["chosen_by"]
    best = (min if lower_is_better(name) else max)(results["epochs"], key=lambda entry: entry[name])
    entry = best if epoch == "best" else results["epochs"][-1]
    return {**results, "best_scores": entry, "best_score": entry[name]}


def find_baseline(rows: Sequence[Row], name: str) -> Row:
    """Return the row with this label, or the only one whose label has it as a part."""
    found = [row for row in rows if row.label == name] or [row for row in rows if name in row.label]
    if len(found) != 1:
        raise RecipeError(
            f"--baseline must be one of: {'; '.join(row.label for row in rows)}; got {name!r}."
        )
    return found[0]


def summarize(
    rows: Sequence[Row], base: Row, shown: Columns, split: str
) -> dict[str, dict[str, Any]]:
    """Return by row the mean score over its columns, the mean paired difference to the baseline,
    each with its error, and trained parameters, bytes and seconds per task.
    """
    facts = {}
    for row in rows:
        cells = [cell for column in shown.values() if (cell := row.cell(*column))]
        means = [mean_and_error([*own.values()]) for own in row.scores(shown, split).values()]
        runs = [one for cell in cells for one in cell.seeds.values()]
        changes = [*differences_to(row, base, shown, split).values()]
        weights = [
            path for one in runs for path in Path(one["folder"]).glob("[am][do]*/*.safetensors")
        ]
        seconds = [one["epochs"][-1]["seconds"] for one in runs if one["epochs"]]
        peaks = [one["peak_memory"] for one in runs if "peak_memory" in one]
        if means:
            score, error = mean_over(means)
            difference, of_difference = mean_over(changes) if changes else (None, None)
            facts[row.label] = {
                "score": score, "score_error": error, "columns": len(means), "difference": difference,
                "difference_error": of_difference, "trained": round(row.sizes().trained),
                "bytes": sum(path.stat().st_size for path in weights) // len(runs) or None,
                "seconds": mean(seconds) if seconds else None,
                "memory": round(mean(peaks)) if peaks else None,
                "seeds": max(len(cell.seeds) for cell in cells),
            }  # fmt: skip
    return facts


def draw(facts: dict[str, dict[str, Any]], split: str) -> Figure:
    """Draw the mean difference to the baseline against the parameters, the bytes and the seconds,
    as far as known.
    """
    axes_of = {"trained": "trained parameters per task", "bytes": "bytes of the saved weights",
               "seconds": "seconds of training per task"}  # fmt: skip
    known = [name for name in axes_of if any(one[name] for one in facts.values())]
    figure, axes = panels(len(known), COLUMN, sharey=True)
    style = styles(facts)
    for own, name in zip(axes, known, strict=True):
        for label, one in facts.items():
            if one[name] and one["difference"] is not None:
                look = style[label] | {"linestyle": "none"}
                error = one["difference_error"] or 0
                own.errorbar(
                    [one[name]], [one["difference"]], [error], label=label, capsize=2, **look
                )
        own.axhline(0, color="black", linestyle="--", linewidth=0.8)
        own.set_xlabel(axes_of[name])
        if name != "seconds":
            show_counts(own)
    axes[0].set_ylabel(f"{split}: difference in points")
    return legend(figure)


def times(row: Row, base: Row, share: float) -> dict[str, str]:
    """Return for each task of the baseline how long the row trains until its mean score reaches a
    share of the baseline's best: the mean over the seeds, their range, and the ratio to the
    baseline's own time.
    """
    found = {}
    for task, cell in base.cells.items():
        curve = mean_curve(cell)
        goal = share * max((score for score, _ in curve), default=0)
        name = f"{task}, to {goal:.1f}"
        if goal > 0 and task in row.cells:
            reached = next((own for score, own in mean_curve(row.cells[task]) if score >= goal), [])
            of_base = next(own for score, own in curve if score >= goal)
            spread = f" ({min(reached):.0f} to {max(reached):.0f})" if len(reached) > 1 else ""
            found[name] = (
                f"{mean(reached):.0f} s{spread}, {mean(reached) / mean(of_base):.2f}"
                if reached
                else "not reached"
            )
    return found


def mean_curve(cell: Cell) -> list[tuple[float, list[float]]]:
    """Return the evaluations of a method on a task, in their order: the mean score in percent, and
    each seed's time; none for runs that were chosen by a loss.
    """
    evaluations = [] if lower_is_better(cell.best["chosen_by"]) else cell.evaluations()
    return [(mean(in_percent(cell.best, entry) for entry in own), [entry["seconds"] for entry in own])
            for own in evaluations]  # fmt: skip
