"""What the figures share: panels that fit on a page, lines with bands, boxes, and one legend below all panels."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.figures import COLORS, COLUMN, MARKERS, PAGE, plt
from papers.results import MeanAndError


Rows = Sequence[Mapping[str, Any]]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, and print the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"Numbers: {path}")


def panels(count: int, height: float = 0.8 * COLUMN, most: int = 3, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, at most as wide as a page."""
    across = min(count, most)
    down = -(-count // across)
    size = (COLUMN if count == 1 else PAGE, height * down)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, **options)
    for empty in axes.flat[count:]:
        empty.remove()
    return figure, [*axes.flat[:count]]


def styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return a color and a marker for each name; from the seventh on, colors repeat with a dashed line."""
    return {
        name: {
            "color": COLORS[number % len(COLORS)],
            "marker": MARKERS[(number + number // len(COLORS)) % len(MARKERS)],
            "linestyle": ("-", "--", ":", "-.")[number // len(COLORS) % 4],
        }
        for number, name in enumerate(dict.fromkeys(names))
    }


def draw_line(axes: Axes, points: Mapping[float, MeanAndError], **style: Any) -> None:
    """Draw means by x as a line, with one standard error as a band, or as a bar where there is a single point."""
    draw_band(axes, [(x, middle - (error or 0), middle, middle + (error or 0))
                     for x, (middle, error) in sorted(points.items())], **style)  # fmt: skip


def draw_band(axes: Axes, points: Sequence[tuple[float, float, float, float]], **style: Any) -> None:
    """Draw points (x, low, middle, high) as a line with a band, or as a bar where there is a single one."""
    x, low, middle, high = zip(*points, strict=True)
    if len(points) > 1:
        axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
    else:
        axes.vlines(x, low, high, color=style["color"])
    if len(points) > 12:
        style["marker"] = ""
    axes.plot(x, middle, **style)


def draw_boxes(
    axes: Axes, places: Sequence[float], scores: Sequence[Sequence[float]], colors: Sequence[str], hatch: str = "",
    width: float = 0.35, vertical: bool = True,
) -> None:  # fmt: skip
    """Draw box plots with all scores as points."""
    boxes = axes.boxplot(
        scores, positions=places, widths=width, showfliers=False, patch_artist=True, medianprops={"color": "black"},
        orientation="vertical" if vertical else "horizontal", manage_ticks=False,
    )  # fmt: skip
    for place, box, values, color in zip(places, boxes["boxes"], scores, colors, strict=True):
        box.set(facecolor=color, alpha=0.4, hatch=hatch)
        points = ([place] * len(values), values) if vertical else (values, [place] * len(values))
        axes.plot(*points, ".", color="black", markersize=3, alpha=0.6)


def legend(figure: Figure, columns: int = 2, **options: Any) -> None:
    """Put one legend with the labels of all panels below them, so that it lies over no line."""
    labelled = [axes.get_legend_handles_labels() for axes in figure.axes]
    found = {label: handle for handles, labels in labelled for handle, label in zip(handles, labels, strict=True)}
    if found:
        wide = figure.get_figwidth() > COLUMN
        figure.legend([*found.values()], [*found], loc="outside lower center", ncols=columns if wide else 1, **options)


def seeds_of(number: int) -> str:
    """Return "one seed" or the number of seeds."""
    return "one seed" if number == 1 else f"{number} seeds"
