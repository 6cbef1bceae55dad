"""Score against the scale of the adapter's first weights and against the adapter's size, with the
mean over tasks.

Houlsby et al. 2019, section 3.6 and figure 6 (right). Validation has chosen a learning rate and a
number of epochs for each task, size and standard deviation. Lines are means over the seeds, bands
one standard error. The mean over tasks, without WNLI and tasks that lack the score, is printed
beside the paper's for its sizes. The runs may be those of table 1.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, mode
from typing import Any

from matplotlib.figure import Figure

from common.edge import RecipeError
from common.figures import COLUMN, save
from common.scores import proper_name
from figures.drawing import Rows, band, draw_line, legend, panels, styles, title_of, write_lines
from results.lines import Row, arrange, columns, finished
from results.numbers import SIZES, TASKS_OF_SIZES
from sweeping.runs import CHOSEN


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--score",
        choices=("accuracy", "main"),
        default="accuracy",
        help="What is shown, as in the paper or in GLUE.",
    )


def main(folder: Path, arguments: argparse.Namespace) -> None:
    runs = [one for one in finished(folder) if one["method"] == "houlsby"]
    points = summarize(arrange(runs, CHOSEN), arguments.score)
    write_lines(folder / "init_scale.jsonl", points)
    tasks = len({point["task"] for point in points})
    for r, average in means(points).items():
        paper = (
            f"; Houlsby et al. 2019, BERT-large: {SIZES[r]}"
            if r in SIZES and tasks == TASKS_OF_SIZES
            else ""
        )
        print(f"r={r}: mean of {tasks} tasks {average:.1f}{paper}")
    save(draw(points), folder / "init_scale")


def summarize(rows: Sequence[Row], score: str) -> list[dict[str, Any]]:
    """Return a point per task, size and standard deviation: the scores of all seeds in percent."""
    points = []
    for name, (task, shown) in columns(rows, score).items():
        if task == "wnli" or (score == "accuracy" and not shown.endswith("accuracy")):
            print(
                f"{name}: left out, as {'the papers do' if task == 'wnli' else f'it has only {shown}'}"
            )
            continue
        for row in rows:
            if (cell := row.cell(task, shown)) and (scores := cell.by_seed(shown)):
                arguments = next(iter(cell.seeds.values()))["arguments"]
                kept = {axis: arguments.get(axis) for axis in ("r", "init_std", *CHOSEN)}
                points.append(
                    {
                        "task": name,
                        **kept,
                        "score": shown,
                        "scores": scores,
                        **band([*scores.values()]),
                    }
                )
    if len({(point["task"], point["r"], point["init_std"]) for point in points}) < len(points):
        raise RecipeError(
            f"Each of these kinds needs a folder of its own: {'; '.join(row.label for row in rows)}."
        )
    if not points:
        raise RecipeError("No task has an accuracy: give --score main.")
    return sorted(points, key=lambda point: (point["task"], point["r"], point["init_std"]))


def means(points: Rows) -> dict[int, float]:
    """Return the mean over all tasks by size, at the standard deviation of most points. A mean over
    fewer tasks would be no point of the same line.
    """
    by_size: dict[int, list[float]] = {}
    for point in points:
        if point["init_std"] == mode(point["init_std"] for point in points):
            by_size.setdefault(point["r"], []).append(point["middle"])
    tasks = {point["task"] for point in points}
    return {r: mean(own) for r, own in sorted(by_size.items()) if len(own) == len(tasks)}


def draw(points: Rows) -> Figure:
    """Draw the score by what varies, the standard deviation or the size, the other being that of
    most points.
    """
    style = styles(point["task"] for point in points)
    held = {axis: mode(point[axis] for point in points) for axis in ("init_std", "r")}
    shown = [axis for axis in held if len({point[axis] for point in points}) > 1] or ["r"]
    figure, panes = panels(len(shown), COLUMN, sharey=True)
    for axes, axis in zip(panes, shown, strict=True):
        other = "init_std" if axis == "r" else "r"
        for task in style:
            if own := [
                point for point in points if point["task"] == task and point[other] == held[other]
            ]:
                draw_line(axes, own, axis, label=proper_name(task), **style[task])
        axes.set_xscale("log")
        if axis == "init_std":
            axes.set(
                xlabel="standard deviation of the first weights",
                title=f"Initialization, size {held['r']:g}",
            )
        else:
            axes.set(
                xlabel="adapter size r", title=f"Size, standard deviation {held['init_std']:g}"
            )
            if len(style) > 1 and (average := means(points)):
                axes.plot(
                    [*average],
                    [*average.values()],
                    color="black",
                    linestyle="--",
                    label="mean over tasks",
                )
            sizes = sorted({point["r"] for point in points})
            axes.set_xticks(sizes, [f"{size:g}" for size in sizes], minor=False)
            axes.minorticks_off()
    kinds = {
        "accuracy" if point["score"].endswith("accuracy") else proper_name(point["score"])
        for point in points
    }
    panes[0].set_ylabel(f"validation {kinds.pop() if len(kinds) == 1 else 'score'} (%)")
    figure.suptitle(title_of(len(point["scores"]) for point in points), fontsize=8)
    return legend(figure, columns=4)
