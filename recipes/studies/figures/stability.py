"""How much the score depends on the seed and on the lengths of pretraining and fine-tuning, with
adapters and without.

Han et al. 2021. Figure 2 and the appendix's on MNLI: the distribution over the seeds as box plots,
of each run's best epoch and of its last one, which shows runs that collapsed. Figure 3: the
gradient's norm by layer and step, of runs of recipes/studies/gradient_norms.py. Runs that started from
checkpoints of mlm.py (folders checkpoint-N) have figures 4, 9, 10, 1 and 13.

In figures 9 and 10, each number of epochs is a run of its own in the paper. If there are runs with
several numbers of epochs, so it is here. Otherwise the epochs of a run are drawn: they share one
learning rate schedule, so that only the last one is what a separate run would give, unless the rate
is constant.
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

from common.edge import RecipeError
from common.figures import COLORS, COLUMN, PINK, RED, SKY, plt, save
from common.scores import proper_name
from figures.drawing import Rows, legend, panels, seeds_of, write_lines
from figures.gradients import FILE
from results.lines import Results, arrange, best_cell, finished, in_percent
from sweeping.runs import CHOSEN


NAMES = {"full": "full fine-tuning", "houlsby": "adapters"}
# In the figure of the gradients, whose other lines are layers.
OTHERS = {"classifier": RED, "pooler": PINK, "embeddings": SKY}
Starts = Mapping[tuple[str, int, str], Sequence[Results]]  # task, steps of pretraining, method
Curve = Mapping[float, float]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the folder is enough."""


def main(folder: Path, arguments: argparse.Namespace) -> None:
    starts = by_start([one for one in finished(folder) if one["task"] != "mlm"])
    rows = summarize(starts)
    write_lines(folder / "stability.jsonl", rows)
    for task in dict.fromkeys(task for task, _, _ in starts):
        own = [row for row in rows if row["task"] == task]
        save(draw_seeds(own), folder / f"stability_{task}")
        norms = {NAMES[method]: read_norms(starts.get((task, 0, method), ())) for method in NAMES}
        if norms := {name: found for name, found in norms.items() if found}:
            figure = draw_lines(
                norms, proper_name(task), "step", "norm of the gradient", yscale="log"
            )
            save(figure, folder / f"gradient_norms_{task}")
        if any(row["pretraining_steps"] for row in own):
            save(draw_lengths(own), folder / f"pretraining_{task}")
            save(draw_epochs(own), folder / f"epochs_{task}")
            save(draw_curves(own), folder / f"learning_curves_{task}")


def by_start(results: Iterable[Results]) -> Starts:
    """Return the runs by task, steps of pretraining and method, at the learning rate that
    validation has chosen.
    """
    found: dict[tuple[str, int, str], list[Results]] = defaultdict(list)
    for one in (one for one in results if one["method"] in NAMES):
        checkpoint = re.search(
            r"checkpoint-(\d+)$", one["arguments"]["init_adapter"] or one["model"]
        )
        found[one["task"], int(checkpoint[1]) if checkpoint else 0, one["method"]].append(one)
    for start, runs in found.items():
        if len(rows := arrange(runs, CHOSEN)) > 1:
            raise RecipeError(
                f"Each of these rows needs a folder of its own: {'; '.join(row.label for row in rows)}."
            )
        rate = _chosen(runs)[0]["arguments"]["learning_rate"]
        found[start] = [one for one in runs if one["arguments"]["learning_rate"] == rate]
    return dict(sorted(found.items()))


def _chosen(runs: Sequence[Results]) -> list[Results]:
    return [*best_cell(runs, CHOSEN).seeds.values()]


def summarize(starts: Starts) -> list[dict[str, Any]]:
    """Return a row per start: the chosen rate, the scores by seed of the best and of the last epoch
    in percent, and the mean score by number of epochs. The best epoch of a run hides a later
    collapse.
    """
    rows = []
    for (task, steps, method), runs in starts.items():
        chosen = _chosen(runs)
        rows.append({
            "task": task, "method": method, "pretraining_steps": steps, "score": chosen[0]["chosen_by"],
            **{name: chosen[0]["arguments"].get(name) for name in CHOSEN},
            "scores": {one["seed"]: in_percent(one, one["best_scores"]) for one in chosen},
            "last": {one["seed"]: in_percent(one, one["epochs"][-1]) for one in chosen},
            "by_epochs": by_epochs(runs),
        })  # fmt: skip
    return rows


def by_epochs(runs: Sequence[Results]) -> dict[float, float]:
    """Return the mean score over the seeds, in percent, by number of epochs: after the last epoch
    if there are runs with several numbers of epochs, otherwise after each epoch that all runs have.
    """
    scores: dict[float, list[float]] = defaultdict(list)
    separate = len({one["arguments"].get("num_train_epochs") for one in runs}) > 1
    for one in runs:
        for entry in one["epochs"][-1:] if separate else one["epochs"]:
            scores[entry["epoch"]].append(in_percent(one, entry))
    return {
        at: mean(own) for at, own in sorted(scores.items()) if separate or len(own) == len(runs)
    }


def read_norms(runs: Iterable[Results]) -> dict[str, Curve]:
    """Return the median over the runs of the gradient's norm, by layer and step."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in runs:
        path = Path(one["folder"], FILE)
        # Runs of another command have no such file. A resumed run may have a step twice.
        rows = map(json.loads, path.read_text().splitlines() if path.is_file() else ())
        for row in {row["step"]: row for row in rows}.values():
            for layer, norm in row["norms"].items():
                name = layer.rpartition(".")[2]
                found[f"layer {name}" if name.isdigit() else name][row["step"]].append(norm)
    return {
        layer: {step: median(norms) for step, norms in steps.items()}
        for layer, steps in found.items()
    }


def draw_seeds(rows: Rows) -> Figure:
    """Draw the distribution over the seeds, of the best and of the last epoch (figure 2)."""
    steps = [
        f", {row['pretraining_steps']:,} steps first" if row["pretraining_steps"] else ""
        for row in rows
    ]
    boxes = {
        NAMES[row["method"]] + of: {
            "best epoch": [*row["scores"].values()],
            "last epoch": [*row["last"].values()],
        }
        for row, of in zip(rows, steps, strict=True)
    }
    title = f"{proper_name(rows[0]['task'])}, {seeds_of(len(row['scores']) for row in rows)}"
    return draw_boxes(boxes, title, _score(rows))


def draw_lengths(rows: Rows) -> Figure:
    """Draw the distribution over the lengths of pretraining (figure 4). A point is the mean over
    the seeds after the last epoch, from one length.
    """
    rows = [row for row in rows if row["pretraining_steps"]]
    lengths = sorted({row["pretraining_steps"] for row in rows})
    name = f"{len(lengths)} lengths of pretraining,\n{lengths[0]:,} to {lengths[-1]:,} steps"
    boxes: dict[str, list[float]] = {}
    for row in rows:
        boxes.setdefault(NAMES[row["method"]], []).append(mean(row["last"].values()))
    return draw_boxes(
        {name: boxes}, f"{proper_name(rows[0]['task'])}, after the last epoch", _score(rows)
    )


def draw_epochs(rows: Rows) -> Figure:
    """Draw the distribution over the epochs of fine-tuning by steps of pretraining (figures 9 and
    10).
    """
    boxes: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        of_length = boxes.setdefault(f"{row['pretraining_steps']:,} steps", {})
        of_length[NAMES[row["method"]]] = [*row["by_epochs"].values()]
    last = max(max(row["by_epochs"]) for row in rows)
    title = f"{proper_name(rows[0]['task'])}, up to {last:g} epochs of fine-tuning"
    return draw_boxes(boxes, title, _score(rows), "pretraining")


def draw_curves(rows: Rows) -> Figure:
    """Draw the mean score over the seeds by epochs of fine-tuning, a line per length of pretraining
    (figures 1 and 13).
    """
    lines: dict[str, dict[str, Curve]] = {}
    for row in sorted(rows, key=lambda row: row["method"]):
        lines.setdefault(NAMES[row["method"]], {})[f"{row['pretraining_steps']:,} steps"] = row[
            "by_epochs"
        ]
    return draw_lines(
        lines, proper_name(rows[0]["task"]), "epochs of fine-tuning", _score(rows), "pretraining"
    )


def draw_boxes(
    boxes: Mapping[str, Mapping[str, Sequence[float]]],
    title: str,
    score: str,
    groups: str | None = None,
) -> Figure:
    """Draw box plots: a group for each name, a box for each kind, all scores as points."""
    figure, axes = plt.subplots(figsize=(COLUMN, 0.9 + 0.3 * max(2, len(boxes))))
    kinds = [*dict.fromkeys(kind for group in boxes.values() for kind in group)]
    for number, (kind, color) in enumerate(zip(kinds, COLORS, strict=False)):
        shift = 0.4 * (number - (len(kinds) - 1) / 2)
        scores = {
            place + shift: group[kind]
            for place, group in enumerate(boxes.values())
            if kind in group
        }
        axes.boxplot(
            [*scores.values()], positions=[*scores], widths=0.35, showfliers=False, patch_artist=True, label=kind,
            boxprops={"facecolor": color, "alpha": 0.4}, medianprops={"color": "black"}, manage_ticks=False,
            orientation="horizontal",
        )  # fmt: skip
        for place, values in scores.items():
            axes.plot(values, [place] * len(values), ".", color="black", markersize=3, alpha=0.6)
    axes.set(yticks=range(len(boxes)), yticklabels=boxes, ylim=(len(boxes) - 0.5, -0.5))
    axes.set(title=title, xlabel=score, ylabel=groups)
    return legend(figure)


def draw_lines(
    lines: Mapping[str, Mapping[str, Curve]],
    task: str,
    x: str,
    y: str,
    title: str | None = None,
    **options: Any,
) -> Figure:
    """Draw a panel per method, with lines from dark (first) to bright (last); OTHERS are dashed."""
    figure, axes = panels(len(lines), sharey=True)
    for own, (method, curves) in zip(axes, lines.items(), strict=True):
        shaded = [name for name in curves if name not in OTHERS]
        shades = zip(shaded, plt.get_cmap("viridis")(np.linspace(0, 0.9, len(shaded))), strict=True)
        styles = {name: {"color": color} for name, color in shades}
        styles |= {name: {"color": color, "linestyle": "--"} for name, color in OTHERS.items()}
        for name, curve in curves.items():
            own.plot(
                [*curve],
                [*curve.values()],
                marker="." if len(curve) <= 20 else "",
                label=name,
                **styles[name],
            )
        own.set(title=f"{task}, {method}", xlabel=x, **options)
    axes[0].set_ylabel(y)
    return legend(figure, columns=6, title=title)


def _score(rows: Rows) -> str:
    return f"{proper_name(rows[0]['score'])} (%)"
