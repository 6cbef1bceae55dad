"""Run the 17 further classification tasks of Houlsby et al. 2019 and print test accuracies beside both papers'.

    accelerate launch recipes/paper_tasks.py --data additional --tasks sms_spam crowdflower_airline --r 64
    accelerate launch recipes/paper_tasks.py --data additional --learning_rate 1e-4 --num_train_epochs 50
    python recipes/sweep.py recipes/paper_tasks.py --data additional --task all --num_train_epochs 20 50 100 \
        --r 2 4 8 16 32 64 --learning_rate 1e-5 3e-5 1e-4 3e-3 --choose r learning_rate num_train_epochs \
        --output_dir runs/paper_tasks
    accelerate launch recipes/paper_tasks.py --data additional --method full --learning_rate 3e-5 --num_train_epochs 3

The second command has the learning rate and the epochs of Mohebbi and Rajaei 2020; with --head two_layer, it is their
model, "not shared". The last one is full fine-tuning. The third is the grid of Houlsby et
al., who choose among 20, 50 and 100 epochs by hand from the validation curves; here validation chooses. Both print the
same table. The defaults are the recipes', not those of either paper.

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

from transformers.hf_argparser import HfArg

from common.arguments import ClassifierArguments, ClassifierMethodArguments, RecipeParser, RecipeTrainingArguments
from common.classification import ClassificationArguments, run_task
from common.edge import RecipeError, end_with_one_line
from common.run import EVALUATED
from papers.additional import PAPER, describe, format_table


@dataclass
class PaperArguments:
    """The tasks to run."""

    _argument_group_name = "tasks"

    tasks: list[str] | None = HfArg(aliases=["--task"], default=None, help="Names of tasks; default: all.")  # noqa: RUF009


def main() -> None:
    """Read the command line, run the tasks one after the other, print the table and write it to table.md."""
    groups = (
        ClassificationArguments, PaperArguments, ClassifierMethodArguments, ClassifierArguments,
        RecipeTrainingArguments,
    )  # fmt: skip
    parser = RecipeParser(groups, usage="accelerate launch recipes/paper_tasks.py --data FOLDER [flags]")
    arguments, paper, method, adapter, training = parser.parse(
        more_defaults=lambda _: {"output_dir": "runs/paper_tasks", "keep_repeated": True}
    )
    if not training.do_predict:
        raise RecipeError("The table has test accuracies: also give --do_predict, or none of the three --do_ flags.")
    tasks = paper.tasks or list(PAPER)
    unknown = [name for name in tasks if name not in PAPER]
    if unknown:
        raise RecipeError(f"--tasks must be of {', '.join(PAPER)}, got {unknown[0]!r}.")
    missing = [name for name in tasks if not Path(arguments.data, name).is_dir()]
    if missing:
        raise RecipeError(f"{arguments.data} has no folder {missing[0]}. Name the tasks that are there with --tasks.")
    untested = [name for name in tasks if not any(Path(arguments.data, name).glob("test.*"))]
    if untested:
        raise RecipeError(
            f"{arguments.data}/{untested[0]} must have a test split with labels: the papers report test accuracy. Add "
            "test.csv."
        )

    trains = training.do_train and arguments.evaluate is None
    rows, file = [], "table.md" if trains else f"{EVALUATED}table.md"
    for name in tasks:
        folder = f"{arguments.data}/{name}"
        own = copy.copy(training)
        own.output_dir = f"{training.output_dir}/{name}" if len(tasks) > 1 else training.output_dir
        own.hub_model_id = f"{training.hub_model_id}-{name}" if training.hub_model_id else None
        evaluated = arguments.evaluate and arguments.evaluate.replace("{task}", name)
        results = run_task(replace(arguments, data=folder, evaluate=evaluated), method, adapter, own)
        if results["test"] is None:
            raise RecipeError(f"{folder} must have a test split with labels: the papers report test accuracy.")
        rows.append(describe(name, [results]))
        if training.should_log:
            table = format_table(rows)
            print(table)
            Path(training.output_dir, file).write_text(table)


if __name__ == "__main__":
    end_with_one_line(main)
