"""Train on the 17 further classification tasks of Houlsby et al. 2019.

    accelerate launch recipes/studies/paper_tasks.py --data additional --tasks sms_spam --r 64
    accelerate launch recipes/studies/paper_tasks.py --data additional --preset mohebbi2020

The second one is "not shared" of Mohebbi and Rajaei 2020. The defaults are the recipes', not those
of either paper. docs/papers.md has the commands for the papers' tables; study_table.py prints them.

--data is a folder with a folder per task, named as in results/additional.csv, with train,
validation and test files and columns as for text_classification.py. With a single task,
--output_dir is the run's own folder, otherwise it has a folder per task, and with --push_to_hub
--hub_model_id user/name each adapter is pushed to its own repository, user/name-task. --evaluate
"runs/paper_tasks/{task}" scores saved adapters.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import recipes_path  # noqa: F401
from results.additional import ALL, check_folders
from run.arguments import ClassifierArguments
from run.command import parse_command
from run.edge import end_with_one_line, log
from run.presets import with_preset
from run.training_arguments import flag
from tasks.classification import ClassificationArguments, run


@dataclass(frozen=True, kw_only=True)
class PaperArguments(ClassificationArguments):
    """The tasks to run, and how to read them."""

    tasks: list[str] | None = flag(
        aliases=["--task"], default=None, help="Names of tasks; default: all."
    )
    preset: Literal["houlsby2019", "mohebbi2020"] | None = flag(
        default=None,
        help="A paper's settings instead of the defaults; see recipes/run/presets.py.",
    )


def main() -> None:
    defaults = {
        "output_dir": "runs/paper_tasks",
        "keep_repeated": True,
        "check_labels": "no",
        "contrastive_weight": 0.0,  # no paper has such a loss
    }
    command = parse_command(
        PaperArguments,
        ClassifierArguments,
        more_defaults=lambda given: defaults | with_preset(given, "paper_tasks"),
    )
    arguments, training = command.arguments, command.training
    tasks = ALL if arguments.tasks in (None, ["all"]) else arguments.tasks
    check_folders(arguments.data, tasks)
    command = command.with_arguments(data=f"{arguments.data}/{{task}}")
    if len(tasks) > 1:
        command = command.of_several()
    for name in tasks:
        run(command.for_task(name))
    folder = Path(training.output_dir.partition("{task}")[0])
    log(f"The papers' table with these results: python recipes/studies/study_table.py {folder}")


if __name__ == "__main__":
    end_with_one_line(main)
