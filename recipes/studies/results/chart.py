"""A chart of runs: a row per column of the table, a marker with its standard error per row of the
table.
"""

from collections.abc import Sequence

from matplotlib.figure import Figure

from common.figures import PAGE, plt
from common.scores import proper_name
from figures.drawing import legend, styles, title_of
from results.lines import Row, columns, mean_and_error


def draw(rows: Sequence[Row], score: str = "main") -> Figure:
    """Draw the mean over the seeds of each row in every column that has one, with its standard
    error.
    """
    shown, style = columns(rows, score), styles(row.label for row in rows)
    step = 0.8 / len(rows)
    figure, axes = plt.subplots(figsize=(PAGE, 0.8 + max(0.22, 0.11 * len(rows)) * len(shown)))
    for number, row in enumerate(rows):
        scores, shift = row.scores(shown), (number - (len(rows) - 1) / 2) * step
        points = [(place + shift, *mean_and_error([*scores[name].values()]))
                  for place, name in enumerate(shown) if name in scores]  # fmt: skip
        if points:
            places, means, errors = zip(*points, strict=True)
            own = style[row.label] | {"linestyle": "none"}
            axes.errorbar(
                means,
                places,
                xerr=[error or 0 for error in errors],
                label=row.label,
                capsize=2,
                **own,
            )
    axes.set_yticks(range(len(shown)), map(proper_name, shown))
    axes.set_ylim(len(shown) - 0.5, -0.5)
    for between in range(1, len(shown)):
        axes.axhline(between - 0.5, color="black", alpha=0.15, linewidth=0.5)
    seeds = [len(cell.seeds) for row in rows for cell in row.cells.values()]
    axes.set(
        xlabel=f"validation {'accuracy' if score == 'accuracy' else 'score'} (%)",
        title=title_of(seeds),
    )
    axes.grid(axis="x", alpha=0.3)
    return legend(figure)
