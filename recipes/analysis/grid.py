"""The runs behind a figure: grids of a recipe's flags, and the execution of those runs that are missing."""

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from study.papers import GLUE_TASKS
from study.presets import parse_arguments
from study.results import Results, collect
from sweeping.processes import find_slots, launch_command
from sweeping.runs import PlannedRun, make_runs
from sweeping.search import Sweep
from tasks.glue import ALL, MINIMAL_PAIRS
from training.errors import RecipeError
from training.rules import OneLineErrors, check_unique, check_value, number_of


RECIPES = Path(__file__).parents[1]
GLUE = RECIPES / "glue.py"
OF_GLUE = ("glue.py", "gradient_norms.py", "variants.py")  # the recipes with the flags of glue.py
FILES = ("--data_dir", "--model_name", "--init_adapter")  # the flags that may name files
Axes = Mapping[str, Sequence[str]]


class GridParser(OneLineErrors):
    """The flags that all grids have. Flags that it does not know are passed to each run of the recipe.

    Args:
        output_dir: Default of --output_dir.
        description: The script's docstring, of which --help shows the first paragraph.
        demo: Defaults for the run without data, which should take minutes; its runs have one epoch.
    """

    def __init__(self, output_dir: str, description: str, demo: Mapping[str, Iterable[object]]) -> None:
        super().__init__(
            description=description.split("\n\n")[0],
            epilog="All other flags, such as --data_dir and --model_name, are the recipe's (recipes/glue.py --help).",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
        )
        self._demo = {name: _strings(values) for name, values in demo.items()}
        self.add_argument("--output_dir", default=output_dir, type=Path, help="Folder of the runs and the figure.")
        self.add_argument("--task", nargs="+", default=[MINIMAL_PAIRS], help="Tasks of the recipe.")
        self.add_values("seed", [0, 1, 2], help="Seeds.", kind=int)
        self.add_argument("--jobs", type=int, help="Number of simultaneous runs; default: one per GPU, or one.")
        self.add_argument("--draw_only", action="store_true", help="Draw the runs that exist, and run nothing.")
        self.add_argument("--dry_run", action="store_true", help="Print the commands that are left, and run nothing.")

    def add_values(
        self, name: str, default: Iterable[object], help: str, kind: type = str, choices: Iterable[str] | None = None
    ) -> None:
        """Add a flag with one or more values; those of a numeric kind have a rule in RULES."""
        check = str if kind is str else number_of(name, kind)
        self.add_argument(f"--{name}", nargs="+", default=_strings(default), help=help, type=check, choices=choices)

    def parse(self) -> tuple[argparse.Namespace, list[str]]:
        """Return the grid's flags and the recipe's. The run without data has its own defaults.

        Raises:
            RecipeError: If a value breaks its rule.
        """
        arguments, flags = self.parse_known_args()
        if arguments.task == [ALL]:
            arguments.task = list(GLUE_TASKS)
        for name, value in vars(arguments).items():
            if isinstance(value, list):
                check_unique(name, value)
        check_value("output_dir", str(arguments.output_dir))
        if arguments.jobs is not None:
            check_value("jobs", arguments.jobs)
        if arguments.task == [MINIMAL_PAIRS]:
            self.set_defaults(**self._demo)
            arguments, flags = self.parse_known_args()
            if not {"--num_train_epochs", "--max_steps"} & set(sys.argv):
                flags += ["--num_train_epochs", "1"]
        arguments.output_dir = arguments.output_dir.resolve()
        return arguments, flags


def _strings(values: Iterable[object]) -> list[str]:
    return [str(value) for value in values]


def make_grids(
    folder: Path, tasks: Sequence[str], grids: Iterable[Axes], flags: Sequence[str], recipe: Path = GLUE
) -> list[PlannedRun]:
    """Return the runs of several grids, each of which varies its own flags besides the task."""
    # A recipe for a single task is named after it, and has no flag for it.
    by_task = {} if list(tasks) == [recipe.stem] else {"task": tasks}
    return [run for axes in grids for run in make_runs(folder, recipe, {**by_task, **axes}, flags)]


def run_missing(runs: Sequence[PlannedRun], arguments: argparse.Namespace) -> None:
    """Execute the runs that are not finished, or with --dry_run print their commands.

    Raises:
        RecipeError: If a run fails, a flag of glue.py breaks its rule, or a folder holds a run with other flags.
    """
    # A wrong flag must not be found by each of many runs.
    for run in {json.dumps({**run.point, "seed": ""}): run for run in runs if run.recipe.name in OF_GLUE}.values():
        point = {axis: value for axis, value in run.point.items() if axis != "variant"}
        # A dry run may be on a machine without the data, and before the checkpoint to start from.
        flags = _without(FILES, run.flags) if arguments.dry_run else run.flags
        parse_arguments([*(word for axis in point for word in (f"--{axis}", point[axis])), *flags])
    sweep, slots = Sweep(arguments.output_dir, runs), find_slots(arguments.jobs)
    launch = launch_command(None, slots)
    if arguments.dry_run:
        print("".join(f"{shlex.join([*launch, *run.arguments])}\n" for run in sweep.left()), end="")
        return
    failures = sweep.execute(launch, slots)
    for run, error in failures.items():
        print(f"\nFAILED: {run.name}; log: {run.folder / 'log.txt'}\n{error}", file=sys.stderr)
    if failures:
        raise RecipeError(f"{len(failures)} of {len(runs)} runs have failed. The same command tries them again.")


def _without(names: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the flags without these, each of which has one value."""
    pairs = itertools.pairwise(["", *flags])
    return [flag for before, flag in pairs if before not in names and flag not in names]


def finished(folder: Path) -> list[Results]:
    """Return the results of all runs below the folder that have a score.

    Raises:
        RecipeError: If there are none.
    """
    results = [one for one in collect(folder) if one["best_score"] is not None] if folder.is_dir() else []
    if not results:
        raise RecipeError(f"There is no run with a validation score in {folder}. Leave out --draw_only to make some.")
    return results
