"""The style of all figures, with sizes for a paper and colors for color-blind readers; the figures of every run."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from numpy.typing import NDArray

from common.same_run import MOMENT


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


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure to `path`. Characters that the font lacks are drawn as boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        figure.savefig(path, dpi=200)
    plt.close(figure)


def draw_confusion(matrix: NDArray[np.int64], names: Sequence[str], title: str) -> Figure:
    """Draw the share of each prediction (columns) among the examples of a label (rows)."""
    from sklearn.metrics import ConfusionMatrixDisplay  # only here, as the import takes a second

    totals = matrix.sum(axis=1)
    shares = matrix / np.maximum(totals, 1)[:, None]
    short, few = [_plain(name) for name in names], len(names) <= 10
    longest = max(map(len, short))
    upright = longest * len(short) > 30
    side = max(0.5 if few else 0.27, 1.6 / len(names)) * len(names)
    margins = 1 + 0.06 * longest, 0.8 + 0.06 * longest * upright
    figure, axes = plt.subplots(figsize=(side + margins[0], side + margins[1]))
    shown = ConfusionMatrixDisplay(shares, display_labels=short).plot(
        ax=axes,
        cmap="Blues",
        colorbar=False,
        include_values=False,
        xticks_rotation="vertical" if upright else "horizontal",
        im_kw={"vmin": 0, "vmax": 1},
    )
    for row, column in np.argwhere(shares > (-1 if few else 0.005)):
        share, count = shares[row, column], matrix[row, column]
        axes.text(
            column,
            row,
            f"{share:.0%}\n{count:,}" if few else f"{100 * share:.0f}",
            color=shown.im_.cmap(0.0 if share > 0.5 else 1.0),
            fontsize=7 if few else 5.5,
            horizontalalignment="center",
            verticalalignment="center",
            in_layout=False,  # measuring hundreds of texts takes seconds
        )
    axes.set_yticks(range(len(names)), [f"{name} ({total:,})" for name, total in zip(short, totals, strict=True)])
    axes.set(xlabel="prediction", ylabel="label (examples)")
    axes.spines[:].set_visible(False)
    figure.suptitle(f"{_plain(title)}\n{'share' if few else 'percent'} of the label's examples", fontsize=8)
    return figure


def draw_reliability(bins: pd.DataFrame, error: float, title: str) -> Figure:
    """Draw the share of right predictions against the model's probabilities; on the dotted line, they are equal."""
    figure, axes = plt.subplots(figsize=(COLUMN, 0.9 * COLUMN))
    axes.plot([0, 1], [0, 1], color="gray", linestyle=":")
    axes.plot(bins["confidence"], bins["right"], color=BLUE)
    axes.scatter(bins["confidence"], bins["right"], 10 + 200 * bins["examples"] / bins["examples"].sum(), color=BLUE)
    axes.set(
        xlabel="probability of the prediction", ylabel="share of right predictions", xlim=(0, 1.03), ylim=(0, 1.03)
    )
    axes.set_title(f"{_plain(title)}\nexpected calibration error {error:.3f}")
    return figure


def draw_values(expected: NDArray[np.float64], predicted: NDArray[np.float64], title: str) -> Figure:
    """Draw the predictions against the targets; on the dotted line, they are equal."""
    figure, axes = plt.subplots(figsize=(COLUMN, 0.9 * COLUMN))
    ends = [min(expected.min(), predicted.min()), max(expected.max(), predicted.max())]
    axes.plot(ends, ends, color="gray", linestyle=":")
    axes.scatter(expected, predicted, 4, color=BLUE, alpha=0.4, linewidths=0)
    axes.set(xlabel="target", ylabel="prediction", title=_plain(title))
    return figure


def _plain(name: str) -> str:
    """Return a name of at most 24 characters, in which a dollar sign does not begin a formula."""
    name = " ".join(name.split())
    return (name if len(name) <= 24 else f"{name[:14]}...{name[-7:]}").replace("$", r"\$")


def draw_learning_curves(
    log_history: Iterable[Mapping[str, float]],
    evaluations: Sequence[Mapping[str, float]],
    chosen_by: str,
    kept: float | None,
) -> Figure:
    """Draw the losses by epoch and, beside them, the validation scores."""
    epochs = [evaluation["epoch"] for evaluation in evaluations]
    names = [name for name in evaluations[0] if name not in MOMENT]
    losses = [name for name in names if name.endswith("loss")]
    scores = sorted((name for name in names if name not in losses), key=lambda name: name != chosen_by)[: len(COLORS)]
    figure, panels = plt.subplots(
        1, 1 + bool(scores), figsize=(PAGE if scores else COLUMN, 0.8 * COLUMN), squeeze=False
    )
    trained = [(entry["epoch"], entry["loss"]) for entry in log_history if "loss" in entry]
    if trained:
        panels[0, 0].plot(*zip(*trained, strict=True), color=BLUE, label="training")
    styles = [*zip(COLORS[1:] + COLORS[:1], MARKERS, strict=True)]  # the first color is that of the training
    for drawn, axes, label in ((losses, panels[0, 0], "loss"), (scores, panels[0, -1], "validation score")):
        for name, (color, marker) in zip(drawn, styles, strict=False):
            values = [evaluation[name] for evaluation in evaluations]
            shown = name.replace("loss", "validation") if drawn is losses else name
            axes.plot(epochs, values, color=color, marker=marker, label=shown.replace("_", " "))
        axes.set(xlabel="epoch", ylabel=label)
        if all(float(epoch).is_integer() for epoch in epochs):
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if kept is not None:
            axes.axvline(kept, color="gray", linestyle=":", label="kept")
        axes.legend()
    return figure
