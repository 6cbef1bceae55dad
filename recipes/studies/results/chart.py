"""A chart of runs: a column of the table is a row of markers, one for each line of the table.

The last row is the mean over the columns, for lines that have all of them. Of accuracies, the
papers' scores on the same validation splits are drawn as hollow markers.
"""

from collections.abc import Mapping, Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.drawing import Styles, legend, styles, title_of
from results.lines import Columns, TableLine, find_columns
from results.means import MeanAndError, mean_and_error, mean_over
from results.numbers import PAPER_LINES, SECOND_COLUMNS
from run.figures import PAGE
from tasks.scores import proper_name


MEAN = "mean"
Scores = dict[str, MeanAndError]  # by row


def draw(lines: Sequence[TableLine], score: str = "main") -> Figure:
    """Draw each line's mean over the seeds in every column that has one, with its error."""
    columns = find_columns(lines, score)
    rows = [*columns]
    if len(columns) > 1:
        rows.append(MEAN)
    ours = {}
    for line in lines:
        by_name = line.scores(columns).items()
        of_line = {name: mean_and_error([*by_seed.values()]) for name, by_seed in by_name}
        ours[line.label] = _with_mean(of_line, columns)
    papers = _scores_of_papers(columns) if score == "accuracy" else {}
    style = styles([*ours, *papers])
    for label in papers:
        style[label]["markerfacecolor"] = "none"
    height = 0.8 + max(0.22, 0.11 * len(style)) * len(rows)
    figure, axes = plt.subplots(figsize=(PAGE, height))
    _draw_markers(axes, {**ours, **papers}, rows, style)
    axes.set_yticks(range(len(rows)), map(proper_name, rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for between in range(1, len(rows)):
        axes.axhline(between - 0.5, color="black", alpha=0.15, linewidth=0.5)
    axes.set_xlabel(f"validation {score.replace('main', 'score')} (%)")
    axes.set_title(title_of(len(cell.seeds) for line in lines for cell in line.cells.values()))
    axes.grid(axis="x", alpha=0.3)
    return legend(figure)


def _draw_markers(
    axes: Axes, by_label: Mapping[str, Scores], rows: Sequence[str], style: Styles
) -> None:
    """Draw the scores of each line, beside those of the others in a row."""
    step = 0.8 / len(by_label)  # between the markers of a row
    for number, (label, scores) in enumerate(by_label.items()):
        shift = (number - (len(by_label) - 1) / 2) * step
        drawn = [name for name in rows if name in scores]
        if drawn:
            axes.errorbar(
                [scores[name][0] for name in drawn],
                [rows.index(name) + shift for name in drawn],
                xerr=[scores[name][1] or 0 for name in drawn],
                capsize=2,
                **{**style[label], "linestyle": "none", "label": label},
            )


def _scores_of_papers(columns: Columns) -> dict[str, Scores]:
    """Return the papers' accuracies on validation splits, by the labels of their lines."""
    second_names = {column: name for name, column in SECOND_COLUMNS.items()}
    printed_names = {second_names.get(column, name): name for name, column in columns.items()}
    on_validation = PAPER_LINES[PAPER_LINES.index.str.endswith("(dev)")]
    printed = on_validation.reindex(columns=[*printed_names]).rename(columns=printed_names)
    papers = {}
    for label, line in printed.astype(float).dropna(how="all").iterrows():
        scores: Scores = {name: (score, None) for name, score in line.dropna().items()}
        papers[label] = _with_mean(scores, columns)
    return papers


def _with_mean(scores: Scores, columns: Mapping[str, object]) -> Scores:
    """Add the mean over all columns, unless a score is missing."""
    if len(scores) < len(columns) or not scores:
        return scores
    return {**scores, MEAN: mean_over([*scores.values()])}
