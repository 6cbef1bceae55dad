"""Score against the scale of the adapter's first weights and against the adapter's size, with the mean over tasks.

Houlsby et al. 2019, section 3.6 and figure 6 (right). Validation has chosen a learning rate and a number of epochs for
each task, size and standard deviation. Lines are means over the seeds, bands one standard error. The mean over tasks,
without WNLI and tasks that lack the score, is printed beside the paper's for its sizes. The runs may be those of
table 1.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from common.edge import RecipeError
from common.figures import COLUMN, save
from common.scores import proper_name
from papers.drawing import draw_line, legend, panels, seeds_of, styles, write_lines
from papers.numbers import SIZES
from papers.results import Row, arrange, columns, finished
from sweeping.runs import CHOSEN


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the score."""
    parser.add_argument(
        "--score", choices=("accuracy", "main"), default="accuracy", help="What is shown, as in the paper or in GLUE."
    )


def main(arguments: argparse.Namespace) -> None:
    """Write the numbers and the figure."""
    folder = Path(arguments.folder)
    runs = [one for one in finished(folder) if one["method"] == "houlsby"]
    points = summarize(arrange(runs, CHOSEN), arguments.score)
    write_lines(folder / "init_scale.jsonl", points)
    for r, average in means(points, "r").items():
        paper = f"; Houlsby et al. 2019, BERT-large: {SIZES[r]}" if r in SIZES else ""
        print(f"r={r}: mean of {len({point['task'] for point in points})} tasks {average:.1f}{paper}")
    save(draw(points), folder / "init_scale")


def summarize(rows: Sequence[Row], score: str) -> list[dict[str, Any]]:
    """Return a point per task, size and standard deviation: the scores of all seeds in percent.

    Raises:
        RecipeError: If no task has the score.
    """
    points = []
    for name, (task, shown) in columns(rows, score).items():
        if task == "wnli" or (score == "accuracy" and not shown.endswith("accuracy")):
            print(f"{name}: left out, as {'the papers do' if task == 'wnli' else f'it has only {shown}'}")
            continue
        for row in rows:
            if (cell := row.cell(task, shown)) and (value := cell.mean(shown)):
                arguments = next(iter(cell.seeds.values()))["arguments"]
                kept = {axis: arguments.get(axis) for axis in ("r", "init_std", *CHOSEN)}
                found = {"score": shown, "mean": value[0], "error": value[1], "scores": cell.by_seed(shown)}
                points.append({"task": name, **kept, **found})
    if not points:
        raise RecipeError("No task has an accuracy: give --score main.")
    return sorted(points, key=lambda point: (point["task"], point["r"], point["init_std"]))


def most(points: Sequence[dict[str, Any]], axis: str) -> Any:
    """Return the value of an axis that most points have."""
    values = [point[axis] for point in points]
    return max(sorted(set(values)), key=values.count)


def means(points: Sequence[dict[str, Any]], axis: str) -> dict[Any, float]:
    """Return the mean over all tasks by size or standard deviation, at the other's most frequent value. A mean over
    fewer tasks would be no point of the same line."""
    other = {"r": "init_std", "init_std": "r"}[axis]
    held = most(points, other)
    by_value: dict[Any, list[float]] = {}
    for point in points:
        if point[other] == held:
            by_value.setdefault(point[axis], []).append(point["mean"])
    tasks = {point["task"] for point in points}
    return {value: mean(own) for value, own in sorted(by_value.items()) if len(own) == len(tasks)}


def draw(points: Sequence[dict[str, Any]]) -> Figure:
    """Draw the score by standard deviation, at the size of most runs (left), and by size, with the mean (right)."""
    figure, (left, right) = panels(2, COLUMN, sharey=True)
    style = styles(point["task"] for point in points)
    r, std = most(points, "r"), most(points, "init_std")
    for axes, axis, other, held in ((left, "init_std", "r", r), (right, "r", "init_std", std)):
        for task in style:
            own = {p[axis]: (p["mean"], p["error"]) for p in points if p["task"] == task and p[other] == held}
            if own:
                draw_line(axes, own, label=proper_name(task), **style[task])
    if len(style) > 1 and (average := means(points, "r")):
        right.plot([*average], [*average.values()], color="black", linestyle="--", label="mean over tasks")
    kinds = {"accuracy" if point["score"].endswith("accuracy") else point["score"] for point in points}
    kind = proper_name(kinds.pop()) if len(kinds) == 1 else "score"
    seeds = max(len(point["scores"]) for point in points)
    figure.suptitle(f"Mean and standard error of {seeds_of(seeds)}" if seeds > 1 else "One seed", fontsize=8)
    left.set(xscale="log", xlabel="standard deviation of the first weights", ylabel=f"validation {kind} (%)",
             title=f"Initialization, size {r:g}")  # fmt: skip
    right.set(xscale="log", xlabel="adapter size r", title=f"Size, standard deviation {std:g}")
    sizes = sorted({point["r"] for point in points})
    right.set_xticks(sizes, [f"{size:g}" for size in sizes], minor=False)
    right.minorticks_off()
    legend(figure, columns=4)
    return figure
