"""results.json: what a run was, and what came out."""

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_callback import TrainerState


LIBRARIES = ("houlsby_peft", "peft", "transformers", "accelerate", "datasets", "evaluate", "torch")


def scores_per_epoch(log_history: Iterable[dict[str, float]]) -> list[dict[str, float]]:
    """One entry per evaluation: epoch, step and the scores, of all validation splits, without the prefix "eval_"."""
    evaluations: dict[float, dict[str, float]] = {}
    for entry in log_history:
        scores = {key.removeprefix("eval_"): value for key, value in entry.items() if key.startswith("eval_")}
        if scores:
            moment = {"epoch": entry["epoch"], "step": entry["step"]}
            evaluations.setdefault(entry["step"], moment).update(scores)
    return list(evaluations.values())


def best_epoch(state: TrainerState) -> float | None:
    """The epoch whose weights were kept, or None where no best one was chosen."""
    epochs = {entry["step"]: entry["epoch"] for entry in scores_per_epoch(state.log_history)}
    return epochs.get(state.best_global_step)


def write_results(path: Path, arguments: Iterable[Any], **results: Any) -> None:
    """Writes the results, the arguments (dataclasses, merged) and the versions of Python and the libraries as JSON."""
    merged: dict[str, Any] = {}
    for group in arguments:
        # TrainingArguments.to_dict hides tokens, which asdict would write out.
        merged |= group.to_dict() if isinstance(group, TrainingArguments) else asdict(group)
    versions = {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}
    path.write_text(json.dumps({**results, "versions": versions, "arguments": merged}, indent=2) + "\n")
