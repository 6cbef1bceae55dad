"""Run the 17 further classification tasks of Houlsby et al. 2019, whose table study_table.py prints.

    accelerate launch recipes/paper_tasks.py --data additional --tasks sms_spam crowdflower_airline --r 64
    accelerate launch recipes/paper_tasks.py --data additional --preset mohebbi2020    # "not shared", of 2020

The defaults are the recipes', not those of either paper. docs/papers.md has the commands for the papers' tables.

--data is a folder with a folder per task, named as in papers/additional.py, with train, validation and test files and
columns as for text_classification.py. With a single task, --output_dir is the run's own folder, otherwise it has a
folder per task. With --push_to_hub --hub_model_id user/name, the adapter of each task is pushed to its own repository,
user/name-task. --evaluate "runs/paper_tasks/{task}" scores saved adapters.
"""

import copy
from dataclasses import dataclass, replace
from typing import Literal

from transformers.hf_argparser import HfArg

from common.arguments import ClassifierArguments, Command, MethodArguments, RecipeParser, RecipeTrainingArguments
from common.classification import ClassificationArguments, run
from common.edge import end_with_one_line, log
from common.presets import with_preset
from papers.additional import ALL, check_folders


@dataclass
class PaperArguments:
    """The tasks to run."""

    _argument_group_name = "tasks"

    tasks: list[str] | None = HfArg(aliases=["--task"], default=None, help="Names of tasks; default: all.")  # noqa: RUF009
    preset: Literal["houlsby2019", "mohebbi2020"] | None = HfArg(
        default=None, help="A paper's settings instead of the defaults; see recipes/common/presets.py."
    )


def main() -> None:
    """Read the command line, and run the tasks one after the other."""
    groups = (
        ClassificationArguments, PaperArguments, MethodArguments, ClassifierArguments,
        RecipeTrainingArguments,
    )  # fmt: skip
    parser = RecipeParser(groups)
    own_defaults = {"output_dir": "runs/paper_tasks", "keep_repeated": True}
    arguments, paper, method, adapter, training = parser.parse(
        more_defaults=lambda given: own_defaults | with_preset(given, "paper_tasks")
    )
    tasks = ALL if paper.tasks in (None, ["all"]) else paper.tasks
    check_folders(arguments.data, tasks)

    for name in tasks:
        own = copy.copy(training)
        own.output_dir = f"{training.output_dir}/{name}" if len(tasks) > 1 else training.output_dir
        own.hub_model_id = f"{training.hub_model_id}-{name}" if training.hub_model_id else None
        evaluated = arguments.evaluate and arguments.evaluate.replace("{task}", name)
        own_arguments = replace(arguments, data=f"{arguments.data}/{name}", evaluate=evaluated)
        run(Command(own_arguments, method, adapter, own))
    log(f"The papers' table with these results: python recipes/study_table.py {training.output_dir}")


if __name__ == "__main__":
    end_with_one_line(main)
