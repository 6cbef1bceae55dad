"""Compare how long methods train until they reach a share of full fine-tuning's best validation score.

    python recipes/time_to_score.py runs/study
    python recipes/time_to_score.py runs/study --share 0.95 --baseline "full, bf16 True"   # if several rows are "full"

The runs are those of one or more sweeps. Scores are means over a method's seeds. The goal of a task is the given share
of the baseline's best score. A method's time is that of its training steps until the first evaluation that reaches the
goal, so evaluations should be frequent (--eval_strategy steps --save_strategy steps). Evaluations and checkpoints do
not count. On a CPU it is the time of the processor, so other work on the machine does not matter much. Writes
time_to_score.md into the folder.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from analysis.grid import finished
from study.papers import proper_name
from study.results import Cell, Row, arrange, in_percent
from sweeping.runs import CHOICES, CHOSEN
from training.errors import RecipeError, end_with_one_line


def main() -> None:
    """Read the command line, print the table and write it into the folder."""
    parser = argparse.ArgumentParser(
        usage="python recipes/time_to_score.py FOLDER [flags]",
        description=__doc__.split("\n\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="Folder of a sweep, or of several.")
    parser.add_argument("--share", type=float, default=0.99, help="Share of the baseline's best score.")
    parser.add_argument("--baseline", default="full", help="A row of the table.")
    parser.add_argument("--choose", nargs="+", choices=CHOICES, default=CHOSEN, help="What validation chooses.")
    arguments = parser.parse_args()
    if not 0 < arguments.share <= 1:
        raise RecipeError(f"--share must be greater than 0 and at most 1, got {arguments.share}, such as 0.99.")
    table = compare(arrange(finished(arguments.folder), arguments.choose), arguments.baseline, arguments.share)
    print(table)
    (arguments.folder / "time_to_score.md").write_text(f"{table}\n")


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
        RecipeError: If the runs share no evaluations, one has no times, or the runs were chosen by a loss.
    """
    runs = []
    for results in cell.seeds.values():
        task, score, epochs = results["task"], results["chosen_by"], results["epochs"]
        if score.endswith("loss"):
            raise RecipeError(f"{task} was chosen by {score}, of which a share says nothing. Use a score.")
        if any("seconds" not in epoch for epoch in epochs):
            raise RecipeError(
                f"A run on {task} has no times, as an earlier version of the recipes wrote it. Run it again with "
                "--overwrite_output_dir."
            )
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


if __name__ == "__main__":
    end_with_one_line(main)
