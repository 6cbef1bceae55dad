"""A run: its output folder, what is in it, and when a command continues it.

This file imports no PyTorch, so that sweep.py and study_table.py start in a moment.
"""

import json
import os
import platform
import shlex
import shutil
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from run.checkpoints import checkpoints, last_checkpoint
from run.edge import RecipeError, log
from run.files import fingerprint, fingerprint_of_all, read_object, write_json


ARGUMENTS_FILE, RESULTS_FILE = "arguments.json", "results.json"
LABEL_ISSUES = "label_issues"  # the name of a copy of the table, without its extension
LABEL_ISSUES_LIST = f"{LABEL_ISSUES}_list.csv"  # of other data
EVALUATION = "evaluation"  # a subfolder, so that the files of a run remain
SAVED = ("adapter", "model")  # the subfolders for the kept weights
# Of the training, at which the scores of an evaluation were computed.
MOMENT = ("epoch", "step", "seconds")
WHERE = "(where)"  # a column that every data set gets: where each example is, such as "line 12"
# The entry of ARGUMENTS_FILE and RESULTS_FILE that describes the files of a run.
CONTENT = "content"
# What belongs to a run, besides its checkpoints and its weights, which the new run may start from.
MADE = (RESULTS_FILE, "predictions.csv", "predictions.json", "submission")
# Arguments that do not change what is learned, as patterns. Of the loader's, drop_last and in_order
# do.
FREE = (
    "accelerator_config", "baseline", "cache_states", "check_labels", "dataloader_m*",
    "dataloader_num*", "dataloader_p*", "ddp_timeout", "deepspeed*", "disable_tqdm", "do_*",
    "evaluate", "fsdp*", "hub_*", "log_*", "logging_*", "metric", "output_dir",
    "overwrite_output_dir", "per_device_eval*", "predict", "project", "push_to_hub", "report_to",
    "resume_from_checkpoint", "run_name", "save_*", "skip_memory_metrics", "tasks",
    "torch_compile*", "trackio_*", "use_cpu",
)  # fmt: skip
# Arguments that name data, whose content is compared instead where it is known.
OF_DATA = ("data", "more_data", "data_dir", "validation_file", "test_file")
OF_FOLDERS = ("model_name", "init_adapter", "beneath")  # arguments that may name a folder
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

    def __init__(self, command: Any, files: Mapping[str, Sequence[Path]]) -> None:
        self.flags, self.defaults = flags_of(command), defaults_of(command)
        self.folder = Path(self.flags["output_dir"])
        self.starts_over = self.flags["overwrite_output_dir"]
        self.content = describe_content(files, self.flags)
        self.arguments = by_rows_per_step(self.flags, command.training.world_size)
        self.arguments[CONTENT] = self.content
        previous = read_object(self.folder / ARGUMENTS_FILE)
        results = read_object(self.folder / RESULTS_FILE)
        self.changed = differences(previous, self.arguments) if previous else {}
        self.is_begun = bool(results or checkpoints(self.folder))
        self.results: dict[str, Any] | None = None
        if not self.starts_over and self.flags["resume_from_checkpoint"] is None:
            if not previous:
                self.changed = {ARGUMENTS_FILE: "is missing"}
            self._take_finished(results)

    def _take_finished(self, results: dict[str, Any] | None) -> None:
        """Take the results of the same run, if it is finished; refuse a folder of another run."""
        if self.is_begun and self.changed:
            remedy = "Give another --output_dir, or --overwrite_output_dir to start over"
            if not any(name.startswith(_RESTORED) for name in self.changed):
                remedy += ", or --resume_from_checkpoint last to resume with the new ones"
            raise RecipeError(
                f"{self.folder} holds a run with other arguments or data: {_list(self.changed)}. "
                f"{remedy}."
            )
        if not results:
            return
        crc32 = results.get("adapter_crc32")
        is_damaged = crc32 is not None and self.describe_adapter().get("adapter_crc32") != crc32
        if find_saved(self.folder) is None or is_damaged:
            log(
                f"{self.folder} holds this run, but its weights are gone or damaged: they are made "
                "again."
            )
            return
        log(
            f"{self.folder} holds this run, finished: nothing is trained. --evaluate scores it on "
            "other data."
        )
        self.results = results

    def start(self) -> str | None:
        """Take the folder for a run that is not finished, and return the checkpoint to resume from,
        if there is one.

        What a run before it has made is deleted, except for its weights.
        """
        lock(self.folder)
        checkpoint = self._find_checkpoint()
        for name in MADE:
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        write_json(self.folder / ARGUMENTS_FILE, self.arguments)
        if checkpoint:
            log(f"Resuming from {checkpoint}.")
        return checkpoint

    def _find_checkpoint(self) -> str | None:
        """Return the checkpoint to resume from; delete all of them to start over."""
        if self.starts_over:
            for path in checkpoints(self.folder):
                shutil.rmtree(path)
            return None
        if not self.is_begun:
            return None
        checkpoint = last_checkpoint(self.folder)
        if checkpoint is None:
            log(f"{self.folder} has no checkpoint to resume from: the run starts over.")
            return None
        restored = {name: self.changed[name] for name in self.changed if name.startswith(_RESTORED)}
        if restored:
            raise RecipeError(
                f"{checkpoint} restores the optimizer, its learning rate and the best score on its "
                f"data, which must stay the same: {_list(restored)}. Give the old ones, or "
                "--overwrite_output_dir to start over."
            )
        return checkpoint

    def describe_adapter(self) -> dict[str, int]:
        """Return by what an adapter's card and a later push find its results, once it is saved."""
        weights = self.folder / "adapter" / "adapter_model.safetensors"
        if not is_houlsby(weights.parent) or not weights.exists():
            return {}
        return {"adapter_crc32": zlib.crc32(weights.read_bytes())}

    def finish(self, results: Mapping[str, Any]) -> None:
        """Write results.json, and the card of an adapter."""
        write_json(self.folder / RESULTS_FILE, results)
        for weights in self.folder.rglob("*.safetensors"):
            # safetensors gives no other user the right to read them.
            shutil.copymode(self.folder / RESULTS_FILE, weights)
        if is_houlsby(self.folder / "adapter"):
            from houlsby_peft.hub.card import write_card_of_saved  # only now: it imports PyTorch

            write_card_of_saved(self.folder / "adapter")


def flags_of(groups: Iterable[Any]) -> dict[str, Any]:
    """Return the flags of a command's groups of arguments, as JSON holds them."""
    flags: dict[str, Any] = {}
    for group in groups:
        # TrainingArguments.to_dict hides tokens, which asdict would reveal.
        if hasattr(group, "to_dict"):
            flags |= group.to_dict()
        else:
            flags |= asdict(group)
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
    by_rows = dict(arguments)
    batch = by_rows.pop("per_device_train_batch_size", None) or 1
    steps = by_rows.pop("gradient_accumulation_steps", None) or 1
    by_rows["rows_per_step"] = processes * batch * steps
    return by_rows


def lower_is_better(score: str) -> bool:
    """Return whether a score is a loss or an error, by its name."""
    return score.endswith(("loss", "error"))


def is_free(name: str) -> bool:
    """Return whether an argument may change between two parts of a run."""
    return any(fnmatch(name, pattern) for pattern in FREE)


def differences(previous: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """Return what differs between the arguments of two runs and changes what is learned, as "was A,
    is B" by name.

    Arguments that only one of them has are left out: versions of a library may know more or fewer.
    Files are compared by their content where it is known of both.
    """
    were, are = previous.get(CONTENT, {}), current.get(CONTENT, {})
    files = were.keys() & are.keys()
    names = (previous.keys() & current.keys()) - {CONTENT} - files
    if "train" in files:
        names -= {*OF_DATA}
        files |= (were.keys() | are.keys()) - {*OF_FOLDERS}
    changes = {}
    for name in sorted(names):
        if previous[name] != current[name] and not is_free(name):
            changes[name] = f"was {previous[name]!r}, is {current[name]!r}"
    for name in sorted(files - {"test"}):
        if were.get(name, {}).get("sum") != are.get(name, {}).get("sum"):
            subject = f"data of {name}"
            if name in OF_FOLDERS:
                subject = f"{name}'s content"
            changes[subject] = "has changed"
    return changes


def describe_content(
    files: Mapping[str, Sequence[Path]], arguments: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the paths and the fingerprints of the files and folders of a run that exist: its data,
    and what `arguments` name in OF_FOLDERS.
    """
    content = {}
    for name, paths in files.items():
        if all(path.exists() for path in paths):
            sums = "-".join(map(fingerprint_of_all, paths))
            content[name] = {"path": ", ".join(map(str, paths)), "sum": sums}
    for name in OF_FOLDERS:
        path = Path(str(arguments.get(name) or "")).expanduser()
        if arguments.get(name) and path.exists():
            content[name] = {"path": str(path), "sum": fingerprint(path)}
    return content


def find_saved(folder: Path) -> Path | None:
    """Return the adapter or the model that a run has saved in its folder, or None if there is
    neither.
    """
    for name in SAVED:
        if (folder / name).is_dir():
            return folder / name
    return None


def is_houlsby(folder: Path) -> bool:
    return (read_object(folder / "adapter_config.json") or {}).get("peft_type") == "HOULSBY"


def lock(folder: Path) -> None:
    """Create a run's folder and, but on Windows, reserve it until this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        return
    import fcntl

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
        count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
        return str(name) if count == 1 else f"{count} x {name}"
    name, information = platform.machine(), Path("/proc/cpuinfo")
    if information.exists():  # only this file has the processor's name
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads > 1)}"


def command_line(argv: Sequence[str], token: str | None = None) -> str:
    """Return the command line of a recipe as others may see it: without the token, and without the
    folders in absolute paths, which often contain a name.
    """
    script, *words = argv
    shown = []
    for word in words:
        if token:
            word = word.replace(token, "TOKEN")
        flag, equals, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
        if Path(value).is_absolute():
            value = Path(value).name
        shown.append(f"{flag}{equals}{value}")
    launcher = ["python"]
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        launcher = ["accelerate", "launch"]
    path = Path(script)
    folder = "recipes/studies" if path.parent.name == "studies" else "recipes"
    return shlex.join([*launcher, f"{folder}/{path.name}", *shown])


def _list(changes: Mapping[str, str]) -> str:
    listed = ", ".join(f"{name} {changes[name]}" for name in [*changes][:_LISTED])
    more = len(changes) - _LISTED
    return f"{listed} and {more} more" if more > 0 else listed
