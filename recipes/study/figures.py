"""The style of all figures: sizes that fit a paper's column, colors for color-blind readers, two file formats."""

from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.figure import Figure


COLUMN, PAGE = 3.3, 6.8  # width of one column and of a page, in inches

# The palette of Okabe and Ito 2008, without black, and without yellow, which is faint on white.
BLUE, ORANGE, GREEN, PINK, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
MARKERS = ("o", "s", "^", "D", "v", "P")  # for prints in gray

matplotlib.use("Agg")
plt.rcParams.update(
    {
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "legend.fontsize": 7,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "lines.linewidth": 1.2,
        "lines.markersize": 3.5,
        "figure.constrained_layout.use": True,
        "svg.hashsalt": "houlsby",  # the same figure is the same file
    }
)


def save(figure: Figure, path: Path) -> None:
    """Write a figure to `path`.png (300 dots per inch) and `path`.svg, and print the paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".png"), dpi=300)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)
    print(f"Figure: {path.with_suffix('.png')} and .svg")
