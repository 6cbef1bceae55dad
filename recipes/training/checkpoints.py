"""Checkpoints: sealed when they are complete, checked before a run resumes from them.

A seal is a file that lists all other files of the checkpoint with their sizes and checksums. It is written last, so a
checkpoint without a seal is incomplete. The checksums reveal later damage, such as a truncated or deleted file.
"""

import json
import re
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from training.files import find_damage, list_files, read_object, write_atomically


SEAL = "files.json"


def seal(checkpoint: Path, resumable: bool) -> None:
    """Write the seal of a checkpoint, after all processes have written everything else.

    Args:
        checkpoint: The folder.
        resumable: Whether it also holds the state of the optimizer, without which it has only the weights.
    """
    files = list_files(checkpoint, (path for path in checkpoint.rglob("*") if path.is_file()))
    write_atomically(checkpoint / SEAL, json.dumps({"resumable": resumable, "files": files}, indent=1) + "\n")


def find_checkpoint_damage(checkpoint: Path, resume: bool = True, load_best: bool = False) -> str | None:
    """Return why a checkpoint cannot be used, or None if it can.

    Args:
        checkpoint: The folder.
        resume: Whether a run is to resume from it, for which the weights alone are too little.
        load_best: Whether the run ends with the weights of its best checkpoint, which must then be usable as well.
    """
    if not checkpoint.is_dir():
        return "there is no such folder"
    sealed = read_object(checkpoint / SEAL)
    if sealed is None or not {"resumable", "files"} <= sealed.keys():
        return f"it is incomplete: it has no whole {SEAL}, which is written last"
    damage = find_damage(checkpoint, sealed["files"])
    if damage is not None:
        return f"it is damaged: {damage}"
    state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    if get_step(checkpoint) not in (None, state["global_step"]):
        return f"it was saved at step {state['global_step']}"
    if resume and not sealed["resumable"]:
        return "--save_only_model has left out the state of the optimizer"
    best = state["best_model_checkpoint"]
    if not (resume and load_best and best) or Path(best).name == checkpoint.name:
        return None
    damage = find_checkpoint_damage(checkpoint.with_name(Path(best).name), resume=False)
    return damage and f"the best checkpoint before it, {Path(best).name}, cannot be used: {damage}"


def get_step(checkpoint: str | Path) -> int | None:
    """Return the step in the name of a checkpoint's folder, or None if it has another name."""
    found = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", Path(checkpoint).name)
    return int(found[1]) if found else None


def last_checkpoint(output_dir: str | Path, load_best: bool = False) -> str | None:
    """Return the newest checkpoint in a folder that a run can resume from, or None; report the newer ones it skips."""
    steps = {path: get_step(path) for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    for path in sorted((path for path, step in steps.items() if step is not None), key=steps.get, reverse=True):
        damage = find_checkpoint_damage(path, load_best=load_best)
        if damage is None:
            return str(path)
        print(f"Skipping {path}: {damage}.")
    return None
