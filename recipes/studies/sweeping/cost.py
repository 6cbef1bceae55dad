"""What a sweep costs: forward and backward passes of a text, and hours on one GPU."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from common.presets import preset
from results.additional import PAPER
from sweeping.runs import PlannedRun


# Training examples of GLUE and of the 17 further tasks, and windows of SQuAD.
ROWS = {
    "cola": 8_551, "sst2": 67_349, "mrpc": 3_668, "stsb": 5_749, "qqp": 363_846, "mnli": 392_702, "qnli": 104_743,
    "rte": 2_490, "wnli": 635, "squad": 88_524, **{name: round(0.8 * task.rows) for name, task in PAPER.items()},
}  # fmt: skip
# Weights in the layers, which each token passes, and the number of layers; of other names,
# BERT-base's.
LAYERS, BASE = {"large": (302e6, 24), "minilm": (11e6, 6)}, (85e6, 12)
# Operations per weight and token: two each for forward, backward to the first layer, and gradients
# of the weights, of which adapters need the first two, the head alone the first, and k top layers
# the others for their own weights.
OPERATIONS = {"full": 6, "top_k": 2, "linear": 2}
GPU = "A100"
# Operations per second, at half of the peak.
SPEED = {"float32": 9.7e12, "--tf32 true": 78e12, "--bf16 true": 156e12}


def estimate(runs: Iterable[PlannedRun]) -> str:
    """Return a sentence with the number of runs, their passes, and the hours that these take at
    most: texts are taken to be as long as --max_length, and evaluations are not counted.
    """
    count, passes, operations = 0, 0.0, 0.0
    for run in runs:
        values = arguments_of(run)
        task = values.get("task", run.recipe.stem)
        rows = min(ROWS.get(task, 0), int(values.get("max_train_samples") or ROWS.get(task, 0)))
        texts = rows * float(values.get("num_train_epochs", 10))
        weights, layers = next(
            (own for name, own in LAYERS.items() if name in str(values.get("model_name"))), BASE
        )
        count, passes = count + 1, passes + texts
        per_token = weights * (
            OPERATIONS.get(str(values.get("method")), 4) + 4 * int(values.get("top_k", 0)) / layers
        )
        operations += (
            texts * int(values.get("max_length", 384 if task == "squad" else 128)) * per_token
        )
    hours = ", ".join(f"{operations / speed / 3600:,.1f} ({name})" for name, speed in SPEED.items())
    if not passes:
        return f"{count:,} runs"
    return f"{count:,} runs, {passes:.3g} texts forward and backward, at most so many hours on one {GPU}: {hours}"


def arguments_of(run: PlannedRun) -> Mapping[str, Any]:
    """Return the arguments of a run as far as its flags and its preset say."""
    flags = {
        flag.removeprefix("--"): value
        for flag, value in pairwise(run.flags)
        if flag.startswith("--")
    }
    given = {**flags, **run.point}
    if name := given.get("preset"):
        share_layers = int(given.get("share_layers", 0))
        return preset(name, given.get("method", "houlsby"), share_layers, run.recipe.stem) | given
    return given
