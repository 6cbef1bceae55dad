"""A run in its output folder: started, resumed after a crash, found finished, evaluated, pushed to the Hub."""

import csv
import fcntl
import os
import platform
import shlex
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list
from peft.utils import SAFETENSORS_WEIGHTS_NAME

import houlsby_peft
from common.arguments import LAST, AdapterArguments, EncoderArguments, RecipeTrainingArguments, defaults_of, merge
from common.edge import RecipeError, log
from common.model import hub_name
from common.report import is_houlsby, print_by_class, print_files, push_command, report_end, write_figures
from common.same_run import (
    ARGUMENTS_FILE,
    CONTENT,
    MOMENT,
    RESULTS_FILE,
    describe_content,
    differences,
    read_object,
    write_json,
)
from common.scores import without_times
from common.trainer import COMPLETE, SAVED, TRAIN_SECONDS, Described, RecipeTrainer, last_checkpoint
from houlsby_peft.hub.card import write_card_of_saved


Example = str | tuple[str, str] | list[str] | list[tuple[str, str]] | None
# How the names of what is written beside evaluation.json begin. The folder may be that of a run, whose files remain.
EVALUATED = "evaluation_"
# What belongs to a run, besides its checkpoints and its weights, which the new run may start from.
MADE = (RESULTS_FILE, "predictions.csv", "predictions.json", "submission")
LIBRARIES = ("houlsby_peft", "peft", "transformers", "accelerate", "datasets", "evaluate", "torch")
# What a checkpoint brings back, or has been computed on: the optimizer, the rate, the best score so far, the data.
_RESTORED = ("learning_rate", "weight_decay", "adam_", "optim", "lr_scheduler", "metric_for_best_model", "data of ")
_LISTED = 3


class Run:
    """A run and its output folder.

    The run is finished when there is a results.json, and resumes from the newest complete checkpoint. The same command
    resumes it, or does nothing. Other arguments or data in a folder that holds trained weights are an error, so that
    no results are lost by accident: see common.same_run for what counts. `--resume_from_checkpoint last` resumes with
    other arguments, such as more epochs; `--overwrite_output_dir` starts over. One process at a time has a folder.

    Args:
        training: The training arguments, with the final `output_dir`.
        groups: The other arguments, as dataclasses.
        files: The files of the data, by their splits; none for data from elsewhere.

    Attributes:
        results: The results of a run that is already finished, or None.
        checkpoint: The folder to resume from, or None.
        new_test: Whether the finished run is asked for predictions of a test split that it has not predicted.
    """

    def __init__(
        self, training: RecipeTrainingArguments, *groups: Any, files: Mapping[str, Path] | None = None
    ) -> None:
        self.groups, self.folder, self._training = (*groups, training), Path(training.output_dir), training
        arguments = merge(self.groups)
        self.content = describe_content(files or {}, arguments)
        # The rows per step count, not on how many devices and in how many parts they are computed.
        parts = arguments.pop("per_device_train_batch_size"), arguments.pop("gradient_accumulation_steps")
        batch = parts[0] * parts[1] * training.world_size
        self._arguments = {**arguments, "rows_per_step": batch, CONTENT: self.content}
        self.results: dict[str, Any] | None = None
        self.checkpoint: str | None = None
        # Only the main process looks at the folder and tells the others, because it changes from then on.
        found: list[Any] = [None]
        if training.process_index == 0:
            try:
                found = [self._open_folder()]
            except (RecipeError, OSError) as error:
                found = [error]
        [outcome] = broadcast_object_list(found)
        if isinstance(outcome, Exception):
            raise outcome
        self.results, self.checkpoint = outcome
        file, recorded = (
            content.get("test", {}).get("sum") for content in (self.content, (self.results or {}).get(CONTENT, {}))
        )
        is_new = file != recorded or (file is None and (self.results or {}).get("test") is None)
        self.new_test = bool(self.results and training.do_predict and is_new)

    def _open_folder(self) -> tuple[dict[str, Any] | None, str | None]:
        training, folder = self._training, self.folder
        asked, before = training.resume_from_checkpoint, read_object(folder / ARGUMENTS_FILE)
        changed = differences(before or {}, self._arguments, defaults_of(self.groups))
        results = read_object(folder / RESULTS_FILE)
        if results and before and not changed and not training.overwrite_output_dir and asked is None:
            log(f"{folder} holds this run, finished: nothing is trained.")
            return results, None
        lock(folder)
        checkpoint: str | None = None
        if training.overwrite_output_dir:
            self._delete("checkpoint-*", *MADE)
        elif asked not in (None, LAST):
            checkpoint = str(asked)
            if not Path(checkpoint, COMPLETE).exists():
                raise RecipeError(
                    f"--resume_from_checkpoint must be the folder of a complete checkpoint or {LAST!r}, got {asked}."
                )
            source = read_object(Path(checkpoint).parent / ARGUMENTS_FILE)
            changed = differences(source, self._arguments, defaults_of(self.groups)) if source else {}
        elif results or any(folder.glob("checkpoint-*/trainer_state.json")):
            if changed and asked is None:
                self._refuse(changed if before else {"arguments.json": "is missing"})
            checkpoint = last_checkpoint(folder)
            if checkpoint is None:
                log(f"{folder} has no checkpoint to resume from: the run starts over.")
        restored = {name: change for name, change in changed.items() if name.startswith(_RESTORED)}
        if checkpoint and before and restored:
            raise RecipeError(
                f"{checkpoint} restores the optimizer, its learning rate and the best score on its data, which must "
                f"stay the same: {_list(restored)}. Give the old ones, or --overwrite_output_dir to start over."
            )
        if results:
            self._delete(*MADE)
        write_json(folder / ARGUMENTS_FILE, self._arguments)
        if checkpoint:
            log(f"Resuming from {checkpoint}.")
        return None, checkpoint

    def _delete(self, *patterns: str) -> None:
        for path in [path for pattern in patterns for path in self.folder.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _refuse(self, changed: Mapping[str, str]) -> None:
        can_resume = not any(name.startswith(_RESTORED) for name in changed)
        remedy = ", or --resume_from_checkpoint last to resume with the new arguments" if can_resume else ""
        raise RecipeError(
            f"{self.folder} holds a run with other arguments or data: {_list(changed)}. Give another --output_dir, or "
            f"--overwrite_output_dir to start over{remedy}."
        )

    @property
    def saved(self) -> str:
        """The folder of the adapter or the model that the run has saved."""
        return str(find_saved(self.folder) or self.folder)

    def add(self, **entries: Any) -> dict[str, Any]:
        """Add entries to the results.json of a finished run, and return its content."""
        content = {**(self.results or {}), CONTENT: self.content, **entries}
        if self._training.process_index == 0:
            write_json(self.folder / RESULTS_FILE, content)
        return content

    def finish(
        self, trainer: RecipeTrainer, example: str | Sequence[str] | None = None, **results: Any
    ) -> dict[str, Any]:
        """Write results.json, with which the run is finished, and the adapter's card; report its end.

        Args:
            trainer: The trainer of the run, which has saved the trained weights.
            example: A text, or a pair of texts, for which the adapter can predict.
            results: Further entries of results.json.

        Returns:
            The content of results.json.
        """
        kept = trainer.describe_kept()
        per_class = None if kept is None else {"split": kept.split, "scores": kept.scores.by_class()}
        files = {name: entry for name, entry in self.content.items() if name != "test" or self._training.do_predict}
        content = describe_run(trainer, self.groups) | results | {"per_class": per_class, CONTENT: files}
        if self._training.process_index == 0:
            write_json(self.folder / RESULTS_FILE, content)
            texts = 1 if example is None or isinstance(example, str) else len(example)
            write_adapter_card(self.folder / trainer.saved_as, card_example(self._training, texts))
            report_end(trainer, content, kept, example)
        return content


def _list(changed: Mapping[str, str]) -> str:
    listed = [f"{name} {change}" for name, change in changed.items()]
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return f"{', '.join(listed[:_LISTED])}{more}"


_LOCKS: dict[tuple[int, int], int] = {}  # the open lock files of this process, by device and number


def lock(folder: Path) -> None:
    """Create a run's folder and reserve it until this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT)
    known = os.fstat(file).st_dev, os.fstat(file).st_ino
    if known in _LOCKS:
        return os.close(file)
    try:
        # The kernel holds it on the open file, so that no lock is left behind by a process that was killed.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise RecipeError(f"{folder} is in use by another run. Wait, or give another --output_dir.") from None
    _LOCKS[known] = file
    return None


def describe_run(trainer: RecipeTrainer, groups: Iterable[Any]) -> dict[str, Any]:
    """Return what results.json says of every run.

    That is the seed, the strategy, the scores and the time of training per epoch, the best epoch if its weights were
    kept, the scores of the weights that were kept, the numbers of parameters, the seconds since the trainer was made,
    the arguments and their defaults, the command, the hardware, the emissions that CodeCarbon measured, and the
    versions of Python and the libraries.
    """
    training, groups = trainer.args, tuple(groups)
    epochs = scores_per_epoch(trainer.state.log_history)
    kept = next((entry for entry in epochs if entry["step"] == trainer.kept_step), {})
    scores = {name: score for name, score in kept.items() if name not in MOMENT}
    weights = Path(training.output_dir, trainer.saved_as, SAFETENSORS_WEIGHTS_NAME)
    # By which its card and a later push find these results.
    found = (
        {"adapter_crc32": zlib.crc32(weights.read_bytes())}
        if training.should_save and is_houlsby(weights.parent)
        else {}
    )
    return {
        **found,
        "seed": training.seed,
        "strategy": strategy(trainer.accelerator),
        "epochs": epochs,
        "chosen_by": training.metric_for_best_model,
        "best_epoch": None if trainer.best_step is None else kept["epoch"],
        "best_score": scores.get(training.metric_for_best_model.removeprefix("eval_")),
        "best_scores": scores,
        "trainable_parameters": trainer.trainable,
        "total_parameters": trainer.total,
        "seconds": round(time.perf_counter() - trainer.start, 1),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "arguments": merge(groups),
        "defaults": defaults_of(groups),
        "hardware": hardware(),
        "emissions": emissions(Path(training.output_dir)),
        "command": command(sys.argv, training.hub_token),
    }


def scores_per_epoch(log_history: Iterable[dict[str, float]]) -> list[dict[str, float]]:
    """Return an entry per evaluation: epoch, step, seconds of training, and the scores of all validation splits,
    without "eval_"."""
    evaluations: dict[float, dict[str, float]] = {}
    for entry in log_history:
        scores = without_times({key: value for key, value in entry.items() if key.startswith("eval_")})
        if scores:
            moment = {"epoch": entry["epoch"], "step": entry["step"], "seconds": entry[TRAIN_SECONDS]}
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
    threads = torch.get_num_threads()
    return f"{next(names, platform.machine())}, {threads} thread{'s' if threads > 1 else ''}"


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
    launcher = ["accelerate", "launch"] if "ACCELERATE_MIXED_PRECISION" in os.environ else ["python"]
    return shlex.join([*launcher, f"recipes/{Path(script).name}", *words])


def find_saved(folder: Path) -> Path | None:
    """Return the adapter or the model that a run has saved in its folder, or None if there is neither."""
    method = (read_object(folder / RESULTS_FILE) or {}).get("method", "houlsby")
    names = SAVED if method in ("houlsby", "lora") else SAVED[::-1]
    return next((path for name in names if (path := folder / name).is_dir()), None)


def find_evaluated(
    arguments: EncoderArguments, adapter: AdapterArguments, training: RecipeTrainingArguments
) -> str | None:
    """Return what to score: a folder with an adapter or a model, or an adapter's name on the Hub; None to train.

    The folder of a run stands for what it has saved.
    """
    name = arguments.evaluate
    if name is None and training.do_train:
        return None
    of_training = {
        "--max_train_samples": arguments.max_train_samples,
        "--init_adapter": adapter.init_adapter,
        "--push_to_hub": training.push_to_hub,
        "--resume_from_checkpoint": training.resume_from_checkpoint,
        "--overwrite_output_dir": training.overwrite_output_dir,
    }
    if given := [flag for flag, value in of_training.items() if value]:
        raise RecipeError(f"An evaluation trains nothing, got {given[0]} as well. Leave out one of them.")
    folder = Path(name or training.output_dir).expanduser()
    saved = find_saved(folder)
    if saved is None and name is None:
        raise RecipeError(
            "Without --do_train, --do_eval and --do_predict score what the run in --output_dir has saved, and "
            f"{folder} has neither adapter nor model. Give --do_train as well, or --evaluate with a folder."
        )
    return str(saved or name)


def write_evaluation(
    training: RecipeTrainingArguments,
    task: str,
    saved: str,
    scores: Mapping[str, Any],
    kept: Described | None = None,
    prefix: str = "",
    **entries: Any,
) -> dict[str, Any]:
    """Print the scores of a saved adapter or model in the main process, and write them to evaluation.json.

    Args:
        training: The training arguments, with the final `output_dir`.
        task: The task's name.
        saved: What was scored.
        scores: The scores of the validation split.
        kept: What it predicts for one of the splits.
        prefix: What the names of further files begin with.
        entries: Further entries of the file, such as the scores of the test split, "test".
    """
    per_class = None if kept is None else {"split": kept.split, "scores": kept.scores.by_class()}
    content = {"task": task, "evaluated": saved, "scores": dict(scores), "per_class": per_class, **entries}
    path = Path(training.output_dir, "evaluation.json")
    if training.process_index == 0:
        write_json(path, content)
        for split, of_split in (("validation", scores), ("test", entries.get("test"))):
            if isinstance(of_split, Mapping):
                shown = ", ".join(f"{name} {score:.4f}" for name, score in of_split.items())
                print(f"{task}, {saved}, {split}: {shown}")
        files = {"Scores": str(path)}
        if kept is not None:
            print_by_class(kept)
            files |= write_figures(path.parent, kept, task, prefix)
        print_files(files)
    return content


def card_example(training: RecipeTrainingArguments, texts: int) -> Example:
    """Return what --example gives for the card: a text or, for a task of two texts, a pair; or a list of these."""
    given = training.example or []
    if len(given) % texts:
        raise RecipeError(f"--example must give two texts for each pair, got {len(given)}. Add the missing one.")
    inputs = given if texts == 1 else list(zip(given[::2], given[1::2], strict=True))
    return inputs[0] if len(inputs) == 1 else inputs or None


def write_adapter_card(folder: Path, example: Example) -> None:
    """Write the card of a Houlsby adapter that a run has saved, with the results of the run; call it after these."""
    if not is_houlsby(folder):
        return
    answer = None
    try:
        answer = None if example is None else houlsby_peft.load(folder).predict(example)
    except (ValueError, OSError) as error:  # the run is finished, whatever its card lacks
        log(f"The card shows no predictions for --example: {error}")
    write_card_of_saved(folder, example=example if answer else None, answer=answer)


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
            shown = push_command(folder, name, results, base_model, training.hub_private_repo, example)
            print(f"{'Share:':<18}{shown or 'its base model must be on the Hub, see docs/hub.md'}")

    return finish
