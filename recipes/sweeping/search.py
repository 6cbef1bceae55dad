"""A sweep: the runs that validation compares, then those of the other seeds at the best point.

A run's folder says whether it is finished, and its lock whether it is being executed, so processes and machines may
share a sweep. A grid needs no more than that; where values are sampled, Optuna samples, prunes and records them.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from tqdm.auto import tqdm

from sweeping.processes import execute, lock
from sweeping.runs import CHOICES, PlannedRun, best_point


SECONDS_TO_LOOK = 2  # between two looks at the runs of other processes, or at the checkpoints of one's own
Taken = tuple[PlannedRun, TextIO, Trial | FrozenTrial | None]


class Search:
    """A grid of runs, and the seeds that run only at its best point.

    Args:
        runs: The runs to compare.
        other_seeds: The seeds that run only at the best point.
    """

    def __init__(self, runs: Sequence[PlannedRun], other_seeds: Sequence[str]) -> None:
        self.runs, self.other_seeds = list(runs), other_seeds

    @property
    def total(self) -> int:
        """The number of all runs."""
        return len(self.runs) + len(self.other_seeds)

    def left(self, failed: Mapping[PlannedRun, str]) -> list[PlannedRun]:
        """Return the runs that are left now; those of the other seeds only after the search."""
        left = [run for run in self.runs if not run.finished and run not in failed]
        if not left and self.other_seeds and (best := best_point(self.runs)):
            others = [self.runs[0].at({**best, "seed": seed}) for seed in self.other_seeds]
            left = [run for run in others if not run.finished and run not in failed]
        return left

    def is_over(self, failed: Mapping[PlannedRun, str]) -> bool:
        """Return whether no run is left, in this process or in another."""
        return not self.left(failed)

    def take(self, failed: Mapping[PlannedRun, str]) -> Taken | None:
        """Return a run that is left, with its lock and, if it was sampled, its trial; None if others have them all."""
        return next(((run, locked, None) for run in self.left(failed) if (locked := lock(run.folder / "lock"))), None)

    def tell(self, trial: Trial | FrozenTrial, score: float | None) -> None:
        """Record the score of a sampled point; None if the pruner has stopped it."""
        raise NotImplementedError


class SampledSearch(Search):
    """Points that Optuna samples in ranges LOW:HIGH, and the seeds that run only at the best of them.

    Args:
        run: A run with ranges among its values.
        other_seeds: The seeds that run only at the best point.
        n_trials: Number of points to sample.
        name: The study's name.
        storage: Address of Optuna's database; None: a journal in `output`.
        output: The folder of all runs.
        prunes: Whether to stop runs that are worse than the median of the others at the same epoch.
    """

    def __init__(
        self, run: PlannedRun, other_seeds: Sequence[str], n_trials: int, name: str, storage: str | None, output: Path,
        prunes: bool,
    ) -> None:  # fmt: skip
        super().__init__([], other_seeds)
        self.run, self.n_trials = run, n_trials
        self.space = {axis: _distribution(axis, run.point[axis]) for axis in CHOICES if ":" in run.point.get(axis, "")}
        lower = run.recipe.name == "mlm.py" or any(flag.endswith("loss") for flag in run.flags)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        output.mkdir(parents=True, exist_ok=True)
        self.study = optuna.create_study(
            study_name=name, storage=storage or JournalStorage(JournalFileBackend(str(output / "optuna.journal"))),
            direction="minimize" if lower else "maximize", load_if_exists=True,
            pruner=optuna.pruners.MedianPruner() if prunes else optuna.pruners.NopPruner(),
        )  # fmt: skip
        self._read()

    @property
    def total(self) -> int:
        return self.n_trials + len(self.other_seeds)

    def _read(self) -> None:
        """Read the points that all processes have sampled."""
        trials = [trial for trial in self.study.get_trials(deepcopy=False) if "point" in trial.user_attrs]
        self.sampled = len(trials)
        self.trials = {self.run.at(trial.user_attrs["point"]): trial for trial in trials}
        self.runs = [run for run, trial in self.trials.items() if trial.state is not TrialState.PRUNED]

    def left(self, failed: Mapping[PlannedRun, str]) -> list[PlannedRun]:
        if self.sampled < self.n_trials:
            return [run for run in self.runs if not run.finished and run not in failed]
        return super().left(failed)

    def is_over(self, failed: Mapping[PlannedRun, str]) -> bool:
        return self.sampled >= self.n_trials and super().is_over(failed)

    def take(self, failed: Mapping[PlannedRun, str]) -> Taken | None:
        self._read()
        if taken := super().take(failed):  # a run that was killed, or one of another seed
            trial = self.trials.get(taken[0])
            return *taken[:2], None if trial is None or trial.state.is_finished() else trial
        if self.sampled >= self.n_trials:
            return None
        trial = self.study.ask(self.space)
        trial.set_user_attr("point", {**self.run.point, **{axis: str(value) for axis, value in trial.params.items()}})
        self._read()
        run = self.run.at(trial.user_attrs["point"])
        locked = lock(run.folder / "lock")
        return (run, locked, trial) if locked else None

    def tell(self, trial: Trial | FrozenTrial, score: float | None) -> None:
        self.study.tell(trial.number, score, TrialState.PRUNED if score is None else None)


def _distribution(axis: str, text: str) -> BaseDistribution:
    """Return the distribution of a range: sizes and rates on a logarithmic scale, epochs in whole numbers."""
    low, high = text.split(":")
    if axis in ("learning_rate", "num_train_epochs"):
        is_rate = axis == "learning_rate"
        return FloatDistribution(float(low), float(high), log=is_rate, step=None if is_rate else 1)
    return IntDistribution(int(low), int(high), log=axis in ("r", "lora_r"))


class Sweep:
    """Runs of a recipe, and which of them to execute.

    Args:
        output: The folder of all runs.
        runs: All combinations.
        chosen: The axes whose values validation chooses.
        search_seeds: Number of seeds of the search; None: all.
        n_trials: Number of points to sample in the ranges of `chosen`, per combination of the rest; None: a grid.
        storage, prunes: See `SampledSearch`.
    """

    def __init__(
        self, output: Path, runs: Sequence[PlannedRun], chosen: Sequence[str] = CHOICES,
        search_seeds: int | None = None, n_trials: int | None = None, storage: str | None = None, prunes: bool = False,
    ) -> None:  # fmt: skip
        self.failures: dict[PlannedRun, str] = {}
        self._stopped, self._taking = threading.Event(), threading.Lock()
        seeds = list(dict.fromkeys(run.point["seed"] for run in runs if "seed" in run.point))
        others = seeds[search_seeds:] if search_seeds else []
        groups: dict[str, list[PlannedRun]] = {}
        for run in runs:
            run.check()
            fixed = {axis: value for axis, value in run.point.items() if axis not in (*chosen, "seed")}
            if run.point.get("seed") not in others:
                groups.setdefault(str(run.at(fixed).folder.relative_to(output)), []).append(run)
        self.searches = [
            Search(same, others)
            if n_trials is None
            else SampledSearch(same[0], others, n_trials, f"{same[0].recipe.stem}: {name}", storage, output, prunes)
            for name, same in groups.items()
        ]

    @property
    def others(self) -> int:
        """The number of runs of the seeds that do not search."""
        return sum(len(search.other_seeds) for search in self.searches)

    def left(self) -> Iterator[PlannedRun]:
        """Yield the runs that are left now; those of the other seeds only after the search."""
        for search in self.searches:
            yield from search.left(self.failures)

    def execute(self, launch: Sequence[str], slots: Sequence[Mapping[str, str]]) -> dict[PlannedRun, str]:
        """Execute all runs that are not finished, one at a time per slot, and wait for those of other processes.

        Args:
            launch: The command, to which the recipe and its flags are appended.
            slots: Variables of the environment for each of the simultaneous runs.

        Returns:
            The runs that have failed, and the last lines of their logs.
        """
        total = sum(search.total for search in self.searches)
        often = 0.5 if sys.stderr.isatty() else 60  # in a log file, a line per minute is enough
        with ThreadPoolExecutor(len(slots)) as threads, tqdm(total=total, unit="run", mininterval=often) as self._bar:
            try:
                list(threads.map(lambda slot: self._work(launch, slot), slots))
            finally:
                self._stopped.set()
        return self.failures

    def _work(self, launch: Sequence[str], slot: Mapping[str, str]) -> None:
        while not self._stopped.is_set():
            with self._taking:
                found = ((search, search.take(self.failures)) for search in self.searches)
                search, taken = next((pair for pair in found if pair[1]), (None, None))
                is_over = all(search.is_over(self.failures) for search in self.searches)
            if search and taken:
                self._execute(search, *taken, launch, slot)
            elif is_over:
                return
            else:
                self._stopped.wait(SECONDS_TO_LOOK)

    def _execute(
        self, search: Search, run: PlannedRun, locked: TextIO, trial: Trial | FrozenTrial | None,
        launch: Sequence[str], slot: Mapping[str, str],
    ) -> None:  # fmt: skip
        with locked:
            is_hopeless = _watch(trial, run.folder)
            error = None
            if not run.finished:
                error = execute(run, launch, locked, slot, lambda: self._stopped.is_set() or next(is_hopeless))
            if error:
                self.failures[run] = error
            results = run.results
            if trial and (results or not (error or self._stopped.is_set())):
                search.tell(trial, results["best_score"] if results else None)
        if results:
            self._bar.write(f"finished: {run.name} {results['chosen_by']} {results['best_score']}")
        else:
            self._bar.write(f"{'failed' if error else 'stopped'}: {run.name}")
        self._bar.update()


def _watch(trial: Trial | FrozenTrial | None, folder: Path) -> Iterator[bool]:
    """Report the best score of each epoch, as the last checkpoint has it; yield whether the pruner stops the run."""
    reported, next_look = 0, 0.0
    while True:
        if isinstance(trial, Trial) and time.monotonic() >= next_look:
            next_look = time.monotonic() + SECONDS_TO_LOOK
            with suppress(OSError, ValueError):  # there is no checkpoint, or it is being written or deleted
                paths = folder.glob("checkpoint-*/trainer_state.json")
                state = json.loads(max(paths, key=lambda path: path.stat().st_mtime).read_text())
                if state["best_metric"] is not None and (epoch := round(state["epoch"])) > reported:
                    trial.report(state["best_metric"], reported := epoch)
                    if trial.should_prune():
                        yield True
        yield False
