"""Score against the scale of the adapter's first weights and its size, with the mean over tasks.

Houlsby et al. 2019, section 3.6 and figure 6 (right). Validation has chosen a learning rate and a
number of epochs for each task, size and standard deviation. Curves are means over the seeds, bands
one standard error. The mean over tasks, without WNLI and tasks that lack the score, is printed
beside the paper's for its sizes. The runs may be those of table 1.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, mode
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.drawing import (
    Point,
    Points,
    Style,
    band,
    draw_curve,
    legend,
    panels,
    select,
    styles,
    title_of,
    values_of,
    write_points,
)
from results.lines import TableLine, arrange, find_columns, join_labels
from results.numbers import SIZES, TASKS_OF_SIZES
from results.read import finished
from run.edge import RecipeError
from run.figures import COLUMN, save
from sweeping.runs import CHOSEN
from tasks.scores import proper_name


SCALE, SIZE = "init_std", "r"  # the two arguments that vary


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--score",
        choices=("accuracy", "main"),
        default="accuracy",
        help="What is shown, as in the paper or in GLUE.",
    )


def main(folder: Path, arguments: argparse.Namespace) -> None:
    lines = [line for line in arrange(finished(folder), CHOSEN) if line.method == "houlsby"]
    points = summarize(lines, arguments.score)
    write_points(folder / "init_scale.jsonl", points)
    tasks = len({*values_of(points, "task")})
    for r, average in means(points).items():
        text = f"r={r}: mean of {tasks} tasks {average:.1f}"
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
        for name, cell in line.cells_of(columns).items():
            scores = cell.by_seed(columns[name][1])
            if not scores:
                continue
            point = _point(name, columns[name][1], cell.first["arguments"], scores)
            place = (name, point[SIZE], point[SCALE])
            if place in points:
                raise RecipeError(
                    f"Each of these kinds needs a folder of its own: {join_labels(lines)}."
                )
            points[place] = point
    if not points:
        raise RecipeError("No task has an accuracy: give --score main.")
    return [points[place] for place in sorted(points)]


def _point(
    task: str, score: str, arguments: Mapping[str, Any], scores: Mapping[int, float]
) -> Point:
    point: Point = {"task": task}
    for axis in (SIZE, SCALE, *CHOSEN):
        point[axis] = arguments.get(axis)
    return {**point, "score": score, "scores": scores, **band([*scores.values()])}


def means(points: Points) -> dict[int, float]:
    """Return the mean over all tasks by size, at the standard deviation of most points.

    Sizes without runs on all tasks are left out: they would be no points of the same curve.
    """
    usual_scale = mode(values_of(points, SCALE))
    by_size: dict[int, list[float]] = defaultdict(list)
    for point in select(points, **{SCALE: usual_scale}):
        by_size[point[SIZE]].append(point["middle"])
    tasks = len({*values_of(points, "task")})
    return {r: mean(by_size[r]) for r in sorted(by_size) if len(by_size[r]) == tasks}


def draw(points: Points) -> Figure:
    """Draw the score by what varies, the standard deviation or the size.

    The other one is that of most points.
    """
    style = styles(values_of(points, "task"))
    varying = [axis for axis in (SCALE, SIZE) if len({*values_of(points, axis)}) > 1]
    drawn = varying or [SIZE]
    figure, panes = panels(len(drawn), COLUMN, sharey=True)
    for axes, axis in zip(panes, drawn, strict=True):
        if axis == SCALE:
            _draw_scales(axes, points, style)
        else:
            _draw_sizes(axes, points, style)
    panes[0].set_ylabel(f"validation {_name_of_score(points)} (%)")
    figure.suptitle(title_of(map(len, values_of(points, "scores"))), fontsize=8)
    return legend(figure, columns=4)


def _draw_scales(axes: Axes, points: Points, style: Mapping[str, Style]) -> None:
    size = mode(values_of(points, SIZE))
    _draw_tasks(axes, select(points, **{SIZE: size}), SCALE, style)
    axes.set_xlabel("standard deviation of the first weights")
    axes.set_title(f"Initialization, size {size:g}")


def _draw_sizes(axes: Axes, points: Points, style: Mapping[str, Style]) -> None:
    scale = mode(values_of(points, SCALE))
    _draw_tasks(axes, select(points, **{SCALE: scale}), SIZE, style)
    axes.set_xlabel("adapter size r")
    axes.set_title(f"Size, standard deviation {scale:g}")
    averages = means(points)
    if len(style) > 1 and averages:
        sizes, values = [*averages], [*averages.values()]
        axes.plot(sizes, values, color="black", linestyle="--", label="mean over tasks")
    ticks = sorted({*values_of(points, SIZE)})
    axes.set_xticks(ticks, [f"{size:g}" for size in ticks], minor=False)
    axes.minorticks_off()


def _draw_tasks(axes: Axes, points: Points, axis: str, style: Mapping[str, Style]) -> None:
    """Draw a curve for each task, on a logarithmic axis."""
    for task in style:
        curve = select(points, task=task)
        if curve:
            draw_curve(axes, curve, axis, label=proper_name(task), **style[task])
    axes.set_xscale("log")


def _name_of_score(points: Points) -> str:
    """Return the score's name, or "score" if there are several."""
    names = set()
    for score in values_of(points, "score"):
        names.add("accuracy" if score.endswith("accuracy") else proper_name(score))
    return names.pop() if len(names) == 1 else "score"
