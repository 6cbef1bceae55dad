"""Draw the validation score of any runs by epoch, step or seconds of training: a panel per task, a line per method.

Han et al. 2021, figures 1 and 13, and the validation curves by which Houlsby et al. 2019 chose among 20, 50 and 100
epochs: with --choose r learning_rate, the numbers of epochs are lines of their own, from which to choose by hand. Of
each method, the runs at the point that validation has chosen are drawn: the mean over the seeds, and one standard
error as a band.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from common.edge import RecipeError
from common.figures import MOMENT, save
from common.scores import proper_name
from papers.drawing import draw_line, legend, panels, seeds_of, styles
from papers.results import MeanAndError, Results, Row, arrange, finished, in_percent, mean_and_error
from sweeping.runs import CHOICES, CHOSEN


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the axes."""
    parser.add_argument("--score", help="A validation score; default: the one that has chosen the epoch.")
    parser.add_argument("--x", choices=MOMENT, default="epoch", help="The horizontal axis.")
    parser.add_argument("--choose", nargs="+", choices=CHOICES, default=CHOSEN, help="What validation chooses.")


def main(arguments: argparse.Namespace) -> None:
    """Write the figure."""
    folder = Path(arguments.folder)
    save(draw(arrange(finished(folder), arguments.choose), arguments.x, arguments.score), folder / "learning_curves")


def draw(rows: Sequence[Row], x: str = "epoch", score: str | None = None) -> Figure:
    """Draw a panel per task, and a line per row.

    Raises:
        RecipeError: If a run has no such score.
    """
    tasks, style = sorted({task for row in rows for task in row.cells}), styles(row.label for row in rows)
    figure, axes = panels(len(tasks))
    for own, task in zip(axes, tasks, strict=True):
        cells = {row.label: row.cells[task] for row in rows if task in row.cells}
        for label, cell in cells.items():
            draw_line(own, curve(cell.seeds, x, score), label=label, **style[label])
        shown = score or next(iter(cells.values())).best["chosen_by"]
        own.set_title(proper_name(task), fontsize=7)
        own.set(xlabel=x, ylabel=proper_name(shown) + ("" if shown.endswith("loss") else " (%)"))
    seeds = max(len(cell.seeds) for row in rows for cell in row.cells.values())
    figure.suptitle(f"Mean and standard error of {seeds_of(seeds)}" if seeds > 1 else "One seed", fontsize=8)
    legend(figure)
    return figure


def curve(seeds: Mapping[int, Results], x: str, score: str | None) -> dict[float, MeanAndError]:
    """Return a score's mean over the seeds and its standard error, by epoch, step or the seeds' mean seconds, at the
    steps where all seeds have one.

    Raises:
        RecipeError: If a run has no such score.
    """
    values: dict[float, list[tuple[float, float]]] = {}
    for results in seeds.values():
        name = score or results["chosen_by"]
        for epoch in results["epochs"]:
            if name not in epoch:
                have = ", ".join(key for key in epoch if key not in MOMENT)
                raise RecipeError(f"--score must be a score of all runs; a run on {results['task']} has {have}.")
            values.setdefault(epoch["step"], []).append((epoch[x], in_percent(results, name, epoch[name])))
    return {
        mean(at for at, _ in own): mean_and_error([value for _, value in own])
        for _, own in sorted(values.items())
        if len(own) == len(seeds)
    }
