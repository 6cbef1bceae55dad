"""The one way in which a task of any kind is trained, resumed or scored."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from transformers import set_seed

import houlsby_peft
from houlsby_peft.saved.downloads import find_packaged
from run.command import Command
from run.edge import RecipeError, log
from run.files import read_object, write_json
from run.model import find_dtype, on_main, quiet
from run.run import CONTENT, EVALUATION, RESULTS_FILE, Run, command_line, find_saved, hardware
from run.saved import Saved, load_saved
from run.training_arguments import RecipeTrainingArguments
from tasks.scores import describe_constant, describe_majority, format_scores
from tasks.task import Task


LIBRARIES = ("houlsby_peft", "peft", "transformers", "accelerate", "datasets", "evaluate", "torch")


def run_task(
    kind: type[Task],
    load: Callable[[Saved | None], Task],
    command: Command,
    files: Mapping[str, Sequence[Path]],
    labels: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Train a task, or resume it, or score what is saved, as the command line says; push the
    adapter if asked to.

    `load` returns the task with the data to train on or, given something saved, to score it on.
    `files` are those of the data, by their splits. A saved adapter must have the `labels`; None:
    any. Return the content of results.json, or of evaluation.json.
    """
    model_name, training = command.arguments.model_name, command.training
    encoder = None if model_name is None else find_packaged(model_name)
    command = settle(command, encoder)
    if command.arguments.evaluate is not None:
        return evaluate(kind, load, command, encoder, labels)

    # Before anything is trained.
    push = houlsby_peft.plan_push(training, str(encoder), command.adapter.beneath)
    run = on_main(training, lambda: Run(command, files))
    results: dict[str, Any] | None = run.results
    if results is None:
        results = train(load, run, command)
    elif getattr(command.arguments, "predict", False) and not (run.folder / "submission").exists():
        raise RecipeError(
            f"{run.folder} is finished. Predict with --evaluate {run.folder} --predict."
        )
    if push is not None and training.process_index == 0:
        pushed = push(str(run.folder / "adapter"), results=str(run.folder / RESULTS_FILE))
        print(f"Pushed: {pushed}")
    return results


def settle(command: Command, encoder: str | None) -> Command:
    """Return the command with what it leaves open: the weights that are scored or, to train, the
    data type of the encoder, a folder or a name on the Hub. Nothing in it changes from here on.
    """
    arguments, method, adapter, training = command
    evaluated = find_evaluated(arguments.evaluate, training)
    if evaluated is not None:
        return command._replace(arguments=replace(arguments, evaluate=evaluated))
    method.check(adapter, training)
    if arguments.cache_states is not None and not command.trains_ladder:
        raise RecipeError(
            "--cache_states needs --kind ladder: other adapters change the encoder's hidden states."
        )
    if arguments.cache_states is not None and training.cuda_graphs:
        raise RecipeError(
            "--cache_states needs --cuda_graphs False: a graph cannot read states from a file."
        )
    return command._replace(method=replace(method, base_dtype=find_dtype(command, encoder)))


def find_evaluated(name: str | None, training: Any) -> str | None:
    """Return what to score: a folder with an adapter or a model, or the name of an adapter on the
    Hub; None to train.

    `name` is that of the command line. The folder of a run stands for what it has saved.
    """
    if name is None and training.do_train:
        return None
    folder = Path(name or training.output_dir).expanduser()
    saved = find_saved(folder)
    if saved is not None:
        return str(saved)
    if name is None:
        raise RecipeError(
            "Without --do_train, --do_eval and --do_predict score what the run in --output_dir has "
            f"saved, and {folder} has neither adapter nor model. Give --do_train as well, or "
            "--evaluate with a folder."
        )
    return name


def load_task(
    load: Callable[[Saved | None], Task], saved: Saved | None, training: RecipeTrainingArguments
) -> tuple[Task, RecipeTrainingArguments]:
    """Return the task with its data, and the arguments of its trainer."""
    task = load(saved)
    folder = training.output_dir
    if saved is not None:
        folder = str(Path(folder, EVALUATION))
    return task, training.choosing_by(task.scores, folder)


def train(load: Callable[[Saved | None], Task], run: Run, command: Command) -> dict[str, Any]:
    """Load the data and the encoder, adapt it, train, save the kept epoch, predict and report;
    return results.json's content.
    """
    task, training = load_task(load, None, command.training)
    if training.label_smoothing_factor and not task.has_one_class:
        raise RecipeError(
            "--label_smoothing_factor is for one class of several per text or word. Leave it out."
        )
    metrics = task.load_metrics(command.arguments.metric)
    asked, chosen_by = command.training.metric_for_best_model, training.metric_for_best_model
    if asked.endswith("accuracy") and not chosen_by.endswith("accuracy"):
        log(f"{task.name} has no accuracy: {chosen_by} chooses the best epoch")
    checkpoint = on_main(training, run.start)
    set_seed(training.seed)  # before the first weights of head and adapter are drawn
    model, tokenizer = task.prepare(command)
    trainer = task.make_trainer(model, tokenizer, command.arguments.max_length, training)
    if command.arguments.cache_states is not None:
        trainer.cache_states(command.arguments.cache_states)
    trainer.train(checkpoint)
    trainer.save_trained()  # with load_best_model_at_end, the best epoch's weights

    test = task.predict_test(trainer)
    predictions = trainer.describe_kept()
    constant = task.find_constant(predictions)
    if constant is not None:
        log(describe_constant(constant))
    results = {
        **run.describe_adapter(),
        "seed": training.seed,
        **trainer.results(),
        "intervals": task.find_intervals(trainer),
        "constant": constant,
        **task.compute_metrics(metrics, trainer),
        **task.examine(trainer, command),
        "versions": versions(),
        "arguments": {**run.flags, **trainer.flags()},
        "defaults": run.defaults,
        "hardware": hardware(),
        "command": command_line(sys.argv, training.hub_token),
        "method": command.method.method,
        "task": task.name,
        "model": command.arguments.model_name,
        # The commit of an encoder from the Hub, which transformers keeps there.
        "model_revision": getattr(model.config, "_commit_hash", None),
        "dataset": task.describe_data(command.arguments),
        "text_columns": task.text_columns,
        **task.describe_labels(),
        "test": test,
        "per_class": predictions and predictions.per_class,
        CONTENT: run.content,
    }
    if training.process_index == 0:
        from run.figures import report_end  # only now, as the import takes a second

        run.finish(results)
        report_end(trainer, results, predictions, task.first_example())
    return results


def evaluate(
    kind: type[Task],
    load: Callable[[Saved | None], Task],
    command: Command,
    encoder: str | None,
    labels: Sequence[str] | None,
) -> dict[str, Any]:
    """Score what a run has saved on the validation split, predict the test split, and write
    evaluation.json beside the folder of the predictions and figures.
    """
    arguments, method, _, training = command
    with quiet():
        saved = load_saved(arguments.evaluate, labels, encoder, method.base_dtype, kind.auto_class)
    max_length = saved.check_length(arguments.max_length)
    task, training = load_task(load, saved, training)
    metrics = task.load_metrics(arguments.metric)
    trainer = task.make_trainer(saved.model, saved.tokenizer, max_length, training)
    scores = task.evaluate(trainer)
    test = task.predict_test(trainer)
    predictions = trainer.describe_kept()
    constant = task.find_constant(predictions)
    if constant is not None:
        log(describe_constant(constant))
    intervals = task.find_intervals(trainer)
    evaluation = {
        "task": task.name,
        "evaluated": saved.name,
        "chosen_by": training.metric_for_best_model,
        "scores": scores,
        "intervals": intervals,
        "constant": constant,
        **task.compute_metrics(metrics, trainer),
        "per_class": predictions and predictions.per_class,
        "dataset": task.describe_data(arguments),
        "labels": task.labels,
        "test": test,
    }
    if training.process_index == 0:
        from run.figures import print_files, show_predicted

        path = Path(f"{training.output_dir}.json")
        previous = (read_object(path) or {}).get("dataset", {}).get("name")
        if previous and previous != evaluation["dataset"]["name"]:  # that of other data stays
            path.replace(path.with_name(f"{path.stem}_{Path(str(previous)).name}.json"))
        write_json(path, evaluation)
        of_validation = {**scores, **evaluation.get("metrics", {})}
        data = getattr(arguments, "data", task.name)
        for name, split, of_split in (("validation", data, of_validation), ("test", "test", test)):
            if of_split:
                shown = format_scores(of_split, intervals.get(name))
                print(f"{saved.name}, scored on {split}: {shown}")
        if line := describe_majority(evaluation["dataset"]):
            print(line)
        figures = show_predicted(Path(training.output_dir), predictions, task.name)
        print_files({"Scores": str(path), **figures})
    return evaluation


def versions() -> dict[str, str]:
    return {"python": python_version(), **{name: version(name) for name in LIBRARIES}}
