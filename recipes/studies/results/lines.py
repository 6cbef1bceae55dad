"""The results of runs, arranged as rows (a method and its options) of cells (a task)."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from common.edge import RecipeError
from common.run import by_rows_per_step, is_free, lower_is_better
from common.scores import COLUMNS, GLUE_TASKS, WNLI
from results.additional import counted_once
from sweeping.runs import CHOICES, MEANT_FOR, choose


Results = dict[str, Any]
Columns = Mapping[str, tuple[str, str]]  # task and score by name
MeanAndError = tuple[float, float | None]  # no error for a single seed

# Methods that freeze the encoder and add weights; the others train weights of its own.
ADDING = ("houlsby", "lora", "ia3")
# Arguments that make other rows even if they differ only between tasks: a row is a method on one
# model.
OF_ROW = {*MEANT_FOR, "model_name", "init_adapter"}
MISMATCHED = "mismatched_accuracy"
NO_BERT = "no_bert"  # of no_bert.py, whose runs have no encoder


def collect(folder: Path) -> list[Results]:
    """Return the results of all finished runs below the folder, each with its "folder"."""
    paths = sorted(folder.rglob("results.json"))
    if not paths:
        raise RecipeError(
            f"There is no finished run in {folder}. Make some with recipes/studies/sweep.py."
        )
    return [json.loads(path.read_text()) | {"folder": str(path.parent)} for path in paths]


def finished(folder: Path) -> list[Results]:
    """Return the results of all runs below the folder that have a validation score."""
    results = [
        one for one in collect(folder) if one["best_score"] is not None and one["method"] != NO_BERT
    ]
    if not results:
        raise RecipeError(
            f"There is no run with a validation score in {folder}. Make some with recipes/studies/sweep.py."
        )
    return results


def in_percent(results: Results, scores: Mapping[str, float], name: str | None = None) -> float:
    """Return one of a run's scores, by default the one that has chosen the epoch, in percent, which
    SQuAD's scores already are, or a loss or an error unchanged.
    """
    name = name or results["chosen_by"]
    return float(
        scores[name] if results["task"] == "squad" or lower_is_better(name) else 100 * scores[name]
    )


@dataclass
class Cell:
    """A row's runs of one task."""

    seeds: dict[int, Results]  # at the point that validation has chosen by its mean over the seeds
    best: Results  # of all points and seeds

    def by_seed(self, score: str, split: str = "validation") -> dict[int, float]:
        """Return a score in percent by seed; empty if a run does not have it."""
        key = "best_scores" if split == "validation" else "test"
        if not all(score in (results.get(key) or {}) for results in self.seeds.values()):
            return {}
        return {
            seed: in_percent(results, results[key], score) for seed, results in self.seeds.items()
        }

    def evaluations(self) -> list[list[dict[str, float]]]:
        """Return the evaluations of all seeds, step by step, for the steps that all of them have."""
        by_step: dict[float, list[dict[str, float]]] = {}
        for entry in (entry for one in self.seeds.values() for entry in one["epochs"]):
            by_step.setdefault(entry["step"], []).append(entry)
        return [own for _, own in sorted(by_step.items()) if len(own) == len(self.seeds)]

    def mean(self, score: str, split: str = "validation") -> MeanAndError | None:
        """Return a score's mean over the seeds and its standard error, in percent."""
        values = self.by_seed(score, split)
        return mean_and_error([*values.values()]) if values else None


@dataclass
class Row:
    """A method with its options, and its runs by task."""

    label: str
    method: str
    runs: dict[str, list[Results]]
    chosen: Sequence[str]  # the arguments that validation chooses for each task

    def __post_init__(self) -> None:
        self.cells = {task: best_cell(same, self.chosen) for task, same in self.runs.items()}

    def cell(self, task: str, score: str) -> Cell | None:
        """Return the runs of a column. The point for MNLI's mismatched split is chosen by its own
        score, as if it were a task of its own, which it is in the papers.
        """
        if task in self.runs and score == MISMATCHED:
            return best_cell(self.runs[task], self.chosen, score)
        return self.cells.get(task)

    def scores(self, shown: Columns, split: str = "validation") -> dict[str, dict[int, float]]:
        """Return the scores by seed, in percent, in the columns in which the row has some."""
        cells = {name: (self.cell(*column), column[1]) for name, column in shown.items()}
        return {
            name: own
            for name, (cell, score) in cells.items()
            if cell and (own := cell.by_seed(score, split))
        }

    def sizes(self, best: bool = False) -> "Sizes":
        """Return the sizes at the chosen points, or those of the best runs. As in the papers, MNLI
        counts as two tasks, complaints as one, and WNLI not at all beside others.
        """
        cells = {
            task: cell
            for task, cell in self.cells.items()
            if task != "wnli" or len(self.cells) == 1
        }
        counted = [cells[task] for task in counted_once(cells)]
        if "mnli" in cells and MISMATCHED in cells["mnli"].best["best_scores"]:
            counted.append(best_cell(self.runs["mnli"], self.chosen, MISMATCHED))
        # Seeds do not change the size.
        runs = [cell.best if best else next(iter(cell.seeds.values())) for cell in counted]
        trained = [one["trainable_parameters"] for one in runs]
        encoder = [
            one["total_parameters"] - size * (self.method in ADDING)
            for one, size in zip(runs, trained, strict=True)
        ]
        shares = [size / whole for size, whole in zip(trained, encoder, strict=True)]
        return Sizes(mean(trained), mean(shares), sum(shares) + (self.method != "full"), len(runs))


class Sizes(NamedTuple):
    """Trained parameters per task, as their mean over the tasks and as a share of the encoder; the
    parameters for all tasks, in multiples of the encoder: a copy each, or one and all added
    weights; the number of tasks.
    """

    trained: float
    share: float
    total: float
    tasks: int


def arrange(results: Iterable[Results], chosen: Sequence[str]) -> list[Row]:
    """Arrange results as rows of cells. Runs without a validation score are left out.

    Runs of a method are in different rows if they differ in an argument that differs between runs
    of one task, except the seed and those in `chosen`, so that a mean is over seeds only. What
    differs only between tasks, such as --max_train_samples for a large one, makes no rows, except
    OF_ROW; `differences` names it.
    """
    runs = [(one, _compared(one, chosen)) for one in results if one["best_score"] is not None]
    names = sorted({name for _, compared in runs for name in compared})
    values: dict[tuple[str, str, str], set[str]] = {}
    for one, compared in runs:
        for name in names:
            values.setdefault((one["task"], one["method"], name), set()).add(
                json.dumps(compared.get(name))
            )
    telling = {(method, name) for (_, method, name), found in values.items() if len(found) > 1}
    rows: dict[str, dict[str, list[Results]]] = {}
    for one, compared in runs:
        own = [
            name
            for name in names
            if (one["method"], name) in telling or (name in OF_ROW and name in compared)
        ]
        key = {name: compared.get(name) for name in own}
        tasks = rows.setdefault(json.dumps({**key, "method": one["method"]}, sort_keys=True), {})
        tasks.setdefault(one["task"], []).append(one)
    keys = [json.loads(key) for key in rows]
    labels = _labels(keys)
    return [
        Row(label, key["method"], tasks, chosen)
        for label, key, tasks in zip(labels, keys, rows.values(), strict=True)
    ]


def differences(row: Row) -> dict[str, str]:
    """Return for each task of a row the arguments that differ between its tasks, except those that
    are chosen.
    """
    by_task = {
        task: _compared(next(iter(cell.seeds.values())), row.chosen)
        for task, cell in row.cells.items()
    }
    names = sorted({name for compared in by_task.values() for name in compared})
    differing = [
        name for name in names if len({json.dumps(own.get(name)) for own in by_task.values()}) > 1
    ]
    return {task: _describe(own, differing) for task, own in by_task.items()}


def _compared(results: Results, chosen: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that change what a run of its method learns, so that equal ones have
    equal values.
    """
    processes = (results.get("strategy") or {}).get("processes", 1)
    arguments = {
        name: float(value)
        if type(value) is int
        else value  # a default of 10 epochs is 10.0 on the command line
        for name, value in by_rows_per_step(results["arguments"], processes).items()
        if not is_free(name) and name not in {"task", "seed", *chosen}
        if MEANT_FOR.get(name, results["method"]) == results["method"]
    }
    if (results["task"], arguments.get("metric_for_best_model")) in {
        *COLUMNS.values(),
        *WNLI.values(),
    }:
        # The tasks have different scores, which alone would put them in different rows.
        arguments["metric_for_best_model"] = "main"
    # An adapter or a model is often pretrained in a folder with the task's name.
    for name in ("init_adapter", "model_name", "data"):
        if isinstance(value := arguments.get(name), str):
            arguments[name] = re.sub(
                rf"(?<![^\W_]){re.escape(results['task'])}(?![^\W_])", "{task}", value
            )
    return arguments


def _labels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the labels: the method, an adapter's size and sharing, and what else distinguishes a
    method's rows.
    """
    labels = []
    for row in rows:
        same_method = [other for other in rows if other["method"] == row["method"]]
        telling = [
            name for name in row if any(other.get(name) != row[name] for other in same_method)
        ]
        options = _describe(row, [name for name in row if name in CHOICES or name in telling])
        labels.append(", ".join([row["method"], *([options] if options else [])]))
    return labels


def _describe(arguments: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the arguments that have a value, as on a command line."""
    values = {name: value for name in names if (value := arguments.get(name)) not in (None, "off")}
    return ", ".join(
        re.sub(r"\.0$|[][',]", "", f"{name} {value}") for name, value in values.items()
    )


def best_cell(runs: Iterable[Results], chosen: Sequence[str], score: str | None = None) -> Cell:
    """Return a cell of a task's runs that differ in the seed and in the arguments `chosen` by
    validation, by a recorded score or the one that has chosen each run's epoch.
    """
    runs = [one for one in runs if score is None or score in one["best_scores"]] or runs

    def value(one: Results) -> float:
        return float(
            one["best_scores"].get(score, one["best_score"]) if score else one["best_score"]
        )

    points: dict[tuple[Any, ...], dict[int, Results]] = {}
    for results in runs:
        point = tuple(results["arguments"].get(name) for name in chosen)
        points.setdefault(point, {})[results["seed"]] = results
    lower = any(
        lower_is_better(one["chosen_by"]) for seeds in points.values() for one in seeds.values()
    )
    scores = {
        point: [value(results) for results in seeds.values()] for point, seeds in points.items()
    }
    best = (min if lower else max)(
        (one for seeds in points.values() for one in seeds.values()), key=value
    )
    return Cell(points[choose(scores, lower)], best)


def mean_and_error(values: Sequence[float]) -> MeanAndError:
    """Return the mean and its standard error (standard deviation / sqrt(n))."""
    return mean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else None


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> MeanAndError:
    """Return the difference of two means and its standard error: of the differences by seed if both
    have the same seeds, else of two independent means; no error if one of them has a single seed.
    """
    if ours.keys() == theirs.keys():
        return mean_and_error([ours[seed] - theirs[seed] for seed in ours])
    (mean, error), (reference, reference_error) = (
        mean_and_error([*ours.values()]),
        mean_and_error([*theirs.values()]),
    )
    return mean - reference, None if None in (error, reference_error) else hypot(
        error, reference_error
    )


def mean_over(values: Sequence[MeanAndError]) -> MeanAndError:
    """Return the mean over tasks, and its standard error from those of the tasks, whose seeds are
    independent.
    """
    errors = [error for _, error in values]
    return mean(value for value, _ in values), None if None in errors else hypot(*errors) / len(
        values
    )


def columns(rows: Iterable[Row], score: str = "main") -> dict[str, tuple[str, str]]:
    """Return task and score of each column with runs: GLUE's columns, then the other tasks' main
        scores.

    With the score "accuracy", tasks show their accuracy if all of their runs have one.
    """
    rows = list(rows)
    found = {
        name: column
        for name, column in (COLUMNS | WNLI).items()
        if any(row.cell(*column) for row in rows)
    }
    for row in rows:
        for task, cell in row.cells.items():
            if task not in GLUE_TASKS:
                found.setdefault(task, (task, cell.best["chosen_by"]))
    if score == "accuracy":
        cells = {
            task: [row.cells[task] for row in rows if task in row.cells]
            for task, _ in found.values()
        }
        for name, (task, _) in found.items():
            if all(cell.by_seed("accuracy") for cell in cells[task]):
                found[name] = (task, "accuracy")
    return found
