"""Reads what training runs have written (results.json) and turns it into the tables of a card.

Every key may be missing. A run is a mapping with: task, model, method, seed, dataset (id, name, config, split,
revision, language, rows), epochs (a list with epoch, step and scores), best_epoch, chosen_by, test,
trainable_parameters, total_parameters, seconds, hardware, emissions (kg of CO2), versions, arguments, defaults,
command, references (a list with name and scores).
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import AdapterError


Run = Mapping[str, Any]
Results = str | os.PathLike[str] | Run | Sequence[str | os.PathLike[str] | Run]

# What the Trainer reports beside the scores.
_NO_SCORES = ("epoch", "step", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
_LONGEST_LOG = 30


def read_runs(results: Results | None) -> list[Run]:
    """The runs of one or several seeds, from files or as they are.

    Raises:
        AdapterError: A file is missing or is not JSON that holds an object.
    """
    if results is None:
        return []
    several = [results] if isinstance(results, (str, os.PathLike, Mapping)) else results
    return [_known(item if isinstance(item, Mapping) else _read(Path(item))) for item in several]


def scores(run: Run) -> dict[str, float]:
    """The scores of the kept epoch, or of the last one where none was chosen; without the loss."""
    log = run.get("epochs", [])
    kept = next((row for row in log if row.get("epoch") == run.get("best_epoch")), log[-1] if log else {})
    return {
        name: float(value)
        for name, value in kept.items()
        if name not in _NO_SCORES and not name.endswith("loss") and isinstance(value, (int, float))
    }


def of_method(runs: Iterable[Run], method: str) -> list[Run]:
    """The runs of one method; a run that does not say its method trained adapters."""
    return [run for run in runs if run.get("method", "houlsby") == method]


def score_table(runs: Sequence[Run]) -> list[list[str]]:
    """Each score with its seeds, full fine-tuning and references, under a row of headings; empty without scores."""
    own, full = of_method(runs, "houlsby"), of_method(runs, "full")
    references = [item for run in own[:1] for item in run.get("references", [])]
    names = list(scores(own[0])) if own else []
    if not names:
        return []
    several = len(own) > 1
    heading = ["score", "mean ± standard error" if several else "value"]
    heading += [f"seed {run.get('seed', number)}" for number, run in enumerate(own, 1)] if several else []
    heading += ["full fine-tuning"] if full else []
    rows = [heading + [str(item.get("name")) for item in references]]
    for name in names:
        values = [scores(run)[name] for run in own if name in scores(run)]
        row = [words(name), mean_and_error(values)]
        row += [number(scores(run).get(name)) for run in own] if several else []
        row += [mean_and_error([scores(run)[name] for run in full if name in scores(run)])] if full else []
        rows.append(row + [number(item.get("scores", {}).get(name)) for item in references])
    return rows


def table_of_test_scores(run: Run) -> list[list[str]]:
    """The test scores of a run, as rows under a row of headings; empty without any."""
    test = run.get("test", {})
    flat = {name: value for name, value in test.items() if isinstance(value, (int, float))}
    if flat:
        return [["score", "value"], *([words(name), number(value)] for name, value in flat.items())]
    columns = list(dict.fromkeys(column for row in test.values() if isinstance(row, Mapping) for column in row))
    rows = [[words(name), *(number(row.get(column)) for column in columns)] for name, row in test.items()]
    return [["on", *map(words, columns)], *rows] if columns else []


def log_table(run: Run) -> list[list[str]]:
    """The training log, thinned out if it is long, the kept epoch marked; empty without a log."""
    log = run.get("epochs", [])
    best = run.get("best_epoch")
    step = math.ceil(len(log) / _LONGEST_LOG) if log else 1
    shown = [row for i, row in enumerate(log) if i % step == 0 or i == len(log) - 1 or row.get("epoch") == best]
    names = [name for name in dict.fromkeys(name for row in log for name in row) if name not in _NO_SCORES]
    if not shown:
        return []
    rows = [["epoch", "step", *map(words, names), ""]]
    for row in shown:
        mark = "**kept**" if best is not None and row.get("epoch") == best else ""
        values = [number(row.get(name)) for name in names]
        rows.append([f"{row.get('epoch', math.nan):.3g}", str(row.get("step", "")), *values, mark])
    return rows


def mean_and_error(values: Sequence[float]) -> str:
    """The mean and, of several values, its standard error (the sample's standard deviation over the root of n)."""
    if not values:
        return ""
    mean = number(statistics.fmean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {number(statistics.stdev(values) / math.sqrt(len(values)), like=statistics.fmean(values))}"


def number(value: Any, like: float | None = None) -> str:
    """A score as text: three decimals up to 1, one above; "" for None. `like`: use the decimals of this number."""
    if not isinstance(value, (int, float)):
        return ""
    return f"{value:.3f}" if abs(value if like is None else like) <= 1 else f"{value:.1f}"


def words(name: str) -> str:
    """The name of a score in words: "matched_accuracy" is "matched accuracy"."""
    known = {
        "f1": "F1",
        "matthews_correlation": "Matthews correlation",
        "pearson": "Pearson correlation",
        "spearmanr": "Spearman correlation",
    }
    return known.get(name, name.replace("_", " ").replace(" f1", " F1"))


def _known(value: Any) -> Any:
    """Without what is None, at any depth: a key that is there has a value."""
    if isinstance(value, Mapping):
        return {key: _known(item) for key, item in value.items() if item is not None}
    return [_known(item) for item in value if item is not None] if isinstance(value, list) else value


def _read(path: Path) -> Run:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path} must be a results.json that a recipe has written: {error}") from error
    if not isinstance(run, dict):
        raise AdapterError(f"{path} must hold one JSON object, got {type(run).__name__}.")
    return run
