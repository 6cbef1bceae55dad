"""Which checkpoint a run goes on from after a crash."""

import json
import re
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME


LAST = "last"


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest whole checkpoint in a folder, or None; those that were not written to their end are named and passed
    over.

    RecipeTrainer writes trainer_state.json after all processes have written everything else of a checkpoint.
    """
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"\d+", _number(path))]
    for folder in sorted(folders, key=lambda path: int(_number(path)), reverse=True):
        if _has_state(folder):
            return str(folder)
        print(f"Skipping {folder}, which was not written to its end.")
    return None


def _number(checkpoint: Path) -> str:
    return checkpoint.name.removeprefix("checkpoint-")


def _has_state(checkpoint: Path) -> bool:
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and str(state.get("global_step")) == _number(checkpoint)
