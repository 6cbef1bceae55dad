"""A run in its output folder: started, resumed after a crash, found finished, pushed to the Hub."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers.trainer import TRAINER_STATE_NAME

import houlsby_peft
from training.arguments import RecipeTrainingArguments
from training.errors import RecipeError
from training.model import HUB_NAMES
from training.results import RESULTS_FILE, merge, write_atomically, write_results
from training.trainer import RecipeTrainer


ARGUMENTS_FILE = "arguments.json"
LAST = "last"
# Arguments that may change between the start and the end of a run, as they do not change what is learned.
_FREE = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "predict", "disable_tqdm", "save_total_limit"),
    *("report_to", "run_name", "project", "push_to_hub", "ddp_timeout", "skip_memory_metrics", "torch_compile"),
    "keep_prefix_gb",
}
_FREE_BEGINNINGS = ("hub_", "log", "trackio_", "dataloader_", "per_device_eval", "torch_compile_", "deepspeed", "fsdp")
_LISTED = 3


class Run:
    """A run and its output folder.

    The same command in the same folder resumes from the last complete checkpoint, and does nothing if the run is
    finished. Different arguments in a folder that holds a run are an error, so that no results are lost by accident.
    `--resume_from_checkpoint last` resumes whatever the arguments are; `--overwrite_output_dir` starts over.

    Args:
        training: The training arguments, with the final `output_dir`.
        groups: The other arguments, as dataclasses.

    Attributes:
        results: The results of a run that is already finished, or None.
        checkpoint: The folder to resume from, or None.

    Raises:
        RecipeError: If the folder holds a run with other arguments, or the checkpoint does not exist.
    """

    def __init__(self, training: RecipeTrainingArguments, *groups: Any) -> None:
        self.groups = (*groups, training)
        self._folder, self._training = Path(training.output_dir), training
        # The main process looks and tells the others, because the folder changes from here on.
        found = [self._open_folder() if training.process_index == 0 else None]
        self.results, self.checkpoint = broadcast_object_list(found)[0]

    def _open_folder(self) -> tuple[dict[str, Any] | None, str | None]:
        asked, arguments = self._training.resume_from_checkpoint, json.loads(json.dumps(merge(self.groups)))
        results: dict[str, Any] | None = None
        checkpoint: str | None = None
        if self._training.overwrite_output_dir:
            for path in self._folder.glob("checkpoint-*"):
                shutil.rmtree(path)
        elif asked is not None:
            checkpoint = last_checkpoint(self._folder) if asked == LAST else asked
            if asked != LAST and not Path(asked).is_dir():
                raise RecipeError(
                    f"--resume_from_checkpoint must be the folder of a checkpoint or {LAST!r}, got {asked}."
                )
        elif self._is_occupied():
            self._check_arguments(arguments)
            path = self._folder / RESULTS_FILE
            results = json.loads(path.read_text()) if path.exists() else None
            checkpoint = last_checkpoint(self._folder)
        if results is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / RESULTS_FILE).unlink(missing_ok=True)
            write_atomically(self._folder / ARGUMENTS_FILE, json.dumps(arguments, indent=2) + "\n")
        if self._training.should_log and results:
            print(f"{self._folder} holds this run, finished: nothing is trained.")
        elif self._training.should_log and checkpoint:
            print(f"Resuming from {checkpoint}.")
        return results, checkpoint

    def _is_occupied(self) -> bool:
        names = (ARGUMENTS_FILE, RESULTS_FILE)
        return any((self._folder / name).exists() for name in names) or any(self._folder.glob("checkpoint-*"))

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        try:
            before = json.loads((self._folder / ARGUMENTS_FILE).read_text())
        except FileNotFoundError:
            reason = "a run with unknown arguments"
        else:
            changed = changed_arguments(before, arguments)
            if not changed:
                return
            reason = f"a run with other arguments: {', '.join(changed[:_LISTED])}" + (
                f" and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
            )
        raise RecipeError(
            f"{self._folder} holds {reason}. Give another --output_dir, --overwrite_output_dir to start over, or "
            "--resume_from_checkpoint last to resume with the new arguments."
        )

    def finish(self, trainer: RecipeTrainer, **results: Any) -> dict[str, Any]:
        """Write results.json, as the last act of the run, and return its content."""
        return write_results(trainer, self.groups, **results)


def changed_arguments(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the arguments that differ between two runs and change what is learned."""
    names: Iterable[str] = sorted(before.keys() | now.keys())
    return [
        f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in names
        if before.get(name) != now.get(name) and name not in _FREE and not name.startswith(_FREE_BEGINNINGS)
    ]


def last_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest complete checkpoint in a folder, or None; report and skip incomplete ones.

    A checkpoint is complete if it has trainer_state.json, which RecipeTrainer writes after all processes have written
    everything else.
    """
    numbered = {path: path.name.removeprefix("checkpoint-") for path in Path(output_dir).glob("checkpoint-*")}
    numbered = {path: number for path, number in numbered.items() if re.fullmatch(r"\d+", number)}
    for path in sorted(numbered, key=lambda path: int(numbered[path]), reverse=True):
        try:
            state = json.loads((path / TRAINER_STATE_NAME).read_text())
        except (OSError, ValueError):
            state = None
        if isinstance(state, dict) and str(state.get("global_step")) == numbered[path]:
            return str(path)
        print(f"Skipping {path}, which is incomplete.")
    return None


def plan_push(training: RecipeTrainingArguments, model_name: str) -> Callable[..., None]:
    """Check before the training whether a push to the Hub can succeed. Call it in every process.

    Args:
        training: The training arguments, with the final `output_dir`.
        model_name: The value of --model_name.

    Returns:
        A function that pushes the adapter and the results in a run's output folder from the main process and prints
        the address; without --push_to_hub it does nothing. Its second argument is the adapter's subfolder.

    Raises:
        AdapterError: If the encoder was loaded from a folder, which others do not have.
        HubError: If the name or the token is invalid, or the Hub cannot be reached.
    """
    push = houlsby_peft.plan_push(training, HUB_NAMES.get(model_name, model_name))

    def finish(output_dir: str, adapter: str = "adapter") -> None:
        if push is not None and training.process_index == 0:
            print(f"Pushed: {push(f'{output_dir}/{adapter}', results=f'{output_dir}/{RESULTS_FILE}')}")

    return finish
