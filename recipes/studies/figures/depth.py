"""Score against the cost of many tasks on one text: adapters in upper layers only, or AdapterDrop.

With k of L layers adapted, N tasks of a text take ((L - k) + N k) / (N L) of the time of N texts.
Runs with --layers show their score. Runs with --adapter_drop show that of the adapter without those
of the lowest layers, at each depth (Rücklé et al. 2021). Points are means over seeds, bands
standard errors.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from figures import flags
from figures.drawing import (
    Point,
    Points,
    band,
    draw_curve,
    legend,
    panels,
    select,
    styles,
    values_of,
    write_points,
)
from figures.finished_run import FinishedRun, load_run
from houlsby_peft import ablate
from results.read import Results, in_percent
from run.figures import COLUMN, save
from sweeping.runs import CHOICES, choose
from tasks.scores import proper_name


@dataclass(frozen=True, order=True)
class Depth:
    """Where a run's score is drawn."""

    line: str  # the task, and whether adapters were dropped
    layers: int  # with adapters
    cost: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_evaluation(parser)
    parser.add_argument("--tasks", type=int, default=8, help="Number of tasks of a text.")


def main(folder: Path, arguments: argparse.Namespace) -> None:
    # By depth, chosen values and seed.
    scores: dict[Depth, dict[Any, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(folder.rglob("results.json")):
        run = load_run(path.parent, arguments.data_dir, arguments.batch_size)
        values = tuple(run.results["arguments"].get(name) for name in CHOICES)
        for depth, score in score_depths(run, arguments):
            scores[depth][values][run.results["seed"]] = score
    points: list[Point] = []
    for depth in sorted(scores):
        by_values = scores[depth]
        best = choose({values: [*by_values[values].values()] for values in by_values})
        seeds = by_values[best]
        points.append({**vars(depth), **band([*seeds.values()]), "scores": seeds})
    write_points(folder / "depth.jsonl", points)
    save(draw(points, arguments.tasks), folder / "depth")


def score_depths(run: FinishedRun, arguments: argparse.Namespace) -> Iterator[tuple[Depth, float]]:
    """Yield the depths at which a run has a score, with the score in percent."""
    model, results, task = run.trainer.model, run.results, proper_name(run.task.name)
    size = model.config.num_hidden_layers
    if not _has_upper_adapters(results, size):
        return

    def depth(line: str, layers: int) -> Depth:
        cost = (size - layers + arguments.tasks * layers) / (arguments.tasks * size)
        return Depth(line, layers, cost)

    if not results["arguments"].get("adapter_drop"):
        layers = len(results["arguments"]["layers"] or range(size))
        yield depth(task, layers), in_percent(results, results["best_scores"])
        return
    for dropped in range(size):
        with ablate(model, range(dropped), keep_norms=False):
            scores = run.score(arguments.max_eval_samples)
        yield depth(f"{task}, AdapterDrop", size - dropped), in_percent(results, scores)


def _has_upper_adapters(results: Results, size: int) -> bool:
    """Return whether a run has adapters in its upper layers only, or in all.

    Below adapters in lower layers, the base model has no layers to share between tasks.
    """
    layers = results["arguments"]["layers"]
    if results["method"] != "houlsby":
        return False
    return not layers or min(layers) == size - len(layers)


def draw(points: Points, tasks: int) -> Figure:
    """Draw the scores by cost; a task has one color, and AdapterDrop a dashed line."""
    figure, (axes,) = panels(1, COLUMN)
    lines = [*dict.fromkeys(values_of(points, "line"))]
    style = styles(line.partition(", ")[0] for line in lines)
    for line in lines:
        task, _, drop = line.partition(", ")
        line_style = style[task] | {"linestyle": "--" if drop else "-"}
        draw_curve(axes, select(points, line=line), "cost", label=line, **line_style)
    axes.set(
        xlabel=f"time of {tasks} tasks on a text, relative to {tasks} texts",
        ylabel="validation score (%)",
    )
    return legend(figure)
