r"""Run a recipe for each combination of tasks, methods, sizes, rates, epochs and seeds.

    python recipes/studies/sweep.py recipes/glue.py --task mrpc cola --share_layers 0 3 \
        --learning_rate 3e-4 1e-3 3e-3 --seed 0 1 2 --search_seeds 1 --output_dir runs/study
    python recipes/studies/sweep.py recipes/glue.py --task all --method full \
        --learning_rate 2e-5 5e-5 --output_dir runs/study
    python recipes/studies/sweep.py ... --learning_rate 1e-5:3e-3 --n_trials 20  # samples the range
    python recipes/studies/sweep.py ... --dry_run  # prints what it would run

A run trains on one task. Validation chooses among the values of the flags in --choose. Started
again, or on several machines at once, the same command skips finished runs, resumes killed ones and
waits for the others. Several sweeps may share a folder, for example if full fine-tuning has its own
learning rates. docs/papers.md says more.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from math import isnan
from pathlib import Path

import recipes_path  # noqa: F401
from figures.flags import add_choose
from results.additional import ALL
from results.study import print_study
from run.edge import end_with_one_line
from sweeping.plan import describe_grid, tabulate
from sweeping.processes import find_slots, launch_command
from sweeping.runs import AXES, CHOICES, make_runs
from sweeping.search import Search, execute_all, make_searches
from tasks.scores import GLUE_TASKS


def main() -> int:
    """Execute all runs of the command line and print the tables.

    Return 1 if a run failed, 130 if interrupted.
    """
    arguments, flags = parse_arguments()
    searches, output = plan(arguments, flags), arguments.output_dir.resolve()
    slots = find_slots(arguments.jobs, arguments.config_file)
    launch = launch_command(arguments.config_file, slots)
    if arguments.dry_run:
        show_plan(searches, launch)
        return 0
    print(f"{sum(search.count_left() for search in searches):,} runs are left", file=sys.stderr)

    # SIGTERM and SIGHUP end the sweep as Ctrl-C does, unless nohup has SIGHUP ignored.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        failures = execute_all(searches, launch, slots)
    except KeyboardInterrupt:
        print("\nInterrupted. The same command resumes from here.", file=sys.stderr)
        return 130
    if any(output.rglob("results.json")):
        print_study(output, arguments.choose)
    for run, error in failures.items():
        print(f"\nFAILED: {run.name}; log: {run.folder / 'log.txt'}\n{error}", file=sys.stderr)
    return 1 if failures else 0


def plan(arguments: argparse.Namespace, flags: Sequence[str]) -> list[Search]:
    """Return the searches of a command line."""
    given, output = vars(arguments), arguments.output_dir.resolve()
    axes = {axis: given[axis] for axis in AXES if given[axis]}
    runs = make_runs(output, arguments.recipe.resolve(), axes, flags)
    return make_searches(
        output,
        runs,
        arguments.choose,
        arguments.search_seeds,
        arguments.n_trials,
        arguments.dry_run,
    )


def show_plan(searches: Sequence[Search], launch: Sequence[str]) -> None:
    """Print what is left by task, the grid, and the command of the first run."""
    runs = [run for search in searches for run in search.left()]
    table = tabulate(searches)
    hours = table["hours"].sum(skipna=False)
    total = f"{table['runs'].sum():,} runs, {'?' if isnan(hours) else f'{hours:,.1f}'} hours"
    left = sum(search.count_left() for search in searches)
    if runs:
        print(table.to_string(float_format="{:,.1f}".format, na_rep="?", index_names=False))
        print(f"{total}: {describe_grid(runs)}\n{shlex.join([*launch, *runs[0].arguments])}\n")
    elif left:
        print(f"{left:,} runs, whose values are drawn in ranges")
    else:
        print("0 runs: all are finished")


def parse_arguments(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the sweep's own arguments, and the flags for each run."""
    parser = make_parser()
    arguments, flags = parser.parse_known_args(words)
    if not arguments.recipe.is_file():
        parser.error(f"there is no recipe {arguments.recipe}")
    check_ranges(parser, arguments)
    if arguments.n_trials:
        arguments.search_seeds = 1
    if arguments.task == ["all"]:
        arguments.task = ALL if arguments.recipe.name == "paper_tasks.py" else list(GLUE_TASKS)
    return arguments, flags


def check_ranges(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse a range LOW:HIGH without --n_trials, or beside other values, and the reverse."""
    values = [getattr(arguments, axis) or [] for axis in CHOICES]
    ranges = [of_axis for of_axis in values if ":" in "".join(of_axis)]
    are_single = all(len(of_axis) == 1 for of_axis in ranges)
    if bool(ranges) != (arguments.n_trials is not None) or not are_single:
        parser.error(
            "--n_trials samples, and a single LOW:HIGH is the range of a flag; without it, give "
            "values."
        )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="python recipes/studies/sweep.py RECIPE --output_dir FOLDER [flags]",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="All other flags, such as --data_dir and --model_name, are passed to each run of "
        "the recipe.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("recipe", type=Path, help="The recipe's script, such as recipes/glue.py.")
    add("--output_dir", required=True, type=Path, help="Folder of a folder per task and run.")
    for axis in AXES:
        # The recipes know both spellings.
        spellings = dict.fromkeys((f"--{axis}", f"--{axis.replace('_', '-')}"))
        add(*spellings, nargs="+", metavar="VALUE", help=f"Values of the recipe's --{axis}.")
    add_choose(parser)
    add("--search_seeds", type=int, help="Number of seeds that search; default: all, a full grid.")
    add("--n_trials", type=int, help="Sample so many points in ranges LOW:HIGH.")
    add("--jobs", type=int, help="Number of simultaneous runs; default: one per GPU, or one.")
    add("--config_file", help="Of accelerate launch; default: one_gpu.yaml or cpu.yaml.")
    add("--dry_run", action="store_true", help="Print what is left, and about how long it takes.")
    return parser


if __name__ == "__main__":
    sys.exit(end_with_one_line(main))
