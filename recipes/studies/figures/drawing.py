"""What the figures share: lines with bands in panels that fit on a page, and one legend below all
panels.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter

from common.figures import COLORS, COLUMN, MARKERS, PAGE, plt
from results.lines import mean_and_error


Rows = Sequence[Mapping[str, Any]]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, and print the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"Numbers: {path}")


def panels(
    count: int, height: float = 0.8 * COLUMN, most: int = 3, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, at most as wide as a page."""
    across = min(count, most)
    down = -(-count // across)
    size = (COLUMN if count == 1 else PAGE, height * down)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, **options)
    for empty in axes.flat[count:]:
        empty.remove()
    return figure, [*axes.flat[:count]]


def styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return a color and a marker for each name; from the seventh on, colors repeat with a dashed
    line.
    """
    return {
        name: {
            "color": COLORS[number % len(COLORS)],
            "marker": MARKERS[(number + number // len(COLORS)) % len(MARKERS)],
            "linestyle": ("-", "--", ":", "-.")[number // len(COLORS) % 4],
        }
        for number, name in enumerate(dict.fromkeys(names))
    }


def band(values: Sequence[float]) -> dict[str, float]:
    """Return the mean of a point of `draw_line`, and one standard error below and above it."""
    middle, error = mean_and_error(values)
    return {"low": middle - (error or 0), "middle": middle, "high": middle + (error or 0)}


def draw_line(axes: Axes, points: Rows, x: str, **style: Any) -> None:
    """Draw points, which have "low", "middle" and "high", as a line with a band, or as a bar if
    there is only one.
    """
    at, *values = zip(*sorted(tuple(point[key] for key in (x, "low", "middle", "high")) for point in points),
                      strict=True)  # fmt: skip
    low, middle, high = values
    if len(at) > 1:
        axes.fill_between(at, low, high, color=style["color"], alpha=0.2, linewidth=0)
    else:
        axes.vlines(at, low, high, color=style["color"])
    if len(at) > 12:
        style["marker"] = ""
    axes.plot(at, middle, **style)


def show_counts(axes: Axes) -> None:
    """Make the horizontal axis one of large numbers, on a logarithmic scale."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, columns: int = 2, **options: Any) -> Figure:
    """Put one legend with the labels of all panels below them, so that it lies over no line; return
    the figure.
    """
    labelled = [axes.get_legend_handles_labels() for axes in figure.axes]
    found = {
        fill(label, 60): handle for one in labelled for handle, label in zip(*one, strict=True)
    }
    if found:
        columns = columns if figure.get_figwidth() > COLUMN else 1
        figure.legend(
            [*found.values()], [*found], loc="outside lower center", ncols=columns, **options
        )
    return figure


def seeds_of(numbers: Iterable[int]) -> str:
    found = {*numbers}
    few, many = min(found), max(found)
    return "one seed" if many == 1 else f"{many} seeds" if few == many else f"{few} to {many} seeds"


def title_of(seeds: Iterable[int]) -> str:
    """Return what lines and bands are."""
    named = seeds_of(seeds)
    return "One seed" if named == "one seed" else f"Mean and standard error of {named}"
