"""Reads the results that training runs have written and turns them into the tables of a card.

A run is a mapping, usually the contents of its results.json, with the keys task, model, seed,
dataset (id, name, config, split, revision, language, rows), epochs (a list with epoch, step and
scores), best_epoch, chosen_by, test, per_class (split, scores), trainable_parameters,
total_parameters, seconds, hardware, strategy, versions, arguments, defaults and command. Every key
may be missing.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peft.utils import SAFETENSORS_WEIGHTS_NAME

from .markdown import Markdown, code


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
_MOST_CLASSES = 40


def read_runs(results: Results | None) -> list[TrainingRun]:
    """Return the runs of one or several seeds, from files or mappings, without the keys whose value
    is None.

    The recipes write these files; a value of another kind than theirs raises whatever error it
    leads to.
    """
    if results is None:
        return []
    items = [results] if isinstance(results, (str, os.PathLike, Mapping)) else results
    return [
        _drop_none(
            item
            if isinstance(item, Mapping)
            else json.loads(Path(item).read_text(encoding="utf-8"))
        )
        for item in items
    ]


def find_results(folder: Path) -> Path | None:
    """Return the `results.json` of the recipe's run that has saved the adapter in a folder, in it
    or above it.

    It counts only if it states the CRC-32 of these very weights, so that no adapter gets the scores
    of another one.
    """
    weights = folder.resolve() / SAFETENSORS_WEIGHTS_NAME
    for path in (weights.with_name(RESULTS_FILE), weights.parent.with_name(RESULTS_FILE)):
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or something else
            continue
        if isinstance(run, dict) and run.get("adapter_crc32") == zlib.crc32(weights.read_bytes()):
            return path
    return None


def find_figures(folder: Path) -> list[Path]:
    """Return the PNG files in an adapter's folder, and in that of the run that has saved it."""
    results = find_results(folder)
    folders = {path.resolve(): path for path in (folder, results.parent if results else folder)}
    return [path for inner in folders.values() for path in sorted(inner.glob("*.png"))]


def get_scores(run: TrainingRun) -> dict[str, float]:
    """Return the scores of the epoch that was kept, or of the last one if none was chosen; the loss
    is no score.
    """
    log = run.get("epochs", [])
    kept = next(
        (row for row in log if row.get("epoch") == run.get("best_epoch")), log[-1] if log else {}
    )
    return {
        name: float(value)
        for name, value in kept.items()
        if name not in _NOT_SCORES and not name.endswith("loss") and _is_number(value)
    }


def class_table(run: TrainingRun) -> Rows:
    """Return a row per class below a row of headings; empty for none or for very many."""
    classes = run.get("per_class", {}).get("scores", {})
    if not 0 < len(classes) <= _MOST_CLASSES:
        return []
    rows = [
        [
            str(name),
            *(f"{row[score]:.3f}" for score in ("precision", "recall", "f1")),
            f"{row['support']:,.0f}",
        ]
        for name, row in classes.items()
    ]
    return [["class", "precision", "recall", "F1", "examples"], *rows]


def collect_scores(runs: Iterable[TrainingRun], name: str) -> list[float]:
    """Return one score of each run that has it."""
    return [scores[name] for scores in map(get_scores, runs) if name in scores]


def score_table(runs: Sequence[TrainingRun]) -> Rows:
    """Return a row per score, with that of each seed, below a row of headings; empty without
    scores.
    """
    if not runs or not get_scores(runs[0]):
        return []
    several = len(runs) > 1
    heading = ["score", "mean ± standard error" if several else "value"]
    heading += (
        [f"seed {run.get('seed', number)}" for number, run in enumerate(runs, 1)] if several else []
    )
    table = [heading]
    for name in get_scores(runs[0]):
        of_seeds = [format_number(get_scores(run).get(name)) for run in runs] if several else []
        table.append([readable_name(name), format_mean(collect_scores(runs, name)), *of_seeds])
    return table


def table_of_test_scores(run: TrainingRun) -> Rows:
    """Return the test scores of a run below a row of headings; empty if there are none."""
    test = run.get("test", {}).items()
    return (
        [["score", "value"], *([readable_name(name), format_number(value)] for name, value in test)]
        if test
        else []
    )


def log_table(run: TrainingRun) -> Rows:
    """Return the training log below a row of headings, a long one thinned out, with the kept epoch
    marked.
    """
    log, best = run.get("epochs", []), run.get("best_epoch")
    step = max(1, math.ceil(len(log) / _LONGEST_LOG))
    shown = [
        row
        for i, row in enumerate(log)
        if i % step == 0 or i == len(log) - 1 or row.get("epoch") == best
    ]
    names = [
        name
        for name in dict.fromkeys(name for row in log for name in row)
        if name not in _NOT_SCORES
    ]
    table = [["epoch", "step", *map(readable_name, names), ""]]
    for row in shown:
        mark = Markdown("**kept**") if best is not None and row.get("epoch") == best else ""
        values = [format_number(row.get(name)) for name in names]
        table.append([f"{row.get('epoch', math.nan):.3g}", str(row.get("step", "")), *values, mark])
    return table if shown else []


def hyperparameter_tables(run: TrainingRun) -> tuple[Rows, Rows]:
    """Return the hyperparameters that differ from their defaults (name, value, default), and the
    others.
    """
    arguments, defaults = run.get("arguments", {}), run.get("defaults", {})
    known = [name for name in _HYPERPARAMETERS if name in arguments]
    changed = [name for name in known if arguments[name] != defaults.get(name)]
    rows = {
        name: [code(name), *map(_plain, (arguments[name], defaults.get(name, "")))]
        for name in known
    }
    return [rows[name] for name in changed], [
        rows[name][:2] for name in known if name not in changed
    ]


def format_mean(values: Sequence[float]) -> str:
    """Format the mean and, of several values, its standard error (sample standard deviation /
    square root of n).
    """
    if not values:
        return ""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return format_number(mean)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{format_number(mean)} ± {format_number(error, like=mean)}"


def format_number(value: Any, like: float | None = None) -> str:
    """Format a score with three decimals up to 1 (or if `like` is) and one above; what is not a
    number is "".
    """
    if not _is_number(value):
        return ""
    return f"{value:.3f}" if abs(value if like is None else like) <= 1 else f"{value:.1f}"


def readable_name(score: str) -> str:
    """Return the name of a score in words: "matched_accuracy" becomes "matched accuracy"."""
    known = {"f1": "F1", "r2": "R²", "matthews_correlation": "Matthews correlation"}
    known |= {"pearson": "Pearson correlation", "spearmanr": "Spearman correlation"}
    return known.get(score, score.replace("_", " ").replace(" f1", " F1"))


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300
    )


def _drop_none(value: Any) -> Any:
    """Remove None at any depth, so that every key has a value."""
    if isinstance(value, Mapping):
        return {key: _drop_none(item) for key, item in value.items() if item is not None}
    return (
        [_drop_none(item) for item in value if item is not None]
        if isinstance(value, list)
        else value
    )
