"""Draw the validation score of any runs by epoch, step or seconds of training: a panel per task, a line per method.

Han et al. 2021, figures 1 and 13, and the validation curves by which Houlsby et al. 2019 chose among 20, 50 and 100
epochs. Of each method, the runs at the point that validation has chosen are drawn: the mean over the seeds, and one
standard error as a band.
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from common.edge import RecipeError
from common.figures import COLORS, COLUMN, MOMENT, PAGE, plt, save
from common.glue_report import proper_name
from papers.results import Results, Row, arrange, finished, in_percent, mean_and_error
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
    tasks = sorted({task for row in rows for task in row.cells})
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(max(PAGE, COLUMN * len(tasks)) if len(tasks) > 1 else COLUMN, COLUMN), squeeze=False
    )
    styles = dict(zip((row.label for row in rows), cycle(COLORS)))
    for axes, task in zip(panels[0], tasks, strict=True):
        cells = {row.label: row.cells[task] for row in rows if task in row.cells}
        for label, cell in cells.items():
            points = curve(cell.seeds, x, score)
            middle = [value for value, _ in points.values()]
            low, high = ([value + sign * (error or 0) for value, error in points.values()] for sign in (-1, 1))
            axes.fill_between([*points], low, high, color=styles[label], alpha=0.2, linewidth=0)
            axes.plot([*points], middle, color=styles[label], marker="." if len(points) <= 20 else "", label=label)
        shown = score or next(iter(cells.values())).best["chosen_by"]
        seeds = max(len(cell.seeds) for cell in cells.values())
        title = f"{proper_name(task)}, {seeds} seed{'s' * (seeds > 1)}"
        axes.set(title=title, xlabel=x, ylabel=proper_name(shown) + ("" if shown.endswith("loss") else " (%)"))
    lines = {line.get_label(): line for axes in panels[0] for line in axes.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center")
    return figure


def curve(seeds: Mapping[int, Results], x: str, score: str | None) -> dict[float, tuple[float, float | None]]:
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
