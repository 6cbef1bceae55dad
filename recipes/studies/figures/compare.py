"""Compare methods: scores, paired differences to a baseline, sizes, and times to reach a score.

    python recipes/studies/figure.py compare runs/study            # to full fine-tuning
    python recipes/studies/figure.py compare runs/h36 --baseline "activation gelu"

Differences are paired by seed; their mean over the tasks has the standard error over the seeds.
Bytes are those of the saved weights, seconds those of the training steps, without evaluations and
checkpoints, and memory is the peak, of the GPU's or else the machine's. The time to a score is that
until the first evaluation whose mean over the seeds reaches a share of the baseline's best mean, so
evaluations should be frequent (--eval_strategy steps --save_strategy steps).
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.drawing import Style, legend, panels, show_counts, styles, values_of
from results.difference_table import compared, differences_to
from results.lines import Cell, Columns, TableLine, arrange, find_columns, join_labels
from results.means import mean_and_error, mean_over
from results.read import Results, finished, in_percent
from results.table import MISSING, show, table_of
from run.edge import RecipeError
from run.figures import COLUMN, save
from run.run import lower_is_better
from sweeping.runs import CHOICES, CHOSEN


FULL = "full"  # the default baseline
# What the differences are drawn against, by the name of the fact.
AXES = {
    "trained": "trained parameters per task",
    "bytes": "bytes of the saved weights",
    "seconds": "seconds of training per task",
}


@dataclass(frozen=True)
class Facts:
    """What is known of a method, over its columns; None where the runs do not say it."""

    score: float
    score_error: float | None
    columns: int
    difference: float | None  # to the baseline
    difference_error: float | None
    trained: int  # parameters per task
    bytes: int | None
    seconds: float | None
    memory: int | None
    seeds: int


FactsByLabel = Mapping[str, Facts]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--baseline", default=FULL, help="A line, by its label or by a part that only it has.")
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
    runs = [at_epoch(run, arguments.epoch) for run in finished(folder)]
    lines = arrange(runs, arguments.choose)
    base = find_baseline(lines, arguments.baseline)
    columns = find_columns(lines, arguments.score)
    facts = summarize(lines, base, columns, arguments.split)
    tables = {
        "Methods": _frame(facts, object).map(_as_text),
        f"Difference to {base.label}": compared(lines, base, columns, arguments.split),
        f"Time to {arguments.share:.0%} of the best score of {base.label}": table_of(
            {line.label: times(line, base, arguments.share) for line in lines}
        ),
    }
    pages = {heading: (table, "") for heading, table in tables.items() if table.size}
    show(pages, folder / "compare.md")
    _frame(facts).to_csv(folder / "compare.csv")
    save(draw(facts, arguments.split), folder / "compare")


def at_epoch(results: Results, epoch: str) -> Results:
    """Return a run with the scores of another epoch than the one whose weights it has kept.

    It may be the best one of a run that saves no checkpoints.
    """
    if epoch == "kept":
        return results
    name, evaluations = results["chosen_by"], results["epochs"]
    if epoch == "last":
        scores = evaluations[-1]
    else:
        sign = -1 if lower_is_better(name) else 1
        scores = max(evaluations, key=lambda evaluation: sign * evaluation[name])
    return {**results, "best_scores": scores, "best_score": scores[name]}


def find_baseline(lines: Sequence[TableLine], name: str) -> TableLine:
    """Return the line with this label, or the only one whose label has it as a part.

    A single method without full fine-tuning beside it is compared with itself: its table still has
    scores, sizes and times.
    """
    if len(lines) == 1 and name == FULL:
        return lines[0]
    containing = []
    for line in lines:
        if line.label == name:
            return line
        if name in line.label:
            containing.append(line)
    if len(containing) != 1:
        raise RecipeError(f"--baseline must be one of: {join_labels(lines)}; got {name!r}.")
    return containing[0]


def summarize(
    lines: Sequence[TableLine], base: TableLine, columns: Columns, split: str
) -> dict[str, Facts]:
    """Return the facts of each line that has a score."""
    scored = [line for line in lines if line.scores(columns, split)]
    return {line.label: _facts(line, base, columns, split) for line in scored}


def _facts(line: TableLine, base: TableLine, columns: Columns, split: str) -> Facts:
    scores = line.scores(columns, split).values()
    score, score_error = mean_over([mean_and_error([*by_seed.values()]) for by_seed in scores])
    changes = differences_to(line, base, columns, split)
    difference, difference_error = mean_over([*changes.values()]) if changes else (None, None)
    seeds, runs = 0, list[Results]()
    for cell in line.cells_of(columns).values():
        runs += cell.seeds.values()
        seeds = max(seeds, len(cell.seeds))
    seconds = [run["epochs"][-1]["seconds"] for run in runs if run["epochs"]]
    peaks = [run["peak_memory"] for run in runs if "peak_memory" in run]
    return Facts(
        score,
        score_error,
        len(scores),
        difference,
        difference_error,
        trained=round(line.sizes().trained),
        bytes=_bytes_per_run(runs),
        seconds=mean(seconds) if seconds else None,
        memory=round(mean(peaks)) if peaks else None,
        seeds=seeds,
    )


def _bytes_per_run(runs: Sequence[Results]) -> int | None:
    """Return the mean size of the saved weights, in adapter/ or model/; None without any."""
    total = 0
    for run in runs:
        for path in Path(run["folder"]).glob("[am][do]*/*.safetensors"):
            total += path.stat().st_size
    return total // len(runs) or None


def _frame(facts: FactsByLabel, dtype: type | None = None) -> pd.DataFrame:
    """Return the facts as a data frame of numbers."""
    return pd.DataFrame(map(asdict, facts.values()), [*facts], dtype=dtype)


def _as_text(value: float | None) -> str:
    if value is None:
        return MISSING
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}"


def draw(facts: FactsByLabel, split: str) -> Figure:
    """Draw the mean difference to the baseline against parameters, bytes and seconds, if known."""
    table = _frame(facts)
    drawn = [name for name in AXES if table[name].any()]
    figure, panes = panels(len(drawn), COLUMN, sharey=True)
    style = styles(facts)
    for axes, name in zip(panes, drawn, strict=True):
        for label, of_line in facts.items():
            _draw_difference(axes, of_line, name, label, style[label])
        axes.axhline(0, color="black", linestyle="--", linewidth=0.8)
        axes.set_xlabel(AXES[name])
        if name != "seconds":
            show_counts(axes)
    panes[0].set_ylabel(f"{split}: difference in points")
    return legend(figure)


def _draw_difference(axes: Axes, facts: Facts, name: str, label: str, style: Style) -> None:
    """Draw a method's difference with its error, if it and the fact are known."""
    at = getattr(facts, name)
    if at and facts.difference is not None:
        error = facts.difference_error or 0
        look = style | {"linestyle": "none"}
        axes.errorbar([at], [facts.difference], [error], label=label, capsize=2, **look)


def times(line: TableLine, base: TableLine, share: float) -> dict[str, str]:
    """Return for each task of the baseline how long the line trains until it reaches its goal.

    The goal is a share of the baseline's best mean score. The text has the mean over the seeds,
    their range, and the ratio to the baseline's own time.
    """
    texts = {}
    for task, cell in base.cells.items():
        curve = mean_curve(cell)
        goal = share * max((evaluation.score for evaluation in curve), default=0)
        if goal <= 0 or task not in line.cells:
            continue
        seconds = _seconds_to(goal, mean_curve(line.cells[task]))
        seconds_of_base = _seconds_to(goal, curve)
        if not seconds:
            texts[f"{task}, to {goal:.1f}"] = "not reached"
            continue
        spread = f" ({min(seconds):.0f} to {max(seconds):.0f})" if len(seconds) > 1 else ""
        ratio = mean(seconds) / mean(seconds_of_base)
        texts[f"{task}, to {goal:.1f}"] = f"{mean(seconds):.0f} s{spread}, {ratio:.2f}"
    return texts


class Evaluation(NamedTuple):
    """A method's evaluation at one step."""

    score: float  # the mean over the seeds, in percent
    seconds: list[float]  # of each seed


def mean_curve(cell: Cell) -> list[Evaluation]:
    """Return a method's evaluations on a task, in their order; none if a loss has chosen."""
    if lower_is_better(cell.best["chosen_by"]):
        return []
    curve = []
    for of_seeds in cell.evaluations():
        score = mean(in_percent(cell.best, evaluation) for evaluation in of_seeds)
        curve.append(Evaluation(score, values_of(of_seeds, "seconds")))
    return curve


def _seconds_to(goal: float, curve: Sequence[Evaluation]) -> list[float]:
    """Return the seeds' times at the first evaluation that reaches the goal; none if none does."""
    for evaluation in curve:
        if evaluation.score >= goal:
            return evaluation.seconds
    return []
