"""A table with several columns of labels: a task for each, trained one after the other.

Each task is a run in a folder of its own, named after the column, beside those of the others. So
the same command resumes where it was killed, and a folder of runs is all that `predict`, `evaluate`
and `serve` need.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
from datasets import Dataset

from data.label_column import find_label_columns, has_flags
from data.reading import load_data
from houlsby_peft.saved.downloads import find_packaged
from run.arguments import AUTO
from run.command import TASK, Command
from run.edge import RecipeError, log
from run.files import read_object
from run.model import find_dtype
from run.run import ARGUMENTS_FILE, EVALUATION, RESULTS_FILE, is_houlsby
from tasks.classification import ClassificationArguments, describe_examples, load_task, run
from tasks.label_issues import as_loaded, gather_issues
from tasks.scores import describe_constant, format_scores


LOG_FILE, SCORES_FILE = "log.txt", "scores.csv"
# What says how a table is read.
_TABLE_FLAGS = (
    *("text_columns", "label_columns", "tasks_of_columns", "label_separator"),
    *("problem_type", "class_names"),
)
STATES = "states"  # the subfolder for the hidden states that ladders of all columns read
Splits = Mapping[str, Dataset]


def run_columns(command: Command) -> None:
    """Train or score the task of each label column, or the one task of the command."""
    command = read_as_before(command)
    arguments, splits = command.arguments, None
    columns: Sequence[str] = ()
    if arguments.evaluate is not None:
        columns = columns_of_runs(Path(arguments.evaluate).expanduser(), arguments.label_columns)
    elif len(arguments.label_columns or ()) > 1 or arguments.tasks_of_columns:
        splits = load_data(arguments, command.training)
        columns = find_task_columns(splits["train"], arguments)
    if columns:
        splits = splits or load_data(arguments, command.training)
        _run_tasks(command, splits, columns)
    else:
        run(command, partial(load_task, arguments, command.training, splits=splits))


def read_as_before(command: Command) -> Command:
    """Return the command that reads a run's corrected table of label issues as the run has read its
    table, where the command line says nothing else.
    """
    arguments = command.arguments
    if not arguments.is_corrected:
        return command
    folder = Path(arguments.data).expanduser().parent
    columns = columns_of_runs(folder, None)
    # The runs of several columns differ in nothing but the column.
    pattern = f"*/{ARGUMENTS_FILE}" if columns else ARGUMENTS_FILE
    recorded: dict[str, Any] = {}
    for path in folder.glob(pattern):
        recorded = read_object(path) or {}
    if columns:
        recorded["label_columns"] = columns
    flags: dict[str, Any] = {}
    for name in _TABLE_FLAGS:
        if getattr(arguments, name) is None and recorded.get(name) is not None:
            flags[name] = recorded[name]
    for name, value in flags.items():
        values = value if isinstance(value, list) else [value]
        log(f"as in {folder}: --{name} {' '.join(map(str, values))}")
    return command.with_arguments(**flags)


def columns_of_runs(folder: Path, named: Sequence[str] | None) -> list[str]:
    """Return the label columns of the runs in a folder, or those that are named; none of a folder
    that is a single run.
    """
    columns: list[str] = []
    if (folder / RESULTS_FILE).exists():
        return columns
    for path in sorted(folder.glob(f"*/{RESULTS_FILE}")):
        of_run = (read_object(path) or {}).get("arguments", {})
        if of_run.get("tasks_of_columns"):
            columns += of_run["label_columns"]
    return [column for column in columns if column in (named or columns)]


def find_task_columns(train: Dataset, arguments: ClassificationArguments) -> Sequence[str]:
    """Return the label columns that are a task each; none if they are the 0/1 columns of one."""
    columns = find_label_columns(train, arguments.label_columns)
    flags = [column for column in columns if has_flags(train, column)]
    if arguments.tasks_of_columns is None and 0 < len(flags) < len(columns):
        raise RecipeError(
            "Of --label_columns, some hold classes, and others 0 and 1 only: "
            f"{', '.join(flags)}. Give --tasks_of_columns true to make a task of each, or name "
            "fewer columns."
        )
    if arguments.tasks_of_columns is None and flags:
        log("labels: one task of 0/1 columns; --tasks_of_columns true makes a task of each")
    are_tasks = arguments.tasks_of_columns
    return columns if are_tasks or (are_tasks is None and not flags) else ()


def _run_tasks(command: Command, splits: Splits, columns: Sequence[str]) -> None:
    """Load the tasks of all columns, so that mistakes show before any is trained; train or score
    each, and report all.
    """
    start = time.perf_counter()
    commands = split_command(command, columns)
    trains = command.arguments.evaluate is None and command.training.do_train
    example: Any = None
    frozen_states: dict[tuple[Any, ...], Any] = {}
    loads: dict[str, Any] = {}
    printed: dict[str, str] = {}  # by loading, which makes no folder before all columns are right
    for (task, of_task), column in zip(commands.items(), columns, strict=True):
        others = {*columns} - {column}
        own = {}
        for name, split in splits.items():
            own[name] = split.remove_columns(sorted(others.intersection(split.column_names)))
        loads[task] = partial(load_task, of_task.arguments, of_task.training, splits=own)
        if trains:
            text = StringIO()
            try:
                with redirect_stdout(text):
                    loaded = loads[task]()
            except RecipeError:
                print(text.getvalue(), end="")  # what was read of the column
                raise
            printed[task] = text.getvalue()
            loaded.frozen_states = frozen_states
            loads[task], example = partial(as_loaded, loaded), loaded.first_example()
            log(f"{task}: {describe_examples(loaded)}")

    results = {}
    for task, of_task in commands.items():
        with _logging(of_task):
            print(printed.get(task, ""), end="")
            result = run(of_task, loads[task])
        if result:
            results[task] = result
            chosen, scores = _scores_of(result)
            intervals = result["intervals"].get("validation")
            log(f"{task}: {format_scores({chosen: scores[chosen]}, intervals)}" if scores else task)
    if command.training.process_index == 0:
        _report(commands, results, example, time.perf_counter() - start)


def split_command(command: Command, columns: Sequence[str]) -> dict[str, Command]:
    """Return the command of each column, by the name of its task: the column's, as a folder's."""
    several = command.for_task(command.arguments.name)
    evaluated = command.arguments.evaluate
    if evaluated is not None:
        several = several.with_arguments(evaluate=f"{evaluated}/{TASK}")
    several = several.of_several()
    folder, training = Path(several.training.output_dir).parent, several.training
    if evaluated is None and (folder / RESULTS_FILE).exists():
        raise RecipeError(f"{folder} holds the run of one task. Give another --output_dir.")
    if several.trains_ladder and not training.cuda_graphs and training.world_size == 1:
        states = several.arguments.cache_states or str(folder / STATES)
        several = several.with_arguments(cache_states=states)
    if evaluated is None:
        several = _settle_dtype(several, folder)
    commands = {}
    for column in columns:
        task = re.sub(r"[^\w.-]+", "_", column).strip("._")
        of_column = several.with_arguments(label_columns=[column], tasks_of_columns=True)
        commands[task] = of_column.for_task(task)
    if len(commands) < len(columns) or "" in commands:
        raise RecipeError(
            "Each of --label_columns needs a name of its own that a folder may have, got "
            f"{', '.join(columns)}. Rename a column."
        )
    return commands


def _settle_dtype(command: Command, folder: Path) -> Command:
    """Return the command with one data type of the encoder for all tasks: that of a task that has
    begun, or what is measured now, as another measurement may differ.
    """
    if command.method.base_dtype != AUTO:
        return command
    dtype = find_dtype(command, find_packaged(command.arguments.model_name))
    for path in folder.glob(f"*/{ARGUMENTS_FILE}"):
        dtype = (read_object(path) or {}).get("base_dtype", dtype)
    return command.with_arguments(base_dtype=dtype)


@contextmanager
def _logging(command: Command) -> Iterator[None]:
    """Append what a task prints to the log in its folder: eight tasks would print 400 lines."""
    path = Path(command.training.output_dir, LOG_FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", buffering=1) as file, redirect_stdout(file):
        yield


def _scores_of(result: Mapping[str, Any]) -> tuple[str, Mapping[str, float]]:
    """Return the name of the score that chooses the best epoch, and all scores on validation."""
    scores = result["scores"] if "evaluated" in result else result["best_scores"]
    return result["chosen_by"].removeprefix("eval_"), scores


def _row_of(task: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a task in the table of scores."""
    chosen, scores = _scores_of(result)
    interval = result["intervals"].get("validation", {}).get(chosen, {})
    return {
        "task": task,
        "score": chosen,
        "validation": scores.get(chosen),
        "low": interval.get("low"),
        "high": interval.get("high"),
        "baseline": result.get("baseline", {}).get("scores", {}).get(chosen),
        "test": (result["test"] or {}).get(chosen),
        "examples": result["dataset"]["rows"].get("train"),
        "seconds": round(result["seconds"]) if "seconds" in result else None,
    }


def _report(
    commands: Mapping[str, Command],
    results: Mapping[str, Mapping[str, Any]],
    example: Any,
    seconds: float,
) -> None:
    """Write the table of scores and the doubtful labels of all tasks; print what was found, and
    what to do next.
    """
    from run.figures import predict_command, print_files, serve_command  # as it takes a second

    first = next(iter(commands.values()))
    folder, is_evaluated = Path(first.training.output_dir).parent, first.arguments.evaluate
    files = {}
    if results:
        table = pd.DataFrame([_row_of(task, result) for task, result in results.items()])
        table = table.dropna(axis="columns", how="all")
        path = folder / (f"{EVALUATION}.csv" if is_evaluated else SCORES_FILE)
        table.to_csv(path, index=False)
        duration = timedelta(seconds=round(seconds))
        shown = table.to_string(index=False, float_format="{:.3f}".format)
        print(f"\n{len(table)} tasks in {duration}:\n{shown}")
        files["Scores"] = str(path)
    for task, result in results.items():
        if result["constant"] is not None:
            print(f"{task}: {describe_constant(result['constant'])}")
    if not is_evaluated:
        issues = gather_issues(commands)
        if issues is not None:
            files["Doubtful labels"] = str(issues)
    files["Logs"] = str(folder / "*" / LOG_FILE)
    if results and is_houlsby(Path(first.training.output_dir, "adapter")) and not is_evaluated:
        files["Predict"] = predict_command(folder, example)
        files["In a browser"] = serve_command(folder)
    print_files(files)
