"""Score against trained parameters: adapters of all sizes, top layers, layer norms, LoRA, beside full fine-tuning.

Houlsby et al. 2019, figures 1, 3, 4 and, on SQuAD, 5. With several tasks, lines are medians over the tasks, with
MNLI's two splits as two, and bands extend from the 20th to the 80th percentile; with one task, they are means over
the seeds and one standard error. Scores are relative to full fine-tuning only if it has runs on all of these tasks.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from common.edge import RecipeError
from common.figures import COLORS, COLUMN, MARKERS, plt, save
from common.glue_report import proper_name
from papers.results import Row, arrange, columns, finished, mean_and_error
from papers.runs import write_lines
from sweeping.runs import CHOSEN


FULL = "full fine-tuning"
NAMES = {
    "full": FULL,
    "houlsby": "adapters",
    "top_k": "fine-tuning of the top k layers",
    "layer_norm": "layer norms",
    "lora": "LoRA",
    "linear": "head only",
}
# As printed on a point, and the flag.
SIZE_OF = {"houlsby": ("r", "r"), "lora": ("r", "lora_r"), "top_k": ("k", "top_k")}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the folder is enough."""


def main(arguments: argparse.Namespace) -> None:
    """Write the numbers and the figure."""
    folder = Path(arguments.folder)
    points = list(summarize(arrange(finished(folder), CHOSEN)))
    write_lines(folder / "tradeoff.jsonl", points)
    save(draw(points), folder / "tradeoff")


def summarize(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield a point per method and size: its trained parameters, and the low, middle and high score of its band.

    Scores are in percentage points, minus full fine-tuning's mean over its seeds on the same task if it has runs on
    all tasks. A size without runs on all tasks is left out, as a median over fewer tasks is no point of the same line.

    Raises:
        RecipeError: If no size has runs on all tasks.
    """
    shown = columns(rows)
    scores = [
        {name: list(values) for name, (task, score) in shown.items() if (values := _scores(row, task, score))}
        for row in rows
    ]
    for row, own in zip(rows, scores, strict=True):
        if missing := shown.keys() - own.keys():
            print(f"{row.label}: left out, as it has no run on {', '.join(sorted(missing))}")
    complete = [(row, own) for row, own in zip(rows, scores, strict=True) if own.keys() == shown.keys()]
    if not complete:
        raise RecipeError(f"No size has runs on all of {', '.join(shown)}. Make them with recipes/sweep.py.")
    full = next((own for row, own in complete if row.method == "full"), {})
    relative = bool(full)
    for row, own in sorted(complete, key=lambda pair: pair[0].trained):
        changes = {name: [s - (mean(full[name]) if relative else 0) for s in values] for name, values in own.items()}
        if len(changes) > 1:
            low, middle, high = np.percentile([mean(values) for values in changes.values()], [20, 50, 80]).tolist()
        else:
            (values,) = changes.values()
            middle, error = mean_and_error(values)
            low, high = middle - (error or 0), middle + (error or 0)
        runs = [run for cell in row.cells.values() for run in cell.seeds.values()]
        size = SIZE_OF.get(row.method)
        yield {
            "series": _series(row), "size": size and f"{size[0]}={runs[0]['arguments'][size[1]]}",
            "learning_rates": sorted({run["arguments"]["learning_rate"] for run in runs}),
            "trained_parameters": round(row.trained), "low": low, "middle": middle, "high": high,
            "relative": relative, "scores": own, "score": next(iter(shown.values()))[1],
        }  # fmt: skip


def _scores(row: Row, task: str, score: str) -> Iterable[float]:
    cell = row.cell(task, score)
    return cell.by_seed(score).values() if cell else ()


def _series(row: Row) -> str:
    """Return the name of a row's line in the figure."""
    name = NAMES.get(row.method, row.method)
    shared = next(iter(row.cells.values())).best["arguments"].get("share_layers") if row.method == "houlsby" else 0
    return f"{name}, shared by {shared} layers" if shared else name


def draw(points: Sequence[dict[str, Any]]) -> Figure:
    """Draw a line and a band per series; a series of one point is a marker with a bar."""
    tasks = list({task: None for point in points for task in point["scores"]})
    relative = points[0]["relative"]
    figure, axes = plt.subplots(figsize=(COLUMN, COLUMN))
    names = {point["series"] for point in points if not (relative and point["series"] == FULL)}
    names = sorted(names, key=lambda name: (not name.startswith(NAMES["houlsby"]), name))
    for name, color, marker in zip(names, cycle(COLORS), cycle(MARKERS), strict=False):
        own = [point for point in points if point["series"] == name]
        x, low, middle, high = ([p[key] for p in own] for key in ("trained_parameters", "low", "middle", "high"))
        if len(own) > 1:
            axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        else:
            axes.vlines(x, low, high, color=color)
        # One rate for all sizes suits some of them less than others, so the figure tells.
        rates = {rate for point in own for rate in point["learning_rates"]}
        label = f"{name}, learning rate {rates.pop():g}" if len(rates) == 1 else f"{name}, learning rate chosen"
        axes.plot(x, middle, color=color, marker=marker, label=label)
        for point in own:
            if point["size"]:
                at = (point["trained_parameters"], point["middle"])
                axes.annotate(
                    point["size"], at, (0, 4), textcoords="offset points", ha="center", fontsize=5, color=color
                )
    if relative:
        axes.axhline(0, color="black", linestyle="--", linewidth=0.8, label=FULL)
    score = proper_name(points[0]["score"]) if len(tasks) == 1 else "score"
    axes.set(
        xscale="log", xlabel="trained parameters per task", title=_title(points, tasks),
        ylabel="difference to full fine-tuning (points)" if relative else f"{score} (%)",
    )  # fmt: skip
    sizes = [point["trained_parameters"] for point in points if point["series"] in names]
    # Powers of ten alone would leave a narrow range without a number.
    axes.xaxis.set_major_locator(LogLocator(subs=(1,) if max(sizes) > 1000 * min(sizes) else (1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside lower center")
    return figure


def _title(points: Sequence[dict[str, Any]], tasks: Sequence[str]) -> str:
    seeds = max(len(values) for point in points for values in point["scores"].values())
    counted = f"{seeds} seeds" if seeds > 1 else "one seed"
    if len(tasks) > 1:
        return f"{len(tasks)} tasks, {counted}: median, 20th to 80th percentile"
    return f"{proper_name(tasks[0])}, {counted}{': mean and standard error' if seeds > 1 else ''}"
