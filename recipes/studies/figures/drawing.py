"""What the figures share: curves with bands, panels that fit on a page, one legend below them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from results.means import mean_and_error
from run.figures import COLORS, COLUMN, MARKERS, PAGE


Point = dict[str, Any]  # what a figure draws at one place, also written as a line of JSON
Points = Sequence[Mapping[str, Any]]
Style = dict[str, Any]
Styles = Mapping[str, Style]  # by name

LINE_STYLES = ("-", "--", ":", "-.")
MAX_MARKERS = 12  # on a curve; with more points, it has none


def write_points(path: Path, points: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, and print the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(point)}\n" for point in points))
    print(f"Numbers: {path}")


def select(points: Points, **values: Any) -> list[Mapping[str, Any]]:
    """Return the points that have these values."""
    return [point for point in points if values.items() <= point.items()]


def values_of(points: Points, key: str) -> list[Any]:
    """Return what the points have under a key."""
    return [point[key] for point in points]


def panels(
    count: int, height: float = 0.8 * COLUMN, most: int = 3, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, at most as wide as a page."""
    across = min(count, most)
    down = -(-count // across)
    width = COLUMN if count == 1 else PAGE
    size = (width, height * down)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, **options)
    for empty in axes.flat[count:]:
        empty.remove()
    return figure, [*axes.flat[:count]]


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Return a color and a marker for each name.

    From the seventh on, colors repeat with a dashed line.
    """
    by_name: dict[str, Style] = {}
    for number, name in enumerate(dict.fromkeys(names)):
        round_of_colors, color = divmod(number, len(COLORS))
        by_name[name] = {
            "color": COLORS[color],
            "marker": MARKERS[(number + round_of_colors) % len(MARKERS)],
            "linestyle": LINE_STYLES[round_of_colors % len(LINE_STYLES)],
        }
    return by_name


def band(values: Sequence[float]) -> dict[str, float]:
    """Return the height of a point of `draw_curve`: the mean, and one standard error around it."""
    mean, error = mean_and_error(values)
    error = error or 0
    return {"low": mean - error, "middle": mean, "high": mean + error}


def draw_curve(axes: Axes, points: Points, x: str, **style: Any) -> None:
    """Draw points, which have "low", "middle" and "high", as a curve with a band.

    A single point has a bar instead.
    """
    points = sorted(points, key=lambda point: (point[x], point["low"]))
    at, low, middle = values_of(points, x), values_of(points, "low"), values_of(points, "middle")
    high = values_of(points, "high")
    if len(at) > 1:
        axes.fill_between(at, low, high, color=style["color"], alpha=0.2, linewidth=0)
    else:
        axes.vlines(at, low, high, color=style["color"])
    if len(at) > MAX_MARKERS:
        style["marker"] = ""
    axes.plot(at, middle, **style)


def draw_curves(
    axes: Axes, points: Points, x: str, key: str, style: Styles, label: Callable[[str], str] = str
) -> None:
    """Draw a curve for each name of `style` that points have under a key."""
    for name in style:
        curve = select(points, **{key: name})
        if curve:
            draw_curve(axes, curve, x, label=label(name), **style[name])


def show_counts(axes: Axes) -> None:
    """Make the horizontal axis one of large numbers, on a logarithmic scale.

    Powers of ten are marked, and numbers between them where the range is narrow.
    """
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    if high < 5 * low:
        axes.xaxis.set_major_locator(MaxNLocator(4))
    else:
        axes.xaxis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, columns: int = 2, **options: Any) -> Figure:
    """Put one legend with the labels of all panels below them; return the figure."""
    handles = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[fill(label, 60)] = handle
    if handles:
        if figure.get_figwidth() <= COLUMN:
            columns = 1
        below = figure.legend(
            [*handles.values()],
            [*handles],
            loc="outside lower center",
            ncols=columns,
            **options,
        )
        inches = below.get_window_extent().height / figure.dpi
        figure.set_figheight(max(figure.get_figheight(), inches + 1.5))  # the rest is for the axes
    return figure


def seeds_of(counts: Iterable[int]) -> str:
    """Return numbers of seeds in words."""
    distinct = sorted({*counts})
    fewest, most = distinct[0], distinct[-1]
    if most == 1:
        return "one seed"
    if fewest == most:
        return f"{most} seeds"
    return f"{fewest} to {most} seeds"


def title_of(counts: Iterable[int]) -> str:
    """Return what curves and bands are, by the numbers of seeds."""
    seeds = seeds_of(counts)
    if seeds == "one seed":
        return "One seed"
    return f"Mean and standard error of {seeds}"
