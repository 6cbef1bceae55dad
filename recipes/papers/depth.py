"""Score against the cost of many tasks on one text: adapters in upper layers only, trained so or cut by AdapterDrop.

With k of L layers adapted, N tasks of a text take ((L - k) + N k) / (N L) of the time of N texts. Runs with --layers
show their score; runs with --adapter_drop that of the adapter without those of the lowest layers, at each depth
(Rücklé et al. 2021). Points are means over seeds, bands standard errors.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from common.figures import COLUMN, save
from common.scores import proper_name
from houlsby_peft import ablate
from papers.ablation import score
from papers.drawing import draw_line, legend, panels, styles, write_lines
from papers.results import mean_and_error, score_percent
from papers.runs import FinishedRun, load_run


TRAINED, CUT = "trained in upper layers", "AdapterDrop, cut"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the scores of cut adapters, and for the cost."""
    add = parser.add_argument
    add("--data_dir", help="Folder of the tasks' files; default: the runs' own.")
    add("--tasks", type=int, default=8, help="Number of tasks of a text.")
    add("--max_eval_samples", type=int, help="Score cut adapters on a random sample of this many examples.")
    add("--batch_size", type=int, default=64, help="Sentences per evaluation step.")


def main(arguments: argparse.Namespace) -> None:
    """Write the numbers and the figure."""
    folder = Path(arguments.folder)
    points = summarize([path.parent for path in sorted(folder.rglob("results.json"))], arguments)
    write_lines(folder / "depth.jsonl", points)
    save(draw(points, arguments.tasks), folder / "depth")


def summarize(folders: Iterable[Path], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row per task, way and number of adapted layers, with the scores of its seeds in percent."""
    found: dict[tuple[str, str, int, int], dict[int, float]] = defaultdict(dict)
    for run in (load_run(str(folder), arguments.data_dir) for folder in folders):
        seed = run.results["seed"]
        for way, layers, depth, value in _scores(run, arguments):
            seeds = found[run.task.name, way, layers, depth]
            seeds[seed] = max(value, seeds.get(seed, value))  # of several learning rates
    rows = []
    for (task, way, layers, depth), scores in sorted(found.items()):
        middle, error = mean_and_error([*scores.values()])
        cost = (depth - layers + arguments.tasks * layers) / (arguments.tasks * depth)
        where = {"task": proper_name(task), "way": way, "layers": layers, "depth": depth, "cost": cost}
        rows.append({**where, "mean": middle, "error": error, "scores": scores})
    return rows


def _scores(run: FinishedRun, arguments: argparse.Namespace) -> Iterator[tuple[str, int, int, float]]:
    """Yield the way, the number of adapted layers, that of all, and the score."""
    results, depth = run.results, run.model.config.num_hidden_layers
    if not results["arguments"].get("adapter_drop"):
        yield TRAINED, len(results["arguments"]["layers"] or range(depth)), depth, score_percent(results)
        return
    name = results["chosen_by"]
    for dropped in range(depth):
        with ablate(run.model, range(dropped), keep_norms=False):
            yield CUT, depth - dropped, depth, 100 * score(run, arguments)[name]


def draw(points: Sequence[dict[str, Any]], tasks: int) -> Figure:
    """Draw the scores by cost."""
    figure, (axes,) = panels(1, COLUMN)
    of_task = styles(point["task"] for point in points)
    for task, way in dict.fromkeys((point["task"], point["way"]) for point in points):
        own = {p["cost"]: (p["mean"], p["error"]) for p in points if (p["task"], p["way"]) == (task, way)}
        style = of_task[task] | {"linestyle": "-" if way == TRAINED else "--"}
        draw_line(axes, own, label=f"{task}, {way}", **style)
    axes.set(xlabel=f"time of {tasks} tasks on a text, relative to {tasks} texts", ylabel="validation score (%)")
    legend(figure)
    return figure
