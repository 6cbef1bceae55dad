"""Score against the scale of the adapter's first weights and against the adapter's size, with the mean over tasks.

Houlsby et al. 2019, section 3.6 and figure 6 (right). Validation has chosen a learning rate and a number of epochs for
each task, size and standard deviation. Lines are means over the seeds, bands one standard error. The mean over tasks,
without WNLI and tasks that lack the score, is printed beside the paper's for its sizes. The runs may be those of
table 1.
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
from papers.drawing import Rows, band, draw_line, legend, panels, styles, title_of, write_lines
from papers.numbers import SIZES
from papers.results import Row, arrange, columns, finished
from sweeping.runs import CHOSEN


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--score", choices=("accuracy", "main"), default="accuracy", help="What is shown, as in the paper or in GLUE."
    )


def main(folder: Path, arguments: argparse.Namespace) -> None:
    runs = [one for one in finished(folder) if one["method"] == "houlsby"]
    points = summarize(arrange(runs, CHOSEN), arguments.score)
    write_lines(folder / "init_scale.jsonl", points)
    for r, average in means(points).items():
        paper = f"; Houlsby et al. 2019, BERT-large: {SIZES[r]}" if r in SIZES else ""
        print(f"r={r}: mean of {len({point['task'] for point in points})} tasks {average:.1f}{paper}")
    save(draw(points), folder / "init_scale")


def summarize(rows: Sequence[Row], score: str) -> list[dict[str, Any]]:
    """Return a point per task, size and standard deviation: the scores of all seeds in percent."""
    points = []
    for name, (task, shown) in columns(rows, score).items():
        if task == "wnli" or (score == "accuracy" and not shown.endswith("accuracy")):
            print(f"{name}: left out, as {'the papers do' if task == 'wnli' else f'it has only {shown}'}")
            continue
        for row in rows:
            if (cell := row.cell(task, shown)) and (scores := cell.by_seed(shown)):
                arguments = next(iter(cell.seeds.values()))["arguments"]
                kept = {axis: arguments.get(axis) for axis in ("r", "init_std", *CHOSEN)}
                points.append({"task": name, **kept, "score": shown, "scores": scores, **band([*scores.values()])})
    if not points:
        raise RecipeError("No task has an accuracy: give --score main.")
    return sorted(points, key=lambda point: (point["task"], point["r"], point["init_std"]))


def means(points: Rows) -> dict[int, float]:
    """Return the mean over all tasks by size, at the standard deviation of most points. A mean over fewer tasks would
    be no point of the same line."""
    by_size: dict[int, list[float]] = {}
    for point in points:
        if point["init_std"] == mode(point["init_std"] for point in points):
            by_size.setdefault(point["r"], []).append(point["middle"])
    tasks = {point["task"] for point in points}
    return {r: mean(own) for r, own in sorted(by_size.items()) if len(own) == len(tasks)}


def draw(points: Rows) -> Figure:
    """Draw the score by standard deviation, at the size of most points (left), and by size, with the mean (right)."""
    figure, (left, right) = panels(2, COLUMN, sharey=True)
    style = styles(point["task"] for point in points)
    r, std = (mode(point[axis] for point in points) for axis in ("r", "init_std"))
    for axes, axis, other, held in ((left, "init_std", "r", r), (right, "r", "init_std", std)):
        for task in style:
            if own := [point for point in points if point["task"] == task and point[other] == held]:
                draw_line(axes, own, axis, label=proper_name(task), **style[task])
    if len(style) > 1 and (average := means(points)):
        right.plot([*average], [*average.values()], color="black", linestyle="--", label="mean over tasks")
    kinds = {"accuracy" if point["score"].endswith("accuracy") else proper_name(point["score"]) for point in points}
    figure.suptitle(title_of(max(len(point["scores"]) for point in points)), fontsize=8)
    left.set(xscale="log", xlabel="standard deviation of the first weights", title=f"Initialization, size {r:g}",
             ylabel=f"validation {kinds.pop() if len(kinds) == 1 else 'score'} (%)")  # fmt: skip
    right.set(xscale="log", xlabel="adapter size r", title=f"Size, standard deviation {std:g}")
    sizes = sorted({point["r"] for point in points})
    right.set_xticks(sizes, [f"{size:g}" for size in sizes], minor=False)
    right.minorticks_off()
    return legend(figure, columns=4)
