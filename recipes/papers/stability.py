"""How much the score depends on the seed and on the lengths of pretraining and fine-tuning, with adapters and without.

Han et al. 2021. Figure 2 and the appendix's on MNLI: the distribution over the seeds as box plots, of each run's best
epoch and of its last one, which shows runs that collapsed. Figure 3: the gradient's norm by layer and step, of runs of
recipes/gradient_norms.py. Runs that started from checkpoints of mlm.py (folders checkpoint-N) have figures 4, 9, 10
(papers/lengths.py), 1 and 13.

In figures 9 and 10, each number of epochs is a run of its own in the paper. If there are runs with several numbers of
epochs, so it is here. Otherwise the epochs of a run are drawn: they share one learning rate schedule, so that only the
last one is what a separate run would give, unless the rate is constant.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from common.figures import COLUMN, PAGE, PINK, RED, SKY, plt, save
from common.glue_report import proper_name
from papers.gradients import FILE
from papers.lengths import COLOR_OF, NAMES, draw_boxes, draw_curves, draw_epochs, draw_lengths
from papers.results import Results, best_cell, finished, in_percent, score_percent
from papers.runs import write_lines
from sweeping.runs import CHOSEN


Start = tuple[str, int]  # method, steps of pretraining
OTHERS = {"classifier": RED, "pooler": PINK, "embeddings": SKY}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the folder is enough."""


def main(arguments: argparse.Namespace) -> None:
    """Write the numbers and the figures."""
    folder = Path(arguments.folder)
    results = [one for one in finished(folder) if one["task"] != "mlm"]
    rows = summarize(results)
    write_lines(folder / "stability.jsonl", rows)
    save(draw(rows), folder / "stability")
    for task in sorted({one["task"] for one in results}):
        starts = by_start(results, task)
        norms = {NAMES[method]: found for method in NAMES if (found := read_norms(starts.get((method, 0), ())))}
        own = [row for row in rows if row["task"] == task]
        figures = {
            "gradient_norms": draw_norms(norms, task) if norms else None,
            "pretraining": draw_lengths(own),
            "epochs": draw_epochs(own),
            "learning_curves": draw_curves(own),
        }
        for name, figure in figures.items():
            if figure is not None:
                save(figure, folder / f"{name}_{task}")


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


def summarize(results: Sequence[Results]) -> list[dict[str, Any]]:
    """Return a row per task and start: the chosen rate, the scores by seed of the best and of the last epoch in
    percent, and the mean score by number of epochs. The best epoch of a run hides a later collapse."""
    rows = []
    for task in sorted({one["task"] for one in results}):
        for (method, steps), runs in by_start(results, task).items():
            chosen = best_cell(runs, CHOSEN).seeds
            first = next(iter(chosen.values()))
            rows.append({
                "task": task, "start": NAMES[method] + (f", {steps} steps first" if steps else ""),
                "method": method, "pretraining_steps": steps, "score": first["chosen_by"],
                **{name: first["arguments"].get(name) for name in CHOSEN},
                "scores": {seed: score_percent(one) for seed, one in chosen.items()},
                "last": {seed: _last(one) for seed, one in chosen.items()},
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
            scores[entry["epoch"]].append(in_percent(one, one["chosen_by"], entry[one["chosen_by"]]))
    return {at: mean(own) for at, own in sorted(scores.items()) if separate or len(own) == len(runs)}


def _last(one: Results) -> float:
    score = one["chosen_by"]
    return in_percent(one, score, one["epochs"][-1][score])


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw two boxes per method and start, for the best and the last epoch, with the runs as points, and a panel per
    task."""
    tasks = sorted({row["task"] for row in rows})
    starts = max(sum(row["task"] == task for row in rows) for task in tasks)
    width = max(min(PAGE, COLUMN * len(tasks)), 0.4 * starts * len(tasks))
    figure, panels = plt.subplots(1, len(tasks), figsize=(width, 0.8 * COLUMN), squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        own = [row for row in rows if row["task"] == task]
        for shift, epoch, hatch in ((-0.2, "scores", ""), (0.2, "last", "////")):
            draw_boxes(
                axes,
                [number + shift for number in range(1, len(own) + 1)],
                [list(row[epoch].values()) for row in own],
                [COLOR_OF[row["method"]] for row in own],
                hatch,
            )
        labels = [row["start"].replace(", ", "\n") for row in own]
        axes.set_xticks(range(1, len(own) + 1), labels, rotation=90 if starts > 4 else 0)
        seeds = max(len(row["scores"]) for row in own)
        axes.set(
            title=f"{proper_name(task)}, {seeds} seed{'s' * (seeds > 1)}", ylabel=f"{proper_name(own[0]['score'])} (%)"
        )
    epochs = [Patch(facecolor="white", edgecolor="black", hatch=hatch) for hatch in ("", "////")]
    figure.legend(epochs, ["best epoch", "last epoch"], loc="outside lower center", ncols=2)
    return figure


def read_norms(runs: Iterable[Results]) -> dict[str, dict[int, float]]:
    """Return the median over the runs of the gradient's norm, by layer and step."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in runs:
        path = Path(one["arguments"]["output_dir"], FILE)
        # Runs of another command have no such file.
        for row in map(json.loads, path.read_text().splitlines() if path.is_file() else ()):
            for layer, norm in row["norms"].items():
                found[layer][row["step"]].append(norm)
    return {layer: {step: median(norms) for step, norms in steps.items()} for layer, steps in found.items()}


def draw_norms(norms: Mapping[str, dict[str, dict[int, float]]], task: str) -> Figure:
    """Draw a panel per method: layers from dark (first) to bright (last), pooler and head dashed."""
    figure, panels = plt.subplots(1, len(norms), figsize=(PAGE, 0.4 * PAGE), sharey=True, squeeze=False)
    for axes, (name, layers) in zip(panels[0], norms.items(), strict=True):
        numbered = [layer for layer in layers if layer.rpartition(".")[2].isdigit()]
        shades = dict(zip(numbered, plt.get_cmap("viridis")(np.linspace(0, 0.9, len(numbered))), strict=True))
        for layer, steps in layers.items():
            label = f"layer {layer.rpartition('.')[2]}" if layer in shades else layer.rpartition(".")[2]
            style = (
                {"color": shades[layer]}
                if layer in shades
                else {"color": OTHERS.get(label, "black"), "linestyle": "--"}
            )
            axes.plot(steps.keys(), steps.values(), label=label, marker="", **style)
        axes.set(title=f"{proper_name(task)}, {name}", xlabel="step", yscale="log")
    panels[0][0].set_ylabel("norm of the gradient")
    lines = {line.get_label(): line for axes in panels[0] for line in axes.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside right center")
    return figure
