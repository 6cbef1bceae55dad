"""What a card says of an adapter and of its training, as sentences and rows of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..config import HoulsbyConfig
from .card_results import Run, mean_and_error, number, scores, words


Rows = Sequence[tuple[str, ...]]
_MOST_LABELS = 20
_HYPERPARAMETERS = (
    "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "max_length", "warmup_steps", "lr_scheduler_type", "optim", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "max_grad_norm", "label_smoothing_factor", "train_sampling_strategy", "dropout", "init_std",
    "base_dtype", "bf16", "fp16", "seed",
)  # fmt: skip


def parameters(sizes: Mapping[str, int]) -> dict[str, int]:
    """How many parameters of each kind a file holds.

    Args:
        sizes: the number of parameters by the names of the tensors in the file.
    """
    parts = {"bottlenecks": 0, "layer norms": 0, "head": 0}
    for key, size in sizes.items():
        kind = "bottlenecks" if ".houlsby_adapter." in key else "layer norms" if ".houlsby_norm." in key else "head"
        parts[kind] += size
    return {kind: size for kind, size in parts.items() if size}


def adapter_rows(config: HoulsbyConfig, sizes: Mapping[str, int], file_bytes: int, total: int | None) -> Rows:
    """Size, sharing, places, norms, classes and parameters of an adapter."""
    parts = parameters(sizes)
    trained = sum(parts.values())
    bottlenecks = sum(key.endswith(".houlsby_adapter.down_proj.weight") for key in sizes)
    sharing = {0: "one for each position", 1: "one for each layer"}
    norms = {True: "those of the adapted layers are trained", False: "frozen", "all": "all of the model's are trained"}
    shared = sharing.get(config.share_layers, f"one for each {config.share_layers} consecutive layers")
    rows = [
        ("bottleneck size `r`", str(config.r) + (f", but {config.rank_pattern}" if config.rank_pattern else "")),
        ("non-linearity", config.activation),
        ("bottlenecks", f"{bottlenecks}: {shared}"),
        ("positions", _joined(config.target_modules or [name.replace("_", "-") for name in config.positions])),
        ("layers", "all" if config.layers_to_transform is None else _joined(config.layers_to_transform)),
        ("layer norms", norms[config.train_layer_norm]),
        ("trained parameters", f"{trained:,} ({', '.join(f'{kind} {size:,}' for kind, size in parts.items())})"),
        ("share of the model", f"{trained / total:.2%} of {total:,} parameters" if total else ""),
        ("file", f"{file_bytes / 1e6:.1f} MB"),
        ("classes", _joined(list((config.id2label or {}).values()))),
    ]
    return _filled(rows)


def base_rows(config: HoulsbyConfig, base_model: str) -> Rows:
    """The base model: its name, its revision, and what tells it from others."""
    facts = (config.base_fingerprint or {}).get("config", {})
    samples = [values for values in (config.base_fingerprint or {}).get("weights", []) if values]
    return _filled(
        [
            ("name", f"[{base_model}](https://huggingface.co/{base_model})"),
            ("revision", f"`{config.revision}`" if config.revision else ""),
            ("configuration", ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items())),
            (
                "first weights of the fingerprint",
                ", ".join(f"{value:g}" for value in samples[0][:4]) if samples else "",
            ),
        ]
    )


def data_rows(run: Run) -> Rows:
    """The data that a run was trained and evaluated on."""
    dataset = run.get("dataset", {})
    name, link = dataset.get("name"), dataset.get("id")
    rows = [
        ("name", f"[{name or link}](https://huggingface.co/datasets/{link})" if link else str(name or "")),
        *((key, str(dataset.get(key, ""))) for key in ("config", "split", "revision", "language")),
        *((f"{split} examples", f"{count:,}") for split, count in dataset.get("rows", {}).items()),
    ]
    return _filled(rows)


def hyperparameter_rows(run: Run) -> tuple[Rows, Rows]:
    """Name, value and default of those that differ from the default; name and value of those that do not.

    The default is the recipe's where the run records it, else that of transformers or of `HoulsbyConfig`.
    """
    from transformers import TrainingArguments  # half a second of imports that only cards need

    arguments = run.get("arguments", {})
    defaults = {item.name: item.default for cls in (TrainingArguments, HoulsbyConfig) for item in fields(cls)}
    defaults |= run.get("defaults", {})
    known = [name for name in _HYPERPARAMETERS if name in arguments]
    changed = [name for name in known if arguments[name] != defaults.get(name)]
    return (
        [(f"`{name}`", _value(arguments[name]), _value(defaults.get(name, ""))) for name in changed],
        [(f"`{name}`", _value(arguments[name])) for name in known if name not in changed],
    )


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def environment_rows(run: Run) -> Rows:
    """Versions, hardware, time and emissions of a run."""
    seconds, emissions = run.get("seconds"), run.get("emissions")
    versions, spread = run.get("versions", {}), run.get("strategy", {})
    processes = f"{spread.get('type', '')} on {spread.get('processes')} processes"
    rows = [
        ("hardware", str(run.get("hardware", ""))),
        ("processes", processes if spread.get("processes", 1) > 1 else ""),
        ("precision", spread.get("mixed_precision", "no").replace("no", "")),
        ("time", _duration(seconds) if seconds is not None else ""),
        ("emissions", f"{1000 * emissions:.2f} g CO₂ (CodeCarbon)" if emissions is not None else ""),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    return _filled(rows)


def limits(config: HoulsbyConfig, runs: Sequence[Run]) -> list[str]:
    """What the numbers do not show, as far as it follows from how they were measured."""
    if not runs:
        return []
    run = runs[0]
    dataset, arguments = run.get("dataset", {}), run.get("arguments", {})
    found = []
    if run.get("best_epoch") is not None:
        by = words(str(run.get("chosen_by"))) if run.get("chosen_by") else "the score"
        found.append(
            f"The epoch was chosen by its {by} on the data of the results above, which are thus a little too good."
        )
    if len(runs) == 1 and scores(run):
        found.append("There is one run: how much the scores vary with the seed is not known.")
    if dataset.get("language"):
        found.append(f"It was trained and measured on one data set, in the language {dataset['language']!r}.")
    if arguments.get("max_length"):
        found.append(f"Texts were cut to {arguments['max_length']} tokens in training and evaluation.")
    if len(config.id2label or {}) > 1:
        found.append("It always chooses one of its classes, also for texts that belong to none.")
    return found


def summary(config: HoulsbyConfig, sizes: Mapping[str, int], runs: Sequence[Run]) -> str:
    """What it was trained on and for, how large it is and how good, to follow "an adapter for ..."."""
    run: Run = runs[0] if runs else {}
    dataset, total, trained = run.get("dataset", {}), run.get("total_parameters"), sum(sizes.values())
    labels = list((config.id2label or {}).values())
    main = next((name for name in scores(run) if name == run.get("chosen_by")), next(iter(scores(run)), None))
    parts = [
        f"trained on {dataset['name']}" if "name" in dataset else "",
        f"to tell {', '.join(labels[:-1])} and {labels[-1]} apart" if 1 < len(labels) <= 6 else "",
        f"with {trained / total:.1%} of the model's parameters" if total else f"with {trained:,} parameters",
    ]
    text = " ".join(part for part in parts if part)
    if main is None:
        return text
    return f"{text}: {words(main)} {mean_and_error([scores(run)[main] for run in runs if main in scores(run)])}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{number(float(seconds))} s"


def _joined(value: Any) -> str:
    items = value if isinstance(value, list) else [value]
    more = f" and {len(items) - _MOST_LABELS} more" if len(items) > _MOST_LABELS else ""
    return ", ".join(map(str, items[:_MOST_LABELS])) + more


def _filled(rows: Rows) -> Rows:
    return [row for row in rows if row[1]]
