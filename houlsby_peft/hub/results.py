"""Reads the results that training runs have written and turns them into the tables of a card.

A run is a mapping, usually the contents of its results.json, with the keys task, model, method, seed, dataset (id,
name, config, split, revision, language, rows), epochs (a list with epoch, step and scores), best_epoch, chosen_by,
test, trainable_parameters, total_parameters, seconds, hardware, emissions (kg of CO2), strategy, versions, arguments,
defaults, command and references (a list with name and scores). Every key may be missing.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from peft.utils import SAFETENSORS_WEIGHTS_NAME

from ..config import HoulsbyConfig
from ..errors import AdapterError, shortened
from .markdown import Markdown, code, link


TrainingRun = Mapping[str, Any]
Results = str | os.PathLike[str] | TrainingRun | Sequence[str | os.PathLike[str] | TrainingRun]
Rows = Sequence[Sequence[str]]

RESULTS_FILE = "results.json"

# What the Trainer and the recipes report in addition to the scores.
_NOT_SCORES = (
    "epoch", "step", "seconds", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time",
)  # fmt: skip
_HYPERPARAMETERS = (
    "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "max_length", "warmup_steps", "lr_scheduler_type", "optim", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "max_grad_norm", "label_smoothing_factor", "train_sampling_strategy", "dropout", "init_std",
    "train_pooler", "class_weights", "base_dtype", "bf16", "fp16", "seed",
)  # fmt: skip
_LONGEST_LOG = 30


def read_runs(results: Results | None) -> list[TrainingRun]:
    """Return the runs of one or several seeds, from files or mappings, without the keys whose value is None.

    Raises:
        AdapterError: A file is missing or does not hold a JSON object, or a value is of another kind than the recipes
            write.
    """
    if results is None:
        return []
    items = [results] if isinstance(results, (str, os.PathLike, Mapping)) else results
    runs = {}
    for number, item in enumerate(items):
        source = str(item) if isinstance(item, (str, os.PathLike)) else f"run {number} of results"
        run = item if isinstance(item, Mapping) else _read_json(Path(item))
        runs[number] = _drop_none(run)
        _check_kinds(runs[number], source)
    return list(runs.values())


def find_results(folder: Path) -> Path | None:
    """Return the `results.json` of the recipe's run that has saved the adapter in a folder; None if there is none.

    A run writes it into the adapter's folder or the one above. It counts only if it lists the size and the checksum of
    these very weights, so that no adapter gets the scores of another one.
    """
    weights = folder.resolve() / SAFETENSORS_WEIGHTS_NAME
    for path in (weights.with_name(RESULTS_FILE), weights.parent.with_name(RESULTS_FILE)):
        try:
            listed = json.loads(path.read_text(encoding="utf-8"))["files"][weights.relative_to(path.parent).as_posix()]
            if listed == {"bytes": weights.stat().st_size, "crc32": zlib.crc32(weights.read_bytes())}:
                return path
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue  # not there, or of something else
    return None


def select_method(runs: Iterable[TrainingRun], method: str) -> list[TrainingRun]:
    """Return the runs of one training method; a run without a method trained an adapter ("houlsby")."""
    return [run for run in runs if run.get("method", "houlsby") == method]


def get_scores(run: TrainingRun) -> dict[str, float]:
    """Return the scores of the epoch that was kept, or of the last one if none was chosen; the loss is no score."""
    log = run.get("epochs", [])
    kept = next((row for row in log if row.get("epoch") == run.get("best_epoch")), log[-1] if log else {})
    return {
        name: float(value)
        for name, value in kept.items()
        if name not in _NOT_SCORES and not name.endswith("loss") and _is_number(value)
    }


def collect_scores(runs: Iterable[TrainingRun], name: str) -> list[float]:
    """Return one score of each run that has it."""
    return [scores[name] for scores in map(get_scores, runs) if name in scores]


def score_table(runs: Sequence[TrainingRun]) -> Rows:
    """Return a row per score (seeds, full fine-tuning, references) below a row of headings; empty without scores."""
    own, full = select_method(runs, "houlsby"), select_method(runs, "full")
    if not own or not get_scores(own[0]):
        return []
    references = own[0].get("references", [])
    several = len(own) > 1
    heading = ["score", "mean ± standard error" if several else "value"]
    heading += [f"seed {run.get('seed', number)}" for number, run in enumerate(own, 1)] if several else []
    heading += ["full fine-tuning"] if full else []
    table = [heading + [str(item.get("name")) for item in references]]
    for name in get_scores(own[0]):
        row = [readable_name(name), format_mean(collect_scores(own, name))]
        row += [format_number(get_scores(run).get(name)) for run in own] if several else []
        row += [format_mean(collect_scores(full, name))] if full else []
        table.append(row + [format_number(item.get("scores", {}).get(name)) for item in references])
    return table


def table_of_test_scores(run: TrainingRun) -> Rows:
    """Return the test scores of a run below a row of headings; empty if there are none."""
    test = run.get("test", {})
    flat = {name: value for name, value in test.items() if _is_number(value)}
    if flat:
        return [["score", "value"], *([readable_name(name), format_number(value)] for name, value in flat.items())]
    groups = {name: row for name, row in test.items() if isinstance(row, Mapping)}
    columns = list(dict.fromkeys(column for row in groups.values() for column in row))
    rows = [[readable_name(name), *map(format_number, map(row.get, columns))] for name, row in groups.items()]
    return [["on", *map(readable_name, columns)], *rows] if columns else []


def log_table(run: TrainingRun) -> Rows:
    """Return the training log below a row of headings, a long one thinned out, with the kept epoch marked."""
    log, best = run.get("epochs", []), run.get("best_epoch")
    step = max(1, math.ceil(len(log) / _LONGEST_LOG))
    shown = [row for i, row in enumerate(log) if i % step == 0 or i == len(log) - 1 or row.get("epoch") == best]
    names = [name for name in dict.fromkeys(name for row in log for name in row) if name not in _NOT_SCORES]
    table = [["epoch", "step", *map(readable_name, names), ""]]
    for row in shown:
        mark = Markdown("**kept**") if best is not None and row.get("epoch") == best else ""
        values = [format_number(row.get(name)) for name in names]
        table.append([f"{row.get('epoch', math.nan):.3g}", str(row.get("step", "")), *values, mark])
    return table if shown else []


def data_rows(run: TrainingRun) -> Rows:
    """Describe the data that a run was trained and evaluated on, as pairs of a name and a text."""
    dataset = run.get("dataset", {})
    repo_id = dataset.get("id")
    name = str(dataset.get("name", repo_id or ""))
    return drop_empty(
        [
            ("name", link(name, f"https://huggingface.co/datasets/{repo_id}") if repo_id else name),
            *((key, str(dataset.get(key, ""))) for key in ("config", "split", "revision", "language")),
            *((f"{split} examples", f"{count:,}") for split, count in dataset.get("rows", {}).items()),
        ]
    )


def hyperparameter_tables(run: TrainingRun) -> tuple[Rows, Rows]:
    """Return the hyperparameters that differ from their defaults (name, value, default) and the others (name, value).

    The default is the one that the run records, or else that of transformers or of `HoulsbyConfig`.
    """
    arguments = run.get("arguments", {})
    if not arguments:
        return [], []
    from transformers import TrainingArguments  # takes half a second to import, and only cards of runs need it

    defaults = {item.name: item.default for cls in (TrainingArguments, HoulsbyConfig) for item in fields(cls)}
    defaults |= run.get("defaults", {})
    known = [name for name in _HYPERPARAMETERS if name in arguments]
    changed = [name for name in known if arguments[name] != defaults.get(name)]

    def text(value: object) -> str:
        return f"{value:g}" if isinstance(value, float) else str(value)

    return (
        [(code(name), text(arguments[name]), text(defaults.get(name, ""))) for name in changed],
        [(code(name), text(arguments[name])) for name in known if name not in changed],
    )


def environment_rows(run: TrainingRun) -> Rows:
    """Describe hardware, processes, time, emissions and versions of a run, as pairs of a name and a text."""
    seconds, emissions, strategy = run.get("seconds"), run.get("emissions"), run.get("strategy", {})
    processes = f"{strategy.get('type', '')} on {strategy.get('processes')} processes"
    return drop_empty(
        [
            ("hardware", str(run.get("hardware", ""))),
            ("processes", processes if strategy.get("processes", 1) > 1 else ""),
            ("precision", strategy.get("mixed_precision", "no").replace("no", "")),
            ("time", "" if seconds is None else _format_duration(seconds)),
            ("emissions", "" if emissions is None else f"{1000 * emissions:.2f} g CO₂ (CodeCarbon)"),
            ("versions", ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())),
        ]
    )


def drop_empty(rows: Rows) -> Rows:
    """Return the pairs of a name and a text whose text is not empty."""
    return [row for row in rows if row[1]]


def format_mean(values: Sequence[float]) -> str:
    """Format the mean and, of several values, its standard error (sample standard deviation / square root of n)."""
    if not values:
        return ""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return format_number(mean)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{format_number(mean)} ± {format_number(error, like=mean)}"


def format_number(value: Any, like: float | None = None) -> str:
    """Format a score with three decimals up to 1 and one decimal above; what is not a number is "".

    Args:
        value: The score.
        like: Use the decimals of this number instead.
    """
    if not _is_number(value):
        return ""
    return f"{value:.3f}" if abs(value if like is None else like) <= 1 else f"{value:.1f}"


def readable_name(score: str) -> str:
    """Return the name of a score in words: "matched_accuracy" becomes "matched accuracy"."""
    known = {
        "f1": "F1",
        "matthews_correlation": "Matthews correlation",
        "pearson": "Pearson correlation",
        "spearmanr": "Spearman correlation",
    }
    return known.get(score, score.replace("_", " ").replace(" f1", " F1"))


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number that a float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_number, value.values()))


def _are_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_mapping, value))


# The keys of a run whose kind matters: the check, and the rule.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "dataset": (_is_mapping, "an object"),
    "dataset.id": (_is_text, "text"),
    "dataset.name": (_is_text, "text"),
    "dataset.rows": (_are_numbers, "an object of numbers"),
    "epochs": (
        lambda value: _are_mappings(value) and all(_is_number(row.get("epoch", 0)) for row in value),
        "a list of objects, each with a number as epoch",
    ),
    "best_epoch": (_is_number, "a number"),
    "chosen_by": (_is_text, "text"),
    "test": (_is_mapping, "an object"),
    "references": (
        lambda value: _are_mappings(value) and all(_is_mapping(item.get("scores", {})) for item in value),
        "a list of objects, each with an object as scores",
    ),
    "total_parameters": (lambda value: _is_number(value) and value > 0, "a positive number"),
    "seconds": (_is_number, "a number"),
    "emissions": (_is_number, "a number"),
    "strategy": (_is_mapping, "an object"),
    "strategy.processes": (_is_number, "a number"),
    "strategy.mixed_precision": (_is_text, "text"),
    "versions": (_is_mapping, "an object"),
    "arguments": (_is_mapping, "an object"),
    "defaults": (_is_mapping, "an object"),
    "command": (_is_text, "text"),
}


def _check_kinds(run: TrainingRun, source: str) -> None:
    for name, (is_valid, rule) in _KINDS.items():
        outer, _, inner = name.rpartition(".")
        fields = run.get(outer, {}) if outer else run
        if inner in fields and not is_valid(fields[inner]):
            raise AdapterError(
                f"{source}: {name} must be {rule}, as the recipes write it; got {shortened(repr(fields[inner]))}. "
                "Correct it, or leave it out."
            )


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{format_number(float(seconds))} s"


def _drop_none(value: Any) -> Any:
    """Remove None at any depth, so that every key has a value."""
    if isinstance(value, Mapping):
        return {key: _drop_none(item) for key, item in value.items() if item is not None}
    return [_drop_none(item) for item in value if item is not None] if isinstance(value, list) else value


def _read_json(path: Path) -> TrainingRun:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(
            f"{path} must be a results.json that a recipe has written: {shortened(str(error))}. Check the path."
        ) from error
    if not isinstance(run, dict):
        raise AdapterError(f"{path} must hold one JSON object, got {type(run).__name__}.")
    return run
