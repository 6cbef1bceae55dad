"""Compare how long methods train until they reach a share of full fine-tuning's best validation score.

Scores are means over a method's seeds. The goal of a task is the given share of the baseline's best score. A method's
time is that of its training steps until the first evaluation that reaches the goal, so evaluations should be frequent
(--eval_strategy steps --save_strategy steps). Evaluations and checkpoints do not count. On a CPU it is the time of the
processor, so other work on the machine does not matter much.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from common.edge import RecipeError
from common.glue_report import proper_name
from papers.results import Cell, Row, arrange, finished, in_percent
from sweeping.runs import CHOICES, CHOSEN


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the goal."""
    parser.add_argument("--share", type=float, default=0.99, help="Share of the baseline's best score.")
    parser.add_argument("--baseline", default="full", help="A row of the table.")
    parser.add_argument("--choose", nargs="+", choices=CHOICES, default=CHOSEN, help="What validation chooses.")


def main(arguments: argparse.Namespace) -> None:
    """Print the table and write it into the folder."""
    folder = Path(arguments.folder)
    table = compare(arrange(finished(folder), arguments.choose), arguments.baseline, arguments.share)
    print(table)
    (folder / "time_to_score.md").write_text(f"{table}\n")


def compare(rows: Sequence[Row], baseline: str, share: float) -> str:
    """Return a Markdown table with a row per method and, for each task, its times and their ratio to the baseline's.

    Raises:
        RecipeError: If no row is the baseline, or a score is a loss or not positive, of which a share says nothing.
    """
    base = next((row for row in rows if row.label == baseline), None)
    if base is None:
        raise RecipeError(f"--baseline must be one of: {'; '.join(row.label for row in rows)}; got {baseline!r}.")
    best = {task: best_score(cell) for task, cell in base.cells.items()}
    if low := [task for task, score in best.items() if score <= 0]:
        raise RecipeError(
            f"The baseline's best score must be positive, got {best[low[0]]:.2f} on {low[0]}. Train longer."
        )
    goals = {task: share * score for task, score in best.items()}
    heads = [f"{proper_name(task)}, {value:.1f} {proper_name(cell.best['chosen_by'])}"
             for (task, value), cell in zip(goals.items(), base.cells.values(), strict=True)]  # fmt: skip
    of_baseline = {task: mean(seconds_until(cell, goals[task])) for task, cell in base.cells.items()}
    lines = [["method", *heads], ["---"] * (1 + len(heads))]
    for row in rows:
        cells = ((row.cells.get(task), task) for task in goals)
        times = (describe(seconds_until(cell, goals[task]), of_baseline[task]) if cell else "" for cell, task in cells)
        lines.append([row.label, *times])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mean_curve(cell: Cell) -> list[tuple[float, list[float]]]:
    """Return the evaluations of a method on a task, in their order: the mean score in percent, and each seed's time.

    Evaluations that not every seed has, such as those of a run that stopped early, are left out.

    Raises:
        RecipeError: If the runs share no evaluations, or were chosen by a loss.
    """
    runs = []
    for results in cell.seeds.values():
        task, score, epochs = results["task"], results["chosen_by"], results["epochs"]
        if score.endswith("loss"):
            raise RecipeError(f"{task} was chosen by {score}, of which a share says nothing. Use a score.")
        runs.append({epoch["step"]: (in_percent(results, score, epoch[score]), epoch["seconds"]) for epoch in epochs})
    steps = sorted(set.intersection(*map(set, runs)))
    if not steps:
        raise RecipeError(f"The runs on {task} must share evaluations, got none at the same step. Evaluate all alike.")
    return [(mean(run[step][0] for run in runs), [run[step][1] for run in runs]) for step in steps]


def best_score(cell: Cell) -> float:
    """Return the best mean score of a method on a task, in percent."""
    return max(score for score, _ in mean_curve(cell))


def seconds_until(cell: Cell, goal: float) -> list[float]:
    """Return each seed's time of training at the first evaluation whose mean score reaches a goal; [] if none does."""
    return next((times for score, times in mean_curve(cell) if score >= goal), [])


def describe(times: Sequence[float], of_baseline: float) -> str:
    """Return a table's cell: the mean time over the seeds, their range, and the ratio to the baseline's mean."""
    if not times:
        return "not reached"
    spread = f" ({min(times):.0f} to {max(times):.0f})" if len(times) > 1 else ""
    return f"{mean(times):.0f} s{spread}, {mean(times) / of_baseline:.2f}"
