"""The figures of Han et al. 2021 about the lengths of pretraining and fine-tuning, with adapters and without."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from common.figures import BLUE, COLUMN, ORANGE, PAGE, plt
from common.glue_report import proper_name


NAMES = {"full": "full fine-tuning", "houlsby": "adapters"}
COLOR_OF = {"full": ORANGE, "houlsby": BLUE}
Row = dict[str, Any]


def draw_lengths(rows: Sequence[Row]) -> Figure | None:
    """Draw a box per method, the distribution over the lengths of pretraining (figure 4).

    A point is the mean over the seeds after the last epoch, from one length. None if no method has two lengths.

    Args:
        rows: The rows of a task in stability.jsonl.
    """
    scores: dict[str, list[float]] = {
        method: [float(np.mean([*row["last"].values()])) for row in rows if _starts(row, method)] for method in NAMES
    }
    shown = [method for method in NAMES if len(scores[method]) > 1]
    if not shown:
        return None
    figure, axes = plt.subplots(figsize=(COLUMN, 0.8 * COLUMN))
    draw_boxes(axes, range(len(shown)), [scores[one] for one in shown], [COLOR_OF[one] for one in shown])
    axes.set_xticks(range(len(shown)), [NAMES[one] for one in shown])
    lengths = sorted({row["pretraining_steps"] for row in rows} - {0})
    label = f"{len(lengths)} lengths of pretraining, {lengths[0]:,}-{lengths[-1]:,} steps"
    axes.set(title=proper_name(rows[0]["task"]), xlabel=label, ylabel=f"{_score(rows)} after the last epoch")
    return figure


def _starts(row: Row, method: str) -> bool:
    return row["method"] == method and row["pretraining_steps"] > 0


def draw_epochs(rows: Sequence[Row]) -> Figure | None:
    """Draw boxes by steps of pretraining, the distribution over the epochs of fine-tuning (figures 9 and 10).

    None if there is no pretraining, or no start has two epochs.

    Args:
        rows: The rows of a task in stability.jsonl.
    """
    rows = [row for row in rows if len(row["by_epochs"]) > 1]
    steps = sorted({row["pretraining_steps"] for row in rows})
    if not any(steps):
        return None
    figure, axes = plt.subplots(figsize=(max(COLUMN, 0.6 * len(steps)), 0.8 * COLUMN))
    for shift, (method, color) in zip((-0.2, 0.2), COLOR_OF.items(), strict=True):
        own = [row for row in rows if row["method"] == method]
        places = [steps.index(row["pretraining_steps"]) + shift for row in own]
        draw_boxes(axes, places, [[*row["by_epochs"].values()] for row in own], [color] * len(own))
    axes.set_xticks(range(len(steps)), [f"{one:,}" for one in steps])
    most = max(max(row["by_epochs"]) for row in rows)
    title = f"{proper_name(rows[0]['task'])}, up to {most:g} epochs of fine-tuning"
    axes.set(title=title, xlabel="steps of pretraining", ylabel=_score(rows))
    patches = [Patch(facecolor=color, alpha=0.4) for color in COLOR_OF.values()]
    figure.legend(patches, NAMES.values(), loc="outside lower center", ncols=2)
    return figure


def draw_curves(rows: Sequence[Row]) -> Figure | None:
    """Draw the mean score over the seeds by epochs of fine-tuning: a panel per method, a line per length of
    pretraining, from dark (none) to bright (figures 1 and 13). None if there is no pretraining.

    Args:
        rows: The rows of a task in stability.jsonl.
    """
    steps = sorted({row["pretraining_steps"] for row in rows})
    if not any(steps):
        return None
    methods = [method for method in NAMES if any(row["method"] == method for row in rows)]
    shades = dict(zip(steps, plt.get_cmap("viridis")(np.linspace(0, 0.9, len(steps))), strict=True))
    figure, panels = plt.subplots(1, len(methods), figsize=(PAGE, 0.4 * PAGE), sharey=True, squeeze=False)
    for axes, method in zip(panels[0], methods, strict=True):
        for row in (row for row in rows if row["method"] == method):
            points, length = row["by_epochs"], row["pretraining_steps"]
            marker = "." if len(points) <= 20 else ""
            axes.plot([*points], [*points.values()], color=shades[length], marker=marker, label=f"{length:,} steps")
        axes.set(title=f"{proper_name(rows[0]['task'])}, {NAMES[method]}", xlabel="epochs of fine-tuning")
    panels[0][0].set_ylabel(_score(rows))
    lines = {line.get_label(): line for axes in panels[0] for line in axes.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside right center", title="pretraining")
    return figure


def draw_boxes(
    axes: Axes, places: Sequence[float], scores: Sequence[Sequence[float]], colors: Sequence[str], hatch: str = ""
) -> None:
    """Draw box plots with all scores as points."""
    boxes = axes.boxplot(
        scores, positions=places, widths=0.35, showfliers=False, patch_artist=True, medianprops={"color": "black"}
    )
    for x, box, values, color in zip(places, boxes["boxes"], scores, colors, strict=True):
        box.set(facecolor=color, alpha=0.4, hatch=hatch)
        axes.plot([x] * len(values), values, ".", color="black", markersize=3, alpha=0.6)


def _score(rows: Sequence[Row]) -> str:
    return f"{proper_name(rows[0]['score'])} (%)"
