"""The command line of glue.py."""

import copy
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from transformers.hf_argparser import HfArg

from common import demo
from common.arguments import (
    ClassifierArguments,
    ClassifierMethodArguments,
    EncoderArguments,
    RecipeParser,
    RecipeTrainingArguments,
)
from common.data import find_split
from common.edge import RecipeError
from common.glue_tasks import MINIMAL_PAIRS, find_tasks
from common.presets import with_preset
from common.submission import TEST_SETS


@dataclass
class GlueArguments(EncoderArguments):
    """The task and the encoder."""

    _argument_group_name = "task"

    task: str = HfArg(
        aliases=["--task_name"],
        default=MINIMAL_PAIRS,
        help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, all (of these), or minimal_pairs.",
    )
    data_dir: str | None = HfArg(default=None, help="Folder with a folder of files per task; default: the Hub.")
    preset: Literal["houlsby2019", "mohebbi2020", "uva2019", "han2021"] | None = HfArg(
        default=None, help="A paper's settings instead of the defaults; see recipes/common/presets.py."
    )
    predict: bool = HfArg(default=False, help="Write predictions of the test splits in the format of GLUE's server.")


Task = TypeVar("Task", bound=GlueArguments)


def parse_arguments(
    args: Sequence[str] | None = None, kind: type[Task] = GlueArguments, recipe: str = "glue.py"
) -> tuple[Task, ClassifierMethodArguments, ClassifierArguments, RecipeTrainingArguments]:
    """Parse the command line, or `args`, and check what does not depend on the data.

    A preset and the run without data have their own defaults, which flags override. With --evaluate, the encoder and
    the length of texts are None unless they are given: then they are those of the saved adapter.

    Args:
        args: The words of a command line; default: those of this process.
        kind: The dataclass of the task and the encoder.
        recipe: The script, for its usage.
    """
    groups = (kind, ClassifierMethodArguments, ClassifierArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage=f"accelerate launch recipes/{recipe} [flags]")
    arguments, method, adapter, training = parser.parse(args, _defaults)
    tasks = find_tasks(arguments.task)
    if arguments.evaluate is None and training.do_train:
        method.check(adapter, training)
    if arguments.predict and MINIMAL_PAIRS in (task.name for task in tasks):
        raise RecipeError(f"--predict needs a task of GLUE, whose test split has no labels; got {MINIMAL_PAIRS}.")
    if arguments.data_dir is not None:
        if arguments.task == MINIMAL_PAIRS:
            raise RecipeError(f"--data_dir has no use for {MINIMAL_PAIRS}, which are generated: also give --task.")
        folder = Path(arguments.data_dir).expanduser()
        if missing := [task.name for task in tasks if not (folder / task.name).is_dir()]:
            raise RecipeError(f"--data_dir must hold a folder per task, {folder} has no {missing[0]}. Add it.")
        if arguments.predict:
            check_test_sets(folder, [task.name for task in tasks])
    for task in tasks:
        copy.copy(training).choose_by(task.scores)
        if len(task.labels) == 1 and training.label_smoothing_factor:
            raise RecipeError(f"--label_smoothing_factor is for classes, {task.name} has scores. Leave it out.")
    return arguments, method, adapter, training


def check_test_sets(folder: Path, tasks: Sequence[str]) -> None:
    """Raise RecipeError if a test set that --predict needs is missing, which a run would find only at its end."""
    for test_set in TEST_SETS.values():
        is_optional = test_set.source == "ax"
        if test_set.task in tasks and not is_optional and find_split(folder / test_set.source, test_set.split) is None:
            raise RecipeError(f"--predict needs {folder / test_set.source}/{test_set.split}.parquet. Add it.")


def _defaults(given: Namespace) -> dict[str, Any]:
    """Return the defaults of a preset, or of the run without data, by what else the command line says."""
    if given.preset is None and given.task == MINIMAL_PAIRS:
        return demo.DEFAULTS
    return with_preset(given)
