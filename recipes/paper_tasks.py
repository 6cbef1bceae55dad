"""Run the 17 further classification tasks of Houlsby et al. 2019 and print test accuracies beside both papers'.

    accelerate launch recipes/paper_tasks.py --data additional --tasks sms_spam crowdflower_airline --r 64
    accelerate launch recipes/paper_tasks.py --data additional --preset mohebbi2020    # "not shared", of 2020

The defaults are the recipes', not those of either paper. docs/papers.md has the commands for the papers' tables.

--data is a folder with a folder per task, named as in papers/additional.py, with train, validation and test files and
columns as for text_classification.py. With a single task, --output_dir is the run's own folder, otherwise it has a
folder per task. The papers do not give their splits, so scores can be compared within a point or two at best, and not
at all where the table says that rows or classes differ from the paper's. With --push_to_hub --hub_model_id user/name,
the adapter of each task is pushed to its own repository, user/name-task. --evaluate "runs/paper_tasks/{task}" scores
saved adapters.
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from transformers.hf_argparser import HfArg

from common.arguments import ClassifierArguments, ClassifierMethodArguments, RecipeParser, RecipeTrainingArguments
from common.classification import ClassificationArguments, run
from common.edge import RecipeError, end_with_one_line
from common.presets import with_preset
from common.task import EVALUATED
from papers.additional import ALL, check_folders
from papers.tables import accuracies, show


@dataclass
class PaperArguments:
    """The tasks to run."""

    _argument_group_name = "tasks"

    tasks: list[str] | None = HfArg(aliases=["--task"], default=None, help="Names of tasks; default: all.")  # noqa: RUF009
    preset: Literal["houlsby2019", "mohebbi2020"] | None = HfArg(
        default=None, help="A paper's settings instead of the defaults; see recipes/common/presets.py."
    )


def main() -> None:
    """Read the command line, run the tasks one after the other, print the table and write it to table.md."""
    groups = (
        ClassificationArguments, PaperArguments, ClassifierMethodArguments, ClassifierArguments,
        RecipeTrainingArguments,
    )  # fmt: skip
    parser = RecipeParser(groups, usage="accelerate launch recipes/paper_tasks.py --data FOLDER [flags]")
    own_defaults = {"output_dir": "runs/paper_tasks", "keep_repeated": True}
    arguments, paper, method, adapter, training = parser.parse(
        more_defaults=lambda given: own_defaults | with_preset(given, "paper_tasks")
    )
    if not training.do_predict:
        raise RecipeError("The table has test accuracies: also give --do_predict, or none of the three --do_ flags.")
    tasks = ALL if paper.tasks in (None, ["all"]) else paper.tasks
    check_folders(arguments.data, tasks)

    trains = training.do_train and arguments.evaluate is None
    file = "table.md" if trains else f"{EVALUATED}table.md"
    results = {}
    for name in tasks:
        folder = f"{arguments.data}/{name}"
        own = copy.copy(training)
        own.output_dir = f"{training.output_dir}/{name}" if len(tasks) > 1 else training.output_dir
        own.hub_model_id = f"{training.hub_model_id}-{name}" if training.hub_model_id else None
        evaluated = arguments.evaluate and arguments.evaluate.replace("{task}", name)
        results[name] = run(replace(arguments, data=folder, evaluate=evaluated), method, adapter, own)
        if results[name]["test"] is None:
            raise RecipeError(f"{folder} must have a test split with labels: the papers report test accuracy.")
    if training.should_log:
        ours = {name: (100 * one["test"]["accuracy"], None) for name, one in results.items()}
        table = accuracies({"this run": ours}, results)
        show({"Test accuracy": (table, "")}, Path(training.output_dir, file))


if __name__ == "__main__":
    end_with_one_line(main)
