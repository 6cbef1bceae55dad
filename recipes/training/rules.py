"""The rules of the recipes' flags, which are checked before anything is loaded or written."""

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from training.errors import RecipeError


LAST = "last"  # a checkpoint: the last complete one of the run
MAX_SEED = 2**32 - 1  # NumPy's
DATA_FILES = (".parquet", ".csv", ".tsv", ".jsonl", ".txt", ".conll")
Rule = tuple[Callable[[Any], bool], str]


def looks_like_a_path(name: str) -> bool:
    """Return whether a name cannot be a name on the Hub, or a file or folder of that name exists."""
    path = Path(name)
    return path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists()


def _can_be_written(name: str) -> bool:
    path = Path(name).expanduser()
    try:
        found = next(folder for folder in (path, *path.parents) if folder.exists())
    except OSError:  # too long a name
        return False
    return found.is_dir() and os.access(found, os.W_OK | os.X_OK)


def _exists_if_a_path(name: str) -> bool:
    is_file = "/" not in name and Path(name).suffix in DATA_FILES
    # {task} is replaced by the task's name later.
    return "{" in name or Path(name).expanduser().exists() or not (is_file or looks_like_a_path(name))


def _is_available(integration: str) -> bool:
    from transformers.integrations import get_available_reporting_integrations

    return integration in ("all", "none") or integration in get_available_reporting_integrations()


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _at_least(least: int) -> Rule:
    return lambda value: value >= least, f"a whole number of at least {least}"


_COUNT, _NOT_NEGATIVE_COUNT = _at_least(1), _at_least(0)
_POSITIVE: Rule = (lambda value: value > 0, "a number greater than 0")
_NOT_NEGATIVE: Rule = (lambda value: value >= 0, "a number of at least 0")
_BELOW_ONE: Rule = (lambda value: 0 <= value < 1, "a number from 0 to less than 1")
_SEED: Rule = (lambda value: 0 <= value <= MAX_SEED, f"a whole number from 0 to {MAX_SEED}")
_FILE: Rule = (lambda name: Path(name).expanduser().is_file(), "a file that exists")
_FOLDER: Rule = (lambda name: Path(name).expanduser().is_dir(), "a folder that exists")
_JSON: Rule = (_is_json, "a JSON object")
_JSON_OR_FILE: Rule = (lambda text: _is_json(text) or Path(text).is_file(), "a JSON object or a JSON file")
_SOURCE: Rule = (_exists_if_a_path, "a folder or file that exists, or a name on the Hub")

# The check of each flag, its rule in words, and what to do. A flag with several values has the rule for each of them.
# The flags of the adapter itself have their rules in HoulsbyConfig. Numbers must also be finite, texts must not be
# blank, and no value may be repeated but in --example, as several questions may have one context.
RULES: dict[str, tuple[Rule, str]] = {
    # Data
    "data": (_SOURCE, "Correct the path"),
    "validation_file": (_FILE, "Correct the path"),
    "test_file": (_FILE, "Correct the path"),
    "data_dir": (_FOLDER, "It holds a folder per task; leave it out to load the data from the Hub"),
    "max_train_samples": (_COUNT, "Leave it out to train on all examples"),
    "max_eval_samples": (_COUNT, "Leave it out for the default"),
    "max_length": (_at_least(3), "A text needs two special tokens and one of its own"),
    "stride": (_NOT_NEGATIVE_COUNT, "The papers use 128"),
    "n_best": (_COUNT, "The default is 20"),
    "max_answer_length": (_COUNT, "The default is 30"),
    # What is trained
    "r": (_COUNT, "The papers use 2 to 256"),
    "model_name": (
        (
            # {task} is replaced by the task's name later.
            lambda name: "{" in name or not looks_like_a_path(name) or Path(name, "config.json").is_file(),
            "a folder with a model, a name on the Hub, 'minilm' or 'mpnet'",
        ),
        "Correct the path",
    ),
    "init_adapter": (_SOURCE, "Correct the path"),
    "evaluate": (_SOURCE, "Correct the path"),
    "keep_prefix_gb": (_POSITIVE, "Leave out --keep_prefix to keep nothing"),
    "top_k": (_COUNT, "It counts layers from the top"),
    "lora_r": (_COUNT, "The default is 8"),
    "lora_alpha": (_COUNT, "The default is 16"),
    # Training
    "output_dir": ((_can_be_written, "a folder that can be written"), "Give another one"),
    "learning_rate": (_POSITIVE, "The papers use 3e-5 to 3e-3"),
    "num_train_epochs": (_POSITIVE, "To score a saved adapter without training, use --evaluate"),
    "max_steps": (
        (lambda steps: steps == -1 or steps >= 1, "a whole number of at least 1, or -1 for --num_train_epochs"),
        "To score a saved adapter without training, use --evaluate",
    ),
    "per_device_train_batch_size": (_COUNT, "The default is 32"),
    "per_device_eval_batch_size": (_COUNT, "The default is 64"),
    "gradient_accumulation_steps": (_COUNT, "1 accumulates nothing"),
    "warmup_steps": (_NOT_NEGATIVE, "0 warms nothing up, 0.1 a tenth of all steps, 100 that many"),
    "weight_decay": (_NOT_NEGATIVE, "0 decays nothing"),
    "adam_beta1": (_BELOW_ONE, "The default is 0.9"),
    "adam_beta2": (_BELOW_ONE, "The default is 0.999"),
    "adam_epsilon": (_POSITIVE, "The default is 1e-8"),
    "max_grad_norm": (_NOT_NEGATIVE, "0 clips nothing"),
    "label_smoothing_factor": (_BELOW_ONE, "0 smooths nothing"),
    "neftune_noise_alpha": (_POSITIVE, "Leave it out to add no noise"),
    "seed": (_SEED, "Give another number"),
    "data_seed": (_SEED, "Leave it out to use --seed"),
    "early_stopping_patience": (_COUNT, "Leave it out to train all epochs"),
    # Evaluations, checkpoints, logs
    "logging_steps": (_POSITIVE, "To log nothing, give --logging_strategy no"),
    "eval_steps": (_POSITIVE, "To evaluate nothing, give --eval_strategy no --load_best_model_at_end false"),
    "save_steps": (_POSITIVE, "To save no checkpoints, give --save_strategy no --load_best_model_at_end false"),
    "eval_delay": (_NOT_NEGATIVE, "0 delays nothing"),
    "eval_accumulation_steps": (_COUNT, "Leave it out to move no predictions"),
    "save_total_limit": (_COUNT, "The best checkpoint is kept besides"),
    "resume_from_checkpoint": (
        (lambda name: name == LAST or Path(name).expanduser().is_dir(), f"the folder of a checkpoint, or {LAST!r}"),
        "Correct the path",
    ),
    "report_to": (
        (_is_available, "a tracker whose package is installed, 'all' or 'none'"),
        "Install the package, or leave it out",
    ),
    "lr_scheduler_kwargs": (_JSON, "For example '{\"num_cycles\": 2}'"),
    # The machine
    "activation_checkpointing_kwargs": (_JSON, "For example '{\"use_reentrant\": false}'"),
    "gradient_checkpointing_kwargs": (_JSON, "For example '{\"use_reentrant\": false}'"),
    "accelerator_config": (_JSON_OR_FILE, "Correct the path"),
    "deepspeed": (_JSON_OR_FILE, "For example recipes/deepspeed/zero2.json"),
    "fsdp_config": (_JSON_OR_FILE, "Correct the path"),
    "dataloader_num_workers": (_NOT_NEGATIVE_COUNT, "0 loads the data in the training process"),
    "dataloader_prefetch_factor": (_COUNT, "Leave it out for PyTorch's"),
    "torch_empty_cache_steps": (_COUNT, "Leave it out to keep the cache"),
    "ddp_bucket_cap_mb": (_COUNT, "Leave it out for PyTorch's"),
    "ddp_timeout": (_COUNT, "It is in seconds"),
    # Analyses and sweeps
    "run": (
        (lambda name: Path(name, "results.json").is_file(), "the output folder of a finished run"),
        "Make one: accelerate launch recipes/glue.py --output_dir FOLDER",
    ),
    "batch_size": (_COUNT, "The default is 64"),
    "prune": ((lambda share: 0 <= share <= 1, "a number from 0 to 1"), "0.01 allows to lose one percent of the score"),
    "pretraining_steps": (_COUNT, "Leave it out to train without pretraining"),
    "init_std": (_NOT_NEGATIVE, "The paper uses 0.01; 0 starts as the exact identity"),
    "full_learning_rate": (_POSITIVE, "The papers use 2e-5 to 5e-5"),
    "n_points": (_COUNT, "The default is 20"),
    "n_jobs": (_COUNT, "1 tries one setting at a time"),
    "jobs": (_COUNT, "Leave it out for one run per GPU"),
}

# Flags of transformers' TrainingArguments that are not flags of the recipes, with what to do instead.
NOT_FLAGS = {
    "greater_is_better": "it follows from --metric_for_best_model",
    "remove_unused_columns": "a recipe prepares the columns itself",
    "label_names": "a recipe prepares the columns itself; see --label_columns of text_classification.py",
    "length_column_name": "a recipe prepares the columns itself",
    "prediction_loss_only": "a recipe computes the scores of its task",
    "include_for_metrics": "a recipe computes the scores of its task",
    "batch_eval_metrics": "a recipe computes its scores of all predictions at once",
    "eval_do_concat_batches": "a recipe computes its scores of all predictions at once",
    "hub_revision": "a recipe pushes to the main branch",
    "hub_strategy": "a recipe pushes once, at the end of the training",
    "hub_always_push": "a recipe pushes once, at the end of the training",
}

# Flags of transformers' example scripts, such as run_glue.py, that are not flags of the recipes, with what to do
# instead. Others of their flags are second names of ours.
FLAGS_OF_EXAMPLES = {
    "config_name": "the model brings its configuration",
    "tokenizer_name": "the model brings its tokenizer",
    "use_fast_tokenizer": "the model brings its tokenizer",
    "cache_dir": "set the environment variable HF_HOME",
    "model_revision": "download that revision, and give its folder to --model_name",
    "token": "log in with hf auth login, or set the environment variable HF_TOKEN",
    "trust_remote_code": "no code from the Hub is run",
    "ignore_mismatched_sizes": "a head of another size is always replaced by a new one",
    "overwrite_cache": "nothing is cached; --overwrite_output_dir starts over",
    "preprocessing_num_workers": "texts are tokenized in the training process",
    "pad_to_max_length": "batches are padded to their longest text",
    "max_eval_samples": "give a smaller validation split, with --validation_file",
    "max_predict_samples": "give a smaller test split, with --test_file",
    "train_split_name": "the splits are called train, validation and test",
    "validation_split_name": "the splits are called train, validation and test",
    "test_split_name": "the splits are called train, validation and test",
    "text_column_delimiter": "two --text_columns are a pair of texts",
    "do_regression": "use --problem_type regression of text_classification.py",
    "metric_name": "use --metric_for_best_model",
    "shuffle_train_dataset": "training examples are always shuffled; see --train_sampling_strategy",
    "label_all_tokens": "a word's tag is on its first word piece",
    "return_entity_level_metrics": "entities are always scored",
    "version_2_with_negative": "questions without an answer are found in the data",
    "line_by_line": "each text is an example",
    "mlm_probability": "the recipe masks 15% of the tokens",
}


class OneLineErrors(argparse.ArgumentParser):
    """ArgumentParser with errors of one line, without the list of all flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())} (--help lists all flags)\n")


def number_of(name: str, kind: type) -> Callable[[str], str]:
    """Return a type for argparse: the text of a number, as it was given, that the flag `name` takes.

    Args:
        name: The flag, without the dashes, with its rule in RULES.
        kind: int or float.
    """

    def check(text: str) -> str:
        try:
            check_value(name, kind(text))
        except ValueError as error:
            raise RecipeError(f"--{name} must be {RULES[name][0][1]}, got {text!r}. {RULES[name][1]}.") from error
        return text

    return check


def check_flags(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Check every value of a command line by its rule, and those that must fit each other.

    Args:
        values: The values by flag, without the dashes; None where a flag has no value.
        defaults: The defaults of the flags, which are not checked.

    Raises:
        RecipeError: If a value breaks its rule.
    """
    for name, value in values.items():
        if value is not None and value != defaults.get(name):
            several = value if isinstance(value, list) else [value]
            for one in several:
                check_value(name, one)
            if name != "example":
                check_unique(name, several)
    _check_combinations(values)


def check_value(name: str, value: Any) -> None:
    """Raise RecipeError if a value of the flag `name` breaks its rule."""
    (is_valid, rule), remedy = RULES.get(name, ((lambda _: True, ""), ""))
    if isinstance(value, float) and not math.isfinite(value):
        is_valid, rule, remedy = (lambda _: False), rule or "a number", remedy or "Give a finite number"
    elif isinstance(value, str) and not value.strip():
        is_valid, rule, remedy = (lambda _: False), rule or "a text", remedy or "Leave the flag out, or give a value"
    if not is_valid(value):
        shown = repr(value) if isinstance(value, str) else value
        raise RecipeError(f"--{name} must be {rule}, got {shown}. {remedy}.")


def check_unique(name: str, values: Sequence[Any]) -> None:
    """Raise RecipeError if a flag has a value twice, also in another way to write a number."""
    values = [_as_number(value) for value in values]
    repeated = next((value for number, value in enumerate(values) if value in values[:number]), None)
    if repeated is not None:
        raise RecipeError(f"--{name} must name each value once, got {repeated} more than once. Leave out one of them.")


def _as_number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _check_combinations(values: Mapping[str, Any]) -> None:
    given = values.get
    if given("overwrite_output_dir") and given("resume_from_checkpoint") is not None:
        raise RecipeError(
            "--overwrite_output_dir starts over and --resume_from_checkpoint goes on, got both. Leave out one of them."
        )
    if "eval_strategy" in values:
        _check_strategies(*(values[name] for name in ("eval_strategy", "save_strategy", "load_best_model_at_end")))
        only_trains = given("do_train") and not given("do_eval")
        if (only_trains or values["eval_strategy"] == "no") and given("early_stopping_patience") is not None:
            raise RecipeError("--early_stopping_patience needs evaluations, which are off. Leave it out.")
    if given("dataloader_prefetch_factor") is not None and not given("dataloader_num_workers"):
        raise RecipeError(
            "--dataloader_prefetch_factor needs --dataloader_num_workers of at least 1, got 0. Leave it out."
        )
    if given("fp16") or given("fp16_full_eval"):
        import torch

        if values["use_cpu"] or not torch.accelerator.is_available():
            raise RecipeError("--fp16 needs a GPU, and there is none. Leave it out, or give --bf16 --use_cpu.")


def _check_strategies(evaluation: str, saving: str, best_at_end: bool) -> None:
    evaluation, saving = (getattr(one, "value", one) for one in (evaluation, saving))
    if best_at_end and (evaluation == "no" or saving not in (evaluation, "best")):
        raise RecipeError(
            "--load_best_model_at_end needs --eval_strategy and --save_strategy to be the same, 'epoch' or 'steps', "
            f"got {evaluation!r} and {saving!r}. Make them the same, or give --load_best_model_at_end false."
        )
    if saving == "best" and evaluation == "no":
        raise RecipeError("--save_strategy best needs evaluations, got --eval_strategy no. Leave out one of them.")
