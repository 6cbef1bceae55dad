"""A sweep: the runs that validation compares, then those of the other seeds at the best point.

A run's folder says whether it is finished, and its lock whether it is being executed. So processes
and machines may share a sweep. A grid needs no more than that. Where values are sampled, Optuna
samples and records them.
"""

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TextIO

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend, JournalStorage
from tqdm.auto import tqdm

from run.edge import RecipeError
from run.run import lower_is_better
from sweeping.processes import execute, lock
from sweeping.runs import CHOICES, PlannedRun, best_point


SECONDS_TO_LOOK = 2  # between two looks at the runs of other processes

Locked = tuple[PlannedRun, TextIO]  # a run and its lock


class Search:
    """A grid of runs, and the seeds that run only at its best point."""

    is_known = True  # whether the list of the runs to compare is complete

    def __init__(self, runs: Sequence[PlannedRun], other_seeds: Sequence[str]) -> None:
        self.runs = list(runs)
        self.other_seeds = other_seeds
        self.failed: dict[PlannedRun, str] = {}
        self.total = len(runs) + len(other_seeds)

    def left(self) -> list[PlannedRun]:
        """Return the runs that are left now; those of the other seeds only after the search."""
        unfinished = self._unfinished(self.runs)
        if unfinished or not self.is_known:
            return unfinished
        return self._unfinished(self._runs_of_other_seeds())

    def count_left(self) -> int:
        """Return the number of runs that are left, also of those whose values are not known yet."""
        known = [*self.runs, *self._runs_of_other_seeds()]
        return len(self._unfinished(known)) + self.total - len(known)

    def _runs_of_other_seeds(self) -> list[PlannedRun]:
        """Return the runs of the other seeds at the best point so far, if there is one."""
        best = best_point(self.runs)
        if best is None:
            return []
        return [self.runs[0].at({**best, "seed": seed}) for seed in self.other_seeds]

    def _unfinished(self, runs: Iterable[PlannedRun]) -> list[PlannedRun]:
        return [run for run in runs if not run.finished and run not in self.failed]

    def is_over(self) -> bool:
        """Return whether no run is left, in this process or in another."""
        return self.is_known and not self.left()

    def take(self) -> Locked | None:
        """Return a run that is left, with its lock; None if others have them all."""
        for run in self.left():
            if locked := lock(run.folder / "lock"):
                return run, locked
        return None

    def tell(self, run: PlannedRun) -> None:
        """Record the score of a finished run where it was sampled."""


class SampledSearch(Search):
    """Points that Optuna samples in the ranges LOW:HIGH of a run.

    The other seeds run only at the best of them.
    """

    def __init__(
        self, run: PlannedRun, other_seeds: Sequence[str], n_trials: int, study: optuna.Study
    ) -> None:
        super().__init__([], other_seeds)
        self.run, self.n_trials, self.study = run, n_trials, study
        self.total += n_trials
        self.space = {axis: _distribution(axis, run.point[axis]) for axis in _ranges(run)}
        self._read()

    def _read(self) -> None:
        """Read the points that all processes have sampled."""
        self.trials: dict[PlannedRun, int] = {}
        count = 0
        for trial in self.study.get_trials(deepcopy=False):
            if "point" in trial.user_attrs:
                self.trials[self.run.at(trial.user_attrs["point"])] = trial.number
                count += 1
        self.runs, self.is_known = list(self.trials), count >= self.n_trials

    def take(self) -> Locked | None:
        self._read()
        taken = super().take()  # a run that was killed, or one of another seed
        if taken is not None or self.is_known:
            return taken
        run = self._sample()
        locked = lock(run.folder / "lock")
        return (run, locked) if locked else None

    def _sample(self) -> PlannedRun:
        """Return the run at a new point, which Optuna records."""
        trial = self.study.ask(self.space)
        point = dict(self.run.point)
        for axis, value in trial.params.items():
            point[axis] = str(value)
        trial.set_user_attr("point", point)
        self._read()
        return self.run.at(point)

    def tell(self, run: PlannedRun) -> None:
        results = run.results
        if run in self.trials and results:
            self.study.tell(self.trials[run], results["best_score"], skip_if_finished=True)


def _ranges(run: PlannedRun) -> list[str]:
    """Return the flags of a run whose values are ranges LOW:HIGH."""
    return [axis for axis in CHOICES if ":" in run.point.get(axis, "")]


def _distribution(axis: str, text: str) -> BaseDistribution:
    """Return the distribution of a range: sizes and rates on a logarithmic scale, whole epochs."""
    low, high = text.split(":")
    if axis == "learning_rate":
        return FloatDistribution(float(low), float(high), log=True)
    if axis == "num_train_epochs":
        return FloatDistribution(float(low), float(high), step=1)
    return IntDistribution(int(low), int(high), log=axis in ("r", "lora_r"))


def make_searches(
    output: Path,
    runs: Sequence[PlannedRun],
    choices: Sequence[str] = CHOICES,
    search_seeds: int | None = None,
    n_trials: int | None = None,
    dry_run: bool = False,
) -> list[Search]:
    """Return a search for each combination of the values that validation does not choose.

    It is a grid or, with `n_trials`, points that Optuna samples in the ranges. A dry run writes
    nothing.
    """
    for run in runs:
        run.check()
    seeds = list(dict.fromkeys(run.point["seed"] for run in runs if "seed" in run.point))
    other_seeds = seeds[search_seeds:] if search_seeds else []
    searching = [run for run in runs if run.point.get("seed") not in other_seeds]
    chosen = (*(_ranges(runs[0]) or choices), "seed")
    by_name: dict[str, list[PlannedRun]] = {}  # runs that differ only in what is chosen
    for run in searching:
        fixed = {axis: run.point[axis] for axis in run.point if axis not in chosen}
        by_name.setdefault(str(run.at(fixed).folder.relative_to(output)), []).append(run)
    if n_trials is None:
        return [Search(compared, other_seeds) for compared in by_name.values()]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samples = []
    for name, (run, *_) in by_name.items():
        study = _open_study(run, name, output / "optuna.journal", dry_run)
        samples.append(SampledSearch(run, other_seeds, n_trials, study))
    return [*samples]


def _open_study(run: PlannedRun, name: str, journal: Path, dry_run: bool) -> optuna.Study:
    """Return Optuna's study in a journal, which other processes share; that of a dry run, unless it
    has begun, is in memory.
    """
    study_name = f"{run.recipe.stem}: {name}"
    storage = None
    if journal.is_file() or not dry_run:
        journal.parent.mkdir(parents=True, exist_ok=True)
        storage = JournalStorage(JournalFileBackend(str(journal)))
        if dry_run and study_name not in optuna.get_all_study_names(storage):
            storage = None
    words = [word for flag in run.flags for word in flag.split("=", 1)]
    chosen_by = dict(pairwise(words)).get("--metric_for_best_model", "")
    lower = run.recipe.name == "mlm.py" or lower_is_better(chosen_by)
    study = optuna.create_study(
        study_name=study_name,
        storage=storage,
        direction="minimize" if lower else "maximize",
        load_if_exists=True,
    )
    asked = {axis: run.point[axis] for axis in _ranges(run)} | {"metric_for_best_model": chosen_by}
    begun = study.user_attrs.get("asked", asked)
    if begun != asked:
        raise RecipeError(
            f"{journal} samples with {begun}; now {asked} is asked for, which would not change "
            "the points that it has. Give another --output_dir."
        )
    study.set_user_attr("asked", asked)
    return study


def execute_all(
    searches: Sequence[Search], launch: Sequence[str], slots: Sequence[Mapping[str, str]]
) -> dict[PlannedRun, str]:
    """Execute all runs that are not finished, one at a time per slot; return those that failed.

    It waits for the runs of other processes. A failed run has the last lines of its log.
    """
    stopped = threading.Event()
    total = sum(search.count_left() for search in searches)
    often = 0.5 if sys.stderr.isatty() else 60  # in a log file, a line per minute is enough
    with (
        ThreadPoolExecutor(len(slots)) as threads,
        tqdm(total=total, unit="run", mininterval=often) as bar,
    ):
        workers = _Workers(searches, launch, stopped, bar)
        try:
            list(threads.map(workers.work, slots))
        finally:
            stopped.set()
    failed: dict[PlannedRun, str] = {}
    for search in searches:
        failed |= search.failed
    return failed


@dataclass
class _Workers:
    """Threads that execute the runs of searches, one for each slot."""

    searches: Sequence[Search]
    launch: Sequence[str]
    stopped: threading.Event
    bar: "tqdm[object]"
    taking: threading.Lock = field(default_factory=threading.Lock)

    def work(self, slot: Mapping[str, str]) -> None:
        """Execute runs until none is left, in this process or in another."""
        while not self.stopped.is_set():
            with self.taking:
                taken = self._take()
                is_over = all(search.is_over() for search in self.searches)
            if taken is not None:
                search, run, locked = taken
                with locked:
                    self._execute(search, run, locked, slot)
            elif is_over:
                return
            else:
                self.stopped.wait(SECONDS_TO_LOOK)

    def _take(self) -> tuple[Search, PlannedRun, TextIO] | None:
        for search in self.searches:
            if taken := search.take():
                return search, *taken
        return None

    def _execute(
        self, search: Search, run: PlannedRun, locked: TextIO, slot: Mapping[str, str]
    ) -> None:
        """Execute a run, unless another process has finished it, and say how it ended."""
        if not run.finished:
            error = execute(run, self.launch, locked, slot, self.stopped)
            if error:
                search.failed[run] = error
        search.tell(run)
        results = run.results
        if results:
            text = f"finished: {run.name} {results['chosen_by']} {results['best_score']}"
        elif run in search.failed:
            text = f"failed: {run.name}"
        else:
            text = f"stopped: {run.name}"
        self.bar.write(text)
        self.bar.update()
