"""Learn tasks one after the other on one encoder, and show that none is forgotten (Houlsby et al.
2019, section 1).

    accelerate launch recipes/stream.py --data reviews.csv news_folder mails.jsonl --model_name
    minilm

Each classification task gets its own adapter and its own head, of any width. It is a run as of
text_classification.py, in a folder of its own, which resumes when the same command is given again.
At the end, one encoder gets the adapters of all tasks: their outputs must be bit-identical to those
of each adapter alone. The scores are printed, and the size of this model beside that of a
fine-tuned model per task. With --push_to_hub --hub_model_id user/name, each task's adapter is
pushed to its own repository, user/name-task. --evaluate runs/stream scores the adapters of a
finished stream on the same tasks or on other data of these names.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg

import houlsby_peft
from common.arguments import ClassifierArguments, parse_command
from common.classification import ClassificationArguments, ClassificationTask, load_task, run
from common.edge import RecipeError, end_with_one_line
from common.reading import files_of
from common.run import write_json
from common.task import run_task


STREAM_FILE = "stream.json"


@dataclass(kw_only=True)
class StreamArguments(ClassificationArguments):
    """The tasks, in their order, and how to read them."""

    data: list[str] = HfArg(help="The data sets: folders, files or names on the Hub.")  # noqa: RUF009


def main() -> None:
    """Read the command line, learn the tasks, and write stream.json beside a folder for each task."""
    command = parse_command(
        StreamArguments, ClassifierArguments, more_defaults=lambda _: {"output_dir": "runs/stream"}
    )
    arguments, method, _, training = command
    if method.method != "houlsby":
        raise RecipeError(
            f"A stream needs --method houlsby, of which one encoder holds many, got {method.method}."
        )
    command.be_of_several()
    folder = Path(training.output_dir.partition("{task}")[0])
    if arguments.evaluate is not None:
        arguments.evaluate += "/{task}"
    of_tasks = [
        ClassificationArguments(**{**vars(arguments), "data": source}) for source in arguments.data
    ]
    commands = {one.name: command._replace(arguments=one).for_task(one.name) for one in of_tasks}
    if len(commands) < len(of_tasks):
        raise RecipeError(
            f"Each task of --data needs its own name, got only {', '.join(commands)}. Rename a file."
        )
    if arguments.evaluate is not None or not training.do_train:
        for own in commands.values():
            run(own)
        return

    # All of them before the first is trained.
    tasks = {name: load_task(own.arguments, training) for name, own in commands.items()}
    for task in tasks.values():
        copy.copy(training).choose_by(task.scores)
    results = {}
    for name, own in commands.items():
        files = files_of(own.arguments)
        results[name] = run_task(ClassificationTask, lambda _, name=name: tasks[name], own, files)
    if training.process_index == 0:
        rows = compare(
            {
                name: (Path(own.training.output_dir, "adapter"), tasks[name])
                for name, own in commands.items()
            },
            results,
        )
        write_json(folder / STREAM_FILE, rows)
        if changed := [row["task"] for row in rows if not row["unchanged"]]:
            raise RecipeError(
                f"The outputs of {', '.join(changed)} differ beside other adapters, which must not be."
            )


def compare(
    learned: Mapping[str, tuple[Path, ClassificationTask]], results: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return whether each task's outputs on one encoder with the adapters of all are those of its
    adapter alone, with its score and its size; print it.
    """
    last, together, alone = None, {}, {}
    for name, (folder, task) in learned.items():
        validation = task.splits.get("validation", task.splits["train"])
        columns = [validation[column] for column in task.text_columns]
        inputs = [*zip(*columns, strict=True)] if len(columns) > 1 else list(columns[0])
        alone[name] = houlsby_peft.load(folder).predict(inputs)
        last = houlsby_peft.load(folder, beside=last)
        together[name] = last, inputs
    rows = [
        {
            "task": name,
            "score": results[name]["best_score"],
            "trained": results[name]["trainable_parameters"],
            "unchanged": adapter.predict(inputs) == alone[name],
        }
        for name, (adapter, inputs) in together.items()
    ]
    for row in rows:
        score = "not evaluated" if row["score"] is None else f"{row['score']:.4f}"
        same = "bit-identical" if row["unchanged"] else "CHANGED"
        print(f"{row['task']}: {score}; outputs beside the other adapters: {same}")
    total, trained = (
        sum(weight.numel() for weight in last.model.parameters()),
        sum(row["trained"] for row in rows),
    )
    encoder = total - trained
    print(
        f"parameters of the model with {len(rows)} tasks: {total:,}, {total / encoder:.3f} times the encoder's "
        f"{encoder:,}; {trained / len(rows) / encoder:.2%} per task, where fine-tuning takes 100%"
    )
    return rows


if __name__ == "__main__":
    end_with_one_line(main)
