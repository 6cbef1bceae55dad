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

from matplotlib.figure import Figure

from figures import drawing, flags
from figures.drawing import Point, Points
from figures.finished_run import FinishedRun, load_run
from houlsby_peft import ablate
from results.lines import best_cell
from results.read import Results, in_percent
from run.figures import COLUMN, save
from sweeping.runs import CHOICES
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
    runs: dict[Depth, list[Results]] = defaultdict(list)  # with their score there
    for path in sorted(folder.rglob("results.json")):
        run = load_run(path.parent, arguments.data_dir, arguments.batch_size)
        for depth, score in score_depths(run, arguments):
            runs[depth].append({**run.results, "best_score": score, "best_scores": {}})
    points: list[Point] = []
    for depth in sorted(runs):
        seeds = best_cell(runs[depth], CHOICES).seeds
        scores = {seed: results["best_score"] for seed, results in seeds.items()}
        points.append({**vars(depth), **drawing.band([*scores.values()]), "scores": scores})
    drawing.write_points(folder / "depth.jsonl", points)
    save(draw(points, arguments.tasks), folder / "depth")


def score_depths(run: FinishedRun, arguments: argparse.Namespace) -> Iterator[tuple[Depth, float]]:
    """Yield the depths at which a run has a score, with the score in percent."""
    model, results, task = run.trainer.model, run.results, proper_name(run.task.name)
    size = model.config.num_hidden_layers
    adapted = results["arguments"]["layers"] or range(size)
    # Below adapters in lower layers only, the base model has no layers to share between tasks.
    if results["method"] != "houlsby" or min(adapted) != size - len(adapted):
        return

    def depth(line: str, layers: int) -> Depth:
        cost = (size - layers + arguments.tasks * layers) / (arguments.tasks * size)
        return Depth(line, layers, cost)

    if not results["arguments"].get("adapter_drop"):
        yield depth(task, len(adapted)), in_percent(results, results["best_scores"])
        return
    for dropped in range(size):
        with ablate(model, range(dropped), keep_norms=False):
            scores = run.score(arguments.max_eval_samples)
        yield depth(f"{task}, AdapterDrop", size - dropped), in_percent(results, scores)


def draw(points: Points, tasks: int) -> Figure:
    """Draw the scores by cost; a task has one color, and AdapterDrop a dashed line."""
    figure, (axes,) = drawing.panels(1, COLUMN)
    lines = [*dict.fromkeys(drawing.values_of(points, "line"))]
    by_task = drawing.styles(line.partition(", ")[0] for line in lines)
    style = {}
    for line in lines:
        task, _, drop = line.partition(", ")
        style[line] = by_task[task] | {"linestyle": "--" if drop else "-"}
    drawing.draw_curves(axes, points, "cost", "line", style)
    axes.set(
        xlabel=f"time of {tasks} tasks on a text, relative to {tasks} texts",
        ylabel="validation score (%)",
    )
    return drawing.legend(figure)
