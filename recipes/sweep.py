"""Runs a recipe for each combination of tasks, methods, sizes, learning rates, epochs and seeds, and prints the table.

    python recipes/sweep.py recipes/glue.py --task mrpc cola --method houlsby --share_layers 0 3 \
        --learning_rate 3e-4 1e-3 3e-3 --seed 0 1 2 --search_seeds 1 --data_dir glue --output_dir runs/study
    python recipes/sweep.py recipes/glue.py --task all --method full --learning_rate 2e-5 5e-5 --output_dir runs/study
    python recipes/sweep.py ... --cluster slurm --cluster_options slurm_partition=gpu timeout_min=240   # a job per run
    python recipes/sweep.py ... --dry_run                                                         # prints the commands

Flags that a sweep does not know are the recipe's, which trains on one task at a time, and go to each run as they are.
Validation chooses among the values of what --choose names. A full grid has a run per combination; with --search_seeds
1 the first seed searches, and the others run only at the best point. Each GPU has one run at a time. Started again, or
twice at once, a sweep leaves out what has ended and goes on where a run was killed; with jobs on a cluster it waits
for them, and Ctrl-C cancels them. Several sweeps may share a folder, as where full fine-tuning has learning rates of
its own: `python recipes/study_table.py runs/study` prints the table of all runs in it.
"""

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import study_table
from common.errors import RecipeError
from study_papers import GLUE_TASKS
from sweep_processes import LocalExecutor, Outcome, find_places, is_locked, launch_command
from sweep_runs import AXES, CHOICES, CHOSEN, Run, best_point, check_recipe, group_by, make_runs, without_seed
from tqdm.auto import tqdm


if TYPE_CHECKING:
    from sweep_cluster import ClusterExecutor

CONFIGS = Path(__file__).parent / "accelerate"
# Between two looks at the jobs, and at runs that another sweep is at.
SECONDS_TO_LOOK, SECONDS_TO_WAIT = 0.5, 2


def main() -> int:
    """Reads the command line, runs all runs, prints the table; 1 if a run has failed, 130 if it was interrupted."""
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
        failures = sweep.complete(executor)
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on from here.", file=sys.stderr)
        return 130
    finally:
        executor.cancel()
    if any(run.results for run in runs):
        study_table.print_study(Path(arguments.output_dir), arguments.choose)
    for run, outcome in failures.items():
        print(f"\nFAILED: {run.name}; log: {run.folder / 'log.txt'}\n{outcome.last_lines}", file=sys.stderr)
    return 1 if failures else 0


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The sweep's own flags, and the recipe's."""
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
        help="What validation chooses, for each combination of the rest; default: learning rate and epochs.",
    )
    parser.add_argument("--search_seeds", type=int, help="So many of the seeds search; default: all, a full grid.")
    parser.add_argument("--jobs", type=int, help="Runs at once; default: as many as there are GPUs for, or one.")
    parser.add_argument("--config_file", help="For accelerate launch; default: accelerate/one_gpu.yaml or cpu.yaml.")
    parser.add_argument("--cluster", choices=("slurm", "local"), help="A job per run, by submitit; default: none.")
    parser.add_argument(
        "--cluster_options", nargs="+", metavar="NAME=VALUE", default=[], help="submitit's parameters."
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="Print the commands that are left; of the search, as long as it has not ended.",
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
    """Where the runs go: to this machine's devices, or to a cluster."""
    if not arguments.cluster:
        places = find_places(arguments.jobs, arguments.config_file)
        config = arguments.config_file or CONFIGS / ("cpu.yaml" if places[0] is None else "one_gpu.yaml")
        return LocalExecutor(launch_command(str(config)), places)
    try:
        from sweep_cluster import ClusterExecutor, read_options
    except ModuleNotFoundError as error:
        raise RecipeError(f"--cluster needs submitit: pip install submitit ({error})") from error
    options = read_options(arguments.cluster_options, arguments.cluster, arguments.jobs, arguments.config_file)
    config = arguments.config_file or CONFIGS / ("one_gpu.yaml" if options["gpus_per_node"] else "cpu.yaml")
    folder = Path(arguments.output_dir).resolve() / "jobs"
    return ClusterExecutor(launch_command(str(config)), folder, arguments.cluster, options)


class Sweep:
    """The runs, in two stages: a search by the first seeds, then the other seeds at the best points.

    Args:
        runs: All combinations.
        chosen: The axes that validation chooses.
        search_seeds: The seeds that search; none if the seed is not varied.
    """

    def __init__(self, runs: Sequence[Run], chosen: Sequence[str], search_seeds: Sequence[str]) -> None:
        self.runs, self.chosen = runs, chosen
        self.search = [run for run in runs if run.point.get("seed") in (*search_seeds, None)]
        self.groups = group_by(self.search, without=[*chosen, "seed"])

    def at_the_best_points(self) -> list[Run]:
        """The other seeds' runs, as far as the search has come."""
        best = [best_point(runs) for runs in self.groups.values()]
        return [run for run in self.runs if run not in self.search and without_seed(run.point) in best]

    def known(self) -> list[Run]:
        """What is left to run, the other seeds only when the search has ended."""
        runs = [run for run in self.search if not run.results]
        return runs or [run for run in self.at_the_best_points() if not run.results]

    def complete(self, executor: "LocalExecutor | ClusterExecutor") -> dict[Run, Outcome]:
        """Runs what has not ended yet; returns what has failed."""
        seeds, searching = (len({run.point.get("seed") for run in runs}) for runs in (self.runs, self.search))
        total = len(self.search) + len(self.groups) * (seeds - searching)
        # In a log, a line per minute is enough.
        often = 0.5 if sys.stderr.isatty() else 60
        with tqdm(total=total, unit="run", smoothing=0, miniters=0, mininterval=often, dynamic_ncols=True) as bar:
            failures = complete(self.search, executor, bar)
            return failures | complete(self.at_the_best_points(), executor, bar)


def complete(runs: Sequence[Run], executor: "LocalExecutor | ClusterExecutor", bar: "tqdm[Any]") -> dict[Run, Outcome]:
    """Runs what has not ended yet, and waits for what another sweep is at; returns what has failed."""
    failures: dict[Run, Outcome] = {}
    pending = list(runs)
    ended = sum(run.results is not None for run in runs)
    bar.initial += ended  # what ended before tells nothing of the time that the others take
    while True:
        left = [run for run in pending if not run.results]
        bar.update(len(pending) - len(left))
        if not left:
            return failures
        free = [run for run in left if not is_locked(run)]
        jobs = dict(zip(free, executor.submit(free), strict=True))
        pending = [run for run in left if run not in jobs]
        for run, outcome in outcomes(jobs, bar):
            if outcome.status == "taken":
                pending.append(run)
                continue
            bar.update()
            bar.write(f"{outcome.status}: {run.name} {_score(run)}")
            if outcome.status != "finished":
                failures[run] = outcome
        if pending:
            time.sleep(SECONDS_TO_WAIT)


def outcomes(jobs: dict[Run, Any], bar: "tqdm[Any]") -> Iterator[tuple[Run, Outcome]]:
    """What becomes of the jobs, as soon as it is known."""
    while jobs:
        for run in [run for run, job in jobs.items() if job.done()]:
            job = jobs.pop(run)
            error = job.exception()
            yield run, Outcome("failed", f"{error}") if error else job.result()
        bar.update(0)  # shows the time left
        time.sleep(SECONDS_TO_LOOK)


def _score(run: Run) -> str:
    results = run.results
    return f"{results['chosen_by']} {results['best_score']}, {results['seconds']:.0f} s" if results else ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RecipeError as error:
        sys.exit(f"error: {error}")
