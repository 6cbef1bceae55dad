"""Run the 17 further classification tasks of Houlsby et al. 2019 and print test accuracies beside both papers'.

    accelerate launch recipes/paper_tasks.py --data additional --tasks sms_spam crowdflower_airline --r 64
    accelerate launch recipes/paper_tasks.py --data additional --preset mohebbi2020    # "not shared", of 2020
    accelerate launch recipes/paper_tasks.py --data additional --preset houlsby2019 --method full
    python recipes/sweep.py recipes/paper_tasks.py --data additional --task all --preset houlsby2019 \
        --num_train_epochs 20 50 100 --r 2 4 8 16 32 64 --learning_rate 1e-5 3e-5 1e-4 3e-3 \
        --choose r learning_rate num_train_epochs --output_dir runs/paper_tasks

The last one is the grid of Houlsby et al., who choose the number of epochs by hand from the validation curves; here
validation chooses. All print the same table. The defaults are the recipes', not those of either paper.

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
from common.scores import proper_name
from common.task import EVALUATED
from papers.additional import ALL, PAPER, check_folders
from papers.tables import accuracies, markdown, wrapped


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
    found, notes, file = {}, [], "table.md" if trains else f"{EVALUATED}table.md"
    for name in tasks:
        folder = f"{arguments.data}/{name}"
        own = copy.copy(training)
        own.output_dir = f"{training.output_dir}/{name}" if len(tasks) > 1 else training.output_dir
        own.hub_model_id = f"{training.hub_model_id}-{name}" if training.hub_model_id else None
        evaluated = arguments.evaluate and arguments.evaluate.replace("{task}", name)
        results = run(replace(arguments, data=folder, evaluate=evaluated), method, adapter, own)
        if results["test"] is None:
            raise RecipeError(f"{folder} must have a test split with labels: the papers report test accuracy.")
        found[name] = 100 * results["test"]["accuracy"], None
        rows = sum(results["dataset"]["rows"].values())
        notes.append(f"{proper_name(name)}: {PAPER[name].difference(rows, len(results['labels']))}")
        if training.should_log:
            table = accuracies({"this run": found}, {})
            print(wrapped(table), *notes, sep="\n")
            Path(training.output_dir, file).write_text("\n\n".join([markdown(table), *notes]) + "\n")


if __name__ == "__main__":
    end_with_one_line(main)
