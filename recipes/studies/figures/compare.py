"""Compare methods: scores, paired differences to a baseline, sizes, and times to reach a score.

    python recipes/studies/figure.py compare runs/study            # to full fine-tuning
    python recipes/studies/figure.py compare runs/h36 --baseline "activation gelu"

Differences are paired by seed; their mean over the tasks has the standard error over the seeds.
Bytes are those of the saved weights, seconds those of the training steps, without evaluations and
checkpoints, and memory is the peak, of the GPU's or else the machine's. The time to a score is that
until the first evaluation whose mean over the seeds reaches a share of the baseline's best mean, so
evaluations should be frequent (--eval_strategy steps --save_strategy steps).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd

from figures import flags
from results.difference_table import compared, differences_to, note_on, on_other_data
from results.lines import Cell, Columns, TableLine, arrange, find_columns, join_labels
from results.means import mean_and_error, mean_over
from results.read import finished, in_percent
from results.table import MISSING, show, table_of
from run.edge import RecipeError
from run.run import lower_is_better


FULL = "full"  # the default baseline


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--baseline", default=FULL, help="A line, by its label or by a part that only it has."
    )
    parser.add_argument(
        "--share", type=float, default=0.99, help="Share of the baseline's best score to reach."
    )
    flags.add_score(parser)
    flags.add_split(parser)
    flags.add_choose(parser)


def main(folder: Path, arguments: argparse.Namespace) -> None:
    """Print the tables, and write them."""
    lines = arrange(finished(folder), arguments.choose)
    base = find_baseline(lines, arguments.baseline)
    columns = find_columns(lines, arguments.score)
    facts = summarize(lines, base, columns, arguments.split)
    tables = {
        "Methods": facts.map(_as_text),
        f"Difference to {base.label}": compared(lines, base, columns, arguments.split),
        f"Time to {arguments.share:.0%} of the best score of {base.label}": table_of(
            {line.label: times(line, base, arguments.share) for line in lines}
        ),
    }
    pages = {name: (table, note_on(table)) for name, table in tables.items() if table.size}
    show(pages, folder / "compare.md")
    facts.to_csv(folder / "compare.csv")


def find_baseline(lines: Sequence[TableLine], name: str) -> TableLine:
    """Return the line with this label, or the only one whose label has it as a part.

    A single method without full fine-tuning beside it is compared with itself: its table still has
    scores, sizes and times.
    """
    if len(lines) == 1 and name == FULL:
        return lines[0]
    exact = [line for line in lines if line.label == name]
    matching = exact or [line for line in lines if name in line.label]
    if len(matching) != 1:
        raise RecipeError(f"--baseline must be one of: {join_labels(lines)}; got {name!r}.")
    return matching[0]


def summarize(
    lines: Sequence[TableLine], base: TableLine, columns: Columns, split: str
) -> pd.DataFrame:
    """Return what is known of each line that has a score; None where the runs do not say it."""
    scored = [line for line in lines if line.scores(columns, split)]
    facts = [_facts(line, base, columns, split) for line in scored]
    return pd.DataFrame(facts, [line.label for line in scored], dtype=object)


def _facts(line: TableLine, base: TableLine, columns: Columns, split: str) -> dict[str, Any]:
    scores = line.scores(columns, split).values()
    score, score_error = mean_over([mean_and_error([*by_seed.values()]) for by_seed in scores])
    changes = differences_to(line, base, columns, split)
    difference, difference_error = mean_over([*changes.values()]) if changes else (None, None)
    runs = line.runs_of(columns)
    # In adapter/ or model/.
    weights = [file for run in runs for file in Path(run["folder"]).glob("[am][do]*/*.safetensors")]
    seconds = [run["epochs"][-1]["seconds"] for run in runs if run["epochs"]]
    peaks = [run["peak_memory"] for run in runs if "peak_memory" in run]
    return {
        "score": score,
        "score_error": score_error,
        "columns": len(scores),
        "difference": difference,
        "difference_error": difference_error,
        "trained": round(line.sizes().trained),  # parameters per task
        "bytes": sum(file.stat().st_size for file in weights) // len(runs) or None,
        "seconds": mean(seconds) if seconds else None,
        "memory": round(mean(peaks)) if peaks else None,
        "seeds": max(len(cell.seeds) for cell in line.cells_of(columns).values()),
    }


def _as_text(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def times(line: TableLine, base: TableLine, share: float) -> dict[str, str]:
    """Return for each task of the baseline how long the line trains until it reaches its goal.

    The goal is a share of the baseline's best mean score. The text has the mean over the seeds,
    their range, and the ratio to the baseline's own time.
    """
    texts = {}
    for task, cell in base.cells.items():
        curve = mean_curve(cell)
        if curve.empty or task not in line.cells or curve["score"].max() <= 0:
            continue
        if on_other_data(line, base, {task: (task, cell.best["chosen_by"])}):
            continue
        goal = share * curve["score"].max()
        seconds = _seconds_to(goal, mean_curve(line.cells[task]))
        text = "not reached"
        if seconds:
            spread = f" ({min(seconds):.0f} to {max(seconds):.0f})" if len(seconds) > 1 else ""
            ratio = mean(seconds) / mean(_seconds_to(goal, curve))
            text = f"{mean(seconds):.0f} s{spread}, {ratio:.2f}"
        texts[f"{task}, to {goal:.1f}"] = text
    return texts


def mean_curve(cell: Cell) -> pd.DataFrame:
    """Return a method's evaluations on a task in their order: the mean score over the seeds in
    percent, and the seconds of each seed. There are none if a loss has chosen.
    """
    curve = []
    if not lower_is_better(cell.best["chosen_by"]):
        for of_seeds in cell.evaluations():
            score = mean(in_percent(cell.best, evaluation) for evaluation in of_seeds)
            curve.append((score, [evaluation["seconds"] for evaluation in of_seeds]))
    return pd.DataFrame(curve, columns=["score", "seconds"])


def _seconds_to(goal: float, curve: pd.DataFrame) -> list[float]:
    """Return the seeds' times at the first evaluation that reaches the goal; none if none does."""
    reached = curve[curve["score"] >= goal]
    return [] if reached.empty else list(reached["seconds"].iloc[0])
