"""The planned runs of a sweep: a folder and a command for each combination of values."""

import itertools
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from run.edge import RecipeError
from run.files import read_object
from run.run import RESULTS_FILE, is_free, lower_is_better


# Flags of the recipes for which a sweep takes several values, in the order of the runs.
AXES = (
    *("task", "method", "activation", "extension", "r", "init_std", "share_layers", "top_k"),
    "lora_r",
    *("learning_rate", "num_train_epochs", "seed"),
)
# What validation may choose, and what it chooses by default.
CHOICES = ("r", "share_layers", "top_k", "lora_r", "learning_rate", "num_train_epochs")
CHOSEN = ("learning_rate", "num_train_epochs")
# Flags that only one method uses; the other methods have one run, not one per value.
MEANT_FOR = {
    "activation": "houlsby",
    "extension": "houlsby",
    "r": "houlsby",
    "share_layers": "houlsby",
    "init_std": "houlsby",
    "top_k": "top_k",
    "lora_r": "lora",
}

FLAGS = "flags.txt"  # a run's flags that its sweep does not vary, in its folder

Point = dict[str, str]
Key = TypeVar("Key", bound=Hashable)


def is_meant_for(method: str, argument: str) -> bool:
    """Return whether an argument changes what a method does."""
    return MEANT_FOR.get(argument, method) == method


@dataclass(frozen=True)
class PlannedRun:
    """A run of a recipe, planned or finished."""

    folder: Path  # where results.json is written last
    recipe: Path
    # The values that the sweep varies, by flag, without the dashes.
    point: Point = field(hash=False)
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
        """The recipe and its flags; a killed run resumes in its folder."""
        words = [str(self.recipe)]
        for axis, value in self.point.items():
            words += [f"--{axis}", value]
        return [*words, *self.flags, "--output_dir", str(self.folder)]

    @property
    def finished(self) -> bool:
        return (self.folder / RESULTS_FILE).exists()

    @property
    def results(self) -> dict[str, Any] | None:
        """The content of results.json, or None if the run is not finished."""
        return read_object(self.folder / RESULTS_FILE)

    @property
    def constant(self) -> str:
        """The recipe and the flags that change a run and that the sweep does not vary, sorted."""
        flags = re.split(r"(?:^| )--(?=[a-z])", " ".join(self.flags).replace("=", " "))[1:]
        names = {flag: flag.split()[0] for flag in flags}
        changing = [flag for flag in flags if names[flag] == "predict" or not is_free(names[flag])]
        return " ".join([self.recipe.name, *sorted(changing)])

    def check(self) -> None:
        """Refuse a finished run with other flags: its score would be compared with this sweep's."""
        recorded = self.folder / FLAGS
        if not self.finished or not recorded.is_file():
            return
        flags = recorded.read_text()
        if flags != self.constant:
            raise RecipeError(
                f"{self.folder} holds a finished run with other flags: {flags}. "
                "Give another --output_dir."
            )


def make_runs(
    output: Path, recipe: Path, axes: Mapping[str, Sequence[str]], flags: Sequence[str]
) -> list[PlannedRun]:
    """Return a run for each combination of values.

    Combinations that differ only in what their method ignores are one run.
    """
    runs: dict[Path, PlannedRun] = {}
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        method = point.get("method")
        if method is not None:
            point = {axis: point[axis] for axis in point if is_meant_for(method, axis)}
        folder = output / point.get("task", recipe.stem) / _settings(point)
        runs.setdefault(folder, PlannedRun(folder, recipe, point, tuple(flags)))
    return list(runs.values())


def _settings(point: Point) -> str:
    """Return the name of a point's folder, such as method=houlsby,r=64,seed=0."""
    settings = [f"{axis}={_plain(point[axis])}" for axis in point if axis != "task"]
    return ",".join(settings) or "run"


def _plain(value: str) -> str:
    """Return a number in one form, so that 1e-3 and 0.001 have the same folder."""
    try:
        return repr(float(value)).removesuffix(".0")
    except ValueError:
        return value


def choose(scores: Mapping[Key, Sequence[float]], lower_is_better: bool = False) -> Key:
    """Return the key with the best mean over its seeds, among those with the most seeds.

    The first one wins a tie.
    """
    most = max(map(len, scores.values()))
    means = {key: mean(values) for key, values in scores.items() if len(values) == most}
    sign = -1 if lower_is_better else 1
    return max(means, key=lambda key: sign * means[key])


def best_point(runs: Iterable[PlannedRun]) -> Point | None:
    """Return the point, without the seed, that is best on validation.

    Without a finished run, it is None.
    """
    scores: dict[tuple[tuple[str, str], ...], list[float]] = defaultdict(list)
    lower = False
    for run in runs:
        results = run.results
        if results is None or results["best_score"] is None:
            continue
        point = tuple(setting for setting in run.point.items() if setting[0] != "seed")
        scores[point].append(results["best_score"])
        lower = lower_is_better(results["chosen_by"])
    return dict(choose(scores, lower)) if scores else None
