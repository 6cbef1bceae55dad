"""Run a recipe for each combination of tasks, methods, sizes, learning rates, epochs and seeds; print the table.

    python recipes/sweep.py recipes/glue.py --task mrpc cola --method houlsby --share_layers 0 3 \
        --learning_rate 3e-4 1e-3 3e-3 --seed 0 1 2 --search_seeds 1 --data_dir glue --output_dir runs/study
    python recipes/sweep.py recipes/glue.py --task all --method full --learning_rate 2e-5 5e-5 --output_dir runs/study
    python recipes/sweep.py ... --cluster slurm --cluster_options slurm_partition=gpu timeout_min=240   # a job per run
    python recipes/sweep.py ... --dry_run                                                         # prints the commands

Flags that a sweep does not know are passed to each run of the recipe, which trains on one task at a time. Validation
chooses among the values of the flags in --choose. A full grid has a run per combination; with --search_seeds 1 the
first seed searches, and the others run only at the best point. Each GPU has one run at a time. Started again, or twice
at once, a sweep skips finished runs and resumes killed ones; it waits for jobs on a cluster, and Ctrl-C cancels them.
Several sweeps may share a folder, for example if full fine-tuning has its own learning rates: `python
recipes/study_table.py runs/study` prints the table of all runs in it.
"""

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from study.papers import GLUE_TASKS
from study.table import print_study
from sweeping.processes import CONFIGS, LocalExecutor, launch_command, local_executor
from sweeping.runs import AXES, CHOICES, CHOSEN, check_recipe, make_runs
from sweeping.search import Sweep
from training.errors import RecipeError, end_with_one_line


if TYPE_CHECKING:
    from sweeping.cluster import ClusterExecutor


def main() -> int:
    """Read the command line, execute all runs, print the table; return 1 if a run failed, 130 if interrupted."""
    arguments, flags = parse_arguments()
    axes = {axis: values for axis in AXES if (values := getattr(arguments, axis))}
    runs = make_runs(Path(arguments.output_dir).resolve(), arguments.recipe.resolve(), axes, flags)
    for run in runs:
        run.check()
    sweep = Sweep(runs, arguments.choose, axes.get("seed", [])[: arguments.search_seeds])
    executor = make_executor(arguments)
    if arguments.dry_run:
        for run in sweep.known():
            print(shlex.join([*executor.launch, *run.arguments]))
        return 0

    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.default_int_handler)  # as Ctrl-C
    try:
        failures = sweep.execute(executor)
    except KeyboardInterrupt:
        print("\nInterrupted. The same command resumes from here.", file=sys.stderr)
        return 130
    finally:
        executor.cancel()
    if any(run.results for run in runs):
        print_study(Path(arguments.output_dir), arguments.choose)
    for run, outcome in failures.items():
        print(f"\nFAILED: {run.name}; log: {run.folder / 'log.txt'}\n{outcome.last_lines}", file=sys.stderr)
    return 1 if failures else 0


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the sweep's own flags, and the recipe's."""
    parser = argparse.ArgumentParser(
        usage="python recipes/sweep.py RECIPE --output_dir FOLDER [flags]", allow_abbrev=False
    )
    parser.add_argument("recipe", type=Path, help="The recipe's script, such as recipes/glue.py.")
    parser.add_argument("--output_dir", required=True, help="Folder with a folder per task, with a folder per run.")
    for axis in AXES:
        parser.add_argument(f"--{axis}", nargs="+", metavar="VALUE", help="One or more values of the recipe's flag.")
    parser.add_argument(
        "--choose",
        nargs="+",
        choices=CHOICES,
        default=CHOSEN,
        help="Flags whose values validation chooses, per combination of the rest; default: learning rate, epochs.",
    )
    parser.add_argument("--search_seeds", type=int, help="Number of seeds that search; default: all, a full grid.")
    parser.add_argument("--jobs", type=int, help="Number of simultaneous runs; default: one per GPU, or one.")
    parser.add_argument(
        "--config_file",
        help="accelerate launch's configuration; default: recipes/accelerate/one_gpu.yaml or cpu.yaml.",
    )
    parser.add_argument(
        "--cluster", choices=("slurm", "local"), help="Submit a job per run, by submitit; default: run here."
    )
    parser.add_argument(
        "--cluster_options", nargs="+", metavar="NAME=VALUE", default=[], help="submitit's parameters."
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="Print the commands that are left; during the search, only those of the search.",
    )
    arguments, flags = parser.parse_known_args()
    if not arguments.recipe.is_file():
        parser.error(f"there is no recipe {arguments.recipe}")
    check_recipe(arguments.recipe, flags)
    for name in ("jobs", "search_seeds"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    if arguments.task == ["all"]:
        arguments.task = list(GLUE_TASKS)
    return arguments, flags


def make_executor(arguments: argparse.Namespace) -> "LocalExecutor | ClusterExecutor":
    """Return an executor for this machine's devices or a cluster."""
    if not arguments.cluster:
        return local_executor(arguments.jobs, arguments.config_file)
    try:
        from sweeping.cluster import ClusterExecutor, read_options
    except ModuleNotFoundError as error:
        raise RecipeError(f"--cluster needs submitit: pip install submitit ({error})") from error
    options = read_options(arguments.cluster_options, arguments.cluster, arguments.jobs, arguments.config_file)
    config = arguments.config_file or CONFIGS / ("one_gpu.yaml" if options["gpus_per_node"] else "cpu.yaml")
    folder = Path(arguments.output_dir).resolve() / "jobs"
    return ClusterExecutor(launch_command(str(config)), folder, arguments.cluster, options)


if __name__ == "__main__":
    sys.exit(end_with_one_line(main))
