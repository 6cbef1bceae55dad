"""The planned runs of a sweep: a folder and a command for each combination of values."""

import itertools
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from training.errors import RecipeError


# Flags of the recipes for which a sweep takes several values, in the order of the runs.
AXES = ("task", "method", "r", "share_layers", "top_k", "lora_r", "learning_rate", "num_train_epochs", "seed")
# What validation may choose, and what it chooses by default.
CHOICES = ("r", "share_layers", "top_k", "lora_r", "learning_rate", "num_train_epochs")
CHOSEN = ("learning_rate", "num_train_epochs")
# Flags that only one method uses; the other methods have one run, not one per value.
MEANT_FOR = {"r": "houlsby", "share_layers": "houlsby", "top_k": "top_k", "lora_r": "lora"}
# Recipes that write a results.json per task; a sweep expects one, in the run's own folder.
OF_SEVERAL_TASKS = ("paper_tasks.py", "stream.py")

Point = dict[str, str]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run of a recipe, planned or finished.

    Attributes:
        folder: The output folder, where results.json is written last.
        recipe: The script.
        point: The values that the sweep varies, by flag, without the dashes.
        flags: All other flags, as on the command line.
    """

    folder: Path
    recipe: Path
    point: Point
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        """The last two folders, which distinguish the runs of a sweep."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def arguments(self) -> list[str]:
        """The recipe and its flags; a run that was killed resumes where it was."""
        return [
            *(str(self.recipe), *self._asked),
            *("--output_dir", str(self.folder), "--resume_from_checkpoint", "last"),
        ]

    @property
    def _asked(self) -> list[str]:
        return [*(word for axis, value in self.point.items() for word in (f"--{axis}", value)), *self.flags]

    @property
    def results(self) -> dict[str, Any] | None:
        """The content of results.json, or None if the run is not finished."""
        path = self.folder / "results.json"
        return json.loads(path.read_text()) if path.exists() else None

    def record(self) -> None:
        """Write the run's flags into its folder, for `check`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._recorded.write_text(json.dumps([self.recipe.name, *self._asked], indent=1) + "\n")

    def check(self) -> None:
        """Raise RecipeError if the folder holds a run with other flags."""
        if not self._recorded.exists():
            return
        before, now = json.loads(self._recorded.read_text()), [self.recipe.name, *self._asked]
        if before != now:
            raise RecipeError(
                f"{self.folder} holds a run with other flags. Then: {_only_in(before, now)}; now: "
                f"{_only_in(now, before)}. Give the same flags, or another --output_dir."
            )

    @property
    def _recorded(self) -> Path:
        return self.folder / "flags.json"


def _only_in(these: list[str], those: list[str]) -> str:
    return " ".join(word for word in these if word not in those) or "none"


def check_recipe(recipe: Path, flags: Iterable[str]) -> None:
    """Raise RecipeError if a run would not write a single results.json into its folder, as a sweep expects."""
    own = next((flag for flag in flags if flag.startswith("--sweep_")), None)
    if own is None and recipe.name not in OF_SEVERAL_TASKS:
        return
    several = f"with {own} one per point: give its values here" if own else "one per task: run it by itself"
    raise RecipeError(f"A run must write one results.json, into its --output_dir; {recipe.name} writes {several}.")


def make_runs(output: Path, recipe: Path, axes: Mapping[str, Sequence[str]], flags: Sequence[str]) -> list[PlannedRun]:
    """Return a run for each combination of values, without those that differ only in what their method ignores."""
    points = []
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        point = {axis: value for axis, value in point.items() if _applies(axis, point)}
        if point not in points:
            points.append(point)
    return [PlannedRun(output / _folder(point, recipe.stem), recipe, point, tuple(flags)) for point in points]


def _applies(axis: str, point: Point) -> bool:
    return axis not in MEANT_FOR or point.get("method", MEANT_FOR[axis]) == MEANT_FOR[axis]


def _folder(point: Point, default_task: str) -> Path:
    """Return, for example, mrpc/method=houlsby,r=64,learning_rate=0.001,seed=0: equal numbers have equal names."""
    settings = [f"{axis}={_plain(value)}" for axis, value in point.items() if axis != "task"]
    return Path(point.get("task", default_task), ",".join(settings) or "run")


def _plain(value: str) -> str:
    try:
        return f"{float(value):g}"
    except ValueError:
        return value


def group_by(
    runs: Iterable[PlannedRun], without: Iterable[str]
) -> dict[tuple[tuple[str, str], ...], list[PlannedRun]]:
    """Group the runs that agree in all axes except those in `without`."""
    groups: dict[tuple[tuple[str, str], ...], list[PlannedRun]] = {}
    for run in runs:
        key = tuple((axis, value) for axis, value in run.point.items() if axis not in without)
        groups.setdefault(key, []).append(run)
    return groups


def without_seed(point: Point) -> Point:
    """Return the point that runs with several seeds share."""
    return {axis: value for axis, value in point.items() if axis != "seed"}


def choose(scores: Mapping[Key, Sequence[float]], lower_is_better: bool = False) -> Key:
    """Return the key with the best mean over its seeds, among those with the most seeds; the first of several."""
    seeds = max(len(values) for values in scores.values())
    sign = -1 if lower_is_better else 1
    return max((key for key in scores if len(scores[key]) == seeds), key=lambda key: sign * mean(scores[key]))


def best_point(runs: Iterable[PlannedRun]) -> Point | None:
    """Return the point, without the seed, that is best on validation; None if no run is finished."""
    scores: dict[tuple[tuple[str, str], ...], list[float]] = {}
    lower_is_better = False
    for key, same in group_by(runs, without=["seed"]).items():
        for results in (run.results for run in same):
            if results and results["best_score"] is not None:
                scores.setdefault(key, []).append(results["best_score"])
                lower_is_better = results["chosen_by"].endswith("loss")
    return dict(choose(scores, lower_is_better)) if scores else None
