"""When two runs are the same: their arguments less those that change nothing, and the content of their files.

The recipes compare a run with what its folder holds, sweeps with their plan, and tables put seeds of one row together.
This file imports no PyTorch, so that sweep.py and study_table.py start in a moment.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


ARGUMENTS_FILE, RESULTS_FILE = "arguments.json", "results.json"
CONTENT = "content"  # the entry of ARGUMENTS_FILE and results.json that describes the files of a run
# Arguments that do not change what is learned.
FREE = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "predict", "disable_tqdm", "report_to"),
    *("run_name", "project", "push_to_hub", "ddp_timeout", "skip_memory_metrics", "use_cpu", "keep_prefix_gb"),
    *("do_train", "do_eval", "do_predict", "example", "evaluate", "encoding", "fsdp", "accelerator_config"),
}
FREE_BEGINNINGS = (
    *("hub_", "log_", "logging_", "trackio_", "per_device_eval", "torch_compile", "deepspeed", "fsdp_", "save_"),
    *("dataloader_num", "dataloader_p", "dataloader_m"),  # but not drop_last and in_order
)
# Arguments that name data, whose content is compared instead where it is known; then those that may name a folder.
OF_DATA, OF_FOLDERS = ("data", "data_dir", "validation_file", "test_file"), ("model_name", "init_adapter")
MOMENT = ("epoch", "step", "seconds")  # of the training, at which the scores of an evaluation were computed
_SAMPLED = 1 << 26  # bytes of a file that are read for its fingerprint; of a larger one half of it at either end


def is_free(name: str) -> bool:
    """Return whether an argument may change between two parts of a run."""
    return name in FREE or name.startswith(FREE_BEGINNINGS)


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return what differs between the arguments of two runs and changes what is learned, as "was A, is B" by name.

    Args:
        before, now: The arguments, each with the entry CONTENT if files are known.
        defaults: What a missing argument stands for: another version of a library may know more or fewer of them.
    """
    were, are = before.get(CONTENT, {}), now.get(CONTENT, {})
    found = {}
    for name in sorted(now.keys() - {CONTENT}):
        old, new = before.get(name, (defaults or {}).get(name)), now[name]
        known = "train" in were and "train" in are if name in OF_DATA else name in were and name in are
        if old != new and not is_free(name) and not known:
            found[name] = f"was {old!r}, is {new!r}"
    both = were.keys() & are.keys() if "train" not in were or "train" not in are else were.keys() | are.keys()
    for name in sorted(both - {"test"}):
        if (were.get(name) or {}).get("sum") != (are.get(name) or {}).get("sum") and (
            name not in OF_FOLDERS or (name in were and name in are)
        ):
            found[f"{name}'s content" if name in OF_FOLDERS else f"data of {name}"] = "has changed"
    return found


def describe_content(files: Mapping[str, Path], folders: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the paths and the fingerprints of files, and of those of the named folders that exist."""
    paths = {name: Path(str(value)).expanduser() for name, value in folders.items() if name in OF_FOLDERS and value}
    existing = {name: path for name, path in {**files, **paths}.items() if path.exists()}
    return {name: {"path": str(path), "sum": fingerprint(path)} for name, path in existing.items()}


def fingerprint(path: Path) -> str:
    """Return a checksum of a file, or of the names and the content of the files directly in a folder.

    Cards and logs, which change without changing the model, are left out. Of a file of more than 64 MB, both ends are
    read.
    """
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    total = 0
    for file in files:
        if path.is_file() or file.suffix in (".json", ".safetensors", ".bin", ".txt", ".model"):
            total = zlib.crc32(f"{'' if path.is_file() else file.name} {file.stat().st_size}".encode(), total)
            with file.open("rb") as opened:
                total = zlib.crc32(opened.read(_SAMPLED // 2), total)
                opened.seek(max(opened.tell(), file.stat().st_size - _SAMPLED // 2))
                total = zlib.crc32(opened.read(), total)
    return f"{total:08x}"


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that other processes, also after a kill, see all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text)
    unfinished.replace(path)


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file is missing, damaged or holds something else."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: Mapping[str, Any] | Iterable[Any]) -> None:
    """Write an object as write_atomically does."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")
