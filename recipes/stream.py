r"""Learn tasks one after the other on one encoder, and show that none is forgotten (Houlsby et al.
2019, section 1).

    accelerate launch recipes/stream.py --data reviews.csv news_folder mails.jsonl \
        --model_name minilm

Each classification task gets its own adapter and its own head, of any width. It is a run as of
text_classification.py, in a folder of its own, which resumes when the same command is given again.
At the end, one encoder gets the adapters of all tasks: their outputs must be bit-identical to those
of each adapter alone. The scores are printed, and the size of this model beside that of a
fine-tuned model per task. With --push_to_hub --hub_model_id user/name, each task's adapter is
pushed to its own repository, user/name-task. --evaluate runs/stream scores the adapters of a
finished stream on the same tasks or on other data of these names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import houlsby_peft
from run.arguments import ClassifierArguments
from run.command import TASK, Command, parse_command
from run.edge import RecipeError, end_with_one_line
from run.files import write_json
from run.training_arguments import flag
from tasks.classification import ClassificationArguments, ClassificationTask, load_task, run
from tasks.label_issues import as_loaded


STREAM_FILE = "stream.json"


@dataclass(frozen=True, kw_only=True)
class StreamArguments(ClassificationArguments):
    """The tasks, in their order, and how to read them."""

    data: list[str] = flag(  # type: ignore[assignment]
        help="The data sets: folders, files or names on the Hub."
    )


def main() -> None:
    """Read the command line, learn the tasks, and write stream.json beside a folder for each."""
    command = parse_command(
        StreamArguments, ClassifierArguments, more_defaults=lambda _: {"output_dir": "runs/stream"}
    ).of_several()
    method, training = command.method, command.training
    if method.method != "houlsby":
        raise RecipeError(
            "A stream needs --method houlsby, of which one encoder holds many, got "
            f"{method.method}."
        )
    commands = split_command(command)
    if not trains(command):
        for of_task in commands.values():
            run(of_task)
        return

    # The data of all tasks are read and checked before the first is trained.
    tasks, results = {}, {}
    for name, of_task in commands.items():
        tasks[name] = load_task(of_task.arguments, training)
        training.choosing_by(tasks[name].scores, training.output_dir)
    for name, of_task in commands.items():
        load = partial(as_loaded, tasks[name])
        results[name] = run(of_task, load)
    if training.process_index == 0:
        learned = {}
        for name, of_task in commands.items():
            learned[name] = (Path(of_task.training.output_dir, "adapter"), tasks[name])
        compared = compare(learned, results)
        write_json(Path(training.output_dir.partition(TASK)[0], STREAM_FILE), compared)
        changed = [of_task["task"] for of_task in compared if not of_task["unchanged"]]
        if changed:
            raise RecipeError(
                f"The outputs of {', '.join(changed)} differ beside other adapters, which must not "
                "be."
            )


def trains(command: Command) -> bool:
    """Return whether a command trains, rather than only scoring adapters or checking labels."""
    arguments = command.arguments
    only_checks = arguments.check_labels == "only"
    return command.training.do_train and arguments.evaluate is None and not only_checks


def split_command(command: Command) -> dict[str, Command]:
    """Return the command of each data set, by its name."""
    if command.arguments.evaluate is not None:
        command = command.with_arguments(evaluate=f"{command.arguments.evaluate}/{TASK}")
    commands = {}
    for data in command.arguments.data:
        arguments = ClassificationArguments(**{**vars(command.arguments), "data": data})
        name = arguments.name
        commands[name] = command._replace(arguments=arguments).for_task(name)
    if len(commands) < len(command.arguments.data):
        raise RecipeError(
            f"Each task of --data needs its own name, got only {', '.join(commands)}. Rename a "
            "file."
        )
    return commands


def compare(
    learned: Mapping[str, tuple[Path, ClassificationTask]], results: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return whether each task's outputs on one encoder with the adapters of all are those of its
    adapter alone, with its score and its size; print it.
    """
    last, together, inputs, alone = None, {}, {}, {}
    for name, (folder, task) in learned.items():
        inputs[name] = texts_of(task)
        alone[name] = houlsby_peft.load(folder).predict(inputs[name])
        together[name] = last = houlsby_peft.load(folder, beside=last)
    compared = []
    for name, adapter in together.items():
        of_task = {
            "task": name,
            "score": results[name]["best_score"],
            "trained": results[name]["trainable_parameters"],
            "unchanged": adapter.predict(inputs[name]) == alone[name],
        }
        score, outputs = "not evaluated", "CHANGED"
        if of_task["score"] is not None:
            score = f"{of_task['score']:.3f}"
        if of_task["unchanged"]:
            outputs = "bit-identical"
        print(f"{name}: {score}; outputs beside the other adapters: {outputs}")
        compared.append(of_task)

    total = sum(weight.numel() for weight in adapter.model.parameters())
    trained = sum(of_task["trained"] for of_task in compared)
    encoder = total - trained
    share = trained / len(compared) / encoder
    print(
        f"parameters of the model with {len(compared)} tasks: {total:,}, "
        f"{total / encoder:.3f} times the encoder's {encoder:,}; {share:.2%} per task, where "
        "fine-tuning takes 100%"
    )
    return compared


def texts_of(task: ClassificationTask) -> list[Any]:
    """Return the texts or pairs of texts of a task's validation split."""
    rows = task.splits.get("validation", task.splits["train"])
    columns = [rows[column] for column in task.text_columns]
    if len(columns) == 1:
        return list(columns[0])
    return list(zip(*columns, strict=True))


if __name__ == "__main__":
    end_with_one_line(main)
