"""Draw the validation score of any runs by epoch, step or seconds of training: a panel per task, a
    line per method.

Han et al. 2021, figures 1 and 13, and the validation curves by which Houlsby et al. 2019 chose
among 20, 50 and 100 epochs: with --choose r learning_rate, the numbers of epochs are lines of their
own, from which to choose by hand. Of each method, the runs at the point that validation has chosen
are drawn: the mean over the seeds, and one standard error as a band.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from common.edge import RecipeError
from common.figures import MOMENT, save
from common.run import lower_is_better
from common.scores import proper_name
from figures.drawing import Rows, band, draw_line, legend, panels, styles, title_of, write_lines
from results.lines import Row, arrange, finished, in_percent
from sweeping.runs import CHOICES, CHOSEN


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--score", help="A validation score; default: the one that has chosen the epoch."
    )
    parser.add_argument("--x", choices=MOMENT, default="epoch", help="The horizontal axis.")
    parser.add_argument(
        "--choose", nargs="+", choices=CHOICES, default=CHOSEN, help="What validation chooses."
    )


def main(folder: Path, arguments: argparse.Namespace) -> None:
    points = summarize(arrange(finished(folder), arguments.choose), arguments.score)
    write_lines(folder / "learning_curves.jsonl", points)
    save(draw(points, arguments.x), folder / "learning_curves")


def summarize(rows: Sequence[Row], score: str | None = None) -> list[dict[str, Any]]:
    """Return a point per row, task and step where all seeds have the score: its mean over the
    seeds, and the seeds' mean epoch and seconds.
    """
    points = []
    for label, task, cell in (
        (row.label, task, cell) for row in rows for task, cell in row.cells.items()
    ):
        name = score or cell.best["chosen_by"]
        for own in cell.evaluations():
            if name not in own[0]:
                raise RecipeError(
                    f"--score must be a score of all runs; a run on {task} has {', '.join(own[0])}."
                )
            moment = {key: mean(entry[key] for entry in own) for key in MOMENT}
            values = band([in_percent(cell.best, entry, name) for entry in own])
            points.append(
                {"task": task, "line": label, "score": name, "seeds": len(own), **moment, **values}
            )
    return points


def draw(points: Rows, x: str = "epoch") -> Figure:
    shown, style = (
        {point["task"]: point["score"] for point in points},
        styles(point["line"] for point in points),
    )
    figure, axes = panels(len(shown))
    for own, (task, score) in zip(axes, sorted(shown.items()), strict=True):
        for line, look in style.items():
            if found := [
                point for point in points if (point["task"], point["line"]) == (task, line)
            ]:
                draw_line(own, found, x, label=line, **look)
        own.set_title(proper_name(task), fontsize=7)
        own.set(xlabel=x, ylabel=proper_name(score) + ("" if lower_is_better(score) else " (%)"))
    figure.suptitle(title_of(point["seeds"] for point in points), fontsize=8)
    return legend(figure)
