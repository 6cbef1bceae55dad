"""Score against the scale of the adapter's first weights, and the stability of the mean over adapter sizes.

Houlsby et al. 2019, section 3.6 and figure 6 (right). With several learning rates and numbers of epochs, validation
has chosen one of each for each task, size and standard deviation. Lines are means over the seeds, bands one standard
error.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.edge import RecipeError
from common.figures import COLORS, MARKERS, PAGE, plt, save
from common.glue_report import proper_name
from papers.results import Results, best_cell, finished, mean_and_error, score_percent
from papers.runs import write_lines
from sweeping.runs import CHOSEN


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the score."""
    parser.add_argument(
        "--score", choices=("accuracy", "main"), default="accuracy", help="What is shown, as in the paper or in GLUE."
    )


def main(arguments: argparse.Namespace) -> None:
    """Write the numbers and the figure."""
    folder = Path(arguments.folder)
    points = summarize(finished(folder), arguments.score)
    write_lines(folder / "init_scale.jsonl", points)
    save(draw(points), folder / "init_scale")


def summarize(results: Iterable[Results], score: str) -> list[dict[str, Any]]:
    """Return a row per task, size and standard deviation: the scores of all seeds in percent, at the learning rate and
    the epochs that validation has chosen by the task's main score. Each of MNLI's validation splits has a row."""
    runs: dict[tuple[str, int, float], list[Results]] = defaultdict(list)
    for one in results:
        runs[one["task"], one["arguments"]["r"], one["arguments"]["init_std"]].append(one)
    lines = []
    for (_, r, std), same in sorted(runs.items()):
        seeds = best_cell(same, CHOSEN).seeds
        chosen = {axis: next(iter(seeds.values()))["arguments"].get(axis) for axis in CHOSEN}
        for name, shown in _shown(same[0], score):
            scores = {seed: score_percent(run, shown) for seed, run in seeds.items()}
            middle, error = mean_and_error([*scores.values()])
            found = {"score": shown, "mean": middle, "error": error, "scores": scores}
            lines.append({"task": name, "r": r, "init_std": std, **chosen, **found})
    return lines


def _shown(one: Results, score: str) -> Iterator[tuple[str, str]]:
    """Yield the names of the rows of runs like this one, and the scores that they show."""
    if score == "main":
        yield proper_name(one["task"]), one["chosen_by"]
        return
    accuracies = [name for name in one["best_scores"] if name.endswith("accuracy")]
    if not accuracies:
        raise RecipeError(f"{one['task']} has no accuracy, only {', '.join(one['best_scores'])}: give --score main.")
    for name in accuracies:
        yield f"{proper_name(one['task'])} {name.removesuffix('accuracy').strip('_')}".strip(), name


def draw(points: Sequence[dict[str, Any]]) -> Figure:
    """Draw the score by standard deviation, at the size of most runs (left), and by size, with the mean (right)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE, 0.4 * PAGE), sharey=True)
    scales, sizes = ({point[name] for point in points} for name in ("init_std", "r"))
    r = max(sizes, key=lambda size: sum(point["r"] == size for point in points))
    std = max(scales, key=lambda scale: sum(point["init_std"] == scale for point in points))
    tasks = sorted({point["task"] for point in points})
    for task, color, marker in zip(tasks, cycle(COLORS), cycle(MARKERS), strict=False):
        own = [point for point in points if point["task"] == task]
        _line(left, "init_std", [point for point in own if point["r"] == r], task, color, marker)
        _line(right, "r", [point for point in own if point["init_std"] == std], task, color, marker)
    means = {size: [p["mean"] for p in points if (p["init_std"], p["r"]) == (std, size)] for size in sorted(sizes)}
    # A mean over fewer tasks is no point of the same line.
    over_tasks = {size: mean(own) for size, own in means.items() if len(own) == len(tasks)}
    if len(tasks) > 1:
        right.plot(over_tasks.keys(), over_tasks.values(), color="black", linestyle="--", label="mean over tasks")
    kinds = {point["score"] if not point["score"].endswith("accuracy") else "accuracy" for point in points}
    kind = proper_name(kinds.pop()) if len(kinds) == 1 else "score"
    seeds = max(len(point["scores"]) for point in points)
    figure.suptitle(f"Mean and standard error of {seeds} seeds" if seeds > 1 else "One seed", fontsize=8)
    left.set(xscale="log", xlabel="standard deviation of the first weights", ylabel=f"validation {kind} (%)",
             title=f"Initialization, size {r}")  # fmt: skip
    right.set(xscale="log", xlabel="adapter size r", title=f"Size, standard deviation {std:g}")
    right.set_xticks(sorted(sizes), [str(size) for size in sorted(sizes)], minor=False)
    right.minorticks_off()
    right.legend()
    return figure


def _line(axes: Axes, x: str, points: Sequence[dict[str, Any]], label: str, color: str, marker: str) -> None:
    xs, middle = [point[x] for point in points], [point["mean"] for point in points]
    low, high = ([point["mean"] + sign * (point["error"] or 0) for point in points] for sign in (-1, 1))
    axes.fill_between(xs, low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(xs, middle, color=color, marker=marker, label=label)
