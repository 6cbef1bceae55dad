"""The planned runs of a sweep: a folder and a command for each combination of values."""

import itertools
import json
import shlex
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from training.errors import RecipeError
from training.files import read_object
from training.trained_on import ARGUMENTS_FILE, TRAINED_ON, Describe, changed_files, describe_file


# Flags of the recipes for which a sweep takes several values, in the order of the runs.
AXES = ("task", "method", "r", "share_layers", "top_k", "lora_r", "learning_rate", "num_train_epochs", "seed")
# What validation may choose, and what it chooses by default.
CHOICES = ("r", "share_layers", "top_k", "lora_r", "learning_rate", "num_train_epochs")
CHOSEN = ("learning_rate", "num_train_epochs")
# Flags that only one method uses; the other methods have one run, not one per value.
MEANT_FOR = {"r": "houlsby", "share_layers": "houlsby", "top_k": "top_k", "lora_r": "lora"}

Point = dict[str, str]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
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
    point: Point = field(hash=False)
    flags: tuple[str, ...]

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
        last = ("--output_dir", str(self.folder), "--resume_from_checkpoint", "last")
        return [str(self.recipe), *self._asked, *last]

    @property
    def _asked(self) -> list[str]:
        return [*(word for axis, value in self.point.items() for word in (f"--{axis}", value)), *self.flags]

    @property
    def finished(self) -> bool:
        """Whether there is a results.json."""
        return (self.folder / "results.json").exists()

    @property
    def results(self) -> dict[str, Any] | None:
        """The content of results.json, or None if the run is not finished."""
        return json.loads((self.folder / "results.json").read_text()) if self.finished else None

    def record(self) -> None:
        """Write the run's flags into its folder, for `check`."""
        (self.folder / "flags.json").write_text(json.dumps([self.recipe.name, *self._asked], indent=1) + "\n")

    def check(self, describe: Describe = describe_file) -> None:
        """Check that the folder holds no run with other flags, in whichever order, and no finished one on other data.

        Args:
            describe: As for `changed_files`.

        Raises:
            RecipeError: If it does.
        """
        recorded = self.folder / "flags.json"
        now = flag_values([self.recipe.name, *self.flags])
        before = flag_values(json.loads(recorded.read_text())) if recorded.exists() else now
        # The folder's name has the values of these, where equal numbers are equal.
        before = {flag: values for flag, values in before.items() if flag.removeprefix("--") not in self.point}
        if before != now:
            raise RecipeError(
                f"{self.folder} holds a run with other flags. Then: {_only_in(before, now)}; now: "
                f"{_only_in(now, before)}. Give the same flags, or another --output_dir."
            )
        if results := self.results:  # other runs compare their data when they resume
            recorded = (read_object(self.folder / ARGUMENTS_FILE) or {}).get(TRAINED_ON, {}).get("files", {})
            test = results.get("test_file")
            if changed := changed_files(recorded, describe):
                raise RecipeError(
                    f"{self.folder} holds a run with other data: {', '.join(changed)}. Give the earlier data, or "
                    "another --output_dir."
                )
            if changed := changed_files({"test": test} if test else {}, describe):
                command = shlex.join(["python", str(self.recipe), *self._asked, "--output_dir", str(self.folder)])
                raise RecipeError(
                    f"{self.folder} holds the scores of another test file: {changed[0]}. Give the earlier file, "
                    f"another --output_dir, or score this one with {command}"
                )


def flag_values(words: Iterable[str]) -> dict[str, list[str]]:
    """Return the values of each flag on a command line, and under "" what comes before the first one."""
    values: list[str] = []
    found = {"": values}
    for word in words:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            values = found[flag] = [value] if value else []
        else:
            values.append(word)
    return found


def _only_in(these: Mapping[str, list[str]], those: Mapping[str, list[str]]) -> str:
    words = (word for flag, values in these.items() if those.get(flag) != values for word in (flag, *values) if word)
    return " ".join(words) or "none"


def make_runs(output: Path, recipe: Path, axes: Mapping[str, Sequence[str]], flags: Sequence[str]) -> list[PlannedRun]:
    """Return a run for each combination of values, without those that differ only in what their method ignores."""
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
    """Return, for example, method=houlsby,r=64,learning_rate=0.001,seed=0: equal numbers have equal names."""
    return ",".join(f"{axis}={_plain(value)}" for axis, value in point.items() if axis != "task") or "run"


def _plain(value: str) -> str:
    try:
        return repr(float(value)).removesuffix(".0")
    except ValueError:
        return value


def choose(scores: Mapping[Key, Sequence[float]], lower_is_better: bool = False) -> Key:
    """Return the key with the best mean over its seeds, among those with the most seeds; the first of several."""
    seeds = max(len(values) for values in scores.values())
    sign = -1 if lower_is_better else 1
    return max((key for key in scores if len(scores[key]) == seeds), key=lambda key: sign * mean(scores[key]))


def best_point(runs: Iterable[PlannedRun]) -> Point | None:
    """Return the point, without the seed, that is best on validation; None if no run is finished."""
    scores: dict[tuple[tuple[str, str], ...], list[float]] = {}
    lower_is_better = False
    for run in runs:
        results = run.results
        if results and results["best_score"] is not None:
            key = tuple((axis, value) for axis, value in run.point.items() if axis != "seed")
            scores.setdefault(key, []).append(results["best_score"])
            lower_is_better = results["chosen_by"].endswith("loss")
    return dict(choose(scores, lower_is_better)) if scores else None
