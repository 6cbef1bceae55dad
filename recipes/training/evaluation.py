"""Scoring what a run has saved, without training: --evaluate, or --do_eval and --do_predict without --do_train."""

import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from training.arguments import AdapterArguments, DataArguments, EncoderArguments, RecipeTrainingArguments
from training.data import with_validation
from training.errors import RecipeError
from training.files import measure, read_object, write_atomically
from training.results import RESULTS_FILE
from training.tables import log


# How the names of what is written beside evaluation.json begin. The folder may be that of a run, whose files remain:
# its results.json is about them.
EVALUATED = "evaluation_"


def find_evaluated(
    arguments: EncoderArguments, adapter: AdapterArguments, training: RecipeTrainingArguments
) -> str | None:
    """Return what to score: a folder with an adapter or a model, or an adapter's name on the Hub; None to train.

    The folder of a run stands for what it has saved.

    Raises:
        RecipeError: If there is nothing to score, or a flag is about training.
    """
    name = arguments.evaluate
    if name is None and training.do_train:
        return None
    wrong = {
        "--max_train_samples": arguments.max_train_samples,
        "--init_adapter": adapter.init_adapter,
        "--push_to_hub": training.push_to_hub,
        "--example": training.example,
        "--resume_from_checkpoint": training.resume_from_checkpoint,
        "--overwrite_output_dir": training.overwrite_output_dir,
    }
    given = next((flag for flag, value in wrong.items() if value), None)
    if given is not None:
        raise RecipeError(f"--evaluate trains nothing, got {given} as well. Leave out one of them.")
    folder = Path(name or training.output_dir).expanduser()
    saved = find_saved(folder)
    if saved is None and name is None:
        raise RecipeError(
            "Without --do_train, --do_eval and --do_predict score what the run in --output_dir has saved, and "
            f"{folder} has neither adapter nor model. Give --do_train as well, or --evaluate with a folder."
        )
    return str(saved or name)


def find_saved(folder: Path) -> Path | None:
    """Return the adapter or the model that a run has saved in its folder, or None if there is neither.

    The folder has both if a run of another method was there before.
    """
    files = (read_object(folder / RESULTS_FILE) or {}).get("files", {})
    kinds = dict.fromkeys([*(Path(name).parts[0] for name in files), "adapter", "model"])
    return next((path for kind in kinds if (path := folder / kind).is_dir()), None)


def with_evaluated(
    splits: dict[str, Dataset],
    arguments: DataArguments,
    run: Mapping[str, Any],
    labels: Sequence[Hashable] | None = None,
) -> dict[str, Dataset]:
    """Return the splits with the validation split on which a saved adapter or model is scored.

    Without one in the data, these are the examples that its run has left out of the training. A single file that the
    run was not trained on is scored whole, and so are data that it was trained on as a whole.

    Args:
        splits: The splits.
        arguments: Where they come from.
        run: The results of the run that has trained it; empty if they are unknown.
        labels: As for with_validation.
    """
    if "validation" in splits:
        return splits
    trained_on, options = _was_trained_on(run, arguments), run.get("arguments", {})
    # A validation file was no part of the data.
    was_split = "validation" in run.get("dataset", {}).get("rows", {}) and not options.get("validation_file")
    if trained_on and not was_split:
        log(f"all examples of {arguments.data} were trained on: their scores say little about new ones")
    if not was_split if trained_on else Path(arguments.data).expanduser().is_file():
        return {**splits, "validation": splits["train"]}
    return with_validation(splits, labels)


def _was_trained_on(run: Mapping[str, Any], arguments: DataArguments) -> bool:
    """Return whether a run was trained on these data: on a file whatever its name is now, else by their name."""
    path, known = Path(arguments.data).expanduser(), run.get("dataset", {}).get("file")
    if path.is_file() and known is not None:  # earlier versions have not recorded it
        return bool(known == measure(path))
    before = run.get("arguments", {})
    return (
        Path(str(before.get("data"))).expanduser().resolve() == path.resolve()
        and before.get("data_config") == arguments.data_config
    )


def write_evaluation(
    training: RecipeTrainingArguments, task: str, saved: str, scores: Mapping[str, Any], **entries: Any
) -> dict[str, Any]:
    """Print the scores of a saved adapter or model in the main process, and write them to evaluation.json.

    Args:
        training: The training arguments, with the final `output_dir`.
        task: The task's name.
        saved: What was scored.
        scores: The scores of the validation split.
        entries: Further entries of the file, such as the scores of the test split.
    """
    content = {"task": task, "evaluated": saved, "scores": dict(scores), **entries}
    if training.process_index == 0:
        path = Path(training.output_dir, "evaluation.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content, indent=2) + "\n")
        print(f"{task}, {saved}: {', '.join(f'{name} {score:.4f}' for name, score in scores.items())}")
    return content
