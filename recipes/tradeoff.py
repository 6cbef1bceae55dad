"""Score against trained parameters: adapters of all sizes, top layers, layer norms, LoRA, beside full fine-tuning.

    python recipes/tradeoff.py    # generated sentences, no data
    python recipes/tradeoff.py --task cola mrpc --data_dir glue --model_name minilm
    python recipes/tradeoff.py --recipe recipes/squad.py --task squad --method houlsby --seed 0 1 2

Houlsby et al. 2019, figures 1, 3 (GLUE, not the 17 further tasks), 4 and, on SQuAD, the adapters of figure 5: only
glue.py has other methods. With several learning rates, validation chooses one for each task and method. With several
tasks, lines are medians over the tasks and bands extend from the 20th to the 80th percentile; with one task, they are
means over the seeds and one standard deviation. Writes tradeoff.jsonl, .png and .svg.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from analysis.figures import COLORS, COLUMN, MARKERS, plt, save
from analysis.grid import GLUE, OF_GLUE, Axes, GridParser, best_score_percent, finished, make_grids, run_missing
from analysis.runs import write_lines
from study.results import Cell, Row, arrange
from sweeping.runs import CHOSEN
from training.errors import RecipeError, end_with_one_line


FULL = "full fine-tuning"
NAMES = {
    "full": FULL,
    "houlsby": "adapters",
    "top_k": "top layers",
    "layer_norm": "layer norms",
    "lora": "LoRA",
    "linear": "head only",
}
SIZES = [2**n for n in range(10)]


def main() -> None:
    """Read the command line, execute missing runs, write the numbers and the figure."""
    parser = GridParser("runs/tradeoff", __doc__, {"r": SIZES[::3], "top_k": [1, 3], "seed": [0]})
    parser.add_argument("--recipe", type=Path, default=GLUE, help="The recipe's script.")
    parser.add_values(
        "method", ["houlsby", "top_k", "layer_norm", "lora", "full"], help="Methods of the recipe.", choices=NAMES
    )
    parser.add_values("r", SIZES, help="Adapter sizes.", kind=int)
    parser.add_values("top_k", [1, 3, 6], help="Numbers of top layers that are fine-tuned.", kind=int)
    parser.add_values("learning_rate", [1e-3], help="For adapters, LoRA and norms.", kind=float)
    parser.add_values("full_learning_rate", [1e-4], help="For full fine-tuning and top layers.", kind=float)
    arguments, flags = parser.parse()
    if not arguments.recipe.is_file():
        raise RecipeError(f"--recipe must be a recipe's script, got {arguments.recipe}. Correct the path.")
    if arguments.recipe.name not in OF_GLUE and arguments.method != ["houlsby"]:
        raise RecipeError(
            f"{arguments.recipe.name} trains only adapters, got --method {' '.join(arguments.method)}. Give --method "
            "houlsby."
        )
    if not arguments.draw_only:
        runs = make_grids(arguments.output_dir, arguments.task, grids(arguments), flags, arguments.recipe.resolve())
        run_missing(runs, arguments.jobs)
    points = list(summarize(arrange(finished(arguments.output_dir), CHOSEN)))
    write_lines(arguments.output_dir / "tradeoff.jsonl", points)
    save(draw(points), arguments.output_dir / "tradeoff")


def grids(arguments: argparse.Namespace) -> Iterator[Axes]:
    """Yield a grid per method; a recipe that trains only adapters has no flag for the method."""
    for method in arguments.method:
        axes = {"r": arguments.r} if arguments.method == ["houlsby"] else {
            "method": [method], "r": arguments.r, "top_k": arguments.top_k
        }  # fmt: skip
        rates = arguments.full_learning_rate if method in ("full", "top_k") else arguments.learning_rate
        yield {**axes, "learning_rate": rates, "seed": arguments.seed}


def summarize(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Yield a point per method and size: its trained parameters, and the low, middle and high score of its band.

    Scores are in percentage points, minus full fine-tuning's mean over its seeds on the same task if it has runs.
    """
    rows = sorted(rows, key=lambda row: row.trained)
    full = {task: _scores(cell) for row in rows if row.method == "full" for task, cell in row.cells.items()}
    for row in rows:
        scores = {task: _scores(cell) for task, cell in row.cells.items()}
        changes = {task: [s - mean(full.get(task, [0])) for s in values] for task, values in scores.items()}
        if len(changes) > 1:
            low, middle, high = np.percentile([mean(values) for values in changes.values()], [20, 50, 80]).tolist()
        else:
            (values,) = changes.values()
            middle, spread = mean(values), pstdev(values)
            low, high = middle - spread, middle + spread
        yield {
            "series": _series(row), "trained_parameters": round(row.trained), "low": low, "middle": middle,
            "high": high, "relative": set(scores) <= set(full), "scores": scores,
        }  # fmt: skip


def _scores(cell: Cell) -> list[float]:
    return [best_score_percent(results) for results in cell.seeds.values()]


def _series(row: Row) -> str:
    """Return the name of a row's line in the figure."""
    name = NAMES.get(row.method, row.method)
    shared = next(iter(row.cells.values())).best["arguments"].get("share_layers") if row.method == "houlsby" else 0
    return f"{name}, shared by {shared} layers" if shared else name


def draw(points: Sequence[dict[str, Any]]) -> Figure:
    """Draw a line and a band per series; a series of one point is a marker with a bar."""
    tasks = sorted({task for point in points for task in point["scores"]})
    relative = all(point["relative"] for point in points)
    figure, axes = plt.subplots(figsize=(COLUMN, 0.85 * COLUMN))
    names = {point["series"] for point in points if not (relative and point["series"] == FULL)}
    names = sorted(names, key=lambda name: (not name.startswith(NAMES["houlsby"]), name))
    for name, color, marker in zip(names, cycle(COLORS), cycle(MARKERS), strict=False):
        own = [point for point in points if point["series"] == name]
        x, low, middle, high = ([p[key] for p in own] for key in ("trained_parameters", "low", "middle", "high"))
        if len(own) > 1:
            axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        else:
            axes.vlines(x, low, high, color=color)
        axes.plot(x, middle, color=color, marker=marker, label=name)
    if relative:
        axes.axhline(0, color="black", linestyle="--", linewidth=0.8, label=FULL)
    axes.set(
        xscale="log", xlabel="trained parameters per task", title=_title(points, tasks),
        ylabel="score - full fine-tuning's (points)" if relative else "score (%)",
    )  # fmt: skip
    sizes = [point["trained_parameters"] for point in points if point["series"] in names]
    # Powers of ten alone would leave a narrow range without a number.
    axes.xaxis.set_major_locator(LogLocator(subs=(1,) if max(sizes) > 1000 * min(sizes) else (1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _title(points: Sequence[dict[str, Any]], tasks: Sequence[str]) -> str:
    if len(tasks) > 1:
        return f"{len(tasks)} tasks: median, 20th to 80th percentile"
    seeds = max(len(values) for point in points for values in point["scores"].values())
    return f"{tasks[0]}: mean and s.d. of {seeds} seeds" if seeds > 1 else f"{tasks[0]}, one seed"


if __name__ == "__main__":
    end_with_one_line(main)
