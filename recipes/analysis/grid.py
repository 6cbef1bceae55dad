"""The runs behind a figure: grids of a recipe's flags, run as recipes/sweep.py runs them, where they are missing."""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from common.errors import RecipeError
from glue_tasks import MINIMAL_PAIRS
from study_results import Results, collect
from sweep import CONFIGS, Sweep
from sweep_processes import LocalExecutor, find_places, launch_command
from sweep_runs import Run, make_runs


RECIPES = Path(__file__).parents[1]
GLUE = RECIPES / "glue.py"
Axes = Mapping[str, Sequence[str]]


class GridParser(argparse.ArgumentParser):
    """The flags that all grids have; those that it does not know are the recipe's and go to each run as they are.

    Args:
        output_dir: Default of --output_dir.
        description: The script's docstring, whose first paragraph --help shows.
        demo: Defaults for the run without data, which is to take minutes; its runs have one epoch.
    """

    def __init__(self, output_dir: str, description: str, demo: Mapping[str, Iterable[object]]) -> None:
        super().__init__(
            description=description.split("\n\n")[0],
            epilog="All other flags go to the recipe (recipes/glue.py --help), such as --data_dir, --model_name.",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
        )
        self._demo = {name: _strings(values) for name, values in demo.items()}
        self.add_argument("--output_dir", default=output_dir, type=Path, help="Folder of the runs and the figure.")
        self.add_argument("--task", nargs="+", default=[MINIMAL_PAIRS], help="Tasks of the recipe.")
        self.add_values("seed", [0, 1, 2], help="Seeds.")
        self.add_argument("--jobs", type=int, help="Runs at once; default: one per GPU, or one.")
        self.add_argument("--draw_only", action="store_true", help="Draw the runs that there are; run nothing.")

    def add_values(self, name: str, default: Iterable[object], help: str) -> None:
        """Adds a flag with one or more values."""
        self.add_argument(f"--{name}", nargs="+", default=_strings(default), help=help)

    def parse(self) -> tuple[argparse.Namespace, list[str]]:
        """The grid's flags and the recipe's. A run without data has defaults of its own, which flags overrule."""
        arguments, flags = self.parse_known_args()
        if arguments.task == [MINIMAL_PAIRS]:
            self.set_defaults(**self._demo)
            arguments, flags = self.parse_known_args()
            if not {"--num_train_epochs", "--max_steps"} & set(flags):
                flags += ["--num_train_epochs", "1"]
        arguments.output_dir = arguments.output_dir.resolve()
        return arguments, flags


def _strings(values: Iterable[object]) -> list[str]:
    return [str(value) for value in values]


def make_grids(
    folder: Path, tasks: Sequence[str], grids: Iterable[Axes], flags: Sequence[str], recipe: Path = GLUE
) -> list[Run]:
    """The runs of several grids, each of which varies flags of its own besides the task."""
    # A recipe for one task is named after it, and has no flag for it.
    by_task = {} if list(tasks) == [recipe.stem] else {"task": tasks}
    return [run for axes in grids for run in make_runs(folder, recipe, {**by_task, **axes}, flags)]


def complete(runs: Sequence[Run], jobs: int | None) -> None:
    """Runs what has not ended yet.

    Raises:
        RecipeError: If a run fails, or a folder holds another run.
    """
    for run in runs:
        run.check()
    places = find_places(jobs)
    config = CONFIGS / ("cpu.yaml" if places[0] is None else "one_gpu.yaml")
    executor = LocalExecutor(launch_command(str(config)), places)
    try:
        seeds = [run.point["seed"] for run in runs if "seed" in run.point]
        failures = Sweep(runs, chosen=(), search_seeds=seeds).complete(executor)
    finally:
        executor.cancel()
    for run, outcome in failures.items():
        print(f"\nFAILED: {run.name}; log: {run.folder / 'log.txt'}\n{outcome.last_lines}", file=sys.stderr)
    if failures:
        raise RecipeError(f"{len(failures)} of {len(runs)} runs have failed. The same command goes on with them.")


def finished(folder: Path) -> list[Results]:
    """The results of all runs below the folder that have a score.

    Raises:
        RecipeError: If there are none.
    """
    results = [one for one in collect(folder) if one["best_score"] is not None] if folder.is_dir() else []
    if not results:
        raise RecipeError(f"There is no run with a validation score in {folder}. Leave --draw_only out to make some.")
    return results


def percent(results: Results) -> float:
    """A run's best score in percent, which SQuAD's scores already are."""
    return float(results["best_score"]) * (1 if results["task"] == "squad" else 100)
