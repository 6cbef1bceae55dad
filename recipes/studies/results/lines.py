"""The results of runs, arranged as the lines of a table: a line is a method, a cell a task."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple, NoReturn

from results.additional import counted_once
from results.means import MeanAndError, mean_and_error
from results.read import Results, in_percent
from run.edge import RecipeError
from run.run import by_rows_per_step, is_free, lower_is_better
from sweeping.runs import CHOICES, MEANT_FOR, choose, is_meant_for
from tasks.scores import COLUMNS, GLUE_TASKS, WNLI


Columns = Mapping[str, tuple[str, str]]  # task and score by name

# Methods that freeze the encoder and add weights; the others train weights of the encoder.
ADDING = ("houlsby", "lora", "ia3")
# A line is a method on one model: these arguments make other lines even if they differ only between
# tasks.
OF_LINE = {*MEANT_FOR, "model_name", "init_adapter"}
# An adapter or a model is often pretrained in a folder with the task's name.
FOLDERS_BY_TASK = ("init_adapter", "model_name", "data")
MAIN_SCORES = {*COLUMNS.values(), *WNLI.values()}
MISMATCHED = "mismatched_accuracy"
SCORES_OF = {"validation": "best_scores", "test": "test"}  # where results.json has a split's scores


@dataclass
class Cell:
    """A line's runs of one task."""

    seeds: dict[int, Results]  # at the point that validation has chosen by its mean over the seeds
    best: Results  # of all points and seeds

    @property
    def first(self) -> Results:
        """The run of the first seed, for what does not depend on the seed."""
        return next(iter(self.seeds.values()))

    @property
    def constant(self) -> bool:
        """Whether a run predicts one class for all examples, so that its scores are no result."""
        return any(run.get("constant") is not None for run in self.seeds.values())

    def by_seed(self, score: str, split: str = "validation") -> dict[int, float]:
        """Return a score in percent by seed; empty if a run does not have it."""
        values = {}
        for seed, results in self.seeds.items():
            scores = results.get(SCORES_OF[split]) or {}
            if score not in scores:
                return {}
            values[seed] = in_percent(results, scores, score)
        return values

    def evaluations(self) -> list[list[dict[str, float]]]:
        """Return the seeds' evaluations, step by step, for the steps that all of them have."""
        by_step: dict[float, list[dict[str, float]]] = defaultdict(list)
        for results in self.seeds.values():
            for evaluation in results["epochs"]:
                by_step[evaluation["step"]].append(evaluation)
        in_order = sorted(by_step.items())
        return [of_seeds for _, of_seeds in in_order if len(of_seeds) == len(self.seeds)]

    def mean(self, score: str, split: str = "validation") -> MeanAndError | None:
        """Return a score's mean over the seeds and its standard error, in percent."""
        values = self.by_seed(score, split)
        return mean_and_error([*values.values()]) if values else None


@dataclass
class TableLine:
    """A line of a table of results: a method with its options, and its runs by task."""

    label: str
    method: str
    runs: dict[str, list[Results]]
    choices: Sequence[str]  # the arguments that validation chooses for each task

    def __post_init__(self) -> None:
        self.cells = {task: best_cell(self.runs[task], self.choices) for task in self.runs}

    def cells_of(self, columns: Columns) -> dict[str, Cell]:
        """Return the cells of the columns in which the line has runs.

        MNLI's mismatched split has a point of its own, by its own score: it is a task of its own in
        the papers.
        """
        cells = {}
        for name, (task, score) in columns.items():
            if task in self.runs and score == MISMATCHED:
                cells[name] = best_cell(self.runs[task], self.choices, score)
            elif task in self.runs:
                cells[name] = self.cells[task]
        return cells

    def runs_of(self, columns: Columns) -> list[Results]:
        """Return the runs of all seeds in the columns, at the points that are chosen."""
        return [run for cell in self.cells_of(columns).values() for run in cell.seeds.values()]

    def scores(self, columns: Columns, split: str = "validation") -> dict[str, dict[int, float]]:
        """Return the scores by seed, in percent, in the columns in which the line has some."""
        scores = {}
        for name, cell in self.cells_of(columns).items():
            by_seed = cell.by_seed(columns[name][1], split)
            if by_seed:
                scores[name] = by_seed
        return scores

    def sizes(self, best: bool = False) -> "Sizes":
        """Return the sizes at the chosen points, or those of the best runs.

        As in the papers, MNLI counts as two tasks, complaints as one, and WNLI not at all beside
        others.
        """
        tasks = counted_once(self.cells)
        if len(tasks) > 1 and "wnli" in tasks:
            tasks.remove("wnli")
        cells = [self.cells[task] for task in tasks]
        if "mnli" in self.cells and MISMATCHED in self.cells["mnli"].best["best_scores"]:
            cells.append(best_cell(self.runs["mnli"], self.choices, MISMATCHED))
        trained, shares = [], []
        for cell in cells:
            results = cell.best if best else cell.first
            size, encoder = results["trainable_parameters"], results["total_parameters"]
            if self.method in ADDING:
                encoder -= size
            trained.append(size)
            shares.append(size / encoder)
        total = sum(shares)
        if self.method != "full":
            total += 1  # the encoder, which all tasks share
        return Sizes(mean(trained), mean(shares), total, len(cells))


class Sizes(NamedTuple):
    """How much a method trains and keeps."""

    trained: float  # parameters per task, the mean over the tasks
    share: float  # the same, as a share of the encoder
    # For all tasks, in multiples of the encoder: a copy for each, or one and all added weights.
    total: float
    tasks: int


def arrange(results: Iterable[Results], choices: Sequence[str]) -> list[TableLine]:
    """Arrange results as lines of cells. Runs without a validation score are left out.

    A mean is over seeds only. So runs of a method are in different lines if they differ in an
    argument that differs between runs of one task, except the seed and those in `choices`. What
    differs only between tasks, such as --max_train_samples for a large one, makes no lines, except
    OF_LINE; `differences` names it.
    """
    runs = [(run, _compared(run, choices)) for run in results if run["best_score"] is not None]
    by_task: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for run, arguments in runs:
        by_task[run["method"], run["task"]].append(arguments)
    differing: dict[str, set[str]] = defaultdict(set)
    for (method, _), arguments_of_runs in by_task.items():
        differing[method] |= _differing(arguments_of_runs)
    # By the options of the line, as text, and by task.
    lines: dict[str, dict[str, list[Results]]] = defaultdict(lambda: defaultdict(list))
    for run, arguments in runs:
        options = {"method": run["method"]}
        for name in differing[run["method"]] | (OF_LINE & arguments.keys()):
            options[name] = arguments.get(name)
        lines[json.dumps(options, sort_keys=True)][run["task"]].append(run)
    of_all = list(map(json.loads, lines))
    arranged = []
    for options, tasks in zip(of_all, lines.values(), strict=True):
        label = _label(options, of_all)
        arranged.append(TableLine(label, options["method"], dict(tasks), choices))
    return arranged


def join_labels(lines: Iterable[TableLine]) -> str:
    return "; ".join(line.label for line in lines)


def refuse_to_mix(lines: Iterable[TableLine]) -> NoReturn:
    """Raise RecipeError: a figure cannot tell some of these lines apart."""
    raise RecipeError(f"Each of these lines needs a folder of its own: {join_labels(lines)}.")


def _differing(mappings: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names whose values differ, or that some of the mappings lack."""
    mappings = list(mappings)
    differing = set()
    for name in set[str]().union(*mappings):
        values = {json.dumps(mapping.get(name)) for mapping in mappings}
        if len(values) > 1:
            differing.add(name)
    return differing


def differences(line: TableLine) -> dict[str, str]:
    """Return for each task of a line the arguments that differ between its tasks.

    Those that validation chooses are not among them.
    """
    by_task = {task: _compared(cell.first, line.choices) for task, cell in line.cells.items()}
    names = sorted(_differing(by_task.values()))
    return {task: _describe(arguments, names) for task, arguments in by_task.items()}


def _compared(results: Results, choices: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that change what a run of its method learns.

    Equal ones have equal values.
    """
    task = results["task"]
    processes = (results.get("strategy") or {}).get("processes", 1)
    arguments: dict[str, Any] = {}
    for name, value in by_rows_per_step(results["arguments"], processes).items():
        if is_free(name) or name in ("task", "seed", *choices):
            continue
        if is_meant_for(results["method"], name):
            # A default of 10 epochs is 10.0 on the command line.
            arguments[name] = float(value) if type(value) is int else value
    if (task, arguments.get("metric_for_best_model")) in MAIN_SCORES:
        # The tasks have different scores, which alone would put them in different lines.
        arguments["metric_for_best_model"] = "main"
    word = rf"(?<![^\W_]){re.escape(task)}(?![^\W_])"
    for name in FOLDERS_BY_TASK:
        if isinstance(arguments.get(name), str):
            arguments[name] = re.sub(word, "{task}", arguments[name])
    return arguments


def _label(options: Mapping[str, Any], of_all: Iterable[Mapping[str, Any]]) -> str:
    """Return the method, its size and sharing, and what else distinguishes it in `of_all` lines."""
    method = options["method"]
    same_method = [line for line in of_all if line["method"] == method]
    differing = _differing(same_method)
    names = [name for name in options if name in CHOICES or name in differing]
    return ", ".join(filter(None, [method, _describe(options, names)]))


def _describe(arguments: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the arguments that have a value, as on a command line."""
    words = []
    for name in names:
        value = arguments.get(name)
        if value not in (None, "off"):
            words.append(re.sub(r"\.0$|[][',]", "", f"{name} {value}"))
    return ", ".join(words)


def best_cell(runs: Sequence[Results], choices: Sequence[str], score: str | None = None) -> Cell:
    """Return the cell of a task's runs, which differ in the seed and in the arguments `choices`.

    Validation chooses by a recorded score, or by the one that has chosen each run's epoch.
    """
    if score is not None:
        runs = [run for run in runs if score in run["best_scores"]] or runs

    def value(run: Results) -> float:
        return float(run["best_scores"].get(score, run["best_score"]))

    points: dict[tuple[Any, ...], dict[int, Results]] = defaultdict(dict)
    for run in runs:
        point = tuple(run["arguments"].get(name) for name in choices)
        points[point][run["seed"]] = run
    scores, compared = {}, list[Results]()
    for point, seeds in points.items():
        scores[point] = list(map(value, seeds.values()))
        compared += seeds.values()
    lower = any(lower_is_better(run["chosen_by"]) for run in compared)
    best = min(compared, key=value) if lower else max(compared, key=value)
    return Cell(points[choose(scores, lower)], best)


def find_columns(lines: Iterable[TableLine], score: str = "main") -> dict[str, tuple[str, str]]:
    """Return task and score of each column with runs: GLUE's, then the other tasks' main scores.

    With the score "accuracy", tasks show their accuracy if all of their runs have one.
    """
    by_task: dict[str, list[Cell]] = defaultdict(list)
    for line in lines:
        for task, cell in line.cells.items():
            by_task[task].append(cell)
    columns = {}
    for name, (task, main_score) in (COLUMNS | WNLI).items():
        if task in by_task:
            columns[name] = (task, main_score)
    for task, cells in by_task.items():
        if task not in GLUE_TASKS:
            columns[task] = (task, cells[0].best["chosen_by"])
    if score == "accuracy":
        for name, (task, _) in columns.items():
            if all(cell.by_seed("accuracy") for cell in by_task[task]):
                columns[name] = (task, "accuracy")
    return columns
