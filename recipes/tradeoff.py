"""Score against trained parameters: adapters of all sizes, top layers, layer norms, LoRA, beside full fine-tuning.

    python recipes/tradeoff.py    # generated sentences, no data
    python recipes/tradeoff.py --task cola mrpc --data_dir glue --model_name minilm
    python recipes/tradeoff.py --recipe recipes/squad.py --task squad --method houlsby top_k full --seed 0 1 2

Houlsby et al. 2019, figures 1, 3 (GLUE, not the 17 further tasks), 4 and, on SQuAD, 5. With several learning rates,
validation chooses one for each task and method. With several tasks, lines are medians over the tasks, with MNLI's two
splits as two, and bands extend from the 20th to the 80th percentile; with one task, they are means over the seeds and
one standard error. Scores are relative to full fine-tuning only if it has runs on all of these tasks. Writes
tradeoff.jsonl, .png and .svg.
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

from analysis.grid import GLUE, Axes, GridParser, finished, make_grids, run_missing
from analysis.runs import write_lines
from study.papers import proper_name
from study.results import Row, arrange, columns, mean_and_error
from sweeping.runs import CHOSEN
from training.errors import RecipeError, end_with_one_line
from training.figures import COLORS, COLUMN, MARKERS, plt, save


FULL = "full fine-tuning"
NAMES = {
    "full": FULL,
    "houlsby": "adapters",
    "top_k": "fine-tuning of the top k layers",
    "layer_norm": "layer norms",
    "lora": "LoRA",
    "linear": "head only",
}
SIZES = [2**n for n in range(10)]
# As printed on a point, and the flag.
SIZE_OF = {"houlsby": ("r", "r"), "lora": ("r", "lora_r"), "top_k": ("k", "top_k")}


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
    if not arguments.draw_only:
        runs = make_grids(arguments.output_dir, arguments.task, grids(arguments), flags, arguments.recipe.resolve())
        run_missing(runs, arguments)
    if arguments.dry_run:
        return
    points = list(summarize(arrange(finished(arguments.output_dir), CHOSEN)))
    write_lines(arguments.output_dir / "tradeoff.jsonl", points)
    save(draw(points), arguments.output_dir / "tradeoff")


def grids(arguments: argparse.Namespace) -> Iterator[Axes]:
    """Yield a grid per method."""
    for method in arguments.method:
        axes = {"method": [method], "r": arguments.r, "top_k": arguments.top_k}
        rates = arguments.full_learning_rate if method in ("full", "top_k") else arguments.learning_rate
        yield {**axes, "learning_rate": rates, "seed": arguments.seed}


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
        raise RecipeError(f"No size has runs on all of {', '.join(shown)}. Leave out --draw_only to make them.")
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


if __name__ == "__main__":
    end_with_one_line(main)
