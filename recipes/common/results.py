"""results.json: what a run was, and what came out."""

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType
from transformers import TrainingArguments
from transformers.trainer_callback import TrainerState

from common.environment import command, emissions, hardware
from common.trainer import RecipeTrainer


LIBRARIES = ("houlsby_peft", "peft", "transformers", "accelerate", "datasets", "evaluate", "torch")


RESULTS_FILE = "results.json"
_NO_SCORES = ("runtime", "_per_second", "model_preparation_time")


def scores_per_epoch(log_history: Iterable[dict[str, float]]) -> list[dict[str, float]]:
    """One entry per evaluation: epoch, step and the scores, of all validation splits, without the prefix "eval_"."""
    evaluations: dict[float, dict[str, float]] = {}
    for entry in log_history:
        scores = without_times({key: value for key, value in entry.items() if key.startswith("eval_")})
        if scores:
            moment = {"epoch": entry["epoch"], "step": entry["step"]}
            evaluations.setdefault(entry["step"], moment).update(scores)
    return list(evaluations.values())


def without_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """What the Trainer reports of an evaluation, without the prefix "eval_", the epoch, and what time it took."""
    return {
        key.removeprefix("eval_"): value
        for key, value in metrics.items()
        if key != "epoch" and not key.endswith(_NO_SCORES)
    }


def best_epoch(state: TrainerState) -> float | None:
    """The epoch whose weights were kept, or None where no best one was chosen."""
    epochs = {entry["step"]: entry["epoch"] for entry in scores_per_epoch(state.log_history)}
    return epochs.get(state.best_global_step)


def best_scores(state: TrainerState) -> dict[str, float]:
    """All scores of the kept epoch, or of the last one where no best one was chosen; empty without an evaluation."""
    epochs = scores_per_epoch(state.log_history)
    kept = next((entry for entry in epochs if entry["step"] == state.best_global_step), epochs[-1] if epochs else {})
    return {name: score for name, score in kept.items() if name not in ("epoch", "step")}


def strategy(accelerator: Accelerator) -> dict[str, str | int]:
    """How the run was really spread over processes; some launches silently do something else than they were asked."""
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        kind = f"ZeRO-{accelerator.deepspeed_plugin.zero_stage}"
    elif accelerator.distributed_type is DistributedType.FSDP:
        kind = f"FSDP{accelerator.state.fsdp_plugin.fsdp_version}"
    else:
        kind = "none" if accelerator.distributed_type is DistributedType.NO else "DDP"
    return {"type": kind, "processes": accelerator.num_processes, "mixed_precision": accelerator.mixed_precision}


def write_results(trainer: RecipeTrainer, arguments: Iterable[Any], **results: Any) -> dict[str, Any]:
    """Writes results.json into the output folder, and prints the best score; the main process only.

    Call it last: as the file appears whole, or not at all, a folder that has it holds a finished run.

    Besides `results` it holds the seed, the strategy, the scores per epoch, which of them was kept, the sizes, the
    seconds since the trainer was made, the arguments (dataclasses, merged) and their defaults, the command, the
    hardware, what CodeCarbon has measured, and the versions of Python and the libraries. All of it is returned.
    """
    training, state, arguments = trainer.args, trainer.state, tuple(arguments)
    output = Path(training.output_dir)
    content = {
        **results,
        "seed": training.seed,
        "strategy": strategy(trainer.accelerator),
        "epochs": scores_per_epoch(state.log_history),
        "chosen_by": training.metric_for_best_model,
        "best_epoch": best_epoch(state),
        "best_score": state.best_metric,
        "best_scores": best_scores(state),
        "trainable_parameters": trainer.trainable,
        "total_parameters": trainer.total,
        "seconds": round(time.perf_counter() - trainer.start, 1),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "arguments": merge(arguments),
        "defaults": {field.name: field.default for group in arguments for field in fields(group) if _is_plain(field)},
        "hardware": hardware(),
        "emissions": emissions(output),
        "command": command(sys.argv, training.hub_token),
    }
    if not trainer.is_world_process_zero():
        return content
    write_whole(output / RESULTS_FILE, json.dumps(content, indent=2) + "\n")
    print(f"Best epoch: {best_epoch(state)}, {training.metric_for_best_model} {state.best_metric}. Saved: {output}")
    return content


def merge(groups: Iterable[Any]) -> dict[str, Any]:
    """The arguments of all groups, dataclasses, in one."""
    merged: dict[str, Any] = {}
    for group in groups:
        # TrainingArguments.to_dict hides tokens, which asdict would write out.
        merged |= group.to_dict() if isinstance(group, TrainingArguments) else asdict(group)
    return merged


def _is_plain(field: Field[Any]) -> bool:
    return isinstance(field.default, (str, int, float, bool, type(None)))


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that others see all of it or none, whenever the process is killed."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text)
    unfinished.replace(path)
