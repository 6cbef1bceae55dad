"""A run in its output folder: started, resumed after a crash, found finished, pushed to the Hub."""

import fcntl
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list
from transformers.trainer import TRAINER_STATE_NAME

import houlsby_peft
from houlsby_peft.hub.card import write_card_of_saved
from training.arguments import RecipeTrainingArguments
from training.checkpoints import find_checkpoint_damage, last_checkpoint
from training.errors import RecipeError
from training.files import find_damage, read_object, refuse_folder, write_atomically
from training.packaged import hub_name
from training.report import is_houlsby, push_command, report_end
from training.results import RESULTS_FILE, merge, write_results
from training.trained_on import ARGUMENTS_FILE, CHANGES, TRAINED_ON, changed_data, describe_data_of_run
from training.trainer import RecipeTrainer


Result = TypeVar("Result")
Example = str | tuple[str, str] | list[str] | list[tuple[str, str]] | None
LOCK_FILE = "run.lock"
LAST = "last"
# What a run predicts for its test split, which it does not repeat.
PREDICTED = ("predictions.csv", "predictions.json", "submission")
ROWS_PER_STEP = "rows_per_step"  # the entry of ARGUMENTS_FILE for the batch on all devices together
# Arguments that may change between the start and the end of a run, as they do not change what is learned.
_FREE = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "predict", "disable_tqdm", "save_total_limit"),
    *("report_to", "run_name", "project", "push_to_hub", "ddp_timeout", "skip_memory_metrics", "torch_compile"),
    *("keep_prefix_gb", "do_train", "do_eval", "do_predict", "example"),
}
_FREE_BEGINNINGS = (
    *("hub_", "log", "trackio_", "per_device_eval", "torch_compile_", "deepspeed", "fsdp"),
    *("dataloader_num", "dataloader_p", "dataloader_m"),  # but not drop_last and in_order
)
# What a checkpoint brings back, or has been computed on: the optimizer, the rate, the best score so far, the data.
_RESTORED = ("learning_rate ", "weight_decay ", "adam_", "optim", "lr_scheduler", "metric_for_best_model ", *CHANGES)
_LISTED = 3


class Run:
    """A run and its output folder.

    The same command in the same folder resumes from the newest usable checkpoint, and does nothing if the run is
    finished. A checkpoint, results.json or a saved file that is incomplete or damaged is reported and not used.
    Different arguments in a folder that holds trained weights are an error, so that no results are lost by accident.
    `--resume_from_checkpoint last` resumes with other arguments, such as more epochs, unless a checkpoint restores the
    old ones; `--overwrite_output_dir` starts over.

    Files of the same names with other content, and other classes, are different data, with which no checkpoint can be
    resumed: a head would give its outputs other names. Runs of earlier versions have not recorded their data, and are
    taken to have those of now.

    A run resumes by itself only with the rows per step that it has had: with fewer or more devices, the steps that a
    checkpoint has counted would be other ones. Runs of earlier versions have not recorded them.

    Only one process at a time can have a run in a folder, until the run or the process ends.

    Args:
        training: The training arguments, with the final `output_dir`.
        groups: The other arguments, as dataclasses.
        files: The files that are trained and validated on, by their splits; none for data from elsewhere.
        classes: The names of the classes, if they are known before the data are loaded.

    Attributes:
        results: The results of a run that is already finished, or None.
        checkpoint: The folder to resume from, or None.

    Raises:
        RecipeError: If the folder cannot be written, is in use or holds a run with other arguments or data, or the
            checkpoint to resume from cannot be used.
    """

    def __init__(
        self,
        training: RecipeTrainingArguments,
        *groups: Any,
        files: Mapping[str, Path] | None = None,
        classes: Sequence[str] = (),
    ) -> None:
        self.groups = (*groups, training)
        self._files, self._classes = files or {}, classes
        self._folder, self._training = Path(training.output_dir), training
        try:
            self.results, self.checkpoint = in_main_process(training, self._open_folder)
        except RecipeError:
            unlock_folder(self._folder)
            raise

    def _open_folder(self) -> tuple[dict[str, Any] | None, str | None]:
        training, folder = self._training, self._folder
        arguments = json.loads(json.dumps(merge(self.groups) | describe_data_of_run(self._files, self._classes)))
        rows = training.train_batch_size * training.world_size * training.gradient_accumulation_steps
        arguments[ROWS_PER_STEP] = rows
        asked, overwrites = training.resume_from_checkpoint, training.overwrite_output_dir
        before = read_object(folder / ARGUMENTS_FILE) or {}
        same = not changed_arguments(before, arguments)
        if same and not overwrites and asked is None and (results := self._read_results()) is not None:
            print(f"{folder} holds this run, finished: nothing is trained.")
            return results, None

        lock_folder(folder)
        checkpoint: str | None = None
        if overwrites:
            for path in folder.glob("checkpoint-*"):
                shutil.rmtree(path)
        elif asked not in (None, LAST):
            checkpoint = asked
            damage = find_checkpoint_damage(Path(asked), load_best=training.load_best_model_at_end)
            if damage is not None:
                raise RecipeError(
                    f"--resume_from_checkpoint must be the folder of a complete checkpoint or {LAST!r}, got {asked}: "
                    f"{damage}."
                )
        elif self._holds_trained_weights():
            if asked is None and not same:
                self._refuse_arguments(arguments)
            checkpoint = last_checkpoint(folder, training.load_best_model_at_end)
            if checkpoint is None:
                print(f"{folder} has no checkpoint to resume from: the run starts over.")
            elif asked is None and before.get(ROWS_PER_STEP, rows) != rows:
                raise RecipeError(
                    f"{folder} holds a run with {before[ROWS_PER_STEP]} rows per step, which must stay the same to "
                    f"resume it, got {rows}. Start it on as many devices as before, or give --overwrite_output_dir to "
                    "start over, or --resume_from_checkpoint last to resume with another batch."
                )
        if checkpoint:
            _check_restored(Path(checkpoint), arguments)
        if not same or overwrites or asked is not None:
            self._delete_results()
        write_atomically(folder / ARGUMENTS_FILE, json.dumps(arguments, indent=2) + "\n")
        if checkpoint:
            print(f"Resuming from {checkpoint}.")
        return None, checkpoint

    def _delete_results(self) -> None:
        """Delete the results of another run, with what it has predicted."""
        path = self._folder / RESULTS_FILE
        if not path.exists():
            return
        for predicted in (self._folder / name for name in PREDICTED):
            if predicted.is_dir():
                shutil.rmtree(predicted)
            else:
                predicted.unlink(missing_ok=True)
        path.unlink()

    def _read_results(self) -> dict[str, Any] | None:
        """Return the content of results.json, or None if the run is not finished; report it if a file is damaged."""
        path = self._folder / RESULTS_FILE
        if not path.exists():
            return None
        results = read_object(path)
        if results is None or "best_scores" not in results:
            damage: str | None = f"{RESULTS_FILE} is damaged"
        else:
            damage = find_damage(self._folder, results.get("files", {}))
        if damage is None:
            return results
        print(f"{self._folder} holds this run, but {damage}: it does not count as finished.")
        return None

    def _holds_trained_weights(self) -> bool:
        return (self._folder / RESULTS_FILE).exists() or any(self._folder.glob(f"checkpoint-*/{TRAINER_STATE_NAME}"))

    def _refuse_arguments(self, arguments: Mapping[str, Any]) -> None:
        before = read_object(self._folder / ARGUMENTS_FILE)
        remedy = "Give another --output_dir, or --overwrite_output_dir to start over"
        if before is None:
            reason = f"unknown arguments (it has no whole {ARGUMENTS_FILE})"
        else:
            changed = changed_arguments(before, arguments)
            of_data = [change.startswith(CHANGES) for change in changed]
            kind = "data" if all(of_data) else "arguments and data" if any(of_data) else "arguments"
            reason = f"other {kind}: {_list(changed)}"
            by_name = {change.partition(" ")[0] for change in changed}
            # Another method may need another dtype.
            if "base_dtype" in by_name and "method" not in by_name:
                remedy += ", or --base_dtype with the earlier value, which 'auto' chooses by the processor or GPU"
            if not any(map(_is_restored, changed)):
                remedy += ", or --resume_from_checkpoint last to resume with the new arguments"
        raise RecipeError(f"{self._folder} holds a run with {reason}. {remedy}.")

    def has_other_test_file(self, test_file: Mapping[str, Any] | None) -> bool:
        """Return whether a finished run has recorded another test file than the one that is there now.

        Args:
            test_file: The description of the file, which the run records in results.json as "test_file".
        """
        recorded = (self.results or {}).get("test_file", test_file)  # earlier versions have not recorded it
        if test_file is None or recorded is None:
            return test_file is not None
        return any(changed_data({"files": {"test": recorded}}, {"files": {"test": test_file}}))

    def add(self, **entries: Any) -> dict[str, Any]:
        """Add entries to the results.json of a finished run, and return its content."""
        content = {**(self.results or {}), **entries}
        if self._training.process_index == 0:
            write_atomically(self._folder / RESULTS_FILE, json.dumps(content, indent=2) + "\n")
        return content

    def finish(
        self, trainer: RecipeTrainer, example: str | Sequence[str] | None = None, **results: Any
    ) -> dict[str, Any]:
        """Write results.json, with which the run is finished, and the adapter's card; report its end.

        Args:
            trainer: The trainer of the run.
            example: A text, or a pair of texts, for which the adapter can predict.
            results: Further entries of results.json.

        Returns:
            The content of results.json.
        """
        classes = trainer.kept_classes()
        per_class = None if classes is None else {"split": classes[0], "scores": classes[1].by_class()}
        content = write_results(trainer, self.groups, **results, per_class=per_class)
        if self._training.process_index == 0:
            texts = 1 if example is None or isinstance(example, str) else len(example)
            write_adapter_card(self._folder / trainer.saved_as, card_example(self._training, texts))
            unlock_folder(self._folder)
            report_end(trainer, content, classes, example)
        return content


def changed_arguments(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the data and the arguments that differ between two runs and change what is learned."""
    names: Iterable[str] = sorted((before.keys() | now.keys()) - {TRAINED_ON, ROWS_PER_STEP})
    return [
        *changed_data(before.get(TRAINED_ON, {}), now.get(TRAINED_ON, {})),
        *(
            f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
            for name in names
            if before.get(name) != now.get(name) and name not in _FREE and not name.startswith(_FREE_BEGINNINGS)
        ),
    ]


def _is_restored(change: str) -> bool:
    return change.startswith(_RESTORED)


def _list(changed: Sequence[str]) -> str:
    more = f" and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
    return f"{', '.join(changed[:_LISTED])}{more}"


def _check_restored(checkpoint: Path, arguments: Mapping[str, Any]) -> None:
    """Raise RecipeError if the run of a checkpoint had other data, or other values of what the checkpoint restores."""
    before = read_object(checkpoint.parent / ARGUMENTS_FILE)
    changed = list(filter(_is_restored, changed_arguments(before, arguments))) if before else []
    if changed:
        raise RecipeError(
            f"{checkpoint} restores the optimizer, the learning rate and the score that chooses the best epoch, so "
            f"they and the data must stay the same: {_list(changed)}. Give the old ones, or --overwrite_output_dir to "
            "start over."
        )


def in_main_process(training: RecipeTrainingArguments, look: Callable[[], Result]) -> Result:
    """Return in all processes what `look` returns, or raise the RecipeError that it raises, in the main process.

    Only the main process looks at a run's folder and tells the others, because the folder changes from then on.
    """
    found: list[Any] = [None]
    if training.process_index == 0:
        try:
            found = [look()]
        except RecipeError as error:
            found = [error]
    [outcome] = broadcast_object_list(found)
    if isinstance(outcome, RecipeError):
        raise outcome
    return outcome


# The open lock files of this process, by their resolved paths.
_LOCKS: dict[Path, int] = {}


def lock_folder(folder: Path) -> None:
    """Create a run's folder and reserve it for this process, until unlock_folder or the end of the process.

    Raises:
        RecipeError: If another process has reserved it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.resolve() / LOCK_FILE
        if path in _LOCKS:
            return
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            # The kernel holds it on the open file, so that no lock is left behind by a process that was killed.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(file, 1000).decode().strip() or "another process"
            os.close(file)
            raise RecipeError(
                f"{folder} is in use by {owner}. Wait for its end, end it, or give another --output_dir."
            ) from error
        except OSError as error:  # some network file systems have no locks
            print(f"{folder} cannot be locked ({error.strerror}): do not start a second run in it.")
        _LOCKS[path] = file
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {platform.node()}\n".encode())
    except OSError as error:
        raise refuse_folder(folder, error) from error


def unlock_folder(folder: Path) -> None:
    """Give up the reservation of a folder, if this process has it."""
    file = _LOCKS.pop(folder.resolve() / LOCK_FILE, None)
    if file is not None:
        os.close(file)


def card_example(training: RecipeTrainingArguments, texts: int) -> Example:
    """Return what --example gives for the card: a text or, for a task of two texts, a pair; or a list of these.

    Raises:
        RecipeError: If the second text of a pair is missing.
    """
    given = training.example or []
    if len(given) % texts:
        raise RecipeError(f"--example must give two texts for each pair, got {len(given)}. Add the missing one.")
    inputs = given if texts == 1 else list(zip(given[::2], given[1::2], strict=True))
    return inputs[0] if len(inputs) == 1 else inputs or None


def write_adapter_card(folder: Path, example: Example) -> None:
    """Write the card of a Houlsby adapter that a run has saved, with the results of the run; call it after these.

    Args:
        folder: The folder of the adapter.
        example: As card_example returns it.
    """
    if is_houlsby(folder):
        answer = None if example is None else houlsby_peft.load(folder).predict(example)
        write_card_of_saved(folder, example=example, answer=answer)


def plan_push(training: RecipeTrainingArguments, model_name: str, texts: int = 1) -> Callable[..., None]:
    """Check before the training whether a push to the Hub can succeed. Call it in every process.

    Args:
        training: The training arguments, with the final `output_dir`.
        model_name: The value of --model_name.
        texts: The number of texts of an example, 1 or 2.

    Returns:
        A function that pushes the adapter and the results in a run's output folder from the main process and prints
        the address; without --push_to_hub it prints the command that does. Its second argument is the adapter's
        subfolder.

    Raises:
        RecipeError: If --example lacks the second text of a pair.
        AdapterError: If the encoder was loaded from a folder, which others do not have.
        HubError: If the name or the token is invalid, or the Hub cannot be reached.
    """
    base_model, example = hub_name(model_name), card_example(training, texts)
    push = houlsby_peft.plan_push(training, base_model)

    def finish(output_dir: str, adapter: str = "adapter") -> None:
        if training.process_index:
            return
        folder, results = Path(output_dir, adapter), Path(output_dir, RESULTS_FILE)
        if push is not None:
            print(f"Pushed: {push(str(folder), results=str(results), example=example)}")
        elif is_houlsby(folder):
            name = training.hub_model_id or Path(output_dir).resolve().name
            command = push_command(folder, name, results, base_model, training.hub_private_repo, example)
            print(f"{'Share:':<18}{command or 'its base model must be on the Hub, see docs/hub.md'}")

    return finish
