"""Draw the ratios to the floor: of the minima as points, of the rounds as lines over the range.

The median of the rounds is a tick, and a number on the right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


# From the palette of Okabe and Ito, which is readable with any kind of colour vision.
COLOURS = {"train": "#0072B2", "eval": "#E69F00"}
TITLES = {"train": "training step / frozen floor", "eval": "evaluation / base model"}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw two panels, training and evaluation, for each shape, batch size and length."""
    cells = list(dict.fromkeys((row["shape"], row["batch"], row["length"]) for row in rows))
    names = list(dict.fromkeys(row["method"] for row in rows))
    figure = Figure(figsize=(11, (0.32 * len(names) + 1) * len(cells)), layout="constrained")
    grid = figure.subplots(len(cells), 2, squeeze=False, sharey=True)
    for axes_of_cell, cell in zip(grid, cells, strict=True):
        for axes, phase in zip(axes_of_cell, TITLES, strict=True):
            found = [
                row for row in rows if (row["shape"], row["batch"], row["length"], row["phase"]) == (*cell, phase)
            ]
            y = [names.index(row["method"]) for row in found]
            ratios = [row["ratio_of_minima"] for row in found]
            axes.hlines(y, *zip(*(row["ratio_range"] for row in found), strict=True), COLOURS[phase], linewidth=3)
            axes.plot([row["median_ratio"] for row in found], y, "|", color="black", markersize=12)
            axes.plot(ratios, y, "o", color="black", markersize=5)
            for at, row in zip(y, found, strict=True):
                axes.annotate(
                    f"{row['median_ratio']:.3f}", (0.97, at), ha="right", va="center", color="black",
                    xycoords=("axes fraction", "data"), fontsize=8,
                )  # fmt: skip
            axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
            lowest, highest = zip(*(row["ratio_range"] for row in found), strict=True)
            axes.set_xlim(min(0.9, 0.95 * min(lowest)), max(1.15, 1.12 * max(highest)))
            axes.set_yticks(range(len(names)), names, fontsize=8)
            axes.set_title(f"{cell[0]}, {cell[1]} x {cell[2]} tokens: {TITLES[phase]}", fontsize=9)
    # All panels share this axis.
    grid[0, 0].invert_yaxis()
    figure.savefig(path, dpi=120)
