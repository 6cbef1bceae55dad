"""results.json: what a run was, what it was computed on, and its scores."""

import csv
import json
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import Field, asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME

from accelerate import Accelerator, DistributedType
from training.figures import MOMENT
from training.files import list_files, write_atomically
from training.scores import without_times
from training.trainer import TRAIN_SECONDS, RecipeTrainer


RESULTS_FILE = "results.json"
LIBRARIES = ("houlsby_peft", "peft", "transformers", "accelerate", "datasets", "evaluate", "torch")


def write_results(trainer: RecipeTrainer, arguments: Iterable[Any], **results: Any) -> dict[str, Any]:
    """Write results.json into the output folder, in the main process; return the content.

    Call it after everything that a run must leave behind: the file appears complete or not at all, so a folder with it
    holds a finished run.

    Besides `results` it holds the seed, the strategy, the scores and the time of training per epoch, the best epoch if
    its weights were kept, the scores of the weights that were kept, the numbers of parameters, the seconds since the
    trainer was made, the arguments and their defaults, the command, the hardware, the emissions that CodeCarbon
    measured, the versions of Python and the libraries, and the sizes and checksums of the saved files.

    Args:
        trainer: The trainer of the run.
        arguments: The arguments of the run, as dataclasses.
        results: Further entries.
    """
    training, arguments = trainer.args, tuple(arguments)
    output = Path(training.output_dir)
    epochs = scores_per_epoch(trainer.state.log_history)
    kept = next((entry for entry in epochs if entry["step"] == trainer.kept_step), {})
    scores = {name: score for name, score in kept.items() if name not in MOMENT}
    score = scores.get(training.metric_for_best_model.removeprefix("eval_"))
    content = {
        **results,
        "seed": training.seed,
        "strategy": strategy(trainer.accelerator),
        "epochs": epochs,
        "chosen_by": training.metric_for_best_model,
        "best_epoch": None if trainer.best_step is None else kept["epoch"],
        "best_score": score,
        "best_scores": scores,
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
    saved = (path for path in (output / trainer.saved_as).glob("*") if path.is_file() and not _may_change(path))
    content["files"] = list_files(output, saved)
    write_atomically(output / RESULTS_FILE, json.dumps(content, indent=2) + "\n")
    return content


def _may_change(path: Path) -> bool:
    """Return whether a saved file is not needed to load the adapter, so that a run is finished without it."""
    return path.suffix == ".md" or path.name == TRAINING_ARGS_NAME


def merge(groups: Iterable[Any]) -> dict[str, Any]:
    """Return the arguments of several dataclasses as one dictionary."""
    merged: dict[str, Any] = {}
    for group in groups:
        # TrainingArguments.to_dict hides tokens, which asdict would reveal.
        merged |= group.to_dict() if isinstance(group, TrainingArguments) else asdict(group)
    return merged


def _is_plain(field: Field[Any]) -> bool:
    return isinstance(field.default, (str, int, float, bool, type(None)))


def scores_per_epoch(log_history: Iterable[dict[str, float]]) -> list[dict[str, float]]:
    """Return an entry per evaluation: epoch, step, seconds of training, and the scores of all validation splits,
    without "eval_"."""
    evaluations: dict[float, dict[str, float]] = {}
    for entry in log_history:
        scores = without_times({key: value for key, value in entry.items() if key.startswith("eval_")})
        if scores:
            moment = {"epoch": entry["epoch"], "step": entry["step"]}
            if TRAIN_SECONDS in entry:  # earlier versions had none in their checkpoints
                moment["seconds"] = entry[TRAIN_SECONDS]
            evaluations.setdefault(entry["step"], moment).update(scores)
    return list(evaluations.values())


def strategy(accelerator: Accelerator) -> dict[str, str | int]:
    """Return how the run was really distributed; some launches silently do something else than requested."""
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        kind = f"ZeRO-{accelerator.deepspeed_plugin.zero_stage}"
    elif accelerator.distributed_type is DistributedType.FSDP:
        kind = f"FSDP{accelerator.state.fsdp_plugin.fsdp_version}"
    else:
        kind = "none" if accelerator.distributed_type is DistributedType.NO else "DDP"
    return {"type": kind, "processes": accelerator.num_processes, "mixed_precision": accelerator.mixed_precision}


def hardware() -> str:
    """Return the names of this machine's accelerators, or of its processor."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return f"{count} x {torch.cuda.get_device_name()}" if count > 1 else torch.cuda.get_device_name()
    # On Linux only this file has the processor's name.
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    threads = torch.get_num_threads()
    return f"{processor}, {threads} thread{'s' if threads > 1 else ''}"


def emissions(output_dir: Path) -> float | None:
    """Return the kilograms of CO2 that CodeCarbon recorded for a run with --report_to codecarbon, or None."""
    try:
        with (output_dir / "emissions.csv").open(newline="") as file:
            return float(list(csv.DictReader(file))[-1]["emissions"])
    except (OSError, LookupError, ValueError):  # there is none, or it is damaged
        return None


def command(argv: Sequence[str], token: str | None = None) -> str:
    """Return the command line of a recipe as others may see it: without the token, and without the folders in absolute
    paths, which often contain a name."""
    script, *words = (word.replace(token, "TOKEN") if token else word for word in argv)
    words = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return shlex.join(["accelerate", "launch", f"recipes/{Path(script).name}", *words])
