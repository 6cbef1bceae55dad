"""Checkpoints of a run: how a complete one is told from others, and which one to resume from."""

from pathlib import Path

from run.edge import log
from run.files import add_to_checksum, read_object, write_json


CHECKPOINT = "checkpoint"
COMPLETE = "complete.json"  # the file that each checkpoint gets last: a checksum of each other one


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder, or -1 if it has another name."""
    number = checkpoint.name.removeprefix(f"{CHECKPOINT}-")
    return int(number) if number.isdigit() else -1


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    return sorted(folder.glob(f"{CHECKPOINT}-*"), key=step_of, reverse=True)


def seal(checkpoint: Path) -> None:
    """Mark a checkpoint as complete, when all of its files are written."""
    write_json(checkpoint / COMPLETE, _checksums(checkpoint))


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint in a folder, or None; report those that are newer."""
    for path in checkpoints(folder):
        problem = _find_problem(path)
        if problem is None:
            return str(path)
        log(f"Skipping {path}: {problem}.")
    return None


def _find_problem(checkpoint: Path) -> str | None:
    """Return why a run cannot resume from a checkpoint as if nothing had happened; None if it can.

    Without its optimizer, schedule or random state, or with those of another step, it would go on
    and end with other weights.
    """
    sealed = read_object(checkpoint / COMPLETE)
    if not sealed:
        return "it is incomplete"
    present = _checksums(checkpoint)
    for name, checksum in sealed.items():
        if name not in present:
            return f"it lacks {name}"
        if present[name] != checksum:
            return f"{name} is not as it was saved"
    return None


def _checksums(folder: Path) -> dict[str, str]:
    """Return a checksum of each file in a folder, by its name."""
    checksums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != COMPLETE:
            name = path.relative_to(folder).as_posix()
            checksums[name] = f"{add_to_checksum(0, path, name):08x}"
    return checksums
