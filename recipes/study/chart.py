"""A bar chart of a study: a group of bars per column, a bar per row of the table."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from study.results import Row, columns


# Okabe and Ito's palette for color-blind readers; black is for the error bars.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
# From the eighth row on, colors repeat with another pattern.
HATCHES = ("", "//", "..", "xx")


def draw(rows: Sequence[Row]) -> Figure:
    """Draw the mean over the seeds of each row in every column that has one, with its standard error."""
    shown = columns(rows)
    width = 0.8 / len(rows)
    figure = Figure(figsize=(max(6.4, 2 + len(shown) * max(0.9, 0.3 * len(rows))), 4.8), layout="constrained")
    axes = figure.add_subplot()
    for number, row in enumerate(rows):
        points = [
            (position + (number - (len(rows) - 1) / 2) * width, *mean)
            for position, (task, score) in enumerate(shown.values())
            if task in row.cells and (mean := row.cells[task].mean(score))
        ]
        positions, heights, errors = zip(*points, strict=True)
        bars = axes.bar(
            positions,
            heights,
            width * 0.95,
            yerr=[error or 0 for error in errors],
            capsize=3,
            label=row.label,
            color=COLORS[number % len(COLORS)],
            hatch=HATCHES[number // len(COLORS) % len(HATCHES)],
            edgecolor="white",
        )
        numbers = [f"{mean:.1f}" + (", one seed" if error is None else "") for _, mean, error in points]
        axes.bar_label(bars, numbers, rotation=90, padding=4, fontsize=8)
    axes.set_xticks(range(len(shown)), list(shown))
    axes.margins(y=0.2)  # room for the numbers
    axes.set_ylabel("validation score, %")
    axes.set_title("Mean over the seeds and standard error")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure
