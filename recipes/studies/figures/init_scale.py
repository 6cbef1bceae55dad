"""Score against the scale of the adapter's first weights and its size, with the mean over tasks.

Houlsby et al. 2019, section 3.6 and figure 6 (right). Validation has chosen a learning rate and a
number of epochs for each task, size and standard deviation. Curves are means over the seeds, bands
one standard error. The mean over tasks, without WNLI and tasks that lack the score, is printed
beside the paper's for its sizes. The runs may be those of table 1.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mode
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from figures import drawing, flags
from figures.drawing import Point, Points
from results.lines import TableLine, arrange, find_columns, refuse_to_mix
from results.numbers import SIZES, TASKS_OF_SIZES
from results.read import finished
from run.edge import RecipeError
from run.figures import COLUMN, save
from sweeping.runs import CHOSEN
from tasks.scores import proper_name


SCALE, SIZE = "init_std", "r"  # the two arguments that vary
# The axis and the title of the panel in which one varies and the other one is fixed.
TITLES = {
    SCALE: ("standard deviation of the first weights", "Initialization, size"),
    SIZE: ("adapter size r", "Size, standard deviation"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_score(parser, default="accuracy")


def main(folder: Path, arguments: argparse.Namespace) -> None:
    lines = [line for line in arrange(finished(folder), CHOSEN) if line.method == "houlsby"]
    points = summarize(lines, arguments.score)
    drawing.write_points(folder / "init_scale.jsonl", points)
    tasks = len({*drawing.values_of(points, "task")})
    for r, average in means(points).items():
        text = f"r={r}: mean of {tasks} task{'s' * (tasks > 1)} {average:.1f}"
        if r in SIZES and tasks == TASKS_OF_SIZES:
            text += f"; Houlsby et al. 2019, BERT-large: {SIZES[r]}"
        print(text)
    save(draw(points), folder / "init_scale")


def summarize(lines: Sequence[TableLine], score: str) -> list[Point]:
    """Return a point per task, size and standard deviation: the scores of all seeds in percent."""
    columns = {}
    for name, (task, score_name) in find_columns(lines, score).items():
        if task == "wnli":
            print(f"{name}: left out, as the papers do")
        elif score == "accuracy" and not score_name.endswith("accuracy"):
            print(f"{name}: left out, as it has only {score_name}")
        else:
            columns[name] = (task, score_name)
    points: dict[tuple[Any, ...], Point] = {}
    for line in lines:
        for name, scores in line.scores(columns).items():
            arguments = line.cells_of({name: columns[name]})[name].first["arguments"]
            point: Point = {axis: arguments.get(axis) for axis in (SIZE, SCALE, *CHOSEN)}
            point |= {"task": name, "score": columns[name][1], "scores": scores}
            place = (name, point[SIZE], point[SCALE])
            if place in points:
                refuse_to_mix(lines)
            points[place] = point | drawing.band([*scores.values()])
    if not points:
        raise RecipeError(
            "No run of adapters has an accuracy: give --score main, or a folder with adapters."
        )
    return [points[place] for place in sorted(points)]


def means(points: Points) -> dict[int, float]:
    """Return the mean over all tasks by size, at the standard deviation of most points.

    Sizes without runs on all tasks are left out: they would be no points of the same curve.
    """
    at_scale = drawing.select(points, **{SCALE: mode(drawing.values_of(points, SCALE))})
    by_task = pd.DataFrame(at_scale).pivot(index=SIZE, columns="task", values="middle")
    by_task = by_task.reindex(columns=[*dict.fromkeys(drawing.values_of(points, "task"))])
    averages: dict[int, float] = by_task.mean(axis=1, skipna=False).dropna().to_dict()
    return averages


def draw(points: Points) -> Figure:
    """Draw the score by what varies, the standard deviation or the size.

    The other one is that of most points.
    """
    style = drawing.styles(drawing.values_of(points, "task"))
    varying = [axis for axis in TITLES if len({*drawing.values_of(points, axis)}) > 1]
    drawn = varying or [SIZE]
    figure, panes = drawing.panels(len(drawn), COLUMN, sharey=True)
    for axes, axis in zip(panes, drawn, strict=True):
        fixed = SIZE if axis == SCALE else SCALE
        usual = mode(drawing.values_of(points, fixed))
        at_usual = drawing.select(points, **{fixed: usual})
        drawing.draw_curves(axes, at_usual, axis, "task", style, proper_name)
        axes.set_xscale("log")
        label, title = TITLES[axis]
        axes.set(xlabel=label, title=f"{title} {usual:g}")
        if axis == SIZE:
            averages = means(points)
            if averages and len({*drawing.values_of(points, "task")}) > 1:
                sizes, heights = [*averages], [*averages.values()]
                axes.plot(sizes, heights, color="black", linestyle="--", label="mean over tasks")
            ticks = sorted({*drawing.values_of(points, SIZE)})
            axes.set_xticks(ticks, [f"{size:g}" for size in ticks], minor=False)
            axes.minorticks_off()
    scores = drawing.values_of(points, "score")
    names = {"accuracy" if name.endswith("accuracy") else proper_name(name) for name in scores}
    shown = names.pop() if len(names) == 1 else "score"
    panes[0].set_ylabel(f"validation {shown} (%)")
    figure.suptitle(drawing.title_of(map(len, drawing.values_of(points, "scores"))), fontsize=8)
    return drawing.legend(figure, columns=4)
