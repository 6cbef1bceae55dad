"""Reads the results that training runs have written and turns them into the tables of a card.

A run is a mapping, usually the contents of its results.json, with the keys task, model, seed,
dataset (id, name, config, split, revision, language, rows), epochs (a list with epoch, step and
scores), best_epoch, chosen_by, metrics, test, intervals (by split and score: low, high, right,
rows), baseline (method, scores, intervals), per_class (split, scores), trainable_parameters,
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
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from peft.utils import SAFETENSORS_WEIGHTS_NAME

from ..errors import AdapterError
from .markdown import Markdown, code


TrainingRun = Mapping[str, Any]
Results = str | os.PathLike[str] | TrainingRun | Sequence[str | os.PathLike[str] | TrainingRun]
# Lines of cells; the headings come first. A line of two cells may also be a fact: name and text.
Table = Sequence[Sequence[str]]

RESULTS_FILE = "results.json"

# What the Trainer and the recipes report in addition to the scores.
_NOT_SCORES = (
    *("epoch", "step", "seconds", "runtime", "samples_per_second", "steps_per_second"),
    "model_preparation_time",
)
_HYPERPARAMETERS = (
    *("learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "max_length", "warmup_steps", "lr_scheduler_type", "optim"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("label_smoothing_factor", "train_sampling_strategy", "dropout", "init_std", "train_pooler"),
    *("class_weights", "base_dtype", "bf16", "fp16", "seed"),
)
_LONGEST_LOG = 30
_MOST_CLASSES = 40
_READABLE = {
    "f1": "F1",
    "r2": "R²",
    "matthews_correlation": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearmanr": "Spearman correlation",
}


@dataclass(frozen=True)
class Report:
    """What a card says about the runs of an adapter, one for each seed.

    Attributes:
        name: The name of the folder of the run that has saved the adapter, or of the adapter's own.
        dataset: The data set.
        scores: The scores, each the mean of the seeds.
        total_parameters: The parameters of the model with its adapter, if they are known.
        figures: The PNG files of the adapter and of the run.
        page: Values for the template of the page.
    """

    name: str
    dataset: Mapping[str, Any]
    scores: Mapping[str, float]
    total_parameters: int | None
    figures: Sequence[Path]
    page: Mapping[str, Any]


def read_report(folder: Path, results: Results | None = None) -> Report:
    """Describe the runs of the adapter in a folder, by default the run that has saved it.

    Raises:
        AdapterError: The results are of another adapter, or of several tasks.
    """
    own_results = find_results(folder)
    figures = sorted(folder.glob("*.png"))
    if own_results is not None and own_results.parent.resolve() != folder.resolve():
        figures += sorted(own_results.parent.glob("*.png"))
    named_after = folder
    if results is None and own_results is not None:
        named_after = own_results.parent
    runs = read_runs(results or own_results) or [{}]
    # The page describes the run that has saved these weights.
    crc32 = zlib.crc32((folder / SAFETENSORS_WEIGHTS_NAME).read_bytes())
    _check_runs(runs, crc32, folder)
    runs.sort(key=lambda run: run.get("adapter_crc32") != crc32)
    return Report(
        name=named_after.resolve().name,
        dataset=runs[0].get("dataset", {}),
        scores={name: statistics.fmean(collect_scores(runs, name)) for name in get_scores(runs[0])},
        total_parameters=runs[0].get("total_parameters"),
        figures=figures,
        page=_page_of_runs(runs),
    )


def _check_runs(runs: Sequence[TrainingRun], crc32: int, folder: Path) -> None:
    """Refuse results whose scores are not this adapter's."""
    checksums = [run.get("adapter_crc32") for run in runs]
    if None not in checksums and crc32 not in checksums:
        raise AdapterError(
            f"The results must be of the run that saved the adapter in {folder}, and of its other "
            "seeds; these are of other weights. Leave the results out to take those beside it."
        )
    tasks = {str(run.get("task")) for run in runs}
    if len(tasks) > 1:
        raise AdapterError(
            "The results must be of one task with several seeds; got those of "
            f"{' and '.join(sorted(tasks))}."
        )


def _page_of_runs(runs: Sequence[TrainingRun]) -> dict[str, Any]:
    """Return what the page says about the runs, as values for its template."""
    run = runs[0]
    dataset = run.get("dataset", {})
    changed, unchanged = hyperparameter_tables(run)
    rows = [f"{split} {count:,}" for split, count in dataset.get("rows", {}).items()]
    main, scores = "", list(get_scores(run))
    if scores:
        # The score by which the epoch was chosen.
        name = run["chosen_by"] if run.get("chosen_by") in scores else scores[0]
        main = f"{readable_name(name)} {format_mean(collect_scores(runs, name))}"
    return {
        "by_class": class_table(run),
        "changed": changed,
        "chosen_by": readable_name(str(run.get("chosen_by", "score"))),
        "data": dataset,
        "log": log_table(run),
        "main": main,
        "rows": rows,
        "run": run,
        "scores": table_of_runs(runs),
        "seeds": [run.get("seed", number) for number, run in enumerate(runs, 1)],
        "test": table_of_scores(run.get("test", {}), run.get("intervals", {}).get("test")),
        "unchanged": unchanged,
    }


def read_runs(results: Results | None) -> list[TrainingRun]:
    """Return the runs of one or several seeds, from files or mappings, without the keys whose value
    is None.

    The recipes write these files. A value of another kind than theirs raises whatever error it
    leads to.
    """
    if results is None:
        return []
    sources = [results] if isinstance(results, (str, os.PathLike, Mapping)) else results
    runs = []
    for source in sources:
        if isinstance(source, Mapping):
            run: Any = source
        else:
            run = json.loads(Path(source).read_text(encoding="utf-8"))
        runs.append(_drop_none(run))
    return runs


def find_results(folder: Path) -> Path | None:
    """Return the `results.json` of the run that has saved the adapter in a folder, in it or above.

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


def get_scores(run: TrainingRun) -> dict[str, float]:
    """Return the scores of the epoch that was kept, and the further metrics; the loss is no score.

    Further metrics are those that the user has asked for with `--metric`.
    """
    epochs = run.get("epochs", [])
    best_epochs = [epoch for epoch in epochs if epoch.get("epoch") == run.get("best_epoch")]
    values = {}
    for name, value in (best_epochs or epochs[-1:] or [{}])[0].items():
        if name not in _NOT_SCORES and not name.endswith("loss"):
            values[name] = value
    values |= run.get("metrics", {})
    return {name: float(value) for name, value in values.items() if _is_number(value)}


def collect_scores(runs: Iterable[TrainingRun], name: str) -> list[float]:
    """Return one score of each run that has it."""
    return [scores[name] for scores in map(get_scores, runs) if name in scores]


def class_table(run: TrainingRun) -> Table:
    """Return a line per class below the headings; empty for none or for very many."""
    classes = run.get("per_class", {}).get("scores", {})
    if not 0 < len(classes) <= _MOST_CLASSES:
        return []
    table = [["class", "precision", "recall", "F1", "examples"]]
    for name, scores in classes.items():
        shares = [f"{scores[score]:.3f}" for score in ("precision", "recall", "f1")]
        table.append([str(name), *shares, f"{scores['support']:,.0f}"])
    return table


def table_of_runs(runs: Sequence[TrainingRun]) -> Table:
    """Return a line per score, with the score of each seed, below the headings; empty without
    scores.
    """
    scores = get_scores(runs[0])
    if len(runs) == 1 or not scores:
        baseline = runs[0].get("baseline", {}).get("scores")
        intervals = runs[0].get("intervals", {}).get("validation")
        return table_of_scores(scores, intervals, baseline)
    seeds = [f"seed {run.get('seed', number)}" for number, run in enumerate(runs, 1)]
    table = [["score", "mean ± standard error", *seeds]]
    for name in scores:
        of_seeds = [format_number(get_scores(run).get(name)) for run in runs]
        table.append([readable_name(name), format_mean(collect_scores(runs, name)), *of_seeds])
    return table


def table_of_scores(
    scores: Mapping[str, Any],
    intervals: Mapping[str, Mapping[str, float]] | None = None,
    baseline: Mapping[str, float] | None = None,
) -> Table:
    """Return a line per score below the headings, with its 95 % interval and the score of a
    baseline, if they are known; empty without scores.
    """
    if not scores:
        return []
    table = [["score", "value"]]
    if intervals:
        table[0].append("95% interval")
    if baseline:
        table[0].append("logistic regression on the frozen encoder")
    for name, value in scores.items():
        line = [readable_name(name), format_number(value)]
        if intervals:
            interval, text = intervals.get(name), ""
            if interval:
                text = f"{interval['low']:.2f} to {interval['high']:.2f}"
            if interval and "right" in interval:  # of an accuracy: "0.79 to 0.98 (28 of 30)"
                text += f" ({interval['right']:,} of {interval['rows']:,})"
            line.append(text)
        if baseline:
            line.append(format_number(baseline.get(name)))
        table.append(line)
    return table


def log_table(run: TrainingRun) -> Table:
    """Return the training log below the headings, with the kept epoch marked. A long log is thinned
    out.
    """
    epochs, best = run.get("epochs", []), run.get("best_epoch")
    if not epochs:
        return []
    columns = dict.fromkeys(chain.from_iterable(epochs))
    names = [name for name in columns if name not in _NOT_SCORES]
    table = [["epoch", "step", *map(readable_name, names), ""]]
    step = math.ceil(len(epochs) / _LONGEST_LOG)
    for number, epoch in enumerate(epochs):
        is_best = best is not None and epoch.get("epoch") == best
        if number % step == 0 or number == len(epochs) - 1 or is_best:
            values = [format_number(epoch.get(name)) for name in names]
            mark = Markdown("**kept**") if is_best else ""
            start = [f"{epoch.get('epoch', math.nan):.3g}", str(epoch.get("step", ""))]
            table.append([*start, *values, mark])
    return table


def hyperparameter_tables(run: TrainingRun) -> tuple[Table, Table]:
    """Return the hyperparameters that differ from their defaults (name, value, default), and the
    remaining ones (name, value).
    """
    arguments, defaults = dict(run.get("arguments", {})), run.get("defaults", {})
    if arguments.get("max_steps", -1) > 0:  # which end the training, whatever epochs are named
        arguments.pop("num_train_epochs", None)
    changed, unchanged = [], []
    for name in _HYPERPARAMETERS:
        if name not in arguments:
            continue
        line = [code(name), _plain(arguments[name])]
        if arguments[name] == defaults.get(name):
            unchanged.append(line)
        else:
            changed.append([*line, _plain(defaults.get(name, ""))])
    return changed, unchanged


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
    """Format a score: three decimals up to 1, one above; "" if it is not a number.

    With `like`, this other number decides how many decimals there are.
    """
    if not _is_number(value):
        return ""
    if like is None:
        like = value
    if abs(like) <= 1:
        return f"{value:.3f}"
    return f"{value:.1f}"


def readable_name(score: str) -> str:
    """Return the name of a score in words: "matched_accuracy" becomes "matched accuracy"."""
    return _READABLE.get(score, score.replace("_", " ").replace(" f1", " F1"))


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number of a size that a page can show."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -1e300 < value < 1e300


def _drop_none(value: Any) -> Any:
    """Remove None at any depth, so that every key has a value."""
    if isinstance(value, Mapping):
        return {key: _drop_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_drop_none(inner) for inner in value if inner is not None]
    return value
