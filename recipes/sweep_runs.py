"""The runs of a sweep: a folder and a command for each combination of what is varied."""

import itertools
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from common.errors import RecipeError


# The flags of the recipes that a sweep takes several values of, in the order of the runs.
AXES = ("task", "method", "r", "share_layers", "top_k", "lora_r", "learning_rate", "num_train_epochs", "seed")
# What validation may choose, and what it chooses unless told otherwise.
CHOICES = ("r", "share_layers", "top_k", "lora_r", "learning_rate", "num_train_epochs")
CHOSEN = ("learning_rate", "num_train_epochs")
# The only method that a flag means anything to; all others have one run, not one per value.
MEANT_FOR = {"r": "houlsby", "share_layers": "houlsby", "top_k": "top_k", "lora_r": "lora"}
# Recipes that write a results.json for each of several tasks; that of a sweep's run is in the run's own folder.
OF_SEVERAL_TASKS = ("paper_tasks.py", "stream.py")

Point = dict[str, str]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Run:
    """One run of a recipe.

    Attributes:
        folder: Its output, whose results.json is written last of all.
        recipe: The script.
        point: What a sweep varies, by flag, without the dashes.
        flags: All others, as on the command line.
    """

    folder: Path
    recipe: Path
    point: Point
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        """The last two folders, which tell the runs of a sweep apart."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def arguments(self) -> list[str]:
        """The recipe and its flags; a run that was killed goes on where it was."""
        return [
            *(str(self.recipe), *self._asked),
            *("--output_dir", str(self.folder), "--resume_from_checkpoint", "last"),
        ]

    @property
    def _asked(self) -> list[str]:
        return [*(word for axis, value in self.point.items() for word in (f"--{axis}", value)), *self.flags]

    @property
    def results(self) -> dict[str, Any] | None:
        """What the run has found, or None as long as it has not ended."""
        path = self.folder / "results.json"
        return json.loads(path.read_text()) if path.exists() else None

    def record(self) -> None:
        """Notes the run's flags in its folder, for `check`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._recorded.write_text(json.dumps([self.recipe.name, *self._asked], indent=1) + "\n")

    def check(self) -> None:
        """Raises RecipeError if the folder holds another run than this one."""
        if not self._recorded.exists():
            return
        before, now = json.loads(self._recorded.read_text()), [self.recipe.name, *self._asked]
        if before != now:
            raise RecipeError(
                f"{self.folder} is of a sweep with other flags. Then: {_only_in(before, now)}; now: "
                f"{_only_in(now, before)}. Give the same flags, or another --output_dir."
            )

    @property
    def _recorded(self) -> Path:
        return self.folder / "flags.json"


def _only_in(these: list[str], those: list[str]) -> str:
    return " ".join(word for word in these if word not in those) or "none"


def check_recipe(recipe: Path, flags: Iterable[str]) -> None:
    """Raises RecipeError if a run would not write one results.json, into its folder, which is what a sweep reads."""
    own = next((flag for flag in flags if flag.startswith("--sweep_")), None)
    if own is None and recipe.name not in OF_SEVERAL_TASKS:
        return
    several = f"with {own} one per point: give its values here" if own else "one per task: run it by itself"
    raise RecipeError(f"A run must write one results.json, into its --output_dir; {recipe.name} writes {several}.")


def make_runs(output: Path, recipe: Path, axes: Mapping[str, Sequence[str]], flags: Sequence[str]) -> list[Run]:
    """One run for each combination of the axes' values, without those that differ in what their method ignores."""
    points = []
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        point = {axis: value for axis, value in point.items() if _applies(axis, point)}
        if point not in points:
            points.append(point)
    return [Run(output / _folder(point, recipe.stem), recipe, point, tuple(flags)) for point in points]


def _applies(axis: str, point: Point) -> bool:
    return axis not in MEANT_FOR or point.get("method", MEANT_FOR[axis]) == MEANT_FOR[axis]


def _folder(point: Point, default_task: str) -> Path:
    """As mrpc/method=houlsby,r=64,learning_rate=0.001,seed=0: equal numbers have equal names."""
    settings = [f"{axis}={_plain(value)}" for axis, value in point.items() if axis != "task"]
    return Path(point.get("task", default_task), ",".join(settings) or "run")


def _plain(value: str) -> str:
    try:
        return f"{float(value):g}"
    except ValueError:
        return value


def group_by(runs: Iterable[Run], without: Iterable[str]) -> dict[tuple[tuple[str, str], ...], list[Run]]:
    """The runs that agree in all that is varied but the axes `without`."""
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        key = tuple((axis, value) for axis, value in run.point.items() if axis not in without)
        groups.setdefault(key, []).append(run)
    return groups


def without_seed(point: Point) -> Point:
    """The point that runs of several seeds share."""
    return {axis: value for axis, value in point.items() if axis != "seed"}


def choose(scores: Mapping[Key, Sequence[float]], lower_is_better: bool = False) -> Key:
    """The candidate with the best mean over its seeds, among those with the most seeds; the first of several."""
    seeds = max(len(values) for values in scores.values())
    sign = -1 if lower_is_better else 1
    return max((key for key in scores if len(scores[key]) == seeds), key=lambda key: sign * mean(scores[key]))


def best_point(runs: Iterable[Run]) -> Point | None:
    """What the best of the runs on validation have in common, all but the seed; None if none has ended."""
    scores: dict[tuple[tuple[str, str], ...], list[float]] = {}
    lower_is_better = False
    for key, same in group_by(runs, without=["seed"]).items():
        for results in (run.results for run in same):
            if results and results["best_score"] is not None:
                scores.setdefault(key, []).append(results["best_score"])
                lower_is_better = results["chosen_by"].endswith("loss")
    return dict(choose(scores, lower_is_better)) if scores else None
