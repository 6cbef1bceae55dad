"""Compare how long methods train until they reach a share of full fine-tuning's best validation score.

    python recipes/time_to_score.py runs/study
    python recipes/time_to_score.py runs/study --share 0.95 --baseline "full, bf16 True"   # if several rows are "full"

The runs are those of one or more sweeps. The goal of a task is the given share of the baseline's best score, as a mean
over its seeds. Each run's time is that of its training steps until the first evaluation that reaches the goal, so
evaluations should be frequent (--eval_strategy steps --save_strategy steps). Evaluations and checkpoints do not count.
On a CPU it is the time of the processor, so other work on the machine does not matter much. Writes time_to_score.md
into the folder.
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
        RecipeError: If no row is the baseline, or a score is a loss, of which a share says nothing.
    """
    base = next((row for row in rows if row.label == baseline), None)
    if base is None:
        raise RecipeError(f"--baseline must be one of: {'; '.join(row.label for row in rows)}; got {baseline!r}.")
    goals = {task: goal(cell, share) for task, cell in base.cells.items()}
    heads = [f"{proper_name(task)}, {value:.1f} {proper_name(cell.best['chosen_by'])}"
             for (task, value), cell in zip(goals.items(), base.cells.values(), strict=True)]  # fmt: skip
    of_baseline = {task: seconds_until(cell, goals[task]) for task, cell in base.cells.items()}
    lines = [["method", *heads], ["---"] * (1 + len(heads))]
    for row in rows:
        times = {task: seconds_until(row.cells[task], value) for task, value in goals.items() if task in row.cells}
        lines.append([row.label, *(describe(times.get(task, []), of_baseline[task]) for task in goals)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def goal(cell: Cell, share: float) -> float:
    """Return a share of the mean over the seeds of a baseline's best score, in percent."""
    score = cell.best["chosen_by"]
    if score.endswith("loss"):
        raise RecipeError(f"{cell.best['task']} was chosen by {score}, of which a share says nothing. Use a score.")
    return share * mean(in_percent(one, score, one["best_score"]) for one in cell.seeds.values())


def seconds_until(cell: Cell, goal: float) -> list[float | None]:
    """Return for each seed the time of training at the first evaluation that reaches a score; None if none does.

    Args:
        cell: The runs of a method on a task.
        goal: The score, in percent.

    Raises:
        RecipeError: If the evaluations of a run have no times.
    """
    times: list[float | None] = []
    for results in cell.seeds.values():
        score, epochs = results["chosen_by"], results["epochs"]
        if any("seconds" not in epoch for epoch in epochs):
            raise RecipeError(
                f"A run on {results['task']} has no times, as an earlier version of the recipes wrote it. Run it "
                "again with --overwrite_output_dir."
            )
        reached = (epoch["seconds"] for epoch in epochs if in_percent(results, score, epoch[score]) >= goal)
        times.append(next(reached, None))
    return times


def describe(times: Sequence[float | None], of_baseline: Sequence[float | None]) -> str:
    """Return a table's cell: the mean over the seeds, their range, and the ratio to the baseline's mean."""
    reached = [time for time in times if time is not None]
    if not times or len(reached) < len(times):
        return f"reached by {len(reached)} of {len(times)} seeds" if times else ""
    spread = f" ({min(reached):.0f} to {max(reached):.0f})" if len(reached) > 1 else ""
    whole = [time for time in of_baseline if time is not None]
    ratio = f", {mean(reached) / mean(whole):.2f}" if len(whole) == len(of_baseline) else ""
    return f"{mean(reached):.0f} s{spread}{ratio}"


if __name__ == "__main__":
    end_with_one_line(main)
