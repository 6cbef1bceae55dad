"""What glue.py writes besides results.json: predictions, and the averages over all tasks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.edge import RecipeError
from common.same_run import write_atomically
from common.scores import check_finite
from common.submission import TEST_SETS, pack, problems
from study.papers import COLUMNS, PAPER_ROWS, mean_of_nine, server_average


def references(task: str) -> list[dict[str, Any]]:
    """Return the scores of Houlsby et al. for a task, fine-tuned and with adapters of size 64, for a card."""
    columns = {column: score for column, (of_task, score) in COLUMNS.items() if of_task == task}
    found = []
    for row in PAPER_ROWS:
        scores = {columns[column]: value / 100 for column, value in row.by_column.items() if column in columns}
        if scores and row.label.startswith("Houlsby") and row.label.endswith((": full", ": r 64")):
            found.append({"name": f"{row.label} ({row.split})", "scores": scores})
    return found


def write_predictions(output_dir: str, outputs: Mapping[str, NDArray[np.floating]], prefix: str = "") -> None:
    """Write a model's outputs, by test set, into the folder "submission" as GLUE's server expects them.

    Args:
        output_dir: The output folder.
        outputs: The outputs.
        prefix: How the name of the folder begins.
    """
    folder = Path(output_dir, f"{prefix}submission")
    folder.mkdir(parents=True, exist_ok=True)
    for name, output in outputs.items():
        check_finite(output)
        lines, rows = TEST_SETS[name].lines(output), TEST_SETS[name].rows
        write_atomically(folder / f"{name}.tsv", "\n".join([*lines, ""]))
        note = "" if len(output) == rows else f", but GLUE's test set has {rows:,}"
        print(f"{folder / name}.tsv: {len(output):,} predictions{note}")


def write_all(folder: str, scores: Mapping[str, Mapping[str, float]], predicted: bool, prefix: str = "") -> None:
    """Print the scores of all tasks and both averages, and write them to all.json, with the submission beside it.

    Args:
        folder: The folder of the runs, with {task} in it. The names of both files begin with the part before {task},
            so that "runs/r8-{task}" and "runs/r64-{task}" do not overwrite each other's.
        scores: The scores by task.
        predicted: Whether there are predictions, to be packed as submission.zip and checked.
        prefix: As for write_predictions; the names of both files continue with it.

    Raises:
        RecipeError: If GLUE's server would refuse the submission.
    """
    before = folder.partition("{task}")[0] + prefix
    averages = {"mean_of_nine_columns": mean_of_nine(scores), "server_average": server_average(scores)}
    write_atomically(Path(f"{before}all.json"), json.dumps({"scores": scores, **averages}, indent=2) + "\n")
    for task, own in scores.items():
        shown = (f"{name} {100 * score:.1f}" for name, score in own.items() if not name.endswith("loss"))
        print(f"{task:<5} {', '.join(shown)}")
    nine, server = averages.values()
    if nine is not None and server is not None:  # --do_train alone scores nothing
        print(f"Mean of the papers' nine columns (MNLI's two apart, MRPC and QQP by F1, no WNLI): {100 * nine:.1f}")
        print(f"GLUE server's average (over nine tasks with WNLI, each the mean of its scores): {100 * server:.1f}")
    if not predicted:
        return
    archive = Path(f"{before}submission.zip")
    files = (Path(folder.replace("{task}", task), f"{prefix}submission") for task in scores)
    pack((file for path in files for file in sorted(path.glob("*.tsv"))), archive)
    found = problems(archive)
    if found:
        raise RecipeError(f"GLUE's server would refuse {archive}: {'; '.join(found)}.")
    print(f"{archive} is a valid submission.")
