"""GLUE as its server and the papers report it: the columns, both averages, and the files of predictions."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.edge import RecipeError
from common.same_run import write_atomically
from common.scores import check_finite
from common.submission import TEST_SETS, pack, problems


# The scores that GLUE's server averages for each task, by the recipe's names; the papers' score first.
GLUE_TASKS = {
    "cola": ("matthews_correlation",),
    "sst2": ("accuracy",),
    "mrpc": ("f1", "accuracy"),
    "stsb": ("spearmanr", "pearson"),
    "qqp": ("f1", "accuracy"),
    "mnli": ("matched_accuracy", "mismatched_accuracy"),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
}
# The papers' nine columns.
COLUMNS = {
    "CoLA": ("cola", "matthews_correlation"),
    "SST-2": ("sst2", "accuracy"),
    "MRPC": ("mrpc", "f1"),
    "STS-B": ("stsb", "spearmanr"),
    "QQP": ("qqp", "f1"),
    "MNLI-m": ("mnli", "matched_accuracy"),
    "MNLI-mm": ("mnli", "mismatched_accuracy"),
    "QNLI": ("qnli", "accuracy"),
    "RTE": ("rte", "accuracy"),
}
WNLI = {"WNLI": ("wnli", "accuracy")}
# Houlsby et al. 2019 (arXiv 1902.00751), table 1: test scores of BERT-large, in percent, in the order of COLUMNS.
HOULSBY = {
    "Houlsby et al. 2019, BERT-large: full": (60.5, 94.9, 89.3, 87.6, 72.1, 86.7, 85.9, 91.1, 70.1),
    "Houlsby et al. 2019, BERT-large: r 8-256": (59.5, 94.0, 89.5, 86.9, 71.8, 84.9, 85.1, 90.7, 71.5),
    "Houlsby et al. 2019, BERT-large: r 64": (56.9, 94.2, 89.6, 87.3, 71.8, 85.3, 84.6, 91.4, 68.8),
}
_NAMES = {
    **{task: column for column, (task, _) in (COLUMNS | WNLI).items() if task != "mnli"},
    "mnli": "MNLI", "squad": "SQuAD", "minimal_pairs": "generated sentences",
    "matthews_correlation": "Matthews correlation", "f1": "F1", "exact_match": "exact match", "spearmanr":
    "Spearman correlation", "pearson": "Pearson correlation", "matched_accuracy": "accuracy (matched)",
    "mismatched_accuracy": "accuracy (mismatched)", "loss": "loss",
}  # fmt: skip

Scores = Mapping[str, Mapping[str, float]]


def proper_name(name: str) -> str:
    """Return the name of a task or a score as it is printed: "CoLA" for "cola", "F1" for "f1"."""
    return _NAMES.get(name, name.replace("crowdflower", "CF").replace("_", " "))


def mean_of_nine(scores: Scores) -> float | None:
    """Return the plain mean of the papers' nine columns, with both of MNLI and without WNLI; None if one is missing.

    Args:
        scores: The scores by task and name, such as {"mrpc": {"f1": 89.5, "accuracy": 85.3}}.
    """
    values = [scores.get(task, {}).get(name) for task, name in COLUMNS.values()]
    return None if None in values else mean(values)


def server_average(scores: Scores) -> float | None:
    """Return the average of GLUE's server: the mean over nine tasks, with WNLI, of the mean of each task's scores."""
    values = [[scores.get(task, {}).get(name) for name in names] for task, names in GLUE_TASKS.items()]
    return None if any(None in task for task in values) else mean(mean(task) for task in values)


def references(task: str) -> list[dict[str, Any]]:
    """Return the test scores of Houlsby et al. for a task, fine-tuned and with adapters of size 64, for a card."""
    found = []
    for label, row in HOULSBY.items():
        scores = {
            score: value / 100
            for (of_task, score), value in zip(COLUMNS.values(), row, strict=True)
            if of_task == task
        }
        if scores and "8-256" not in label:
            found.append({"name": f"{label} (test)", "scores": scores})
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
