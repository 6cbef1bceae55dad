"""The results of finished runs, read from their folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from run.edge import RecipeError
from run.files import read_object
from run.run import lower_is_better


Results = dict[str, Any]  # the content of results.json

NO_BERT = "no_bert"  # the method of no_bert.py, whose runs have no encoder
_REMEDY = "Make some with recipes/studies/sweep.py."


def collect(folder: Path) -> list[Results]:
    """Return the results of all finished runs below the folder, each with its "folder"."""
    paths = sorted(folder.rglob("results.json"))
    if not paths:
        raise RecipeError(f"There is no finished run in {folder}. {_REMEDY}")
    collected = []
    for path in paths:
        results = read_object(path)
        if results is None:
            raise RecipeError(f"{path} is damaged. Delete it, and start its run again.")
        collected.append(results | {"folder": str(path.parent)})
    return collected


def finished(folder: Path) -> list[Results]:
    """Return the results of all runs below the folder that have a validation score."""
    of_encoders = [results for results in collect(folder) if results["method"] != NO_BERT]
    scored = [results for results in of_encoders if results["best_score"] is not None]
    if not scored:
        raise RecipeError(f"There is no run with a validation score in {folder}. {_REMEDY}")
    return scored


def in_percent(results: Results, scores: Mapping[str, float], name: str | None = None) -> float:
    """Return one of a run's scores in percent, by default the one that has chosen the epoch.

    SQuAD's scores already are in percent. A loss or an error is returned unchanged.
    """
    name = name or results["chosen_by"]
    if results["task"] == "squad" or lower_is_better(name):
        return float(scores[name])
    return float(100 * scores[name])
