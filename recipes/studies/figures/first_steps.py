"""What happens in the first steps of runs that learn, and of runs that do not.

The folder is that of a table of stuck_runs.py, with a file for each run. One panel has how far
[CLS] differs between the texts after the last layer, the other what the adapters add to a token, as
a share of what they read, in the layer where it is most. A curve is the mean over the seeds of a
setting, its band one standard error.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from figures.drawing import (
    Point,
    Points,
    band,
    draw_curve,
    legend,
    panels,
    select,
    styles,
    title_of,
    values_of,
    write_points,
)
from run.edge import RecipeError
from run.figures import save


PANELS = {
    "spread": "Spread of [CLS] after the last layer",
    "added": "Share that adapters add to a token",
}
INTERVAL = 5  # steps between two points


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", nargs="+", help="Settings to draw; default: all.")


def main(folder: Path, arguments: argparse.Namespace) -> None:
    runs = read(folder)
    settings = arguments.settings or sorted({setting for setting, _ in runs})
    points = summarize(runs, settings)
    write_points(folder / "first_steps.jsonl", points)
    seeds = Counter(setting for setting, _ in runs)
    save(draw(points, [seeds[setting] for setting in settings]), folder / "first_steps")


def read(folder: Path) -> list[tuple[str, pd.DataFrame]]:
    """Return the setting and the steps of each run."""
    runs = []
    for path in sorted(folder.glob("*-*.csv")):
        setting, _, _seed = path.stem.rpartition("-")
        runs.append((setting, pd.read_csv(path)))
    if not runs:
        raise RecipeError(
            f"{folder} has no reference-0.csv or the like, which stuck_runs.py writes."
        )
    return runs


def summarize(runs: Sequence[tuple[str, pd.DataFrame]], settings: Iterable[str]) -> list[Point]:
    """Return a point per setting, panel and interval of steps."""
    points = []
    for setting in settings:
        of_setting = [steps for name, steps in runs if name == setting]
        shown = {
            "spread": [_columns(steps, "spread_").iloc[:, -1] for steps in of_setting],
            "added": [_columns(steps, "added_").max(axis=1) for steps in of_setting],
        }
        for panel, curves in shown.items():
            at_step = pd.concat(curves, axis=1).rolling(INTERVAL).mean()
            for step in range(INTERVAL, len(at_step) + 1, INTERVAL):
                values = at_step.iloc[step - 1].dropna().tolist()
                points.append({"setting": setting, "panel": panel, "step": step, **band(values)})
    return points


def _columns(steps: pd.DataFrame, beginning: str) -> pd.DataFrame:
    """Return the columns of the layers, the lowest one first."""
    return steps[[name for name in steps if name.startswith(beginning)]]


def draw(points: Points, counts: Iterable[int]) -> Figure:
    figure, axes = panels(len(PANELS), layout="constrained")
    by_setting = styles(values_of(points, "setting"))
    for panel, axis in zip(PANELS, axes, strict=True):
        for setting, style in by_setting.items():
            curve = select(points, panel=panel, setting=setting)
            draw_curve(axis, curve, "step", label=setting, **style)
        axis.set(title=PANELS[panel], xlabel="step", yscale="log")
    figure.suptitle(title_of(counts))
    return legend(figure, columns=3)
