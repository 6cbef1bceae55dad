"""How much the score depends on the seed and on the lengths of pretraining and fine-tuning.

Han et al. 2021, with adapters and without. Figure 2 and the appendix's on MNLI: the distribution
over the seeds as box plots, of each run's best epoch and of its last one, which shows runs that
collapsed. Its standard deviation and interquartile range are printed. Figure 3: the gradient's norm
by layer and step, of runs of recipes/studies/gradient_norms.py. Runs that started from checkpoints
of mlm.py (folders checkpoint-N) have figures 4, 9, 10, 1 and 13.

In figures 9 and 10, each number of epochs is a run of its own in the paper. If there are runs with
several numbers of epochs, so it is here. Otherwise the epochs of a run are drawn: they share one
learning rate schedule, so that only the last one is what a separate run would give, unless the rate
is constant.
"""

import argparse
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from figures import drawing
from figures.drawing import Point, Points, Style
from figures.gradients import FILE
from results.lines import arrange, best_cell, refuse_to_mix
from results.read import Results, finished, in_percent
from run.figures import COLORS, COLUMN, PINK, RED, SKY, save
from sweeping.runs import CHOSEN
from tasks.scores import proper_name


NAMES = {"full": "full fine-tuning", "houlsby": "adapters"}
# In the figure of the gradients, whose other curves are layers.
OUTSIDE_LAYERS = {"classifier": RED, "pooler": PINK, "embeddings": SKY}
MAX_MARKERS = 20  # on a curve; with more points, it has none

Start = tuple[str, int, str]  # task, steps of pretraining, method
Starts = Mapping[Start, Sequence[Results]]
Curve = Mapping[float, float]
Curves = Mapping[str, Curve]  # by name
Boxes = Mapping[str, Mapping[str, Sequence[float]]]  # scores by group and kind


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the folder is enough."""


def main(folder: Path, arguments: argparse.Namespace) -> None:
    starts = by_start(finished(folder))
    points = summarize(starts)
    drawing.write_points(folder / "stability.jsonl", points)
    for task in dict.fromkeys(drawing.values_of(points, "task")):
        of_task = drawing.select(points, task=task)
        for point in of_task:
            for epoch, scores in (("best", point["scores"]), ("last", point["last"])):
                text = spread([*scores.values()])
                print(f"{proper_name(task)}, {_name(point)}, {epoch} epoch: {text}")
        save(draw_seeds(of_task), folder / f"stability_{task}")
        norms = {}
        for method, name in NAMES.items():  # of runs that started from the encoder alone
            norms[name] = read_norms(starts.get((task, 0, method), ()))
        norms = {name: curves for name, curves in norms.items() if curves}
        if norms:
            figure = draw_curves(norms, proper_name(task), "step", "norm of the gradient")
            for axes in figure.axes:
                axes.set_yscale("log")
            save(figure, folder / f"gradient_norms_{task}")
        if any(drawing.values_of(of_task, "pretraining_steps")):
            save(draw_lengths(of_task), folder / f"pretraining_{task}")
            save(draw_epochs(of_task), folder / f"epochs_{task}")
            save(draw_learning_curves(of_task), folder / f"learning_curves_{task}")


def by_start(results: Iterable[Results]) -> Starts:
    """Return the runs by their start, at the learning rate that validation has chosen."""
    starts: dict[Start, list[Results]] = defaultdict(list)
    for run in results:
        if run["method"] in NAMES and run["task"] != "mlm":
            starts[run["task"], pretraining_steps(run), run["method"]].append(run)
    for start, runs in starts.items():
        lines = arrange(runs, CHOSEN)
        if len(lines) > 1:
            refuse_to_mix(lines)
        rate = best_cell(runs, CHOSEN).first["arguments"]["learning_rate"]
        starts[start] = [run for run in runs if run["arguments"]["learning_rate"] == rate]
    return dict(sorted(starts.items()))


def pretraining_steps(run: Results) -> int:
    """Return the steps of the checkpoint that a run started from, 0 if there is none."""
    name = run["arguments"]["init_adapter"] or run["model"]
    checkpoint = re.search(r"checkpoint-(\d+)/*$", name)
    return int(checkpoint[1]) if checkpoint else 0


def summarize(starts: Starts) -> list[Point]:
    """Return a point per start: the chosen values, and the scores in percent.

    They are by seed, of the best and of the last epoch, and by number of epochs, as the mean over
    the seeds. The best epoch of a run hides a later collapse.
    """
    points = []
    for (task, steps, method), runs in starts.items():
        cell = best_cell(runs, CHOSEN)
        point: Point = {"task": task, "method": method, "pretraining_steps": steps}
        point["score"] = cell.first["chosen_by"]
        point |= {name: cell.first["arguments"].get(name) for name in CHOSEN}
        by_seed = cell.seeds.items()
        point["scores"] = {seed: in_percent(run, run["best_scores"]) for seed, run in by_seed}
        point["last"] = {seed: in_percent(run, run["epochs"][-1]) for seed, run in by_seed}
        point["by_epochs"] = by_epochs(runs)
        points.append(point)
    return points


def by_epochs(runs: Sequence[Results]) -> dict[float, float]:
    """Return the mean score over the seeds, in percent, by number of epochs.

    If there are runs with several numbers of epochs, it is after their last one, otherwise after
    each epoch that all runs have.
    """
    separate = len({run["arguments"].get("num_train_epochs") for run in runs}) > 1
    scores = []
    for run in runs:
        evaluations = run["epochs"][-1:] if separate else run["epochs"]
        for evaluation in evaluations:
            scores.append((evaluation["epoch"], in_percent(run, evaluation)))
    by_epoch = pd.DataFrame(scores, columns=["epoch", "score"]).groupby("epoch")["score"]
    means = by_epoch.mean()
    if not separate:
        means = means[by_epoch.size() == len(runs)]
    return dict(means.items())


def spread(scores: Sequence[float]) -> str:
    """Return the mean, the standard deviation and the interquartile range of scores as text."""
    if len(scores) == 1:
        return f"{scores[0]:.2f}, one seed"
    first, third = np.percentile(scores, [25, 75])
    return (
        f"mean {mean(scores):.2f}, standard deviation {stdev(scores):.2f}, "
        f"interquartile range {third - first:.2f}, {len(scores)} seeds"
    )


def read_norms(runs: Iterable[Mapping[str, Any]]) -> Curves:
    """Return the median over the runs of the gradient's norm, by layer and step.

    Runs of another command have recorded none. A resumed run may have a step twice.
    """
    norms = []
    for run in runs:
        path = Path(run["folder"], FILE)
        if path.is_file():
            records = pd.read_json(path, lines=True).drop_duplicates("step", keep="last")
            norms.append(pd.DataFrame([*records["norms"]], records["step"]))
    if not norms:
        return {}
    curves: dict[str, Curve] = {}
    for layer, by_step in pd.concat(norms).groupby(level="step").median().items():
        name = str(layer).rpartition(".")[2]
        curves[f"layer {name}" if name.isdigit() else name] = dict(by_step.dropna().items())
    return curves


def _name(point: Mapping[str, Any]) -> str:
    """Return the method of a start, and its steps of pretraining if there are some."""
    name = NAMES[point["method"]]
    steps = point["pretraining_steps"]
    return f"{name}, {steps:,} steps first" if steps else name


def draw_seeds(points: Points) -> Figure:
    """Draw the distribution over the seeds, of the best and of the last epoch (figure 2)."""
    boxes = {}
    for point in points:
        best, last = [*point["scores"].values()], [*point["last"].values()]
        boxes[_name(point)] = {"best epoch": best, "last epoch": last}
    seeds = drawing.seeds_of(map(len, drawing.values_of(points, "scores")))
    return draw_boxes(boxes, f"{_task(points)}, {seeds}", _score(points))


def draw_lengths(points: Points) -> Figure:
    """Draw the distribution over the lengths of pretraining (figure 4).

    A point is the mean over the seeds after the last epoch, from one length.
    """
    pretrained = [point for point in points if point["pretraining_steps"]]
    lengths = sorted({*drawing.values_of(pretrained, "pretraining_steps")})
    group = f"{len(lengths)} lengths of pretraining,\n{lengths[0]:,} to {lengths[-1]:,} steps"
    boxes: dict[str, list[float]] = defaultdict(list)
    for point in pretrained:
        boxes[NAMES[point["method"]]].append(mean(point["last"].values()))
    title = f"{_task(points)}, after the last epoch"
    return draw_boxes({group: boxes}, title, _score(points))


def draw_epochs(points: Points) -> Figure:
    """Draw the distribution over the epochs of fine-tuning by pretraining (figures 9 and 10)."""
    boxes: dict[str, dict[str, list[float]]] = defaultdict(dict)
    last = 0.0
    for point in points:
        length = f"{point['pretraining_steps']:,} steps"
        boxes[length][NAMES[point["method"]]] = [*point["by_epochs"].values()]
        last = max([last, *point["by_epochs"]])
    title = f"{_task(points)}, up to {last:g} epochs of fine-tuning"
    return draw_boxes(boxes, title, _score(points), "pretraining")


def draw_learning_curves(points: Points) -> Figure:
    """Draw the mean score by epochs of fine-tuning and length of pretraining (figures 1 and 13)."""
    curves: dict[str, dict[str, Curve]] = defaultdict(dict)
    for point in sorted(points, key=lambda point: point["method"]):
        length = f"{point['pretraining_steps']:,} steps"
        curves[NAMES[point["method"]]][length] = point["by_epochs"]
    x, y = "epochs of fine-tuning", _score(points)
    return draw_curves(curves, _task(points), x, y, "pretraining")


def draw_boxes(boxes: Boxes, title: str, score: str, groups: str | None = None) -> Figure:
    """Draw box plots: a group for each name, a box for each kind, all scores as points."""
    figure, axes = plt.subplots(figsize=(COLUMN, 0.9 + 0.3 * max(2, len(boxes))))
    kinds = dict.fromkeys(itertools.chain(*boxes.values()))
    for number, (kind, color) in enumerate(zip(kinds, COLORS, strict=False)):
        shift = 0.4 * (number - (len(kinds) - 1) / 2)
        scores = {}  # by their height in the figure
        for place, group in enumerate(boxes.values()):
            if kind in group:
                scores[place + shift] = group[kind]
        axes.boxplot(
            [*scores.values()],
            positions=[*scores],
            widths=0.35,
            showfliers=False,
            patch_artist=True,
            label=kind,
            boxprops={"facecolor": color, "alpha": 0.4},
            medianprops={"color": "black"},
            manage_ticks=False,
            orientation="horizontal",
        )
        for height, values in scores.items():
            heights = [height] * len(values)
            axes.plot(values, heights, ".", color="black", markersize=3, alpha=0.6)
    axes.set(yticks=range(len(boxes)), yticklabels=boxes, ylim=(len(boxes) - 0.5, -0.5))
    axes.set(title=title, xlabel=score, ylabel=groups)
    return drawing.legend(figure)


def draw_curves(
    by_method: Mapping[str, Curves], task: str, x: str, y: str, title: str | None = None
) -> Figure:
    """Draw a panel per method, with curves from dark (first) to bright (last)."""
    figure, panes = drawing.panels(len(by_method), sharey=True)
    for axes, (method, curves) in zip(panes, by_method.items(), strict=True):
        style = _shades(curves)
        for name, curve in curves.items():
            marker = "." if len(curve) <= MAX_MARKERS else ""
            axes.plot([*curve], [*curve.values()], marker=marker, label=name, **style[name])
        axes.set(title=f"{task}, {method}", xlabel=x)
    panes[0].set_ylabel(y)
    return drawing.legend(figure, columns=6, title=title)


def _shades(names: Iterable[str]) -> dict[str, Style]:
    """Return a shade for each curve; those outside the layers are dashed."""
    shaded = [name for name in names if name not in OUTSIDE_LAYERS]
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(shaded)))
    style: dict[str, Style] = {}
    for name, shade in zip(shaded, shades, strict=True):
        style[name] = {"color": shade}
    for name, color in OUTSIDE_LAYERS.items():
        style[name] = {"color": color, "linestyle": "--"}
    return style


def _task(points: Points) -> str:
    return proper_name(points[0]["task"])


def _score(points: Points) -> str:
    return f"{proper_name(points[0]['score'])} (%)"
