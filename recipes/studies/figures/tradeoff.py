"""Score against trained parameters: adapters of all sizes, top layers, layer norms, LoRA.

Houlsby et al. 2019, figures 1, 3, 4 and, on SQuAD, 5, with full fine-tuning beside. With several
tasks, scores are relative to full fine-tuning if it has runs on all of them; curves are medians
over the tasks, with MNLI's two splits as two, and bands extend from the 20th to the 80th
percentile. With one task, or a panel for each with --each, they are means over the seeds and one
standard error.
"""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import drawing, flags
from figures.drawing import Point, Points, Styles
from results.additional import counted_once
from results.difference_table import on_other_data
from results.lines import Columns, TableLine, arrange, find_columns, refuse_to_mix
from results.numbers import FIGURE_4
from results.read import finished
from run.edge import RecipeError
from run.figures import COLUMN, save
from sweeping.runs import CHOSEN
from tasks.scores import proper_name


FULL = "full fine-tuning"
NAMES = {
    "houlsby": "adapters",
    "top_k": "fine-tuning of the top k layers",
    "layer_norm": "layer norms",
    "lora": "LoRA",
    "ia3": "IA3",
    "linear": "head only",
    "full": FULL,
}
# The letter that is printed on a point, and the argument.
SIZE_OF = {"houlsby": ("r", "r"), "lora": ("r", "lora_r"), "top_k": ("k", "top_k")}

Scores = Mapping[str, Mapping[int, float]]  # by column and seed


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_score(parser)
    flags.add_split(parser)
    parser.add_argument(
        "--seeds",
        choices=["mean", "best"],
        default="mean",
        help="Of several tasks: the mean of the seeds or the one that is best on validation, as in "
        "figures 1 and 3.",
    )
    parser.add_argument("--each", action="store_true", help="A panel per task, with its scores.")


def main(folder: Path, arguments: argparse.Namespace) -> None:
    lines = arrange(finished(folder), CHOSEN)
    columns = find_columns(lines, arguments.score)
    # A task has one column, and WNLI none beside others.
    tasks = counted_once(task for task, _ in columns.values())
    columns = {name: column for name, column in columns.items() if column[0] in tasks}
    if len(tasks) > 1:
        columns.pop("WNLI", None)
    each = arguments.each or len(columns) == 1
    takes_best = arguments.seeds == "best"
    points = summarize(lines, columns, arguments.split, each, takes_best)
    drawing.write_points(folder / "tradeoff.jsonl", points)
    if each:
        for name in sorted(columns.keys() & FIGURE_4.keys()):
            print(f"Houlsby et al. 2019, BERT-base, {name}: {FIGURE_4[name]}")
    save(draw(points, arguments.split), folder / "tradeoff")


def summarize(
    lines: Sequence[TableLine],
    columns: Columns,
    split: str = "validation",
    each: bool = False,
    takes_best: bool = False,
) -> list[Point]:
    """Return a point per method and size, or with `each` one per task as well.

    A point has trained parameters, and the low, middle and high score. A size without runs on all
    tasks is left out of a median: one over fewer tasks would be no point of the same curve. With
    `takes_best`, a score is that of the seed that is best on validation, otherwise their mean.
    """
    scored = []
    for line in lines:
        scores = line.scores(columns, split)
        missing = sorted(columns.keys() - scores.keys())
        if missing and not each:
            print(f"{line.label}: left out, as it has no run on {', '.join(missing)}")
        elif scores:
            scored.append((line, scores))
    if not scored:
        raise RecipeError(
            f"No size has runs on all of {', '.join(columns)}. Make them with "
            "recipes/studies/sweep.py."
        )
    shown = {}
    for line, scores in scored:
        shown[line.label] = of_best_seed(line, columns, scores) if takes_best else scores
    full_line = {line.method: line for line, _ in scored}.get("full")
    full = None if full_line is None else shown[full_line.label]
    points = []
    for line, scores in scored:
        if each:
            for name, by_seed in scores.items():
                facts = {"panel": name, "relative": False, "score": columns[name][1]}
                point = _point(line, {name: columns[name]}, {name: by_seed})
                points.append({**point, **drawing.band([*by_seed.values()]), **facts})
        elif full_line is not None and (names := on_other_data(line, full_line, columns, split)):
            print(f"{line.label}: left out, as {FULL} has other data of {', '.join(names)}")
        else:
            facts = {"panel": "", "relative": full is not None, "score": "score"}
            values = percentiles(shown[line.label], full)
            points.append({**_point(line, columns, scores), **values, **facts})
    places = {(point["panel"], point["series"], point["size"]) for point in points}
    if len(places) < len(points):
        refuse_to_mix(lines)
    return sorted(points, key=lambda point: point["trained_parameters"])


def of_best_seed(line: TableLine, columns: Columns, scores: Scores) -> Scores:
    """Return the score of each column's seed that is best on validation."""
    on_validation, best = line.scores(columns, "validation"), {}
    for name, by_seed in scores.items():
        seed = max(by_seed, key=on_validation[name].__getitem__)
        best[name] = {seed: by_seed[seed]}
    return best


def percentiles(scores: Scores, base: Scores | None) -> dict[str, float]:
    """Return the 20th, 50th and 80th percentile over the tasks of the means of the seeds.

    With `base`, the percentiles are those of the differences to its scores.
    """
    changes = pd.Series({name: mean(by_seed.values()) for name, by_seed in scores.items()})
    if base is not None:
        changes -= pd.Series({name: mean(base[name].values()) for name in scores})
    low, middle, high = changes.quantile([0.2, 0.5, 0.8])
    return {"low": low, "middle": middle, "high": high}


def _point(line: TableLine, columns: Columns, scores: Scores) -> Point:
    """Return the point of a line over some columns, without its height."""
    runs = line.runs_of(columns)
    arguments = drawing.values_of(runs, "arguments")
    size = ""
    if line.method in SIZE_OF:
        letter, argument = SIZE_OF[line.method]
        size = f"{letter}={arguments[0][argument]}"
    return {
        "series": series(line.method, arguments[0]),
        "size": size,
        "learning_rates": sorted({*drawing.values_of(arguments, "learning_rate")}),
        "trained_parameters": round(mean(drawing.values_of(runs, "trainable_parameters"))),
        "scores": {name: [*by_seed.values()] for name, by_seed in scores.items()},
    }


def series(method: str, arguments: Mapping[str, Any]) -> str:
    """Return the name of a method's curve in the figure."""
    name = NAMES.get(method, method)
    if method == "houlsby":
        kind = arguments.get("kind", "houlsby")
        if kind != "houlsby":
            name += f", {kind}"
        if arguments.get("share_layers"):
            name += f", shared by {arguments['share_layers']} layers"
    return name


def draw(points: Points, split: str = "validation") -> Figure:
    """Draw a curve and a band per series; a series of one point is a marker with a bar."""
    order = [*NAMES.values()]
    names = {*drawing.values_of(points, "series")}
    in_legend = sorted(names, key=lambda name: (order.index(name.partition(", ")[0]), name))
    style = drawing.styles(in_legend)
    in_order = [*dict.fromkeys(drawing.values_of(points, "panel"))]
    figure, panes = drawing.panels(len(in_order), COLUMN, most=2)
    for axes, name in zip(panes, in_order, strict=True):
        in_panel = drawing.select(points, panel=name)
        _draw_panel(axes, in_panel, style, split)
    return drawing.legend(figure)


def _draw_panel(axes: Axes, points: Points, style: Styles, split: str) -> None:
    """Draw the curves of a panel, and say which scores it shows, of which tasks."""
    scores = drawing.values_of(points, "scores")
    tasks = [*dict.fromkeys(itertools.chain(*scores))]
    seeds = drawing.seeds_of(len(values) for by_task in scores for values in by_task.values())
    title = f"{proper_name(tasks[0])}, {seeds}"
    if len(tasks) > 1:
        title = f"{len(tasks)} tasks, {seeds}:\nmedian, 20th to 80th percentile"
    score = points[0]["score"]
    unit = "" if score.endswith("loss") else " (%)"
    label = f"{split} {proper_name(score)}{unit}"
    relative = points[0]["relative"]
    if relative:
        label = "difference to full fine-tuning (points)"
    axes.set(xlabel="trained parameters per task", ylabel=label, title=title)
    if relative:
        points = [point for point in points if point["series"] != FULL]
    drawing.draw_curves(axes, points, "trained_parameters", "series", style)
    for name in style:
        _print_sizes(axes, drawing.select(points, series=name), style[name]["color"])
    if relative:
        axes.axhline(0, color="black", linestyle="--", linewidth=0.8, label=FULL)
    drawing.show_counts(axes)


def _print_sizes(axes: Axes, curve: Points, color: str) -> None:
    """Print the sizes on the points of a curve, as far as they do not lie over one another."""
    last_printed = 0
    for point in curve:
        x = point["trained_parameters"]
        if point["size"] and x >= 1.5 * last_printed:
            last_printed = x
            axes.annotate(
                point["size"],
                (x, point["middle"]),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=5,
                color=color,
            )
