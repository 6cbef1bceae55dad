"""A sweep in two stages: a search by the first seeds, then the other seeds at the best points."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from sweeping.processes import LocalExecutor, Outcome, is_locked
from sweeping.runs import PlannedRun, best_point, group_by, without_seed


if TYPE_CHECKING:
    from sweeping.cluster import ClusterExecutor

# Intervals at which to check the jobs, and the runs that another sweep executes.
SECONDS_TO_LOOK, SECONDS_TO_WAIT = 0.5, 2


class Sweep:
    """The runs of a sweep, and which of them to execute.

    Args:
        runs: All combinations.
        chosen: The axes whose values validation chooses.
        search_seeds: The seeds of the search; empty if the seed is not varied.
    """

    def __init__(self, runs: Sequence[PlannedRun], chosen: Sequence[str], search_seeds: Sequence[str]) -> None:
        self.runs, self.chosen = runs, chosen
        self.search = [run for run in runs if run.point.get("seed") in (*search_seeds, None)]
        self.groups = group_by(self.search, without=[*chosen, "seed"])

    def at_the_best_points(self) -> list[PlannedRun]:
        """Return the runs of the other seeds, as far as the search has come."""
        best = [best_point(runs) for runs in self.groups.values()]
        return [run for run in self.runs if run not in self.search and without_seed(run.point) in best]

    def known(self) -> list[PlannedRun]:
        """Return the runs that are left; those of the other seeds only after the search."""
        runs = [run for run in self.search if not run.results]
        return runs or [run for run in self.at_the_best_points() if not run.results]

    def execute(self, executor: "LocalExecutor | ClusterExecutor") -> dict[PlannedRun, Outcome]:
        """Execute the runs that are not finished; return those that failed."""
        seeds, searching = (len({run.point.get("seed") for run in runs}) for runs in (self.runs, self.search))
        total = len(self.search) + len(self.groups) * (seeds - searching)
        # In a log file, a line per minute is enough.
        often = 0.5 if sys.stderr.isatty() else 60
        with tqdm(total=total, unit="run", smoothing=0, miniters=0, mininterval=often, dynamic_ncols=True) as bar:
            failures = execute_all(self.search, executor, bar)
            return failures | execute_all(self.at_the_best_points(), executor, bar)


def execute_all(
    runs: Sequence[PlannedRun], executor: "LocalExecutor | ClusterExecutor", bar: "tqdm[Any]"
) -> dict[PlannedRun, Outcome]:
    """Execute the runs that are not finished, and wait for those of another sweep; return those that failed."""
    failures: dict[PlannedRun, Outcome] = {}
    pending = list(runs)
    ended = sum(run.results is not None for run in runs)
    bar.initial += ended  # runs that finished earlier say nothing about the time of the others
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


def outcomes(jobs: dict[PlannedRun, Any], bar: "tqdm[Any]") -> Iterator[tuple[PlannedRun, Outcome]]:
    """Yield the outcome of each job as soon as it is known."""
    while jobs:
        for run in [run for run, job in jobs.items() if job.done()]:
            job = jobs.pop(run)
            error = job.exception()
            yield run, Outcome("failed", f"{error}") if error else job.result()
        bar.update(0)  # updates the time left
        time.sleep(SECONDS_TO_LOOK)


def _score(run: PlannedRun) -> str:
    results = run.results
    return f"{results['chosen_by']} {results['best_score']}, {results['seconds']:.0f} s" if results else ""
