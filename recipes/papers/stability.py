"""How much the score depends on the seed and on the lengths of pretraining and fine-tuning, with adapters and without.

Han et al. 2021. Figure 2 and the appendix's on MNLI: the distribution over the seeds as box plots, of each run's best
epoch and of its last one, which shows runs that collapsed. Figure 3: the gradient's norm by layer and step, of runs of
recipes/gradient_norms.py. Runs that started from checkpoints of mlm.py (folders checkpoint-N) have figures 4, 9, 10,
1 and 13.

In figures 9 and 10, each number of epochs is a run of its own in the paper. If there are runs with several numbers of
epochs, so it is here. Otherwise the epochs of a run are drawn: they share one learning rate schedule, so that only the
last one is what a separate run would give, unless the rate is constant.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from common.figures import BLUE, COLUMN, ORANGE, PAGE, PINK, RED, SKY, plt, save
from common.scores import proper_name
from papers.drawing import draw_boxes, legend, panels, seeds_of, write_lines
from papers.gradients import FILE
from papers.results import Results, best_cell, finished, in_percent, score_percent
from sweeping.runs import CHOSEN


NAMES = {"full": "full fine-tuning", "houlsby": "adapters"}
COLOR_OF = {"full": ORANGE, "houlsby": BLUE}
Start = tuple[str, int]  # method, steps of pretraining
Row = dict[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the folder is enough."""


def main(arguments: argparse.Namespace) -> None:
    """Write the numbers and the figures."""
    folder = Path(arguments.folder)
    results = [one for one in finished(folder) if one["task"] != "mlm"]
    rows = summarize(results)
    write_lines(folder / "stability.jsonl", rows)
    for task in sorted({row["task"] for row in rows}):
        own = [row for row in rows if row["task"] == task]
        save(draw_seeds(own), folder / f"stability_{task}")
        starts = by_start(results, task)
        norms = {method: found for method in NAMES if (found := read_norms(starts.get((method, 0), ())))}
        if norms:
            save(draw_norms(norms, task), folder / f"gradient_norms_{task}")
        if any(row["pretraining_steps"] for row in own):
            save(draw_lengths(own), folder / f"pretraining_{task}")
            save(draw_epochs(own), folder / f"epochs_{task}")
            save(draw_curves(own), folder / f"learning_curves_{task}")


def by_start(results: Iterable[Results], task: str) -> dict[Start, list[Results]]:
    """Return the runs of a task by method and steps of pretraining, in the order of the figure, at the learning rate
    that validation has chosen."""
    found: dict[Start, list[Results]] = defaultdict(list)
    for one in (one for one in results if one["task"] == task):
        checkpoint = re.search(r"checkpoint-(\d+)$", one["arguments"]["init_adapter"] or one["model"])
        method = "full" if one["method"] == "full" else "houlsby"
        found[method, int(checkpoint[1]) if checkpoint else 0].append(one)
    order = sorted(found, key=lambda start: (start[1], [*NAMES].index(start[0])))
    return {start: _at_chosen_rate(found[start]) for start in order}


def _at_chosen_rate(runs: Sequence[Results]) -> list[Results]:
    chosen = next(iter(best_cell(runs, CHOSEN).seeds.values()))
    rate = chosen["arguments"]["learning_rate"]
    return [one for one in runs if one["arguments"]["learning_rate"] == rate]


def summarize(results: Sequence[Results]) -> list[Row]:
    """Return a row per task and start: the chosen rate, the scores by seed of the best and of the last epoch in
    percent, and the mean score by number of epochs. The best epoch of a run hides a later collapse."""
    rows = []
    for task in sorted({one["task"] for one in results}):
        for (method, steps), runs in by_start(results, task).items():
            chosen = best_cell(runs, CHOSEN).seeds
            first = next(iter(chosen.values()))
            rows.append({
                "task": task, "method": method, "pretraining_steps": steps, "score": first["chosen_by"],
                **{name: first["arguments"].get(name) for name in CHOSEN},
                "scores": {seed: score_percent(one) for seed, one in chosen.items()},
                "last": {seed: _score_at(one, one["epochs"][-1]) for seed, one in chosen.items()},
                "by_epochs": by_epochs(runs),
            })  # fmt: skip
    return rows


def by_epochs(runs: Sequence[Results]) -> dict[float, float]:
    """Return the mean score over the seeds, in percent, by number of epochs: after the last epoch if there are runs
    with several numbers of epochs, otherwise after each epoch that all runs have."""
    scores: dict[float, list[float]] = defaultdict(list)
    separate = len({one["arguments"].get("num_train_epochs") for one in runs}) > 1
    for one in runs:
        for entry in one["epochs"][-1:] if separate else one["epochs"]:
            scores[entry["epoch"]].append(_score_at(one, entry))
    return {at: mean(own) for at, own in sorted(scores.items()) if separate or len(own) == len(runs)}


def _score_at(one: Results, entry: dict[str, float]) -> float:
    return in_percent(one, one["chosen_by"], entry[one["chosen_by"]])


def draw_seeds(rows: Sequence[Row]) -> Figure:
    """Draw two boxes per start, for the best and the last epoch, with the runs as points."""
    figure, (axes,) = panels(1, 0.9 + 0.3 * len(rows))
    for shift, epoch, hatch in ((-0.2, "scores", ""), (0.2, "last", "////")):
        places = [number + shift for number in range(len(rows))]
        colors = [COLOR_OF[row["method"]] for row in rows]
        draw_boxes(axes, places, [[*row[epoch].values()] for row in rows], colors, hatch, vertical=False)
    steps = [f", {row['pretraining_steps']:,} steps first" if row["pretraining_steps"] else "" for row in rows]
    axes.set_yticks(range(len(rows)), [NAMES[row["method"]] + of for row, of in zip(rows, steps, strict=True)])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set(title=f"{proper_name(rows[0]['task'])}, {seeds_of(max(len(row['scores']) for row in rows))}",
             xlabel=_score(rows))  # fmt: skip
    epochs = [Patch(facecolor="white", edgecolor="black", hatch=hatch) for hatch in ("", "////")]
    figure.legend(epochs, ["best epoch", "last epoch"], loc="outside lower center", ncols=2)
    return figure


def draw_lengths(rows: Sequence[Row]) -> Figure:
    """Draw a box per method, the distribution over the lengths of pretraining (figure 4). A point is the mean over the
    seeds after the last epoch, from one length."""
    figure, (axes,) = panels(1)
    rows = [row for row in rows if row["pretraining_steps"]]
    methods = [method for method in NAMES if any(row["method"] == method for row in rows)]
    scores = [[mean(row["last"].values()) for row in rows if row["method"] == method] for method in methods]
    draw_boxes(axes, range(len(methods)), scores, [COLOR_OF[method] for method in methods])
    axes.set_xticks(range(len(methods)), [NAMES[method] for method in methods])
    axes.set_xlim(-0.5, len(methods) - 0.5)
    lengths = sorted({row["pretraining_steps"] for row in rows})
    label = f"{len(lengths)} lengths of pretraining,\n{lengths[0]:,} to {lengths[-1]:,} steps"
    axes.set(title=proper_name(rows[0]["task"]), xlabel=label, ylabel=f"{_score(rows)}\nafter the last epoch")
    return figure


def draw_epochs(rows: Sequence[Row]) -> Figure:
    """Draw boxes by steps of pretraining, the distribution over the epochs of fine-tuning (figures 9 and 10)."""
    steps = sorted({row["pretraining_steps"] for row in rows})
    figure, (axes,) = panels(1)
    figure.set_figwidth(min(PAGE, max(COLUMN, 0.6 * len(steps))))
    for shift, (method, color) in zip((-0.2, 0.2), COLOR_OF.items(), strict=True):
        own = [row for row in rows if row["method"] == method]
        places = [steps.index(row["pretraining_steps"]) + shift for row in own]
        draw_boxes(axes, places, [[*row["by_epochs"].values()] for row in own], [color] * len(own))
    axes.set_xticks(range(len(steps)), [f"{one:,}" for one in steps])
    axes.set_xlim(-0.5, len(steps) - 0.5)
    last = max(max(row["by_epochs"]) for row in rows)
    title = f"{proper_name(rows[0]['task'])}, up to {last:g} epochs of fine-tuning"
    axes.set(title=title, xlabel="steps of pretraining", ylabel=_score(rows))
    patches = [Patch(facecolor=color, alpha=0.4) for color in COLOR_OF.values()]
    figure.legend(patches, NAMES.values(), loc="outside lower center", ncols=2)
    return figure


def draw_curves(rows: Sequence[Row]) -> Figure:
    """Draw the mean score over the seeds by epochs of fine-tuning: a panel per method, a line per length of
    pretraining, from dark (none) to bright (figures 1 and 13)."""
    shades = _shades(sorted({row["pretraining_steps"] for row in rows}))
    methods = [method for method in NAMES if any(row["method"] == method for row in rows)]
    figure, axes = panels(len(methods), sharey=True)
    for own, method in zip(axes, methods, strict=True):
        for row in (row for row in rows if row["method"] == method):
            points, length = row["by_epochs"], row["pretraining_steps"]
            marker = "." if len(points) <= 20 else ""
            own.plot([*points], [*points.values()], color=shades[length], marker=marker, label=f"{length:,} steps")
        own.set(title=f"{proper_name(rows[0]['task'])}, {NAMES[method]}", xlabel="epochs of fine-tuning")
    axes[0].set_ylabel(_score(rows))
    legend(figure, columns=6, title="pretraining")
    return figure


def read_norms(runs: Iterable[Results]) -> dict[str, dict[int, float]]:
    """Return the median over the runs of the gradient's norm, by layer and step."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in runs:
        path = Path(one["folder"], FILE)
        # Runs of another command have no such file.
        for row in map(json.loads, path.read_text().splitlines() if path.is_file() else ()):
            for layer, norm in row["norms"].items():
                found[layer][row["step"]].append(norm)
    return {layer: {step: median(norms) for step, norms in steps.items()} for layer, steps in found.items()}


def draw_norms(norms: dict[str, dict[str, dict[int, float]]], task: str) -> Figure:
    """Draw a panel per method: layers from dark (first) to bright (last), pooler and head dashed."""
    figure, axes = panels(len(norms), sharey=True)
    others = {"classifier": RED, "pooler": PINK, "embeddings": SKY}
    for own, (method, layers) in zip(axes, norms.items(), strict=True):
        shades = _shades([layer for layer in layers if layer.rpartition(".")[2].isdigit()])
        for layer, steps in layers.items():
            name = layer.rpartition(".")[2]
            style = {"color": others.get(name, "black"), "linestyle": "--", "label": name}
            if layer in shades:
                style = {"color": shades[layer], "label": f"layer {name}"}
            own.plot(steps.keys(), steps.values(), marker="", **style)
        own.set(title=f"{proper_name(task)}, {NAMES[method]}", xlabel="step", yscale="log")
    axes[0].set_ylabel("norm of the gradient")
    legend(figure, columns=6)
    return figure


def _shades(values: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(values, plt.get_cmap("viridis")(np.linspace(0, 0.9, len(values))), strict=True))


def _score(rows: Sequence[Row]) -> str:
    return f"{proper_name(rows[0]['score'])} (%)"
