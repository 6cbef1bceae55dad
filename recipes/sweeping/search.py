"""A sweep as Optuna studies, which several processes may share: each device takes the next trial.

A run's folder says whether it is finished, and its lock whether it is being executed; Optuna samples, prunes, records.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TextIO

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from tqdm.auto import tqdm

from sweeping.processes import execute, lock
from sweeping.runs import CHOICES, PlannedRun, best_point, flag_values
from training.errors import RecipeError
from training.trained_on import describe_file


SECONDS_TO_LOOK = 2  # between two looks at the runs of other processes, or at the checkpoints of one's own
WHOLE, LOGARITHMIC = ("r", "share_layers", "top_k", "lora_r", "seed"), ("r", "lora_r", "learning_rate")


class Search:
    """An Optuna study: the runs that validation compares, then those of the other seeds at the best point.

    Its trials have the flags as parameters, the best validation score as value, and the flags' text as "point".

    Args:
        runs: The runs to compare; to sample values, a single one with a range LOW:HIGH among its values.
        other_seeds: The seeds that run only at the best point.
        n_trials: Number of points to sample; None: a grid.
    """

    def __init__(self, runs: Sequence[PlannedRun], other_seeds: Sequence[str], n_trials: int | None) -> None:
        self.runs, self.other_seeds, self.n_trials = list(runs), other_seeds, n_trials
        self.total = self.left = (n_trials or len(runs)) + len(other_seeds)
        self.space = {axis: _distribution(axis, [run.point[axis] for run in runs]) for axis in runs[0].point}

    def open(self, name: str, storage: str | JournalStorage, prune: bool) -> None:
        """Create the study, or open that of earlier and other processes."""
        run, self.prunes = self.runs[0], prune
        chosen_by = "".join(flag_values(run.flags).get("--metric_for_best_model", []))
        lower = run.recipe.name == "mlm.py" or chosen_by.endswith("loss")
        self.study = optuna.create_study(
            study_name=f"{run.recipe.stem}: {name}", storage=storage, load_if_exists=True,
            direction="minimize" if lower else "maximize",
            pruner=optuna.pruners.MedianPruner() if prune else optuna.pruners.NopPruner(),
        )  # fmt: skip
        self.tried = len(self.study.get_trials(deepcopy=False))  # what failed before this process is tried again

    def take(self) -> tuple[Trial, PlannedRun, TextIO, bool] | None:
        """Return the next trial with its run's lock, and whether the pruner may stop it, or None if none can be taken
        now. One process at a time."""
        first, runs, last = self.runs[0], self.runs, self.tried_runs()
        if self.n_trials:
            sampled = [run for run in last if run.point.get("seed") == first.point.get("seed")]
            runs = sampled + runs * (self.n_trials - len(sampled))
        left = [run for run in runs if not self._is_over(run, last.get(run))]
        self.left = len(left) + len(self.other_seeds)
        if not left:
            left = [run for run in self.at_the_best_point(runs) if not self._is_over(run, last.get(run))]
            self.left = len(left)
        for run in left:
            ranges = [axis for axis in CHOICES if ":" in run.point.get(axis, "")]
            locked = None if ranges else lock(run.folder / "lock")
            if locked and run in last and last[run].state is TrialState.RUNNING:
                self.study.tell(last[run].number, state=TrialState.FAIL)  # its process was killed
            if locked or ranges:
                trial = self._ask(run, ranges)
                run = run.at(trial.user_attrs["point"])
                locked = locked or lock(run.folder / "lock")
            if locked:
                return trial, run, locked, self._may_prune(run)
        return None

    def tried_runs(self) -> dict[PlannedRun, FrozenTrial]:
        """Return the runs that there have been, each with its last trial."""
        trials = self.study.get_trials(deepcopy=False)
        return {self.runs[0].at(trial.user_attrs["point"]): trial for trial in trials if "point" in trial.user_attrs}

    def at_the_best_point(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Return the runs of the other seeds, as far as the search has come."""
        best = best_point(runs) if self.other_seeds else None
        return [self.runs[0].at({**best, "seed": seed}) for seed in self.other_seeds] if best else []

    def _is_over(self, run: PlannedRun, trial: FrozenTrial | None) -> bool:
        if trial is None or not trial.state.is_finished():
            return False
        has_failed = "error" in trial.user_attrs and trial.number >= self.tried
        return run.finished or has_failed or (trial.state is TrialState.PRUNED and self._may_prune(run))

    def _may_prune(self, run: PlannedRun) -> bool:
        """Return whether the pruner may stop a run. A mean without the seeds that score poorly would be too good."""
        return self.prunes and run.point.get("seed") not in self.other_seeds

    def _ask(self, run: PlannedRun, ranges: Sequence[str]) -> Trial:
        given = {axis: _value(axis, text) for axis, text in run.point.items() if axis not in ranges}
        attributes = {} if ranges else {"point": run.point}
        self.study.enqueue_trial(given, user_attrs=attributes)
        while (trial := self.study.ask(self.space)).user_attrs != attributes:
            self.study.tell(trial, state=TrialState.FAIL)  # a killed process had left it in the queue
        if ranges:
            trial.set_user_attr("point", {**run.point, **{axis: str(trial.params[axis]) for axis in ranges}})
        return trial


def _value(axis: str, text: str) -> int | float | str:
    """Return a flag's text as a trial's parameter."""
    try:
        number = int(text) if axis in WHOLE else float(text) if axis in CHOICES else None
    except ValueError:
        number = -1
    if (number is not None and number < 0) or (number == 0 and axis in LOGARITHMIC):
        raise RecipeError(f"--{axis} must be a {'whole ' if axis in WHOLE else ''}number above 0, got {text!r}.")
    return text if number is None else number


def _distribution(axis: str, texts: Sequence[str]) -> BaseDistribution:
    """Return a parameter's distribution, which samples a range of whole epochs; numbers may come from other ranges."""
    if axis == "seed":
        return IntDistribution(0, 2**32 - 1)
    if axis not in CHOICES:
        return CategoricalDistribution(list(dict.fromkeys(texts)))
    ends = [_value(axis, end) for text in texts for end in text.split(":")]
    if axis in WHOLE:
        return IntDistribution(min(ends), max(ends), log=axis in LOGARITHMIC)
    step = 1 if axis == "num_train_epochs" and ":" in texts[0] else None
    return FloatDistribution(min(ends), max(ends), log=axis in LOGARITHMIC, step=step)


class Sweep:
    """Runs of a recipe, and which of them to execute.

    Args:
        output: The folder of all runs.
        runs: All combinations.
        chosen: The axes whose values validation chooses.
        search_seeds: Number of seeds of the search; None: all.
        n_trials: Number of points to sample, per combination of the rest; None: a grid.
    """

    def __init__(
        self, output: Path, runs: Sequence[PlannedRun], chosen: Sequence[str] = CHOICES,
        search_seeds: int | None = None, n_trials: int | None = None,
    ) -> None:  # fmt: skip
        self.output, self.failures, self._stop = output, dict[PlannedRun, str](), threading.Event()
        self._own, self._waits = set[PlannedRun](), False
        seeds = list(dict.fromkeys(run.point["seed"] for run in runs if "seed" in run.point))
        others = seeds[search_seeds:] if search_seeds else []
        groups: dict[str, list[PlannedRun]] = {}
        self._describe = cache(describe_file)  # many runs have the same files
        for run in runs:
            run.check(self._describe)
            fixed = {axis: value for axis, value in run.point.items() if axis not in (*chosen, "seed")}
            if run.point.get("seed") not in others:
                groups.setdefault(str(run.at(fixed).folder.relative_to(output)), []).append(run)
        self.searches = {name: Search(same, others, n_trials) for name, same in groups.items()}

    def left(self) -> Iterator[PlannedRun]:
        """Yield the runs that are left; those of the other seeds only after the search."""
        for search in self.searches.values():
            left = [run for run in search.runs if not run.finished]
            yield from left or (run for run in search.at_the_best_point(search.runs) if not run.finished)

    def execute(
        self, launch: Sequence[str], slots: Sequence[Mapping[str, str]], storage: str | None = None,
        prune: bool = False,
    ) -> dict[PlannedRun, str]:  # fmt: skip
        """Execute all runs that are not finished, one at a time per slot, and wait for those of other processes.

        Args:
            launch: The command, to which the recipe and its flags are appended.
            slots: Variables of the environment for each of the simultaneous runs.
            storage: Address of a database; None: a journal in the output folder.
            prune: Whether to stop runs that are worse than the median of the others.

        Returns:
            The runs that have failed, and the last lines of their logs.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with lock(self.output / "sweep.lock", wait=True):
            try:
                opened = storage or JournalStorage(JournalFileBackend(str(self.output / "optuna.journal")))
                for name, search in self.searches.items():
                    search.open(name, opened, prune)
            except Exception as error:  # Optuna's, SQLAlchemy's or a driver's
                where, reason = storage or self.output / "optuna.journal", str(error).partition("\n")[0]
                remedy = "Check its address" if storage else "Delete it; finished runs are not repeated"
                raise RecipeError(f"Optuna cannot open {where}: {reason}. {remedy}.") from error
        for search in self.searches.values():
            for run in search.tried_runs():  # of which __init__ does not know the sampled ones
                run.check(self._describe)
        total = sum(search.total for search in self.searches.values())
        often = 0.5 if sys.stderr.isatty() else 60  # in a log file, a line per minute is enough
        with ThreadPoolExecutor(len(slots)) as threads, tqdm(total=total, unit="run", mininterval=often) as self._bar:
            try:
                for worker in as_completed([threads.submit(self._work, launch, slot) for slot in slots]):
                    worker.result()
            finally:
                self._stop.set()
        return self.failures

    def _work(self, launch: Sequence[str], slot: Mapping[str, str]) -> None:
        while not self._stop.is_set():
            with lock(self.output / "sweep.lock", wait=True):
                is_idle = not self._own
                taken = next(filter(None, (search.take() for search in self.searches.values())), None)
                left = sum(search.left for search in self.searches.values())
                self._bar.update(self._bar.total - left - self._bar.n)
                if left and not taken and is_idle and not self._waits:
                    self._bar.write(f"waiting for runs of other processes; runs left: {left}")
                self._waits = is_idle and not taken
                self._own.update([taken[1]] if taken else [])
            if taken:
                self._execute(*taken, launch, slot)
                self._own.discard(taken[1])
            elif left:
                self._stop.wait(SECONDS_TO_LOOK)
            else:
                return

    def _execute(
        self, trial: Trial, run: PlannedRun, locked: TextIO, may_prune: bool, launch: Sequence[str],
        slot: Mapping[str, str],
    ) -> None:  # fmt: skip
        with locked:
            found = run.finished
            looks = watch(trial, run.folder)
            stop = (self._stop.is_set() or (is_hopeless and may_prune) for is_hopeless in looks)
            error = None if found else execute(run, launch, locked, slot, lambda: next(stop))
            if results := run.results:
                score = results["best_score"]
                trial.study.tell(trial, score, TrialState.FAIL if score is None else None)
                outcome = f"finished: {run.name} {results['chosen_by']} {score}, {results['seconds']:.0f} s"
            elif error is None and not self._stop.is_set():
                trial.study.tell(trial, state=TrialState.PRUNED)
                outcome = f"pruned: {run.name}"
            else:
                if error:
                    self.failures[run] = error
                    trial.set_user_attr("error", error)
                trial.study.tell(trial, state=TrialState.FAIL)
                outcome = f"{'failed' if error else 'stopped'}: {run.name}"
        if not found:
            self._bar.write(outcome)


def watch(trial: Trial, folder: Path) -> Iterator[bool]:
    """Report the best score of each epoch, as the last checkpoint has it; yield whether the pruner stops the run."""
    reported, next_look = 0, 0.0
    while True:
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + SECONDS_TO_LOOK
            with suppress(OSError, ValueError):  # there is no checkpoint, or it is being written or deleted
                paths = folder.glob("checkpoint-*/trainer_state.json")
                state = json.loads(max(paths, key=lambda path: path.stat().st_mtime).read_text())
                if state["best_metric"] is not None and (epoch := round(state["epoch"])) > reported:
                    trial.report(state["best_metric"], reported := epoch)
                    if trial.should_prune():
                        yield True
        yield False
