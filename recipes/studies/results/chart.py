"""A chart of runs: a column of the table is a row of markers, one for each line of the table."""

from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from common.figures import PAGE
from common.scores import proper_name
from figures.drawing import legend, styles, title_of
from results.lines import TableLine, find_columns
from results.means import mean_and_error


def draw(lines: Sequence[TableLine], score: str = "main") -> Figure:
    """Draw each line's mean over the seeds in every column that has one, with its error."""
    columns = find_columns(lines, score)
    style = styles(line.label for line in lines)
    height = 0.8 + max(0.22, 0.11 * len(lines)) * len(columns)
    figure, axes = plt.subplots(figsize=(PAGE, height))
    step = 0.8 / len(lines)  # between the markers of a column
    for number, line in enumerate(lines):
        shift = (number - (len(lines) - 1) / 2) * step
        scores = line.scores(columns)
        heights, means, errors = [], [], []
        for place, name in enumerate(columns):
            if name in scores:
                mean, error = mean_and_error([*scores[name].values()])
                heights.append(place + shift)
                means.append(mean)
                errors.append(error or 0)
        if means:
            marker = style[line.label] | {"linestyle": "none"}
            axes.errorbar(means, heights, xerr=errors, label=line.label, capsize=2, **marker)
    axes.set_yticks(range(len(columns)), map(proper_name, columns))
    axes.set_ylim(len(columns) - 0.5, -0.5)
    for between in range(1, len(columns)):
        axes.axhline(between - 0.5, color="black", alpha=0.15, linewidth=0.5)
    axes.set_xlabel(f"validation {'accuracy' if score == 'accuracy' else 'score'} (%)")
    axes.set_title(title_of(_count_seeds(lines)))
    axes.grid(axis="x", alpha=0.3)
    return legend(figure)


def _count_seeds(lines: Sequence[TableLine]) -> list[int]:
    counts = []
    for line in lines:
        counts += [len(cell.seeds) for cell in line.cells.values()]
    return counts
