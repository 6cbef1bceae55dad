"""A run in its output folder: begun, gone on with after a crash, or found finished."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from common.arguments import RecipeTrainingArguments
from common.checkpoints import LAST, last_checkpoint
from common.errors import RecipeError
from common.results import RESULTS_FILE, merge, write_results, write_whole
from common.trainer import RecipeTrainer


ARGUMENTS_FILE = "arguments.json"
# What may differ between the beginning and the end of a run, as it does not change what is learned.
_FREE = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "predict", "disable_tqdm", "save_total_limit"),
    *("report_to", "run_name", "project", "push_to_hub", "ddp_timeout", "skip_memory_metrics", "torch_compile"),
    "keep_prefix_gb",
}
_FREE_BEGINNINGS = ("hub_", "log", "trackio_", "dataloader_", "per_device_eval", "torch_compile_", "deepspeed", "fsdp")
_LISTED = 3


class Run:
    """One run and its folder.

    The same command in the same folder goes on from the last whole checkpoint, and does nothing once the run is
    finished. Other arguments in a folder that holds a run are an error, so that no results are lost unasked.
    --resume_from_checkpoint last goes on whatever the arguments are, --overwrite_output_dir begins anew.

    Args:
        training: With the final output_dir.
        groups: The other arguments, dataclasses.

    Attributes:
        results: Those of a run that is finished already, or None.
        checkpoint: The folder to go on from, or None.

    Raises:
        RecipeError: If the folder holds a run with other arguments, or there is no such checkpoint.
    """

    def __init__(self, training: RecipeTrainingArguments, *groups: Any) -> None:
        self.groups = (*groups, training)
        self._folder, self._training = Path(training.output_dir), training
        # The main process looks and tells the others, as what is there changes from here on.
        found = [self._look() if training.process_index == 0 else None]
        self.results, self.checkpoint = broadcast_object_list(found)[0]

    def _look(self) -> tuple[dict[str, Any] | None, str | None]:
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
            results, checkpoint = read_results(self._folder), last_checkpoint(self._folder)
        if results is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / RESULTS_FILE).unlink(missing_ok=True)
            write_whole(self._folder / ARGUMENTS_FILE, json.dumps(arguments, indent=2) + "\n")
        if self._training.should_log and (results or checkpoint):
            print(
                f"{self._folder} holds this run, finished: nothing is trained."
                if results
                else f"Going on from {checkpoint}."
            )
        return results, checkpoint

    def _is_occupied(self) -> bool:
        names = (ARGUMENTS_FILE, RESULTS_FILE)
        return any((self._folder / name).exists() for name in names) or any(self._folder.glob("checkpoint-*"))

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        try:
            before = json.loads((self._folder / ARGUMENTS_FILE).read_text())
        except FileNotFoundError:
            reason = "a run whose arguments are not known"
        else:
            changed = differences(before, arguments)
            if not changed:
                return
            reason = f"a run with other arguments: {', '.join(changed[:_LISTED])}" + (
                f" and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
            )
        raise RecipeError(
            f"{self._folder} holds {reason}. Give another --output_dir, --overwrite_output_dir to begin anew, or "
            "--resume_from_checkpoint last to go on with the new arguments."
        )

    def finish(self, trainer: RecipeTrainer, **results: Any) -> dict[str, Any]:
        """Writes results.json, as the last act of the run, and returns what is in it."""
        return write_results(trainer, self.groups, **results)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The arguments that differ between two runs and change what is learned."""
    names: Iterable[str] = sorted(before.keys() | now.keys())
    return [
        f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in names
        if before.get(name) != now.get(name) and name not in _FREE and not name.startswith(_FREE_BEGINNINGS)
    ]


def read_results(folder: Path) -> dict[str, Any] | None:
    """What a finished run has found, or None."""
    path = folder / RESULTS_FILE
    return json.loads(path.read_text()) if path.exists() else None
