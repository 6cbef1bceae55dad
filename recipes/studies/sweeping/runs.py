"""The planned runs of a sweep: a folder and a command for each combination of values."""

import itertools
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from common.edge import RecipeError
from common.run import RESULTS_FILE, is_free, lower_is_better, read_object


# Flags of the recipes for which a sweep takes several values, in the order of the runs.
AXES = (
    *("task", "method", "activation", "r", "init_std", "share_layers", "top_k", "lora_r"),
    *("learning_rate", "num_train_epochs", "seed"),
)
# What validation may choose, and what it chooses by default.
CHOICES = ("r", "share_layers", "top_k", "lora_r", "learning_rate", "num_train_epochs")
CHOSEN = ("learning_rate", "num_train_epochs")
# Flags that only one method uses; the other methods have one run, not one per value.
MEANT_FOR = dict.fromkeys(("activation", "r", "share_layers", "init_std"), "houlsby") | {
    "top_k": "top_k",
    "lora_r": "lora",
}

FLAGS = "flags.txt"  # a run's flags that its sweep does not vary, in its folder

Point = dict[str, str]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class PlannedRun:
    """A run of a recipe, planned or finished."""

    folder: Path  # where results.json is written last
    recipe: Path
    point: Point = field(
        hash=False
    )  # the values that the sweep varies, by flag, without the dashes
    flags: tuple[str, ...]  # all others, as on the command line

    def at(self, point: Point) -> "PlannedRun":
        """Return the run of the same task with other values."""
        return replace(self, folder=self.folder.parent / _settings(point), point=point)

    @property
    def name(self) -> str:
        """The last two folders, which distinguish the runs of a sweep."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def arguments(self) -> list[str]:
        """The recipe and its flags; a run that was killed resumes where it was."""
        values = (word for axis, value in self.point.items() for word in (f"--{axis}", value))
        return [str(self.recipe), *values, *self.flags, "--output_dir", str(self.folder)]

    @property
    def finished(self) -> bool:
        return (self.folder / RESULTS_FILE).exists()

    @property
    def results(self) -> dict[str, Any] | None:
        """The content of results.json, or None if the run is not finished."""
        return read_object(self.folder / RESULTS_FILE)

    @property
    def constant(self) -> str:
        """The recipe and the flags that the sweep does not vary and that change a run, in any
        order.
        """
        flags = re.split(r"(?:^| )--(?=[a-z])", " ".join(self.flags).replace("=", " "))[1:]
        kept = [
            flag for flag in flags if (name := flag.split()[0]) == "predict" or not is_free(name)
        ]
        return " ".join([self.recipe.name, *sorted(kept)])

    def check(self) -> None:
        """Refuse a finished run with other flags, whose score would be compared with those of this
        sweep.
        """
        recorded = self.folder / FLAGS
        if (
            self.finished
            and recorded.is_file()
            and (before := recorded.read_text()) != self.constant
        ):
            raise RecipeError(
                f"{self.folder} holds a finished run with other flags: {before}. Give another --output_dir."
            )


def make_runs(
    output: Path, recipe: Path, axes: Mapping[str, Sequence[str]], flags: Sequence[str]
) -> list[PlannedRun]:
    """Return a run for each combination of values, without those that differ only in what their
    method ignores.
    """
    runs: dict[Path, PlannedRun] = {}
    for values in itertools.product(*axes.values()):
        asked = dict(zip(axes, values, strict=True))
        point = {
            axis: value
            for axis, value in asked.items()
            if axis not in MEANT_FOR or asked.get("method", MEANT_FOR[axis]) == MEANT_FOR[axis]
        }
        folder = output / point.get("task", recipe.stem) / _settings(point)
        runs.setdefault(folder, PlannedRun(folder, recipe, point, tuple(flags)))
    return list(runs.values())


def _settings(point: Point) -> str:
    """Return, for example, method=houlsby,r=64,learning_rate=0.001,seed=0: equal numbers have equal
    names.
    """
    return (
        ",".join(f"{axis}={_plain(value)}" for axis, value in point.items() if axis != "task")
        or "run"
    )


def _plain(value: str) -> str:
    try:
        return repr(float(value)).removesuffix(".0")
    except ValueError:
        return value


def choose(scores: Mapping[Key, Sequence[float]], lower_is_better: bool = False) -> Key:
    """Return the key with the best mean over its seeds, among those with the most seeds; the first
    of several.
    """
    seeds = max(len(values) for values in scores.values())
    sign = -1 if lower_is_better else 1
    return max(
        (key for key in scores if len(scores[key]) == seeds),
        key=lambda key: sign * mean(scores[key]),
    )


def best_point(runs: Iterable[PlannedRun]) -> Point | None:
    """Return the point, without the seed, that is best on validation; None if no run is finished."""
    scores: dict[tuple[tuple[str, str], ...], list[float]] = {}
    scored = [
        (run, found) for run in runs if (found := run.results) and found["best_score"] is not None
    ]
    for run, found in scored:
        key = tuple((axis, value) for axis, value in run.point.items() if axis != "seed")
        scores.setdefault(key, []).append(found["best_score"])
    return dict(choose(scores, lower_is_better(scored[0][1]["chosen_by"]))) if scored else None
