"""What the GLUE recipe writes beside results.json: predictions, evaluations, and the averages over all tasks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from common.errors import RecipeError
from common.results import write_whole
from common.scores import check_finite
from numpy.typing import NDArray
from study_papers import COLUMNS, PAPER_ROWS, mean_of_nine, server_average
from submission import TEST_SETS, pack, problems


def references(task: str) -> list[dict[str, Any]]:
    """What Houlsby et al. report for a task, fine-tuned and with adapters of size 64, for a card beside our scores."""
    columns = {column: score for column, (of_task, score) in COLUMNS.items() if of_task == task}
    found = []
    for row in PAPER_ROWS:
        scores = {columns[column]: value / 100 for column, value in row.by_column.items() if column in columns}
        if scores and row.label.startswith("Houlsby") and row.label.endswith((": full", ": r 64")):
            found.append({"name": f"{row.label} ({row.split})", "scores": scores})
    return found


def write_predictions(output_dir: str, outputs: Mapping[str, NDArray[np.floating]]) -> None:
    """Writes a model's outputs, by test set, as GLUE's files into the folder "submission"."""
    folder = Path(output_dir, "submission")
    folder.mkdir(parents=True, exist_ok=True)
    for name, output in outputs.items():
        check_finite(output)
        lines, rows = TEST_SETS[name].lines(output), TEST_SETS[name].rows
        write_whole(folder / f"{name}.tsv", "\n".join([*lines, ""]))
        note = "" if len(output) == rows else f", but GLUE's test set has {rows:,}"
        print(f"{folder / name}.tsv: {len(output):,} predictions{note}")


def write_evaluation(output_dir: str, task: str, saved: str, scores: Mapping[str, float]) -> None:
    """Prints the scores of what was saved, and writes them to evaluation.json."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    content = {"task": task, "evaluated": saved, "scores": scores}
    write_whole(Path(output_dir, "evaluation.json"), json.dumps(content, indent=2) + "\n")
    print(f"{task}, {saved}: {', '.join(f'{name} {score:.4f}' for name, score in scores.items())}")


def write_all(folder: str, scores: Mapping[str, Mapping[str, float]], predicted: bool) -> None:
    """Prints the scores of all tasks and both averages, and writes them to all.json; the submission beside it.

    Args:
        folder: Of the runs, with {task} in it. What comes before it is what both files' names begin with, so that
            "runs/r8-{task}" and "runs/r64-{task}" do not write over each other's.
        scores: By task.
        predicted: Whether there are predictions, which are packed as submission.zip and checked.

    Raises:
        RecipeError: If GLUE's server would refuse the submission.
    """
    before = folder.partition("{task}")[0]
    averages = {"mean_of_nine_columns": mean_of_nine(scores), "server_average": server_average(scores)}
    write_whole(Path(f"{before}all.json"), json.dumps({"scores": scores, **averages}, indent=2) + "\n")
    for task, own in scores.items():
        shown = (f"{name} {100 * score:.1f}" for name, score in own.items() if not name.endswith("loss"))
        print(f"{task:<5} {', '.join(shown)}")
    nine, server = averages.values()
    print(f"Mean of the papers' nine columns (MNLI's two apart, MRPC and QQP by F1, no WNLI): {100 * nine:.1f}")
    print(f"GLUE server's average (over nine tasks with WNLI, each the mean of its scores): {100 * server:.1f}")
    if not predicted:
        return
    archive = Path(f"{before}submission.zip")
    files = (Path(folder.replace("{task}", task), "submission") for task in scores)
    pack((file for path in files for file in sorted(path.glob("*.tsv"))), archive)
    found = problems(archive)
    if found:
        raise RecipeError(f"GLUE's server would refuse {archive}: {'; '.join(found)}.")
    print(f"{archive} is a complete submission.")
