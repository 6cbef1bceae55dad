"""A sweep: the runs that validation compares, then those of the other seeds at the best point.

A run's folder says whether it is finished, and its lock whether it is being executed, so processes
and machines may share a sweep. A grid needs no more than that; where values are sampled, Optuna
samples and records them.
"""

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend, JournalStorage
from tqdm.auto import tqdm

from common.run import lower_is_better
from sweeping.processes import execute, lock
from sweeping.runs import CHOICES, PlannedRun, best_point


SECONDS_TO_LOOK = 2  # between two looks at the runs of other processes


class Search:
    """A grid of runs, and the seeds that run only at its best point."""

    is_known = True  # whether the list of the runs to compare is complete

    def __init__(self, runs: Sequence[PlannedRun], other_seeds: Sequence[str]) -> None:
        self.runs, self.other_seeds, self.failed = list(runs), other_seeds, dict[PlannedRun, str]()
        self.total = len(runs) + len(other_seeds)

    def left(self) -> list[PlannedRun]:
        """Return the runs that are left now; those of the other seeds only after the search."""
        left = self._unfinished(self.runs)
        if not left and self.is_known and self.other_seeds and (best := best_point(self.runs)):
            left = self._unfinished(
                self.runs[0].at({**best, "seed": seed}) for seed in self.other_seeds
            )
        return left

    def count_left(self) -> int:
        """Return the number of runs that are left, also of those whose values are not known yet."""
        is_searched = self.is_known and all(run.finished for run in self.runs)
        return len(self.left()) + (0 if is_searched else self.total - len(self.runs))

    def _unfinished(self, runs: Iterable[PlannedRun]) -> list[PlannedRun]:
        return [run for run in runs if not run.finished and run not in self.failed]

    def is_over(self) -> bool:
        """Return whether no run is left, in this process or in another."""
        return self.is_known and not self.left()

    def take(self) -> tuple[PlannedRun, TextIO] | None:
        """Return a run that is left, with its lock; None if others have them all."""
        return next(
            ((run, locked) for run in self.left() if (locked := lock(run.folder / "lock"))), None
        )

    def tell(self, run: PlannedRun) -> None:
        """Record the score of a finished run where it was sampled."""


class SampledSearch(Search):
    """Points that Optuna samples in the ranges LOW:HIGH of a run, and the seeds that run only at
    the best of them.
    """

    def __init__(
        self, run: PlannedRun, other_seeds: Sequence[str], n_trials: int, study: optuna.Study
    ) -> None:
        super().__init__([], other_seeds)
        self.run, self.n_trials, self.study = run, n_trials, study
        self.total += n_trials
        self.space = {
            axis: _distribution(axis, run.point[axis])
            for axis in CHOICES
            if ":" in run.point.get(axis, "")
        }
        self._read()

    def _read(self) -> None:
        """Read the points that all processes have sampled."""
        trials = [
            trial for trial in self.study.get_trials(deepcopy=False) if "point" in trial.user_attrs
        ]
        self.trials = {self.run.at(trial.user_attrs["point"]): trial.number for trial in trials}
        self.runs, self.is_known = list(self.trials), len(trials) >= self.n_trials

    def take(self) -> tuple[PlannedRun, TextIO] | None:
        self._read()
        taken = super().take()  # a run that was killed, or one of another seed
        if taken is None and not self.is_known:
            trial = self.study.ask(self.space)
            point = {**self.run.point, **{axis: str(value) for axis, value in trial.params.items()}}
            trial.set_user_attr("point", point)
            self._read()
            run = self.run.at(point)
            taken = (run, locked) if (locked := lock(run.folder / "lock")) else None
        return taken

    def tell(self, run: PlannedRun) -> None:
        if run in self.trials and (results := run.results):
            self.study.tell(self.trials[run], results["best_score"], skip_if_finished=True)


def _distribution(axis: str, text: str) -> BaseDistribution:
    """Return the distribution of a range: sizes and rates on a logarithmic scale, epochs in whole
    numbers.
    """
    low, high = text.split(":")
    if axis in ("learning_rate", "num_train_epochs"):
        is_rate = axis == "learning_rate"
        return FloatDistribution(float(low), float(high), log=is_rate, step=None if is_rate else 1)
    return IntDistribution(int(low), int(high), log=axis in ("r", "lora_r"))


def make_searches(
    output: Path, runs: Sequence[PlannedRun], chosen: Sequence[str] = CHOICES,
    search_seeds: int | None = None, n_trials: int | None = None, storage: str | None = None,
) -> list[Search]:  # fmt: skip
    """Return a search for each combination of the values that validation does not choose: a grid
    or, with `n_trials`, points that Optuna samples in the ranges.
    """
    seeds = list(dict.fromkeys(run.point["seed"] for run in runs if "seed" in run.point))
    others = seeds[search_seeds:] if search_seeds else []
    ranges = [axis for axis, value in runs[0].point.items() if axis in CHOICES and ":" in value]
    groups: dict[str, list[PlannedRun]] = {}
    for run in runs:
        run.check()
        fixed = {
            axis: value
            for axis, value in run.point.items()
            if axis not in (*(ranges or chosen), "seed")
        }
        if run.point.get("seed") not in others:
            groups.setdefault(str(run.at(fixed).folder.relative_to(output)), []).append(run)
    if n_trials is None:
        return [Search(same, others) for same in groups.values()]
    output.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    in_storage = storage or JournalStorage(JournalFileBackend(str(output / "optuna.journal")))
    lower = runs[0].recipe.name == "mlm.py" or any(lower_is_better(flag) for flag in runs[0].flags)
    direction = "minimize" if lower else "maximize"
    return [
        SampledSearch(same[0], others, n_trials, optuna.create_study(
            study_name=f"{same[0].recipe.stem}: {name}", storage=in_storage, direction=direction, load_if_exists=True,
        ))
        for name, same in groups.items()
    ]  # fmt: skip


def execute_all(
    searches: Sequence[Search], launch: Sequence[str], slots: Sequence[Mapping[str, str]]
) -> dict[PlannedRun, str]:
    """Execute all runs that are not finished, one at a time per slot, and wait for those of other
    processes; return those that have failed, with the last lines of their logs.
    """
    stopped, taking = threading.Event(), threading.Lock()
    total = sum(search.count_left() for search in searches)
    often = 0.5 if sys.stderr.isatty() else 60  # in a log file, a line per minute is enough

    def work(slot: Mapping[str, str]) -> None:
        while not stopped.is_set():
            with taking:
                chosen = next(
                    ((search, *taken) for search in searches if (taken := search.take())), None
                )
                is_over = all(search.is_over() for search in searches)
            if chosen is None and is_over:
                return
            if chosen is None:
                stopped.wait(SECONDS_TO_LOOK)
                continue
            search, run, locked = chosen
            with locked:
                if not run.finished and (error := execute(run, launch, locked, slot, stopped)):
                    search.failed[run] = error
                search.tell(run)
            if results := run.results:
                bar.write(f"finished: {run.name} {results['chosen_by']} {results['best_score']}")
            else:
                bar.write(f"{'failed' if run in search.failed else 'stopped'}: {run.name}")
            bar.update()

    with (
        ThreadPoolExecutor(len(slots)) as threads,
        tqdm(total=total, unit="run", mininterval=often) as bar,
    ):
        try:
            list(threads.map(work, slots))
        finally:
            stopped.set()
    return {run: error for search in searches for run, error in search.failed.items()}
