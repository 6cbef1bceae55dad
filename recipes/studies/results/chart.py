"""A chart of runs: a column of the table is a row of markers, one for each line of the table.

The last row is the mean over the columns, for lines that have all of them. Of accuracies, the
papers' scores on the same validation splits are drawn as hollow markers.
"""

from collections.abc import Mapping, Sequence

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from common.figures import PAGE
from common.scores import proper_name
from figures.drawing import Style, legend, styles, title_of
from results.lines import Columns, TableLine, find_columns
from results.means import MeanAndError, mean_and_error, mean_over
from results.numbers import PAPER_LINES, SECOND_COLUMNS


MEAN = "mean"
Scores = dict[str, MeanAndError]  # by row


def draw(lines: Sequence[TableLine], score: str = "main") -> Figure:
    """Draw each line's mean over the seeds in every column that has one, with its error."""
    columns = find_columns(lines, score)
    rows = [*columns, MEAN] if len(columns) > 1 else [*columns]
    ours = {line.label: _scores_of_line(line, columns) for line in lines}
    papers = _scores_of_papers(columns) if score == "accuracy" else {}
    style: dict[str, Style] = styles([*ours, *papers])
    for label in papers:
        style[label]["markerfacecolor"] = "none"
    height = 0.8 + max(0.22, 0.11 * len(style)) * len(rows)
    figure, axes = plt.subplots(figsize=(PAGE, height))
    step = 0.8 / len(style)  # between the markers of a row
    for number, (label, scores) in enumerate({**ours, **papers}.items()):
        shift = (number - (len(style) - 1) / 2) * step
        present = [name for name in rows if name in scores]
        heights = [rows.index(name) + shift for name in present]
        means = [scores[name][0] for name in present]
        errors = [scores[name][1] or 0 for name in present]
        if present:
            marker = style[label] | {"linestyle": "none"}
            axes.errorbar(means, heights, xerr=errors, label=label, capsize=2, **marker)
    axes.set_yticks(range(len(rows)), map(proper_name, rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for between in range(1, len(rows)):
        axes.axhline(between - 0.5, color="black", alpha=0.15, linewidth=0.5)
    axes.set_xlabel(f"validation {'accuracy' if score == 'accuracy' else 'score'} (%)")
    axes.set_title(title_of(_count_seeds(lines)))
    axes.grid(axis="x", alpha=0.3)
    return legend(figure)


def _scores_of_line(line: TableLine, columns: Columns) -> Scores:
    """Return a line's means over the seeds with their errors."""
    scores = {}
    for name, by_seed in line.scores(columns).items():
        scores[name] = mean_and_error([*by_seed.values()])
    return _with_mean(scores, columns)


def _scores_of_papers(columns: Columns) -> dict[str, Scores]:
    """Return the papers' accuracies on validation splits, by the labels of their lines."""
    second_names = {column: name for name, column in SECOND_COLUMNS.items()}
    papers = {}
    for label, paper in PAPER_LINES.items():
        scores: Scores = {}
        for name, column in columns.items():
            score = paper.scores.get(second_names.get(column, name))
            if score is not None:
                scores[name] = (score, None)
        if scores and label.endswith("(dev)"):
            papers[label] = _with_mean(scores, columns)
    return papers


def _with_mean(scores: Scores, columns: Mapping[str, object]) -> Scores:
    """Add the mean over all columns, unless a score is missing."""
    if len(scores) < len(columns) or not scores:
        return scores
    return {**scores, MEAN: mean_over([*scores.values()])}


def _count_seeds(lines: Sequence[TableLine]) -> list[int]:
    counts = []
    for line in lines:
        counts += [len(cell.seeds) for cell in line.cells.values()]
    return counts
