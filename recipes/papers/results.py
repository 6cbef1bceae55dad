"""The results of a study's runs, arranged as rows (a method and its options) of cells (a task)."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from common.edge import RecipeError
from common.glue_report import COLUMNS, GLUE_TASKS, WNLI, proper_name
from common.same_run import is_free
from papers.numbers import MISMATCHED
from sweeping.runs import MEANT_FOR, choose


Results = dict[str, Any]

# Methods that freeze the encoder and add weights; the others train weights of its own.
ADDING = ("houlsby", "lora")

# Arguments that make other rows even if they differ only between tasks: a row is a method on one model.
OF_ROW = {*MEANT_FOR, "model_name", "init_adapter", "variant"}


def collect(folder: Path) -> list[Results]:
    """Return the results of all finished runs below the folder, and write them to its results.jsonl."""
    results = [_read(path) for path in sorted(folder.rglob("results.json"))]
    part = folder / f"results.jsonl.{os.getpid()}"
    part.write_text("".join(json.dumps(one) + "\n" for one in results))
    part.replace(folder / "results.jsonl")
    return results


def finished(folder: Path) -> list[Results]:
    """Return the results of all runs below the folder that have a validation score.

    Raises:
        RecipeError: If there are none.
    """
    results = [one for one in collect(folder) if one["best_score"] is not None] if folder.is_dir() else []
    if not results:
        raise RecipeError(f"There is no run with a validation score in {folder}. Make some with recipes/sweep.py.")
    return results


def _read(path: Path) -> Results:
    """Read a run's results.json.

    Raises:
        RecipeError: If a recipe cannot have written it.
    """
    try:
        results: Results = json.loads(path.read_text())
        results["task"], results["best_score"], results["best_scores"], results["arguments"], results["seed"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecipeError(
            f"{path} must be a run's results, and is not ({type(error).__name__}: {error}). Delete it, and run its "
            "command again."
        ) from error
    return results


def score_percent(results: Results, score: str | None = None) -> float:
    """Return a run's score in percent, which SQuAD's scores already are; a loss unchanged.

    Args:
        results: The run's results.
        score: The name of a score of the kept epoch; default: the one that has chosen the epoch.
    """
    score = score or results["chosen_by"]
    return in_percent(results, score, results["best_scores"][score])


def in_percent(results: Results, score: str, value: float) -> float:
    """Return a value of a run's score in percent."""
    return float(value if results["task"] == "squad" or score.endswith("loss") else 100 * value)


@dataclass
class Cell:
    """A row's runs of one task.

    Attributes:
        seeds: The runs by seed, at the point that validation has chosen by its mean over the seeds.
        best: The best run over all points and seeds.
    """

    seeds: dict[int, Results]
    best: Results

    def by_seed(self, score: str) -> dict[int, float]:
        """Return a score in percent by seed; empty if a run does not have it."""
        if not all(score in results["best_scores"] for results in self.seeds.values()):
            return {}
        return {seed: score_percent(results, score) for seed, results in self.seeds.items()}

    def mean(self, score: str) -> tuple[float, float | None] | None:
        """Return a score's mean over the seeds and its standard error, in percent; no error for a single seed."""
        values = self.by_seed(score).values()
        return mean_and_error(list(values)) if values else None


@dataclass
class Row:
    """A method with its options, and its runs by task."""

    label: str
    method: str
    cells: dict[str, Cell]

    def cell(self, task: str, score: str) -> Cell | None:
        """Return the runs of a column. Runs of MNLI that were chosen by the column's own split come first."""
        tasks = (
            (MISMATCHED, task) if score == "mismatched_accuracy" else (task, MISMATCHED if task == "mnli" else task)
        )
        return next((self.cells[name] for name in tasks if name in self.cells), None)

    def best(self) -> "Row":
        """Return the row of the best run of each task."""
        cells = {task: Cell({cell.best["seed"]: cell.best}, cell.best) for task, cell in self.cells.items()}
        return Row(self.label, self.method, cells)

    @property
    def trained(self) -> float:
        """Trained parameters per task; their mean over the tasks, whose heads and chosen sizes differ."""
        return mean(results["trainable_parameters"] for results in self._chosen())

    @property
    def share(self) -> float:
        """Trained parameters per task, as a share of the encoder."""
        return mean(_share(self.method, results) for results in self._chosen())

    @property
    def total(self) -> float:
        """Parameters for all tasks, in multiples of the encoder: a copy each, or one and all added weights."""
        shares = sum(_share(self.method, results) for results in self._chosen())
        return shares if self.method == "full" else 1 + shares

    def _chosen(self) -> list[Results]:
        """Return a run per task at the point that validation has chosen; the seeds do not change its size."""
        return [next(iter(cell.seeds.values())) for cell in self.cells.values()]


def _share(method: str, results: Results) -> float:
    trained, total = results["trainable_parameters"], results["total_parameters"]
    return trained / (total - trained if method in ADDING else total)


def arrange(results: Iterable[Results], chosen: Sequence[str]) -> list[Row]:
    """Arrange results as rows of cells. Runs without a validation score are left out.

    Runs of a method are in different rows if they differ in an argument that differs between runs of one task, except
    the seed and those in `chosen`, so that a mean is over seeds only. What differs only between tasks, such as
    --max_train_samples for a large one, makes no rows, except OF_ROW; `differences` names it.
    """
    runs = _with_defaults([one for one in results if one["best_score"] is not None])
    values: dict[tuple[str, str, str], set[str]] = {}
    for one in runs:
        for name, value in _compared(one, chosen).items():
            values.setdefault((_task(one), _method(one), name), set()).add(json.dumps(value, sort_keys=True))
    telling = {(method, name) for (_, method, name), found in values.items() if len(found) > 1}
    rows: dict[str, dict[str, list[Results]]] = {}
    for one in runs:
        method, compared = _method(one), _compared(one, chosen)
        key = {name: value for name, value in compared.items() if name in OF_ROW or (method, name) in telling}
        rows.setdefault(json.dumps({**key, "method": method}, sort_keys=True), {}).setdefault(_task(one), []).append(
            one
        )
    labels = _labels([json.loads(key) for key in rows])
    return [
        Row(label, json.loads(key)["method"], {task: best_cell(same, chosen) for task, same in tasks.items()})
        for label, (key, tasks) in zip(labels, rows.items(), strict=True)
    ]


def differences(row: Row, chosen: Sequence[str]) -> dict[str, str]:
    """Return for each task of a row the arguments that differ between its tasks, except those in `chosen`."""
    by_task = {task: _compared(next(iter(cell.seeds.values())), chosen) for task, cell in row.cells.items()}
    names = sorted({name for compared in by_task.values() for name in compared})
    differing = [name for name in names if len({json.dumps(own.get(name)) for own in by_task.values()}) > 1]
    return {task: _describe(own, differing) for task, own in by_task.items()}


def _with_defaults(results: Sequence[Results]) -> list[Results]:
    """Return the results with the same arguments: one that an earlier version did not have has its default."""
    names = {name for one in results for name in one["arguments"]}
    defaults = {name: value for one in results for name, value in one.get("defaults", {}).items()}
    missing = {name: defaults.get(name) for name in sorted(names)}
    return [{**one, "arguments": missing | one["arguments"]} for one in results]


def _task(results: Results) -> str:
    return MISMATCHED if results["chosen_by"] == "mismatched_accuracy" else str(results["task"])


def _method(results: Results) -> str:
    return str(results.get("method", "houlsby"))


def _compared(results: Results, chosen: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that change what a run of its method learns, so that equal ones have equal values."""
    arguments = {
        name: float(value) if type(value) is int else value  # a default of 10 epochs is 10.0 on the command line
        for name, value in results["arguments"].items()
        if not is_free(name) and name not in {"task", "seed", *chosen}
        if MEANT_FOR.get(name, _method(results)) == _method(results)
    }
    if (results["task"], arguments.get("metric_for_best_model")) in {*COLUMNS.values(), *WNLI.values()}:
        # The tasks have different scores, which alone would put them in different rows.
        arguments["metric_for_best_model"] = "main"
    # An adapter or a model is often pretrained in a folder with the task's name.
    for name in ("init_adapter", "model_name", "data"):
        if isinstance(value := arguments.get(name), str):
            arguments[name] = re.sub(rf"(?<![^\W_]){re.escape(results['task'])}(?![^\W_])", "{task}", value)
    return arguments


def _labels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the labels: the method, an adapter's size and sharing, and what else distinguishes a method's rows."""
    labels = []
    for row in rows:
        same_method = [other for other in rows if other["method"] == row["method"]]
        telling = [name for name in row if any(other[name] != row[name] for other in same_method)]
        options = _describe(row, [name for name in row if name in MEANT_FOR or name in telling])
        labels.append(", ".join([row["method"], *([options] if options else [])]))
    return labels


def _describe(arguments: Mapping[str, Any], names: Iterable[str]) -> str:
    values = ((name, arguments.get(name)) for name in names)
    return ", ".join(
        f"{name} {repr(value).removesuffix('.0') if isinstance(value, float) else value}" for name, value in values
    )


def best_cell(runs: Iterable[Results], chosen: Sequence[str]) -> Cell:
    """Return a cell of a task's runs that differ in the seed and in the arguments `chosen` by validation."""
    points: dict[tuple[Any, ...], dict[int, Results]] = {}
    for results in runs:
        point = tuple(results["arguments"].get(name) for name in chosen)
        points.setdefault(point, {})[results["seed"]] = results
    lower = any(one["chosen_by"].endswith("loss") for seeds in points.values() for one in seeds.values())
    scores = {point: [results["best_score"] for results in seeds.values()] for point, seeds in points.items()}
    everything = [results for seeds in points.values() for results in seeds.values()]
    best = (min if lower else max)(everything, key=lambda results: results["best_score"])
    return Cell(points[choose(scores, lower)], best)


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error (standard deviation / sqrt(n)); None for the error of one value."""
    return mean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else None


def columns(rows: Iterable[Row]) -> dict[str, tuple[str, str]]:
    """Return task and score of each column with runs: GLUE's columns, then the other tasks' main scores. A task whose
    runs were chosen by several scores, such as classes and a regression on the same data, has a column for each."""
    rows = list(rows)
    glue = {name: column for name, column in (COLUMNS | WNLI).items() if any(row.cell(*column) for row in rows)}
    known = {*GLUE_TASKS, MISMATCHED}
    scores: dict[str, dict[str, None]] = {}  # as ordered sets
    for row in rows:
        for task, cell in row.cells.items():
            if task not in known:
                scores.setdefault(task, {})[cell.best["chosen_by"]] = None
    own = {
        task if len(of_task) == 1 else f"{task}, {proper_name(score)}": (task, score)
        for task, of_task in scores.items()
        for score in of_task
    }
    return glue | own
