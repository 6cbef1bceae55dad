"""Compare the variants of the adapter that Houlsby et al. 2019 found no better (section 3.6).

The runs are those of recipes/variants.py. Differences are to the paper's adapter at the best epoch of each run, as
means over the seeds with one standard error, paired by seed.
"""

import argparse
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from common.edge import RecipeError
from common.figures import COLORS, COLUMN, MARKERS, plt, save
from common.glue_report import proper_name
from papers.results import Results, finished, in_percent, mean_and_error
from papers.runs import write_lines
from papers.tables import difference


PAPER = "paper"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the folder is enough."""


def main(arguments: argparse.Namespace) -> None:
    """Write the numbers and the figure."""
    folder = Path(arguments.folder)
    rows = summarize(finished(folder))
    write_lines(folder / "variants.jsonl", rows)
    save(draw(rows), folder / "variants")


def best_score(results: Results) -> float:
    """Return the score of a run's best epoch in percent; the weights of the last one are kept."""
    name = results["chosen_by"]
    scores = [in_percent(results, name, epoch[name]) for epoch in results["epochs"]]
    return min(scores) if name.endswith("loss") else max(scores)


def summarize(runs: Iterable[Results]) -> list[dict[str, Any]]:
    """Return a row per task and variant: scores in percent, and their mean minus that of the paper's adapter.

    Raises:
        RecipeError: If a task has no run of the paper's adapter.
    """
    found: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        variants = found.setdefault(run["task"], {})
        variants.setdefault(run["arguments"]["variant"], {})[run["seed"]] = best_score(run)
    if missing := [task for task, variants in found.items() if PAPER not in variants]:
        raise RecipeError(f"Variants are compared with --variant {PAPER}, which has no run on {missing}.")
    return [
        {
            "task": task, "variant": variant, "mean": mean_and_error([*scores.values()])[0], "change": change,
            "error": error, "scores": scores,
        }
        for task, variants in found.items()
        for variant, scores in variants.items()
        for change, error in [difference(scores, variants[PAPER])]
    ]  # fmt: skip


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw a row per variant, with a marker per task."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(figsize=(COLUMN, 0.9 + 0.22 * len(variants)))
    axes.axvline(0, color="black", linewidth=0.8, linestyle="--")
    for number, (task, color, marker) in enumerate(zip(tasks, cycle(COLORS), cycle(MARKERS))):
        own = [row for row in rows if row["task"] == task]
        heights = [variants.index(row["variant"]) + 0.15 * (number - (len(tasks) - 1) / 2) for row in own]
        changes, errors = [row["change"] for row in own], [row["error"] or 0 for row in own]
        axes.errorbar(changes, heights, xerr=errors, fmt=marker, color=color, label=proper_name(task), linewidth=1)
    axes.set_yticks(range(len(variants)), [variant.replace("_", " ") for variant in variants])
    axes.invert_yaxis()
    seeds = max(len(row["scores"]) for row in rows)
    title = f"Variants of the adapter, {seeds} seeds" if seeds > 1 else "Variants of the adapter, one seed"
    axes.set(xlabel="score - the paper's adapter's (points)", title=title)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(3, len(tasks)))
    return figure
