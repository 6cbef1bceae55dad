"""Score against trained parameters: adapters of all sizes, top layers, layer norms, LoRA, beside
    full fine-tuning.

Houlsby et al. 2019, figures 1, 3, 4 and, on SQuAD, 5. With several tasks, scores are relative to
full fine-tuning if it has runs on all of them; lines are medians over the tasks, with MNLI's two
splits as two, and bands extend from the 20th to the 80th percentile. With one task, or a panel for
each with --each, they are means over the seeds and one standard error.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from common.edge import RecipeError
from common.figures import COLUMN, save
from common.scores import proper_name
from figures.drawing import (
    Rows,
    band,
    draw_line,
    legend,
    panels,
    seeds_of,
    show_counts,
    styles,
    write_lines,
)
from results.additional import counted_once
from results.lines import Row, arrange, columns, finished
from sweeping.runs import CHOSEN


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
# As printed on a point, and the flag.
SIZE_OF = {"houlsby": ("r", "r"), "lora": ("r", "lora_r"), "top_k": ("k", "top_k")}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--score",
        choices=("accuracy", "main"),
        default="main",
        help="A task without accuracy: main.",
    )
    parser.add_argument(
        "--split", choices=("validation", "test"), default="validation", help="Where it was scored."
    )
    parser.add_argument("--each", action="store_true", help="A panel per task, with its scores.")


def main(folder: Path, arguments: argparse.Namespace) -> None:
    rows = arrange(finished(folder), CHOSEN)
    shown = columns(rows, arguments.score)
    once = counted_once(task for task, _ in shown.values())
    shown = {
        name: column
        for name, column in shown.items()
        if column[0] in once and (name != "WNLI" or len(once) == 1)
    }
    points = summarize(rows, shown, arguments.split, arguments.each or len(shown) == 1)
    write_lines(folder / "tradeoff.jsonl", points)
    save(draw(points, arguments.split), folder / "tradeoff")


def summarize(
    rows: Sequence[Row],
    shown: Mapping[str, tuple[str, str]],
    split: str = "validation",
    each: bool = False,
) -> list[dict[str, Any]]:
    """Return a point per panel, method and size: its trained parameters, and the low, middle and
        high score.

    A size without runs on all tasks is left out of a median, as one over fewer tasks is no point of
    the same line.
    """
    found = []
    for row in rows:
        cells = {name: cell for name, column in shown.items() if (cell := row.cell(*column))}
        scores = row.scores(shown, split)
        if not each and (missing := shown.keys() - scores.keys()):
            print(f"{row.label}: left out, as it has no run on {', '.join(sorted(missing))}")
        elif scores:
            found.append((row, cells, scores))
    if not found:
        raise RecipeError(
            f"No size has runs on all of {', '.join(shown)}. Make them with recipes/studies/sweep.py."
        )
    full = next((scores for row, _, scores in found if row.method == "full"), None)
    points = []
    for row, cells, scores in found:
        for panel, own in (
            {name: {name: values} for name, values in scores.items()}.items()
            if each
            else [("", scores)]
        ):
            if each:
                values = band([*own[panel].values()])
            else:
                changes = [
                    mean(of.values()) - (mean(full[name].values()) if full else 0)
                    for name, of in own.items()
                ]
                values = dict(
                    zip(
                        ("low", "middle", "high"),
                        np.percentile(changes, [20, 50, 80]).tolist(),
                        strict=True,
                    )
                )
            runs = [run for name in own for run in cells[name].seeds.values()]
            letter, flag = SIZE_OF.get(row.method, ("", ""))
            points.append({
                "panel": panel, "series": series(row), "size": flag and f"{letter}={runs[0]['arguments'][flag]}",
                "learning_rates": sorted({run["arguments"]["learning_rate"] for run in runs}),
                "trained_parameters": round(mean(run["trainable_parameters"] for run in runs)), **values,
                "relative": bool(full) and not each, "score": shown[panel][1] if each else "score",
                "scores": {name: [*of.values()] for name, of in own.items()},
            })  # fmt: skip
    if len({(point["panel"], point["series"], point["size"]) for point in points}) < len(points):
        raise RecipeError(
            f"Each of these rows needs a folder of its own: {'; '.join(row.label for row in rows)}."
        )
    return sorted(points, key=lambda point: point["trained_parameters"])


def series(row: Row) -> str:
    """Return the name of a row's line in the figure."""
    own = next(iter(row.cells.values())).best["arguments"] if row.method == "houlsby" else {}
    kind = "" if own.get("kind", "houlsby") == "houlsby" else f", {own['kind']}"
    shared = f", shared by {own['share_layers']} layers" if own.get("share_layers") else ""
    return NAMES.get(row.method, row.method) + kind + shared


def draw(points: Rows, split: str = "validation") -> Figure:
    """Draw a line and a band per series; a series of one point is a marker with a bar."""
    names, order = [*dict.fromkeys(point["panel"] for point in points)], [*NAMES.values()]
    figure, axes = panels(len(names), COLUMN, most=2)
    lines = {point["series"] for point in points}
    style = styles(sorted(lines, key=lambda name: (order.index(name.partition(", ")[0]), name)))
    for own_axes, name in zip(axes, names, strict=True):
        _draw_panel(own_axes, [point for point in points if point["panel"] == name], style, split)
    return legend(figure)


def _draw_panel(axes: Axes, points: Rows, style: Mapping[str, Any], split: str) -> None:
    relative, tasks = (
        points[0]["relative"],
        [*dict.fromkeys(task for point in points for task in point["scores"])],
    )
    score = points[0]["score"]
    seeds = seeds_of(len(values) for point in points for values in point["scores"].values())
    axes.set(
        xlabel="trained parameters per task",
        title=f"{len(tasks)} tasks, {seeds}:\nmedian, 20th to 80th percentile" if len(tasks) > 1
        else f"{proper_name(tasks[0])}, {seeds}",
        ylabel="difference to full fine-tuning (points)" if relative
        else f"{split} {proper_name(score)}{'' if score.endswith('loss') else ' (%)'}",
    )  # fmt: skip
    if relative:
        points = [point for point in points if point["series"] != FULL]
    for name in style:
        own = [point for point in points if point["series"] == name]
        if own:
            draw_line(axes, own, "trained_parameters", label=name, **style[name])
        before = 0
        for point in (point for point in own if point["size"]):
            x = point["trained_parameters"]
            if x >= 1.5 * before:  # otherwise the names would lie over one another
                before, color = x, style[name]["color"]
                axes.annotate(point["size"], (x, point["middle"]), (0, 4), textcoords="offset points", ha="center",
                              fontsize=5, color=color)  # fmt: skip
    if relative:
        axes.axhline(0, color="black", linestyle="--", linewidth=0.8, label=FULL)
    show_counts(axes)
    sizes = [point["trained_parameters"] for point in points]
    # Powers of ten alone would leave a narrow range without a number.
    axes.xaxis.set_major_locator(
        LogLocator(subs=(1,) if max(sizes) > 100 * min(sizes) else (1, 2, 5))
    )
