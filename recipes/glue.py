r"""Train a Houlsby adapter, or a method it is compared with, on a task of GLUE or on all nine.

    # BERT-base and MRPC from the Hub
    accelerate launch recipes/glue.py --task mrpc
    accelerate launch recipes/glue.py --task cola --data_dir glue --share_layers 3
    # the paper's settings, and a submission
    accelerate launch recipes/glue.py --task all --preset houlsby2019 --predict
    accelerate launch recipes/glue.py --task rte --method full
    # nothing is trained
    accelerate launch recipes/glue.py --task rte --evaluate runs/rte/adapter

With --data_dir, glue/cola/train.parquet and glue/cola/validation.parquet are read, with the splits
and the columns of the Hub's nyu-mll/glue, and for --predict test.parquet; .csv, .tsv and .jsonl
also work. {task} in --output_dir, --model_name, --evaluate, --init_adapter, --beneath and
--hub_model_id stands for the task's name.

The training is `train` in run/run_task.py.
"""

from pathlib import Path
from typing import Any

from run.command import TASK, Command
from run.edge import end_with_one_line, log
from run.run import EVALUATION
from run.run_task import run_task
from run.saved import Saved
from tasks.glue_tasks import GlueTask, find_tasks, parse_arguments, write_all


def main() -> None:
    run_tasks(parse_arguments())


def run_tasks(command: Command) -> None:
    """Train or evaluate the tasks, one after the other, and print their scores."""
    tasks = find_tasks(command.arguments)
    if len(tasks) > 1:
        command = command.of_several()
    commands = {task.name: command.for_task(task.name) for task in tasks}
    results, submissions = {}, []
    for task in tasks:
        results[task.name] = run_one(task, commands[task.name])
        folder = Path(commands[task.name].training.output_dir)
        is_evaluation = "evaluated" in results[task.name]
        if is_evaluation:
            folder /= EVALUATION
        submissions.append(folder / "submission")
    if len(tasks) > 1 and command.training.process_index == 0:
        # "runs/r8-{task}" and "runs/r64-{task}" do not overwrite each other's files.
        start = command.training.output_dir.partition(TASK)[0]
        if is_evaluation:
            start += f"{EVALUATION}/"
        write_all(start, results, submissions if command.arguments.predict else ())


def run_one(task: GlueTask, command: Command) -> dict[str, Any]:
    """Train a task, or score what is saved; return the content of results.json, or of
    evaluation.json.
    """
    arguments = command.arguments

    def load(saved: Saved | None) -> GlueTask:
        trains = saved is None
        with command.training.main_process_first():
            loaded = task.load(arguments.data_dir, trains, arguments.max_train_samples)
        if trains:
            count = len(loaded.splits["train"])
            log(f"{task.name}: {count:,} training examples; encoder {arguments.model_name}")
        return loaded

    return run_task(GlueTask, load, command, task.files, task.labels)


if __name__ == "__main__":
    end_with_one_line(main)
