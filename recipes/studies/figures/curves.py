"""Draw the validation score of any runs by epoch, step or seconds of training, a panel per task.

Han et al. 2021, figures 1 and 13, and the validation curves by which Houlsby et al. 2019 chose
among 20, 50 and 100 epochs: with --choose r learning_rate, each number of epochs has its own curve,
from which to choose by hand. A method's runs at the point that validation has chosen are drawn: the
mean over the seeds, and one standard error as a band.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from figures import drawing, flags
from figures.drawing import Point, Points
from results.lines import TableLine, arrange
from results.read import finished, in_percent
from run.edge import RecipeError
from run.figures import save
from run.run import MOMENT, lower_is_better
from tasks.scores import proper_name


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--score", help="A validation score; default: the one that has chosen the epoch."
    )
    parser.add_argument("--x", choices=MOMENT, default="epoch", help="The horizontal axis.")
    flags.add_choose(parser)


def main(folder: Path, arguments: argparse.Namespace) -> None:
    points = summarize(arrange(finished(folder), arguments.choose), arguments.score)
    drawing.write_points(folder / "learning_curves.jsonl", points)
    save(draw(points, arguments.x), folder / "learning_curves")


def summarize(lines: Sequence[TableLine], score: str | None = None) -> list[Point]:
    """Return a point per line of the table, task and step where all seeds have the score.

    It has the mean score over the seeds, and the seeds' mean epoch and seconds.
    """
    points = []
    for line in lines:
        for task, cell in line.cells.items():
            shown = score or cell.best["chosen_by"]
            for of_seeds in cell.evaluations():
                if shown not in of_seeds[0]:
                    raise RecipeError(
                        f"--score must be a score of all runs; a run on {cell.best['task']} has "
                        f"{', '.join(of_seeds[0])}."
                    )
                point: Point = {"task": task, "line": line.label}
                point |= {"score": shown, "seeds": len(of_seeds)}
                for key in MOMENT:
                    point[key] = mean(drawing.values_of(of_seeds, key))
                scores = [in_percent(cell.best, evaluation, shown) for evaluation in of_seeds]
                points.append(point | drawing.band(scores))
    return points


def draw(points: Points, x: str = "epoch") -> Figure:
    scores = {point["task"]: point["score"] for point in points}
    style = drawing.styles(drawing.values_of(points, "line"))
    figure, panes = drawing.panels(len(scores))
    for axes, (task, score) in zip(panes, sorted(scores.items()), strict=True):
        drawing.draw_curves(axes, drawing.select(points, task=task), x, "line", style)
        axes.set_title(proper_name(task), fontsize=7)
        unit = "" if lower_is_better(score) else " (%)"
        axes.set(xlabel=x, ylabel=proper_name(score) + unit)
    figure.suptitle(drawing.title_of(drawing.values_of(points, "seeds")), fontsize=8)
    return drawing.legend(figure)
