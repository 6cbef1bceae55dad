"""A run: its output folder, what is in it, and when a command continues it.

This file imports no PyTorch, so that sweep.py and study_table.py start in a moment.
"""

import fcntl
import json
import math
import os
import platform
import shlex
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from common.edge import RecipeError, log


ARGUMENTS_FILE, RESULTS_FILE = "arguments.json", "results.json"
EVALUATION = "evaluation"  # a subfolder, so that the files of a run remain
SAVED = ("adapter", "model")  # the subfolders for the kept weights
COMPLETE = "complete"  # a file that each checkpoint gets last
CHECKPOINT = "checkpoint"  # how the names of checkpoints begin, before the step
MOMENT = (
    "epoch",
    "step",
    "seconds",
)  # of the training, at which the scores of an evaluation were computed
WHERE = "(where)"  # a column that every data set gets: where each example is, such as "line 12"
CONTENT = (
    "content"  # the entry of ARGUMENTS_FILE and RESULTS_FILE that describes the files of a run
)
# What belongs to a run, besides its checkpoints and its weights, which the new run may start from.
MADE = (RESULTS_FILE, "predictions.csv", "predictions.json", "submission")
# Arguments that do not change what is learned.
FREE = {
    *(
        "output_dir",
        "overwrite_output_dir",
        "resume_from_checkpoint",
        "predict",
        "metric",
        "disable_tqdm",
        "report_to",
    ),
    *(
        "run_name",
        "project",
        "push_to_hub",
        "ddp_timeout",
        "skip_memory_metrics",
        "use_cpu",
    ),
    *("do_train", "do_eval", "do_predict", "evaluate", "fsdp", "accelerator_config", "tasks"),
}
FREE_BEGINNINGS = (
    *(
        "hub_",
        "log_",
        "logging_",
        "trackio_",
        "per_device_eval",
        "torch_compile",
        "deepspeed",
        "fsdp_",
        "save_",
    ),
    *("dataloader_num", "dataloader_p", "dataloader_m"),  # but not drop_last and in_order
)
# Arguments that name data, whose content is compared instead where it is known; then those that may
# name a folder.
OF_DATA, OF_FOLDERS = (
    ("data", "data_dir", "validation_file", "test_file"),
    ("model_name", "init_adapter"),
)
# What a checkpoint brings back, or has been computed on: the optimizer, the rate, the best score so
# far, the data.
_RESTORED = (
    "learning_rate",
    "weight_decay",
    "adam_",
    "optim",
    "lr_scheduler",
    "metric_for_best_model",
    "data of ",
)
_SAMPLED = (
    1 << 26
)  # bytes of a file that are read for its fingerprint; of a larger one half of it at either end
_LISTED = 3  # differences in a message


class Run:
    """A command's run in its output folder.

    The run is finished when there is a results.json, and resumes from the newest complete
    checkpoint. The same command resumes it, or does nothing. Other arguments or data in a folder
    that holds trained weights are an error, so that no results are lost by accident: see
    `differences` for what counts. `--resume_from_checkpoint last` resumes with other arguments,
    such as more epochs; `--overwrite_output_dir` starts over. One process at a time has a folder.
    `results` are those of a run that is already finished, or None.
    """

    def __init__(self, command: Any, files: Mapping[str, Path]) -> None:
        self.flags, self.defaults = flags_of(command), defaults_of(command)
        arguments, world_size = self.flags, command.training.world_size
        self.folder, self.starts_over = (
            Path(arguments["output_dir"]),
            arguments["overwrite_output_dir"],
        )
        self.content = describe_content(files, arguments)
        self.arguments = by_rows_per_step(arguments, world_size) | {CONTENT: self.content}
        self.results: dict[str, Any] | None = None
        before, found = (
            read_object(self.folder / ARGUMENTS_FILE),
            read_object(self.folder / RESULTS_FILE),
        )
        self.changed = differences(before, self.arguments) if before else {}
        self.is_begun = bool(found or checkpoints(self.folder))
        if self.starts_over or arguments["resume_from_checkpoint"] is not None:
            return
        if found and before and not self.changed:
            log(
                f"{self.folder} holds this run, finished: nothing is trained. --evaluate scores it on other data."
            )
            self.results = found
        elif self.is_begun and (self.changed or not before):
            changed = self.changed or {ARGUMENTS_FILE: "is missing"}
            raise RecipeError(
                f"{self.folder} holds a run with other arguments or data: {_list(changed)}. Give another "
                "--output_dir, --overwrite_output_dir to start over, or --resume_from_checkpoint last to resume with "
                "the new ones."
            )

    def start(self) -> str | None:
        """Take the folder for a run that is not finished, and return the checkpoint to resume from,
        if there is one.

        What a run before it has made is deleted, except for its weights.
        """
        lock(self.folder)
        checkpoint: str | None = None
        if self.starts_over:
            for path in checkpoints(self.folder):
                shutil.rmtree(path)
        elif self.is_begun:
            checkpoint = last_checkpoint(self.folder)
            if checkpoint is None:
                log(f"{self.folder} has no checkpoint to resume from: the run starts over.")
        restored = {
            name: change for name, change in self.changed.items() if name.startswith(_RESTORED)
        }
        if checkpoint and restored:
            raise RecipeError(
                f"{checkpoint} restores the optimizer, its learning rate and the best score on its data, which must "
                f"stay the same: {_list(restored)}. Give the old ones, or --overwrite_output_dir to start over."
            )
        for path in (self.folder / name for name in MADE):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        write_json(self.folder / ARGUMENTS_FILE, self.arguments)
        if checkpoint:
            log(f"Resuming from {checkpoint}.")
        return checkpoint

    def describe_adapter(self) -> dict[str, int]:
        """Return by what an adapter's card and a later push find its results, once it is saved."""
        weights = self.folder / "adapter" / "adapter_model.safetensors"
        if not is_houlsby(weights.parent):
            return {}
        return {"adapter_crc32": zlib.crc32(weights.read_bytes())}

    def finish(self, results: Mapping[str, Any]) -> None:
        """Write results.json, and the card of an adapter."""
        write_json(self.folder / RESULTS_FILE, results)
        if is_houlsby(self.folder / "adapter"):
            from houlsby_peft.hub.card import write_card_of_saved  # only now: it imports PyTorch

            write_card_of_saved(self.folder / "adapter")


def flags_of(groups: Iterable[Any]) -> dict[str, Any]:
    """Return the flags of a command's groups of arguments, as JSON holds them."""
    flags: dict[str, Any] = {}
    for group in groups:
        # TrainingArguments.to_dict hides tokens, which asdict would reveal.
        flags |= group.to_dict() if hasattr(group, "to_dict") else asdict(group)
    as_json: dict[str, Any] = json.loads(json.dumps(flags))
    return as_json


def defaults_of(groups: Iterable[Any]) -> dict[str, Any]:
    """Return the defaults of the flags, as far as JSON holds them."""
    defaults = {}
    for group in groups:
        for field in fields(group):
            if isinstance(field.default, (str, int, float, bool, type(None))):
                defaults[field.name] = field.default
    return defaults


def by_rows_per_step(arguments: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """Return arguments with the rows of a step, in place of on how many devices and in how many
    parts they are.
    """
    parts = ("per_device_train_batch_size", "gradient_accumulation_steps")
    rows = processes * math.prod(arguments.get(name) or 1 for name in parts)
    return {name: value for name, value in arguments.items() if name not in parts} | {
        "rows_per_step": rows
    }


def lower_is_better(score: str) -> bool:
    """Return whether a score is a loss or an error, by its name."""
    return score.endswith(("loss", "error"))


def is_free(name: str) -> bool:
    """Return whether an argument may change between two parts of a run."""
    return name in FREE or name.startswith(FREE_BEGINNINGS)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return what differs between the arguments of two runs and changes what is learned, as "was A,
    is B" by name.

    Arguments that only one of them has are left out: versions of a library may know more or fewer.
    """
    were, are = before.get(CONTENT, {}), now.get(CONTENT, {})
    known = were.keys() & are.keys()
    compared = {*known, *(OF_DATA if "train" in known else ())}  # by their content
    found = {}
    for name in sorted((before.keys() & now.keys()) - {CONTENT} - compared):
        if before[name] != now[name] and not is_free(name):
            found[name] = f"was {before[name]!r}, is {now[name]!r}"
    if "train" in known:
        known |= (were.keys() | are.keys()) - {*OF_FOLDERS}
    for name in sorted(known - {"test"}):
        if were.get(name, {}).get("sum") != are.get(name, {}).get("sum"):
            found[f"{name}'s content" if name in OF_FOLDERS else f"data of {name}"] = "has changed"
    return found


def describe_content(
    files: Mapping[str, Path], folders: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the paths and the fingerprints of files, and of those of the named folders that exist."""
    paths = {
        name: Path(str(value)).expanduser()
        for name, value in folders.items()
        if name in OF_FOLDERS and value
    }
    existing = {name: path for name, path in {**files, **paths}.items() if path.exists()}
    return {name: {"path": str(path), "sum": fingerprint(path)} for name, path in existing.items()}


def fingerprint(path: Path) -> str:
    """Return a checksum of a file, or of the names and the content of the files directly in a
    folder.

    Cards and logs, which change without changing the model, are left out. Of a file of more than 64
    MB, both ends are read.
    """
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    total = 0
    for file in files:
        if path.is_file() or file.suffix in (".json", ".safetensors", ".bin", ".txt", ".model"):
            total = zlib.crc32(
                f"{'' if path.is_file() else file.name} {file.stat().st_size}".encode(), total
            )
            with file.open("rb") as opened:
                total = zlib.crc32(opened.read(_SAMPLED // 2), total)
                opened.seek(max(opened.tell(), file.stat().st_size - _SAMPLED // 2))
                total = zlib.crc32(opened.read(), total)
    return f"{total:08x}"


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder, or -1 if it has another name."""
    number = checkpoint.name.removeprefix(f"{CHECKPOINT}-")
    return int(number) if number.isdigit() else -1


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    return sorted(folder.glob(f"{CHECKPOINT}-*"), key=step_of, reverse=True)


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint in a folder, or None; report those that are newer."""
    for path in checkpoints(folder):
        if (path / COMPLETE).exists():
            return str(path)
        log(f"Skipping {path}: it is incomplete.")
    return None


def find_saved(folder: Path) -> Path | None:
    """Return the adapter or the model that a run has saved in its folder, or None if there is
    neither.
    """
    return next((folder / name for name in SAVED if (folder / name).is_dir()), None)


def find_evaluated(name: str | None, training: Any) -> str | None:
    """Return what to score: a folder with an adapter or a model, or the name of an adapter on the
    Hub; None to train.

    `name` is that of the command line. The folder of a run stands for what it has saved.
    """
    if name is None and training.do_train:
        return None
    folder = Path(name or training.output_dir).expanduser()
    saved = find_saved(folder)
    if saved is not None:
        return str(saved)
    if name is None:
        raise RecipeError(
            "Without --do_train, --do_eval and --do_predict score what the run in --output_dir has "
            f"saved, and {folder} has neither adapter nor model. Give --do_train as well, or "
            "--evaluate with a folder."
        )
    return name


def is_houlsby(folder: Path) -> bool:
    return (read_object(folder / "adapter_config.json") or {}).get("peft_type") == "HOULSBY"


def lock(folder: Path) -> None:
    """Create a run's folder and reserve it until this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    # The kernel gives up a process's locks with the process, so that one that was killed leaves
    # none behind. The file stays open: closing it would give up the lock.
    file = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise RecipeError(
            f"{folder} is in use by another run. Wait, or give another --output_dir."
        ) from None


def hardware() -> str:
    """Return the names of this machine's accelerators, or of its processor."""
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return (
            f"{count} x {torch.cuda.get_device_name()}"
            if count > 1
            else torch.cuda.get_device_name()
        )
    # On Linux only this file has the processor's name.
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    threads = torch.get_num_threads()
    return f"{next(names, platform.machine())}, {threads} thread{'s' if threads > 1 else ''}"


def command_line(argv: Sequence[str], token: str | None = None) -> str:
    """Return the command line of a recipe as others may see it: without the token, and without the
    folders in absolute paths, which often contain a name.
    """
    script, *words = (word.replace(token, "TOKEN") if token else word for word in argv)
    parts = [word.partition("=") if word.startswith("--") else ("", "", word) for word in words]
    words = [
        "".join((*start, Path(value).name if Path(value).is_absolute() else value))
        for *start, value in parts
    ]
    launcher = (
        ["accelerate", "launch"] if "ACCELERATE_MIXED_PRECISION" in os.environ else ["python"]
    )
    folder = "recipes/studies" if Path(script).parent.name == "studies" else "recipes"
    return shlex.join([*launcher, f"{folder}/{Path(script).name}", *words])


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that other processes, also after a kill, see all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text)
    unfinished.replace(path)


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file is missing, damaged or holds something
    else.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: Mapping[str, Any] | Iterable[Any]) -> None:
    """Write an object as write_atomically does."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def _list(changed: Mapping[str, str]) -> str:
    listed = [f"{name} {change}" for name, change in changed.items()]
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return f"{', '.join(listed[:_LISTED])}{more}"
