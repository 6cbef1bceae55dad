"""What a sweep will run, as a table: by task its runs, and how long they take.

The hours are an estimate from the number of operations of training, for a GPU that computes
`OPERATIONS` of them per second, about an A100 in bfloat16. They leave out evaluations.
"""

from argparse import Namespace
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import mean

import pandas as pd

from results.additional import PAPER
from run.presets import preset
from sweeping.runs import PlannedRun
from sweeping.search import Search


OPERATIONS = 1e14
# Training rows, and tokens of a row in a random batch of 32, which is padded to its longest text of
# at most 128 tokens; measured on the Hub's data. SQuAD's rows are windows of 384 tokens.
SIZES = {
    "cola": (8_551, 23),
    "sst2": (67_349, 40),
    "mrpc": (3_668, 80),
    "stsb": (5_749, 70),
    "qqp": (363_846, 70),
    "mnli": (392_702, 89),
    "qnli": (104_743, 97),
    "rte": (2_490, 128),
    "wnli": (635, 79),
    "squad": (88_500, 384),
    # The papers give no splits; four fifths are an assumption.
    **{task: (0.8 * rows, 128) for task, rows in PAPER["rows"].items()},
}
# Layers and their weights, by a part of the model's name.
MODELS = {"bert-large": (24, 302e6), "bert-base": (12, 85e6), "minilm": (6, 10.6e6)}


def tabulate(searches: Sequence[Search]) -> pd.DataFrame:
    """Return the runs that are left by task, with their grid and hours."""
    rows = []
    for search in searches:
        if runs := search.left():
            # The other seeds run at one point of the grid, which takes the mean of all.
            hours = search.count_left() * mean(map(estimate_hours, runs))
            rows.append((runs[0].folder.parent.name, search.count_left(), hours))
    left = pd.DataFrame(rows, columns=["task", "runs", "hours"])
    return left.groupby("task", sort=False).sum(min_count=1)


def describe_grid(runs: Iterable[PlannedRun]) -> str:
    """Return the values that differ between runs, by flag."""
    points = pd.DataFrame([run.point for run in runs]).drop(columns="task", errors="ignore")
    differing = points.loc[:, points.nunique() > 1]
    return ", ".join(f"{axis} {' '.join(differing[axis].dropna().unique())}" for axis in differing)


def estimate_hours(run: PlannedRun) -> float:
    """Return the estimated hours of a run's training; NaN if its data or model are not known."""
    flags = _flags(run)
    task = run.point.get("task", run.recipe.stem)
    name = str(getattr(flags, "model_name", ""))
    known = [size for part, size in MODELS.items() if part in name]
    epochs = getattr(flags, "num_train_epochs", None)
    if task not in SIZES or not known or epochs is None:
        return float("nan")
    layers, weights = known[0]
    rows, tokens = SIZES[task]
    rows = min(rows, float(getattr(flags, "max_train_samples", rows)))
    # Two operations per weight and token forward, and as many backward for the hidden states and
    # for the weights that are trained.
    of_top_k = 2 + 4 * int(getattr(flags, "top_k", 0)) / layers
    operations = {"full": 6.0, "top_k": of_top_k}.get(flags.method, 4.0)
    return float(operations * weights * rows * tokens * float(epochs) / OPERATIONS / 3600)


def _flags(run: PlannedRun) -> Namespace:
    """Return a run's values, those of its flags, and those of its preset."""
    flags = Namespace(method="houlsby", share_layers=0)
    for flag, value in pairwise([*run.flags, ""]):
        if flag.startswith("--"):
            setattr(flags, flag.removeprefix("--"), value)
    vars(flags).update(run.point)
    if hasattr(flags, "preset"):
        recipe = "glue" if run.recipe.stem == "gradient_norms" else run.recipe.stem
        of_preset = preset(flags.preset, flags.method, int(flags.share_layers), recipe)
        flags = Namespace(**of_preset | vars(flags))
    return flags
