"""Score against the cost of many tasks on one text: adapters in upper layers only, trained so or
    cut by AdapterDrop.

With k of L layers adapted, N tasks of a text take ((L - k) + N k) / (N L) of the time of N texts.
Runs with --layers show their score; runs with --adapter_drop that of the adapter without those of
the lowest layers, at each depth (Rücklé et al. 2021). Points are means over seeds, bands standard
errors.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from common.figures import COLUMN, save
from common.scores import proper_name
from figures.drawing import Rows, band, draw_line, legend, panels, styles, write_lines
from figures.finished_run import load_run
from houlsby_peft import ablate
from results.lines import Results, in_percent
from sweeping.runs import CHOICES, choose


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data_dir", help="Folder of the tasks' files; default: the runs' own.")
    add("--tasks", type=int, default=8, help="Number of tasks of a text.")
    add(
        "--max_eval_samples",
        type=int,
        help="Score cut adapters on a random sample of this many examples.",
    )
    add("--batch_size", type=int, default=64, help="Sentences per evaluation step.")


def main(folder: Path, arguments: argparse.Namespace) -> None:
    found: dict[Any, dict[Any, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(folder.rglob("results.json")):
        for results, line, layers, cost, value in _scores(path.parent, arguments):
            chosen = tuple(results["arguments"].get(name) for name in CHOICES)
            found[line, layers, cost][chosen][results["seed"]] = value
    points = []
    for (line, layers, cost), runs in sorted(found.items()):
        seeds = runs[choose({chosen: [*own.values()] for chosen, own in runs.items()})]
        points.append(
            {
                "line": line,
                "layers": layers,
                "cost": cost,
                **band([*seeds.values()]),
                "scores": seeds,
            }
        )
    write_lines(folder / "depth.jsonl", points)
    save(draw(points, arguments.tasks), folder / "depth")


def _scores(
    folder: Path, arguments: argparse.Namespace
) -> Iterator[tuple[Results, str, int, float, float]]:
    """Yield a run's results, line, number of adapted layers, their cost and the score in percent."""
    run = load_run(folder, arguments.data_dir, arguments.batch_size)
    model, results, task = run.trainer.model, run.results, proper_name(run.task.name)
    depth = model.config.num_hidden_layers
    own = results["arguments"]
    if results["method"] != "houlsby" or (
        own["layers"] and min(own["layers"]) != depth - len(own["layers"])
    ):
        return  # in lower layers, the base model has no layers to share; other methods have no adapters in layers
    # Of each number of lower layers to do without: one if the run was trained so, all if it was
    # trained for all.
    dropped = (
        range(depth) if own.get("adapter_drop") else [depth - len(own["layers"] or range(depth))]
    )
    for number in dropped:
        layers = depth - number
        cost = (number + arguments.tasks * layers) / (arguments.tasks * depth)
        if own.get("adapter_drop"):
            with ablate(model, range(number), keep_norms=False):
                scores = run.score(arguments.max_eval_samples)
            yield results, f"{task}, AdapterDrop", layers, cost, in_percent(results, scores)
        else:
            yield results, task, layers, cost, in_percent(results, results["best_scores"])


def draw(points: Rows, tasks: int) -> Figure:
    """Draw the scores by cost; a task has one color, and AdapterDrop a dashed line."""
    figure, (axes,) = panels(1, COLUMN)
    style = styles(point["line"].partition(", ")[0] for point in points)
    for line in dict.fromkeys(point["line"] for point in points):
        task, _, drop = line.partition(", ")
        own = [point for point in points if point["line"] == line]
        draw_line(
            axes, own, "cost", label=line, **style[task] | {"linestyle": "--" if drop else "-"}
        )
    axes.set(
        xlabel=f"time of {tasks} tasks on a text, relative to {tasks} texts",
        ylabel="validation score (%)",
    )
    return legend(figure)
