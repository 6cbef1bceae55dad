"""A bar chart of a study: a group of bars per column, a bar per row of the table."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from common.figures import COLORS, PAGE, plt
from common.glue_report import proper_name
from papers.results import Row, columns


# From the seventh row on, colors repeat with another pattern.
HATCHES = ("", "//", "..", "xx")


def draw(rows: Sequence[Row]) -> Figure:
    """Draw the mean over the seeds of each row in every column that has one, with its standard error."""
    shown = columns(rows)
    width = 0.8 / len(rows)
    figure, axes = plt.subplots(figsize=(max(PAGE, 2 + len(shown) * max(0.9, 0.3 * len(rows))), 0.6 * PAGE))
    for number, row in enumerate(rows):
        points = [
            (position + (number - (len(rows) - 1) / 2) * width, *mean)
            for position, (task, score) in enumerate(shown.values())
            if (cell := row.cell(task, score)) and (mean := cell.mean(score))
        ]
        if not points:
            continue
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
    axes.set_xticks(range(len(shown)), map(proper_name, shown))
    axes.margins(y=0.2)  # room for the numbers
    most = max(len(cell.seeds) for row in rows for cell in row.cells.values())
    axes.set_ylabel("validation score (%)")
    axes.set_title(f"Mean and standard error of {most} seeds" if most > 1 else "One seed")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=2)
    return figure
